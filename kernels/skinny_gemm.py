"""Matrix product for a few rows: the linear layers of decoding.

With at most 16 rows the weights are the whole cost, so each is read once, 16 bytes a thread, and
multiplied in registers; the lanes of a warp share the dot products of a weight row and add them up
at the end. No shared memory, no tensor core, and float32 stays float32.
"""

import tilelang.language as T
from torch import Tensor

from minifused.kernels.epilogue import activate
from minifused.kernels.gemm import launch_linear
from minifused.kernels.schedule import SkinnySchedule, skinny_schedule
from minifused.kernels.tile import Tile


def skinny_gemm_kernel(
    tile: Tile,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    activation: str | None,
    has_bias: bool,
    has_residual: bool,
    schedule: SkinnySchedule,
):
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n) for small dynamic m.

    A, W and bias have `dtype`, R and C `out_dtype`; the sum is float32 throughout.
    """
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    m = T.dynamic("m")
    grid = (T.ceildiv(n, block_n), T.ceildiv(m, block_m))

    @T.prim_func
    def skinny_gemm(
        A: T.Tensor((m, k), dtype),
        W: T.Tensor((n, k), dtype),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((m, n), out_dtype),
        C: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(*grid, threads=schedule.num_threads) as (bx, by):
            partial = tile.fragment((block_m, block_n, block_k), "float32")
            total = tile.fragment((block_m, block_n), "float32")
            T.clear(partial)
            for ko in T.serial(T.ceildiv(k, block_k)):
                for i, j, kk in tile.parallel(block_m, block_n, block_k):
                    partial[i, j, kk] += T.cast(
                        A[by * block_m + i, ko * block_k + kk], "float32"
                    ) * T.cast(W[bx * block_n + j, ko * block_k + kk], "float32")
            T.reduce_sum(partial, total, dim=2)
            for i, j in tile.parallel(block_m, block_n):
                row, col = by * block_m + i, bx * block_n + j
                if row < m and col < n:
                    if has_bias:
                        total[i, j] += T.cast(bias[col], "float32")
                    if activation is not None:
                        total[i, j] = activate(tile, activation, total[i, j])
                    if has_residual:
                        total[i, j] += T.cast(R[row, col], "float32")
                    C[row, col] = T.cast(total[i, j], out_dtype)

    return skinny_gemm


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Write act(x (m, k) @ weight (n, k)^T + bias) + residual to out (m, n), all contiguous."""
    launch_linear(skinny_gemm_kernel, skinny_schedule, x, weight, bias, activation, residual, out)
