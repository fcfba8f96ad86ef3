"""The schedule of gemm_sm90: of a few forms, the one that a model of an H200 finds fastest."""

from dataclasses import replace

from minifused.kernels import buckets
from minifused.kernels.limits import SMS
from minifused.kernels.schedule import RingGemmSchedule, tuned
from minifused.kernels.tile import Tile

PRODUCTS = 2048  # multiply-adds an SM does a clock
L2_BYTES = 5300  # that all SMs get a clock
SM_BYTES = 64  # that one gets
FIRST_BYTES = 1500  # clocks from a launch to the first product
END = 1000  # clocks at the end of a tile, and one for each 16 elements
L2_MATRIX = 16 << 20  # bytes of A that stay in L2

FORMS = (
    RingGemmSchedule(128, 256, 4, 2, resident=SMS, registers=240, store_columns=128),
    RingGemmSchedule(256, 128, 4, 2, resident=SMS, registers=240, store_columns=64),
    RingGemmSchedule(128, 192, 4, 2, resident=SMS, registers=240),
    RingGemmSchedule(128, 160, 4, 2, resident=SMS, registers=240),
    RingGemmSchedule(128, 128, 3, 2, min_blocks=2),
    RingGemmSchedule(128, 64, 4, 2, min_blocks=2),
    RingGemmSchedule(64, 128, 4, 1, min_blocks=2),
    RingGemmSchedule(64, 64, 6, 1, min_blocks=2),
)
# As measured, where the model has no form as good: one round of small tiles, and many whole rounds
# so shallow that the ends of tiles count: these then run beside the products of another tile.
ONE_ROUND = RingGemmSchedule(128, 64, 8, 2)
MANY_ROUNDS = RingGemmSchedule(
    128, 128, 5, 2, resident=SMS, ping_pong=True, swizzle=8, registers=240, store_columns=64
)
MANY_ROUNDS_DEPTH = 3072
WHOLE = 0.9  # of the last round, and of the tiles at the edges


def ring_gemm_schedule(tile: Tile, m: int, n: int, k: int, dtype: str) -> RingGemmSchedule:
    return tuned(tile, "gemm_sm90", buckets.gemm(m, n, k), dtype, _rule(m, n, k))


def _rule(m: int, n: int, k: int) -> RingGemmSchedule:
    """That of the most rows that share a bucket, so that these compile once."""
    rows = min(buckets.ceiling(m, buckets.GEMM_ROWS), 2 * buckets.GEMM_ROWS[-1])
    best = min(FORMS, key=lambda form: clocks(form, rows, n, k))
    if k <= MANY_ROUNDS_DEPTH and _has_whole_rounds(MANY_ROUNDS, rows, n):
        best = MANY_ROUNDS
    elif SMS // 2 < _tiles(ONE_ROUND, rows, n) <= SMS:
        best = ONE_ROUND
    swizzle = 0 if rows * k * 2 <= L2_MATRIX else 16
    return replace(best, swizzle=best.swizzle or swizzle)


def _tiles(s: RingGemmSchedule, m: int, n: int) -> int:
    return -(-m // s.block_m) * -(-n // s.block_n)


def _has_whole_rounds(s: RingGemmSchedule, m: int, n: int) -> bool:
    """Whether three rounds of tiles or more leave few SMs idle."""
    rounds = -(-_tiles(s, m, n) // SMS)
    return rounds >= 3 and m * n >= WHOLE * rounds * SMS * s.block_m * s.block_n


def clocks(s: RingGemmSchedule, m: int, n: int, k: int) -> float:
    """About how long a product takes."""
    area, tiles = s.block_m * s.block_n, _tiles(s, m, n)
    rounds, steps = -(-tiles // SMS), -(-k // s.block_k)
    bandwidth = min(SM_BYTES, L2_BYTES / min(tiles, SMS))
    loads = (s.block_m + s.block_n) * s.block_k * 2 / bandwidth
    step = max(area * s.block_k / PRODUCTS, loads)
    end = END + area / 16
    # Beside another block on the SM, or another group, the end of a tile costs nothing, but for the
    # last.
    ends = end if s.min_blocks > 1 or s.ping_pong else rounds * end
    return FIRST_BYTES + rounds * steps * step + ends
