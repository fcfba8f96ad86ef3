"""Matrix product for sm_90 of few tiles and many steps through K: a cluster of blocks has a tile.

Each block adds up its part of K as gemm_sm90 does, and leaves its sums in shared memory. Then it
has some rows of the tile, of which it reads the sums of all blocks and adds them in their order: so
results repeat bit for bit, and no sum goes through global memory.
"""

import tilelang.language as T

from minifused.kernels.cluster_sum import VECTOR, WITH_CLUSTER_SUM
from minifused.kernels.gemm_finish import UNCHECKED, Output
from minifused.kernels.gemm_part import Part, finish_part, load_residual
from minifused.kernels.gemm_ring import (
    WARP,
    WARPGROUP,
    Ring,
    load,
    load_weights_ahead,
    multiply,
    place,
)
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.schedule import RingGemmSchedule
from minifused.kernels.tile import Tile


def gemm_sm90_split_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, ahead: bool, schedule: RingGemmSchedule,
):  # fmt: skip
    """Build what gemm_sm90_kernel does, with `splits` blocks a tile."""
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    stages, splits, threads = schedule.num_stages, schedule.splits, schedule.consumers * WARPGROUP
    steps = -(-k // (block_k * splits))  # past k both operands are zeros
    m = T.dynamic("m")
    tiles = T.ceildiv(m, block_m) * -(-n // block_n)

    @T.macro
    def compute(r, sums, tx):
        acc = T.alloc_fragment((block_m, block_n), "float32")
        T.clear(acc)
        multiply(r, acc, tx, 0, 0)
        for i, j in T.Parallel(block_m, block_n):
            sums[i, j] = acc[i, j]

    @T.macro
    def produce(r, at, rank):
        if ahead:
            load_weights_ahead(r, at[1] * block_n, rank * steps)
        tile.pdl_sync()
        load(r, at[0] * block_m, at[1] * block_n, 0, ahead, rank * steps)

    @T.prim_func
    def gemm_sm90_split(
        A: T.Tensor((m, k), dtype),
        W: T.Tensor((n, k), dtype),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((m, n), out_dtype),
        C: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(
            tiles * splits, threads=schedule.num_threads, cluster_dims=splits,
            prelude=WITH_CLUSTER_SUM,
        ) as block:  # fmt: skip
            T.annotate_compile_flags(FAST_MATH)
            T.annotate_pass_configs(UNCHECKED)
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            A_slots = T.alloc_shared((stages, block_m, block_k), dtype)
            W_slots = T.alloc_shared((stages, block_n, block_k), dtype)
            sums = T.alloc_shared((block_m, block_n + VECTOR), "float32")  # rows in other banks
            full = T.alloc_barrier([1] * stages)
            free = T.alloc_barrier([threads // WARP] * stages)
            at = T.alloc_local((2,), "int32")
            tx, rank = T.get_thread_binding(), block % splits
            r = Ring(schedule, A, W, A_slots, W_slots, full, free, steps)
            out = Output(
                tile, activation, bias if has_bias else None, R if has_residual else None, C, None,
                threads,
            )  # fmt: skip
            part = Part(schedule, out, at, rank)
            residual = T.alloc_local((part.pieces, VECTOR), out_dtype)
            place(at, block // splits, schedule, m, n)
            tile.pdl_trigger()
            if tx < threads:
                tile.pdl_sync()
                load_residual(part, residual, tx)
                compute(r, sums, tx)
            else:
                if tx < threads + WARP:
                    produce(r, at, rank)
            T.cluster_sync()
            if tx < threads:
                finish_part(part, sums, residual, tx)
            T.cluster_sync()  # others may still read what is here

    return gemm_sm90_split
