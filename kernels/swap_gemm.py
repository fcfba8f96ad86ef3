"""Matrix product for 2 to 64 rows on tensor cores, operands swapped: C^T = epilogue(W @ A^T).

A tensor core's tile has 16 or 64 rows but as few as 8 columns, so the weights give its rows and the
few rows of A its columns. Weights are the whole cost: with TMA, a ring of their tiles is on its way
before the kernel waits for the one that writes A, if no kernel writes them. It stays full where a
block has several tiles; where few weight rows are deep, blocks take parts of K (split-K).
"""

import functools

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.build import dtype_name, tile_for
from minifused.kernels.gemm import launch_linear
from minifused.kernels.limits import ITEM_BYTES, has_bulk_copies
from minifused.kernels.schedule import SwapSchedule, swap_schedule
from minifused.kernels.split_sum import finish, split_sum
from minifused.kernels.tile import Tile

MAX_ROWS = 64  # with more, gemm.py fills its tiles


def swap_gemm_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, ahead: bool, schedule: SwapSchedule,
):  # fmt: skip
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n) for small dynamic m.

    A, W and bias have `dtype`, R and C `out_dtype`; the sum is float32 throughout. With splits,
    C is (splits, m, n): the epilogue of each part of K on its own. `ahead` reads W before the
    kernels launched earlier have ended.
    """
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    splits, tiles, threads = schedule.splits, schedule.tiles, schedule.num_threads
    m = T.dynamic("m")
    steps = -(-k // (block_k * splits))  # of a tile; past k both operands are zeros
    stages = min(schedule.num_stages, tiles * steps)
    has_ring = has_bulk_copies(tile, k * ITEM_BYTES[dtype])
    slots = (stages,) if has_ring else ()
    grid = (T.ceildiv(n, block_n * tiles), T.ceildiv(m, block_m), splits)

    @T.prim_func
    def swap_gemm(
        A: T.Tensor((m, k), dtype),
        W: T.Tensor((n, k), dtype),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((m, n), out_dtype),
        C: T.Tensor((m, n) if splits == 1 else (splits, m, n), out_dtype),
    ):
        with T.Kernel(*grid, threads=threads) as (bx, by, bz):
            W_shared = tile.shared((*slots, block_n, block_k), dtype)
            A_shared = tile.shared((*slots, block_m, block_k), dtype)
            acc = tile.fragment((block_n, block_m), "float32")
            bias_fragment = tile.fragment((block_n,), dtype)
            R_fragment = tile.fragment((block_n, block_m), out_dtype)
            row, first, part = by * block_m, bx * tiles * block_n, bz * steps
            tile.pdl_trigger()
            if not ahead:
                tile.pdl_sync()
            if has_ring:
                full = T.alloc_barrier([1] * stages)
                for i in T.unroll(stages):
                    _load(W, first + i // steps * block_n, part + i % steps, W_shared, full, i)
            tile.pdl_sync()
            if has_ring:
                for i in T.unroll(stages):
                    _load(A, row, part + i % steps, A_shared, full, i, arrive=1)
            for t in T.serial(tiles):
                col = first + t * block_n
                T.clear(acc)
                if has_bias:
                    T.copy(bias[col], bias_fragment)
                if has_residual:
                    _load_transposed(tile, R, row, col, R_fragment)
                if has_ring:
                    for ko in T.serial(steps):
                        i, later = t * steps + ko, t * steps + ko + stages
                        slot = i % stages
                        T.barrier_wait(full[slot], i // stages % 2)
                        T.gemm(W_shared[slot, :, :], A_shared[slot, :, :], acc, transpose_B=True)
                        if later < tiles * steps:
                            T.sync_threads()  # all have read what is in the slot
                            next_col = first + later // steps * block_n
                            _load(W, next_col, part + later % steps, W_shared, full, slot)
                            _load(A, row, part + later % steps, A_shared, full, slot, arrive=1)
                else:
                    for ko in T.Pipelined(steps, num_stages=stages):
                        T.copy(W[col, (part + ko) * block_k], W_shared)
                        T.copy(A[row, (part + ko) * block_k], A_shared)
                        tile.gemm(W_shared, A_shared, acc, transpose_b=True)
                for i, j in tile.parallel(block_n, block_m):
                    if row + j < m and col + i < n:
                        b = bias_fragment[i] if has_bias else None
                        r = R_fragment[i, j] if has_residual else None
                        at = (row + j, col + i) if splits == 1 else (bz, row + j, col + i)
                        C[at] = T.cast(finish(tile, activation, acc[i, j], b, r), out_dtype)

    return swap_gemm


@T.macro
def _load(X, row, step, ring, full, slot, arrive=0):
    """Ask for a tile of X. full[slot] waits for its bytes, and for a load that arrives."""
    stop, cols, note = row + ring.shape[1], ring.shape[2], {"emit_arrive": arrive}
    start = step * cols
    T.tma_copy(
        X[row:stop, start : start + cols], ring[slot, :, :], barrier=full[slot], annotations=note
    )


@T.macro
def _load_transposed(tile, X, row, col, fragment):
    for i, j in tile.parallel(fragment.shape[0], fragment.shape[1]):
        if row + j < X.shape[0] and col + i < X.shape[1]:
            fragment[i, j] = X[row + j, col + i]


@functools.lru_cache(maxsize=4096)
def _splits(device: torch.device, sizes: tuple[int, int, int], dtype: torch.dtype) -> int:
    return swap_schedule(tile_for(device), *sizes, dtype_name(dtype)).splits


def takes(x: Tensor) -> bool:
    """Whether swap_gemm is for x (m, k): 16 bits in rows of whole vectors, on a tensor core."""
    fits = 2 <= x.shape[0] <= MAX_ROWS and x.dtype != torch.float32 and x.shape[1] % 8 == 0
    return fits and x.is_cuda and tile_for(x.device).capability >= 80


def swap_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    ahead: bool,
) -> None:
    """Write act(x (m, k) @ weight (n, k)^T + bias) + residual to out (m, n), all contiguous.

    `ahead`: no kernel that may still run writes the weight.
    """
    launch = functools.partial(launch_linear, swap_gemm_kernel, swap_schedule, x, weight)
    splits = _splits(x.device, (x.shape[0], *weight.shape), x.dtype)
    if splits == 1:
        return launch(bias, activation, residual, out, ahead)
    partial = x.new_empty((splits, *out.shape), dtype=torch.float32)
    launch(None, None, None, partial, ahead)
    split_sum(partial, bias, activation, residual, out)
