"""FlashAttention forward for sm_90 and 16 bits: one warpgroup loads, the others compute.

As in FlashAttention-3 (Shah et al., arXiv 2407.08608) the loads go ahead through rings in shared
memory, a barrier each way a slot, and products are asynchronous. Either a warpgroup computes the
weights of one block of keys beside the product of the block before with its values (`overlap`), or
it takes turns with others on the same SM. Blocks of keys go backwards: those that need a mask are
the first.
"""

import math

import tilelang.language as T

from minifused.kernels.flash_attend import (
    STORED,
    Fragments,
    attend_in_turn,
    attend_overlapped,
    first_turn,
)
from minifused.kernels.flash_rings import WARPGROUP, Rings, find, load_blocks
from minifused.kernels.flash_steps import LANES, finish
from minifused.kernels.limits import PRODUCER_REGISTERS
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.schedule import FlashSchedule
from minifused.kernels.tile import Tile

HEAD_DIMS = (64, 128)


def takes(tile: Tile, head_dim: int, dtype: str) -> bool:
    return tile.capability == 90 and head_dim in HEAD_DIMS and dtype != "float32"


def flash_attention_sm90_kernel(
    tile: Tile, heads: int, head_dim: int, packed: bool, causal: bool, ragged: bool, scale: float,
    dtype: str, schedule: FlashSchedule,
):  # fmt: skip
    """Build the same as flash_attention_kernel, with all of its arguments but the schedule."""
    block_m, block_n, stages = schedule.block_m, schedule.block_n, schedule.num_stages
    consumers = schedule.consumers * WARPGROUP
    queries, full, free = (block_m, head_dim), [WARPGROUP] * stages, [consumers] * stages
    slots, k_slot, v_slot = (3, 1, 2) if packed else (1, 0, 0)
    batch, q_len, k_len = T.dynamic("batch"), T.dynamic("q_len"), T.dynamic("k_len")
    sizes = batch, heads, q_len, k_len
    pieces = T.ceildiv(q_len, block_m) * heads * batch
    grid = T.min(schedule.resident, pieces) if schedule.resident else pieces
    attend = attend_overlapped if schedule.overlap else attend_in_turn
    scale_log2 = scale * math.log2(math.e)

    @T.prim_func
    def flash_attention_sm90(
        Q: T.Tensor((batch, q_len, slots, heads, head_dim), dtype),
        K: T.Tensor((batch, k_len, slots, heads, head_dim), dtype),
        V: T.Tensor((batch, k_len, slots, heads, head_dim), dtype),
        q_lengths: T.Tensor((batch,), "int32"),
        kv_lengths: T.Tensor((batch,), "int32"),
        O: T.Tensor((batch, q_len, heads, head_dim), dtype),
    ):
        with T.Kernel(grid, threads=consumers + WARPGROUP) as bx:
            T.annotate_compile_flags(FAST_MATH)
            if schedule.min_blocks:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            Q_shared = T.alloc_shared(queries, dtype)
            # The next queries may come while this output is on its way, if there are any.
            O_shared = T.alloc_shared(queries, dtype) if schedule.resident else Q_shared
            K_ring = T.alloc_shared((stages, block_n, head_dim), dtype)
            V_ring = T.alloc_shared((stages, block_n, head_dim), dtype)
            q_full, q_free = T.alloc_barrier(WARPGROUP), T.alloc_barrier(consumers)
            k_full, k_free = T.alloc_barrier(full), T.alloc_barrier(free)
            v_full, v_free = T.alloc_barrier(full), T.alloc_barrier(free)
            s = T.alloc_fragment((block_m, block_n), "float32")
            p = T.alloc_fragment((block_m, block_n), dtype)
            o = T.alloc_fragment((block_m, head_dim), "float32")
            l = T.alloc_fragment((block_m, LANES), "float32")
            m = T.alloc_fragment((block_m,), "float32")
            rescale = T.alloc_fragment((block_m,), "float32")
            shift = T.alloc_fragment((block_m,), "float32")
            r = Rings(schedule, Q_shared, K_ring, V_ring, q_full, q_free, k_full, k_free, v_full,
                      v_free)  # fmt: skip
            f = Fragments(s, p, o, l, m, rescale, shift)
            work = T.alloc_local((6,), "int32")
            done = T.alloc_local((1,), "int32")  # steps of the pieces before this one
            lengths = (q_lengths, kv_lengths) if ragged else (None, None)
            tx = T.get_thread_binding()
            tile.pdl_trigger()
            tile.pdl_sync()
            trips = T.truncdiv(pieces - bx + grid - 1, grid) if schedule.resident else 1
            done[0] = 0
            if tx < consumers:
                T.set_max_nreg(schedule.consumer_registers, 1)
                first_turn(r, tx)
                for t in T.serial(trips):
                    find(work, bx + t * grid, schedule, causal, sizes, *lengths)
                    begin = done[0] if schedule.resident else 0
                    T.barrier_wait(q_full, t % 2)
                    attend(r, f, tx, work[5], int(causal), scale_log2, begin, work[4])
                    finish(o, l, rescale, shift, work[3])
                    if schedule.resident:
                        # The output before this one has gone to memory beside the products.
                        T.tma_store_wait(0)
                        T.sync_threads(STORED, consumers)
                    T.copy(o, O_shared)
                    T.tma_copy(O_shared, O[work[0], work[2] : work[2] + block_m, work[1], :])
                    done[0] += work[4]
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                for t in T.serial(trips):
                    find(work, bx + t * grid, schedule, causal, sizes, *lengths)
                    begin = done[0] if schedule.resident else 0
                    T.barrier_wait(q_free, t % 2 ^ 1)
                    rows = Q[work[0], work[2] : work[2] + block_m, 0, work[1], :]
                    T.tma_copy(rows, Q_shared, barrier=q_full)
                    T.barrier_arrive(q_full)
                    load_blocks(r, K, V, work[0], work[1], k_slot, v_slot, begin, work[4])
                    done[0] += work[4]

    return flash_attention_sm90
