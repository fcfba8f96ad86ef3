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
from minifused.kernels.swap_fold import load_moments, merge_moments, moments_shape
from minifused.kernels.swap_follow import follow_tile
from minifused.kernels.swap_ring import (
    Ring,
    fill,
    load_rows,
    load_weights,
    multiply,
    multiply_in_groups,
    multiply_piped,
    stages_of,
)
from minifused.kernels.swap_store import (
    End,
    element,
    finish_tile,
    fixed,
    keep,
    load_constants,
    load_places,
    load_tile,
    store,
    sum_of,
)
from minifused.kernels.tile import Tile


def swap_gemm_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, ahead: bool, schedule: SwapSchedule, cached: bool = False,
    fold: tuple[int, float] | None = None, follow: bool = False,
):  # fmt: skip
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n) for small dynamic m.

    A, W and bias have `dtype`, R and C `out_dtype`; sums are float32. `ahead` reads W and bias,
    gain and W's sums before the kernels launched earlier have ended. For any of these it takes
    more tensors:

    cached: positions (m,) int32, K_cache and V_cache (m, capacity, n / 3). C is a packed query, key
    and value, of which the latter two also go to their caches.
    fold: columns of a part, and epsilon. A is a row times the gain of its layer norm, which is
    completed from stats (m, 2 * parts), and W's sums (2, n) in place of a bias: see swap_fold.py.
    follow: of C (float32) and gain (n,) also make the next kernel's A, `scaled` (m, n) of `dtype`,
    and its stats, `moments` (m, 2 * parts), of parts of block_n columns.
    """
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    tiles, threads, f32 = schedule.tiles, schedule.num_threads, "float32"
    m, early = T.dynamic("m"), ahead and tiles == 1
    steps = -(-k // block_k)  # of a tile; past k both operands are zeros
    stages, total = stages_of(schedule, tiles * steps), tiles * steps
    parts = -(-k // fold[0]) if fold else 1
    has_ring = has_bulk_copies(tile, k * ITEM_BYTES[dtype])
    staged = has_ring and staged_bytes(schedule) > 0
    slots = (stages,) if has_ring else ()
    grid = (T.ceildiv(n, block_n * tiles), T.ceildiv(m, block_m))

    A_type, W_type, bias_type = (T.Tensor(shape, dtype) for shape in ((m, k), (n, k), (n,)))
    R_type, C_type = (T.Tensor((m, n), out_dtype) for _ in "RC")  # one object is one tensor

    @T.macro
    def block(A, W, bias, R, C, caches, norm, after):
        with T.Kernel(*grid, threads=threads) as (bx, by):
            W_shared = tile.shared((*slots, block_n, block_k), dtype)
            A_shared = tile.shared((*slots, block_m, block_k), dtype)
            places = fixed(tile, (block_m,), "int32")
            norms = fixed(tile, (block_m, 2), f32) if fold else None
            s = T.alloc_local(moments_shape(block_m, parts, threads), f32) if fold else None
            b = tile.fragment((block_n,), f32 if fold else dtype) if has_bias or fold else None
            slope = tile.fragment((block_n,), f32) if fold else None
            r = tile.fragment((block_m, block_n), out_dtype) if has_residual else None
            gain = tile.fragment((block_n,), dtype) if follow else None
            done = tile.fragment((block_m, block_n), out_dtype)
            full = T.alloc_barrier([1] * stages) if has_ring else None
            row, first = by * block_m, bx * tiles * block_n
            ring = Ring(W, A, W_shared, A_shared, full, first, row, stages, steps, total)
            end = End(tile, activation, norms, slope, b, r, done)
            tile.pdl_trigger()
            if not ahead:
                tile.pdl_sync()
            fill(ring, load_weights)
            if early:
                load_constants(tile, bias, norm, after, first, b, slope, gain)
            tile.pdl_sync()
            load_moments(norm, row, s, block_m, threads)
            fill(ring, load_rows)
            if has_ring:
                T.sync_threads()  # or TileLang has one later, where warps would wait for loads
            merge_moments(fold, k, s, norms, threads)
            load_places(tile, caches, row, places)
            for t in T.serial(tiles):
                col = first + t * block_n
                if not early:
                    load_constants(tile, bias, norm, after, col, b, slope, gain)
                load_tile(tile, R, row, col, r)
                if staged:
                    # 4 more: other banks
                    sums = fixed(tile, (schedule.groups, block_m, block_n + 4), f32)
                    multiply_in_groups(ring, sums, threads // schedule.groups)
                    finish_tile(end, functools.partial(sum_of, sums))
                else:
                    acc = tile.fragment((block_n, block_m), f32)
                    if has_ring:
                        multiply(ring, acc, t, 0, 1)
                    else:
                        multiply_piped(tile, ring, acc, t)
                    finish_tile(end, functools.partial(element, acc))
                store(tile, done, C, row, col)
                keep(tile, done, caches, places, row, col)
                follow_tile(tile, done, after, gain, row, col, bx * tiles + t)

    if not (cached or fold or follow):

        @T.prim_func
        def swap_gemm(A: A_type, W: W_type, bias: bias_type, R: R_type, C: C_type):
            block(A, W, bias, R, C, None, None, None)

        return swap_gemm

    of_cache = (m, T.dynamic("capacity"), n // 3) if cached else (1,)
    P_type, (K_type, V_type) = (
        T.Tensor((m,), "int32"),
        (T.Tensor(of_cache, out_dtype) for _ in "KV"),
    )
    stats_type, sums_type = T.Tensor((m, 2 * parts), f32), T.Tensor((2, n), f32)
    gain_type, scaled_type = T.Tensor((n,), dtype), T.Tensor((m, n), dtype)
    moments_type = T.Tensor((m, 2 * -(-n // block_n)), f32)

    @T.prim_func
    def swap_gemm_step(
        A: A_type, W: W_type, bias: bias_type, R: R_type, C: C_type,
        positions: P_type, K_cache: K_type, V_cache: V_type, stats: stats_type, sums: sums_type,
        gain: gain_type, scaled: scaled_type, moments: moments_type,
    ):  # fmt: skip
        caches = (positions, K_cache, V_cache) if cached else None
        norm, after = (stats, sums) if fold else None, (gain, scaled, moments) if follow else None
        block(A, W, bias, R, C, caches, norm, after)

    return swap_gemm_step
