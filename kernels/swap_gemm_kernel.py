"""Matrix product for 2 to 128 rows on tensor cores, operands swapped: C^T = epilogue(W @ A^T).

A tensor core's tile has 16 or 64 rows but as few as 8 columns, so the weights give its rows and the
few rows of A its columns. Weights are the whole cost: with TMA, a ring of their tiles is on its way
before the kernel waits for the one that writes A, if no kernel writes them. Products of a tile are
a chain, each waiting for the one before: groups of warps take turns at the steps through K, and
their sums meet in shared memory, from where a store is wide. For up to 32 rows there is a form with
weights in registers: see swap_held.py; for few tiles and a long K one whose blocks share K: see
swap_split_block.py.
"""

import tilelang.language as T

from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_block import Product, block
from minifused.kernels.swap_held_block import held_block
from minifused.kernels.swap_split_block import split_block
from minifused.kernels.tile import Tile


def swap_gemm_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, ahead: bool, schedule: SwapSchedule, cached: bool = False,
    fold: tuple[int, float] | None = None, follow: bool = False, valid: int | None = None,
):  # fmt: skip
    """Build C (m, n) = act(A (m, k) @ W (n, k)^T + bias (n)) + R (m, n) for small dynamic m.

    A, W and bias have `dtype`, R and C `out_dtype`; sums are float32. `ahead` reads W, and with
    one tile a block bias, gain and W's sums, before the kernels launched earlier have ended. The
    rest asks for more tensors:

    cached: positions (m,) int32, K_cache and V_cache (m, capacity, n / 3). C is a packed query, key
    and value, of which the latter two also go to their caches.
    fold: columns of a part, and epsilon. A is a row times the gain of its layer norm, which is
    completed from stats (m, 2 * parts), and W's sums (2, n) in place of a bias: see swap_fold.py.
    follow: of C (float32) and gain (n,) also make the next kernel's A, `scaled` (m, n) of `dtype`,
    and its stats, `moments` (m, 2 * parts), of parts of block_n columns.
    valid: of C (float32) also write the `peaks` (m, 2 * parts) of as many parts, of its first
    `valid` columns: see swap_peaks.py.
    """
    m, f32, run = T.dynamic("m"), "float32", _form(schedule)
    product = Product(
        tile, n, k, dtype, out_dtype, activation, has_bias, has_residual, ahead, schedule, fold
    )
    A_type, W_type, bias_type = (T.Tensor(shape, dtype) for shape in ((m, k), (n, k), (n,)))
    R_type, C_type = (T.Tensor((m, n), out_dtype) for _ in "RC")  # one object is one tensor

    if not (cached or fold or follow or valid):

        @T.prim_func
        def swap_gemm(A: A_type, W: W_type, bias: bias_type, R: R_type, C: C_type):
            run(product, A, W, bias, R, C, None, None, None, None)

        return swap_gemm

    of_cache = (m, T.dynamic("capacity"), n // 3) if cached else (1,)
    P_type = T.Tensor((m,), "int32")
    K_type, V_type = (T.Tensor(of_cache, out_dtype) for _ in "KV")
    parts = -(-k // fold[0]) if fold else 1
    stats_type, sums_type = T.Tensor((m, 2 * parts), f32), T.Tensor((2, n), f32)
    gain_type, scaled_type = T.Tensor((n,), dtype), T.Tensor((m, n), dtype)
    moments_type, peaks_type = (T.Tensor((m, 2 * -(-n // schedule.block_n)), f32) for _ in range(2))

    @T.prim_func
    def swap_gemm_step(
        A: A_type, W: W_type, bias: bias_type, R: R_type, C: C_type,
        positions: P_type, K_cache: K_type, V_cache: V_type, stats: stats_type, sums: sums_type,
        gain: gain_type, scaled: scaled_type, moments: moments_type, peaks: peaks_type,
    ):  # fmt: skip
        caches = (positions, K_cache, V_cache) if cached else None
        norm, after = (stats, sums) if fold else None, (gain, scaled, moments) if follow else None
        run(product, A, W, bias, R, C, caches, norm, after, (peaks, valid) if valid else None)

    return swap_gemm_step


def _form(schedule: SwapSchedule):
    """The macro of a block."""
    if schedule.splits > 1:
        return split_block
    return held_block if schedule.held else block
