"""What gemv makes of its row and its weights once it has them, as macros of a warp or a block."""

import tilelang.language as T

from minifused.kernels.epilogue import activate
from minifused.kernels.gemv_row import VECTOR


@T.macro
def dot(w, x, gain, acc, moments):
    """acc (rows) = the products of x (vectors, VECTOR) and w (rows * vectors, VECTOR).

    With a gain (vectors, VECTOR), those of x * gain, and moments = the sums of x and of x * x.
    """
    rows, vectors = acc.shape[0], x.shape[0]
    value = T.alloc_local((1,), "float32")
    T.clear(acc)
    T.clear(moments)
    for v in T.unroll(vectors):
        for e in T.unroll(VECTOR):
            value[0] = T.cast(x[v, e], "float32")
            if gain is not None:
                moments[0] += value[0]
                moments[1] += value[0] * value[0]
                value[0] *= T.cast(gain[v, e], "float32")
            for r in T.unroll(rows):
                acc[r] += T.cast(w[r * vectors + v, e], "float32") * value[0]
    for r in T.unroll(rows):
        acc[r] = T.warp_reduce_sum(acc[r])
    if gain is not None:
        for j in T.unroll(2):
            moments[j] = T.warp_reduce_sum(moments[j])


@T.macro
def gather_moments(moments, parts, part, tx):
    """parts (split_k, 2), shared memory, = those of each warp that has some columns of the row.

    Seen by others behind the barrier of `gather`.
    """
    if parts.shape[0] > 1 and tx == part * 32:
        for j in T.unroll(2):
            parts[part, j] = moments[j]


@T.macro
def gather(acc, dots, part, group, lane, tx, total):
    """total = what belongs to the warp's row `lane`, or to the block's row tx if warps split rows.

    dots (split_k, block_n) is shared memory.
    """
    if dots.shape[0] == 1:
        total[0] = acc[0]
        for r in T.unroll(1, acc.shape[0]):
            total[0] = T.if_then_else(lane == r, acc[r], total[0])
    else:
        if lane == 0:
            for r in T.unroll(acc.shape[0]):
                dots[part, group + r] = acc[r]
        T.sync_threads()
        if tx < dots.shape[1]:
            total[0] = 0.0
            for p in T.unroll(dots.shape[0]):
                total[0] += dots[p, tx]


@T.macro
def normalise(total, moments, parts, affine, k, eps):
    """Make total = w . (x * gain) that of the layer norm of x (k); affine are the row's sums."""
    if parts.shape[0] > 1:
        T.clear(moments)
        for p in T.unroll(parts.shape[0]):
            for j in T.unroll(2):
                moments[j] += parts[p, j]
    mean = moments[0] / k
    rstd = T.rsqrt(T.max(moments[1] / k - mean * mean, 0.0) + eps)
    total[0] = rstd * (total[0] - mean * affine[0]) + affine[1]


@T.macro
def finish(tile, total, row, activation, has_bias, bias, has_residual, residual, Y):
    """Y[row] = total = act(total + bias) + residual, without what there is not."""
    if has_bias:
        total[0] += T.cast(bias[0], "float32")
    if activation is not None:
        total[0] = activate(tile, activation, total[0])
    if has_residual:
        total[0] += T.cast(residual[0], "float32")
    Y[0, row] = T.cast(total[0], Y.dtype)


@T.macro
def keep(value, row, position, K_cache, V_cache):
    """Row `row` of a packed query, key and value also goes to its cache, if that has `position`."""
    capacity, width = K_cache.shape[1], K_cache.shape[2]
    if position >= 0 and position < capacity:
        if row >= 2 * width:
            V_cache[0, position, row - 2 * width] = T.cast(value, V_cache.dtype)
        elif row >= width:
            K_cache[0, position, row - width] = T.cast(value, K_cache.dtype)
