"""swap_gemm for up to 8 rows: weights in registers in place of the ring, as macros of a block.

Shared memory stays small, so that the next kernel's blocks fit on an SM beside those that still
compute, and ask for their weights. A warp holds 8, 16 or 32 weight rows, or a step of their
columns, as gemv's do; the rows of A are the 8 columns of the tensor core's other operand.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.gemv_output import CHAINS, LANES, dot, of_chains
from minifused.kernels.gemv_row import CHUNK, VECTOR, load_lane, load_vector
from minifused.kernels.limits import held_rows
from minifused.kernels.schedule import SwapSchedule


class Held(NamedTuple):
    """What a lane holds of both operands, which groups of warps take by turns, a step each."""

    W: Any
    A: Any
    w: Any  # (warp_n // LANES * chunks, VECTOR): of a lane
    a: Any  # (chunks, VECTOR)
    first: Any  # row of W of the block
    row: Any  # of A
    schedule: SwapSchedule
    steps: int  # through K


def lane_shape(schedule: SwapSchedule, rows: int) -> tuple[int, int]:
    """Of what a lane holds of a step of so many rows."""
    return rows // LANES * (schedule.block_k // CHUNK), VECTOR


def _place(s: SwapSchedule) -> tuple[Any, Any, Any]:
    """A thread's lane, its group, and the first of its warp's weight rows in the block."""
    tx = T.get_thread_binding()
    threads = s.num_threads // s.groups
    return tx % 32, tx // threads, tx % threads // 32 * held_rows(s)


@T.macro
def hold_weights(held, turn):
    """Ask for the weights of the step that a group has in its turn; past the last row it is it."""
    if held is not None:
        lane, _, rows = _place(held.schedule)
        for r in T.unroll(held_rows(held.schedule) // LANES):
            row = T.min(held.first + rows + LANES * r + lane // 4, held.W.shape[0] - 1)
            load_lane(held.W, row, _column(held, turn), _is_whole(held), held.w, r, held.a.shape[0])


@T.macro
def hold_rows(held, turn):
    """Ask for the same columns of the rows; past the last row there are zeros."""
    if held is not None:
        row = held.row + _place(held.schedule)[0] // 4
        for c in T.unroll(held.a.shape[0]):
            col = _column(held, turn) + c * CHUNK
            inside = row < held.A.shape[0]
            if not _is_whole(held):
                inside = T.And(inside, col < held.A.shape[1])
            load_vector(held.A, row, col, inside, held.a, c)


def _column(held: Held, turn):
    """The first of a lane's columns."""
    lane, group, _ = _place(held.schedule)
    return (turn * held.schedule.groups + group) * held.schedule.block_k + lane % 4 * VECTOR


def _is_whole(held: Held) -> bool:
    """Whether no lane reaches past the last column."""
    s = held.schedule
    return _turns(held) * s.groups * s.block_k == int(held.W.shape[1])


def _turns(held: Held) -> int:
    return -(-held.steps // held.schedule.groups)


@T.macro
def multiply_held(held, sums):
    """sums (groups, 8, >= block_n) = the products of each group, of which a step is there."""
    acc = T.alloc_local((CHAINS * -(-held_rows(held.schedule) // 16) * 4,), "float32")
    T.clear(acc)
    dot(held.w, held.a, acc)
    for turn in T.serial(_turns(held) - 1):
        hold_weights(held, turn + 1)
        hold_rows(held, turn + 1)
        dot(held.w, held.a, acc)
    lane, group, rows = _place(held.schedule)
    for r in T.unroll(held_rows(held.schedule) // LANES):
        for e in T.unroll(2):  # a lane has two columns of two of 16 rows
            total = of_chains(acc, r // 2 * 4 + r % 2 * 2 + e)
            sums[group, lane % 4 * 2 + e, rows + LANES * r + lane // 4] = total
    T.sync_threads()
