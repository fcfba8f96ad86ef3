"""Which queries are whose in flash_attention_sm90."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from minifused.kernels.schedule import FlashSchedule


@dataclass(frozen=True)
class Pieces:
    """The pieces of work of a thread block: blocks of queries of a head."""

    schedule: FlashSchedule
    causal: bool
    sizes: Any  # batch, heads, q_len, k_len
    lengths: Any  # of queries and of keys, (batch,) int32 each, or None twice
    first: Any
    step: Any  # from one to the next
    count: Any


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
def find(work, pieces: Pieces, t):
    """Fill in the t-th piece of work of this thread block.

    work: its batch row, head, first query, how many queries and steps, and how many keys the first
    query sees. It lies in registers since TileLang would repeat an expression at each use.
    """
    batch, heads, q_len, k_len = pieces.sizes
    causal, (q_lengths, kv_lengths) = pieces.causal, pieces.lengths
    block_m, block_n = pieces.schedule.block_m, pieces.schedule.block_n
    blocks, together = T.ceildiv(q_len, block_m), pieces.schedule.heads_together
    index = pieces.first + t * pieces.step
    head, block = place(index, blocks, heads * batch, together, causal)
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
