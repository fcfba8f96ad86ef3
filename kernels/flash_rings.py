"""What flash_attention_sm90 loads, and its way to shared memory."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from minifused.kernels.flash_work import Pieces, find
from minifused.kernels.rings import place_in
from minifused.kernels.schedule import FlashSchedule

WARPGROUP = 128


@dataclass(frozen=True)
class Rings:
    """Tiles in shared memory, and barriers: `full` of what is loaded, `free` of what was read."""

    schedule: FlashSchedule
    q: Any  # (q_slots, block_m, head_dim), or without the first if it is 1
    k: Any  # (num_stages, block_n, head_dim), as v
    v: Any
    q_full: Any  # (q_slots,)
    q_free: Any
    k_full: Any  # (num_stages,), as all below
    k_free: Any
    v_full: Any
    v_free: Any

    def queries(self, t):
        """Those of a block's t-th piece of work."""
        slots = self.schedule.q_slots
        return self.q if slots == 1 else self.q[T.truncmod(t, slots), :, :]

    def wait_queries(self, t):
        slot, turn = place_in(self.schedule.q_slots, t)
        return T.barrier_wait(self.q_full[slot], turn)

    def release_queries(self, t):
        return T.barrier_arrive(self.q_free[place_in(self.schedule.q_slots, t)[0]])

    def slot(self, i):
        return place_in(self.schedule.num_stages, i)[0]

    def turn(self, i):
        return place_in(self.schedule.num_stages, i)[1]

    def wait(self, barriers, i):
        """For the i-th load of a ring."""
        return T.barrier_wait(barriers[self.slot(i)], self.turn(i))

    def wait_free(self, barriers, i):
        """For the slot of the i-th load; at first all are free."""
        return T.barrier_wait(barriers[self.slot(i)], self.turn(i) ^ 1)

    def arrive(self, barriers, i):
        return T.barrier_arrive(barriers[self.slot(i)])


@T.macro
def load_queries(r: Rings, Q, work, t):
    first, (slot, turn) = work[2], place_in(r.schedule.q_slots, t)
    T.barrier_wait(r.q_free[slot], turn ^ 1)
    T.tma_copy(Q[work[0], first : first + r.schedule.block_m, 0, work[1], :], r.queries(t),
               barrier=r.q_full[slot])  # fmt: skip
    T.barrier_arrive(r.q_full[slot])


@T.macro
def load_pieces(r: Rings, Q, K, V, pieces: Pieces, k_slot, v_slot):
    """All that a thread block's pieces of work want, in the order in which they want it."""
    work = T.alloc_local((6,), "int32")
    done = T.alloc_local((1,), "int32")  # steps of the pieces before this one
    done[0] = 0
    for t in T.serial(pieces.count):
        find(work, pieces, t)
        begin = done[0] if r.schedule.resident else 0
        load_queries(r, Q, work, t)
        load_blocks(r, K, V, work[0], work[1], k_slot, v_slot, begin, work[4])
        done[0] += work[4]


@T.macro
def load_blocks(r: Rings, K, V, bz, by, k_slot, v_slot, begin, n):
    """Fill the rings with n blocks of keys and of values, the last ones first.

    `begin` loads of this thread block came before.
    """
    width = r.schedule.block_n
    for kk in T.serial(n):
        i, key0 = begin + kk, (n - 1 - kk) * width
        slot = r.slot(i)
        r.wait_free(r.k_free, i)
        T.tma_copy(K[bz, key0 : key0 + width, k_slot, by, :], r.k[slot, :, :],
                   barrier=r.k_full[slot])  # fmt: skip
        r.arrive(r.k_full, i)
        r.wait_free(r.v_free, i)
        T.tma_copy(V[bz, key0 : key0 + width, v_slot, by, :], r.v[slot, :, :],
                   barrier=r.v_full[slot])  # fmt: skip
        r.arrive(r.v_full, i)
