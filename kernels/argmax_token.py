"""The first of the largest columns of a row, by one block."""

import tilelang.language as T

from minifused.kernels.draw_token import NUM_THREADS, WARPS


@T.macro
def _keep_better(top, token, other, other_token):
    """Of two maxima with their columns the larger, of equal ones the first, or a NaN."""
    if T.isnan(other) or other > top[0] or (other == top[0] and other_token < token[0]):
        top[0] = other
        token[0] = other_token


@T.macro
def _best_of_block(tx, top, token):
    """The best of all threads, to all of them."""
    values = T.alloc_shared((WARPS,), "float32")
    columns = T.alloc_shared((WARPS,), "int32")
    for z in T.unroll(5):
        _keep_better(top, token, T.shfl_xor(top[0], 1 << z), T.shfl_xor(token[0], 1 << z))
    if tx % 32 == 0:
        values[tx // 32] = top[0]
        columns[tx // 32] = token[0]
    T.sync_threads()
    for i in T.serial(WARPS):
        _keep_better(top, token, values[i], columns[i])


@T.macro
def _best_part(K, row, tx, top, part):
    """top and part = the largest of the peaks in K (b, parts, 2), and the first part that has it.

    A part whose sum is a NaN has one of its own, or +inf, and counts as a NaN.
    """
    parts = int(K.shape[1])
    count = -(-parts // NUM_THREADS)
    peak = T.alloc_local((count, 2), "float32")
    for i in T.unroll(count):
        for e in T.vectorized(2):
            peak[i, e] = K[row, T.min(i * NUM_THREADS + tx, parts - 1), e]
    for i in T.unroll(count):
        at = T.min(i * NUM_THREADS + tx, parts - 1)
        peak[i, 0] = T.if_then_else(T.isnan(peak[i, 1]), peak[i, 1], peak[i, 0])
        if i == 0:
            top[0] = peak[0, 0]
            part[0] = at
        else:
            _keep_better(top, part, peak[i, 0], at)
    _best_of_block(tx, top, part)


def argmax_macro(valid: int, part_width: int | None = None):
    """A macro that takes the first of the largest of the first `valid` columns.

    With `part_width`, the peaks of parts of so many columns say which one to look at.
    """

    @T.macro
    def argmax(P, K, row, tx, token, top):
        """token and top = the first of the largest columns of P[row] and its value, or a NaN's."""
        if part_width is not None:
            _best_part(K, row, tx, top, token)
            first = token[0] * part_width
            token[0] = T.min(first + T.min(tx, part_width - 1), valid - 1)
            top[0] = P[row, token[0]]
        else:
            count = -(-valid // NUM_THREADS)
            p = T.alloc_local((count,), "float32")
            for i in T.unroll(count):  # all loads are on their way before the first is compared
                p[i] = P[row, T.min(i * NUM_THREADS + tx, valid - 1)]
            top[0] = p[0]
            token[0] = T.min(tx, valid - 1)
            for i in T.unroll(1, count):
                _keep_better(top, token, p[i], T.min(i * NUM_THREADS + tx, valid - 1))
        _best_of_block(tx, top, token)

    return argmax
