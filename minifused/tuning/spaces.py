"""The search spaces: which schedules of a kernel are worth a try on a machine.

Each is a function of (tile, dtype, workload). What a space holds may yet break a limit of
`kernels.limits`, which says why, so that the list of candidates shows where the space ends.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from minifused.kernels.gemm_sm90_rule import clocks
from minifused.kernels.gemv_row import CHUNK
from minifused.kernels.layer_norm_warps import takes_row
from minifused.kernels.limits import (
    HELD_ROWS,
    ITEM_BYTES,
    REGISTERS_AN_SM,
    SMS,
    has_bulk_copies,
    held_blocks,
    violation,
)
from minifused.kernels.schedule import (
    HELD_BYTES,
    WIDE_TILE,
    AttentionSchedule,
    FlashSchedule,
    GemmSchedule,
    GemvSchedule,
    RingGemmSchedule,
    RowSchedule,
    SkinnySchedule,
    SwapSchedule,
    next_power_of_2,
)
from minifused.kernels.tile import Tile
from minifused.workloads import (
    AttentionWorkload,
    DecodeWorkload,
    LayerNormWorkload,
    LinearWorkload,
    SoftmaxWorkload,
    VectorAddWorkload,
)

SLACK = 1.1  # of the model that the rule has, which is not exact
SWIZZLE = 10  # panels of blocks that share their operands in L2
THREADS = (32, 64, 128, 256, 512, 1024)
VALUES_A_THREAD = (4, 64)  # of a row: 16 bytes at a time, and no spills


def gemm(tile: Tile, dtype: str, w: LinearWorkload) -> Iterator[GemmSchedule]:
    if not tile.is_cuda:
        rows = (4, 12, 24, 48) if w.m > 4 else (1, 2, 4)
        for m, n, k in product(rows, (48, 96, 192), (64, 128, 256)):
            yield GemmSchedule(m, n, k, 1, 1)
    elif tile.has_tensor_core(dtype):
        yield from _gemm_on_tensor_cores(w)
    else:
        tiles = ((32, 64), (64, 64), (64, 128), (128, 64), (128, 128))
        for (m, n), k, stages, threads in product(tiles, (16, 32), (2, 3), (128, 256)):
            yield GemmSchedule(m, n, k, stages, threads, SWIZZLE)


def _gemm_on_tensor_cores(w: LinearWorkload) -> Iterator[GemmSchedule]:
    tiles = [(64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (128, 192), (128, 256)]
    tiles += [(256, 64), (192, 128), (256, 128)] if w.m > 64 else [(16, 64), (32, 64), (32, 128)]
    pipelines = ((32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3))  # block_k, stages
    for (m, n), (k, stages), threads in product(tiles, pipelines, (128, 256, 384)):
        if threads == (384 if m == 192 else 128) or (threads == 256 and m % 128 == 0):
            for swizzle in (SWIZZLE, 0) if k == 64 and stages > 2 else (SWIZZLE,):
                yield GemmSchedule(m, n, k, stages, threads, swizzle)


def ring_gemm(tile: Tile, dtype: str, w: LinearWorkload) -> Iterator[RingGemmSchedule]:
    """Of blocks that share an SM, and of resident ones, those that may be near the fastest.

    A tile's width is any multiple of 16, since few rows leave SMs idle with all but some of them.
    """
    size = w.m, w.n, w.k
    forms = list(_ring_forms((0, 8, 16) if w.m > 1024 else (0,)))
    forms.sort(key=lambda s: clocks(s, *size))  # of a few of them, some are of the fastest
    least = next(clocks(s, *size) for s in forms if not violation(tile, "gemm_sm90", dtype, s))
    yield from (s for s in forms if clocks(s, *size) <= SLACK * least)


def _ring_forms(panels: tuple[int, ...]) -> Iterator[RingGemmSchedule]:
    for m, n, stages in product((64, 128), range(48, 208, 16), (3, 4, 6, 8)):
        for blocks in (1, 2, 3):
            yield RingGemmSchedule(m, n, stages, m // 64, blocks, swizzle=panels[-1])
    for m, n, stages, splits in product((64, 128), range(64, 144, 16), (4, 5, 6, 8), (2, 4)):
        yield RingGemmSchedule(m, n, stages, m // 64, splits=splits)
    for stages, swizzle in product((3, 4, 5), panels):
        for m, n in (*((128, n) for n in range(112, 272, 16)), (256, 96), (256, 112), (256, 128)):
            yield from _stores(RingGemmSchedule(m, n, stages, 2, 1, SMS, False, swizzle, 240))
        for m, n in ((128, 128), (128, 160), (128, 192), (64, 256), (64, 192)):
            yield from _stores(RingGemmSchedule(m, n, stages, 2, 1, SMS, True, swizzle, 240))


def _stores(whole: RingGemmSchedule) -> Iterator[RingGemmSchedule]:
    """A tile stored at once, and in two or more turns, which leave room for stages."""
    yield whole
    if whole.num_stages > 3 and whole.block_n % 64 == 0:
        yield replace(whole, store_columns=64)


def skinny_gemm(tile: Tile, dtype: str, w: LinearWorkload) -> Iterator[SkinnySchedule]:
    if not tile.is_cuda:
        for m, n, k in product((1, 2), (2, 4, 8, 16), (8, 16, 32)):
            yield SkinnySchedule(m, n, k, 1)
        return
    lanes = [512 * times // ITEM_BYTES[dtype] for times in (1, 2, 4)]  # 512 bytes: 16 a lane
    rows = next_power_of_2(w.m)
    for n, k, threads in product((1, 2, 4, 8, 16, 32), lanes, (32, 64, 128, 256, 512)):
        if 8 <= n * k // threads <= 64:
            yield SkinnySchedule(rows, n, k, threads)


SPLIT_K = 2048  # columns, from which on blocks may share them


def swap_gemm(tile: Tile, dtype: str, w: LinearWorkload) -> Iterator[SwapSchedule]:
    if tile.capability >= 90 and w.m <= HELD_ROWS and 2 * w.n * w.k <= HELD_BYTES:
        yield from _held(tile, w)
    most = max(16, next_power_of_2(w.m))
    has_ring = has_bulk_copies(tile, w.k * ITEM_BYTES[dtype])
    rows = [m for m in (16, 32, 64, 128) if m == most or (has_ring and most // 4 <= m < most)]
    k = min(64, max(16, next_power_of_2(w.k)))
    for m, n, warps in product(rows, (16, 32, 64, 128), (1, 2, 4, 8)):
        steps, blocks = -(-w.k // k), -(-w.m // m) * -(-w.n // n)
        shares = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (3, 1)] if has_ring else [(1, 1)]
        for tiles, groups in shares:
            fits = groups <= steps and tiles <= max(1, blocks // 66) and warps * groups <= 16
            if (fits and 16 <= m * n // warps // 32 <= 64) or (m, n, warps) == (16, 16, 1):
                for stages in {min(count, tiles * steps) for count in (4, 8, 12, 24)}:
                    yield SwapSchedule(m, n, k, stages, 32 * warps * groups, tiles, groups)
        if has_ring and w.k >= SPLIT_K and 16 <= m * n // warps // 32 <= 64:
            for splits in (2, 4, 8):
                if blocks * splits <= SMS:
                    stages = min(8, -(-steps // splits))
                    yield SwapSchedule(m, n, k, stages, 32 * warps, splits=splits)
    wide_m, wide_n = WIDE_TILE
    tiles = -(-w.n // (wide_n * SMS))
    if has_ring and most == wide_m and tiles > 1:
        yield from (SwapSchedule(*WIDE_TILE, k, stages, 2 * wide_n, tiles) for stages in (3, 4, 5))


def _held(tile: Tile, w: LinearWorkload) -> Iterator[SwapSchedule]:
    """With as many blocks on an SM as registers and shared memory let there be."""
    reads = -(-w.k // CHUNK)
    tiles = ((8, 8), (16, 8), (16, 16), (32, 16), (32, 32), (64, 16), (64, 32))
    rows = [m for m in (8, 16, 32) if m < 2 * w.m or m == 8]
    for m, (n, warp_n), groups in product(rows, tiles, (1, 2, 4, 8, 16, 32)):
        share, threads = -(-reads // groups), 32 * n // warp_n * groups
        if threads > 1024 or share * groups > 1.3 * reads:
            continue
        for shared, stages in [*((False, s) for s in (1, 2, 4) if 8 * s <= m), (True, 1)]:
            base = SwapSchedule(m, n, 32 * share, stages, threads, 1, groups, True, shared)
            registers = warp_n + 16 + share * (warp_n // 2 + (0 if shared else 3 * stages))
            blocks = held_blocks(tile, base, max(88, registers) if m > 8 else registers)
            yield replace(base, min_blocks=blocks)


def gemv(tile: Tile, dtype: str, w: LinearWorkload) -> Iterator[GemvSchedule]:
    """What a lane has of its weight rows fits in registers, in few more warps than columns need."""
    reads = -(-w.k // CHUNK)
    for warp_n, split_k, groups in product((8, 16, 32), range(1, 21), (1, 2, 3, 4, 6)):
        share, warps = -(-reads // split_k), groups * split_k
        registers = 4 * (warp_n // 8) * share
        even = share * split_k <= 1.15 * reads
        if even and 2 <= warps <= 24 and (16 if split_k > 1 else 1) <= registers <= 96:
            fitting = REGISTERS_AN_SM // (32 * warps * (registers + 48))
            yield GemvSchedule(groups * warp_n, warp_n, split_k, max(1, min(fitting, 8)))


def flash_attention(tile: Tile, dtype: str, w: AttentionWorkload) -> Iterator[AttentionSchedule]:
    if not tile.is_cuda:
        for m, n in product((16, 32, 64), (32, 64, 128)):
            yield AttentionSchedule(m, n, 1, 1)
    elif tile.has_tensor_core(dtype):
        for m, n, stages in product((64, 128, 192), (32, 64, 96, 128, 192), (1, 2, 3)):
            for threads in (2 * m, m):  # a warp for 16 rows, or for 32
                yield AttentionSchedule(m, n, stages, threads)
    else:
        for m, n, stages in product((32, 64, 128), (16, 32, 64), (1, 2)):
            yield AttentionSchedule(m, n, stages, m)


def flash_attention_sm90(tile: Tile, dtype: str, w: AttentionWorkload) -> Iterator[FlashSchedule]:
    """Small tiles that share an SM, and large ones whose warpgroups overlap."""
    small = (
        FlashSchedule(64, 0, 0, 1, 128, 3),
        FlashSchedule(64, 0, 0, 1, 216, 2),
        FlashSchedule(128, 0, 0, 2, 104, 2),
    )
    large = (
        FlashSchedule(128, 0, 2, 2, 240, overlap=True),
        FlashSchedule(192, 0, 2, 3, 160, overlap=True),
    )
    bases = [
        *(replace(s, block_n=n, num_stages=stages)
          for s, n, stages in product(small, (64, 96, 128), (2, 3))),
        *(replace(s, block_n=n, pin=pin)
          for s, n, pin in product(large, (96, 128, 160, 192), (False, True))),
    ]  # fmt: skip
    for base in bases:
        for heads in (1, 8, 16, 32, 128):
            yield replace(base, heads_together=heads)
    for base, heads in product(_resident_flash(), (16, 128) if w.causal else (1,)):
        yield replace(base, heads_together=heads)


def _resident_flash() -> Iterator[FlashSchedule]:
    wide = FlashSchedule(128, 128, 2, 2, 240, resident=SMS, overlap=True)
    high = replace(wide, block_m=192, consumers=3, consumer_registers=160)
    for base, stages, pin, held in product((wide, high), (2, 3), (False, True), (False, True)):
        yield replace(base, num_stages=stages, pin=pin, held=held)


def decode_attention(tile: Tile, dtype: str, w: DecodeWorkload) -> Iterator[RowSchedule]:
    if not tile.is_cuda:
        yield from (RowSchedule(n, 1) for n in (4, 8, 16, 32, 64))
        return
    dim = next_power_of_2(w.head_dim)
    for n, threads in product((16, 32, 64, 128, 256), (64, 128, 256, 512)):
        if 8 <= n * dim // threads <= 96:
            yield RowSchedule(n, threads)


def row(tile: Tile, dtype: str, w: SoftmaxWorkload | LayerNormWorkload) -> Iterator[RowSchedule]:
    """A row as one block of columns, or in pieces; where a warp has one, how many a block has."""
    whole = next_power_of_2(w.n)
    if takes_row(tile, w.n):
        yield from (RowSchedule(max(32, whole), threads) for threads in THREADS[:-1])
        return
    if not tile.is_cuda:
        pieces = {n for n in (256, 1024, 4096, 8192) if n < whole}
        yield from (RowSchedule(n, 1) for n in sorted(pieces | {min(whole, 16384)}))
        return
    pieces = {n for n in (1024, 2048, 4096, 8192, 16384) if n < whole}
    least, most = VALUES_A_THREAD
    for n, threads in product(sorted(pieces | {max(32, min(whole, 32768))}), THREADS):
        if least <= n // threads <= most:
            yield RowSchedule(n, threads)


def vector_add(tile: Tile, dtype: str, w: VectorAddWorkload) -> Iterator[RowSchedule]:
    for kib, threads in product((2, 4, 8, 16, 32), (64, 128, 256, 512) if tile.is_cuda else (1,)):
        block = kib * 1024 // ITEM_BYTES[dtype]
        if not tile.is_cuda or block * ITEM_BYTES[dtype] >= 16 * threads:
            yield RowSchedule(block, threads)
