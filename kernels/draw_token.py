"""A draw from a row of probabilities by one block, exact as in minifused/sampling.py.

Weights are integers, so that a sum of them has neither rounding nor order. Each warp adds up a
segment of the row; the sums tell in which segment the running sum passes the target, and there
those of chunks of columns tell the chunk, and its columns the token. All warps do so alike, with
one sum a lane, which takes no barrier.
"""

import tilelang.language as T

NUM_THREADS = 1024
WARPS = NUM_THREADS // 32
WEIGHT_UNITS = float(2**50)  # of a probability of 1


@T.macro
def _find(sums, first, lane, rest, place):
    """place = which of 32 `sums`, from `first` on, takes their running sum past `rest`.

    What is before it is taken from `rest`; the last one counts as passing.
    """
    below = T.alloc_local((1,), "int64")
    group = T.alloc_local((1,), "int64")  # the sum of 1, 2, 4, … lanes with this one
    other = T.alloc_local((1,), "int64")
    below[0] = T.int64(0)
    group[0] = sums[first + lane]
    for bit in T.unroll(5):
        other[0] = T.shfl_xor(group[0], 1 << bit)
        if (lane >> bit) % 2 == 1:
            below[0] += other[0]
        group[0] += other[0]
    place[0] = T.warp_reduce_sum(T.cast(below[0] + sums[first + lane] <= rest[0], "int32"))
    place[0] = T.min(place[0], 31)
    rest[0] -= T.shfl_sync(below[0], place[0])


def draw_macro(valid: int):
    """A macro that draws one of the first `valid` columns."""
    segment = -(-valid // NUM_THREADS) * 32  # columns of a warp
    chunk = -(-segment // NUM_THREADS)  # columns of a thread in one segment

    @T.macro
    def draw(P, row, uniform, tx, token):
        """token = the first column whose running sum in P[row] passes `uniform` of the total."""
        segment_sums = T.alloc_shared((WARPS,), "int64")
        group_sums = T.alloc_shared((WARPS,), "int64")  # of a warp's chunks
        chunk_sums = T.alloc_shared((NUM_THREADS,), "int64")
        weights = T.alloc_local((segment // 32,), "float32")
        total = T.alloc_local((1,), "int64")
        rest = T.alloc_local((1,), "int64")
        place = T.alloc_local((1,), "int32")
        start = T.alloc_local((1,), "int32")
        lane, warp = tx % 32, tx // 32
        total[0] = T.int64(0)
        for i in T.unroll(segment // 32):
            col = warp * segment + i * 32 + lane
            weights[i] = T.if_then_else(col < valid, P[row, col], 0.0)
        for i in T.unroll(segment // 32):
            total[0] += T.cast(weights[i] * WEIGHT_UNITS, "int64")
        total[0] = T.warp_reduce_sum(total[0])
        if lane == 0:
            segment_sums[warp] = total[0]
        T.sync_threads()
        total[0] = T.warp_reduce_sum(segment_sums[lane])
        rest[0] = T.cast(T.cast(total[0], "float64") * T.cast(uniform, "float64"), "int64")
        _find(segment_sums, 0, lane, rest, place)
        start[0] = place[0] * segment
        total[0] = T.int64(0)
        for j in T.unroll(chunk):
            if tx * chunk + j < segment and start[0] + tx * chunk + j < valid:
                total[0] += T.cast(P[row, start[0] + tx * chunk + j] * WEIGHT_UNITS, "int64")
        chunk_sums[tx] = total[0]
        total[0] = T.warp_reduce_sum(total[0])
        if lane == 0:
            group_sums[warp] = total[0]
        T.sync_threads()
        _find(group_sums, 0, lane, rest, place)
        start[0] += place[0] * (32 * chunk)
        _find(chunk_sums, place[0] * 32, lane, rest, place)
        start[0] = T.min(start[0] + place[0] * chunk, valid - 1)
        token[0] = start[0]
        for j in T.unroll(chunk - 1):
            total[0] = T.cast(P[row, T.min(start[0] + j, valid - 1)] * WEIGHT_UNITS, "int64")
            if token[0] == start[0] + j and rest[0] >= total[0]:
                rest[0] -= total[0]
                token[0] = T.min(token[0] + 1, valid - 1)

    return draw
