"""The products of what swap_held.py has in registers, as macros of a block.

Tiles of 8 rows of A meet the same weights one after another, while those behind are on their way;
the sums of one are left in shared memory before the next, and so take no more registers.
"""

import tilelang.language as T

from minifused.kernels.gemv_output import CHAINS, LANES, dot, of_chains
from minifused.kernels.limits import TILE_ROWS, held_rows
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_held import (
    hold_first_rows,
    hold_rows,
    hold_weights,
    place_of,
    turns_of,
)


def acc_shapes(schedule: SwapSchedule, k: int) -> list[tuple[int]]:
    """Of sums of a tile of A, or of each if there are more turns than one."""
    tiles = schedule.block_m // TILE_ROWS if turns_of(schedule, k) > 1 else 1
    return [(CHAINS * -(-held_rows(schedule) // 16) * 4,)] * tiles


@T.macro
def multiply_held(held, acc, sums):
    """sums (groups, block_m, >= block_n) = each group's products; all of a first turn is asked."""
    multiply_turn(held, 0, acc, sums, True)
    for turn in T.serial(held.turns - 1):
        hold_weights(held, turn + 1)
        hold_first_rows(held, turn + 1)
        multiply_turn(held, turn + 1, acc, sums, False)
    if held.turns > 1:
        for t in list(range(held.tiles)):
            leave_products(held, t, acc[t], sums)


@T.macro
def multiply_turn(held, turn, acc, sums, first):
    for t in list(range(held.tiles)):
        if held.shared:
            T.ptx_wait_group(held.tiles - 1 - t)
            T.sync_threads()
            hold_rows(held, turn, t)
        if first:
            T.clear(acc[t % len(acc)])
        dot(held.w, held.a[t % len(held.a)], acc[t % len(acc)])
        if not held.shared and t + len(held.a) < held.tiles:
            hold_rows(held, turn, t + len(held.a))
        if held.turns == 1:
            leave_products(held, t, acc[0], sums)


@T.macro
def leave_products(held, t, acc, sums):
    lane, group, rows = place_of(held.schedule)
    for r in T.unroll(held_rows(held.schedule) // LANES):
        for e in T.unroll(2):  # of 16 rows a lane has two, in two columns each
            total = of_chains(acc, r // 2 * 4 + r % 2 * 2 + e)
            j, i = TILE_ROWS * t + lane % 4 * 2 + e, rows + LANES * r + lane // 4
            sums[group, j, i] = total
