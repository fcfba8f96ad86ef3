"""Matrix-vector product for one row: the linear layers of decoding a single sequence."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.gemv_kernel import gemv_kernel
from minifused.kernels.gemv_output import peak_width
from minifused.kernels.gemv_row import VECTOR
from minifused.kernels.schedule import gemv_schedule

MAX_COLUMNS = 16384  # a row fits in shared memory
NORM_ROWS = 4096  # of a weight, in float64 at a time


@functools.cache
def _select(
    device: torch.device,
    sizes: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    epilogue: tuple[str | None, bool, bool],
    eps: float | None,
    parts: tuple[int, int] | None,
    cached: bool,
    ahead: bool,
    valid: int | None,
) -> Callable[..., None]:
    tile, (dtype, out_dtype) = tile_for(device), map(dtype_name, dtypes)
    schedule = gemv_schedule(tile, *sizes, dtype, eps is not None)
    before = eps, parts, cached, ahead
    static = *sizes, dtype, out_dtype, *epilogue, *before, schedule, valid
    return compile_kernel(gemv_kernel, tile, *static)


def takes(rows: int, weight: Tensor) -> bool:
    """Whether `gemv` is for so many rows: one, and 16-bit weights in rows of whole vectors."""
    fits = rows == 1 and weight.itemsize == 2 and weight.shape[1] % VECTOR == 0
    fits = fits and weight.is_cuda and weight.shape[1] <= MAX_COLUMNS
    return fits and tile_for(weight.device).capability >= 80


def part_width(weight: Tensor) -> int:
    """Columns of a part of the peaks of a layer norm's product; the last part may be narrower."""
    tile, dtype = tile_for(weight.device), dtype_name(weight.dtype)
    n, k = weight.shape
    return peak_width(gemv_schedule(tile, n, k, dtype, normed=True).block_n)


def norm_sums(gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W @ gain, and W @ shift + bias (2, n) float32: what a layer norm comes to behind W (n, k)."""
    vectors = torch.stack([gain, shift]).double()
    sums = torch.cat([vectors @ rows.double().T for rows in weight.split(NORM_ROWS)], dim=1)
    if bias is not None:
        sums[1] += bias
    return sums.float()


def gemv(
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    norm: tuple[Tensor, Tensor, float] | None = None,
    parts: tuple[Tensor, Tensor] | None = None,
    caches: tuple[Tensor, Tensor, Tensor] | None = None,
    ahead: bool = False,
    peaks: tuple[Tensor, int] | None = None,
) -> None:
    """Write act(x' @ weight (n, k)^T + bias) + residual (1, n) to out (1, n), all contiguous.

    Args:
        norm: gain (k,), sums (2, n) float32 as norm_sums makes them, and eps of a layer norm: x' is
            that of x (1, k) float32. The bias is None, since the sums have it.
        parts: o (1, h, s, d) and ml (1, h, s, 2) of decode_attention_partials, in x's place.
        caches: keys and values (1, capacity, h, d) and positions (1,) int32, if out is a packed
            query, key and value of which the latter two are to be kept.
        ahead: no kernel that may still run writes weight, bias, gain or sums.
        peaks: as for swap_gemm, of ceil(n / part_width(weight)) parts, of the layer norm's product.
    """
    n, k = weight.shape
    gain, sums, eps = norm or (None, None, None)
    o, ml = parts or (None, None)
    keys, values, positions = caches or (None, None, None)
    kernel = _select(
        weight.device, (n, k), (weight.dtype, out.dtype),
        (activation, bias is not None, residual is not None),
        eps, None if o is None else (o.shape[2], o.shape[3]), caches is not None, ahead,
        None if peaks is None else peaks[1],
    )  # fmt: skip
    gain = gain if gain is None else gain.view(1, k)
    if keys is not None and values is not None:
        keys, values = keys.view(1, -1, n // 3), values.view(1, -1, n // 3)
    of_parts = None if peaks is None else peaks[0].view(1, -1)
    kernel(x, o, ml, gain, sums, weight, bias, residual, out, positions, keys, values, of_parts)
