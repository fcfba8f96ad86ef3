"""What gemm_sm90 makes of its products: the epilogue, and stores, as macros of a block."""

import math
from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.epilogue import activate
from minifused.kernels.limits import CHUNK
from minifused.kernels.tile import Tile

VECTOR = 8  # columns that lie in a matrix or past it together
# Which elements there are is asked here: TileLang would ask of each, one by one.
UNCHECKED = {"tl.disable_safe_memory_legalize": True}
SETTLED = (1, 2, 7)  # a named barrier for each group; TileLang's begin at 3


class Output(NamedTuple):
    tile: Tile
    activation: str | None
    bias: Any  # (n,), None without one
    R: Any  # (m, n), None without one
    C: Any
    ring: Any  # slots of A that are free to store through, None if the ring goes on
    threads: int  # that share a tile

    def at(self, by, bx, i, j, block):
        """Element (i, j) of the tile in row by and column bx of tiles."""
        return by * int(block.shape[0]) + i, bx * int(block.shape[1]) + j

    def holds(self, by, bx, i, j, block):
        """Whether C has it; asked of eight columns at once."""
        (m, n), (row, col) = self.C.shape, self.at(by, bx, i, j // VECTOR * VECTOR, block)
        return row < m if int(n) % int(block.shape[1]) == 0 else T.And(row < m, col < n)


@T.macro
def begin_tile(out: Output, acc, b, bx):
    """acc = bias: adding it first costs no more than zeros."""
    if out.bias is None:
        T.clear(acc)
    else:
        n, block_n = int(out.bias.shape[0]), int(b.shape[0])
        for j in T.Parallel(block_n):
            if n % block_n == 0:
                b[j] = out.bias[bx * block_n + j]
            else:
                if bx * block_n + j // VECTOR * VECTOR < n:
                    b[j] = out.bias[bx * block_n + j]
        for i, j in T.Parallel(acc.shape[0], block_n):
            acc[i, j] = T.cast(b[j], "float32")


@T.macro
def load_residual(out: Output, r, by, bx):
    for i, j in T.Parallel(r.shape[0], r.shape[1]):
        if out.holds(by, bx, i, j, r):
            r[i, j] = out.R[out.at(by, bx, i, j, r)]


@T.macro
def finish_tile(out: Output, acc, r, staged, by, bx, group: int):
    """The tile in row by and column bx of tiles of C = act(acc) + r, in its dtype.

    r is None if it is still to be loaded, staged if the tile goes through the ring.
    """
    if out.activation is not None:
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            acc[i, j] = activated(out, acc[i, j])
    if out.R is not None:
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            if r is not None:
                acc[i, j] += T.cast(r[i, j], "float32")
            else:
                if out.holds(by, bx, i, j, acc):
                    acc[i, j] += T.cast(out.R[out.at(by, bx, i, j, acc)], "float32")
    if out.C.dtype == "float32":
        # A quad of threads has 32 bytes of a row, which is what memory deals in.
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            if out.holds(by, bx, i, j, acc):
                out.C[out.at(by, bx, i, j, acc)] = acc[i, j]
    else:
        row, col = by * acc.shape[0], bx * acc.shape[1]
        if staged is None:
            _store_through_ring(out, acc, row, col, group)
        else:
            # What was stored before this goes to memory beside the products, or, of a tile that is
            # stored in turns, while this is waited for.
            width = int(staged.shape[1])
            for c in list(range(int(acc.shape[1]) // width)):
                T.tma_store_wait(0)
                T.sync_threads(SETTLED[group], out.threads)
                T.copy(acc[:, c * width : (c + 1) * width], staged)
                first = col + c * width
                T.tma_copy(staged, out.C[row : row + acc.shape[0], first : first + width])


@T.macro
def _store_through_ring(out: Output, acc, row, col, group: int):
    """A chunk of columns a slot of A."""
    T.sync_threads(SETTLED[group], out.threads)  # all have read what is in the ring
    for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
        out.ring[j // CHUNK, i, j % CHUNK] = T.cast(acc[i, j], out.C.dtype)
    for c in list(range(int(acc.shape[1]) // CHUNK)):
        first = col + c * CHUNK
        T.tma_copy(out.ring[c, :, :], out.C[row : row + acc.shape[0], first : first + CHUNK])


def activated(out: Output, x):
    """With --use_fast_math T.tanh is one instruction, off by 2^-11 at most: less than bfloat16."""
    if out.activation == "gelu_tanh" and out.C.dtype == "bfloat16":
        half = 0.5 * x
        u = x * (math.sqrt(2 / math.pi) + math.sqrt(2 / math.pi) * 0.044715 * (x * x))
        return half + half * T.tanh(u)
    return x if out.activation is None else activate(out.tile, out.activation, x)
