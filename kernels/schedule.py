"""Schedules: the sizes a kernel is cut into, per machine and shape.

A schedule never changes what a kernel computes. The choices here are rules; a CPU wants tiles that
stay in L1 and L2, a GPU wants wide tiles while there are enough of them to fill it.
"""

from __future__ import annotations

from dataclasses import dataclass

from minifused.kernels.tile import Tile

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class GemmSchedule:
    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_threads: int
    swizzle: int = 0  # panel width of the block rasterisation, 0 for none


@dataclass(frozen=True)
class SkinnySchedule:
    block_m: int
    block_n: int
    block_k: int
    num_threads: int


@dataclass(frozen=True)
class AttentionSchedule:
    block_m: int
    block_n: int
    num_stages: int
    num_threads: int


@dataclass(frozen=True)
class RowSchedule:
    block_n: int
    num_threads: int


def shared_memory_limit(tile: Tile) -> int:
    """Bytes of shared memory a block may have (CUDA programming guide, less 1 KiB for barriers)."""
    limits = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
    return limits.get(tile.capability, 101376 if tile.capability >= 80 else 65536) - 1024


def next_power_of_2(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def gemm_schedule(tile: Tile, m: int, n: int, k: int, dtype: str) -> GemmSchedule:
    if not tile.is_cuda:
        rows = 4 if m <= 16 else 24
        return GemmSchedule(rows, 96, min(256, next_power_of_2(k)), 1, 1)
    if dtype == "float32":
        return GemmSchedule(64, 64, 32, 2, 128, 10)
    block_k = 64 if k >= 64 else max(16, next_power_of_2(k))
    if m <= 64 or n <= 64:
        return GemmSchedule(64, 64, block_k, 3, 128, 10)
    if tile.capability >= 90 and m >= 1024 and n >= 256:
        return GemmSchedule(128, 256, block_k, 4, 256, 10)
    return GemmSchedule(128, 128, block_k, 3, 256, 10)


def skinny_schedule(tile: Tile, m: int, n: int, k: int, dtype: str) -> SkinnySchedule:
    if not tile.is_cuda:
        return SkinnySchedule(1, 8, 8, 1)  # 8 accumulators of one AVX2 register each
    lane_bytes = 32 * 16  # a warp reads 512 bytes of a weight row at a time
    return SkinnySchedule(next_power_of_2(m), 8, lane_bytes // ITEM_BYTES[dtype], 256)


def attention_schedule(tile: Tile, head_dim: int, dtype: str) -> AttentionSchedule:
    if not tile.is_cuda:
        return AttentionSchedule(32, 64, 1, 1)
    if dtype == "float32":
        # A thread a row: rows shared between threads would be copied, and TileLang 0.1.15 then
        # puts a barrier into a branch that only half of the threads take.
        return AttentionSchedule(64, 32, 1, 64)
    # Without TMA a pipeline whose length is only known at run time does not compile.
    bulk_copies = tile.capability >= 90 and head_dim * ITEM_BYTES[dtype] % 16 == 0
    if head_dim > 128:
        return AttentionSchedule(64, 64, 1, 128)
    return AttentionSchedule(128, 128 if bulk_copies else 64, 2 if bulk_copies else 1, 256)


def row_schedule(tile: Tile, n: int, limit: int) -> RowSchedule:
    """Rows up to `limit` columns stay in registers as one block, wider ones go in pieces."""
    block_n = min(next_power_of_2(n), limit)
    if not tile.is_cuda:
        return RowSchedule(block_n, 1)
    return RowSchedule(max(block_n, 32), max(32, min(256, block_n // 8)))


def decode_attention_schedule(tile: Tile, head_dim: int, dtype: str) -> RowSchedule:
    """`block_n` keys at a time."""
    return RowSchedule(64, 128) if tile.is_cuda else RowSchedule(16, 1)
