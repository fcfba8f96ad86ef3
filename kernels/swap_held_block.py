"""A block of swap_gemm that holds its operands in registers: see swap_held.py."""

import functools

import tilelang.language as T

from minifused.kernels.limits import TILE_ROWS, held_rows, row_stride
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.swap_fold import load_moments, merge_moments, moments_shape
from minifused.kernels.swap_follow import follow_tile
from minifused.kernels.swap_held import (
    Held,
    hold_first_rows,
    hold_weights,
    lane_shape,
    share_rows,
    turns_of,
)
from minifused.kernels.swap_held_products import acc_shapes, multiply_held
from minifused.kernels.swap_peaks import write_peaks
from minifused.kernels.swap_store import (
    End,
    finish_tile,
    fixed,
    keep,
    load_constants,
    load_places,
    load_tile,
    store,
    sum_of,
)


@T.macro
def held_block(p, A, W, bias, R, C, caches, norm, after, peaks):
    """See swap_gemm_kernel for the tensors; the last four are tuples, or None."""
    tile, s, fold, f32 = p.tile, p.schedule, p.fold, "float32"
    block_m, block_n, threads = s.block_m, s.block_n, s.num_threads
    with T.Kernel(T.ceildiv(p.n, block_n), T.ceildiv(A.shape[0], block_m), threads=threads) as (
        bx,
        by,
    ):
        w = T.alloc_local(lane_shape(s, p.k, held_rows(s)), p.dtype)
        a = [T.alloc_local(lane_shape(s, p.k, TILE_ROWS), p.dtype) for _ in range(s.num_stages)]
        acc = [T.alloc_local(shape, f32) for shape in acc_shapes(s, p.k)]
        x = T.alloc_local(moments_shape(block_m, norm[0].shape[1], threads), f32) if fold else None
        b = tile.fragment((block_n,), f32 if fold else p.dtype) if p.has_bias or fold else None
        slope = tile.fragment((block_n,), f32) if fold else None
        r = tile.fragment((block_m, block_n), p.out_dtype) if p.has_residual else None
        gain = tile.fragment((block_n,), p.dtype) if after else None
        done = tile.fragment((block_m, block_n), p.out_dtype)
        places = fixed(tile, (block_m,), "int32")
        norms = fixed(tile, (block_m, 2), f32) if fold else None
        sums = fixed(tile, (s.groups, block_m, block_n + 4), f32)  # 4 columns more: other banks
        row, col = by * block_m, bx * block_n
        turns = turns_of(s, p.k)
        shared = s.shared_rows and turns == 1
        stride = row_stride(s.groups * s.block_k)
        A_shared = T.alloc_shared((block_m, stride), p.dtype) if shared else None
        rows = (A_shared, 0) if shared else (A, row)
        held = Held(W, rows[0], w, a, col, rows[1], s, turns, shared)
        end = End(tile, p.activation, norms, slope, b, r, done)
        T.annotate_compile_flags(FAST_MATH)  # exact divisions branch, and no load passes a branch
        if s.min_blocks:
            T.annotate_min_blocks_per_sm(s.min_blocks)
        if not caches:
            tile.pdl_trigger()
        if not p.ahead:
            tile.pdl_sync()
        hold_weights(held, 0)
        load_constants(tile, bias, norm, after, col, b, slope, gain)
        tile.pdl_sync()
        if caches:
            tile.pdl_trigger()  # late: decode attention relies on older rows of the caches
        if shared:
            share_rows(A, row, A_shared, threads)
        else:
            hold_first_rows(held, 0)
        if fold:
            # Or ptxas asks for the moments first, and for the rows once it has merged them.
            T.sync_threads()
            load_moments(norm, row, x, block_m, threads)
        load_places(tile, caches, row, places)
        load_tile(tile, R, row, col, r)
        merge_moments(fold, p.k, x, norms, threads)
        multiply_held(held, acc, sums)
        T.sync_threads()
        finish_tile(end, functools.partial(sum_of, sums))
        store(tile, done, C, row, col)
        keep(tile, done, caches, places, row, col)
        follow_tile(tile, done, after, gain, row, col, bx)
        write_peaks(tile, done, peaks, row, col, bx)
