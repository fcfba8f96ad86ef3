"""The schedule of gemm_sm90: of a few forms, the one that a model of an H200 finds fastest."""

from dataclasses import replace

from minifused.kernels import buckets
from minifused.kernels.limits import SMS
from minifused.kernels.schedule import RingGemmSchedule, tuned
from minifused.kernels.tile import Tile

PRODUCTS = 2048  # multiply-adds an SM does a clock
SM_BYTES = 55  # that it gets a clock
FIRST_BYTES = 1500  # clocks from a launch to the first product
END = 2000  # clocks at the end of a tile, and one for each 8 elements
CLUSTER_SUM = 0.75  # clocks an element of a tile, to read it from all blocks of a cluster
L2_MATRIX = 16 << 20  # bytes of A that stay in L2

_WIDE = RingGemmSchedule(128, 256, 4, 2, resident=SMS, registers=240, store_columns=128)
_TURNS = replace(_WIDE, ping_pong=True, swizzle=8)
# Of forms that the model finds as good, the first.
FORMS = (
    _WIDE,
    replace(_WIDE, block_m=256, block_n=128, store_columns=64),
    *(replace(_WIDE, block_n=n, store_columns=0) for n in (208, 192, 160)),
    replace(_WIDE, block_n=112, num_stages=6, store_columns=0),
    replace(_TURNS, block_n=192, store_columns=64),
    replace(_TURNS, block_n=160, store_columns=0),
    replace(_TURNS, block_n=128, num_stages=5, store_columns=64),
    RingGemmSchedule(128, 64, 8, 2),
    RingGemmSchedule(64, 128, 8, 1),
    RingGemmSchedule(128, 128, 3, 2, min_blocks=2),
    RingGemmSchedule(128, 64, 4, 2, min_blocks=2),
    RingGemmSchedule(64, 128, 4, 1, min_blocks=2),
    RingGemmSchedule(64, 64, 6, 1, min_blocks=2),
    RingGemmSchedule(64, 96, 8, 1, splits=2),
    RingGemmSchedule(64, 128, 8, 1, splits=4),
    RingGemmSchedule(128, 128, 5, 2, splits=4),
)


def ring_gemm_schedule(tile: Tile, m: int, n: int, k: int, dtype: str) -> RingGemmSchedule:
    return tuned(tile, "gemm_sm90", buckets.gemm(m, n, k), dtype, _rule(m, n, k))


def _rule(m: int, n: int, k: int) -> RingGemmSchedule:
    """That of the most rows that share a bucket, so that these compile once."""
    rows = min(buckets.ceiling(m, buckets.GEMM_ROWS), 2 * buckets.GEMM_ROWS[-1])
    best = min(FORMS, key=lambda form: clocks(form, rows, n, k))
    swizzle = 0 if rows * k * 2 <= L2_MATRIX else 16
    return replace(best, swizzle=best.swizzle or swizzle)


def clocks(s: RingGemmSchedule, m: int, n: int, k: int) -> float:
    """About how long a product takes."""
    area, tiles = s.block_m * s.block_n, -(-m // s.block_m) * -(-n // s.block_n)
    rounds, steps = -(-tiles * s.splits // SMS), -(-k // (s.block_k * s.splits))
    loads = (s.block_m + s.block_n) * s.block_k * 2 / SM_BYTES
    step = max(area * s.block_k / PRODUCTS, loads)
    # Beside another block on the SM, or another group, the end of a tile costs nothing, but for the
    # last.
    ends = 1 if s.min_blocks > 1 or s.ping_pong else rounds
    exchange = CLUSTER_SUM * area if s.splits > 1 else 0
    return FIRST_BYTES + rounds * steps * step + ends * (END + area / 8 + exchange)
