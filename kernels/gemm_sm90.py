"""Matrix product for sm_90, 16 bits and more rows than swap_gemm takes: prefill."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from minifused.kernels import swap_gemm
from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.gemm_sm90_kernel import gemm_sm90_kernel
from minifused.kernels.gemm_sm90_rule import ring_gemm_schedule


@functools.lru_cache(maxsize=4096)  # m is any number, so that not all can stay
def _select(
    device: torch.device,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    epilogue: tuple[str | None, bool, bool],
    ahead: bool,
) -> Callable[..., None]:
    tile, (dtype, out_dtype) = tile_for(device), map(dtype_name, dtypes)
    schedule = ring_gemm_schedule(tile, *sizes, dtype)
    static = *sizes[1:], dtype, out_dtype, *epilogue, ahead, schedule
    return compile_kernel(gemm_sm90_kernel, tile, *static)


def fits(capability: int, item_bytes: int, rows: int, n: int, k: int) -> bool:
    """Whether gemm_sm90 is for these: rows of 16-byte vectors, as TMA wants them."""
    whole = n % 8 == 0 and k % 8 == 0
    return capability == 90 and item_bytes == 2 and rows > swap_gemm.MAX_ROWS and whole


def takes(rows: int, weight: Tensor) -> bool:
    return weight.is_cuda and fits(
        tile_for(weight.device).capability, weight.itemsize, rows, *weight.shape
    )


def gemm_sm90(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    ahead: bool,
) -> None:
    """Write act(x (m, k) @ weight (n, k)^T + bias) + residual to out (m, n), all contiguous.

    `ahead`: no kernel that may still run writes weight or bias.
    """
    sizes = (x.shape[0], *weight.shape)
    epilogue = activation, bias is not None, residual is not None
    kernel = _select(x.device, sizes, (x.dtype, out.dtype), epilogue, ahead)
    kernel(x, weight, bias, residual, out)
