"""What flash_attention_sm90 loads: which queries are whose, and the way to shared memory."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from minifused.kernels.schedule import FlashSchedule

WARPGROUP = 128


@dataclass(frozen=True)
class Rings:
    """Tiles in shared memory, and barriers: `full` of what is loaded, `free` of what was read."""

    schedule: FlashSchedule
    q: Any  # (block_m, head_dim)
    k: Any  # (num_stages, block_n, head_dim), as v
    v: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any

    def slot(self, i):
        return T.truncmod(i, self.schedule.num_stages)

    def turn(self, i):
        return T.truncmod(T.truncdiv(i, self.schedule.num_stages), 2)

    def wait(self, barriers, i):
        """For the i-th load of a ring."""
        return T.barrier_wait(barriers[self.slot(i)], self.turn(i))

    def wait_free(self, barriers, i):
        """For the slot of the i-th load; at first all are free."""
        return T.barrier_wait(barriers[self.slot(i)], self.turn(i) ^ 1)

    def arrive(self, barriers, i):
        return T.barrier_arrive(barriers[self.slot(i)])


def place(index, blocks, heads_in_all, together, last_first):
    """Of the index-th piece of work: which head of the batch, and which block of its queries.

    `together` heads go through their blocks side by side, so that their keys and values stay in
    L2. `last_first`: with a causal mask the last block is the longest, and has to begin early.
    """
    if together == 1:
        head, block = T.truncdiv(index, blocks), T.truncmod(index, blocks)
    else:
        first = T.truncdiv(index, together * blocks) * together
        rest, width = index - first * blocks, T.min(together, heads_in_all - first)
        head, block = first + T.truncmod(rest, width), T.truncdiv(rest, width)
    return head, blocks - 1 - block if last_first else block


@T.macro
def find(work, index, schedule: FlashSchedule, causal, sizes, q_lengths, kv_lengths):
    """Fill in the index-th piece of work; sizes are (batch, heads, q_len, k_len).

    work: its batch row, head, first query, how many queries and steps, and how many keys the first
    query sees. It lies in registers since TileLang would repeat an expression at each use.
    """
    batch, heads, q_len, k_len = sizes
    block_m, block_n = schedule.block_m, schedule.block_n
    blocks = T.ceildiv(q_len, block_m)
    head, block = place(index, blocks, heads * batch, schedule.heads_together, causal)
    work[0], work[1] = T.truncdiv(head, heads), T.truncmod(head, heads)
    work[2] = block * block_m
    work[3] = (T.min(q_lengths[work[0]], q_len) if q_lengths is not None else q_len) - work[2]
    keys = T.min(kv_lengths[work[0]], k_len) if kv_lengths is not None else k_len
    work[5] = keys - work[3] + 1 if causal else keys
    end = T.min(keys, work[5] + block_m - 1) if causal else keys
    if q_lengths is not None:
        end = T.if_then_else(work[3] > 0, end, 0)
    # At least one block, masked or not, so that no barrier waits for a load never made.
    work[4] = T.truncdiv(T.max(end, 1) + block_n - 1, block_n)


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
