"""FlashAttention forward for sm_90 and 16 bits: one warpgroup loads, the others compute.

As in FlashAttention-3 (Shah et al., arXiv 2407.08608) the loads go ahead through rings in shared
memory, a barrier each way a slot, and products are asynchronous. Either a warpgroup computes the
weights of one block of keys beside the product of the block before with its values (`overlap`), or
it takes turns with others on the same SM. Blocks of keys go backwards: those that need a mask are
the first. Where a thread block takes several blocks of queries, the first weights of one are
computed beside the last product of the one before.
"""

import math

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from minifused.kernels.flash_attend import Fragments, first_turn
from minifused.kernels.flash_pieces import one_after_another, only_one
from minifused.kernels.flash_rings import WARPGROUP, Rings, load_pieces
from minifused.kernels.flash_steps import LANES
from minifused.kernels.flash_work import Pieces
from minifused.kernels.limits import PRODUCER_REGISTERS
from minifused.kernels.rings import share
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.schedule import FlashSchedule
from minifused.kernels.tile import Tile

HEAD_DIMS = (64, 128)
# The compiler's own would have all that compute meet where each warp stores its rows.
OWN_BARRIERS = {"tl.disable_thread_storage_sync": True}


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
    all_pieces = T.ceildiv(q_len, block_m) * heads * batch
    grid = T.min(schedule.resident, all_pieces) if schedule.resident else all_pieces
    compute = one_after_another if schedule.resident else only_one
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
            if schedule.resident:
                T.annotate_pass_configs(OWN_BARRIERS)
            if schedule.min_blocks:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            Q_shared = T.alloc_shared((2, *queries) if schedule.q_slots > 1 else queries, dtype)
            # The next queries may come while this output is on its way, if there are any.
            O_shared = T.alloc_shared(queries, dtype) if schedule.resident else Q_shared
            if schedule.held:  # no tensor core reads them there, which would want this layout
                T.annotate_layout({Q_shared: make_swizzled_layout(Q_shared)})
            K_ring = T.alloc_shared((stages, block_n, head_dim), dtype)
            V_ring = T.alloc_shared((stages, block_n, head_dim), dtype)
            q_full = T.alloc_barrier([WARPGROUP] * schedule.q_slots)
            q_free = T.alloc_barrier([consumers] * schedule.q_slots)
            k_full, k_free = T.alloc_barrier(full), T.alloc_barrier(free)
            v_full, v_free = T.alloc_barrier(full), T.alloc_barrier(free)
            s = T.alloc_fragment((block_m, block_n), "float32")
            p = T.alloc_fragment((block_m, block_n), dtype)
            o = T.alloc_fragment((block_m, head_dim), "float32")
            l = T.alloc_fragment((block_m, LANES), "float32")
            m = T.alloc_fragment((block_m,), "float32")
            rescale = T.alloc_fragment((block_m,), "float32")
            shift = T.alloc_fragment((block_m,), "float32")
            total = T.alloc_fragment((block_m,), "float32")
            q = T.alloc_fragment(queries, dtype) if schedule.held else None
            r = Rings(schedule, Q_shared, K_ring, V_ring, q_full, q_free, k_full, k_free, v_full,
                      v_free)  # fmt: skip
            f = Fragments(s, p, o, l, m, rescale, shift, total, q)
            tx = T.get_thread_binding()
            tile.pdl_trigger()
            tile.pdl_sync()
            count = share(all_pieces, bx, grid) if schedule.resident else 1
            lengths = (q_lengths, kv_lengths) if ragged else (None, None)
            pieces = Pieces(schedule, causal, sizes, lengths, bx, grid, count)
            if tx < consumers:
                T.set_max_nreg(schedule.consumer_registers, 1)
                first_turn(r, tx)
                compute(r, f, tx, pieces, scale_log2, O_shared, O)
            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                load_pieces(r, Q, K, V, pieces, k_slot, v_slot)

    return flash_attention_sm90
