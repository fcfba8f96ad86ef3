"""What swap_gemm makes of its products: the epilogue, and wide stores, as macros of a block."""

import functools
import operator
from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.epilogue import finish
from minifused.kernels.tile import Tile


class End(NamedTuple):
    """How the products of a tile become its result; what is None is left out."""

    tile: Tile
    activation: str | None
    norms: Any  # (block_m, 2): see swap_fold.py
    slope: Any  # (block_n,)
    bias: Any  # (block_n,)
    residual: Any  # (block_m, block_n)
    done: Any  # (block_m, block_n): the result


def fixed(tile, shape, dtype):
    """Shared memory, but not dynamic: for what lies there TileLang would have all threads wait."""
    if not tile.is_cuda:
        return T.alloc_local(shape, dtype)
    return T.alloc_shared(shape, dtype, scope="shared")


@T.macro
def load_places(tile, caches, row, places):
    if caches is not None:
        for j in tile.parallel(places.shape[0]):
            if row + j < caches[0].shape[0]:
                places[j] = caches[0][row + j]


@T.macro
def load_tile(tile, X, row, col, fragment):
    if fragment is not None:
        for j, i in tile.parallel(fragment.shape[0], fragment.shape[1]):
            if row + j < X.shape[0] and col + i < X.shape[1]:
                fragment[j, i] = X[row + j, col + i]


@T.macro
def load_constants(tile, bias, norm, after, col, b, slope, gain):
    """b (block_n) = bias from col on, or of a folded norm slope and b; gain of the norm to come."""
    if norm is not None:
        for i in tile.parallel(b.shape[0]):
            if col + i < norm[1].shape[1]:
                slope[i] = norm[1][0, col + i]
                b[i] = norm[1][1, col + i]
    elif b is not None:
        T.copy(bias[col], b)
    if after is not None:
        T.copy(after[0][col], gain)


@T.macro
def finish_tile(end, total):
    """done = act(norm(total(i, j)) + bias[i]) + residual[j, i], in its dtype."""
    for j, i in end.tile.parallel(end.done.shape[0], end.done.shape[1]):
        end.done[j, i] = T.cast(finished(end, total(i, j), i, j), end.done.dtype)


def finished(end, total, i, j):
    if end.norms is not None:
        total = (total - end.norms[j, 0] * end.slope[i]) * end.norms[j, 1]
    b = None if end.bias is None else end.bias[i]
    r = None if end.residual is None else end.residual[j, i]
    return finish(end.tile, end.activation, total, b, r)


@T.macro
def store(tile, done, C, row, col):
    """C (m, n) from row and col on = done."""
    for j, i in tile.parallel(done.shape[0], done.shape[1]):
        if row + j < C.shape[0] and col + i < C.shape[1]:
            C[row + j, col + i] = done[j, i]


@T.macro
def keep(tile, done, caches, places, row, col):
    """Of a packed query, key and value the latter two also go to rows `places` of their caches."""
    if caches is not None:
        width = caches[1].shape[2]
        _append(tile, done, places, caches[1], width, row, col)
        _append(tile, done, places, caches[2], 2 * width, row, col)


@T.macro
def _append(tile, done, places, cache, start, row, col):
    """Row places[j] of cache (m, capacity, width) = columns from `start` on, if there is one."""
    capacity, width = cache.shape[1], cache.shape[2]
    if col + done.shape[1] > start and col < start + width:
        for j, i in tile.parallel(done.shape[0], done.shape[1]):
            if row + j < cache.shape[0] and places[j] >= 0 and places[j] < capacity:
                if _is_of(col + i - start, width, done.shape[1]):
                    cache[row + j, places[j], col + i - start] = done[j, i]


def _is_of(col, width, block_n):
    """Whether a column lies in a cache: known of all of a block if blocks end where caches do."""
    return int(width) % int(block_n) == 0 or T.And(col >= 0, col < width)


def element(acc, i, j):
    return acc[i, j]


def sum_of(sums, i, j):
    """The products of all groups, in their order."""
    return functools.reduce(operator.add, (sums[g, j, i] for g in range(int(sums.shape[0]))))
