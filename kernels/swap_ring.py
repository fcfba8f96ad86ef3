"""The ring of tiles of swap_gemm, and the products of what is in it, as macros of a block."""

from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.rings import load_step
from minifused.kernels.schedule import SwapSchedule


class Ring(NamedTuple):
    """Tiles of W and A that TMA brings; step i of all `total` lies in slot i % stages."""

    W: Any
    A: Any
    W_slots: Any  # (stages, block_n, block_k), without stages where there is no TMA
    A_slots: Any  # (stages, block_m, block_k)
    full: Any  # a barrier a slot, None without TMA
    first: Any  # row of W of the block's first tile
    row: Any  # of A
    stages: int
    steps: int  # of a tile of the result
    total: int
    begin: Any = 0  # the first step through K that is the block's


def stages_of(schedule: SwapSchedule, total: int) -> int:
    """Slots of the ring: no more than steps, and if fewer, each is of one group of warps."""
    stages = min(schedule.num_stages, total)
    return stages if stages == total else stages - stages % schedule.groups  # all see each phase


@T.macro
def fill(ring, load):
    if ring.full is not None:
        for i in T.serial(ring.stages):
            load(ring, i)


def step_of(ring, i):
    """The step through K that load i is of."""
    return ring.begin + i % ring.steps


@T.macro
def load_weights(ring, i):
    """Ask for the weights of step i; the slot's barrier is to wait for their bytes."""
    row = ring.first + i // ring.steps * ring.W_slots.shape[1]
    load_step(ring.W, row, step_of(ring, i), ring.W_slots, ring.full, i % ring.stages, 0)


@T.macro
def load_rows(ring, i):
    """Ask for the rows of step i, and arrive."""
    load_step(ring.A, ring.row, step_of(ring, i), ring.A_slots, ring.full, i % ring.stages, 1)


def _share(steps: int, group: int, groups: int) -> int:
    """How many of the steps group, group + groups, … there are; 0 leaves no loop."""
    return len(range(group, steps, groups))


@T.macro
def multiply(ring, acc, tile_index, group, groups):
    """acc (block_n, block_m) = the products of every groups-th step of a tile, from `group` on.

    How many there are is an int: of a count that is 0 or 1 at run time, TileLang 0.1.15 makes code
    that runs once.
    """
    T.clear(acc)
    for ko in T.serial(_share(ring.steps, group, groups)):
        i = tile_index * ring.steps + ko * groups + group
        slot = i % ring.stages
        T.barrier_wait(ring.full[slot], i // ring.stages % 2)
        T.gemm(ring.W_slots[slot, :, :], ring.A_slots[slot, :, :], acc, transpose_B=True)
        if i + ring.stages < ring.total:
            T.sync_threads()  # all of the group have read what is in the slot
            load_weights(ring, i + ring.stages)
            load_rows(ring, i + ring.stages)


@T.macro
def multiply_and_share(ring, sums):
    """sums (1, block_m, >= block_n) = the products, where all of the ring has been read."""
    block_m, block_n = ring.A_slots.shape[1], ring.W_slots.shape[1]
    acc = T.alloc_fragment((block_n, block_m), "float32")
    multiply(ring, acc, 0, 0, 1)
    T.sync_threads()
    for i, j in T.Parallel(block_n, block_m):
        sums[0, j, i] = acc[i, j]
    T.sync_threads()


@T.macro
def multiply_piped(tile, ring, acc, tile_index):
    """The same without TMA: one tile of W and A each, which TileLang keeps several copies of."""
    col = ring.first + tile_index * ring.W_slots.shape[0]
    T.clear(acc)
    for ko in T.Pipelined(ring.steps, num_stages=ring.stages):
        T.copy(ring.W[col, ko * ring.W_slots.shape[1]], ring.W_slots)
        T.copy(ring.A[ring.row, ko * ring.A_slots.shape[1]], ring.A_slots)
        tile.gemm(ring.W_slots, ring.A_slots, acc, transpose_b=True)


@T.macro
def multiply_in_groups(ring, sums, tile_index, threads):
    """sums (groups, block_m, >= block_n) = the products of each group of so many threads."""
    tx = T.get_thread_binding()
    block_m, block_n = ring.A_slots.shape[1], ring.W_slots.shape[1]
    if ring.steps < ring.total:
        T.sync_threads()  # all have read the sums of the tile before
    for group in list(range(int(sums.shape[0]))):  # a list, so that each has code of its own
        if tx >= group * threads and tx < (group + 1) * threads:
            acc = T.alloc_fragment((block_n, block_m), "float32")
            multiply(ring, acc, tile_index, group, int(sums.shape[0]))
            for i, j in T.Parallel(block_n, block_m):
                sums[group, j, i] = acc[i, j]
    T.sync_threads()
