"""How the lanes of a warp share keys: what split-KV decode attention is made of.

A key, or a value, is held by `lanes` neighbours, COLUMNS of its columns each, so that a warp holds
32 / lanes at once. All lanes of a warp keep one running maximum, those of a key one running sum,
and each lane the output of its columns. `ml` (2) is maximum and sum; all of these are registers.
"""

import math

import tilelang.language as T

from minifused.kernels.limits import ITEM_BYTES
from minifused.kernels.schedule import next_power_of_2

COLUMNS = 8  # one access of 16 bytes where they are 16-bit


def lanes_of(head_dim: int) -> int:
    """How many lanes hold a key; shuffles want a power of two."""
    return next_power_of_2(-(-head_dim // COLUMNS))


@T.macro
def load(registers, i, source, row, column, guard):
    """registers[i] = source[*row, column + …]; 0 past the end of the row, and without `guard`."""
    head_dim, dtype = int(source.shape[-1]), str(source.dtype)
    vector = math.gcd(head_dim, 16 // ITEM_BYTES[dtype])  # values at which all rows are aligned
    for part in T.unroll(COLUMNS // vector):
        if guard and column + part * vector < head_dim:
            for e in T.vectorized(vector):
                registers[i, part * vector + e] = source[
                    row[0], row[1], row[2], column + part * vector + e
                ]
        else:
            for e in T.vectorized(vector):
                registers[i, part * vector + e] = T.cast(0, dtype)


@T.macro
def load_keys(registers, cache, row, head, first, stride, column, valid):
    """registers[i] = cache[row, first + i * stride, head, column + …], 0 from key `valid` on."""
    for i in T.unroll(int(registers.shape[0])):
        key = first + i * stride
        load(registers, i, cache, (row, key, head), column, key < valid)


@T.macro
def load_newest(registers, cache, row, head, first, stride, column, newest):
    """load_keys of key `newest` alone; the others stay."""
    for i in T.unroll(int(registers.shape[0])):
        if first + i * stride == newest:
            load(registers, i, cache, (row, newest, head), column, True)


@T.macro
def sum_over_lanes(x, i, first, last):
    """Add up x[i] over lanes: those whose numbers differ in the bits from `first` to `last` / 2."""
    for bit in T.unroll(int(math.log2(last // first))):
        x[i] += T.shfl_xor(x[i], first << bit)


@T.macro
def dot(s, i, q, k, lanes, scale):
    """s[i] = q[0] · k[i] · scale · log2(e), the same in all lanes of a key."""
    s[i] = 0.0
    for e in T.unroll(COLUMNS):
        # The scale goes into q: in exp2(s · scale - m) the product would keep its rounding.
        scaled = T.cast(q[0, e], "float32") * (scale * math.log2(math.e))
        s[i] += scaled * T.cast(k[i, e], "float32")
    sum_over_lanes(s, i, 1, lanes)


@T.macro
def clear(ml, o):
    """No key so far."""
    ml[0] = -T.infinity("float32")
    ml[1] = 0.0
    for e in T.unroll(COLUMNS):
        o[e] = 0.0


@T.macro
def accumulate(ml, o, s, v, lanes):
    """One step of the online softmax: scores s (n), -inf where masked, and values v (n, COLUMNS).

    s becomes the weights of the values.
    """
    keys = int(s.shape[0])
    rescale = T.alloc_local((1,), "float32")
    rescale[0] = ml[0]
    for i in T.unroll(keys):
        ml[0] = T.max(ml[0], s[i])
    for bit in T.unroll(int(math.log2(32 // lanes))):
        ml[0] = T.max(ml[0], T.shfl_xor(ml[0], lanes << bit))
    # A warp without a key so far: shift by 0, since -inf - -inf is NaN.
    shift = T.if_then_else(ml[0] == -T.infinity("float32"), 0.0, ml[0])
    rescale[0] = T.exp2(rescale[0] - shift)
    ml[1] *= rescale[0]
    for e in T.unroll(COLUMNS):
        o[e] *= rescale[0]
    for i in T.unroll(keys):
        s[i] = T.exp2(s[i] - shift)
        ml[1] += s[i]
        for e in T.unroll(COLUMNS):
            o[e] += s[i] * T.cast(v[i, e], "float32")


@T.macro
def exchange(ml, o, ml_parts, ml_warps, o_warps, thread, lanes):
    """Sum what a warp has over its keys and show it to all warps.

    o_warps (warps, …) and ml_warps (warps, 2) are shared memory; ml_parts (warps, 2) becomes the
    latter's copy in registers.
    """
    sum_over_lanes(ml, 1, lanes, 32)
    for e in T.unroll(COLUMNS):
        sum_over_lanes(o, e, lanes, 32)
    if thread % 32 < lanes:
        for e in T.vectorized(COLUMNS):
            o_warps[thread // 32, thread % lanes * COLUMNS + e] = o[e]
        if thread % lanes == 0:
            for e in T.vectorized(2):
                ml_warps[thread // 32, e] = ml[e]
    T.sync_threads()
    for warp in T.unroll(int(ml_parts.shape[0])):
        for e in T.vectorized(2):
            ml_parts[warp, e] = ml_warps[warp, e]


@T.macro
def combine_weights(ml, weights, total):
    """weights (n) by which n partial outputs add up, from their maxima and sums, ml (n, 2).

    They are exp2(m - M), M the maximum of all, and 0 for a part that saw no key. `total` (2)
    becomes M and the sum of all: the attention is Σ weights · o / total[1]. All float32.
    """
    parts = int(ml.shape[0])
    total[0] = ml[0, 0]
    for i in T.unroll(parts - 1):
        total[0] = T.max(total[0], ml[i + 1, 0])
    # No part saw a key: shift by 0, since -inf - -inf is NaN.
    shift = T.if_then_else(total[0] == -T.infinity("float32"), 0.0, total[0])
    total[1] = 0.0
    for i in T.unroll(parts):
        weights[i] = T.exp2(ml[i, 0] - shift)
        total[1] += weights[i] * ml[i, 1]
