"""What the kernel tests share: where a case runs, its data, and the bound on its error."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minifused.kernels.build import lower_program
from minifused.kernels.tile import Tile
from minifused.metrics import BOUNDS, Errors, measure, within

_cuda_marks = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
)

ACTIVATIONS = {
    None: lambda x: x,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}

# Each case is one test on the CPU, and under the marker `cuda` the same on a GPU.
DEVICES = ["cpu", pytest.param("cuda", marks=_cuda_marks)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
on_each_dtype = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="cpu-float32"),
        pytest.param("cuda", torch.float32, id="cuda-float32", marks=_cuda_marks),
        pytest.param("cuda", torch.float16, id="cuda-float16", marks=_cuda_marks),
        pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=_cuda_marks),
    ],
)


def needs_cuda(test: Callable) -> Callable:
    """Run `test` on a GPU only, under the marker `cuda`."""
    for mark in _cuda_marks:
        test = mark(test)
    return test


def needs_sm90(test: Callable) -> Callable:
    """The same on a GPU of sm_90 alone, which has kernels of its own."""
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return needs_cuda(pytest.mark.skipif(not here, reason="no GPU of sm_90")(test))


@functools.cache
def lower_once(builder: Callable, tile: Tile, *static) -> tuple[str, int]:
    """The CUDA source, and the bytes of dynamic shared memory: seconds, so all tests share it."""
    artifact = lower_program(builder, tile, *static)
    attributes = [f.attrs for f in artifact.device_mod.functions.values() if f.attrs]
    shared = [int(a["dyn_shared_memory_buf"]) for a in attributes if "dyn_shared_memory_buf" in a]
    return artifact.kernel_source, max(shared, default=0)


def body_of_kernel(source: str) -> str:
    """The CUDA kernel itself, without its declaration."""
    return source[source.rindex("__launch_bounds__") :]


WAIT = "cudaGridDependencySynchronize"  # for the kernels that were launched before


def halves(body: str) -> tuple[str, str]:
    """What a kernel does before those launched before it have ended, and after."""
    before, *_, after = body[body.index("{") :].split(WAIT)
    return before, after


def normal(device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Callable:
    """A function of a shape that draws normal values, the same on any device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(device, dtype)

    return draw


def poisoned(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """An output of NaN: what a kernel does not write is seen."""
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def peaks_of(x: Tensor, valid: int, width: int) -> Tensor:
    """What a product leaves of its rows x (m, n), in float64: (m, parts, 2).

    Of each part of `width` columns the maximum, which passes over NaN, and the sum of
    exp(x - that), of the first `valid` columns of the row; -inf and 0 of none.
    """
    parts = -(-x.shape[1] // width)
    x = F.pad(x[:, :valid].double(), (0, parts * width - valid), value=-torch.inf)
    x = x.view(len(x), parts, width)
    top = x.masked_fill(x.isnan(), -torch.inf).amax(2)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    return torch.stack([top, (x - shift[..., None]).exp().sum(2)], 2)


def int32(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_within_bound(out: Tensor, reference: Tensor, eager: Tensor) -> None:
    """Fail where `out` is further from the float64 `reference` than the bound of one kernel.

    `eager` is what eager PyTorch makes of the same inputs in the same dtype.
    """
    assert not out.isnan().any(), f"{int(out.isnan().sum())} of {out.numel()} elements are NaN"
    assert_errors_within(measure(out, reference), measure(eager, reference))


def assert_errors_within(errors: Errors, eager: Errors) -> None:
    limits = BOUNDS["op"].limits(eager)
    assert within(errors, limits), f"{errors}, allowed {limits}, eager PyTorch {eager}"
