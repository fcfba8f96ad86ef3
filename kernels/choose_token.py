"""The end of a decoding step: choose a token of each row, and note all that the step leaves.

One block serves one row.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.argmax_token import argmax_macro
from minifused.kernels.build import compile_kernel, tile_for
from minifused.kernels.draw_token import NUM_THREADS, Segments, draw_macro
from minifused.kernels.philox import philox_uniform
from minifused.kernels.row_softmax_split import piece_columns
from minifused.kernels.schedule import width_of_parts
from minifused.kernels.tile import Tile


def choose_token_kernel(
    tile: Tile, n: int, valid: int, greedy: bool, eos: int, advances: bool,
    pieces: tuple[int, int] | None = None, parts: int | None = None,
):  # fmt: skip
    """Build the choice among the first `valid` columns of P (b, n), float32; b is dynamic.

    `greedy` takes the first maximum of P, which may be logits, with `parts` by K (b, parts, 2), the
    peaks that a product leaves of its row (see swap_peaks.py); otherwise P are probabilities, all
    NaN where there are none to draw from, and the token is drawn with the random number of (seed,
    samples[b], starts[b] + steps[b]); with `pieces` = (count, columns) by M (b, count), the masses
    that row_softmax_split leaves of P. It goes to tokens[b] and to row steps[b] of `chosen`;
    `finite` has there whether P was usable. A row that is `going` (1 or 0) gets one more of
    `lengths`, if that `advances`, and one token less `left`; it goes on while there are some and
    the token is not `eos` (-1 for none). steps[b] grows by 1; past the tables nothing is noted.
    """
    batch, capacity = T.dynamic("batch"), T.dynamic("capacity")
    segments = Segments.of_warps(valid) if pieces is None else Segments(*pieces, given=True)
    width = width_of_parts(n, parts) if parts else None
    draw, argmax = draw_macro(valid, segments), argmax_macro(valid, width)
    count = 1 if pieces is None else pieces[0]

    @T.prim_func
    def choose_token(
        P: T.Tensor((batch, n), "float32"),
        M: T.Tensor((batch, count), "int64"),
        K: T.Tensor((batch, parts or 1, 2), "float32"),
        seed: T.Tensor((1,), "int64"),
        samples: T.Tensor((batch,), "int64"),
        starts: T.Tensor((batch,), "int32"),
        steps: T.Tensor((batch,), "int64"),
        chosen: T.Tensor((capacity, batch), "int64"),
        finite: T.Tensor((capacity, batch), "uint8"),
        tokens: T.Tensor((batch,), "int64"),
        left: T.Tensor((batch,), "int32"),
        going: T.Tensor((batch,), "int32"),
        lengths: T.Tensor((batch,), "int32"),
    ):
        with T.Kernel(batch, threads=NUM_THREADS) as row:
            tx = T.get_thread_binding()
            token = T.alloc_local((1,), "int32")
            top = T.alloc_local((1,), "float32")
            step = T.alloc_local((1,), "int64")
            goes_on = T.alloc_local((1,), "int32")
            uniform = T.alloc_local((1,), "float32")
            tile.pdl_trigger()
            tile.pdl_sync()
            step[0] = steps[row]
            if greedy:
                argmax(P, K, row, tx, token, top)
            else:
                top[0] = P[row, T.min(tx, valid - 1)]  # all of a row is NaN, or none
                position = T.cast(starts[row], "int64") + step[0]
                philox_uniform(seed[0], samples[row], position, uniform)
                draw(P, M, row, uniform[0], tx, token)
            if tx == 0:
                tokens[row] = T.cast(token[0], "int64")
                if step[0] < capacity:
                    chosen[step[0], row] = T.cast(token[0], "int64")
                    finite[step[0], row] = T.cast(T.isfinite(top[0]), "uint8")
                goes_on[0] = going[row]
                if advances:
                    lengths[row] += goes_on[0]
                left[row] -= goes_on[0]
                goes_on[0] *= T.min(left[row], 1)
                going[row] = T.if_then_else(token[0] == eos, 0, goes_on[0])
                steps[row] = step[0] + T.int64(1)

    return choose_token


@functools.cache
def _select(
    device: torch.device, n: int, valid: int, greedy: bool, eos: int, advances: bool,
    pieces: tuple[int, int] | None, parts: int | None,
) -> Callable[..., None]:  # fmt: skip
    static = n, valid, greedy, eos, advances, pieces, parts
    return compile_kernel(choose_token_kernel, tile_for(device), *static)


def choose_token(
    scores: Tensor,
    valid: int,
    random: tuple[Tensor, Tensor, Tensor] | None,
    eos: int,
    steps: Tensor,
    chosen: Tensor,
    finite: Tensor,
    tokens: Tensor,
    left: Tensor,
    going: Tensor,
    lengths: Tensor | None,
    masses: Tensor | None = None,
    peaks: Tensor | None = None,
) -> None:
    """Choose from scores (b, n): the largest, or drawn with `random` numbers; see the builder.

    random: seed (1,) and samples (b,) int64, starts (b,) int32. chosen (capacity, b) int64, finite
    (capacity, b) bool, steps and tokens (b,) int64, left, going and lengths (b,) int32; all
    contiguous. masses: what row_softmax has left of these probabilities, if it has. peaks: what the
    product has left of these scores, if it has.
    """
    greedy, advances = random is None, lengths is not None
    n = scores.shape[1]
    pieces = None if masses is None else (masses.shape[1], piece_columns(n))
    parts = peaks.shape[1] if greedy and peaks is not None else None
    kernel = _select(scores.device, n, valid, greedy, eos, advances, pieces, parts)
    seed, samples, starts = random or (None, None, None)
    kernel(
        scores, masses, peaks if parts else None, seed, samples, starts, steps, chosen,
        finite.view(torch.uint8), tokens, left, going, lengths,
    )  # fmt: skip
