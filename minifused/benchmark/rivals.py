"""What a user of PyTorch would call in place of each operation.

A rival is called with the inputs of a workload, by name, as `minifused.ops` is. It raises
Unavailable where PyTorch has no such kernel.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minifused.benchmark.suite import Unavailable
from minifused.parity import eager_attention, eager_layer_norm, eager_linear
from minifused.workloads import DecodeWorkload, LinearWorkload, Workload

Rival = Callable[..., Tensor]
Rivals = dict[str, Rival]


def compiled(function: Rival) -> Rival:
    """`function` under torch.compile, which begins with the first call."""

    @functools.cache
    def build() -> Rival:
        return torch.compile(function, dynamic=False, fullgraph=True)

    return lambda **inputs: build()(**inputs)


# Linear


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, **options: object) -> Tensor:
    """x @ weight^T + bias, which cuBLAS does in one kernel."""
    return F.linear(x, weight, bias)


def float32_product(x: Tensor, weight: Tensor, **options: object) -> Tensor:
    """x @ weight^T as float32 out of one cuBLAS kernel, whatever the inputs have."""
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, **options: object) -> Tensor:
    """gelu_tanh(x @ weight^T + bias) in the epilogue of cuBLASLt."""
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def linear_into(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, **options: object
) -> Tensor:
    """residual + x @ weight^T + bias: the sum takes both dtypes, without a cast of its own."""
    return residual + F.linear(x, weight, bias)


def linear_rivals(workload: LinearWorkload, on_cuda: bool) -> Rivals:
    if workload.residual:
        return {"torch eager": linear_into, "torch.compile": compiled(linear_into)}
    eager: Rivals = {"torch eager": eager_linear, "torch.compile": compiled(eager_linear)}
    if workload.activation:
        return {"cuBLASLt": linear_gelu, **eager} if on_cuda else eager
    if workload.out_dtype:
        return {"cuBLAS": float32_product, **eager} if on_cuda else eager
    return {"cuBLAS" if on_cuda else "torch": plain_linear}


# Attention


def by_backend(attend: Rival, backend: SDPBackend) -> Rival:
    """`attend` with one of SDPA's kernels; both that are offered here are for 16 bits."""

    def run(q: Tensor, **inputs: object) -> Tensor:
        if q.dtype == torch.float32:
            raise Unavailable("has 16-bit dtypes only")
        with sdpa_kernel(backend):
            return attend(q, **inputs)

    return run


def sdpa_rivals(attend: Rival, on_cuda: bool) -> Rivals:
    """The kernel that SDPA takes by itself, and on CUDA those it can be told to take."""
    rivals: Rivals = {"SDPA": attend}
    if on_cuda:
        rivals["SDPA flash"] = by_backend(attend, SDPBackend.FLASH_ATTENTION)
        rivals["SDPA cuDNN"] = by_backend(attend, SDPBackend.CUDNN_ATTENTION)
    return rivals


def decode_rivals(workload: DecodeWorkload, on_cuda: bool) -> Rivals:
    """SDPA on the part of the cache in use, which is one slice as all rows have one length."""
    (length,) = set(workload.lengths)

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        return eager_attention(q, k_cache[:, :length], v_cache[:, :length], causal=False)

    return {**sdpa_rivals(attend, on_cuda), "torch.compile": compiled(attend)}


# Rows and vectors


def softmax(x: Tensor, valid: None) -> Tensor:
    """Over all columns: PyTorch has no form that takes some."""
    return torch.softmax(x, -1)


def add(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y)


def rivals_of(op: str, workload: Workload, device: torch.device) -> Rivals:
    """The rivals of `ops.<op>` on a workload, by name."""
    on_cuda = device.type == "cuda"
    if isinstance(workload, LinearWorkload):
        return linear_rivals(workload, on_cuda)
    if isinstance(workload, DecodeWorkload):
        return decode_rivals(workload, on_cuda)
    if op == "attention":
        return sdpa_rivals(eager_attention, on_cuda)
    if op == "vector_add":
        return {"torch eager": add}
    eager: Rivals = {"softmax": softmax, "layer_norm": eager_layer_norm}
    return {"torch eager": eager[op], "torch.compile": compiled(eager[op])}
