"""The ring of tiles of gemm_sm90: which tile of C is whose, what is loaded, and the products."""

from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.rings import load_step, place_in
from minifused.kernels.schedule import RingGemmSchedule

WARPGROUP = 128
WARP = 32
TURN = 8  # the first of the named barriers by which groups take turns; TileLang's are below


class Ring(NamedTuple):
    """Tiles of A and W in shared memory, and barriers: `full` of loads, `free` of what was read.

    Step i of all that a thread block goes through lies in slot i % num_stages.
    """

    schedule: RingGemmSchedule
    A: Any
    W: Any
    A_slots: Any  # (num_stages, block_m, block_k)
    W_slots: Any  # (num_stages, block_n, block_k)
    full: Any
    free: Any
    steps: int  # of a tile of C

    def slot(self, i):
        return place_in(self.schedule.num_stages, i)[0]

    def turn(self, i):
        return place_in(self.schedule.num_stages, i)[1]


@T.macro
def place(at, index, schedule: RingGemmSchedule, m, n):
    """at = the row and the column, in tiles, of the index-th tile of C (m, n).

    Tiles go down `swizzle` rows of tiles, then to the next column: those in flight share operands
    in L2. They lie in registers since TileLang would repeat an expression at each use, and count
    tiles since it then sees that vectors are aligned.
    """
    rows, cols = T.ceildiv(m, schedule.block_m), -(-n // schedule.block_n)
    if schedule.swizzle:
        first = T.truncdiv(index, schedule.swizzle * cols) * schedule.swizzle
        rest, width = index - first * cols, T.min(schedule.swizzle, rows - first)
        at[0] = first + T.truncmod(rest, width)
        at[1] = T.truncdiv(rest, width)
    else:
        at[0] = T.truncmod(index, rows)
        at[1] = T.truncdiv(index, rows)


@T.macro
def load_weights_ahead(r: Ring, col, first=0):
    """Ask for W of the first steps, before anything that a kernel may still write is read."""
    for i in T.serial(min(r.steps, r.schedule.num_stages)):
        load_step(r.W, col, first + i, r.W_slots, r.full, r.slot(i), 0)


@T.macro
def load(r: Ring, row, col, begin, ahead, first=0):
    """Ask for the steps of a tile of C through K, from `first` on.

    `begin` steps came before, and the first weights may be ahead.
    """
    for ko in T.serial(r.steps):
        i = begin + ko
        slot = r.slot(i)
        T.barrier_wait(r.free[slot], r.turn(i) ^ 1)  # at first all are free
        if ahead:
            if i >= min(r.steps, r.schedule.num_stages):
                load_step(r.W, col, first + ko, r.W_slots, r.full, slot, 0)
        else:
            load_step(r.W, col, first + ko, r.W_slots, r.full, slot, 0)
        load_step(r.A, row, first + ko, r.A_slots, r.full, slot, 1)


@T.macro
def first_turn(r: Ring, group: int):
    """The first group need not wait for the last."""
    if r.schedule.groups > 1 and group == r.schedule.groups - 1:
        T.named_barrier_arrive(TURN, 2 * WARPGROUP)


@T.macro
def multiply(r: Ring, acc, tx, begin, group: int):
    """acc (block_m, block_n) += the products of a tile; each runs while the next is issued.

    Groups take turns: a barrier tells only whether the last of its phases has passed, so that
    nobody may wait for a load before all earlier ones have come.
    """
    groups = r.schedule.groups
    if groups > 1:
        T.sync_threads(TURN + group, 2 * WARPGROUP)
    for ko in T.serial(r.steps):
        i = begin + ko
        slot = r.slot(i)
        T.barrier_wait(r.full[slot], r.turn(i))
        T.wgmma_gemm(r.A_slots[slot, :, :], r.W_slots[slot, :, :], acc, transpose_B=True,
                     policy=T.GemmWarpPolicy.FullRow)  # fmt: skip
        if ko > 0:
            T.wait_wgmma(1)
            _leave(r, tx, i - 1)
    if groups > 1:
        T.named_barrier_arrive(TURN + (group + 1) % groups, 2 * WARPGROUP)
    T.wait_wgmma(0)
    _leave(r, tx, begin + r.steps - 1)


@T.macro
def _leave(r: Ring, tx, i):
    """Step i has been read by this warp."""
    if tx % WARP == 0:
        T.barrier_arrive(r.free[r.slot(i)])
