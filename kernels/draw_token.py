"""A draw from a row of probabilities by one block, exact as in minifused/sampling.py.

Weights are integers, so that a sum of them has neither rounding nor order. The row is cut into
segments; their sums tell in which one the running sum passes the target, and there those of chunks
of columns tell the chunk, and its columns the token. All warps do so alike, with one sum a lane,
which takes no barrier. The sums of the segments may be given, where the softmax has made them;
else each warp adds up one.
"""

from typing import NamedTuple

import tilelang.language as T

NUM_THREADS = 1024
WARPS = NUM_THREADS // 32
WEIGHT_UNITS = float(2**50)  # of a probability of 1


class Segments(NamedTuple):
    """How a row is cut; the last segment goes on to the last of the valid columns."""

    number: int
    columns: int
    given: bool  # their sums, at most 4 a lane of a warp

    @staticmethod
    def of_warps(valid: int) -> "Segments":
        return Segments(WARPS, -(-valid // NUM_THREADS) * 32, False)


@T.macro
def _find(own, lane, rest, place):
    """place = in which lane the running sum of all lanes' `own` passes `rest`.

    What is before it is taken from `rest`; the last one counts as passing.
    """
    below = T.alloc_local((1,), "int64")
    group = T.alloc_local((1,), "int64")  # the sum of 1, 2, 4, … lanes with this one
    other = T.alloc_local((1,), "int64")
    below[0] = T.int64(0)
    group[0] = own[0]
    for bit in T.unroll(5):
        other[0] = T.shfl_xor(group[0], 1 << bit)
        if (lane >> bit) % 2 == 1:
            below[0] += other[0]
        group[0] += other[0]
    place[0] = T.warp_reduce_sum(T.cast(below[0] + own[0] <= rest[0], "int32"))
    place[0] = T.min(place[0], 31)
    rest[0] -= T.shfl_sync(below[0], place[0])


@T.macro
def _load_segments(M, row, lane, sums, total):
    """sums (count) = those of the segments from lane * count on of M (b, segments), or 0."""
    total[0] = T.int64(0)
    for i in T.unroll(sums.shape[0]):
        at = lane * sums.shape[0] + i
        sums[i] = T.if_then_else(at < M.shape[1], M[row, T.min(at, M.shape[1] - 1)], T.int64(0))
        total[0] += sums[i]


@T.macro
def _add_segment(P, row, valid, columns, first, lane, total):
    """total = the sum of the segment from column `first` on, by one warp."""
    weights = T.alloc_local((columns // 32,), "float32")
    total[0] = T.int64(0)
    for i in T.unroll(columns // 32):
        col = first + i * 32 + lane
        weights[i] = T.if_then_else(col < valid, P[row, col], 0.0)
    for i in T.unroll(columns // 32):
        total[0] += T.cast(weights[i] * WEIGHT_UNITS, "int64")
    total[0] = T.warp_reduce_sum(total[0])


def draw_macro(valid: int, segments: Segments):
    """A macro that draws one of the first `valid` columns."""
    count, columns, given = segments
    share = -(-count // 32)  # segments of a lane
    longest = max(columns, valid - (count - 1) * columns)
    chunk = -(-longest // NUM_THREADS)  # columns of a thread in one segment

    @T.macro
    def draw(P, M, row, uniform, tx, token):
        """token = the first column whose running sum in P[row] passes `uniform` of the total."""
        segment_sums = T.alloc_shared((WARPS,), "int64")
        group_sums = T.alloc_shared((WARPS,), "int64")  # of a warp's chunks
        chunk_sums = T.alloc_shared((NUM_THREADS,), "int64")
        sums = T.alloc_local((share,), "int64")
        own = T.alloc_local((1,), "int64")
        total = T.alloc_local((1,), "int64")
        rest = T.alloc_local((1,), "int64")
        place = T.alloc_local((1,), "int32")
        start = T.alloc_local((1,), "int32")
        end = T.alloc_local((1,), "int32")
        lane, warp = tx % 32, tx // 32
        if given:
            _load_segments(M, row, lane, sums, own)
        else:
            _add_segment(P, row, valid, columns, warp * columns, lane, own)
            if lane == 0:
                segment_sums[warp] = own[0]
            T.sync_threads()
            own[0] = segment_sums[lane]
        total[0] = T.warp_reduce_sum(own[0])
        rest[0] = T.cast(T.cast(total[0], "float64") * T.cast(uniform, "float64"), "int64")
        _find(own, lane, rest, place)
        start[0] = place[0]
        if share > 1:  # of the lane's segments, one a lane
            start[0] *= share
            own[0] = T.int64(0)
            for i in T.unroll(share):
                total[0] = T.shfl_sync(sums[i], place[0])
                own[0] = T.if_then_else(lane == i, total[0], own[0])
            _find(own, lane, rest, place)
            start[0] += T.min(place[0], share - 1)
        end[0] = T.if_then_else(start[0] >= count - 1, valid, (start[0] + 1) * columns)
        start[0] = T.min(start[0], count - 1) * columns
        total[0] = T.int64(0)
        for j in T.unroll(chunk):
            if start[0] + tx * chunk + j < T.min(end[0], valid):
                total[0] += T.cast(P[row, start[0] + tx * chunk + j] * WEIGHT_UNITS, "int64")
        chunk_sums[tx] = total[0]
        total[0] = T.warp_reduce_sum(total[0])
        if lane == 0:
            group_sums[warp] = total[0]
        T.sync_threads()
        own[0] = group_sums[lane]
        _find(own, lane, rest, place)
        start[0] += place[0] * (32 * chunk)
        own[0] = chunk_sums[place[0] * 32 + lane]
        _find(own, lane, rest, place)
        start[0] = T.min(start[0] + place[0] * chunk, valid - 1)
        token[0] = start[0]
        for j in T.unroll(chunk - 1):
            total[0] = T.cast(P[row, T.min(start[0] + j, valid - 1)] * WEIGHT_UNITS, "int64")
            if token[0] == start[0] + j and rest[0] >= total[0]:
                rest[0] -= total[0]
                token[0] = T.min(token[0] + 1, valid - 1)

    return draw
