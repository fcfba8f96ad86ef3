"""Row softmax, with padded columns masked.

A row that fits in a fragment is read once. A wider one is read twice in pieces: first the running
maximum and the sum rescaled to it (Milakov and Gimelshein, arXiv 1805.02867), then the values. On a
GPU that takes other forms: `row_softmax_wide`, and for a few rows `row_softmax_split`; and a short
row is a warp's: `row_softmax_warps`.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels import buckets
from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.layer_norm_warps import rows_schedule, takes_row
from minifused.kernels.row_lanes import softmax_exp, vector_width
from minifused.kernels.row_softmax_split import (
    MIN_SPLIT,
    SPLIT_ROWS,
    compile_split,
    is_split,
    split_schedule,
)
from minifused.kernels.row_softmax_warps import row_softmax_warps_kernel
from minifused.kernels.row_softmax_wide import wide_schedule, wide_softmax_kernel
from minifused.kernels.schedule import RowSchedule, tuned
from minifused.kernels.tile import Tile

MAX_COLUMNS_IN_REGISTERS = MIN_SPLIT  # wider rows go in pieces, of one block or of several
GPU_ROWS = tuple(sorted({*SPLIT_ROWS, *buckets.ROWS}))


def row_softmax_kernel(
    tile: Tile, n: int, valid: int, dtype: str, out_dtype: str, schedule: RowSchedule
):
    """Build Y (m, n) = softmax of X (m, n) along n over the first `valid` columns; m is dynamic.

    Columns from `valid` on are 0. As in torch.softmax, a row of -inf gives NaN, and so does a row
    that holds NaN or +inf.
    """
    if takes_row(tile, n):
        return row_softmax_warps_kernel(tile, n, valid, dtype, out_dtype, schedule)
    block_n = schedule.block_n
    wide = valid > min(block_n, MAX_COLUMNS_IN_REGISTERS)
    if tile.is_cuda and wide and vector_width(dtype, out_dtype, schedule):
        return wide_softmax_kernel(tile, n, valid, dtype, out_dtype, schedule)
    m = T.dynamic("m")
    minus_inf = -T.infinity("float32")
    exp = softmax_exp(tile, out_dtype)

    @T.prim_func
    def row_softmax(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), out_dtype)):
        with T.Kernel(m, threads=schedule.num_threads) as row:
            x = tile.fragment((block_n,), "float32")
            block_max = tile.fragment((1,), "float32")
            block_sum = tile.fragment((1,), "float32")
            row_max = tile.fragment((1,), "float32")
            row_sum = tile.fragment((1,), "float32")
            tile.pdl_trigger()
            tile.pdl_sync()
            T.fill(row_max, minus_inf)
            T.clear(row_sum)
            for block in T.serial(T.ceildiv(valid, block_n)):
                for j in tile.parallel(block_n):
                    col = block * block_n + j
                    x[j] = T.if_then_else(col < valid, T.cast(X[row, col], "float32"), minus_inf)
                T.copy(row_max, block_max)
                T.reduce_max(x, row_max, dim=0, clear=False)
                for j in tile.parallel(block_n):
                    # No finite value so far: shift by 0, not by -inf, which would give NaN.
                    shift = T.if_then_else(row_max[0] == minus_inf, 0.0, row_max[0])
                    x[j] = exp(x[j] - shift)
                T.reduce_sum(x, block_sum, dim=0)
                for i in tile.parallel(1):
                    shift = T.if_then_else(row_max[i] == minus_inf, 0.0, row_max[i])
                    row_sum[i] = row_sum[i] * exp(block_max[i] - shift) + block_sum[i]
            for block in T.serial(T.ceildiv(n, block_n)):
                for j in tile.parallel(block_n):
                    col = block * block_n + j
                    if col < n:
                        if valid > block_n:
                            x[j] = exp(T.cast(X[row, col], "float32") - row_max[0])
                        Y[row, col] = T.cast(
                            T.if_then_else(col < valid, x[j] / row_sum[0], 0.0), out_dtype
                        )

    return row_softmax


def row_softmax_schedule(tile: Tile, m: int, n: int, dtype: str) -> RowSchedule:
    """The schedule of one block a row, or of several rows in a block, a warp each."""
    in_pieces = tile.is_cuda and n > MAX_COLUMNS_IN_REGISTERS
    rule = wide_schedule(dtype) if in_pieces else rows_schedule(tile, n, MAX_COLUMNS_IN_REGISTERS)
    return tuned(tile, "row_softmax", buckets.row(m, n), dtype, rule)


@functools.cache
def _select(
    device: torch.device,
    m: int,
    n: int,
    valid: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Callable[..., None]:
    tile, names = tile_for(device), (dtype_name(dtype), dtype_name(out_dtype))
    if tile.is_cuda and is_split(m, valid):
        return compile_split(tile, n, valid, *names, split_schedule(m, n, names[0]))
    schedule = row_softmax_schedule(tile, m, n, names[0])
    return compile_kernel(row_softmax_kernel, tile, n, valid, *names, schedule)


def row_softmax(
    x: Tensor,
    valid: int,
    out: Tensor,
    masses: Tensor | None = None,
    peaks: Tensor | None = None,
) -> None:
    """Write softmax(x (m, n)) over the first `valid` columns to out (m, n), both contiguous.

    masses: (m, count_masses(m, n, valid)) int64, if that is not 0: gets for each piece of a row the
    sum of its weights in a draw.
    peaks: with masses, (m, parts, 2) float32: of each part of a row the maximum of x, and the sum
    of exp(x - that), as the product has left them that made x.
    """
    m = buckets.ceiling(x.shape[0], GPU_ROWS if x.is_cuda else buckets.ROWS)
    kernel = _select(x.device, m, x.shape[1], valid, x.dtype, out.dtype)
    kernel(x, out) if masses is None else kernel(x, out, masses, peaks)
