"""Layer normalisation of rows (Ba, Kiros and Hinton, arXiv 1607.06450).

The variance is summed around the mean, and what rounding left of the mean is summed there too and
corrects both (Chan, Golub and LeVeque, 1983): a row may have a mean far larger than its spread. A
row that fits in a fragment is read once. On a GPU short rows have a warp each: layer_norm_warps.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels import buckets
from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.layer_norm_warps import layer_norm_warps_kernel, rows_schedule, takes_row
from minifused.kernels.schedule import RowSchedule, tuned
from minifused.kernels.tile import Tile

MAX_COLUMNS_IN_REGISTERS = 8192


def layer_norm_kernel(
    tile: Tile, n: int, eps: float, dtype: str, out_dtype: str, schedule: RowSchedule
):
    """Build Y (m, n) = (X (m, n) - mean) / sqrt(var + eps) * weight (n) + bias (n); m is dynamic.

    X has `dtype`; weight, bias and Y have `out_dtype`; statistics are float32.
    """
    if takes_row(tile, n):
        return layer_norm_warps_kernel(tile, n, eps, dtype, out_dtype, schedule)
    block_n = schedule.block_n
    num_blocks = -(-n // block_n)
    m = T.dynamic("m")

    @T.macro
    def load(X, row, block, x):
        for j in tile.parallel(block_n):
            col = block * block_n + j
            x[j] = T.if_then_else(col < n, T.cast(X[row, col], "float32"), 0.0)

    @T.prim_func
    def layer_norm(
        X: T.Tensor((m, n), dtype),
        weight: T.Tensor((n,), out_dtype),
        bias: T.Tensor((n,), out_dtype),
        Y: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(m, threads=schedule.num_threads) as row:
            x = tile.fragment((block_n,), "float32")
            centred = tile.fragment((block_n,), "float32")
            block_sum = tile.fragment((1,), "float32")
            mean = tile.fragment((1,), "float32")
            rest = tile.fragment((1,), "float32")  # of the mean: what its own rounding left
            rstd = tile.fragment((1,), "float32")
            tile.pdl_trigger()
            tile.pdl_sync()
            T.clear(mean)
            T.clear(rest)
            T.clear(rstd)
            for block in T.serial(num_blocks):
                load(X, row, block, x)
                T.reduce_sum(x, block_sum, dim=0)
                for i in tile.parallel(1):
                    mean[i] += block_sum[i] / n
            for block in T.serial(num_blocks):
                if num_blocks > 1:
                    load(X, row, block, x)
                for j in tile.parallel(block_n):
                    centred[j] = T.if_then_else(block * block_n + j < n, x[j] - mean[0], 0.0)
                T.reduce_sum(centred, block_sum, dim=0)
                for i in tile.parallel(1):
                    rest[i] += block_sum[i] / n
                for j in tile.parallel(block_n):
                    centred[j] *= centred[j]
                T.reduce_sum(centred, block_sum, dim=0)
                for i in tile.parallel(1):
                    rstd[i] += block_sum[i] / n
            for i in tile.parallel(1):
                rstd[i] = 1.0 / T.sqrt(T.max(rstd[i] - rest[i] * rest[i], 0.0) + eps)
            for block in T.serial(num_blocks):
                if num_blocks > 1:
                    load(X, row, block, x)
                for j in tile.parallel(block_n):
                    col = block * block_n + j
                    if col < n:
                        y = ((x[j] - mean[0]) - rest[0]) * rstd[0]
                        Y[row, col] = T.cast(
                            y * T.cast(weight[col], "float32") + T.cast(bias[col], "float32"),
                            out_dtype,
                        )

    return layer_norm


def layer_norm_schedule(tile: Tile, m: int, n: int, dtype: str) -> RowSchedule:
    rule = rows_schedule(tile, n, MAX_COLUMNS_IN_REGISTERS)
    return tuned(tile, "layer_norm", buckets.row(m, n), dtype, rule)


@functools.cache
def _select(
    device: torch.device,
    m: int,
    n: int,
    eps: float,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Callable[..., None]:
    tile, names = tile_for(device), (dtype_name(dtype), dtype_name(out_dtype))
    schedule = layer_norm_schedule(tile, m, n, names[1])
    return compile_kernel(layer_norm_kernel, tile, n, eps, *names, schedule)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
    """Write the normalised rows of x (m, n) to out (m, n); weight, bias (n,); all contiguous."""
    m = buckets.ceiling(x.shape[0], buckets.ROWS)
    _select(x.device, m, x.shape[1], eps, x.dtype, out.dtype)(x, weight, bias, out)
