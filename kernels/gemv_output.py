"""What gemv makes of its row and its weights once it has them, as macros of a warp or a block."""

import math

import tilelang.language as T

from minifused.kernels.decode_lanes import sum_over_lanes
from minifused.kernels.epilogue import activate
from minifused.kernels.gemv_row import VECTOR
from minifused.kernels.online_softmax import shift_by

LANES = 8  # weight rows of a warp that its lanes are of, four lanes a row
CHAINS = 4  # of products that do not wait for each other
ABBREVIATIONS = {"bfloat16": "bf16", "float16": "fp16"}


@T.macro
def dot(w, x, acc):
    """acc (CHAINS * tiles * 4) += products of w (rows * chunks, VECTOR) and x (chunks, VECTOR).

    A tensor core's operands (m16n8k16 in the PTX manual) take any columns in any order, so long as
    it is the same of both: the 8 columns that a lane has of a row are the operand's pairs of two
    products. A tile is 16 weight rows, or 8 and zeros; its columns are the x of four lanes each.
    """
    chunks = x.shape[0]
    rows, tiles = w.shape[0] // chunks, acc.shape[0] // (4 * CHAINS)
    pair = T.alloc_local((8,), w.dtype)  # of a lane's part of an operand: rows g and g + 8
    T.clear(pair)
    for c in T.unroll(chunks):
        for half in T.unroll(2):
            for i in T.unroll(tiles):
                for j in T.unroll(min(int(rows), 2)):
                    for h in T.unroll(2):
                        for e in T.vectorized(2):
                            pair[4 * h + 2 * j + e] = w[
                                (2 * i + j) * chunks + c, 4 * half + 2 * h + e
                            ]
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col",
                    ABBREVIATIONS[str(w.dtype)], ABBREVIATIONS[str(w.dtype)], "fp32",
                    pair.data, 0, x.data, c * VECTOR + 4 * half,
                    acc.data, ((c % 2 * 2 + half) * tiles + i) * 4, T.bool(False),
                )  # fmt: skip


def of_chains(acc, at):
    """A product, of the parts that the chains have of it."""
    size = acc.shape[0] // CHAINS
    return acc[at] + acc[size + at] + (acc[2 * size + at] + acc[3 * size + at])


@T.macro
def gather(acc, dots, part, group, warp_n, tx, total):
    """total = what belongs to the block's row tx; dots (split_k, block_n) is shared memory."""
    lane = tx % 32
    if lane % 4 == 0:  # all columns are the same
        for r in T.unroll(warp_n // LANES):
            at = r // 2 * 4 + r % 2 * 2  # of 16 rows a lane has two, in two columns each
            dots[part, group + LANES * r + lane // 4] = of_chains(acc, at)
    T.sync_threads()
    if tx < dots.shape[1]:
        total[0] = 0.0
        for p in T.unroll(dots.shape[0]):
            total[0] += dots[p, tx]


@T.macro
def finish(tile, total, row, activation, has_bias, bias, has_residual, residual, Y):
    """Y[row] = total = act(total + bias) + residual, without what there is not."""
    if has_bias:
        total[0] += T.cast(bias[0], "float32")
    if activation is not None:
        total[0] = activate(tile, activation, total[0])
    if has_residual:
        total[0] += T.cast(residual[0], "float32")
    Y[0, row] = T.cast(total[0], Y.dtype)


@T.macro
def keep(value, row, position, K_cache, V_cache):
    """Row `row` of a packed query, key and value also goes to its cache, if that has `position`."""
    capacity, width = K_cache.shape[1], K_cache.shape[2]
    if position >= 0 and position < capacity:
        if row >= 2 * width:
            V_cache[0, position, row - 2 * width] = T.cast(value, V_cache.dtype)
        elif row >= width:
            K_cache[0, position, row - width] = T.cast(value, K_cache.dtype)


def peak_width(block_n: int) -> int:
    """Columns of a part of what write_peaks leaves: neighbours in a warp, a power of 2."""
    return math.gcd(block_n, 32)


@T.macro
def write_peaks(value, first, valid, block_n, tx, peaks):
    """Of each part of the block's results, from row `first` on, the peak and the sum.

    value is of row first + tx, for the first block_n threads; see swap_peaks.py.
    """
    width = peak_width(block_n)
    if tx < -(-block_n // 32) * 32:  # whole warps
        x = T.alloc_local((1,), "float32")
        top = T.alloc_local((1,), "float32")
        row, part = first + tx, (first + tx) // width
        x[0] = T.if_then_else(T.And(tx < block_n, row < valid), value[0], -T.infinity("float32"))
        top[0] = x[0]
        for bit in T.unroll(int(math.log2(width))):
            top[0] = T.max(top[0], T.shfl_xor(top[0], 1 << bit))
        x[0] = T.exp(x[0] - shift_by(top[0]))
        sum_over_lanes(x, 0, 1, width)
        if tx % width == 0 and tx < block_n and 2 * part < peaks.shape[1]:
            peaks[0, 2 * part] = top[0]
            peaks[0, 2 * part + 1] = x[0]
