"""A block of swap_gemm that has a part of K: a cluster of them has a tile of the result.

For few tiles and a long K. Each block has all of its part on its way at once, and leaves its sums
in shared memory. Then it has some rows of the tile, of which it adds up the sums of all blocks, in
their order: so results repeat bit for bit, and no sum goes through global memory.
"""

import functools

import tilelang.language as T

from minifused.kernels.cluster_sum import VECTOR, WITH_CLUSTER_SUM, sum_over_cluster
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.swap_fold import load_moments, merge_moments, moments_shape
from minifused.kernels.swap_follow import follow_tile
from minifused.kernels.swap_peaks import write_peaks
from minifused.kernels.swap_ring import (
    Ring,
    fill,
    load_rows,
    load_weights,
    multiply_and_share,
    stages_of,
)
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
def split_block(p, A, W, bias, R, C, caches, norm, after, peaks):
    """See swap_gemm_kernel for the tensors; the last four are tuples, or None."""
    tile, s, fold, f32 = p.tile, p.schedule, p.fold, "float32"
    block_m, block_n, block_k, threads = s.block_m, s.block_n, s.block_k, s.num_threads
    steps = -(-p.k // (block_k * s.splits))  # of a block; past k both operands are zeros
    stages, rows = stages_of(s, steps), block_m // s.splits
    with T.Kernel(
        T.ceildiv(p.n, block_n) * s.splits, T.ceildiv(A.shape[0], block_m), threads=threads,
        cluster_dims=s.splits, prelude=WITH_CLUSTER_SUM,
    ) as (bx, by):  # fmt: skip
        W_shared = tile.shared((stages, block_n, block_k), p.dtype)
        A_shared = tile.shared((stages, block_m, block_k), p.dtype)
        sums = T.alloc_shared((1, block_m, block_n + 4), f32)  # 4 columns more: other banks
        whole = fixed(tile, (1, rows, block_n + 4), f32)
        places = fixed(tile, (rows,), "int32")
        norms = fixed(tile, (rows, 2), f32) if fold else None
        x = T.alloc_local(moments_shape(rows, norm[0].shape[1], threads), f32) if fold else None
        b = tile.fragment((block_n,), f32 if fold else p.dtype) if p.has_bias or fold else None
        slope = tile.fragment((block_n,), f32) if fold else None
        r = tile.fragment((rows, block_n), p.out_dtype) if p.has_residual else None
        gain = tile.fragment((block_n,), p.dtype) if after else None
        done = tile.fragment((rows, block_n), p.out_dtype)
        full = T.alloc_barrier([1] * stages)
        part, rank = bx // s.splits, bx % s.splits
        col, row = part * block_n, by * block_m + rank * rows
        T.annotate_compile_flags(FAST_MATH)
        ring = Ring(
            W, A, W_shared, A_shared, full, col, by * block_m, stages, steps, steps, rank * steps
        )
        end = End(tile, p.activation, norms, slope, b, r, done)
        if not caches:
            tile.pdl_trigger()
        if not p.ahead:
            tile.pdl_sync()
        fill(ring, load_weights)
        load_constants(tile, bias, norm, after, col, b, slope, gain)
        tile.pdl_sync()
        if caches:
            tile.pdl_trigger()  # late: decode attention relies on older rows of the caches
        load_moments(norm, row, x, rows, threads)
        fill(ring, load_rows)
        T.sync_threads()
        merge_moments(fold, p.k, x, norms, threads)
        load_places(tile, caches, row, places)
        load_tile(tile, R, row, col, r)
        multiply_and_share(ring, sums)
        T.cluster_sync()
        add_up(sums, whole, rank * rows, s.splits, threads)
        T.sync_threads()
        finish_tile(end, functools.partial(sum_of, whole))
        store(tile, done, C, row, col)
        keep(tile, done, caches, places, row, col)
        follow_tile(tile, done, after, gain, row, col, part)
        write_peaks(tile, done, peaks, row, col, part)
        T.cluster_sync()  # others may still read what is here


@T.macro
def add_up(sums, whole, first, splits, threads):
    """whole (1, rows, …) = the sums of all blocks of the cluster, of rows from `first` on."""
    rows, vectors = int(whole.shape[1]), (int(whole.shape[2]) - 4) // VECTOR
    pieces, tx = -(-rows * vectors // threads), T.get_thread_binding()
    x = T.alloc_local((pieces, VECTOR), "float32")
    for i in T.unroll(pieces):  # all are asked for before one is used
        at = i * threads + tx
        if at < rows * vectors:
            place = (0, first + at // vectors, at % vectors * VECTOR)
            sum_over_cluster(x, i, sums, place, splits)
    for i in T.unroll(pieces):
        at = i * threads + tx
        if at < rows * vectors:
            for e in T.vectorized(VECTOR):
                whole[0, at // vectors, at % vectors * VECTOR + e] = x[i, e]
