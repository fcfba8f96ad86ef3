"""The pieces of swap_gemm, as macros of a block: its ring of tiles, its products, its stores."""

import functools
import operator
from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.split_sum import finish


class Ring(NamedTuple):
    """Tiles of W and A that TMA brings; step i of all `total` lies in slot i % stages."""

    W: Any
    A: Any
    W_slots: Any  # (stages, block_n, block_k)
    A_slots: Any  # (stages, block_m, block_k)
    full: Any  # a barrier a slot
    first: Any  # row of W of the block's first tile
    row: Any  # of A
    part: Any  # the first step's place in K
    steps: int  # of a tile of the result
    total: int

    @property
    def stages(self) -> int:
        return int(self.W_slots.shape[0])


@T.macro
def load_weights(ring, i):
    """Ask for the weights of step i; the slot's barrier is to wait for their bytes."""
    row = ring.first + i // ring.steps * ring.W_slots.shape[1]
    _load(ring.W, row, ring.part + i % ring.steps, ring.W_slots, ring.full, i % ring.stages, 0)


@T.macro
def load_rows(ring, i):
    """Ask for the rows of step i, and arrive."""
    _load(ring.A, ring.row, ring.part + i % ring.steps, ring.A_slots, ring.full, i % ring.stages, 1)


@T.macro
def _load(X, row, step, slots, full, slot, arrive):
    stop, cols, note = row + slots.shape[1], slots.shape[2], {"emit_arrive": arrive}
    T.tma_copy(
        X[row:stop, step * cols : (step + 1) * cols],
        slots[slot, :, :],
        barrier=full[slot],
        annotations=note,
    )


@T.macro
def multiply(ring, acc, tile_index, group, groups):
    """acc (block_n, block_m) = the products of every groups-th step of a tile, from `group` on."""
    T.clear(acc)
    for ko in T.serial(-(-(ring.steps - group) // groups)):
        i = tile_index * ring.steps + ko * groups + group
        slot = i % ring.stages
        T.barrier_wait(ring.full[slot], i // ring.stages % 2)
        T.gemm(ring.W_slots[slot, :, :], ring.A_slots[slot, :, :], acc, transpose_B=True)
        if i + ring.stages < ring.total:
            T.sync_threads()  # all of the group have read what is in the slot
            load_weights(ring, i + ring.stages)
            load_rows(ring, i + ring.stages)


@T.macro
def multiply_in_groups(ring, sums, threads):
    """sums (groups, block_m, >= block_n) = the products of each group of so many threads."""
    tx = T.get_thread_binding()
    block_m, block_n = ring.A_slots.shape[1], ring.W_slots.shape[1]
    for group in list(range(int(sums.shape[0]))):  # a list, so that each has code of its own
        if tx >= group * threads and tx < (group + 1) * threads:
            acc = T.alloc_fragment((block_n, block_m), "float32")
            multiply(ring, acc, 0, group, int(sums.shape[0]))
            for i, j in T.Parallel(block_n, block_m):
                sums[group, j, i] = acc[i, j]
    T.sync_threads()


@T.macro
def load_places(tile, positions, row, places):
    for j in tile.parallel(places.shape[0]):
        if row + j < positions.shape[0]:
            places[j] = positions[row + j]


@T.macro
def load_tile(tile, X, row, col, fragment):
    for j, i in tile.parallel(fragment.shape[0], fragment.shape[1]):
        if row + j < X.shape[0] and col + i < X.shape[1]:
            fragment[j, i] = X[row + j, col + i]


@T.macro
def finish_tile(tile, activation, total, bias, residual, done):
    """done (block_m, block_n) = act(total(i, j) + bias[i]) + residual[j, i], in its dtype."""
    for j, i in tile.parallel(done.shape[0], done.shape[1]):
        b = None if bias is None else bias[i]
        r = None if residual is None else residual[j, i]
        done[j, i] = T.cast(finish(tile, activation, total(i, j), b, r), done.dtype)


@T.macro
def store(tile, done, C, at, row, col):
    """C (m, n), or part at[0] of C (parts, m, n), from row and col on = done."""
    for j, i in tile.parallel(done.shape[0], done.shape[1]):
        if row + j < C.shape[-2] and col + i < C.shape[-1]:
            place = (*at, row + j, col + i)
            C[place] = done[j, i]


@T.macro
def keep(tile, done, places, cache, start, row, col):
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
