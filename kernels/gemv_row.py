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
def load_strided(A, a, j, tx, num_threads):
    """a[j] (count) = the columns tx, tx + num_threads, … of the row A (1, k), without a mask."""
    for i in T.unroll(a.shape[1]):
        a[j, i] = A[0, T.min(i * num_threads + tx, A.shape[1] - 1)]


@T.macro
def block_sums(values, parts, tx):
    """values (count) = their sums over the block; parts (num_warps, count) is shared memory."""
    count = values.shape[0]
    for j in T.unroll(count):
        values[j] = T.warp_reduce_sum(values[j])
    if tx % 32 == 0:
        for j in T.unroll(count):
            parts[tx // 32, j] = values[j]
    T.sync_threads()
    T.clear(values)
    for i in T.unroll(parts.shape[0]):
        for j in T.unroll(count):
            values[j] += parts[i, j]


@T.macro
def normalise(X, affine, eps, x_shared, tx, num_threads):
    """x_shared (1, k) = layer norm of X (1, k); see kernels/layer_norm.py.

    A thread has the columns tx, tx + num_threads, …; affine (2, count) is their gain and shift.
    """
    k, count = X.shape[1], affine.shape[1]
    x = T.alloc_local((1, count), "float32")
    mean = T.alloc_local((1,), "float32")
    moments = T.alloc_local((2,), "float32")  # of what is left: the mean's own rounding too
    mean_parts = T.alloc_shared((num_threads // 32, 1), "float32")
    moment_parts = T.alloc_shared((num_threads // 32, 2), "float32")
    load_strided(X, x, 0, tx, num_threads)
    T.clear(mean)
    for i in T.unroll(count):
        mean[0] += T.if_then_else(i * num_threads + tx < k, x[0, i], 0.0)
    block_sums(mean, mean_parts, tx)
    T.clear(moments)
    for i in T.unroll(count):
        x[0, i] = T.if_then_else(i * num_threads + tx < k, x[0, i] - mean[0] / k, 0.0)
        moments[0] += x[0, i]
        moments[1] += x[0, i] * x[0, i]
    block_sums(moments, moment_parts, tx)
    rest = moments[0] / k
    rstd = T.rsqrt(T.max(moments[1] / k - rest * rest, 0.0) + eps)
    for i in T.unroll(count):
        if i * num_threads + tx < k:
            x_shared[0, i * num_threads + tx] = (x[0, i] - rest) * rstd * T.cast(
                affine[0, i], "float32"
            ) + T.cast(affine[1, i], "float32")


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
