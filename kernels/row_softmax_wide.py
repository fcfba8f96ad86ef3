"""Softmax of rows wider than registers hold, one block a row.

What fits of a row stays in shared memory between its two passes; only the rest is read again.
"""

import math

import tilelang.language as T

from minifused.kernels.limits import ITEM_BYTES, shared_memory_limit
from minifused.kernels.row_lanes import (
    FAST_MATH,
    VECTOR_BYTES,
    RowLanes,
    add,
    load,
    load_edges,
    load_up_to,
    merge,
    row_lanes,
)
from minifused.kernels.row_lanes_store import keep, store, store_edges, store_up_to
from minifused.kernels.schedule import RowSchedule
from minifused.kernels.tile import Tile

BLOCKS_PER_SM = 2  # that one block reads while another writes
REDUCTION_BYTES = 4 * 1024  # at most, of the exchange between threads
THREADS, VECTORS = 512, 4  # a lane's vectors are on their way together


def wide_schedule(dtype: str) -> RowSchedule:
    return RowSchedule(THREADS * VECTORS * VECTOR_BYTES // ITEM_BYTES[dtype], THREADS)


def whole_steps(r: RowLanes, n: int) -> int:
    """Steps that every row of n columns has whole vectors for, wherever it begins.

    A row may have one more, but a loop has to do without it: of a count that is 0 or 1 by the row,
    TileLang 0.1.15 makes code that runs once for every row.
    """
    head = r.width - math.gcd(n, r.width)  # at most
    return max(0, r.valid - head) // r.width // r.stride


def kept_vectors(r: RowLanes, dtype: str, blocks: int) -> int:
    """Vectors of a row that stay in shared memory, if so many blocks are to share an SM."""
    budget = max(0, shared_memory_limit(r.tile) // blocks - REDUCTION_BYTES)
    fit = budget // (r.width * ITEM_BYTES[dtype])
    body = r.valid // r.width
    return body if body <= fit else fit // r.stride * r.stride


def wide_softmax_kernel(
    tile: Tile,
    n: int,
    valid: int,
    dtype: str,
    out_dtype: str,
    schedule: RowSchedule,
    blocks: int = BLOCKS_PER_SM,
):
    """Build Y (m, n) = softmax of X (m, n) along n over the first `valid` columns; m is dynamic.

    Columns from `valid` on are 0. A row of -inf gives NaN, and so does one with NaN or +inf.
    `schedule.num_threads` lanes take `schedule.block_n` columns a step.
    """
    r = row_lanes(tile, valid, dtype, out_dtype, schedule)
    blocks = min(blocks, max(1, 1024 // r.lanes))  # a thread needs up to 64 registers
    room = kept_vectors(r, dtype, blocks)
    whole = room == valid // r.width
    steps, kept_steps = whole_steps(r, n), room // r.stride
    done = steps * r.stride
    blocks_left = -(-(valid // r.width - done) // r.lanes)  # the last may find no vector in a row
    m = T.dynamic("m", "int64")

    @T.prim_func
    def row_softmax_wide(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), out_dtype)):
        with T.Kernel(m, threads=r.lanes) as row:
            kept = tile.shared((max(room, 1) * r.width,), dtype)
            x = tile.fragment((r.vectors, r.lanes, r.width), dtype)
            rest = tile.fragment((1, r.lanes, r.width), dtype)  # where a whole step is too much
            edges = tile.fragment((1, r.lanes, 1), "float32")
            maximum = tile.fragment((r.lanes,), "float32")
            total = tile.fragment((r.lanes,), "float32")
            shift = tile.fragment((r.lanes,), "float32")
            row_max = tile.fragment((1,), "float32")
            inverse = tile.fragment((1,), "float32")
            if tile.is_cuda:
                T.annotate_min_blocks_per_sm(blocks)
            if r.fast_math:
                T.annotate_compile_flags(FAST_MATH)
            tile.pdl_trigger()
            tile.pdl_sync()
            X, Y = T.reshape(X, (m * n,)), T.reshape(Y, (m * n,))
            start = T.cast(row, "int64") * n
            first, last = r.span(start)
            T.fill(maximum, -T.infinity("float32"))
            T.clear(total)
            load_edges(r, X, start, first, last, True, True, edges)
            add(r, edges, maximum, total, shift)
            for step in T.serial(steps):
                load(r, X, first + step * r.stride, x)
                if step < kept_steps:
                    keep(r, x, step * r.stride, room, kept)
                add(r, x, maximum, total, shift)
            for block in T.serial(blocks_left):
                at = done + block * r.lanes
                load_up_to(r, X, first + at, last, rest)
                if whole:
                    keep(r, rest, at, last - first, kept)
                add(r, rest, maximum, total, shift)
            merge(r, maximum, total, row_max, inverse)
            for i in tile.parallel(1):
                inverse[i] = 1.0 / inverse[i]
            store_edges(r, edges, start, n, first, last, True, True, Y, row_max, inverse)
            for block in T.serial(blocks_left):
                at = done + block * r.lanes
                if whole:
                    load_up_to(r, kept, at, last - first, rest)
                else:
                    load_up_to(r, X, first + at, last, rest)
                store_up_to(r, rest, first + at, last, Y, row_max, inverse)
            for step in T.serial(steps):  # backwards: what was read last is still in L2
                at = (steps - 1 - step) * r.stride
                if at + r.stride <= room:
                    load(r, kept, at, x)
                else:
                    load(r, X, first + at, x)
                store(r, x, first + at, Y, row_max, inverse)

    return row_softmax_wide
