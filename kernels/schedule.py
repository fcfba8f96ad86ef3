"""Schedules: the sizes a kernel is cut into, per machine and shape.

A schedule never changes what a kernel computes. A table may have a measured one; without, the rules
here choose: a CPU wants tiles that stay in L1 and L2, a GPU wants wide tiles while there are enough
of them to fill it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from minifused.kernels import buckets, schedule_table
from minifused.kernels.limits import (
    HELD_ROWS,
    ITEM_BYTES,
    REGISTERS_AN_SM,
    SMS,
    THREADS_AN_SM,
    TILE_ROWS,
    has_bulk_copies,
    held_blocks,
    shared_memory_limit,
    staged_bytes,
    swap_bytes,
    violation,
)
from minifused.kernels.tile import Tile


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
class SwapSchedule:
    block_m: int  # rows of A
    block_n: int  # rows of W
    block_k: int
    num_stages: int
    num_threads: int
    tiles: int = 1  # of W that a block goes through
    groups: int = 1  # of warps, that take turns at the steps through K
    held: bool = False  # W lies in registers; stages are rows of A on their way there, 8 each
    shared_rows: bool = False  # of A, where W is held: registers are for W alone
    min_blocks: int = 0  # that are to share an SM, which limits registers, 0 for any number
    splits: int = 1  # blocks of a cluster, which share K, and then the rows of a tile


@dataclass(frozen=True)
class GemvSchedule:
    block_n: int  # weight rows of a block
    warp_n: int  # of a warp: 8, 16 or 32
    split_k: int  # warps that share the columns of a row
    min_blocks: int  # that are to fit on a core at once, which limits registers

    @property
    def num_threads(self) -> int:
        return 32 * self.block_n // self.warp_n * self.split_k


@dataclass(frozen=True)
class AttentionSchedule:
    block_m: int
    block_n: int
    num_stages: int
    num_threads: int


@dataclass(frozen=True)
class FlashSchedule:
    """Of flash_attention_sm90."""

    block_m: int
    block_n: int
    num_stages: int  # of keys, and of values
    consumers: int  # warpgroups that compute, beside the one that loads
    consumer_registers: int  # a thread
    min_blocks: int = 0  # that are to share an SM, 0 for any number
    heads_together: int = 1  # that go through their blocks side by side
    resident: int = 0  # thread blocks that begin a piece of work beside the end of one, 0: one each
    overlap: bool = False  # a softmax beside the product of the block of keys before
    pin: bool = False  # ptxas may not end an overlap before the weights
    held: bool = False  # queries lie in registers

    @property
    def q_slots(self) -> int:
        return 2 if self.resident and not self.held else 1

    @property
    def num_threads(self) -> int:
        return 128 * (self.consumers + 1)


@dataclass(frozen=True)
class RingGemmSchedule:
    """Of gemm_sm90."""

    block_m: int
    block_n: int
    num_stages: int
    consumers: int  # warpgroups that compute
    min_blocks: int = 1  # that are to share an SM, which limits registers
    resident: int = 0  # thread blocks that take one tile after another, 0: one each
    ping_pong: bool = False  # each warpgroup has tiles of its own
    swizzle: int = 0  # rows of tiles that go through the columns side by side, 0: all
    registers: int = 0  # of a thread that computes, handed over by those that load; 0: none are
    block_k: int = 64
    store_columns: int = 0  # of a tile, that a resident block stores at a time, 0: all
    splits: int = 1  # blocks of a cluster, which share K, and then the rows of a tile

    @property
    def store_n(self) -> int:
        return self.store_columns or self.block_n

    @property
    def num_threads(self) -> int:
        """Only a whole warpgroup can hand over registers; else one warp loads."""
        return 128 * self.consumers + (128 if self.registers else 32)

    @property
    def groups(self) -> int:
        """Of warpgroups that have tiles of their own."""
        return self.consumers if self.ping_pong else 1


@dataclass(frozen=True)
class RowSchedule:
    block_n: int
    num_threads: int


@dataclass(frozen=True)
class SplitSchedule:
    splits: int  # blocks that share the keys of a head
    num_loads: int  # keys that a lane has on their way at once
    num_threads: int


Schedule = (
    GemmSchedule
    | SkinnySchedule
    | SwapSchedule
    | GemvSchedule
    | AttentionSchedule
    | FlashSchedule
    | RingGemmSchedule
    | RowSchedule
    | SplitSchedule
)
S = TypeVar("S", bound=Schedule)


def tuned(
    tile: Tile,
    kernel: str,
    bucket: str,
    dtype: str,
    rule: S,
    head_dim: int = 0,
    user: bool = True,
) -> S:
    """The schedule that a table has for a bucket of shapes, or that of the rules.

    `head_dim` is flash_attention's. Without `user`, only the package's table counts.
    """

    def parse(values: Mapping[str, int]) -> S:
        schedule = from_fields(type(rule), values)
        if reason := violation(tile, kernel, dtype, schedule, head_dim):
            raise ValueError(reason)
        return schedule

    found = schedule_table.find(tile, kernel, bucket, dtype, parse, user)
    return rule if found is None else found


def from_fields(kind: type[S], values: Mapping[str, Any]) -> S:
    """The schedule with these values; raises ValueError if they are not those of its fields."""
    defaults = {field.name: field.default for field in fields(kind)}
    if sorted(values) != sorted(defaults):
        raise ValueError(f"expected the fields {', '.join(defaults)}, not {', '.join(values)}")
    for name, value in values.items():
        if type(defaults[name]) is bool:
            if type(value) is not bool:
                raise ValueError(f"{name} is {value!r}: expected true or false")
        elif type(value) is not int or value < int(defaults[name] != 0):
            raise ValueError(f"{name} is {value!r}: expected a positive number")
    return kind(**values)


def next_power_of_2(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def width_of_parts(columns: int, parts: int) -> int:
    """Of parts that a block each has left of a row: a power of 2, and fewer have no other width."""
    return next_power_of_2(-(-columns // parts))


def gemm_schedule(tile: Tile, m: int, n: int, k: int, dtype: str) -> GemmSchedule:
    return tuned(tile, "gemm", buckets.gemm(m, n, k), dtype, _gemm_rule(tile, m, n, k, dtype))


def _gemm_rule(tile: Tile, m: int, n: int, k: int, dtype: str) -> GemmSchedule:
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
    rule = _skinny_rule(tile, m, dtype)
    return tuned(tile, "skinny_gemm", buckets.skinny_gemm(m, n, k), dtype, rule)


def _skinny_rule(tile: Tile, m: int, dtype: str) -> SkinnySchedule:
    if not tile.is_cuda:
        return SkinnySchedule(1, 8, 8, 1)  # 8 accumulators of one AVX2 register each
    lane_bytes = 32 * 16  # a warp reads 512 bytes of a weight row at a time
    return SkinnySchedule(next_power_of_2(m), 8, lane_bytes // ITEM_BYTES[dtype], 256)


def swap_schedule(tile: Tile, m: int, n: int, k: int, dtype: str) -> SwapSchedule:
    rule = _swap_rule(tile, m, n, k, dtype)
    return tuned(tile, "swap_gemm", buckets.swap_gemm(m, n, k), dtype, rule)


def _swap_rule(tile: Tile, m: int, n: int, k: int, dtype: str) -> SwapSchedule:
    if has_bulk_copies(tile, k * ITEM_BYTES[dtype]):
        if _may_hold(m, n, k, dtype):
            held = _held_rule(tile, n, k) if m <= TILE_ROWS else _held_tiles_rule(tile, m, n, k)
            if not violation(tile, "swap_gemm", dtype, held):
                return held
        return _ring_rule(tile, m, n, k, dtype)
    block_m, block_k = max(16, next_power_of_2(m)), min(64, max(16, next_power_of_2(k)))
    if not tile.is_cuda:
        return SwapSchedule(block_m, 16, block_k, 1, 1)
    block_n = next((rows for rows in (128, 64, 32) if n >= 64 * rows), 16)
    threads = min(128, 32 * (block_n // 16) * (block_m // 8))
    return SwapSchedule(block_m, block_n, block_k, min(3, -(-k // block_k)), threads)


HELD_BYTES = 24 << 20  # of weights that the registers of all SMs hold for the most part
HELD_TILES_BYTES = 9 << 20  # if they meet more than a tile: else the rows cost what they hide
HELD_READS = 13  # of 16 bytes, that a lane makes in a row


def _may_hold(m: int, n: int, k: int, dtype: str) -> bool:
    if m <= TILE_ROWS:
        return n * k * ITEM_BYTES[dtype] <= HELD_BYTES
    # All products of a layer or none: a ring among them keeps the next kernel's blocks off an SM.
    widest = max(n * k, 4 * min(n, k) ** 2)
    return m <= HELD_ROWS and widest * ITEM_BYTES[dtype] <= HELD_TILES_BYTES


def _held_rule(tile: Tile, n: int, k: int) -> SwapSchedule:
    """The blocks of which no SM has many rows to read, the widest of equals."""
    groups, share = _shares(k, HELD_READS if k > 1024 else 6, 8)
    shared = share > 6 and share * groups * 32 >= k
    # Of a row 8 registers, and if A is not shared 2: half of its rows are on their way at once.
    registers = 28 + 8 * share if shared else 32 + 10 * share
    forms = [_held(TILE_ROWS, rows, groups, share, shared) for rows in (16, 32, 64)]
    held = min(forms, key=lambda s: (-(-n // s.block_n // SMS) * s.block_n, -s.block_n))
    return replace(held, min_blocks=held_blocks(tile, held, registers))


def _held_tiles_rule(tile: Tile, m: int, n: int, k: int) -> SwapSchedule:
    """The tile by which each SM has the least to read, above all of A, which it asks for late."""
    groups, share = _shares(k, HELD_READS if k > 1024 else 8)

    def cost(rows: tuple[int, int]) -> tuple[int, int]:
        blocks = -(-m // rows[0]) * -(-n // rows[1])
        return -(-blocks // SMS) * (2 * rows[0] + rows[1]), rows[0]

    fits = [rows for rows in (8, 16, 32) if rows < 2 * m]
    wide = [rows for rows in (16, 32, 64) if rows * groups <= 256]  # 16 warps: else few registers
    held = _held(*min(itertools.product(fits, wide), key=cost), groups, share, True)
    return replace(held, min_blocks=held_blocks(tile, held, max(88, 28 + 8 * share)))


def _shares(k: int, reads: int, most: int = 16) -> tuple[int, int]:
    """Groups of warps that share K, and how many times a lane of one reads a row, about `reads`.

    With more of K than `most` groups hold, they take it in turns.
    """
    chunks = -(-k // 32)
    groups = min(most, next_power_of_2(-(-chunks // reads)))
    turns = -(-chunks // (groups * reads))
    return groups, -(-chunks // (groups * turns))


def _held(block_m: int, block_n: int, groups: int, share: int, shared: bool) -> SwapSchedule:
    """16 weight rows a warp."""
    threads = 2 * block_n * groups
    return SwapSchedule(block_m, block_n, 32 * share, 1, threads, 1, groups, True, shared)


WIDE_TILE = 128, 192  # of three warpgroups: A is read less often


def _ring_rule(tile: Tile, m: int, n: int, k: int, dtype: str) -> SwapSchedule:
    """The tile by which each SM has the least to read, and a ring for as much of it as fits."""
    m, sizes = max(16, next_power_of_2(m)), (16, 32, 64, 128)
    fits = [size for size in sizes if size <= m]
    forms = [*itertools.product(fits, sizes)]
    # Parts of a row are powers of 2: for a head alone, of which so many rows leave no peaks.
    if m == WIDE_TILE[0] and n > WIDE_TILE[1] * SMS:
        forms.append(WIDE_TILE)

    def cost(rows: tuple[int, int]) -> tuple[int, int]:
        blocks = -(-m // rows[0]) * -(-n // rows[1])
        return -(-blocks // SMS) * sum(rows), rows[0]  # W may be asked for ahead, A not

    block_m, block_n = min(forms, key=cost)
    block_k = min(64, max(16, next_power_of_2(k)))
    steps, blocks = -(-k // block_k), -(-m // block_m) * -(-n // block_n)
    tiles = min(-(-blocks // SMS), -(-n // block_n))
    # Products of a warp are a chain: groups of warps that share K make it short.
    team = _team(block_m, block_n)
    groups = 1
    while tiles == 1 and 2 * groups <= min(
        steps, 512 // team, 8 if k >= 2048 and block_m * block_n <= 1024 else 4
    ):
        if not staged_bytes(SwapSchedule(block_m, block_n, block_k, 1, 1, 1, 2 * groups)):
            break
        groups *= 2
    shape = SwapSchedule(block_m, block_n, block_k, 1, team * groups, tiles, groups)
    ring = shared_memory_limit(tile) - swap_bytes(tile, shape)
    stages = ring // ((block_m + block_n) * block_k * ITEM_BYTES[dtype])
    stages = tiles * steps if stages >= tiles * steps else stages - stages % groups
    return replace(shape, num_stages=stages)


def _team(block_m: int, block_n: int) -> int:
    """Threads for the products of a tile: wgmma wants four warps, a warp has 32 x 32 at most."""
    if block_n < 64:
        return 32 * max(1, block_m * block_n // 1024)
    return 2 * block_n if block_m >= 64 else 128


def gemv_schedule(tile: Tile, n: int, k: int, dtype: str, normed: bool) -> GemvSchedule:
    """`normed`: the row is that of a layer norm, which each block computes for itself."""
    rule = _gemv_rule(n, k, normed)
    return tuned(tile, "gemv", buckets.gemv(n, k, normed), dtype, rule)


def _gemv_rule(n: int, k: int, normed: bool) -> GemvSchedule:
    """Near what the package's table has for GPT-2 small to XL, which is of whole steps.

    A large block normalises its row for more weights, small ones leave fewer SMs idle.
    """
    reads = -(-k // 32)  # of 16 bytes, that a lane makes in a row
    large = normed or n >= 16384
    split_k = min(16, -(-reads // (10 if large else 4 if k <= 2048 else 16)))
    share = -(-reads // split_k)
    warp_n = 16 if share <= 12 and (large or 1024 < k <= 2048) else 8
    block_n = 2 * warp_n if large and n >= warp_n * SMS else warp_n
    threads, registers = 32 * block_n // warp_n * split_k, 48 + share * warp_n // 2
    blocks = min(REGISTERS_AN_SM // registers, THREADS_AN_SM) // threads
    return GemvSchedule(block_n, warp_n, split_k, max(1, min(blocks, 4)))


def attention_schedule(
    tile: Tile, head_dim: int, dtype: str, causal: bool = True, keys: int = 1024
) -> AttentionSchedule:
    bucket = buckets.flash_attention(head_dim, causal, keys)
    rule = _attention_rule(tile, head_dim, dtype)
    return tuned(tile, "flash_attention", bucket, dtype, rule, head_dim)


def _attention_rule(tile: Tile, head_dim: int, dtype: str) -> AttentionSchedule:
    if not tile.is_cuda:
        return AttentionSchedule(32, 64, 1, 1)
    if dtype == "float32":
        # A thread a row: rows shared between threads would be copied, and TileLang 0.1.15 then
        # puts a barrier into a branch that only half of the threads take.
        return AttentionSchedule(64, 32, 1, 64)
    # Without TMA a pipeline whose length is only known at run time does not compile.
    bulk_copies = has_bulk_copies(tile, head_dim * ITEM_BYTES[dtype])
    if head_dim > 128:
        return AttentionSchedule(64, 64, 1, 128)
    return AttentionSchedule(128, 128 if bulk_copies else 64, 2 if bulk_copies else 1, 256)


def flash_schedule(tile: Tile, head_dim: int, dtype: str, causal: bool, keys: int) -> FlashSchedule:
    """Of flash_attention_sm90, for head sizes 64 and 128."""
    bucket = buckets.flash_attention(head_dim, causal, keys)
    rule = _flash_rule(head_dim, causal, keys)
    return tuned(tile, "flash_attention_sm90", bucket, dtype, rule, head_dim)


FLASH_L2_BYTES = 32 << 20  # of keys and values that stay in it


def _flash_rule(head_dim: int, causal: bool, keys: int) -> FlashSchedule:
    """As measured on an H200, at 512 to 8192 keys."""
    in_l2 = max(1, FLASH_L2_BYTES // (keys * head_dim * 4))
    if head_dim > 64:
        if causal and keys > 2048:
            return FlashSchedule(128, 128, 2, 2, 240, 0, 16, overlap=True, pin=True)
        held = FlashSchedule(128, 128, 2, 2, 240, 0, in_l2 if causal else 1, held=True)
        return replace(held, resident=SMS, overlap=True, pin=keys > 512)
    if not causal and keys <= 512:
        return FlashSchedule(128, 128, 3, 2, 240, 0, 1, SMS, overlap=True, pin=True, held=True)
    if not causal:
        return FlashSchedule(192, 128, 3, 3, 160, 0, 1, SMS, overlap=True, pin=True)
    if keys > 4096:
        return FlashSchedule(192, 128, 2, 3, 160, 0, in_l2, overlap=True)
    if keys <= 1024:
        return FlashSchedule(64, 64, 3, 1, 128, 3, in_l2)
    return FlashSchedule(128, 64, 2, 2, 104, 2, in_l2)


def row_schedule(tile: Tile, n: int, limit: int) -> RowSchedule:
    """Rows up to `limit` columns stay in registers as one block, wider ones go in pieces."""
    if not tile.is_cuda:
        return RowSchedule(min(n, limit), 1)  # no column is masked, so that loops vectorise
    block_n = min(next_power_of_2(n), limit)
    return RowSchedule(max(block_n, 32), max(32, min(256, block_n // 8)))


def decode_attention_schedule(
    tile: Tile, head_dim: int, dtype: str, blocks: int = 1
) -> RowSchedule:
    """`block_n` keys at a time; `blocks` is the batch times the heads."""
    rule = RowSchedule(64, 128) if tile.is_cuda else RowSchedule(16, 1)
    bucket = buckets.decode_attention(head_dim, blocks)
    return tuned(tile, "decode_attention", bucket, dtype, rule, head_dim)


MAX_SPLITS = 16
SPLIT_KEYS = 128  # that a block asks for at once, of heads of 64


def split_schedule(blocks: int, capacity: int) -> SplitSchedule:
    """Of split-KV decoding: `blocks` is the batch times the heads."""
    splits = min(MAX_SPLITS, SMS // max(1, blocks), -(-capacity // SPLIT_KEYS))
    if splits > 1:
        return SplitSchedule(splits, 4, 256)
    # Of fewer blocks an SM each has more on its way.
    for an_sm, loads, threads in ((1, 3, 512), (2, 3, 256), (6, 3, 192)):
        if blocks <= an_sm * SMS:
            return SplitSchedule(1, loads, threads)
    return SplitSchedule(1, 5, 128)
