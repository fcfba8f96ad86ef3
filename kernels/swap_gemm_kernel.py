"""Matrix product for 2 to 128 rows on tensor cores, operands swapped: C^T = epilogue(W @ A^T).

A tensor core's tile has 16 or 64 rows but as few as 8 columns, so the weights give its rows and the
few rows of A its columns. Weights are the whole cost: with TMA, a ring of their tiles is on its way
before the kernel waits for the one that writes A, if no kernel writes them. Products of a tile are
a chain, each waiting for the one before: groups of warps take turns at the steps through K, and
their sums meet in shared memory, from where a store is wide.
"""

import functools

import tilelang.language as T

from minifused.kernels.limits import ITEM_BYTES, has_bulk_copies, staged_bytes
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_parts import (
    Ring,
    element,
    finish_tile,
    keep,
    load_places,
    load_rows,
    load_tile,
    load_weights,
    multiply,
    multiply_in_groups,
    store,
    sum_of,
)
from minifused.kernels.tile import Tile


def swap_gemm_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, ahead: bool, schedule: SwapSchedule, cached: bool = False,
):  # fmt: skip
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n) for small dynamic m.

    A, W and bias have `dtype`, R and C `out_dtype`; the sum is float32 throughout. With splits,
    C is (splits, m, n): the epilogue of each part of K on its own. `ahead` reads W and bias before
    the kernels launched earlier have ended. With `cached` the kernel also takes positions (m,)
    int32, K_cache and V_cache (m, capacity, n / 3): C is a packed query, key and value, and the
    latter two also go to row positions[j] of row j's caches, if there is such a row.
    """
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    splits, tiles, threads = schedule.splits, schedule.tiles, schedule.num_threads
    m = T.dynamic("m")
    steps = -(-k // (block_k * splits))  # of a tile; past k both operands are zeros
    stages = min(schedule.num_stages, tiles * steps)
    if stages < tiles * steps:
        stages -= stages % schedule.groups  # a slot is always of one group, which sees each phase
    has_ring = has_bulk_copies(tile, k * ITEM_BYTES[dtype])
    staged = has_ring and staged_bytes(schedule) > 0
    slots = (stages,) if has_ring else ()
    grid = (T.ceildiv(n, block_n * tiles), T.ceildiv(m, block_m), splits)

    @T.macro
    def block(A, W, bias, R, C, caches):
        with T.Kernel(*grid, threads=threads) as (bx, by, bz):
            W_shared = tile.shared((*slots, block_n, block_k), dtype)
            A_shared = tile.shared((*slots, block_m, block_k), dtype)
            places = tile.shared((block_m,), "int32")
            b = tile.fragment((block_n,), dtype) if has_bias else None
            r = tile.fragment((block_m, block_n), out_dtype) if has_residual else None
            done = tile.fragment((block_m, block_n), out_dtype)
            row, first, part = by * block_m, bx * tiles * block_n, bz * steps
            tile.pdl_trigger()
            if not ahead:
                tile.pdl_sync()
            if has_ring:
                full = T.alloc_barrier([1] * stages)
                ring = Ring(W, A, W_shared, A_shared, full, first, row, part, steps, tiles * steps)
                for i in T.serial(stages):
                    load_weights(ring, i)
            tile.pdl_sync()
            if has_ring:
                for i in T.serial(stages):
                    load_rows(ring, i)
            if cached:
                load_places(tile, caches[0], row, places)
            for t in T.serial(tiles):
                col = first + t * block_n
                if has_bias:
                    T.copy(bias[col], b)
                if has_residual:
                    load_tile(tile, R, row, col, r)
                if staged:
                    # Not dynamic: TileLang would have each group wait until the last has read it.
                    shape = (schedule.groups, block_m, block_n + 4)  # 4 more: other banks
                    sums = T.alloc_shared(shape, "float32", scope="shared")
                    multiply_in_groups(ring, sums, threads // schedule.groups)
                    finish_tile(tile, activation, functools.partial(sum_of, sums), b, r, done)
                else:
                    acc = tile.fragment((block_n, block_m), "float32")
                    if has_ring:
                        multiply(ring, acc, t, 0, 1)
                    else:
                        T.clear(acc)
                        for ko in T.Pipelined(steps, num_stages=stages):
                            T.copy(W[col, (part + ko) * block_k], W_shared)
                            T.copy(A[row, (part + ko) * block_k], A_shared)
                            tile.gemm(W_shared, A_shared, acc, transpose_b=True)
                    finish_tile(tile, activation, functools.partial(element, acc), b, r, done)
                store(tile, done, C, (bz,) if splits > 1 else (), row, col)
                if cached:
                    keep(tile, done, places, caches[1], n // 3, row, col)
                    keep(tile, done, places, caches[2], n // 3 * 2, row, col)

    if not cached:

        @T.prim_func
        def swap_gemm(
            A: T.Tensor((m, k), dtype),
            W: T.Tensor((n, k), dtype),
            bias: T.Tensor((n,), dtype),
            R: T.Tensor((m, n), out_dtype),
            C: T.Tensor((m, n) if splits == 1 else (splits, m, n), out_dtype),
        ):
            block(A, W, bias, R, C, None)

        return swap_gemm

    capacity = T.dynamic("capacity")

    @T.prim_func
    def swap_gemm_cached(
        A: T.Tensor((m, k), dtype),
        W: T.Tensor((n, k), dtype),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((m, n), out_dtype),
        C: T.Tensor((m, n), out_dtype),
        positions: T.Tensor((m,), "int32"),
        K_cache: T.Tensor((m, capacity, n // 3), out_dtype),
        V_cache: T.Tensor((m, capacity, n // 3), out_dtype),
    ):
        block(A, W, bias, R, C, (positions, K_cache, V_cache))

    return swap_gemm_cached
