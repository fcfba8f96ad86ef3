"""The residual stream's first value: the sum of a token's and a position's embedding."""

import functools
import math
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.schedule import RowSchedule, row_schedule
from minifused.kernels.tile import Tile

MAX_COLUMNS_A_BLOCK = 1024


def embed_kernel(tile: Tile, width: int, dtype: str, has_ends: bool, schedule: RowSchedule):
    """Build X (b, t, width) = wte[tokens[b, t]] + wpe[starts[b] + t], float32.

    With `has_ends`, ends[b] = starts[b] + t where counts[b] is 1, and 0 where it is 0.

    wte (vocab, width) and wpe (positions, width) have `dtype`; b, t, vocab and positions are
    dynamic. A position past the last one is taken for it; a token that is none gives NaN.
    """
    block_n = schedule.block_n
    batch, length = T.dynamic("batch"), T.dynamic("length")
    vocab, positions = T.dynamic("vocab"), T.dynamic("positions")
    grid = (length, T.ceildiv(width, block_n), batch)

    @T.prim_func
    def embed(
        tokens: T.Tensor((batch, length), "int64"),
        starts: T.Tensor((batch,), "int32"),
        wte: T.Tensor((vocab, width), dtype),
        wpe: T.Tensor((positions, width), dtype),
        X: T.Tensor((batch, length, width), "float32"),
        counts: T.Tensor((batch,), "int32"),
        ends: T.Tensor((batch,), "int32"),
    ):
        with T.Kernel(*grid, threads=schedule.num_threads) as (bx, by, bz):
            tile.pdl_trigger()
            tile.pdl_sync()
            token = tokens[bz, bx]
            position = T.min(starts[bz] + bx, positions - 1)
            if has_ends:
                if bx + by == 0:
                    ends[bz] = (starts[bz] + length) * counts[bz]
            for j in tile.parallel(block_n):
                col = by * block_n + j
                if col < width:
                    X[bz, bx, col] = T.if_then_else(
                        token >= 0 and token < vocab,
                        T.cast(wte[token, col], "float32") + T.cast(wpe[position, col], "float32"),
                        T.cast(math.nan, "float32"),
                    )

    return embed


@functools.cache
def _select(
    device: torch.device, width: int, dtype: torch.dtype, has_ends: bool
) -> Callable[..., None]:
    tile = tile_for(device)
    schedule = row_schedule(tile, width, MAX_COLUMNS_A_BLOCK)
    return compile_kernel(embed_kernel, tile, width, dtype_name(dtype), has_ends, schedule)


def embed(
    tokens: Tensor,
    starts: Tensor,
    wte: Tensor,
    wpe: Tensor,
    out: Tensor,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
) -> None:
    """Write the embeddings of tokens (b, t) from positions starts (b,) on to out (b, t, width).

    With counts (b,) int32, 0 or 1, also write the positions' ends (b,), 0 where the count is.
    """
    kernel = _select(out.device, out.shape[2], wte.dtype, ends is not None)
    kernel(tokens, starts, wte, wpe, out, counts, ends)
