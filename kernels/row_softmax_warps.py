"""Softmax of rows of up to 2048 columns on a GPU: a warp has a row in its registers.

Nothing is exchanged but by shuffles, as in layer_norm_warps.py; the formula is that of
row_softmax.py.
"""

import tilelang.language as T

from minifused.kernels.gemv_row import VECTOR, load_lane
from minifused.kernels.layer_norm_warps import STRIDE
from minifused.kernels.row_lanes import softmax_exp
from minifused.kernels.schedule import RowSchedule
from minifused.kernels.tile import Tile


def row_softmax_warps_kernel(
    tile: Tile, n: int, valid: int, dtype: str, out_dtype: str, schedule: RowSchedule
):
    """Build the same as row_softmax_kernel; `num_threads` are those of a block's rows."""
    rows, vectors = schedule.num_threads // 32, -(-n // STRIDE)
    whole, exp = vectors * STRIDE == n, softmax_exp(tile, out_dtype)
    m = T.dynamic("m")

    @T.prim_func
    def row_softmax_warps(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), out_dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=schedule.num_threads) as bx:
            tx = T.get_thread_binding()
            col = tx % 32 * VECTOR
            row = bx * rows + tx // 32
            loaded = T.alloc_local((vectors, VECTOR), dtype)
            x = T.alloc_local((vectors, VECTOR), "float32")
            y = T.alloc_local((VECTOR,), out_dtype)
            maximum = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")  # at last its inverse
            tile.pdl_trigger()
            tile.pdl_sync()
            if row < m:
                load_lane(X, row, col, whole, loaded, 0, vectors, STRIDE)
                maximum[0] = -T.infinity("float32")
                total[0] = 0.0
                for v in T.unroll(vectors):
                    for e in T.unroll(VECTOR):
                        inside = (v + 1) * STRIDE <= valid or col + v * STRIDE + e < valid
                        value = T.cast(loaded[v, e], "float32")
                        x[v, e] = T.if_then_else(inside, value, -T.infinity("float32"))
                        maximum[0] = T.max(maximum[0], x[v, e])
                maximum[0] = T.warp_reduce_max(maximum[0])
                for v in T.unroll(vectors):
                    for e in T.unroll(VECTOR):
                        x[v, e] = exp(x[v, e] - maximum[0])
                        total[0] += x[v, e]
                total[0] = 1.0 / T.warp_reduce_sum(total[0])
                for v in T.unroll(vectors):
                    for e in T.unroll(VECTOR):
                        inside = (v + 1) * STRIDE <= valid or col + v * STRIDE + e < valid
                        y[e] = T.cast(T.if_then_else(inside, x[v, e] * total[0], 0.0), out_dtype)
                    if (v + 1) * STRIDE <= n or col + v * STRIDE < n:
                        for e in T.vectorized(VECTOR):
                            Y[row, col + v * STRIDE + e] = y[e]

    return row_softmax_warps
