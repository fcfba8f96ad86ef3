"""What gemv does to its row before it meets the weights, as macros of a lane, a warp or a block.

A row lies over the lanes of a warp: lane i holds columns v * STRIDE + i * VECTOR and the
VECTOR - 1 behind them, in its registers.
"""

import math

import tilelang.language as T

from minifused.kernels.decode_lanes import combine_weights

VECTOR = 8  # 16-bit values of a 16-byte access
STRIDE = 32 * VECTOR  # columns that a warp reads at a time


@T.macro
def load_vector(A, row, col, inside, a, i):
    """a[i] (VECTOR) = the columns of A[row] from col on, zeros if they are not `inside` A."""
    if inside is True:
        for e in T.vectorized(VECTOR):
            a[i, e] = A[row, col + e]
    else:
        if inside:
            for e in T.vectorized(VECTOR):
                a[i, e] = A[row, col + e]
        else:
            for e in T.vectorized(VECTOR):
                a[i, e] = T.cast(0, a.dtype)


@T.macro
def load_lane(A, row, col, whole, a, i, count):
    """a[i * count + v] = the columns of A[row] from col + v * STRIDE on, for each v below count.

    `whole`: none of the warps reaches past the end of a row.
    """
    for v in T.unroll(count):
        at = col + v * STRIDE
        load_vector(A, row, at, whole or at < A.shape[1], a, i * count + v)


@T.macro
def merge_splits(O, ML, x_shared, tx, num_threads):
    """x_shared (1, h * d) = the attention whose parts are O (1, h, s, d) and ML (1, h, s, 2).

    These are as decode_attention_partials writes them; without a key in any part it is 0.
    """
    _, heads, splits, head_dim = map(int, O.shape)
    vector = math.gcd(head_dim, 4)  # columns of a thread at a time, all of one head
    o = T.alloc_local((splits, vector), "float32")
    ml = T.alloc_local((splits, 2), "float32")
    weights = T.alloc_local((splits,), "float32")
    total = T.alloc_local((2,), "float32")
    x = T.alloc_local((vector,), "float32")
    for i in T.unroll(-(-heads * head_dim // (vector * num_threads))):
        col = (i * num_threads + tx) * vector
        if col < heads * head_dim:
            for s in T.unroll(splits):
                for e in T.vectorized(2):
                    ml[s, e] = ML[0, col // head_dim, s, e]
            for s in T.unroll(splits):
                for e in T.vectorized(vector):
                    o[s, e] = O[0, col // head_dim, s, col % head_dim + e]
            combine_weights(ml, weights, total)
            T.clear(x)
            for s in T.unroll(splits):
                for e in T.unroll(vector):
                    x[e] += weights[s] * o[s, e]
            for e in T.vectorized(vector):
                x_shared[0, col + e] = T.if_then_else(total[1] == 0.0, 0.0, x[e] / total[1])
