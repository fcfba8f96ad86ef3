"""What each kernel takes, in its order, made of the inputs of its operation and an output.

Launchers do it too, and choose the kernel; this is for whoever times one that was chosen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifused import ops
from minifused.workloads import Inputs

Arguments = list[Tensor | None]


def empty_output(op: str, inputs: Inputs, device: torch.device) -> Tensor:
    """Of the shape and dtype that the fake function of `op`, one of ops', gives."""
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in inputs.items()}
    like = getattr(ops, op)(**meta)
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def linear(i: Inputs, out: Tensor) -> Arguments:
    return [i["x"], i["weight"], i["bias"], i["residual"], out]


def gemv(i: Inputs, out: Tensor) -> Arguments:
    x, *others = linear(i, out)
    # What would prepare the row, caches and peaks
    return [x, *[None] * 4, *others, *[None] * 4]


def attention(i: Inputs, out: Tensor) -> Arguments:
    packed = i["q"].dim() == 5  # (b, t, slots, h, d)
    slots = [i["q"]] * 3 if packed else [i[name].unsqueeze(2) for name in "qkv"]
    return [*slots, i["q_lengths"], i["kv_lengths"], out]


def decode_attention(i: Inputs, out: Tensor) -> Arguments:
    q = i["q"] if i["q"].dim() == 4 else i["q"].squeeze(1)  # (b, slots, h, d)
    return [q, i["k_cache"], i["v_cache"], i["lengths"], out.squeeze(1)]


def decode_attention_split(i: Inputs, out: Tensor) -> Arguments:
    """Of one part, which is the result."""
    *given, _ = decode_attention(i, out)
    return [*given, out.squeeze(1).unsqueeze(2), None]


def append_kv(i: Inputs, out: None) -> Arguments:
    """It writes to the caches."""
    k, packed = i["k"], i["v"] is None
    new = [k, k] if packed else [k.unsqueeze(2), i["v"].unsqueeze(2)]
    caches = [i[name].flatten(2) for name in ("k_cache", "v_cache")]
    return [*(x.flatten(3) for x in new), i["positions"], *caches]


def softmax(i: Inputs, out: Tensor) -> Arguments:
    return [i["x"], out]


def layer_norm(i: Inputs, out: Tensor) -> Arguments:
    return [i["x"], i["weight"], i["bias"], out]


def vector_add(i: Inputs, out: Tensor) -> Arguments:
    return [i["x"], i["y"], out]


# By kernel: the operation whose result it makes, "" if that is no new tensor.
OF_KERNEL: dict[str, tuple[str, Callable[[Inputs, Any], Arguments]]] = {
    "gemm": ("linear", linear),
    "gemm_sm90": ("linear", linear),
    "skinny_gemm": ("linear", linear),
    "swap_gemm": ("linear", linear),
    "gemv": ("linear", gemv),
    "flash_attention": ("attention", attention),
    "flash_attention_sm90": ("attention", attention),
    "decode_attention": ("decode_attention", decode_attention),
    "decode_attention_split": ("decode_attention", decode_attention_split),
    "append_kv": ("", append_kv),
    "row_softmax": ("softmax", softmax),
    "layer_norm": ("layer_norm", layer_norm),
    "vector_add": ("vector_add", vector_add),
}


def for_kernel(kernel: str, inputs: Inputs, device: torch.device) -> Arguments:
    """The arguments of a kernel of OF_KERNEL, with a new tensor for the result if it makes one."""
    op, arguments = OF_KERNEL[kernel]
    return arguments(inputs, empty_output(op, inputs, device) if op else None)
