"""A block of swap_gemm: one or more tiles of its result, from asking for operands to the stores."""

import functools
from typing import NamedTuple

import tilelang.language as T

from minifused.kernels.limits import (
    ITEM_BYTES,
    has_bulk_copies,
    staged_bytes,
    stages_beside_sums,
)
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_fold import load_moments, merge_moments, moments_shape
from minifused.kernels.swap_follow import follow_tile
from minifused.kernels.swap_peaks import write_peaks
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


class Product(NamedTuple):
    """What is static of a product; see swap_gemm_kernel."""

    tile: Tile
    n: int
    k: int
    dtype: str
    out_dtype: str
    activation: str | None
    has_bias: bool
    has_residual: bool
    ahead: bool
    schedule: SwapSchedule
    fold: tuple[int, float] | None

    @property
    def has_ring(self) -> bool:
        return has_bulk_copies(self.tile, self.k * ITEM_BYTES[self.dtype])

    @property
    def staged(self) -> bool:
        """Whether sums go through shared memory, where groups of warps add up theirs."""
        return self.has_ring and staged_bytes(self.schedule) > 0

    def is_staged(self, peaks: tuple | None) -> bool:
        """Peaks want a row in one warp, and not as a tensor core leaves it."""
        return self.staged or (self.has_ring and peaks is not None)

    def count_stages(self, total: int, staged: bool) -> int:
        """Of so many loads, beside what is staged."""
        stages = stages_of(self.schedule, total)
        if staged and not self.staged:
            stages = min(stages, stages_beside_sums(self.tile, self.schedule))
        return stages

    @property
    def early(self) -> bool:
        """Whether bias and the like are read with the first weights."""
        return self.ahead and self.schedule.tiles == 1


@T.macro
def block(p, A, W, bias, R, C, caches, norm, after, peaks):
    """See swap_gemm_kernel for the tensors; the last four are tuples, or None."""
    tile, s, fold, f32 = p.tile, p.schedule, p.fold, "float32"
    block_m, block_n, block_k, threads = s.block_m, s.block_n, s.block_k, s.num_threads
    steps = -(-p.k // block_k)  # of a tile; past k both operands are zeros
    total, staged = s.tiles * steps, p.is_staged(peaks)
    stages = p.count_stages(total, staged)
    slots = (stages,) if p.has_ring else ()
    with T.Kernel(
        T.ceildiv(p.n, block_n * s.tiles), T.ceildiv(A.shape[0], block_m), threads=threads
    ) as (bx, by):
        W_shared = tile.shared((*slots, block_n, block_k), p.dtype)
        A_shared = tile.shared((*slots, block_m, block_k), p.dtype)
        places = fixed(tile, (block_m,), "int32")
        norms = fixed(tile, (block_m, 2), f32) if fold else None
        x = T.alloc_local(moments_shape(block_m, norm[0].shape[1], threads), f32) if fold else None
        b = tile.fragment((block_n,), f32 if fold else p.dtype) if p.has_bias or fold else None
        slope = tile.fragment((block_n,), f32) if fold else None
        r = tile.fragment((block_m, block_n), p.out_dtype) if p.has_residual else None
        gain = tile.fragment((block_n,), p.dtype) if after else None
        done = tile.fragment((block_m, block_n), p.out_dtype)
        full = T.alloc_barrier([1] * stages) if p.has_ring else None
        row, first = by * block_m, bx * s.tiles * block_n
        if tile.is_cuda:
            T.annotate_compile_flags(FAST_MATH)
        ring = Ring(W, A, W_shared, A_shared, full, first, row, stages, steps, total)
        end = End(tile, p.activation, norms, slope, b, r, done)
        if not caches:
            tile.pdl_trigger()
        if not p.ahead:
            tile.pdl_sync()
        fill(ring, load_weights)
        if p.early:
            load_constants(tile, bias, norm, after, first, b, slope, gain)
        tile.pdl_sync()
        if caches:
            tile.pdl_trigger()  # late: decode attention relies on older rows of the caches
        load_moments(norm, row, x, block_m, threads)
        fill(ring, load_rows)
        if p.has_ring:
            T.sync_threads()  # or TileLang has one later, where warps would wait for loads
        merge_moments(fold, p.k, x, norms, threads)
        load_places(tile, caches, row, places)
        for t in T.serial(s.tiles):
            col = first + t * block_n
            if not p.early:
                load_constants(tile, bias, norm, after, col, b, slope, gain)
            load_tile(tile, R, row, col, r)
            if staged:
                # 4 columns more: other banks
                sums = fixed(tile, (s.groups, block_m, block_n + 4), f32)
                multiply_in_groups(ring, sums, t, threads // s.groups)
                finish_tile(end, functools.partial(sum_of, sums))
            else:
                acc = tile.fragment((block_n, block_m), f32)
                if p.has_ring:
                    multiply(ring, acc, t, 0, 1)
                else:
                    multiply_piped(tile, ring, acc, t)
                finish_tile(end, functools.partial(element, acc))
            store(tile, done, C, row, col)
            keep(tile, done, caches, places, row, col)
            follow_tile(tile, done, after, gain, row, col, bx * s.tiles + t)
            write_peaks(tile, done, peaks, row, col, bx * s.tiles + t)
