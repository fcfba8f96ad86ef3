"""Layer normalisation of rows of up to 2048 columns on a GPU: a warp has a row in its registers.

Nothing is exchanged but by shuffles, so that a block's warps wait for no other's. The formula is
that of layer_norm.py.
"""

import tilelang.language as T

from minifused.kernels.gemv_row import VECTOR, load_lane
from minifused.kernels.schedule import RowSchedule, row_schedule
from minifused.kernels.tile import Tile

MAX_COLUMNS = 2048  # 64 a lane
STRIDE = 32 * VECTOR  # columns that a warp reads at a time


def fits_a_warp(n: int) -> bool:
    """Whether rows are so short, and all begin where a vector does."""
    return n % VECTOR == 0 and n <= MAX_COLUMNS


def takes_row(tile: Tile, n: int) -> bool:
    return tile.is_cuda and fits_a_warp(n)


def rows_schedule(tile: Tile, n: int, limit: int) -> RowSchedule:
    """`row_schedule`, but with four rows in a block where a warp has one."""
    rule = row_schedule(tile, n, limit)
    return RowSchedule(rule.block_n, 128) if takes_row(tile, n) else rule


@T.macro
def centre(x, col, n, sums):
    """x (vectors, VECTOR) -= the row's mean; sums = what that left of it, and of the squares.

    Columns from n on stay 0.
    """
    vectors = x.shape[0]
    T.clear(sums)
    for v in T.unroll(vectors):
        for e in T.unroll(VECTOR):
            sums[0] += x[v, e]
    sums[0] = T.warp_reduce_sum(sums[0]) / n
    mean = T.alloc_local((1,), "float32")
    mean[0] = sums[0]
    T.clear(sums)
    for v in T.unroll(vectors):
        for e in T.unroll(VECTOR):
            inside = (v + 1) * STRIDE <= n or col + v * STRIDE < n
            x[v, e] = (
                x[v, e] - mean[0]
                if inside is True
                else T.if_then_else(inside, x[v, e] - mean[0], 0.0)
            )
            sums[0] += x[v, e]
            sums[1] += x[v, e] * x[v, e]
    for i in T.unroll(2):
        sums[i] = T.warp_reduce_sum(sums[i]) / n


def layer_norm_warps_kernel(
    tile: Tile, n: int, eps: float, dtype: str, out_dtype: str, schedule: RowSchedule
):
    """Build the same as layer_norm_kernel; `num_threads` are those of a block's rows."""
    rows, vectors = schedule.num_threads // 32, -(-n // STRIDE)
    whole = vectors * STRIDE == n
    m = T.dynamic("m")

    @T.prim_func
    def layer_norm_warps(
        X: T.Tensor((m, n), dtype),
        weight: T.Tensor((n,), out_dtype),
        bias: T.Tensor((n,), out_dtype),
        Y: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=schedule.num_threads) as bx:
            tx = T.get_thread_binding()
            col = tx % 32 * VECTOR
            row = bx * rows + tx // 32
            loaded = T.alloc_local((vectors, VECTOR), dtype)
            gain = T.alloc_local((vectors, VECTOR), out_dtype)
            shift = T.alloc_local((vectors, VECTOR), out_dtype)
            x = T.alloc_local((vectors, VECTOR), "float32")
            y = T.alloc_local((VECTOR,), out_dtype)
            sums = T.alloc_local((2,), "float32")
            tile.pdl_trigger()
            tile.pdl_sync()
            if row < m:
                load_lane(X, row, col, whole, loaded, 0, vectors, STRIDE)
                load_lane(T.reshape(weight, (1, n)), 0, col, whole, gain, 0, vectors, STRIDE)
                load_lane(T.reshape(bias, (1, n)), 0, col, whole, shift, 0, vectors, STRIDE)
                for v in T.unroll(vectors):
                    for e in T.unroll(VECTOR):
                        x[v, e] = T.cast(loaded[v, e], "float32")
                centre(x, col, n, sums)
                rstd = 1.0 / T.sqrt(T.max(sums[1] - sums[0] * sums[0], 0.0) + eps)
                for v in T.unroll(vectors):
                    for e in T.unroll(VECTOR):
                        scaled = (x[v, e] - sums[0]) * rstd * T.cast(gain[v, e], "float32")
                        y[e] = T.cast(scaled + T.cast(shift[v, e], "float32"), out_dtype)
                    if (v + 1) * STRIDE <= n or col + v * STRIDE < n:
                        for e in T.vectorized(VECTOR):
                            Y[row, col + v * STRIDE + e] = y[e]

    return layer_norm_warps
