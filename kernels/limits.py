"""Which schedules cannot work: shared memory, registers, and what TileLang does not compile.

`violation` says why before anything is compiled. Shared memory is counted as TileLang's lowering
counts it; lowering checks no limit, and a kernel over it fails only at its launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minifused.kernels.tile import Tile

if TYPE_CHECKING:
    from minifused.kernels.schedule import (
        AttentionSchedule,
        FlashSchedule,
        GemmSchedule,
        GemvSchedule,
        RingGemmSchedule,
        SwapSchedule,
    )

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SMS = 132  # of an H200, on which the rules were measured
MAX_THREADS = 1024  # of a block
THREADS_AN_SM = 2048
REGISTERS_AN_SM = 65536
SPARE_REGISTERS = 40  # of one that computes, beside those for its part of a tile
CHUNK = 64  # 16-bit columns in a row of 128 bytes, which TMA swizzles
PRODUCER_THREADS = 128  # that TileLang adds to a block whose copies it gives warps of their own
MAX_GROUPS = 8  # of warps, a named barrier each: TileLang's begin at 3
MAX_ACCUMULATORS = 192  # float32 a thread: it has 255 registers, for addresses and operands too
PRODUCER_REGISTERS = 24  # a thread of its warpgroup that loads: the fewest there are
FLASH_REGISTERS = 24  # a thread of flash_attention_sm90 needs beside its tiles
TILE_ROWS = 8  # of A, that a held weight meets at a time: the columns of a tensor core's tile
HELD_ROWS = 32  # of A, at most, whose weights are held
HELD_REGISTERS = 112  # a thread, of weights: others are for rows of A, sums and addresses
STATIC_BYTES = 46 * 1024  # of shared memory whose size is fixed: 48 KiB less barriers and the like
CPU_TILE_BYTES = 1 << 20  # local arrays lie on the C stack

# Kernels whose tiles go through a pipeline in shared memory.
PIPELINED = ("gemm", "flash_attention")
# Kernels that add up over the threads of a block.
REDUCING = ("skinny_gemm", "decode_attention", "row_softmax", "layer_norm")


def shared_memory_limit(tile: Tile) -> int:
    """Bytes of shared memory a block may have (CUDA programming guide, less 1 KiB for barriers)."""
    limits = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
    return limits.get(tile.capability, 101376 if tile.capability >= 80 else 65536) - 1024


def has_bulk_copies(tile: Tile, row_bytes: int) -> bool:
    """Whether TMA copies rows of this size; it wants multiples of 16 bytes."""
    return tile.capability >= 90 and row_bytes % 16 == 0


def padded_head(tile: Tile, dtype: str, head_dim: int) -> int:
    """Columns of a head in shared memory: the tensor core multiplies 16 deep."""
    return -(-head_dim // 16) * 16 if tile.has_tensor_core(dtype) else head_dim


def shared_memory(tile: Tile, kernel: str, dtype: str, schedule: Any, head_dim: int = 0) -> int:
    """Bytes of dynamic shared memory a block takes, 0 for a kernel that has only a few.

    Output tiles reuse the pipeline's; a gemm's may be float32. `head_dim` is flash_attention's.
    """
    if not tile.is_cuda:
        return 0
    if kernel == "gemm":
        return _gemm_bytes(ITEM_BYTES[dtype], schedule)
    if kernel == "swap_gemm":
        item = ITEM_BYTES[dtype]
        return _rows_bytes(item, schedule) if schedule.held else _ring_bytes(item, schedule)
    if kernel == "gemm_sm90":
        item = ITEM_BYTES[dtype]
        if schedule.splits > 1:
            return _ring_bytes(item, schedule) + 4 * schedule.block_m * (schedule.block_n + 4)
        staged = 0 if stores_through_ring(schedule) else item * schedule.groups
        return _ring_bytes(item, schedule) + staged * schedule.block_m * schedule.store_n
    if kernel == "flash_attention":
        return _attention_bytes(tile, dtype, schedule, head_dim)
    if kernel == "flash_attention_sm90":
        return _flash_bytes(ITEM_BYTES[dtype], schedule, head_dim)
    return 0


def _ring_bytes(item: int, s: GemmSchedule | SwapSchedule | RingGemmSchedule) -> int:
    return s.num_stages * (s.block_m + s.block_n) * s.block_k * item


def row_stride(columns: int) -> int:
    """Of rows in shared memory, of which two side by side have different banks."""
    return columns + (32 - columns) % 64


def _rows_bytes(item: int, s: SwapSchedule) -> int:
    return s.block_m * row_stride(s.groups * s.block_k) * item if s.shared_rows else 0


def staged_bytes(s: SwapSchedule) -> int:
    """Of the products that groups of warps add up and store wide, 0 if they are stored as is."""
    if s.splits > 1:  # once all of the ring has been read its memory has the sums of a block
        return max(0, _sums_bytes(s) - _ring_bytes(2, s)) + _sums_bytes(s) // s.splits
    return _sums_bytes(s) if s.tiles == 1 and may_stage(s) else 0


def _sums_bytes(s: SwapSchedule) -> int:
    return s.groups * s.block_m * (s.block_n + 4) * 4


def may_stage(s: SwapSchedule) -> bool:
    """Whether products fit where they are staged, if need be: for their peaks they are always."""
    return s.splits > 1 or _sums_bytes(s) <= STATIC_BYTES


def stages_beside_sums(tile: Tile, s: SwapSchedule) -> int:
    """Stages of the ring of several tiles if these are staged."""
    left = shared_memory_limit(tile) - 12 * s.block_m - _sums_bytes(s)
    return min(s.num_stages, left // (_ring_bytes(2, s) // s.num_stages))


def swap_bytes(tile: Tile, s: SwapSchedule) -> int:
    """Shared memory of swap_gemm beside its ring: sums, and of each row its position and norm."""
    return 12 * s.block_m + (staged_bytes(s) if s.held or tile.capability >= 90 else 0)


def held_rows(s: SwapSchedule) -> int:
    """Of W, of which a warp holds a step in registers."""
    return s.block_n * s.groups * 32 // s.num_threads


def held_blocks(tile: Tile, s: SwapSchedule, registers: int) -> int:
    """How many blocks that hold weights fit on an SM, of so many registers a thread; at most 8."""
    of_registers = REGISTERS_AN_SM // (s.num_threads * registers)
    shared = _rows_bytes(2, s) + swap_bytes(tile, s)
    return max(1, min(8, of_registers, _memory_an_sm(tile) // (shared + 1024)))


def _memory_an_sm(tile: Tile) -> int:
    """Bytes of shared memory, of which a block costs 1 KiB more than it has."""
    return shared_memory_limit(tile) + 2048


def _gemm_bytes(item: int, s: GemmSchedule) -> int:
    return max(_ring_bytes(item, s), s.block_m * s.block_n * 4)


def _attention_bytes(tile: Tile, dtype: str, s: AttentionSchedule, head_dim: int) -> int:
    item, dim = ITEM_BYTES[dtype], padded_head(tile, dtype, head_dim)
    tiles = item * dim * (s.block_m + 2 * max(1, s.num_stages) * s.block_n)
    # float32 probabilities go through shared memory too
    return tiles if tile.has_tensor_core(dtype) else tiles + item * s.block_m * s.block_n


def _flash_bytes(item: int, s: FlashSchedule, head_dim: int) -> int:
    rows = s.block_m * (s.q_slots + bool(s.resident))  # of queries, and of what goes to memory
    return item * head_dim * (rows + 2 * s.num_stages * s.block_n)


def launch_registers(s: FlashSchedule | RingGemmSchedule) -> int:
    """Of a thread: each quarter of an SM has room for as many warps as the fullest one gets."""
    warps = -(-max(1, s.min_blocks) * s.num_threads // 32 // 4)
    return min(255, REGISTERS_AN_SM // 4 // 32 // warps // 8 * 8)


def _sums(s: RingGemmSchedule) -> int:
    """Float32 registers a thread that hold its part of a tile."""
    return s.block_m * s.block_n * s.groups // (128 * s.consumers)


def residual_ahead(s: RingGemmSchedule) -> bool:
    """Whether registers can hold a tile's residual while its products are computed."""
    return 2 * _sums(s) + SPARE_REGISTERS <= (s.registers or launch_registers(s))


def stores_through_ring(s: RingGemmSchedule) -> bool:
    """Whether a 16-bit tile of C goes where those of A were, a chunk of columns a slot."""
    in_slots = s.block_n % CHUNK == 0 and s.block_n // CHUNK <= s.num_stages
    return in_slots and not s.resident and s.block_k == CHUNK


def violation(tile: Tile, kernel: str, dtype: str, schedule: Any, head_dim: int = 0) -> str:
    """Why a schedule cannot work, "" if nothing is known against it."""
    if not tile.is_cuda:
        return next(_on_cpu(kernel, schedule, head_dim), "")
    return next(_on_cuda(tile, kernel, dtype, schedule, head_dim), "")


def _on_cpu(kernel: str, s: Any, head_dim: int) -> Iterator[str]:
    if s.num_threads != 1:
        yield f"{s.num_threads} threads: a block has 1 on a CPU"
    if getattr(s, "held", False):
        yield "weights are held for a tensor core"
    elements = _cpu_elements(kernel, s, head_dim)
    if 4 * elements > CPU_TILE_BYTES:
        yield f"over budget: tiles of {4 * elements} bytes, and a CPU's stack has {CPU_TILE_BYTES}"


def _cpu_elements(kernel: str, s: Any, head_dim: int) -> int:
    """Of all local arrays of a block, roughly."""
    if kernel in ("gemm", "swap_gemm"):
        return (s.block_m + s.block_n) * s.block_k + 3 * s.block_m * s.block_n
    if kernel == "flash_attention":
        return (3 * s.block_m + 2 * s.block_n) * head_dim + 2 * s.block_m * s.block_n
    if kernel == "skinny_gemm":
        return s.block_m * s.block_n * (s.block_k + 1)
    return 2 * s.block_n * max(1, head_dim)


def _on_cuda(tile: Tile, kernel: str, dtype: str, s: Any, head_dim: int) -> Iterator[str]:
    threads = s.num_threads + (PRODUCER_THREADS if kernel in PIPELINED else 0)
    if s.num_threads % 32 or threads > MAX_THREADS:
        yield f"{s.num_threads} threads: expected whole warps, and at most {MAX_THREADS} in all"
    shared = shared_memory(tile, kernel, dtype, s, head_dim)
    if kernel == "swap_gemm":
        shared += swap_bytes(tile, s)
    if shared > shared_memory_limit(tile):
        limit = shared_memory_limit(tile)
        yield f"over budget: {shared} bytes of shared memory, and {tile.arch} has {limit}"
    if kernel == "gemm" and tile.has_tensor_core(dtype):
        yield from _gemm_warps(s.block_m, s.block_n, s)
    if kernel == "swap_gemm":
        yield from _swap_held(s) if s.held else _swap_groups(s)
        if not tile.has_tensor_core(dtype):
            yield f"{dtype}: a tensor core would round it to TF32"
    if kernel == "gemv":
        yield from _gemv_warps(s)
    if kernel == "flash_attention":
        yield from _attention_warps(tile, dtype, s, head_dim)
    if kernel == "flash_attention_sm90":
        yield from _flash_warps(s)
    if kernel == "gemm_sm90":
        yield from _ring_gemm_warps(s)
    if kernel in ("flash_attention_sm90", "gemm_sm90") or getattr(s, "held", False):
        if s.min_blocks * (shared + 1024) > _memory_an_sm(tile):
            yield f"{s.min_blocks} blocks of {shared} bytes of shared memory do not fit on an SM"
    if kernel in REDUCING and s.num_threads & (s.num_threads - 1):
        yield f"{s.num_threads} threads: a reduction over threads halves them, so a power of 2"


def spill(tile: Tile, kernel: str, dtype: str, schedule: Any, head_dim: int = 0) -> str:
    """Why a schedule that works would be slow for want of registers, "" if it has enough."""
    if not tile.is_cuda:
        return ""
    per_thread, most = _accumulators(tile, kernel, dtype, schedule, head_dim), MAX_ACCUMULATORS
    if kernel == "flash_attention_sm90":
        most = schedule.consumer_registers - FLASH_REGISTERS
    if per_thread <= most:
        return ""
    return f"{per_thread} accumulators a thread: over {most} spill"


def _accumulators(tile: Tile, kernel: str, dtype: str, s: Any, head_dim: int) -> int:
    """Float32 registers a thread that hold what lives through the main loop."""
    if kernel in ("gemm", "swap_gemm"):
        elements = s.block_m * s.block_n
    elif kernel == "flash_attention":
        elements = s.block_m * (s.block_n + padded_head(tile, dtype, head_dim))
    elif kernel == "flash_attention_sm90":  # scores, output and, two to a register, the others
        halves = s.block_n + (head_dim if s.held else 0)  # weights, and queries
        return s.block_m * (s.block_n + head_dim + halves // 2) // (128 * s.consumers)
    elif kernel == "skinny_gemm":
        elements = s.block_m * s.block_n * s.block_k
    else:
        elements = s.block_n * (2 * head_dim if kernel == "decode_attention" else 1)
    return elements // (s.num_threads // getattr(s, "groups", 1))


def _gemm_warps(rows: int, columns: int, s: GemmSchedule | SwapSchedule) -> Iterator[str]:
    if s.block_m % 16 or s.block_n % 16 or s.block_k % 16:
        # below 16 rows TileLang stops; on sm_90 columns of 8 modulo 16 come out wrong
        yield "tensor-core tiles are multiples of 16 in all three sizes"
    tiles = (rows // 16) * (columns // 8)
    if s.num_threads // 32 > tiles:
        yield f"{s.num_threads // 32} warps for {tiles} tiles of 16 x 8: each needs one"


def _swap_groups(s: SwapSchedule) -> Iterator[str]:
    if s.num_threads % (32 * s.groups) or s.groups & (s.groups - 1):
        yield f"{s.groups} groups of {s.num_threads} threads: expected a power of 2 of whole warps"
        return
    if s.groups > MAX_GROUPS:
        yield f"{s.groups} groups: each has a named barrier, of which there are 16 (bar in PTX)"
    leaves_parts = s.tiles == 1 or may_stage(s)  # the rest is too wide for a residual stream
    if s.block_n & (s.block_n - 1) and leaves_parts:
        yield f"{s.block_n} rows of W: the width of a residual stream's parts is a power of 2"
    if s.num_stages < s.groups:
        yield f"{s.num_stages} stages: each of {s.groups} groups needs one"
    if s.splits > 1:
        yield from _swap_splits(s)
    if s.groups > 1 and not staged_bytes(s):
        yield f"{s.groups} groups: their sums need one tile, and at most {STATIC_BYTES} bytes"
    yield from _gemm_warps(s.block_n, s.block_m, replace(s, num_threads=s.num_threads // s.groups))


def _swap_splits(s: SwapSchedule) -> Iterator[str]:
    if s.splits not in (2, 4, 8) or s.block_m % s.splits:
        yield f"{s.splits} blocks share K: expected 2, 4 or 8, each with some of {s.block_m} rows"
    if s.groups > 1 or s.tiles > 1:
        yield "blocks that share K have one group and one tile"


def _swap_held(s: SwapSchedule) -> Iterator[str]:
    if s.block_m not in (8, 16, 32) or s.tiles != 1 or s.block_k % 32:
        yield "weights are held for 8, 16 or 32 rows, one tile, in steps of a multiple of 32"
    if s.splits > 1:
        yield "blocks that hold weights share no K"
    if s.num_stages > (1 if s.shared_rows else s.block_m // TILE_ROWS):
        yield f"{s.num_stages} stages: of rows that are not shared each is {TILE_ROWS}"
    if not staged_bytes(s):
        yield f"{s.groups} groups: their sums need at most {STATIC_BYTES} bytes"
    if s.block_n & (s.block_n - 1):
        yield f"{s.block_n} rows of W: the width of a residual stream's parts is a power of 2"
    warps = s.num_threads // 32
    if warps % s.groups or s.block_n * s.groups not in (8 * warps, 16 * warps, 32 * warps):
        yield f"{s.groups} groups of {warps} warps: each warp has 8, 16 or 32 rows of W"
    if s.num_threads & (s.num_threads - 1):
        # else TileLang 0.1.15 has part of a warp in the sums of moments, and the others wait
        yield f"{s.num_threads} threads: expected a power of 2"
    if (registers := held_rows(s) * s.block_k // 64) > HELD_REGISTERS:
        yield f"{registers} registers a thread of weights: over {HELD_REGISTERS} leave too few"
    if s.min_blocks * s.num_threads > THREADS_AN_SM:
        yield f"{s.min_blocks} blocks of {s.num_threads} threads do not fit on an SM"


def _gemv_warps(s: GemvSchedule) -> Iterator[str]:
    if s.warp_n not in (8, 16, 32) or s.block_n % s.warp_n:
        yield f"{s.warp_n} rows a warp: expected 8, 16 or 32, and a divisor of {s.block_n}"
    if s.min_blocks * s.num_threads > THREADS_AN_SM:
        yield f"{s.min_blocks} blocks of {s.num_threads} threads do not fit on an SM"


def _attention_warps(tile: Tile, dtype: str, s: AttentionSchedule, head_dim: int) -> Iterator[str]:
    if not tile.has_tensor_core(dtype):
        if s.num_threads != s.block_m:
            yield "a barrier in a branch: float32 takes one thread a row"
    elif s.block_m % (s.num_threads // 32 * 16) or s.block_n % 16:
        yield "each warp needs whole tiles of 16 rows, and keys by 16"
    if s.num_stages > 1 and not has_bulk_copies(tile, head_dim * ITEM_BYTES[dtype]):
        yield f"{s.num_stages} stages: without TMA a pipeline of unknown length does not compile"


def _handed_over(s: FlashSchedule | RingGemmSchedule, wanted: int) -> Iterator[str]:
    """Warps hand registers over within what their block was launched with.

    For more they wait for ever (setmaxnreg in the PTX manual).
    """
    given = launch_registers(s)
    if s.consumers * wanted + PRODUCER_REGISTERS > (s.consumers + 1) * given:
        yield f"{wanted} registers wanted, of a block that was given {given} for each thread"


def _flash_warps(s: FlashSchedule) -> Iterator[str]:
    if s.block_m % (64 * s.consumers) or s.block_n % 16 or s.block_n > 256:
        yield "each warpgroup needs whole tiles of 64 rows, and keys by 16, up to 256"
    yield from _handed_over(s, s.consumer_registers)
    if s.resident and not (s.overlap and s.block_m == 64 * s.consumers):
        yield "resident blocks overlap, and have 64 rows a warpgroup"
    if s.consumer_registers % 8 or not 24 <= s.consumer_registers <= 256:
        yield "registers of a thread are multiples of 8 from 24 to 256"


def _ring_gemm_warps(s: RingGemmSchedule) -> Iterator[str]:
    rows = 64 * s.consumers // s.groups
    if s.block_m % rows or s.block_n % 16 or s.block_n > 256 or s.block_k % 64:
        yield f"tiles are of {rows} rows, of columns by 16 up to 256, and 64 deep, or multiples"
    if s.store_columns and (s.store_columns % CHUNK or s.block_n % s.store_columns):
        yield f"{s.store_columns} columns stored at a time: expected a divisor, by {CHUNK}"
    if s.splits not in (1, 2, 4, 8) or (s.splits > 1 and (s.resident or s.registers)):
        yield f"{s.splits} blocks share K: expected 1, 2, 4 or 8, not resident, of equal warps"
    if s.ping_pong and not (s.resident and s.consumers > 1):
        yield "only resident blocks of several warpgroups have these take turns"
    wanted = s.registers or launch_registers(s)
    if (wanted % 8 and wanted != 255) or wanted > 255:
        yield f"{wanted} registers a thread: expected a multiple of 8, up to 248"
    if s.registers:
        yield from _handed_over(s, wanted)
    if _sums(s) + SPARE_REGISTERS // 2 > wanted:
        yield f"{_sums(s)} sums a thread, which has {wanted} registers"
