"""The seam between the model and the kernels: one public function an operation.

Each is an operator of `torch.ops.minifused` with a fake function, so that it runs under
`torch.compile(fullgraph=True)`; given `out`, it writes there and allocates nothing, as captured
CUDA graphs need. They check their arguments, copy strided inputs and pick a kernel; they are for
inference and have no backward. All raise ValueError, naming the tensor, its shape and what was
expected. On a CPU the kernels are float32: 16-bit tensors are cast on the way in and out, and a
warning says so once.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from minifused.kernels.append_kv import append_kv as append_kv_kernel
from minifused.kernels.build import compile_ahead as compile_ahead  # of what calls these
from minifused.kernels.choose_token import choose_token as choose_token_kernel
from minifused.kernels.decode_attention import decode_attention as decode_attention_kernel
from minifused.kernels.decode_attention_split import decode_attention_partials
from minifused.kernels.embed import embed as embed_kernel
from minifused.kernels.embed import part_width as embed_part_width
from minifused.kernels.epilogue import ACTIVATIONS
from minifused.kernels.flash_attention import flash_attention as flash_attention_kernel
from minifused.kernels.gemm import gemm as gemm_kernel
from minifused.kernels.gemm_sm90 import gemm_sm90 as gemm_sm90_kernel
from minifused.kernels.gemm_sm90 import takes as gemm_sm90_takes
from minifused.kernels.gemv import gemv as gemv_kernel
from minifused.kernels.gemv import norm_sums as gemv_norm_sums
from minifused.kernels.gemv import part_width as gemv_part_width
from minifused.kernels.gemv import takes as gemv_takes
from minifused.kernels.layer_norm import layer_norm as layer_norm_kernel
from minifused.kernels.row_softmax import row_softmax as row_softmax_kernel
from minifused.kernels.row_softmax_split import count_masses
from minifused.kernels.schedule import split_schedule, width_of_parts
from minifused.kernels.skinny_gemm import skinny_gemm as skinny_gemm_kernel
from minifused.kernels.swap_gemm import count_parts as swap_gemm_count_parts
from minifused.kernels.swap_gemm import part_width as swap_gemm_part_width
from minifused.kernels.swap_gemm import swap_gemm as swap_gemm_kernel
from minifused.kernels.swap_gemm import takes as swap_gemm_takes
from minifused.kernels.swap_gemm import takes_fold
from minifused.kernels.vector_add import vector_add as vector_add_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_SKINNY_ROWS = {"cpu": 2, "cuda": 16}  # with more, tiles that share the weights pay
MAX_HEAD_DIM = 256  # tiles of larger heads do not fit in shared memory
ALIGNMENT = 32  # bytes: the widest access there is, that of sm_100; TMA and others have 16
MAX_GRID_YZ = 65535  # blocks along the y and z axes of a CUDA grid

_library = torch.library.Library("minifused", "DEF")


def _define(schema: str, run: Callable, fake: Callable) -> Callable:
    """Register an operator and its fake function, for CPU and CUDA tensors alike; return it."""
    name = schema.split("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"minifused::{name}", fake, lib=_library)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.minifused, packet), overload or "default")


def _writes(*args, **kwargs) -> None:
    """The fake function of an operator that returns nothing and writes to an argument."""


def _refuse(name: str, tensor: Tensor, expected: str) -> NoReturn:
    raise ValueError(
        f"{name} is {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}: expected {expected}"
    )


# The checks run before every launch: they build no text unless they refuse.


def _require_like(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        _refuse(name, tensor, f"{tuple(shape)}, {like.dtype} on {like.device}")


def _require_float(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        _refuse(name, tensor, "float32, float16 or bfloat16")


def _require_out(out: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    ok = out.shape == shape and out.device == like.device and out.is_contiguous()
    if not ok or out.dtype not in DTYPES:
        _refuse("out", out, f"a contiguous {tuple(shape)} on {like.device}")
    _require_aligned("out", out)


def _require_aligned(name: str, tensor: Tensor) -> None:
    """What is written cannot be a copy, as it can for inputs."""
    if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} begins off a multiple of {ALIGNMENT} bytes: pass a whole tensor")


def _require_lengths(name: str, lengths: Tensor, batch: int, like: Tensor) -> None:
    ok = lengths.shape == (batch,) and lengths.dtype == torch.int32
    if not ok or lengths.device != like.device:
        _refuse(name, lengths, f"({batch},), torch.int32 on {like.device}")


def _require_activation(activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}: expected None or one of {ACTIVATIONS}")


def _require_valid(valid: int, name: str, x: Tensor) -> None:
    if not 0 < valid <= x.shape[-1]:
        raise ValueError(f"valid is {valid}: expected 1 to {x.shape[-1]}, the columns of {name}")


def _require_columns(x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        _refuse("x", x, "(..., N) with at least one column")


def _require_head_dim(q: Tensor) -> None:
    if not 0 < q.shape[-1] <= MAX_HEAD_DIM:
        _refuse("q", q, f"a head size from 1 to {MAX_HEAD_DIM}")


def _require_grid(what: str, blocks: int, tensor: Tensor) -> None:
    if blocks > MAX_GRID_YZ and tensor.is_cuda:
        raise ValueError(f"{what} is {blocks}: a CUDA grid has at most {MAX_GRID_YZ}")


@functools.cache
def _warn_of_cast(dtype: torch.dtype) -> None:
    warnings.warn(f"CPU kernels are float32: {dtype} tensors are cast to it", stacklevel=4)


def _float32_on_cpu(launch: Callable[..., None]) -> Callable[..., None]:
    """Let launch(x, *arguments, out) see float32 tensors alone if it runs on a CPU."""

    @functools.wraps(launch)
    def run(x: Tensor, *arguments, out: Tensor) -> None:
        if out.is_cuda or x.dtype == out.dtype == torch.float32:
            return launch(x, *arguments, out=out)
        _warn_of_cast(out.dtype if x.dtype == torch.float32 else x.dtype)
        result = out.float()
        cast = [
            a.float() if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in (x, *arguments)
        ]
        launch(*cast, out=result)
        if result is not out:
            out.copy_(result)

    return run


def _dense(x: Tensor) -> Tensor:
    """x as kernels take it: contiguous, and on a GPU where a wide access may begin."""
    x = x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % ALIGNMENT else x


def _are_dense(*tensors: Tensor | None) -> bool:
    return all(_dense(x) is x for x in tensors if x is not None)


def _rows(x: Tensor) -> Tensor:
    """x (..., N) as dense (rows, N)."""
    x = _dense(x)
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


# Linear: x (..., K) @ weight (N, K)^T


@_float32_on_cpu
def _launch_linear(x, weight, bias, activation, residual, constant, *, out) -> None:
    x, out = _rows(x), _rows(out)
    residual = residual if residual is None else _rows(residual)
    ahead = constant and _are_dense(weight, bias)  # a copy is written just before
    weight, bias = _dense(weight), bias if bias is None else _dense(bias)
    arguments = x, weight, bias, activation, residual, out
    if gemv_takes(x.shape[0], weight):
        gemv_kernel(*arguments, ahead=ahead)
    elif swap_gemm_takes(x.shape[0], weight):
        swap_gemm_kernel(*arguments, ahead)
    elif gemm_sm90_takes(x.shape[0], weight):
        gemm_sm90_kernel(*arguments, ahead)
    elif x.shape[0] <= MAX_SKINNY_ROWS[x.device.type]:
        skinny_gemm_kernel(*arguments)
    else:
        gemm_kernel(*arguments)


def _check_linear(x, weight, bias, activation, residual, out) -> None:
    _require_float("x", x)
    if weight.dim() != 2 or weight.numel() == 0:
        _refuse("weight", weight, "(N, K), neither 0")
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        _refuse("x", x, f"(..., {k}), as weight has {k} columns")
    _require_like("weight", weight, (n, k), x)
    if bias is not None:
        _require_like("bias", bias, (n,), x)
    _require_activation(activation)
    _require_out(out, (*x.shape[:-1], n), x)
    if residual is not None:
        _require_like("residual", residual, out.shape, out)
    _require_grid("the number of tiles of 64 rows of weight", -(-n // 64), x)


def _linear_out(
    x, weight, bias=None, activation=None, residual=None, constant=False, *, out
) -> None:
    _check_linear(x, weight, bias, activation, residual, out)
    if out.numel():
        _launch_linear(x, weight, bias, activation, residual, constant, out=out)


def _linear_empty(
    x, weight, bias=None, activation=None, residual=None, constant=False, out_dtype=None
) -> Tensor:
    dtype = out_dtype or (x if residual is None else residual).dtype
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _linear(
    x, weight, bias=None, activation=None, residual=None, constant=False, out_dtype=None
) -> Tensor:
    out = _linear_empty(x, weight, bias, activation, residual, constant, out_dtype)
    _linear_out(x, weight, bias, activation, residual, constant, out=out)
    return out


_LINEAR = (
    "Tensor x, Tensor weight, Tensor? bias=None, str? activation=None, Tensor? residual=None, "
    "bool constant=False"
)
_linear_op = _define(
    f"linear({_LINEAR}, ScalarType? out_dtype=None) -> Tensor", _linear, _linear_empty
)
_linear_out_op = _define(f"linear.out({_LINEAR}, *, Tensor(a!) out) -> ()", _linear_out, _writes)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    constant: bool = False,
) -> Tensor:
    """activation(x @ weight^T + bias) + residual in one kernel, summed in float32.

    Args:
        x: (..., K). weight: (N, K). bias: (N,). All of one dtype.
        activation: None, "gelu_tanh" (GPT-2's), "gelu" (erf) or "relu".
        residual: (..., N), in the dtype of the result.
        out_dtype: of the result; the residual's if None, and x's without one. Ignored with out.
        out: contiguous (..., N) to write to.
        constant: the weight and bias are a model's own, which no kernel still running writes: for a
            few rows they are read while the kernels before this one end.

    Returns:
        (..., N).
    """
    if out is None:
        return _linear_op(x, weight, bias, activation, residual, constant, out_dtype)
    _linear_out_op(x, weight, bias, activation, residual, constant, out=out)
    return out


# The residual stream, and the linear layers behind its layer norms. On a GPU in 16 bits, of up to
# 128 rows, a norm is no kernel: whatever writes the stream prepares it, the next product ends it.


class Stream(NamedTuple):
    """A residual stream, with what has been prepared of the layer norm that comes next.

    Attributes:
        x: (B, T, C), float32.
        scaled: x times the norm's weight, (B, T, C), in the weights' dtype; empty if not prepared.
        stats: (B * T, parts, 2) float32: of each part of a row its sum, and the sum of squares of
            what deviates from the part's mean (Chan, Golub and LeVeque).
    """

    x: Tensor
    scaled: Tensor | None = None
    stats: Tensor | None = None


def norm_sums(
    norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    """What `norm_linear` and `norm_qkv` take as `sums`: see there for the arguments.

    Returns:
        weight @ norm_weight, and weight @ norm_bias + bias, (2, N) float32; None where no kernel
        makes use of them.
    """
    if not gemv_takes(1, weight):
        return None
    return gemv_norm_sums(norm_weight, norm_bias, weight, bias)


def _prepared_empty(x: Tensor, dtype: torch.dtype, part_width: int) -> tuple[Tensor, Tensor]:
    """`scaled` and `stats` of a stream x (B, T, C), empty for a width of 0."""
    if not part_width:
        return x.new_empty(0, dtype=dtype), x.new_empty(0)
    parts = -(-x.shape[-1] // part_width)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1].numel(), parts, 2)


def _is_gemv(x: Tensor, weight: Tensor, *constants: Tensor | None) -> bool:
    """Whether gemv takes a row of the residual stream, and its constants without copies."""
    is_row = x.dtype == torch.float32 and x.shape[:-1].numel() == 1
    return is_row and gemv_takes(1, weight) and _are_dense(weight, *constants)


def _is_prepared(scaled, stats, weight: Tensor, sums: Tensor | None) -> bool:
    """Whether swap_gemm ends the layer norm that scaled and stats prepare."""
    if scaled is None or stats is None or sums is None or not scaled.numel():
        return False
    return takes_fold(stats.shape[0], weight) and _are_dense(weight, sums)


def _norm_linear_empty(
    x, norm_weight, norm_bias, eps, weight, bias=None, activation=None, sums=None, scaled=None,
    stats=None, out_dtype=None,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or weight.dtype)


def _norm_linear(
    x, norm_weight, norm_bias, eps, weight, bias=None, activation=None, sums=None, scaled=None,
    stats=None, out_dtype=None,
) -> Tensor:  # fmt: skip
    is_row = sums is not None and _is_gemv(x, weight, norm_weight, sums)
    if not is_row and not _is_prepared(scaled, stats, weight, sums):
        y = _layer_norm(x, norm_weight, norm_bias, eps)
        return _linear(y, weight, bias, activation, None, True, out_dtype)
    out = _norm_linear_empty(x, norm_weight, norm_bias, eps, weight, out_dtype=out_dtype)
    _check_normed(x, norm_weight, weight, activation, sums)
    _launch_normed(x, norm_weight, eps, weight, activation, sums, scaled, stats, _rows(out))
    return out


def _launch_normed(
    x, norm_weight, eps, weight, activation, sums, scaled, stats, out, caches=None, peaks=None
) -> None:
    if x.shape[:-1].numel() == 1:
        row = _rows(x), weight, None, activation, None, out, (norm_weight, sums, eps)
        gemv_kernel(*row, caches=caches, ahead=True, peaks=peaks)
    else:
        width = width_of_parts(x.shape[-1], stats.shape[1])
        fold, rows = (stats, width, sums, eps), _rows(scaled)
        swap_gemm_kernel(rows, weight, None, activation, None, out, True, caches, fold, peaks=peaks)


def _check_normed(x, norm_weight, weight, activation, sums) -> None:
    n, k = weight.shape
    if x.shape[-1] != k:
        _refuse("x", x, f"(..., {k}), as weight has {k} columns")
    _require_like("norm_weight", norm_weight, (k,), weight)
    _require_like("sums", sums, (2, n), x)
    _require_activation(activation)


_norm_linear_op = _define(
    "norm_linear(Tensor x, Tensor norm_weight, Tensor norm_bias, float eps, Tensor weight, "
    "Tensor? bias=None, str? activation=None, Tensor? sums=None, Tensor? scaled=None, "
    "Tensor? stats=None, ScalarType? out_dtype=None) -> Tensor",
    _norm_linear,
    _norm_linear_empty,
)


def norm_linear(
    x: Tensor | Stream,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    sums: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(layer_norm(x) @ weight^T + bias): see `layer_norm` and `linear`.

    With sums it is one kernel, in 16 bits on a GPU, for a single row, and for up to 128 of a stream
    that is prepared for this norm; otherwise it is those two.

    Args:
        x: (..., K), in any dtype, or a stream. norm_weight, norm_bias: (K,). weight: (N, K).
            bias: (N,). All but x of one dtype, and constant as in `linear`.
        sums: what `norm_sums` makes of these four, constant too.
        out_dtype: of the result; weight's if None.

    Returns:
        (..., N).
    """
    x, *prepared = x if isinstance(x, Stream) else Stream(x)
    constants = norm_weight, norm_bias, eps, weight, bias
    return _norm_linear_op(x, *constants, activation, sums, *prepared, out_dtype)


def _scores_empty(
    x, norm_weight, norm_bias, eps, weight, valid, sums=None, scaled=None, stats=None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape[:-1].numel(), weight.shape[0]
    logits = x.new_empty((*x.shape[:-1], columns), dtype=torch.float32)
    parts = 0
    if sums is not None and _is_gemv(x, weight, norm_weight, sums):
        parts = -(-columns // gemv_part_width(weight))
    elif _is_prepared(scaled, stats, weight, sums):
        parts = swap_gemm_count_parts(rows, weight)
    return logits, logits.new_empty((rows, parts, 2))


def _scores(
    x, norm_weight, norm_bias, eps, weight, valid, sums=None, scaled=None, stats=None
) -> tuple[Tensor, Tensor]:
    if not 1 <= valid <= weight.shape[0]:
        raise ValueError(f"valid is {valid}: expected 1 to {weight.shape[0]}, the rows of weight")
    norm = norm_weight, norm_bias, eps, weight
    logits, peaks = _scores_empty(x, *norm, valid, sums, scaled, stats)
    if not peaks.numel():
        prepared = sums, scaled, stats
        return _norm_linear(x, *norm, None, None, *prepared, torch.float32), peaks
    _check_normed(x, norm_weight, weight, None, sums)
    _launch_normed(
        x, norm_weight, eps, weight, None, sums, scaled, stats, _rows(logits), None, (peaks, valid)
    )
    return logits, peaks


_scores_op = _define(
    "scores(Tensor x, Tensor norm_weight, Tensor norm_bias, float eps, Tensor weight, int valid, "
    "Tensor? sums=None, Tensor? scaled=None, Tensor? stats=None) -> (Tensor, Tensor)",
    _scores,
    _scores_empty,
)


def scores(
    x: Tensor | Stream,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    valid: int,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` in float32, with what `softmax_to_draw` and `choose_token` then need not read.

    Args:
        valid: how many of the N columns these are to choose from, the first ones. The others are
            as there.

    Returns:
        The scores (..., N), and their `peaks` (rows, parts, 2): of each part of a row the largest,
        and the sum of exp(x - that). Of no part where it is not one kernel.
    """
    x, *prepared = x if isinstance(x, Stream) else Stream(x)
    return _scores_op(x, norm_weight, norm_bias, eps, weight, valid, sums, *prepared)


def _norm_qkv_empty(
    x, norm_weight, norm_bias, eps, weight, bias, k_cache, v_cache, positions, sums=None,
    scaled=None, stats=None,
) -> Tensor:  # fmt: skip
    heads, head_dim = k_cache.shape[-2:]
    return x.new_empty((*x.shape[:2], 3, heads, head_dim), dtype=weight.dtype)


def _norm_qkv(
    x, norm_weight, norm_bias, eps, weight, bias, k_cache, v_cache, positions, sums=None,
    scaled=None, stats=None,
) -> Tensor:  # fmt: skip
    if k_cache.dim() != 4 or x.dim() != 3:
        _refuse("k_cache", k_cache, "(B, capacity, H, D), and x (B, T, C)")
    heads, head_dim = k_cache.shape[2:]
    if weight.shape[0] != 3 * heads * head_dim:
        _refuse("weight", weight, f"{3 * heads * head_dim} rows, as k_cache has {heads} heads")
    of_stream = sums is not None and _is_gemv(x, weight, norm_weight, sums)
    of_stream = of_stream or _is_prepared(scaled, stats, weight, sums)
    if x.shape[1] != 1 or not (of_stream or _is_step(x, weight, bias)):
        normed = x, norm_weight, norm_bias, eps, weight, bias, None, sums, scaled, stats
        qkv = _norm_linear(*normed).view(*x.shape[:2], 3, heads, head_dim)
        _append_kv(k_cache, v_cache, qkv, None, positions)
        return qkv
    qkv = _norm_qkv_empty(x, norm_weight, norm_bias, eps, weight, bias, k_cache, v_cache, positions)
    _require_caches(k_cache, v_cache, qkv)
    _require_lengths("positions", positions, x.shape[0], qkv)
    caches, out = (k_cache, v_cache, positions.contiguous()), qkv.view(x.shape[0], -1)
    if of_stream:
        _check_normed(x, norm_weight, weight, None, sums)
        _launch_normed(x, norm_weight, eps, weight, None, sums, scaled, stats, out, caches)
    else:
        y = _rows(_layer_norm(x, norm_weight, norm_bias, eps))
        _check_linear(y, weight, bias, None, None, out)
        swap_gemm_kernel(y, weight, bias, None, None, out, ahead=True, caches=caches)
    return qkv


def _is_step(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether swap_gemm takes one token of each of several rows, and writes to their caches."""
    is_step = x.shape[1] == 1 and swap_gemm_takes(x.shape[0], weight)
    return is_step and _are_dense(weight, bias)


_norm_qkv_op = _define(
    "norm_qkv(Tensor x, Tensor norm_weight, Tensor norm_bias, float eps, Tensor weight, "
    "Tensor? bias, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, Tensor? sums=None, "
    "Tensor? scaled=None, Tensor? stats=None) -> Tensor",
    _norm_qkv,
    _norm_qkv_empty,
)


def norm_qkv(
    x: Tensor | Stream,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    sums: Tensor | None = None,
) -> Tensor:
    """Query, key and value of layer_norm(x), of which the latter two also go to the caches.

    See `norm_linear` and `append_kv`; one kernel where `norm_linear` is, and T is 1.

    Args:
        x: (B, T, C), or a stream. norm_weight, norm_bias: (C,). weight: (3 * H * D, C).
            bias: (3 * H * D,).
        k_cache, v_cache: whole contiguous buffers, (B, capacity, H, D).
        positions: (B,) int32, where the first of the T rows goes.
        sums: (2, 3 * H * D), as in `norm_linear`.

    Returns:
        The packed qkv (B, T, 3, H, D).
    """
    x, *prepared = x if isinstance(x, Stream) else Stream(x)
    constants = norm_weight, norm_bias, eps, weight, bias
    return _norm_qkv_op(x, *constants, k_cache, v_cache, positions, sums, *prepared)


def _add_linear_empty(x, y, weight, bias=None, norm_weight=None) -> tuple[Tensor, Tensor, Tensor]:
    rows, follows = x.shape[:-1].numel(), norm_weight is not None and x.dtype == torch.float32
    follows = follows and takes_fold(rows, weight)
    width = swap_gemm_part_width(rows, weight) if follows else 0
    return torch.empty_like(x), *_prepared_empty(x, weight.dtype, width)


def _add_linear(x, y, weight, bias=None, norm_weight=None) -> tuple[Tensor, Tensor, Tensor]:
    out, scaled, stats = _add_linear_empty(x, y, weight, bias, norm_weight)
    if not scaled.numel():
        _linear_out(y, weight, bias, None, x, True, out=out)
        return out, scaled, stats
    _check_linear(y, weight, bias, None, x, out)
    _require_like("norm_weight", norm_weight, (out.shape[-1],), weight)
    ahead = _are_dense(weight, bias, norm_weight)
    weight, bias = _dense(weight), bias if bias is None else _dense(bias)
    follow = _dense(norm_weight), _rows(scaled), stats
    swap_gemm_kernel(_rows(y), weight, bias, None, _rows(x), _rows(out), ahead, follow=follow)
    return out, scaled, stats


_add_linear_op = _define(
    "add_linear(Tensor x, Tensor y, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None) "
    "-> (Tensor, Tensor, Tensor)",
    _add_linear,
    _add_linear_empty,
)


def add_linear(
    x: Stream,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
) -> Stream:
    """x + y @ weight^T + bias, in one kernel: see `linear`.

    Args:
        x: (B, T, C). y: (B, T, K). weight: (C, K). bias: (C,). weight and bias constant as in
            `linear`.
        norm_weight: (C,), that of the layer norm that comes next, constant too.

    Returns:
        The stream, prepared for that norm where `norm_linear` makes use of it.
    """
    return Stream(*_add_linear_op(x.x, y, weight, bias, norm_weight))


# Attention: q (B, Tq, H, D) against k, v (B, Tk, H, D), or one packed qkv (B, T, 3, H, D)


@_float32_on_cpu
def _launch_attention(q, k, v, causal, scale, q_lengths, kv_lengths, *, out) -> None:
    q = _dense(q)
    k, v = (q, q) if k is None else (_dense(k), _dense(v))
    flash_attention_kernel(q, k, v, causal, scale, q_lengths, kv_lengths, out)


def _attention_out(
    q, k=None, v=None, causal=True, scale=None, q_lengths=None, kv_lengths=None, *, out
) -> None:
    _require_float("q", q)
    if k is None and (q.dim() != 5 or q.shape[2] != 3):
        _refuse("q", q, "(B, T, 3, H, D), as k is not given")
    if k is None and v is not None:
        _refuse("v", v, "None, as k is not given")
    if k is not None and (q.dim() != 4 or v is None):
        _refuse("q", q, "(B, Tq, H, D), and k and v given")
    batch, q_len, heads, head_dim = _output_shape(q)
    k_len = q_len if k is None else k.shape[1]
    if k is not None:
        _require_like("k", k, (batch, k_len, heads, head_dim), q)
        _require_like("v", v, (batch, k_len, heads, head_dim), q)
    _require_head_dim(q)
    _require_out(out, (batch, q_len, heads, head_dim), q)
    _require_grid("the batch size", batch, q)
    _require_grid("the number of heads", heads, q)
    if q_lengths is not None or kv_lengths is not None:
        q_lengths = _lengths("q_lengths", q_lengths, q_len, q)
        kv_lengths = _lengths("kv_lengths", kv_lengths, k_len, q)
    if k_len == 0:
        out.zero_()
    elif out.numel():
        scale = head_dim**-0.5 if scale is None else scale
        _launch_attention(q, k, v, causal, scale, q_lengths, kv_lengths, out=out)


def _lengths(name: str, lengths: Tensor | None, full: int, like: Tensor) -> Tensor:
    batch = like.shape[0]
    if lengths is None:
        return torch.full((batch,), full, dtype=torch.int32, device=like.device)
    _require_lengths(name, lengths, batch, like)
    return lengths.contiguous()


def _output_shape(q: Tensor) -> tuple[int, ...]:
    return tuple(q.shape) if q.dim() == 4 else (*q.shape[:2], *q.shape[3:])


def _attention_empty(
    q, k=None, v=None, causal=True, scale=None, q_lengths=None, kv_lengths=None
) -> Tensor:
    return q.new_empty(_output_shape(q))


def _attention(
    q, k=None, v=None, causal=True, scale=None, q_lengths=None, kv_lengths=None
) -> Tensor:
    out = _attention_empty(q)
    _attention_out(q, k, v, causal, scale, q_lengths, kv_lengths, out=out)
    return out


_ATTENTION = (
    "Tensor q, Tensor? k=None, Tensor? v=None, bool causal=True, float? scale=None, "
    "Tensor? q_lengths=None, Tensor? kv_lengths=None"
)
_attention_op = _define(f"attention({_ATTENTION}) -> Tensor", _attention, _attention_empty)
_attention_out_op = _define(
    f"attention.out({_ATTENTION}, *, Tensor(a!) out) -> ()", _attention_out, _writes
)


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v by FlashAttention.

    Args:
        q: (B, Tq, H, D) with k, v (B, Tk, H, D), or alone a packed qkv (B, T, 3, H, D); D <= 256.
        causal: query i sees keys up to i + Tk - Tq (bottom-right), with the lengths for Tq and Tk.
        scale: D ** -0.5 if None.
        q_lengths, kv_lengths: (B,) int32, how many queries and keys of each batch row are valid;
            all if None. Keys past the length have weight 0 but have to be finite.
        out: contiguous (B, Tq, H, D) to write to.

    Returns:
        (B, Tq, H, D). Rows that see no key, and rows past their length, are 0.
    """
    if out is None:
        return _attention_op(q, k, v, causal, scale, q_lengths, kv_lengths)
    _attention_out_op(q, k, v, causal, scale, q_lengths, kv_lengths, out=out)
    return out


# KV cache: (B, capacity, H, D)


def _require_caches(k_cache: Tensor, v_cache: Tensor, like: Tensor) -> None:
    if k_cache.dim() != 4:
        _refuse("k_cache", k_cache, "(B, capacity, H, D)")
    shape = (like.shape[0], k_cache.shape[1], *like.shape[-2:])
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _require_like(name, cache, shape, like)
        if not cache.is_contiguous():
            raise ValueError(
                f"{name} has strides {cache.stride()}: pass the whole contiguous buffer, and "
                "lengths or positions for the rows in use; a copy would not be the cache"
            )
        _require_aligned(name, cache)
    _require_grid("the batch size", like.shape[0], like)


def _append_kv(k_cache, v_cache, k, v, positions) -> None:
    _require_float("k", k)
    if v is None and (k.dim() != 5 or k.shape[2] != 3):
        _refuse("k", k, "(B, T, 3, H, D), as v is not given")
    if v is not None:
        if k.dim() != 4:
            _refuse("k", k, "(B, T, H, D)")
        _require_like("v", v, k.shape, k)
    _require_caches(k_cache, v_cache, k)
    _require_lengths("positions", positions, k.shape[0], k)
    if not k.numel() or not k_cache.numel():
        return
    k = _dense(k)
    v, positions = (k if v is None else _dense(v)), positions.contiguous()
    if k.is_cuda or k.dtype == torch.float32:
        append_kv_kernel(k, v, positions, k_cache, v_cache)
    else:
        _warn_of_cast(k.dtype)
        caches = k_cache.float(), v_cache.float()
        append_kv_kernel(k.float(), v.float(), positions, *caches)
        k_cache.copy_(caches[0])
        v_cache.copy_(caches[1])


_append_kv_op = _define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor? v, Tensor positions) "
    "-> ()",
    _append_kv,
    _writes,
)


def append_kv(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor | None, positions: Tensor
) -> None:
    """Write keys and values to cache rows positions[b], positions[b] + 1, … in place.

    Args:
        k_cache, v_cache: whole contiguous buffers, (B, capacity, H, D).
        k, v: (B, T, H, D), or k alone a packed qkv (B, T, 3, H, D).
        positions: (B,) int32, where the first of the T rows goes; what would fall outside the
            cache is not written.
    """
    _append_kv_op(k_cache, v_cache, k, v, positions)


@_float32_on_cpu
def _launch_decode_attention(q, k_cache, v_cache, lengths, scale, *, out) -> None:
    q = _dense(q).squeeze(1)
    decode_attention_kernel(q, k_cache, v_cache, lengths, scale, out.squeeze(1))


def _check_decode_attention(q, k_cache, v_cache, lengths) -> None:
    _require_float("q", q)
    packed = q.dim() == 5 and q.shape[2] == 3
    if not (packed or q.dim() == 4) or q.shape[1] != 1:
        _refuse("q", q, "(B, 1, H, D) or (B, 1, 3, H, D): one query a row")
    _require_caches(k_cache, v_cache, q)
    _require_lengths("lengths", lengths, q.shape[0], q)
    _require_head_dim(q)


def _decode_attention_out(q, k_cache, v_cache, lengths, scale=None, *, out) -> None:
    _check_decode_attention(q, k_cache, v_cache, lengths)
    _require_out(out, _output_shape(q), q)
    if out.numel():
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        _launch_decode_attention(q, k_cache, v_cache, lengths.contiguous(), scale, out=out)


def _decode_attention_empty(q, k_cache, v_cache, lengths, scale=None) -> Tensor:
    return q.new_empty(_output_shape(q))


def _decode_attention(q, k_cache, v_cache, lengths, scale=None) -> Tensor:
    out = _decode_attention_empty(q, k_cache, v_cache, lengths)
    _decode_attention_out(q, k_cache, v_cache, lengths, scale, out=out)
    return out


_DECODE = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, float? scale=None"
_decode_attention_op = _define(
    f"decode_attention({_DECODE}) -> Tensor", _decode_attention, _decode_attention_empty
)
_decode_attention_out_op = _define(
    f"decode_attention.out({_DECODE}, *, Tensor(a!) out) -> ()", _decode_attention_out, _writes
)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query a row over the first lengths[b] rows of a KV cache.

    Args:
        q: (B, 1, H, D), or the packed qkv (B, 1, 3, H, D) whose query is meant; D <= 256.
        k_cache, v_cache: whole contiguous buffers, (B, capacity, H, D).
        lengths: (B,) int32. Rows from lengths[b] on are never read; a length of 0 gives 0.
        scale: D ** -0.5 if None.
        out: contiguous (B, 1, H, D) to write to.

    Returns:
        (B, 1, H, D).
    """
    if out is None:
        return _decode_attention_op(q, k_cache, v_cache, lengths, scale)
    _decode_attention_out_op(q, k_cache, v_cache, lengths, scale, out=out)
    return out


def _add_decode_attention_empty(
    x, q, k_cache, v_cache, lengths, scale, weight, bias=None, norm_weight=None
) -> tuple[Tensor, Tensor, Tensor]:
    return _add_linear_empty(x, q, weight, bias, norm_weight)


def _add_decode_attention(
    x, q, k_cache, v_cache, lengths, scale, weight, bias=None, norm_weight=None
) -> tuple[Tensor, Tensor, Tensor]:
    width = q.shape[-2] * q.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        _refuse("weight", weight, f"(N, {width}), as q has heads of {width} columns in all")
    if not (gemv_takes(q.shape[0], weight) and _are_dense(weight, bias)):
        y = _decode_attention(q, k_cache, v_cache, lengths, scale).view(*q.shape[:2], width)
        return _add_linear(x, y, weight, bias, norm_weight)
    _check_decode_attention(q, k_cache, v_cache, lengths)
    _require_like("weight", weight, (x.shape[-1], width), q)
    _require_like("x", x, (1, 1, weight.shape[0]), x)
    out, scaled, stats = _add_linear_empty(x, q, weight, bias, norm_weight)
    heads, head_dim = q.shape[-2:]
    splits = split_schedule(heads, k_cache.shape[1]).splits
    o = q.new_empty((1, heads, splits, head_dim), dtype=torch.float32)
    ml = q.new_empty((1, heads, splits, 2), dtype=torch.float32)
    q = _dense(q).squeeze(1)
    decode_attention_partials(q, k_cache, v_cache, lengths.contiguous(), scale, o, ml)
    gemv_kernel(None, weight, bias, None, _rows(x), _rows(out), parts=(o, ml), ahead=True)
    return out, scaled, stats


_add_decode_attention_op = _define(
    "add_decode_attention(Tensor x, Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, "
    "float scale, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None) "
    "-> (Tensor, Tensor, Tensor)",
    _add_decode_attention,
    _add_decode_attention_empty,
)


def add_decode_attention(
    x: Stream,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
) -> Stream:
    """x + decode_attention(q, …) @ weight^T + bias: see `decode_attention` and `add_linear`.

    For a single row in 16 bits on a GPU the second kernel merges the parts that the keys were split
    into.

    Args:
        x: (B, 1, C).
        q, k_cache, v_cache, lengths, scale: as in `decode_attention`.
        weight: (C, H * D). bias, norm_weight: (C,). Constant as in `linear`.

    Returns:
        The stream, prepared as by `add_linear`.
    """
    attention = q, k_cache, v_cache, lengths, scale
    return Stream(*_add_decode_attention_op(x.x, *attention, weight, bias, norm_weight))


# Rows: softmax and layer norm of x (..., N)


@_float32_on_cpu
def _launch_softmax(x, valid, *, out) -> None:
    row_softmax_kernel(_rows(x), valid, _rows(out))


def _softmax_out(x, valid=None, *, out) -> None:
    _require_float("x", x)
    _require_columns(x)
    valid = x.shape[-1] if valid is None else valid
    _require_valid(valid, "x", x)
    _require_out(out, x.shape, x)
    if out.numel():
        _launch_softmax(x, valid, out=out)


def _softmax_empty(x, valid=None, out_dtype=None) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def _softmax(x, valid=None, out_dtype=None) -> Tensor:
    out = _softmax_empty(x, out_dtype=out_dtype)
    _softmax_out(x, valid, out=out)
    return out


_softmax_op = _define(
    "softmax(Tensor x, int? valid=None, ScalarType? out_dtype=None) -> Tensor",
    _softmax,
    _softmax_empty,
)
_softmax_out_op = _define(
    "softmax.out(Tensor x, int? valid=None, *, Tensor(a!) out) -> ()", _softmax_out, _writes
)


def softmax(
    x: Tensor,
    valid: int | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax over the last dimension.

    Args:
        x: (..., N).
        valid: softmax over the first `valid` columns, 0 in the others; all if None.
        out_dtype: of the result; x's if None. Ignored with out.
        out: contiguous (..., N) to write to.

    Returns:
        (..., N). As in torch.softmax, a row of -inf, or with a NaN or +inf in it, is all NaN (in
        its valid columns).
    """
    if out is None:
        return _softmax_op(x, valid, out_dtype)
    _softmax_out_op(x, valid, out=out)
    return out


@_float32_on_cpu
def _launch_layer_norm(x, weight, bias, eps, *, out) -> None:
    layer_norm_kernel(_rows(x), _dense(weight), _dense(bias), eps, _rows(out))


def _layer_norm_out(x, weight, bias, eps=1e-5, *, out) -> None:
    _require_float("x", x)
    _require_columns(x)
    _require_out(out, x.shape, x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        _require_like(name, tensor, (x.shape[-1],), out)
    if out.numel():
        _launch_layer_norm(x, weight, bias, eps, out=out)


def _layer_norm_empty(x, weight, bias, eps=1e-5) -> Tensor:
    return x.new_empty(x.shape, dtype=weight.dtype)


def _layer_norm(x, weight, bias, eps=1e-5) -> Tensor:
    out = _layer_norm_empty(x, weight, bias)
    _layer_norm_out(x, weight, bias, eps, out=out)
    return out


_LAYER_NORM = "Tensor x, Tensor weight, Tensor bias, float eps=1e-05"
_layer_norm_op = _define(f"layer_norm({_LAYER_NORM}) -> Tensor", _layer_norm, _layer_norm_empty)
_layer_norm_out_op = _define(
    f"layer_norm.out({_LAYER_NORM}, *, Tensor(a!) out) -> ()", _layer_norm_out, _writes
)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, out: Tensor | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Args:
        x: (..., N), in any dtype: a float32 residual stream goes in, weight's dtype comes out.
        weight, bias: (N,), in the dtype of the result.
        out: contiguous (..., N) to write to.

    Returns:
        (..., N) in weight's dtype.
    """
    if out is None:
        return _layer_norm_op(x, weight, bias, eps)
    _layer_norm_out_op(x, weight, bias, eps, out=out)
    return out


# The ends of a step: tokens (B, T) to the residual stream, and scores (B, V) to tokens


def _embed_empty(
    tokens, starts, wte, wpe, counts=None, ends=None, norm_weight=None
) -> tuple[Tensor, Tensor, Tensor]:
    x = wte.new_empty((*tokens.shape, wte.shape[1]), dtype=torch.float32)
    follows = norm_weight is not None and takes_fold(tokens.numel(), wte)
    width = embed_part_width(x.device, x.shape[-1]) if follows else 0
    return x, *_prepared_empty(x, wte.dtype, width)


@_float32_on_cpu
def _launch_embed(wte, wpe, tokens, starts, counts, ends, follow, *, out) -> None:
    tokens, starts = tokens.contiguous(), starts.contiguous()
    embed_kernel(tokens, starts, _dense(wte), _dense(wpe), out, counts, ends, follow)


def _embed(
    tokens, starts, wte, wpe, counts=None, ends=None, norm_weight=None
) -> tuple[Tensor, Tensor, Tensor]:
    _require_float("wte", wte)
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        _refuse("tokens", tokens, "(B, T), torch.int64")
    if wte.dim() != 2:
        _refuse("wte", wte, "(V, C)")
    _require_like("wpe", wpe, (wpe.shape[0], wte.shape[1]), wte)
    if norm_weight is not None:
        _require_like("norm_weight", norm_weight, (wte.shape[1],), wte)
    _require_lengths("starts", starts, tokens.shape[0], tokens)
    if ends is not None:
        _require_lengths("counts", counts, tokens.shape[0], tokens)
        _require_state("ends", ends, (tokens.shape[0],), torch.int32, tokens)
    _require_grid("the batch size", tokens.shape[0], wte)
    x, scaled, stats = _embed_empty(tokens, starts, wte, wpe, norm_weight=norm_weight)
    if x.numel():
        follow = (_dense(norm_weight), _rows(scaled), stats) if scaled.numel() else None
        counts = counts if counts is None else counts.contiguous()
        _launch_embed(wte, wpe, tokens, starts, counts, ends, follow, out=x)
    return x, scaled, stats


_embed_op = _define(
    "embed(Tensor tokens, Tensor starts, Tensor wte, Tensor wpe, Tensor? counts=None, "
    "Tensor(a!)? ends=None, Tensor? norm_weight=None) -> (Tensor, Tensor, Tensor)",
    _embed,
    _embed_empty,
)


def embed(
    tokens: Tensor,
    starts: Tensor,
    wte: Tensor,
    wpe: Tensor,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
    norm_weight: Tensor | None = None,
) -> Stream:
    """The sum of token and position embeddings, where the residual stream begins.

    Args:
        tokens: (B, T) int64. One that wte does not have gives NaN.
        starts: (B,) int32, the positions of the rows' first tokens; past wpe's last it is taken.
        wte: (V, C). wpe: (P, C), of the same dtype.
        counts: (B,) int32, 1 where a row goes on, otherwise 0; for `ends`.
        ends: (B,) int32, gets starts + T where a row goes on, otherwise 0.
        norm_weight: (C,), that of the layer norm that comes next.

    Returns:
        The stream (B, T, C), prepared as by `add_linear`.
    """
    return Stream(*_embed_op(tokens, starts, wte, wpe, counts, ends, norm_weight))


def _softmax_to_draw_empty(x, valid, peaks=None) -> tuple[Tensor, Tensor]:
    pieces = count_masses(x.shape[0], x.shape[1], valid) if x.is_cuda else 0
    return torch.empty_like(x), x.new_empty((x.shape[0], pieces), dtype=torch.int64)


def _softmax_to_draw(x, valid, peaks=None) -> tuple[Tensor, Tensor]:
    if x.dim() != 2 or x.dtype != torch.float32:
        _refuse("x", x, "(B, N), torch.float32")
    _require_valid(valid, "x", x)
    peaks = _peaks_or_none(peaks, x)
    x = _dense(x)
    out, masses = _softmax_to_draw_empty(x, valid)
    if masses.numel():
        row_softmax_kernel(x, valid, out, masses, peaks)
    else:
        _softmax_out(x, valid, out=out)
    return out, masses


_softmax_to_draw_op = _define(
    "softmax_to_draw(Tensor x, int valid, Tensor? peaks=None) -> (Tensor, Tensor)",
    _softmax_to_draw,
    _softmax_to_draw_empty,
)


def softmax_to_draw(x: Tensor, valid: int, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension, with what `choose_token` then need not add up.

    Args:
        x: (B, N), float32. valid: as in `softmax`.
        peaks: of x, if it comes from `scores` with the same `valid`.

    Returns:
        The probabilities (B, N), and `masses` (B, pieces) int64, of no piece where the kernel does
        not cut rows.
    """
    return _softmax_to_draw_op(x, valid, peaks)


def _peaks_or_none(peaks: Tensor | None, x: Tensor) -> Tensor | None:
    """`peaks` of x (B, N), if there are any."""
    if peaks is None or not peaks.numel():
        return None
    _require_state("peaks", peaks, (x.shape[0], *peaks.shape[1:2], 2), torch.float32, x)
    return _dense(peaks)  # kernels read both values of a part at once


def _choose_token(
    scores, valid, seed, samples, starts, eos, steps, chosen, finite, tokens, left, going,
    lengths=None, masses=None, peaks=None,
) -> None:  # fmt: skip
    batch, capacity = scores.shape[0], chosen.shape[0]
    if scores.dim() != 2 or scores.dtype != torch.float32 or not scores.is_cuda:
        _refuse("scores", scores, "(B, N), torch.float32 on a GPU")
    _require_valid(valid, "scores", scores)
    for name, table, dtype in (("chosen", chosen, torch.int64), ("finite", finite, torch.bool)):
        _require_state(name, table, (capacity, batch), dtype, scores)
    for name, row, dtype in (
        ("steps", steps, torch.int64), ("tokens", tokens, torch.int64),
        ("left", left, torch.int32), ("going", going, torch.int32),
        ("lengths", lengths, torch.int32), ("samples", samples, torch.int64),
        ("starts", starts, torch.int32),
    ):  # fmt: skip
        if row is not None:
            _require_state(name, row, (batch,), dtype, scores)
    random = None
    if seed is not None:
        _require_state("seed", seed, (1,), torch.int64, scores)
        random = seed, samples, starts
    if masses is not None and not masses.numel():
        masses = None
    if masses is not None:
        pieces = count_masses(batch, scores.shape[1], valid)
        _require_state("masses", masses, (batch, pieces), torch.int64, scores)
    peaks = _peaks_or_none(peaks, scores)
    state = steps, chosen, finite, tokens, left, going, lengths, masses, peaks
    if batch:
        choose_token_kernel(_dense(scores), valid, random, eos, *state)


def _require_state(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
) -> None:
    ok = tensor.shape == shape and tensor.dtype == dtype and tensor.device == like.device
    if not ok or not tensor.is_contiguous():
        _refuse(name, tensor, f"a contiguous {shape}, {dtype} on {like.device}")


_choose_token_op = _define(
    "choose_token(Tensor scores, int valid, Tensor? seed, Tensor? samples, Tensor? starts, "
    "int eos, Tensor(a!) steps, Tensor(b!) chosen, Tensor(c!) finite, Tensor(d!) tokens, "
    "Tensor(e!) left, Tensor(f!) going, Tensor(g!)? lengths=None, Tensor? masses=None, "
    "Tensor? peaks=None) -> ()",
    _choose_token,
    _writes,
)


def choose_token(
    scores: Tensor,
    valid: int,
    random: tuple[Tensor, Tensor, Tensor] | None,
    eos: int,
    steps: Tensor,
    chosen: Tensor,
    finite: Tensor,
    tokens: Tensor,
    left: Tensor,
    going: Tensor,
    lengths: Tensor | None = None,
    masses: Tensor | None = None,
    peaks: Tensor | None = None,
) -> None:
    """Choose each row's next token, and note what a step leaves, in one kernel on a GPU.

    The tokens are those of `sampling.draw` with `sampling.philox_uniform`, or of argmax.

    Args:
        scores: (B, N) float32: probabilities to draw from, or what to take the largest of.
        valid: how many columns there are to choose from, the first ones.
        random: seed (1,) int64, samples (B,) int64, the rows' random streams, and starts (B,)
            int32, the positions of their first steps in these. None: the largest score, and of
            equal ones the first.
        eos: the token that ends a row, -1 if none does.
        steps: (B,) int64, the step of each row; grows by 1.
        chosen, finite: (capacity, B), int64 and bool: row `steps` gets the token, and whether the
            scores were finite (a row of probabilities is all NaN if not).
        tokens: (B,) int64, gets the token.
        left: (B,) int32, how many tokens a row may still get; one less if it is going.
        going: (B,) int32, 1 where a row goes on, otherwise 0.
        lengths: (B,) int32, how many positions of a row are cached; one more if it was going.
        masses: of scores, if these come from `softmax_to_draw`.
        peaks: of scores, if these are those of `scores` with the same `valid`.
    """
    state = steps, chosen, finite, tokens, left, going, lengths, masses, peaks
    _choose_token_op(scores, valid, *(random or (None, None, None)), eos, *state)


# Vector addition: x and y of any one shape


@_float32_on_cpu
def _launch_vector_add(x, y, *, out) -> None:
    vector_add_kernel(_dense(x).view(-1), _dense(y).view(-1), out.view(-1))


def _vector_add_out(x, y, *, out) -> None:
    _require_float("x", x)
    _require_like("y", y, x.shape, x)
    _require_out(out, x.shape, x)
    if out.dtype != x.dtype:
        _refuse("out", out, f"{x.dtype}, as x has")
    if out.numel():
        _launch_vector_add(x, y, out=out)


def _vector_add_empty(x, y) -> Tensor:
    return x.new_empty(x.shape)


def _vector_add(x, y) -> Tensor:
    out = _vector_add_empty(x, y)
    _vector_add_out(x, y, out=out)
    return out


_VECTOR_ADD = "Tensor x, Tensor y"
_vector_add_op = _define(f"vector_add({_VECTOR_ADD}) -> Tensor", _vector_add, _vector_add_empty)
_vector_add_out_op = _define(
    f"vector_add.out({_VECTOR_ADD}, *, Tensor(a!) out) -> ()", _vector_add_out, _writes
)


def vector_add(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """x + y, added in float32.

    Args:
        x, y: of one shape, dtype and device; nothing is broadcast.
        out: contiguous, of the same shape and dtype, to write to.

    Returns:
        The sum, contiguous, in the shape and dtype of x.
    """
    if out is None:
        return _vector_add_op(x, y)
    _vector_add_out_op(x, y, out=out)
    return out
