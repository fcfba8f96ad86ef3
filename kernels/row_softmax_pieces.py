"""The two kernels of a softmax whose rows are cut into pieces, a block each (row_softmax_split).

The first leaves the maximum and the sum of each piece (Milakov and Gimelshein, arXiv 1805.02867),
the second merges them, always in the same order, and writes the values.
"""

import tilelang.language as T

from minifused.kernels.draw_token import WEIGHT_UNITS
from minifused.kernels.row_lanes import (
    FAST_MATH,
    RowLanes,
    add,
    load_edges,
    load_up_to,
    merge,
    row_lanes,
)
from minifused.kernels.row_lanes_store import store_edges, store_up_to
from minifused.kernels.row_parts import merge_parts
from minifused.kernels.schedule import RowSchedule
from minifused.kernels.tile import Tile


def count_pieces(r: RowLanes) -> int:
    """That a row's vectors make up; raises ValueError if they are more than the lanes to merge."""
    pieces = max(1, -(-(r.valid // r.width) // r.stride))
    if pieces > r.lanes:
        raise ValueError(f"{pieces} pieces of {r.valid} columns, and {r.lanes} threads")
    return pieces


@T.macro
def add_weights(r, x, row_max, inverse, weights):
    """Take the probabilities of x into the lanes' sums of weights, as they are written."""
    for k in T.unroll(int(x.shape[0])):
        for j in T.unroll(int(x.shape[2])):
            for i in r.tile.parallel(r.lanes):
                e = r.exp(T.cast(x[k, i, j], "float32") - row_max[0])
                weights[i] += T.cast(e * inverse[0] * WEIGHT_UNITS, "int64")


def piece_sums_kernel(
    tile: Tile, n: int, valid: int, dtype: str, out_dtype: str, schedule: RowSchedule
):
    """Build P (m, pieces, 2) float32 = maximum, and sum of exp(x - maximum), of X (m, n)'s pieces.

    Each lane of `schedule.num_threads` has its share of a piece in registers; m is dynamic.
    """
    r = row_lanes(tile, valid, dtype, out_dtype, schedule)
    pieces = count_pieces(r)
    m = T.dynamic("m", "int64")

    @T.prim_func
    def piece_sums(X: T.Tensor((m, n), dtype), P: T.Tensor((m, pieces, 2), "float32")):
        with T.Kernel(pieces, m, threads=r.lanes) as (piece, row):
            x = tile.fragment((r.vectors, r.lanes, r.width), dtype)
            edges = tile.fragment((1, r.lanes, 1), "float32")
            maximum = tile.fragment((r.lanes,), "float32")
            total = tile.fragment((r.lanes,), "float32")
            shift = tile.fragment((r.lanes,), "float32")
            piece_max = tile.fragment((1,), "float32")
            piece_sum = tile.fragment((1,), "float32")
            if r.fast_math:
                T.annotate_compile_flags(FAST_MATH)
            tile.pdl_trigger()
            tile.pdl_sync()
            X = T.reshape(X, (m * n,))
            start = T.cast(row, "int64") * n
            first, last = r.span(start)
            T.fill(maximum, -T.infinity("float32"))
            T.clear(total)
            load_up_to(r, X, first + piece * r.stride, last, x)
            load_edges(r, X, start, first, last, piece == 0, piece == pieces - 1, edges)
            add(r, x, maximum, total, shift)
            add(r, edges, maximum, total, shift)
            merge(r, maximum, total, piece_max, piece_sum)
            for i in tile.parallel(1):
                P[row, piece, 0] = piece_max[i]
                P[row, piece, 1] = piece_sum[i]

    return piece_sums


def piece_values_kernel(
    tile: Tile, n: int, valid: int, dtype: str, out_dtype: str, to_draw: bool,
    schedule: RowSchedule, parts: int | None = None,
):  # fmt: skip
    """Build Y (m, n) = softmax of X (m, n) over the first `valid` columns from P (m, parts, 2).

    P has the maximum of each part of a row and the sum of exp(x - maximum): of each piece, unless
    `parts` says how many there are.

    Columns from `valid` on are 0. A row of -inf gives NaN, and so does one with NaN or +inf.
    `to_draw`: M (m, pieces) gets the sums of each piece's weights in a draw (see draw_token.py).
    """
    r = row_lanes(tile, valid, dtype, out_dtype, schedule)
    pieces = count_pieces(r)
    parts = parts or pieces
    share = -(-parts // r.lanes)
    m = T.dynamic("m", "int64")

    @T.prim_func
    def piece_values(
        X: T.Tensor((m, n), dtype),
        P: T.Tensor((m, parts, 2), "float32"),
        Y: T.Tensor((m, n), out_dtype),
        M: T.Tensor((m, pieces), "int64"),
    ):
        with T.Kernel(pieces, m, threads=r.lanes) as (piece, row):
            x = tile.fragment((r.vectors, r.lanes, r.width), dtype)
            edges = tile.fragment((1, r.lanes, 1), "float32")
            part_max = tile.fragment((share, r.lanes), "float32")
            part_sum = tile.fragment((share, r.lanes), "float32")
            maximum = tile.fragment((r.lanes,), "float32")
            total = tile.fragment((r.lanes,), "float32")
            row_max = tile.fragment((1,), "float32")
            inverse = tile.fragment((1,), "float32")
            weights = tile.fragment((r.lanes,), "int64")
            mass = tile.fragment((1,), "int64")
            if r.fast_math:
                T.annotate_compile_flags(FAST_MATH)
            tile.pdl_trigger()
            tile.pdl_sync()
            X, Y = T.reshape(X, (m * n,)), T.reshape(Y, (m * n,))
            start = T.cast(row, "int64") * n
            first, last = r.span(start)
            at = first + piece * r.stride
            load_up_to(r, X, at, last, x)
            load_edges(r, X, start, first, last, piece == 0, piece == pieces - 1, edges)
            merge_parts(r, P, row, part_max, part_sum, maximum, total, row_max, inverse)
            for i in tile.parallel(1):
                inverse[i] = 1.0 / inverse[i]
            store_up_to(r, x, at, last, Y, row_max, inverse)
            store_edges(
                r, edges, start, n, first, last, piece == 0, piece == pieces - 1, Y,
                row_max, inverse,
            )  # fmt: skip
            if to_draw:
                T.clear(weights)
                add_weights(r, x, row_max, inverse, weights)
                add_weights(r, edges, row_max, inverse, weights)
                T.reduce_sum(weights, mass, dim=0)
                for i in tile.parallel(1):
                    M[row, piece] = mass[i]

    return piece_values
