"""swap_gemm for up to 8 rows: weights in registers in place of the ring, as macros of a block.

Shared memory stays small, so that the next kernel's blocks fit on an SM beside those that still
compute, and ask for their weights. A warp holds 8, 16 or 32 weight rows, or a step of their
columns, as gemv's do; the rows of A are the 8 columns of the tensor core's other operand.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.gemv_output import CHAINS, LANES, dot, of_chains
from minifused.kernels.gemv_row import CHUNK, VECTOR, load_vector
from minifused.kernels.limits import held_rows
from minifused.kernels.schedule import SwapSchedule


class Held(NamedTuple):
    """What a lane holds of both operands: of each turn of its group of warps a part of K."""

    W: Any
    A: Any
    w: Any  # (warp_n // LANES * chunks, VECTOR)
    a: Any  # (chunks, VECTOR)
    first: Any  # row of W of the block
    row: Any  # of A
    schedule: SwapSchedule
    turns: int


def turns_of(schedule: SwapSchedule, k: int) -> int:
    return -(-k // (schedule.groups * schedule.block_k))


def lane_shape(schedule: SwapSchedule, k: int, rows: int) -> tuple[int, int]:
    """Of what a lane holds of so many rows: parts of K differ by a chunk at most."""
    parts = turns_of(schedule, k) * schedule.groups
    return rows // LANES * -(-k // (CHUNK * parts)), VECTOR


def acc_shape(schedule: SwapSchedule) -> tuple[int]:
    return (CHAINS * -(-held_rows(schedule) // 16) * 4,)


def _place(s: SwapSchedule) -> tuple[Any, Any, Any]:
    """A thread's lane, its group, and the first of its warp's weight rows in the block."""
    tx = T.get_thread_binding()
    threads = s.num_threads // s.groups
    return tx % 32, tx // threads, tx % threads // 32 * held_rows(s)


@T.macro
def hold_weights(held, turn):
    """Ask for the weights of a turn; past the last row there is that one again."""
    lane, _, rows = _place(held.schedule)
    for r in T.unroll(held_rows(held.schedule) // LANES):
        row = T.min(held.first + rows + LANES * r + lane // 4, held.W.shape[0] - 1)
        for c in list(range(int(held.a.shape[0]))):
            col, inside = _column(held, turn, c)
            load_vector(held.W, row, col, inside, held.w, r * held.a.shape[0] + c)


@T.macro
def share_rows(A, row, A_shared, num_threads):
    """Ask for A_shared (8, >= k) = rows of A; past the last row there is that one again."""
    T.assume(A.shape[0] > 0)
    tx = T.get_thread_binding()
    lanes, k = num_threads // 8, int(A.shape[1])  # lanes of a row
    own, lane = T.min(row + tx // lanes, A.shape[0] - 1), tx % lanes
    for i in list(range(-(-k // (VECTOR * lanes)))):
        col = (i * lanes + lane) * VECTOR
        if (i + 1) * lanes * VECTOR <= k or col < k:
            _copy(A, own, A_shared, tx // lanes, col)
    T.ptx_commit_group()


def _copy(A, own, A_shared, row, col):
    return T.ptx_cp_async(
        T.access_ptr(A_shared[row, col], "w", extent=VECTOR),
        T.access_ptr(A[own, col], "r", extent=VECTOR),
        VECTOR,
    )


@T.macro
def hold_rows(held, turn):
    """Ask for the same columns of the rows; past the last row there is that one again."""
    T.assume(held.A.shape[0] > 0)
    row = T.min(held.row + _place(held.schedule)[0] // 4, held.A.shape[0] - 1)
    for c in list(range(int(held.a.shape[0]))):
        col, inside = _column(held, turn, c)
        load_vector(held.A, row, col, inside, held.a, c)


def _column(held: Held, turn: Any, c: int) -> tuple[Any, Any]:
    """Of a lane's chunk c the first column, and whether there is such a chunk."""
    k, (lane, group, _) = int(held.W.shape[1]), _place(held.schedule)
    chunks, parts = -(-k // CHUNK), held.turns * held.schedule.groups
    part, least, longer = turn * held.schedule.groups + group, chunks // parts, chunks % parts
    col = (part * least + (T.min(part, longer) if longer else 0) + c) * CHUNK + lane % 4 * VECTOR
    if k % CHUNK == 0 or c < least - 1:
        return col, c < least or part < longer
    return col, col < k if c < least else T.And(part < longer, col < k)


@T.macro
def multiply_held(held, acc):
    """acc = a warp's products of its rows, of all turns, of which the first is there."""
    T.clear(acc)
    dot(held.w, held.a, acc)
    for turn in T.serial(held.turns - 1):
        hold_weights(held, turn + 1)
        hold_rows(held, turn + 1)
        dot(held.w, held.a, acc)


@T.macro
def leave_products(held, acc, sums):
    """sums (groups, 8, >= block_n) = the products of each group."""
    lane, group, rows = _place(held.schedule)
    for r in T.unroll(held_rows(held.schedule) // LANES):
        for e in T.unroll(2):  # of 16 rows a lane has two, in two columns each
            total = of_chains(acc, r // 2 * 4 + r % 2 * 2 + e)
            sums[group, lane % 4 * 2 + e, rows + LANES * r + lane // 4] = total
