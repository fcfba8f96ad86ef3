"""The residual stream's first value: the sum of a token's and a position's embedding."""

import functools
import math
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.schedule import RowSchedule, row_schedule
from minifused.kernels.swap_follow import follow_tile
from minifused.kernels.tile import Tile

MAX_COLUMNS_A_BLOCK = 1024


def embed_kernel(
    tile: Tile, width: int, dtype: str, has_ends: bool, schedule: RowSchedule, follow: bool = False
):
    """Build X (b, t, width) = wte[tokens[b, t]] + wpe[starts[b] + t], float32.

    With `has_ends`, ends[b] = starts[b] + t where counts[b] is 1, and 0 where it is 0. With
    `follow`, it also takes gain (width,) and writes scaled (b * t, width) = X * gain, both of
    `dtype`, and moments (b * t, 2 * parts): see swap_fold.py. A part is a block's columns.

    wte (vocab, width) and wpe (positions, width) have `dtype`; b, t, vocab and positions are
    dynamic. A position past the last one is taken for it; a token that is none gives NaN.
    """
    block_n = schedule.block_n
    batch, length = T.dynamic("batch"), T.dynamic("length")
    vocab, positions = T.dynamic("vocab"), T.dynamic("positions")
    grid = (length, T.ceildiv(width, block_n), batch)
    tokens_type = T.Tensor((batch, length), "int64")
    starts_type, counts_type, ends_type = (T.Tensor((batch,), "int32") for _ in range(3))
    wte_type, wpe_type = (T.Tensor((rows, width), dtype) for rows in (vocab, positions))
    X_type = T.Tensor((batch, length, width), "float32")

    @T.macro
    def block(tokens, starts, wte, wpe, X, counts, ends, after):
        with T.Kernel(*grid, threads=schedule.num_threads) as (bx, by, bz):
            x = tile.fragment((1, block_n), "float32")
            gain = tile.fragment((block_n,), dtype) if follow else None
            col, row = by * block_n, bz * length + bx
            tile.pdl_trigger()
            tile.pdl_sync()
            token = tokens[bz, bx]
            position = T.min(starts[bz] + bx, positions - 1)
            if follow:
                T.copy(after[0][col], gain)
            if has_ends:
                if bx + by == 0:
                    ends[bz] = (starts[bz] + length) * counts[bz]
            for i, j in tile.parallel(1, block_n):
                if col + j < width:
                    x[i, j] = T.if_then_else(
                        token >= 0 and token < vocab,
                        T.cast(wte[token, col + j], "float32")
                        + T.cast(wpe[position, col + j], "float32"),
                        T.cast(math.nan, "float32"),
                    )
            for i, j in tile.parallel(1, block_n):
                if col + j < width:
                    X[bz, bx, col + j] = x[i, j]
            follow_tile(tile, x, after, gain, row, col, by)

    if not follow:

        @T.prim_func
        def embed(
            tokens: tokens_type, starts: starts_type, wte: wte_type, wpe: wpe_type, X: X_type,
            counts: counts_type, ends: ends_type,
        ):  # fmt: skip
            block(tokens, starts, wte, wpe, X, counts, ends, None)

        return embed

    rows, parts = T.dynamic("rows"), -(-width // block_n)
    gain_type, scaled_type = T.Tensor((width,), dtype), T.Tensor((rows, width), dtype)
    moments_type = T.Tensor((rows, 2 * parts), "float32")

    @T.prim_func
    def embed_and_follow(
        tokens: tokens_type, starts: starts_type, wte: wte_type, wpe: wpe_type, X: X_type,
        counts: counts_type, ends: ends_type,
        gain: gain_type, scaled: scaled_type, moments: moments_type,
    ):  # fmt: skip
        block(tokens, starts, wte, wpe, X, counts, ends, (gain, scaled, moments))

    return embed_and_follow


@functools.cache
def _select(
    device: torch.device, width: int, dtype: torch.dtype, has_ends: bool, follow: bool
) -> Callable[..., None]:
    tile = tile_for(device)
    schedule = row_schedule(tile, width, MAX_COLUMNS_A_BLOCK)
    return compile_kernel(embed_kernel, tile, width, dtype_name(dtype), has_ends, schedule, follow)


def part_width(device: torch.device, width: int) -> int:
    """Columns of a part of the stats that `follow` writes; the last part may be narrower."""
    return row_schedule(tile_for(device), width, MAX_COLUMNS_A_BLOCK).block_n


def embed(
    tokens: Tensor,
    starts: Tensor,
    wte: Tensor,
    wpe: Tensor,
    out: Tensor,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
    follow: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write the embeddings of tokens (b, t) from positions starts (b,) on to out (b, t, width).

    With counts (b,) int32, 0 or 1, also write the positions' ends (b,), 0 where the count is.
    follow: as for swap_gemm: gain (width,) of the layer norm to come and, to be written, scaled
    (b * t, width), both of wte's dtype, and stats (b * t, parts, 2) float32, of parts of
    part_width(device, width) columns.
    """
    kernel = _select(out.device, out.shape[2], wte.dtype, ends is not None, follow is not None)
    if follow is None:
        return kernel(tokens, starts, wte, wpe, out, counts, ends)
    gain, scaled, stats = follow
    moments, scaled = stats.view(-1, 2 * stats.shape[-2]), scaled.view(-1, out.shape[2])
    kernel(tokens, starts, wte, wpe, out, counts, ends, gain, scaled, moments)
