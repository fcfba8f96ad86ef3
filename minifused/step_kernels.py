"""Which kernel each part of a decoding step goes through, and with which schedule."""

from collections.abc import Iterator
from dataclasses import asdict

import torch

from minifused.columns import padded
from minifused.config import GPTConfig
from minifused.inspection import kernel_of
from minifused.kernels.build import dtype_name, tile_for
from minifused.kernels.schedule import gemv_schedule
from minifused.kernels.tile import Tile
from minifused.model import VOCAB_MULTIPLE
from minifused.tuning.tunables import RECIPES
from minifused.workloads import DecodeWorkload, LinearWorkload, SoftmaxWorkload, Workload

GENERAL = ("skinny_gemm", "gemm", "decode_attention")  # what takes any shape
NORMED = ("attn.c_attn", "mlp.c_fc", "head")  # read the layer norm of the residual stream


def step_workloads(config: GPTConfig, batch: int, capacity: int) -> Iterator[Workload]:
    """What a step of `batch` rows does to full caches; of the layers, one."""
    width, inner, vocab = config.n_embd, config.inner_dim, config.vocab_size
    columns = vocab + -vocab % VOCAB_MULTIPLE
    lengths = (capacity,) * batch
    yield LinearWorkload("attn.c_attn", batch, 3 * width, width)
    yield DecodeWorkload("attn", lengths, capacity, config.n_head, config.head_dim, packed=True)
    yield LinearWorkload("attn.c_proj", batch, width, width, residual=True)
    yield LinearWorkload("mlp.c_fc", batch, inner, width, config.activation)
    yield LinearWorkload("mlp.c_proj", batch, width, inner, residual=True)
    yield LinearWorkload("head", batch, columns, width, bias=False)
    yield SoftmaxWorkload("softmax", batch, columns, vocab)


def step_kernels(
    config: GPTConfig, tile: Tile, dtype: str, batch: int, capacity: int
) -> list[tuple[str, str, str]]:
    """Name, kernel and schedule of each part of a step of `batch` rows, in its order.

    On a GPU a kernel that takes any shape is marked: one made for decoding did not take this.
    """
    return [
        (workload.name, *_kernel_and_schedule(tile, dtype, workload))
        for workload in step_workloads(config, batch, capacity)
    ]


def _kernel_and_schedule(tile: Tile, dtype: str, w: Workload) -> tuple[str, str]:
    if isinstance(w, SoftmaxWorkload):
        dtype = "float32"  # as logits are
    kernel = kernel_of(tile, dtype, w)
    if kernel == "gemv" and isinstance(w, LinearWorkload):
        schedule = gemv_schedule(tile, w.n, w.k, dtype, normed=w.name in NORMED)
    else:
        schedule = RECIPES[kernel](tile, dtype, w)[2]
    mark = " (general)" if tile.is_cuda and kernel in GENERAL else ""
    return kernel + mark, ", ".join(f"{name}={value}" for name, value in asdict(schedule).items())


def step_table(
    config: GPTConfig, device: torch.device, dtype: torch.dtype, batch: int
) -> str:  # fmt: skip
    """`step_kernels` of a device as text, a line each."""
    tile = tile_for(device)
    name = dtype_name(dtype) if tile.is_cuda else "float32"  # a CPU's kernels have no other
    rows = step_kernels(config, tile, name, batch, config.n_positions)
    return "\n".join("  ".join(row).rstrip() for row in padded(rows, left=range(3)))
