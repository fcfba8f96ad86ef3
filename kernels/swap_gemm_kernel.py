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
from minifused.kernels.swap_ring import (
    Ring,
    fill,
    load_rows,
    load_weights,
    multiply,
    multiply_in_groups,
    multiply_piped,
)
from minifused.kernels.swap_store import (
    element,
    finish_tile,
    keep,
    load_places,
    load_tile,
    store,
    sum_of,
)
from minifused.kernels.tile import Tile


def swap_gemm_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, ahead: bool, schedule: SwapSchedule, cached: bool = False,
):  # fmt: skip
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n) for small dynamic m.

    A, W and bias have `dtype`, R and C `out_dtype`; sums are float32. `ahead` reads W before the
    kernels launched earlier have ended. With `cached` it also takes positions (m,) int32, K_cache
    and V_cache (m, capacity, n / 3): C is a packed query, key and value, of which the latter two
    also go to their caches.
    """
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    tiles, threads = schedule.tiles, schedule.num_threads
    m = T.dynamic("m")
    steps = -(-k // block_k)  # of a tile; past k both operands are zeros
    stages, total = min(schedule.num_stages, tiles * steps), tiles * steps
    if stages < total:
        stages -= stages % schedule.groups  # a slot is of one group, which sees each phase
    has_ring = has_bulk_copies(tile, k * ITEM_BYTES[dtype])
    staged = has_ring and staged_bytes(schedule) > 0
    slots = (stages,) if has_ring else ()
    grid = (T.ceildiv(n, block_n * tiles), T.ceildiv(m, block_m))

    A_type, W_type, bias_type = (T.Tensor(shape, dtype) for shape in ((m, k), (n, k), (n,)))
    R_type, C_type = (T.Tensor((m, n), out_dtype) for _ in range(2))  # one object is one tensor
    P_type = T.Tensor((m,), "int32")

    @T.macro
    def block(A, W, bias, R, C, caches):
        with T.Kernel(*grid, threads=threads) as (bx, by):
            W_shared = tile.shared((*slots, block_n, block_k), dtype)
            A_shared = tile.shared((*slots, block_m, block_k), dtype)
            places = tile.shared((block_m,), "int32")
            b = tile.fragment((block_n,), dtype) if has_bias else None
            r = tile.fragment((block_m, block_n), out_dtype) if has_residual else None
            done = tile.fragment((block_m, block_n), out_dtype)
            full = T.alloc_barrier([1] * stages) if has_ring else None
            row, first = by * block_m, bx * tiles * block_n
            ring = Ring(W, A, W_shared, A_shared, full, first, row, stages, steps, total)
            tile.pdl_trigger()
            if not ahead:
                tile.pdl_sync()
            fill(ring, load_weights)
            tile.pdl_sync()
            fill(ring, load_rows)
            load_places(tile, caches, row, places)
            for t in T.serial(tiles):
                col = first + t * block_n
                if has_bias:
                    T.copy(bias[col], b)
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
                        multiply_piped(tile, ring, acc, t)
                    finish_tile(tile, activation, functools.partial(element, acc), b, r, done)
                store(tile, done, C, row, col)
                keep(tile, done, caches, places, row, col)

    if not cached:

        @T.prim_func
        def swap_gemm(A: A_type, W: W_type, bias: bias_type, R: R_type, C: C_type):
            block(A, W, bias, R, C, None)

        return swap_gemm

    of_cache = (m, T.dynamic("capacity"), n // 3)
    K_type, V_type = (T.Tensor(of_cache, out_dtype) for _ in range(2))

    @T.prim_func
    def swap_gemm_cached(
        A: A_type, W: W_type, bias: bias_type, R: R_type, C: C_type,
        positions: P_type, K_cache: K_type, V_cache: V_type,
    ):  # fmt: skip
        block(A, W, bias, R, C, (positions, K_cache, V_cache))

    return swap_gemm_cached
