"""What can be tuned: each kernel with its search space, its shapes and how it is called."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minifused import inspection, ops
from minifused.arguments import OF_KERNEL, Arguments
from minifused.errors import UserError
from minifused.inspection import Recipe
from minifused.kernels import buckets
from minifused.kernels.layer_norm_warps import fits_a_warp
from minifused.kernels.schedule import Schedule
from minifused.kernels.tile import Tile
from minifused.kernels.vector_add import vector_add_kernel, vector_add_schedule
from minifused.tuning import spaces
from minifused.workloads import (
    AttentionWorkload,
    DecodeWorkload,
    Inputs,
    LayerNormWorkload,
    LinearWorkload,
    SoftmaxWorkload,
    VectorAddWorkload,
    Workload,
)


@dataclass(frozen=True)
class Tunable:
    """A kernel that can be tuned. Its functions are a module's own, so that processes share them.

    Attributes:
        recipe: of (tile, dtype, workload): builder, static arguments and the schedule in use.
        space: of the same: the schedules to try.
        bucket: the shapes that share a workload's schedule.
        blocks: of (workload, schedule): how many the grid has.
        sizes: the numbers of --shape. workloads: what those mean.
    """

    name: str
    recipe: Recipe
    space: Callable[[Tile, str, Any], Iterable[Schedule]]
    bucket: Callable[[Any], str]
    blocks: Callable[[Any, Any], int]
    sizes: tuple[str, ...]
    workloads: Callable[..., tuple[Workload, ...]]

    @property
    def op(self) -> str:
        """The function of `ops` that says whether a result is right."""
        return OF_KERNEL[self.name][0]

    def arguments(self, inputs: Inputs, out: Tensor) -> Arguments:
        """What the kernel takes, in its order."""
        return OF_KERNEL[self.name][1](inputs, out)


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


# Linear layers


def _linear_blocks(w: LinearWorkload, s: Any) -> int:
    return _ceil(w.m, s.block_m) * _ceil(w.n, s.block_n)


def _ring_gemm_blocks(w: LinearWorkload, s: Any) -> int:
    return _linear_blocks(w, s) * s.splits


def _swap_blocks(w: LinearWorkload, s: Any) -> int:
    return _ceil(w.m, s.block_m) * _ceil(w.n, s.block_n * s.tiles) * s.splits


def _gemv_blocks(w: LinearWorkload, s: Any) -> int:
    return _ceil(w.n, s.block_n)


def _square(m: int, n: int, k: int) -> tuple[Workload, ...]:
    return (LinearWorkload("shape", m, n, k, bias=False),)


def _gemm_bucket(w: LinearWorkload) -> str:
    return buckets.gemm(w.m, w.n, w.k)


def _skinny_bucket(w: LinearWorkload) -> str:
    return buckets.skinny_gemm(w.m, w.n, w.k)


def _swap_bucket(w: LinearWorkload) -> str:
    return buckets.swap_gemm(w.m, w.n, w.k)


def _gemv_bucket(w: LinearWorkload) -> str:
    return buckets.gemv(w.n, w.k, normed=False)


def _vector(n: int, k: int) -> tuple[Workload, ...]:
    return _square(1, n, k)


# Attention


def _attention_blocks(w: AttentionWorkload, s: Any) -> int:
    return _ceil(w.q_len, s.block_m) * w.heads * w.batch


def _flash_blocks(w: AttentionWorkload, s: Any) -> int:
    pieces = _attention_blocks(w, s)
    return min(s.resident, pieces) if s.resident else pieces


def _attention_bucket(w: AttentionWorkload) -> str:
    return buckets.flash_attention(w.head_dim, w.causal, w.k_len)


def _both_masks(batch: int, length: int, heads: int, head_dim: int) -> tuple[Workload, ...]:
    if head_dim > ops.MAX_HEAD_DIM:
        raise UserError(f"--shape: a head size of {head_dim} is over {ops.MAX_HEAD_DIM}")
    return tuple(
        AttentionWorkload(name, batch, length, length, heads, head_dim, causal)
        for name, causal in (("causal", True), ("not causal", False))
    )


def _decode_blocks(w: DecodeWorkload, s: Any) -> int:
    return len(w.lengths) * w.heads


def _decode_bucket(w: DecodeWorkload) -> str:
    return buckets.decode_attention(w.head_dim, len(w.lengths) * w.heads)


def _decoding(batch: int, context: int, heads: int, head_dim: int) -> tuple[Workload, ...]:
    if head_dim > ops.MAX_HEAD_DIM:
        raise UserError(f"--shape: a head size of {head_dim} is over {ops.MAX_HEAD_DIM}")
    return (DecodeWorkload("shape", (context,) * batch, context, heads, head_dim),)


# Rows and vectors


def _row_blocks(w: Any, s: Any) -> int:
    """One each, but on a GPU where a warp has a row."""
    return _ceil(w.m, s.num_threads // 32) if s.num_threads > 1 and fits_a_warp(w.n) else w.m


def _row_bucket(w: Any) -> str:
    return buckets.row(w.m, w.n)


def _softmax_rows(m: int, n: int) -> tuple[Workload, ...]:
    return (SoftmaxWorkload("shape", m, n),)


def _norm_rows(m: int, n: int) -> tuple[Workload, ...]:
    return (LayerNormWorkload("shape", m, n, x_dtype=None),)


def _vector_recipe(tile: Tile, dtype: str, w: Any) -> tuple[Callable, tuple, Any]:
    return vector_add_kernel, (dtype,), vector_add_schedule(tile, dtype)


def _vector_blocks(w: VectorAddWorkload, s: Any) -> int:
    return _ceil(w.n, s.block_n)


def _vector_bucket(w: VectorAddWorkload) -> str:
    return buckets.ANY_LENGTH


def _vectors(n: int) -> tuple[Workload, ...]:
    return (VectorAddWorkload("shape", n),)


RECIPES: dict[str, Recipe] = {
    **{name: kernel.recipe for name, kernel in inspection.KERNELS.items()},
    "vector_add": _vector_recipe,
}
_MNK = ("M", "N", "K")
_HEADS = ("HEADS", "HEAD_DIM")

TUNABLES = {
    t.name: t
    for t in (
        Tunable(
            "gemm", RECIPES["gemm"], spaces.gemm, _gemm_bucket,
            _linear_blocks, _MNK, _square,
        ),
        Tunable(
            "gemm_sm90", RECIPES["gemm_sm90"], spaces.ring_gemm, _gemm_bucket,
            _ring_gemm_blocks, _MNK, _square,
        ),
        Tunable(
            "skinny_gemm", RECIPES["skinny_gemm"], spaces.skinny_gemm, _skinny_bucket,
            _linear_blocks, _MNK, _square,
        ),
        Tunable(
            "swap_gemm", RECIPES["swap_gemm"], spaces.swap_gemm, _swap_bucket,
            _swap_blocks, _MNK, _square,
        ),
        Tunable(
            "gemv", RECIPES["gemv"], spaces.gemv, _gemv_bucket,
            _gemv_blocks, ("N", "K"), _vector,
        ),
        Tunable(
            "flash_attention", RECIPES["flash_attention"], spaces.flash_attention,
            _attention_bucket, _attention_blocks,
            ("BATCH", "LENGTH", *_HEADS), _both_masks,
        ),
        Tunable(
            "flash_attention_sm90", RECIPES["flash_attention_sm90"],
            spaces.flash_attention_sm90, _attention_bucket, _flash_blocks,
            ("BATCH", "LENGTH", *_HEADS), _both_masks,
        ),
        Tunable(
            "decode_attention", RECIPES["decode_attention"],
            spaces.decode_attention, _decode_bucket, _decode_blocks,
            ("BATCH", "CONTEXT", *_HEADS), _decoding,
        ),
        Tunable(
            "row_softmax", RECIPES["row_softmax"], spaces.row, _row_bucket,
            _row_blocks, ("M", "N"), _softmax_rows,
        ),
        Tunable(
            "layer_norm", RECIPES["layer_norm"], spaces.row, _row_bucket,
            _row_blocks, ("M", "N"), _norm_rows,
        ),
        Tunable(
            "vector_add", RECIPES["vector_add"], spaces.vector_add, _vector_bucket,
            _vector_blocks, ("N",), _vectors,
        ),
    )
}  # fmt: skip
