"""How the softmax of a wide row walks it in whole vectors, wherever the row begins in memory.

A matrix is one long array here. A row of it begins at any element, so its valid columns are a head
and a tail, each less than a vector, and between them the vectors that lie where a wide access may.
A lane (a thread; on a CPU, a place in a loop) keeps the online softmax of its own elements (Milakov
and Gimelshein, arXiv 1805.02867). Lanes are merged once, so that no step waits for other threads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import tilelang.language as T

from minifused.kernels.limits import ITEM_BYTES
from minifused.kernels.online_softmax import shift_by
from minifused.kernels.schedule import RowSchedule
from minifused.kernels.tile import Tile

VECTOR_BYTES = 16
FAST_MATH = ["--use_fast_math"]  # nvcc's


@dataclass(frozen=True)
class RowLanes:
    """A step takes `vectors` vectors of `width` columns a lane."""

    tile: Tile
    valid: int
    lanes: int
    vectors: int
    width: int
    exp: Callable  # of a difference from a maximum
    fast_math: bool

    @property
    def stride(self) -> int:
        """Vectors of a step."""
        return self.lanes * self.vectors

    def span(self, start):
        """The vectors of the row that begins at element `start`: the first, and one past them."""
        first = T.ceildiv(start, self.width)
        return first, T.max(first, (start + self.valid) // self.width)


def softmax_exp(tile: Tile, out_dtype: str) -> Callable:
    """e^x of a difference from a maximum.

    16-bit results hide the rounding of x * log2(e); float32 results would not (28 times the error
    at wide logits), so they take the natural exponential of the exact difference.
    """
    if out_dtype == "float32":
        return tile.exp
    return lambda x: tile.exp2(x * math.log2(math.e))


def vector_width(dtype: str, out_dtype: str, schedule: RowSchedule) -> int:
    """Columns of a vector, or 0 if the lanes cannot share a step in whole vectors.

    The wider of the two dtypes has 16 bytes: one vector is one access to X and one to Y.
    """
    columns, rest = divmod(schedule.block_n, schedule.num_threads)
    width = math.gcd(VECTOR_BYTES // max(ITEM_BYTES[dtype], ITEM_BYTES[out_dtype]), columns)
    return 0 if rest or schedule.num_threads < 2 * width else width


def row_lanes(tile: Tile, valid: int, dtype: str, out_dtype: str, s: RowSchedule) -> RowLanes:
    width = vector_width(dtype, out_dtype, s)
    vectors, exp = s.block_n // (s.num_threads * width), softmax_exp(tile, out_dtype)
    fast_math = tile.is_cuda and out_dtype != "float32"
    return RowLanes(tile, valid, s.num_threads, vectors, width, exp, fast_math)


# x is (vectors, lanes, width), m and l (lanes): a lane's maximum, and its sum of exp(x - m).
# A comparison with a whole tensor's length never fails. It is what shows TileLang that a vector
# lies inside; else it would check, and move, element by element.


@T.macro
def load(r, X, first, x):
    """x = a step of whole vectors from vector `first` on."""
    if (first + r.stride) * r.width <= X.shape[0]:
        for k, i, j in r.tile.parallel(r.vectors, r.lanes, r.width):
            x[k, i, j] = X[(first + k * r.lanes + i) * r.width + j]


@T.macro
def load_up_to(r, X, first, last, x):
    """The same, with -inf from vector `last` on."""
    vectors = int(x.shape[0])
    T.fill(x, T.cast(-T.infinity("float32"), x.dtype))
    for k, i, j in r.tile.parallel(vectors, r.lanes, r.width):
        vector = first + k * r.lanes + i
        if vector < last and (vector + 1) * r.width <= X.shape[0]:
            x[k, i, j] = X[vector * r.width + j]


@T.macro
def load_edges(r, X, start, first, last, head, tail, x):
    """x (1, lanes, 1) = the head in the first lanes, the tail in the next, and -inf."""
    T.fill(x, -T.infinity("float32"))
    for i in r.tile.parallel(r.lanes):
        if head and i < r.width and start + i < T.min(first * r.width, start + r.valid):
            x[0, i, 0] = T.cast(X[start + i], "float32")
        at = (last - 1) * r.width + i
        if tail and r.width <= i and i < 2 * r.width and at < start + r.valid:
            x[0, i, 0] = T.cast(X[at], "float32")


@T.macro
def add(r, x, m, l, shift):
    """Take x into m and l."""
    for i in r.tile.parallel(r.lanes):
        shift[i] = m[i]
    for k in T.unroll(int(x.shape[0])):
        for j in T.unroll(int(x.shape[2])):
            for i in r.tile.parallel(r.lanes):
                m[i] = T.max(m[i], T.cast(x[k, i, j], "float32"))
    for i in r.tile.parallel(r.lanes):
        before = shift[i]
        shift[i] = shift_by(m[i])
        l[i] *= r.exp(before - shift[i])
    for k in T.unroll(int(x.shape[0])):
        for j in T.unroll(int(x.shape[2])):
            for i in r.tile.parallel(r.lanes):
                l[i] += r.exp(T.cast(x[k, i, j], "float32") - shift[i])


@T.macro
def merge(r, m, l, row_max, row_sum):
    """row_max (1) and row_sum (1) of all lanes."""
    T.reduce_max(m, row_max, dim=0)
    for i in r.tile.parallel(r.lanes):
        shift = shift_by(row_max[0])
        l[i] *= r.exp(m[i] - shift)
    T.reduce_sum(l, row_sum, dim=0)
