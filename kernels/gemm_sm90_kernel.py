"""Matrix product for sm_90 and 16 bits: one warp loads, the others compute.

As in CUTLASS's warp-specialised kernels for Hopper, tiles of A and W go through a ring in shared
memory, with a barrier each way a slot, and products are asynchronous. What ends a tile (activation,
residual, store) runs beside the products of another: of another thread block on the same SM, or,
with `ping_pong`, of another warpgroup of the block.
"""

import tilelang.language as T

from minifused.kernels.gemm_finish import (
    UNCHECKED,
    Output,
    begin_tile,
    finish_tile,
    load_residual,
)
from minifused.kernels.gemm_ring import (
    WARP,
    WARPGROUP,
    Ring,
    first_turn,
    load,
    load_weights_ahead,
    multiply,
    place,
)
from minifused.kernels.gemm_sm90_split import gemm_sm90_split_kernel
from minifused.kernels.limits import PRODUCER_REGISTERS, residual_ahead, stores_through_ring
from minifused.kernels.rings import share
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.schedule import RingGemmSchedule
from minifused.kernels.tile import Tile


@T.macro
def roles(tile, schedule, parts, group):
    """Each group of warpgroups computes, and the last warp loads.

    Branches of one condition: between two, TileLang would have all threads meet.
    """
    compute, produce, r, out, tx, bx, trips = parts
    if tx < (group + 1) * (schedule.consumers // schedule.groups) * WARPGROUP:
        if schedule.registers:
            T.set_max_nreg(schedule.registers, 1)
        tile.pdl_sync()
        compute(r, out, tx, bx, trips, group)
    else:
        if group + 1 < schedule.groups:
            roles(tile, schedule, parts, group + 1)
        else:
            if schedule.registers:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
            if tx < schedule.consumers * WARPGROUP + WARP:
                produce(r, tx, bx, trips)


def gemm_sm90_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, ahead: bool, schedule: RingGemmSchedule,
):  # fmt: skip
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n); m is dynamic.

    A, W and bias have `dtype`, 16 bits, R and C `out_dtype`; sums are float32. `ahead` reads W
    before the kernels launched earlier have ended.
    """
    if schedule.splits > 1:
        return gemm_sm90_split_kernel(
            tile, n, k, dtype, out_dtype, activation, has_bias, has_residual, ahead, schedule
        )
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    stages, groups = schedule.num_stages, schedule.groups
    consumers = schedule.consumers * WARPGROUP
    team = consumers // groups
    steps = -(-k // block_k)  # past k both operands are zeros
    m = T.dynamic("m")
    tiles = T.ceildiv(m, block_m) * -(-n // block_n)
    grid = T.min(schedule.resident, tiles) if schedule.resident else tiles
    early = residual_ahead(schedule)
    in_ring = stores_through_ring(schedule)

    @T.macro
    def compute(r, out, tx, bx, trips, group):
        """Every groups-th tile of a block, from `group` on."""
        acc = T.alloc_fragment((block_m, block_n), "float32")
        b = T.alloc_fragment((block_n,), dtype)
        residual = T.alloc_fragment((block_m, block_n), out_dtype)
        staged = None
        if out_dtype != "float32" and not in_ring:
            staged = T.alloc_shared((block_m, schedule.store_n), out_dtype)
        at = T.alloc_local((2,), "int32")
        first_turn(r, group)
        for u in T.serial(share(trips, group, groups)):
            t = u * groups + group
            place(at, bx + t * grid, schedule, m, n)
            begin_tile(out, acc, b, at[1])
            if has_residual and early:
                load_residual(out, residual, at[0], at[1])
            multiply(r, acc, tx, t * steps, group)
            finish_tile(out, acc, residual if early else None, staged, at[0], at[1], group)
        if out_dtype != "float32":
            T.tma_store_wait(0)

    @T.macro
    def produce(r, tx, bx, trips):
        at = T.alloc_local((2,), "int32")
        if ahead:
            place(at, bx, schedule, m, n)
            load_weights_ahead(r, at[1] * block_n)
        tile.pdl_sync()
        for t in T.serial(trips):
            place(at, bx + t * grid, schedule, m, n)
            load(r, at[0] * block_m, at[1] * block_n, t * steps, ahead)

    @T.prim_func
    def gemm_sm90(
        A: T.Tensor((m, k), dtype),
        W: T.Tensor((n, k), dtype),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((m, n), out_dtype),
        C: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(grid, threads=schedule.num_threads) as bx:
            T.annotate_compile_flags(FAST_MATH)
            T.annotate_pass_configs(UNCHECKED)
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            A_slots = T.alloc_shared((stages, block_m, block_k), dtype)
            W_slots = T.alloc_shared((stages, block_n, block_k), dtype)
            full = T.alloc_barrier([1] * stages)
            free = T.alloc_barrier([team // WARP] * stages)
            r = Ring(schedule, A, W, A_slots, W_slots, full, free, steps)
            out = Output(
                tile, activation, bias if has_bias else None, R if has_residual else None, C,
                A_slots if in_ring else None, team,
            )  # fmt: skip
            tx = T.get_thread_binding()
            tile.pdl_trigger()
            trips = share(tiles, bx, grid) if schedule.resident else 1
            parts = compute, produce, r, out, tx, bx, trips
            roles(tile, schedule, parts, 0)

    return gemm_sm90
