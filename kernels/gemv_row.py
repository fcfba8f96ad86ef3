"""What gemv does to its row before it meets the weights, as macros of a lane, a warp or a block."""

import math

import tilelang.language as T

from minifused.kernels.decode_lanes import combine_weights

VECTOR = 8  # 16-bit values of a 16-byte access
CHUNK = 4 * VECTOR  # columns that the four lanes of a weight row read at a time
FLOATS = 4  # of a 16-byte access


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
def load_lane(A, row, col, whole, a, i, count, stride=CHUNK):
    """a[i * count + v] = the columns of A[row] from col + v * stride on, for each v below count.

    `whole`: no lane reaches past the end of a row.
    """
    for v in T.unroll(count):
        at = col + v * stride
        load_vector(A, row, at, whole or at < A.shape[1], a, i * count + v)


@T.macro
def load_gain(gain, g, tx, num_threads):
    """g (vectors, FLOATS) = what norm_row needs of gain (1, k) in a thread."""
    for i in T.unroll(g.shape[0]):
        col = (i * num_threads + tx) * FLOATS
        if col < gain.shape[1]:
            for e in T.vectorized(FLOATS):
                g[i, e] = gain[0, col + e]


@T.macro
def norm_row(X, g, x_shared, parts, eps, tx, num_threads):
    """x_shared (1, k) = the layer norm of X (1, k), but for its shift.

    g is a thread's gain; parts (warps, 2) is shared memory for sums of X and of its squares.
    """
    columns, vectors = X.shape[1], g.shape[0]
    x = T.alloc_local((vectors, FLOATS), "float32")
    moments = T.alloc_local((2,), "float32")
    T.clear(moments)
    for i in T.unroll(vectors):
        col = (i * num_threads + tx) * FLOATS
        if col < columns:
            for e in T.vectorized(FLOATS):
                x[i, e] = X[0, col + e]
        else:
            for e in T.vectorized(FLOATS):
                x[i, e] = 0.0
    for i in T.unroll(vectors):
        for e in T.unroll(FLOATS):
            moments[0] += x[i, e]
            moments[1] += x[i, e] * x[i, e]
    for j in T.unroll(2):
        moments[j] = T.warp_reduce_sum(moments[j])
    if tx % 32 == 0:
        for j in T.unroll(2):
            parts[tx // 32, j] = moments[j]
    T.sync_threads()
    T.clear(moments)
    for p in T.unroll(parts.shape[0]):
        for j in T.unroll(2):
            moments[j] += parts[p, j]
    mean = moments[0] / columns
    rstd = T.rsqrt(T.max(moments[1] / columns - mean * mean, 0.0) + eps)
    for i in T.unroll(vectors):
        col = (i * num_threads + tx) * FLOATS
        if col < columns:
            for e in T.vectorized(FLOATS):
                normed = (x[i, e] - mean) * rstd * T.cast(g[i, e], "float32")
                x_shared[0, col + e] = T.cast(normed, g.dtype)


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
                merged = T.if_then_else(total[1] == 0.0, 0.0, x[e] / total[1])
                x_shared[0, col + e] = T.cast(merged, x_shared.dtype)
