"""swap_gemm for up to 32 rows: weights in registers in place of the ring, as macros of a block.

Shared memory stays small, so that the next kernel's blocks fit on an SM beside those that still
compute, and ask for their weights. A warp holds 8, 16 or 32 weight rows, or a step of their
columns, as gemv's do; 8 rows of A are the columns of the tensor core's other operand. For what is
made of both see swap_held_products.py.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.gemv_output import LANES
from minifused.kernels.gemv_row import CHUNK, VECTOR, load_vector
from minifused.kernels.limits import TILE_ROWS, held_rows
from minifused.kernels.schedule import SwapSchedule


class Held(NamedTuple):
    """What a lane holds of both operands: of each turn of its group of warps a part of K.

    A is a tensor of all rows, or shared memory with those of the block.
    """

    W: Any
    A: Any
    w: Any  # (warp_n // LANES * chunks, VECTOR)
    a: list[Any]  # (chunks, VECTOR) of each tile on its way
    first: Any  # row of W of the block
    row: Any  # of A
    schedule: SwapSchedule
    turns: int
    shared: bool

    @property
    def tiles(self) -> int:
        return self.schedule.block_m // TILE_ROWS

    @property
    def chunks(self) -> int:
        return int(self.a[0].shape[0])


def turns_of(schedule: SwapSchedule, k: int) -> int:
    return -(-k // (schedule.groups * schedule.block_k))


def lane_shape(schedule: SwapSchedule, k: int, rows: int) -> tuple[int, int]:
    """Of what a lane holds of so many rows: parts of K differ by a chunk at most."""
    parts = turns_of(schedule, k) * schedule.groups
    return rows // LANES * -(-k // (CHUNK * parts)), VECTOR


def place_of(s: SwapSchedule) -> tuple[Any, Any, Any]:
    """A thread's lane, its group, and the first of its warp's weight rows in the block."""
    tx = T.get_thread_binding()
    threads = s.num_threads // s.groups
    return tx % 32, tx // threads, tx % threads // 32 * held_rows(s)


@T.macro
def hold_weights(held, turn):
    """Ask for the weights of a turn; past the last row there is that one again."""
    lane, _, rows = place_of(held.schedule)
    for r in T.unroll(held_rows(held.schedule) // LANES):
        row = T.min(held.first + rows + LANES * r + lane // 4, held.W.shape[0] - 1)
        for c in list(range(held.chunks)):
            col, inside = _column(held, turn, c)
            load_vector(held.W, row, col, inside, held.w, r * held.chunks + c)


@T.macro
def share_rows(A, row, A_shared, num_threads):
    """Ask for A_shared (block_m, >= k) = rows of A, a tile after another; see hold_rows."""
    T.assume(A.shape[0] > 0)
    tx = T.get_thread_binding()
    lanes, k = num_threads // TILE_ROWS, int(A.shape[1])  # lanes of a row
    for t in list(range(int(A_shared.shape[0]) // TILE_ROWS)):
        j, lane = TILE_ROWS * t + tx // lanes, tx % lanes
        own = T.min(row + j, A.shape[0] - 1)
        for i in list(range(-(-k // (VECTOR * lanes)))):
            col = (i * lanes + lane) * VECTOR
            if (i + 1) * lanes * VECTOR <= k or col < k:
                _copy(A, own, A_shared, j, col)
        T.ptx_commit_group()


def _copy(A, own, A_shared, row, col):
    return T.ptx_cp_async(
        T.access_ptr(A_shared[row, col], "w", extent=VECTOR),
        T.access_ptr(A[own, col], "r", extent=VECTOR),
        VECTOR,
    )


@T.macro
def hold_rows(held, turn, t):
    """Ask for those columns of tile t of the rows; past the last row there is that one again."""
    T.assume(held.A.shape[0] > 0)
    j = held.row + TILE_ROWS * t + place_of(held.schedule)[0] // 4
    row = T.min(j, held.A.shape[0] - 1)
    for c in list(range(held.chunks)):
        col, inside = _column(held, turn, c)
        load_vector(held.A, row, col, inside, held.a[t % len(held.a)], c)


@T.macro
def hold_first_rows(held, turn):
    for t in list(range(len(held.a))):
        hold_rows(held, turn, t)


def _column(held: Held, turn: Any, c: int) -> tuple[Any, Any]:
    """Of a lane's chunk c the first column, and whether there is such a chunk."""
    k, (lane, group, _) = int(held.W.shape[1]), place_of(held.schedule)
    chunks, parts = -(-k // CHUNK), held.turns * held.schedule.groups
    part, least, longer = turn * held.schedule.groups + group, chunks // parts, chunks % parts
    col = (part * least + (T.min(part, longer) if longer else 0) + c) * CHUNK + lane % 4 * VECTOR
    if k % CHUNK == 0 or c < least - 1:
        return col, c < least or part < longer
    return col, col < k if c < least else T.And(part < longer, col < k)
