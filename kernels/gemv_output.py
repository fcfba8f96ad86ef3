"""What gemv makes of its row and its weights once it has them, as macros of a warp or a block."""

import tilelang.language as T

from minifused.kernels.epilogue import activate
from minifused.kernels.gemv_row import VECTOR


@T.macro
def dot(w, x, acc):
    """acc (rows) = the products of x (vectors, VECTOR) and w (rows * vectors, VECTOR)."""
    rows, vectors = acc.shape[0], x.shape[0]
    T.clear(acc)
    for v in T.unroll(vectors):
        for e in T.unroll(VECTOR):
            for r in T.unroll(rows):
                acc[r] += T.cast(w[r * vectors + v, e], "float32") * T.cast(x[v, e], "float32")
    for r in T.unroll(rows):
        acc[r] = T.warp_reduce_sum(acc[r])


@T.macro
def gather(acc, sums, part, group, lane, tx, total):
    """total = what belongs to the warp's row `lane`, or to the block's row tx if warps split rows.

    sums (split_k, block_n) is shared memory.
    """
    if sums.shape[0] == 1:
        total[0] = acc[0]
        for r in T.unroll(1, acc.shape[0]):
            total[0] = T.if_then_else(lane == r, acc[r], total[0])
    else:
        if lane == 0:
            for r in T.unroll(acc.shape[0]):
                sums[part, group + r] = acc[r]
        T.sync_threads()
        if tx < sums.shape[1]:
            total[0] = 0.0
            for p in T.unroll(sums.shape[0]):
                total[0] += sums[p, tx]


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
