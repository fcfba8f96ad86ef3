"""Matrix product for 2 to 128 rows: the linear layers of decoding a batch."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.schedule import swap_schedule
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel

MAX_ROWS = 128  # with more, gemm.py fills its tiles


@functools.lru_cache(maxsize=4096)  # m is any number, so that not all can stay
def _select(
    device: torch.device,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    epilogue: tuple[str | None, bool, bool],
    ahead: bool,
    cached: bool,
) -> Callable[..., None]:
    tile, (dtype, out_dtype) = tile_for(device), map(dtype_name, dtypes)
    schedule = swap_schedule(tile, *sizes, dtype)
    return compile_kernel(
        swap_gemm_kernel, tile, *sizes[1:], dtype, out_dtype, *epilogue, ahead, schedule, cached
    )


def takes(rows: int, weight: Tensor) -> bool:
    """Whether swap_gemm is for so many rows: 16 bits in whole vectors, on a tensor core."""
    fits = 2 <= rows <= MAX_ROWS and weight.itemsize == 2 and weight.shape[1] % 8 == 0
    return fits and weight.is_cuda and tile_for(weight.device).capability >= 80


def swap_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    ahead: bool,
    caches: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write act(x (m, k) @ weight (n, k)^T + bias) + residual to out (m, n), all contiguous.

    Args:
        ahead: no kernel that may still run writes weight or bias.
        caches: keys and values (m, capacity, h, d) and positions (m,) int32, if out is a packed
            query, key and value of which the latter two are to be kept.
    """
    sizes = (x.shape[0], *weight.shape)
    epilogue = activation, bias is not None, residual is not None
    kernel = _select(x.device, sizes, (x.dtype, out.dtype), epilogue, ahead, caches is not None)
    if caches is None:
        return kernel(x, weight, bias, residual, out)
    keys, values, positions = caches
    shape = *keys.shape[:2], out.shape[1] // 3
    kernel(x, weight, bias, residual, out, positions, keys.view(shape), values.view(shape))
