"""Matrix product for sm_90, 16 bits and more rows than swap_gemm takes: prefill."""

from torch import Tensor

from minifused.kernels import swap_gemm
from minifused.kernels.build import tile_for
from minifused.kernels.gemm import launch_linear
from minifused.kernels.gemm_sm90_kernel import gemm_sm90_kernel
from minifused.kernels.gemm_sm90_rule import ring_gemm_schedule


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
    given = x, weight, bias, activation, residual, out
    launch_linear(gemm_sm90_kernel, ring_gemm_schedule, *given, ahead)
