"""A layer norm (arXiv 1607.06450) between two products, without a kernel of its own: the reader.

    LN(x) W^T + bias = ((x gain) W^T - mean S1) / deviation + C0
    S1[n] = sum_k W[n, k] gain[k],  C0[n] = sum_k W[n, k] shift[k] + bias[n]

Who writes the residual stream x also writes x gain, in 16 bits, and of each part of a row, the
columns of a tile, the sum and the sum of squared deviations from the part's own mean (see
swap_follow.py). Who reads it merges these (Chan, Golub and LeVeque, 1983) while its operands are on
their way. Nothing cancels but the mean: x gain is rounded with it, so that a mean far larger than
the deviation costs digits which a layer norm of its own would keep.
"""

import tilelang.language as T

from minifused.kernels.decode_lanes import sum_over_lanes


def lanes_a_row(block_m: int, num_threads: int) -> int:
    """Neighbours that share the parts of a row: a power of two, at most a warp."""
    return 1 << min(32, max(1, num_threads // block_m)).bit_length() - 1


def moments_shape(block_m: int, columns: int, num_threads: int) -> tuple[int, int, int]:
    """Of what a lane loads of stats: its rows, loads of a row, and floats of a load, two a part."""
    parts = int(columns) // 2
    lanes = lanes_a_row(block_m, num_threads)
    pair = 2 - parts % 2  # 16 bytes if all rows begin at multiples of these
    return -(-block_m * lanes // num_threads), -(-parts // (pair * lanes)), 2 * pair


@T.macro
def load_moments(norm, row, s, block_m, num_threads):
    """s (moments_shape) = a lane's part of stats (m, 2 * parts), from `row` on, or 0."""
    if norm is not None:
        stats, lanes, size = norm[0], lanes_a_row(block_m, num_threads), int(s.shape[2])
        tx = T.get_thread_binding() if num_threads > 1 else 0
        for i in T.unroll(s.shape[0]):
            for v in T.unroll(s.shape[1]):
                j = row + i * (num_threads // lanes) + tx // lanes
                at = (v * lanes + tx % lanes) * size
                if j < stats.shape[0] and at < stats.shape[1]:
                    for e in T.vectorized(size):
                        s[i, v, e] = stats[j, at + e]
                else:
                    for e in T.vectorized(size):
                        s[i, v, e] = 0.0


@T.macro
def merge_moments(fold, k, s, norms, num_threads):
    """norms (block_m, 2) = mean, and 1 / deviation, of rows of k columns."""
    if norms is not None:
        lanes = lanes_a_row(int(norms.shape[0]), num_threads)
        rows = num_threads // lanes
        tx = T.get_thread_binding() if num_threads > 1 else 0
        sums = T.alloc_local((2,), "float32")
        for i in T.unroll(s.shape[0]):
            merge_row(fold, k, s, i, sums, tx % lanes, lanes)
            j = i * rows + tx // lanes
            if j < norms.shape[0] and tx % lanes == 0:
                for e in T.vectorized(2):
                    norms[j, e] = sums[e]


@T.macro
def merge_row(fold, k, s, i, sums, lane, lanes):
    (width, eps), loads, pair = fold, int(s.shape[1]), int(s.shape[2]) // 2
    T.clear(sums)
    for v in T.unroll(loads):
        for e in T.unroll(pair):
            sums[0] += s[i, v, 2 * e]
    sum_over_lanes(sums, 0, 1, lanes)
    sums[0] *= 1.0 / k
    for v in T.unroll(loads):
        for e in T.unroll(pair):
            count = part_columns((v * lanes + lane) * pair + e, width, k)
            off = s[i, v, 2 * e] / T.max(count, 1.0) - sums[0]
            sums[1] += s[i, v, 2 * e + 1] + count * off * off
    sum_over_lanes(sums, 1, 1, lanes)
    sums[1] = 1.0 / T.sqrt(sums[1] * (1.0 / k) + eps)


def part_columns(part, width: int, n: int):
    """How many of a row's n columns a part has: the last may be narrower, past it there are 0."""
    return T.cast(T.min(T.max(n - part * width, 0), width), "float32")
