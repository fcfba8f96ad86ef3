"""The end of a split-K product: the parts added in their order, and the epilogue.

No part is added by an atomic operation, so that results repeat bit for bit.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.epilogue import activate
from minifused.kernels.schedule import RowSchedule, split_sum_schedule
from minifused.kernels.tile import Tile


def finish(tile: Tile, activation: str | None, total, bias, residual):
    """The float32 expression act(total + bias) + residual; bias and residual may be None."""
    if bias is not None:
        total += T.cast(bias, "float32")
    if activation is not None:
        total = activate(tile, activation, total)
    return total if residual is None else total + T.cast(residual, "float32")


def split_sum_kernel(
    tile: Tile,
    n: int,
    splits: int,
    dtype: str,
    out_dtype: str,
    activation: str | None,
    has_bias: bool,
    has_residual: bool,
    schedule: RowSchedule,
):
    """Build C (m, n) = act(sum of P (splits, m, n) + bias (n)) + R (m, n); m is dynamic.

    P is float32, bias has `dtype`, R and C `out_dtype`.
    """
    block_n = schedule.block_n
    m = T.dynamic("m")

    @T.prim_func
    def split_sum(
        P: T.Tensor((splits, m, n), "float32"),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((m, n), out_dtype),
        C: T.Tensor((m, n), out_dtype),
    ):
        with T.Kernel(m, T.ceildiv(n, block_n), threads=schedule.num_threads) as (row, by):
            parts = tile.fragment((splits, block_n), "float32")
            total = tile.fragment((block_n,), "float32")
            tile.pdl_trigger()
            tile.pdl_sync()
            T.clear(parts)
            for s, j in tile.parallel(splits, block_n):
                if by * block_n + j < n:
                    parts[s, j] = P[s, row, by * block_n + j]
            T.clear(total)
            for s in T.unroll(splits):
                for j in tile.parallel(block_n):
                    total[j] += parts[s, j]
            for j in tile.parallel(block_n):
                col = by * block_n + j
                if col < n:
                    b = bias[col] if has_bias else None
                    r = R[row, col] if has_residual else None
                    C[row, col] = T.cast(finish(tile, activation, total[j], b, r), out_dtype)

    return split_sum


@functools.cache
def _select(
    device: torch.device, n: int, splits: int, dtypes: tuple[torch.dtype, torch.dtype], *epilogue
) -> Callable[..., None]:
    tile = tile_for(device)
    schedule = split_sum_schedule(tile)
    return compile_kernel(
        split_sum_kernel, tile, n, splits, *map(dtype_name, dtypes), *epilogue, schedule
    )


def split_sum(
    partial: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Write act(partial (splits, m, n) summed + bias) + residual to out (m, n), all contiguous."""
    splits, _, n = partial.shape
    dtypes = out.dtype if bias is None else bias.dtype, out.dtype
    epilogue = activation, bias is not None, residual is not None
    _select(out.device, n, splits, dtypes, *epilogue)(partial, bias, residual, out)
