"""Tiled matrix product with a fused epilogue: C = epilogue(A @ W^T).

One main loop: tiles of A and W go from global to shared memory in a software pipeline and meet in
a float32 register fragment, which the epilogue (bias, activation, residual) changes in place
before the only store. Thread blocks are rasterised in panels, so that the tiles in flight share
their operands in L2.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.epilogue import activate
from minifused.kernels.schedule import GemmSchedule, gemm_schedule
from minifused.kernels.tile import Tile


def gemm_kernel(
    tile: Tile,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    activation: str | None,
    has_bias: bool,
    has_residual: bool,
    schedule: GemmSchedule,
):
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n); m is dynamic.

    A, W and bias have `dtype`, R and C `out_dtype`; the sum is float32 throughout. m tiles lie
    on the grid's x axis, the only one without the limit of 65,535.
    """
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    m = T.dynamic("m")
    grid = (T.ceildiv(m, block_m), T.ceildiv(n, block_n))

    @T.prim_func
    def gemm(
        A: T.Tensor((m, k), dtype),
        W: T.Tensor((n, k), dtype),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((m, n), out_dtype),
        C: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(*grid, threads=schedule.num_threads) as (bx, by):
            A_shared = tile.shared((block_m, block_k), dtype)
            W_shared = tile.shared((block_n, block_k), dtype)
            C_shared = tile.shared((block_m, block_n), out_dtype)
            acc = tile.fragment((block_m, block_n), "float32")
            bias_fragment = tile.fragment((block_n,), dtype)
            R_fragment = tile.fragment((block_m, block_n), out_dtype)
            if schedule.swizzle:
                T.use_swizzle(schedule.swizzle)
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k, block_k), num_stages=schedule.num_stages):
                T.copy(A[bx * block_m, ko * block_k], A_shared)
                T.copy(W[by * block_n, ko * block_k], W_shared)
                tile.gemm(A_shared, W_shared, acc, transpose_b=True)
            if has_bias:
                T.copy(bias[by * block_n], bias_fragment)
                for i, j in tile.parallel(block_m, block_n):
                    acc[i, j] += T.cast(bias_fragment[j], "float32")
            if activation is not None:
                for i, j in tile.parallel(block_m, block_n):
                    acc[i, j] = activate(tile, activation, acc[i, j])
            if has_residual:
                T.copy(R[bx * block_m, by * block_n], R_fragment)
                for i, j in tile.parallel(block_m, block_n):
                    acc[i, j] += T.cast(R_fragment[i, j], "float32")
            T.copy(acc, C_shared)  # staged, so that the store is wide (TMA on sm_90)
            T.copy(C_shared, C[bx * block_m, by * block_n])

    return gemm


@functools.lru_cache(maxsize=4096)  # m is any number, so that not all can stay
def _select(
    builder: Callable,
    choose_schedule: Callable,
    device: torch.device,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    *epilogue,
) -> Callable[..., None]:
    tile, (m, n, k) = tile_for(device), sizes
    dtype, out_dtype = map(dtype_name, dtypes)
    schedule = choose_schedule(tile, m, n, k, dtype)
    return compile_kernel(builder, tile, n, k, dtype, out_dtype, *epilogue, schedule)


def launch_linear(
    builder: Callable,
    choose_schedule: Callable,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    *static: bool,
) -> None:
    """Run a kernel of gemm_kernel's signature, and `static`, with the schedule for x's rows."""
    kernel = _select(
        builder, choose_schedule, x.device, (x.shape[0], *weight.shape), (x.dtype, out.dtype),
        activation, bias is not None, residual is not None, *static,
    )  # fmt: skip
    kernel(x, weight, bias, residual, out)


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Write act(x (m, k) @ weight (n, k)^T + bias) + residual to out (m, n), all contiguous."""
    launch_linear(gemm_kernel, gemm_schedule, x, weight, bias, activation, residual, out)
