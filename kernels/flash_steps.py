"""What flash_attention_sm90 does with a block of scores."""

import tilelang.language as T

LANES = 8  # columns of the partial row sums: two of a thread's in each tile of a tensor core


@T.macro
def mask(s, key0, first_hidden, step):
    """Hide the keys of row i from first_hidden + step * i on; s (rows, keys) begins at key0."""
    for i, j in T.Parallel(s.shape[0], s.shape[1]):
        visible = key0 + j < first_hidden + step * i
        s[i, j] = T.if_then_else(visible, s[i, j], -T.infinity("float32"))


@T.macro
def row_maxima(s, m, rescale):
    """Move the running maxima m (rows) on; rescale is what they were."""
    T.copy(m, rescale)
    T.reduce_max(s, m, dim=1, clear=False)


@T.macro
def weigh(s, m, l, rescale, shift, scale_log2):
    """Turn scores s (rows, keys) into weights exp2((s - m) * scale_log2).

    rescale turns from the former maxima into what all earlier weights shrink by. l (rows, LANES)
    are sums that each thread keeps to itself, added up once at the end.
    """
    rows, keys = int(s.shape[0]), int(s.shape[1])
    for i in T.Parallel(rows):
        # A row without a visible key so far: shift by 0, since -inf - -inf is NaN.
        shift[i] = T.if_then_else(m[i] == -T.infinity("float32"), 0.0, m[i] * scale_log2)
        rescale[i] = T.exp2(rescale[i] * scale_log2 - shift[i])
    # One FFMA an element, unlike in online_softmax. What rounding made of shift, half an ulp, is
    # common to the weights of a row and its sum, and so cancels, but for 2^-24 of the exponent
    # where the maximum moves: at 1000 that is 4e-5, and a weight of 16 bits is rounded by 5e-4.
    for i, j in T.Parallel(rows, keys):
        s[i, j] = T.exp2(s[i, j] * scale_log2 - shift[i])
    for i, j in T.Parallel(rows, LANES):
        l[i, j] *= rescale[i]
    for part in T.unroll(keys // LANES):
        for i, j in T.Parallel(rows, LANES):
            l[i, j] += s[i, part * LANES + j]


@T.macro
def scale_rows(o, factor):
    for i, j in T.Parallel(o.shape[0], o.shape[1]):
        o[i, j] *= factor[i]


@T.macro
def sum_rows(l, total):
    T.reduce_sum(l, total, dim=1)


@T.macro
def divide(o, total, inverse, rows):
    """o / total, of the first `rows` rows; 0 in the others and in those that saw no key."""
    for i in T.Parallel(total.shape[0]):
        inverse[i] = 1.0 / total[i]
    for i, j in T.Parallel(o.shape[0], o.shape[1]):
        o[i, j] = T.if_then_else(total[i] > 0 and i < rows, o[i, j] * inverse[i], 0.0)
