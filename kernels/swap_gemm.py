"""Matrix product for 2 to 128 rows: the linear layers of decoding a batch."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.limits import may_stage
from minifused.kernels.schedule import swap_schedule
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel

MAX_ROWS = 128  # with more, rows of A fill the rows of a tile


@functools.lru_cache(maxsize=4096)  # m is any number, so that not all can stay
def _select(
    device: torch.device,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    epilogue: tuple[str | None, bool, bool],
    ahead: bool,
    extras: tuple[bool, tuple[int, float] | None, bool, int | None],
) -> Callable[..., None]:
    tile, (dtype, out_dtype) = tile_for(device), map(dtype_name, dtypes)
    schedule = swap_schedule(tile, *sizes, dtype)
    return compile_kernel(
        swap_gemm_kernel, tile, *sizes[1:], dtype, out_dtype, *epilogue, ahead, schedule, *extras
    )


def takes(rows: int, weight: Tensor) -> bool:
    """Whether swap_gemm is for so many rows: 16 bits in whole vectors, on a tensor core."""
    fits = 2 <= rows <= MAX_ROWS and weight.itemsize == 2 and weight.shape[1] % 8 == 0
    return fits and weight.is_cuda and tile_for(weight.device).capability >= 80


def takes_fold(rows: int, weight: Tensor) -> bool:
    """Whether swap_gemm completes a layer norm (`fold`), and prepares the next one (`follow`)."""
    return takes(rows, weight) and tile_for(weight.device).capability >= 90


def part_width(rows: int, weight: Tensor) -> int:
    """Columns of a part of the stats that `follow` writes of rows @ weight (n, k)^T.

    A power of 2. There are ceil(n / part_width) parts of a row, of which the last may be narrower.
    """
    tile, dtype = tile_for(weight.device), dtype_name(weight.dtype)
    return swap_schedule(tile, rows, weight.shape[0], weight.shape[1], dtype).block_n


def count_parts(rows: int, weight: Tensor) -> int:
    """Of the `peaks` of rows @ weight (n, k)^T, 0 where there is no room to make them."""
    tile, dtype = tile_for(weight.device), dtype_name(weight.dtype)
    n, k = weight.shape
    chosen = swap_schedule(tile, rows, n, k, dtype)
    return -(-n // chosen.block_n) if may_stage(chosen) else 0


def swap_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    ahead: bool,
    caches: tuple[Tensor, Tensor, Tensor] | None = None,
    fold: tuple[Tensor, int, Tensor, float] | None = None,
    follow: tuple[Tensor, Tensor, Tensor] | None = None,
    peaks: tuple[Tensor, int] | None = None,
) -> None:
    """Write act(x (m, k) @ weight (n, k)^T + bias) + residual to out (m, n), all contiguous.

    Args:
        ahead: no kernel that may still run writes weight, bias, or sums.
        caches: keys and values (m, capacity, h, d) and positions (m,) int32, if out is a packed
            query, key and value of which the latter two are to be kept.
        fold: stats (m, parts, 2), part_width, sums (2, n) and eps, if x is `scaled` of a residual
            stream and its layer norm is meant; bias is None, being in the sums. stats and scaled
            come from a `follow`; sums[0] = weight @ gain and sums[1] = weight @ shift + bias.
        follow: gain (n,) of the layer norm to come and, to be written, scaled (m, n), both of
            weight's dtype, and stats (m, ceil(n / part_width(m, weight)), 2); out is float32.
            stats, sums and out's stats are float32.
        peaks: float32 (m, count_parts(m, weight), 2), to be written, and how many columns of out,
            the first ones, count: of each part of a row the largest of them, and the sum
            of exp(x - that); -inf and 0 for no column. out is float32.
    """
    sizes = (x.shape[0], *weight.shape)
    epilogue = activation, bias is not None, residual is not None
    norm, valid = fold and (fold[1], fold[3]), peaks and peaks[1]
    extras = caches is not None, norm, follow is not None, valid
    kernel = _select(x.device, sizes, (x.dtype, out.dtype), epilogue, ahead, extras)
    if not any(extras):
        return kernel(x, weight, bias, residual, out)
    kernel(x, weight, bias, residual, out, *_extras(out, caches, fold, follow, peaks))


def _extras(
    out: Tensor,
    caches: tuple[Tensor, Tensor, Tensor] | None,
    fold: tuple[Tensor, int, Tensor, float] | None,
    follow: tuple[Tensor, Tensor, Tensor] | None,
    peaks: tuple[Tensor, int] | None,
) -> list[Tensor | None]:
    """What a step's kernel takes besides, as it has it."""
    extras: list[Tensor | None] = [None] * 9
    if caches is not None:
        shape = *caches[0].shape[:2], out.shape[1] // 3
        extras[:3] = caches[2], caches[0].view(shape), caches[1].view(shape)
    if fold is not None:
        extras[3:5] = fold[0].flatten(1), fold[2]
    if follow is not None:
        extras[5:8] = follow[0], follow[1], follow[2].flatten(1)
    if peaks is not None:
        extras[8] = peaks[0].flatten(1)
    return extras
