"""Parity: every kernel and the whole model against float64 math, with eager PyTorch beside them.

An operation runs on NaN-filled outputs over the sets of `workloads`; the model is compared with its
twin. `run` yields one `Result` a comparison, held to the bounds of `metrics`.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minifused import checkpoint, metrics, ops, workloads
from minifused.config import GPTConfig
from minifused.engine import DEMO_FOLDER
from minifused.metrics import BOUNDS, Errors
from minifused.model import GPTModel
from minifused.twin import Twin
from minifused.workloads import Inputs, Workload

PREFIXES = (1, 2, 63, 64, 65, 127, 128, 129)  # cached against uncached: around the tiles
CHUNKS = ((3, 4, 1), (60, 69))
GREEDY_STEPS = 64
VERSE = b"""\
The clock that hangs above the stair
Has lost its hands, and does not care;
It counts by dust, it strikes by rain,
And never tells the hour again.
Yet all who climb the stair by night
Will stop before its face, polite,
And hold their breath, and hear it keep
The time of houses fast asleep.
"""


@dataclass(frozen=True)
class Result:
    """One comparison. Errors are relative to the RMS of the reference (see `metrics`).

    Attributes:
        check: what was compared. case: the shape, layer or step. dtype: of the kernels.
        max_error, rms_error: of the kernels. eager_rms_error: of eager PyTorch in the same dtype.
        ratio: rms_error over eager_rms_error, None if that is 0.
        bound: the largest rms_error allowed.
        ok: whether all that is asked holds. note: why not, or what else there is to know.
    """

    check: str
    case: str
    dtype: str
    max_error: float
    rms_error: float
    eager_rms_error: float
    ratio: float | None
    bound: float
    ok: bool
    note: str = ""


def judge(
    check: str,
    case: str,
    dtype: torch.dtype,
    errors: Errors,
    eager: Errors,
    bound: str = "op",
    fault: str = "",
    note: str = "",
) -> Result:
    """A verdict on errors beside those of eager PyTorch; a `fault` found elsewhere is a failure."""
    limits = BOUNDS[bound].limits(eager)
    fault = fault or _excess(errors, limits)
    return Result(
        *(check, case, str(dtype).removeprefix("torch.")),
        *(errors.max, errors.rms, eager.rms),
        ratio=errors.rms / eager.rms if eager.rms else None,
        bound=limits.rms,
        ok=not fault,
        note="; ".join(filter(None, (fault, note))),
    )


def _excess(errors: Errors, limits: Errors) -> str:
    """What is past its limit, "" for nothing."""
    if metrics.within(errors, limits):
        return ""
    if not math.isfinite(errors.rms):
        return "NaN or infinity"
    return "RMS error" if errors.rms > limits.rms else f"an error over {limits.max:.1e}"


# Eager PyTorch: the baseline, and on upcast inputs the reference


def upcast(inputs: Inputs) -> Inputs:
    """The same inputs in float64, for a float64 result."""
    return {name: _upcast(value) for name, value in inputs.items()}


def _upcast(value: object) -> object:
    if isinstance(value, torch.dtype):
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def eager_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """What `ops.linear` computes, by PyTorch."""
    y = F.linear(x, weight, bias)
    if activation == "relu":
        y = F.relu(y)
    elif activation is not None:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    y = y.to(out_dtype or x.dtype)
    return y if residual is None else residual + y


def eager_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: bool = True,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    """What `ops.attention` computes, by PyTorch."""
    if k is None or v is None:
        q, k, v = q.unbind(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    if q_lengths is None and kv_lengths is None and (not causal or q.shape[2] == k.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    visible = _visible(q, k, causal, q_lengths, kv_lengths)  # (B, 1, Tq, Tk)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return y.masked_fill(~visible.any(-1, keepdim=True), 0).transpose(1, 2)


def _visible(
    q: Tensor, k: Tensor, causal: bool, q_lengths: Tensor | None, kv_lengths: Tensor | None
) -> Tensor:
    """Which keys a query sees, (B, 1, Tq, Tk): the last valid query sees the last valid key."""
    query = torch.arange(q.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    full = torch.ones(q.shape[0], dtype=torch.int32, device=q.device)
    q_valid = (full * q.shape[2] if q_lengths is None else q_lengths)[:, None, None, None]
    k_valid = (full * k.shape[2] if kv_lengths is None else kv_lengths)[:, None, None, None]
    visible = (query < q_valid) & (key < k_valid)
    return visible & (key <= query + k_valid - q_valid) if causal else visible


def eager_decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
    """What `ops.decode_attention` computes, by PyTorch, row by row."""
    q = q[:, :, 0] if q.dim() == 5 else q
    out = torch.zeros_like(q)  # (B, 1, H, D)
    for row, length in enumerate(lengths.tolist()):
        if length:
            k, v = (cache[row : row + 1, :length] for cache in (k_cache, v_cache))
            out[row] = eager_attention(q[row : row + 1], k, v, causal=False)[0]
    return out


def eager_append_kv(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor | None, positions: Tensor
) -> Tensor:
    """Both caches after `ops.append_kv`, stacked."""
    new = k[:, :, 1:].unbind(2) if v is None else (k, v)
    caches = torch.stack([k_cache, v_cache])
    for row, position in enumerate(positions.tolist()):
        for cache, rows in zip(caches, new, strict=True):
            written = cache[row, position : position + rows.shape[1]]
            written.copy_(rows[row, : len(written)])
    return caches


def eager_softmax(x: Tensor, valid: int | None) -> Tensor:
    """What `ops.softmax` computes, by PyTorch."""
    valid = x.shape[-1] if valid is None else valid
    return F.pad(torch.softmax(x[..., :valid], dim=-1), (0, x.shape[-1] - valid))


def eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What `ops.layer_norm` computes, by PyTorch, in the dtype of x until the end."""
    y = F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype))
    return y.to(weight.dtype)


def eager_vector_add(x: Tensor, y: Tensor) -> Tensor:
    """What `ops.vector_add` computes, by PyTorch."""
    return x + y


# Operations, each on one workload


def _outputs(
    operation: Callable[..., Tensor],
    eager_operation: Callable[..., Tensor],
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output of the kernel, NaN where it writes nothing, of eager PyTorch, and the reference."""
    inputs = workload.inputs(device, dtype, torch.Generator(device).manual_seed(0))
    eager = eager_operation(**inputs)
    poison = torch.full(eager.shape, torch.nan, dtype=eager.dtype, device=device)
    reference = eager_operation(**upcast(inputs))
    return operation(**inputs, out=poison), eager, reference


def compare(
    check: str,
    case: str,
    dtype: torch.dtype,
    outputs: tuple[Tensor, Tensor, Tensor],
    bound: str = "op",
) -> Result:
    """A verdict on an output, beside that of eager PyTorch, by the float64 reference."""
    output, eager, reference = outputs
    errors, eager_errors = metrics.measure(output, reference), metrics.measure(eager, reference)
    return judge(check, case, dtype, errors, eager_errors, bound)


Check = Callable[[Workload, torch.device, torch.dtype], Iterator[Result]]


def output_check(name: str, eager_operation: Callable[..., Tensor]) -> Check:
    """A check of the output of `ops.<name>`."""

    def check(workload: Workload, device: torch.device, dtype: torch.dtype) -> Iterator[Result]:
        outputs = _outputs(getattr(ops, name), eager_operation, workload, device, dtype)
        yield compare(name, workload.case, dtype, outputs)

    return check


def check_append_kv(
    workload: Workload, device: torch.device, dtype: torch.dtype
) -> Iterator[Result]:
    """`ops.append_kv`, which copies and so has to be exact."""

    def append(out: Tensor, **inputs: Tensor) -> Tensor:
        ops.append_kv(**inputs)
        return torch.stack([inputs["k_cache"], inputs["v_cache"]], out=out)

    outputs = _outputs(append, eager_append_kv, workload, device, dtype)
    yield compare("append_kv", workload.case, dtype, outputs, "copy")


def check_softmax(workload: Workload, device: torch.device, dtype: torch.dtype) -> Iterator[Result]:
    """`ops.softmax`: the whole, each normal number relative to itself, and the sums of rows."""
    outputs = _outputs(ops.softmax, eager_softmax, workload, device, dtype)
    yield from compare_softmax(workload.case, dtype, outputs)


def compare_softmax(
    case: str, dtype: torch.dtype, outputs: tuple[Tensor, Tensor, Tensor]
) -> Iterator[Result]:
    """Softmax output, that of eager PyTorch, and the float64 reference: three comparisons."""
    yield compare("softmax", case, dtype, outputs)
    output, eager, reference = outputs
    smallest = torch.finfo(dtype).tiny
    errors, eager_errors = (
        metrics.measure_elementwise(y, reference, smallest) for y in (output, eager)
    )
    yield judge("softmax elements", case, dtype, errors, eager_errors)
    sums, eager_sums = (y.double().sum(-1) for y in (output, eager))
    outputs = sums, eager_sums, torch.ones_like(sums)
    yield compare("softmax sums", case, dtype, outputs)


Task = Callable[[], Iterator[Result]]

check_linear = output_check("linear", eager_linear)
check_attention = output_check("attention", eager_attention)
check_decode_attention = output_check("decode_attention", eager_decode_attention)
check_layer_norm = output_check("layer_norm", eager_layer_norm)
check_vector_add = output_check("vector_add", eager_vector_add)

# Each check with its workloads everywhere, and those it has on a GPU as well.
OPERATIONS: dict[str, tuple[Check, Sequence[Workload], Sequence[Workload]]] = {
    "linear": (check_linear, workloads.LINEAR, workloads.GPT2_LINEAR),
    "attention": (check_attention, workloads.ATTENTION, workloads.GPT2_ATTENTION),
    "decode_attention": (check_decode_attention, workloads.DECODE, workloads.GPT2_DECODE),
    "append_kv": (check_append_kv, workloads.APPEND, workloads.GPT2_APPEND),
    "softmax": (check_softmax, workloads.SOFTMAX, workloads.GPT2_SOFTMAX),
    "layer_norm": (check_layer_norm, workloads.LAYER_NORM, workloads.GPT2_LAYER_NORM),
    "vector_add": (check_vector_add, workloads.VECTOR_ADD, workloads.GPT2_VECTOR_ADD),
}


# The model, on the verse


@dataclass(frozen=True)
class Models:
    """One set of weights, rounded to `dtype`, in the fused model and in two twins."""

    dtype: torch.dtype
    fused: GPTModel
    eager: Twin  # in dtype
    exact: Twin  # in float64
    tokens: Tensor  # (1, T), int64


def load_models(
    config: GPTConfig, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Models:
    """The models that the checks below compare, and as much of the verse as they have room for."""
    rounded = {name: w.to(device, dtype) for name, w in weights.items()}
    exact = {name: w.double() for name, w in rounded.items()}
    tokens = torch.tensor([list(VERSE[: config.n_positions])], device=device) % config.vocab_size
    fused = GPTModel.from_weights(config, rounded, device, dtype)
    twins = [Twin.from_weights(config, state) for state in (rounded, exact)]
    return Models(dtype, fused, twins[0], twins[1], tokens)


def check_forward(models: Models) -> Iterator[Result]:
    """The residual stream after each layer, and the logits of all positions."""
    ops.compile_ahead(lambda: models.fused(models.tokens))
    fused, eager, exact = (
        _layers_and_logits(model, models.tokens)
        for model in (models.fused, models.eager, models.exact)
    )
    for name in exact:
        check, _, case = name.partition(" ")
        outputs = fused[name], eager[name], exact[name]
        yield compare(check, case, models.dtype, outputs, "model")


def _layers_and_logits(model: GPTModel | Twin, tokens: Tensor) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable:
        def hook(module: Any, inputs: Any, output: Tensor | ops.Stream) -> None:
            outputs[name] = output.x if isinstance(output, ops.Stream) else output

        return hook

    hooks = [
        block.register_forward_hook(keep(f"layer h.{layer}")) for layer, block in enumerate(model.h)
    ]
    logits = model(tokens)
    for hook in hooks:
        hook.remove()
    return {**outputs, f"logits {tokens.shape[1]} tokens": logits}


def check_cached(models: Models) -> Iterator[Result]:
    """Logits through the KV cache against one pass, held to eager's error over all positions.

    N - 1 tokens and then one, in a cache with room for N; and chunks. Compared are the positions
    that read what an earlier call has cached.
    """
    exact = models.exact(models.tokens)
    eager = metrics.measure(models.eager(models.tokens), exact)
    splits = [(n - 1, 1) for n in PREFIXES] + [*CHUNKS]
    for split in (s for s in splits if sum(s) <= models.tokens.shape[1]):
        tokens = models.tokens[:, : sum(split)]
        cache = models.fused.new_cache(1, tokens.shape[1])
        parts = [models.fused(part, cache) for part in tokens.split(split, dim=1) if part.numel()]
        cached = torch.cat(parts, dim=1)[:, split[0] :]
        once = models.fused(tokens).double()[:, split[0] :]
        gap = (cached - once).abs().max().item()
        errors, case = metrics.measure(cached, once), " + ".join(map(str, split))
        note = f"largest gap {gap:.1e}"
        yield judge("cached", case, models.dtype, errors, eager, "model", note=note)


def check_greedy(models: Models) -> Iterator[Result]:
    """Greedy tokens and their logits, each model decoding through its own KV cache.

    The twin chooses the tokens that all models read on: a fused model that makes the same choices
    on them would have written them by itself. In 16 bits it may choose another token if float64
    puts that one below the best by no more than the error that logits may have. Margins are
    those of float64, from its best token to the worse of the two chosen.
    """
    start = max(1, min(len(VERSE) // 4, models.tokens.shape[1] - GREEDY_STEPS))
    prompt = models.tokens[:, :start]
    steps = min(GREEDY_STEPS, models.fused.config.n_positions - start + 1)
    eager_logits, tokens = decode(models.eager, prompt, steps)
    logits, choices = decode(models.fused, prompt, steps, tokens)
    exact = models.exact(torch.cat([prompt, tokens[None, :-1]], dim=1))[0, start - 1 :]
    errors, eager = (metrics.measure(y, exact) for y in (logits, eager_logits))
    allowed = BOUNDS["model"].limits(eager).rms * metrics.rms(exact)
    tolerance = -1.0 if models.dtype == torch.float32 else allowed
    wrong, ties = _departures(choices, tokens, exact, tolerance)
    fault = f"other tokens than the twin's: {', '.join(wrong)}" if wrong else ""
    note = f"near-ties within {allowed:.1e}: {', '.join(ties)}" if ties else ""
    yield judge("greedy", f"{steps} tokens", models.dtype, errors, eager, "model", fault, note)


def _departures(
    choices: Tensor, tokens: Tensor, exact: Tensor, tolerance: float
) -> tuple[list[str], list[str]]:
    """Steps whose choice is not the twin's: those beyond the tolerance, and the near-ties."""
    wrong: list[str] = []
    ties: list[str] = []
    for step in (choices != tokens).nonzero().flatten().tolist():
        below = exact[step].max() - exact[step, [choices[step], tokens[step]]]  # ours, the twin's
        kind = ties if below[0] <= tolerance else wrong
        kind.append(f"step {step} (margin {below.max().item():.1e})")
    return wrong, ties


def decode(
    model: GPTModel | Twin, prompt: Tensor, steps: int, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (steps, V) and greedy choices (steps,) after a prompt (1, T).

    The model reads on what it chose, or `tokens` (steps,) if given.
    """
    cache = model.new_cache(1, prompt.shape[1] + steps - 1)
    logits = [model(prompt, cache, last_only=True)[0, 0]]
    for step in range(steps - 1):
        token = logits[-1].argmax() if tokens is None else tokens[step]
        logits.append(model(token.view(1, 1), cache)[0, 0])
    stacked = torch.stack(logits)
    return stacked, stacked.argmax(-1)


MODEL_CHECKS = {"forward": check_forward, "cached": check_cached, "greedy": check_greedy}
CHECKS = (*OPERATIONS, *MODEL_CHECKS)


def run(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    folder: Path = DEMO_FOLDER,
    checks: Sequence[str] = CHECKS,
) -> Iterator[Result]:
    """Run `checks` in each dtype on a device, with the model of `folder`; float32 is never TF32.

    Raises:
        UserError: `folder` holds no model that can be read, or a compiler is missing.
    """
    config = checkpoint.load_config(folder)
    weights = checkpoint.load_weights(folder, config)
    model_checks = [MODEL_CHECKS[name] for name in checks if name in MODEL_CHECKS]
    tasks: list[Task] = []
    for dtype in dtypes:
        tasks += _operation_tasks(checks, device, dtype)
        tasks.append(partial(_check_model, model_checks, config, weights, device, dtype))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield from _in_threads(tasks)
    finally:
        torch.set_float32_matmul_precision(precision)


def _operation_tasks(
    checks: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Iterator[Task]:
    for name in (name for name in checks if name in OPERATIONS):
        check, everywhere, on_cuda = OPERATIONS[name]
        for shape in (*everywhere, *on_cuda) if device.type == "cuda" else everywhere:
            yield partial(check, shape, device, dtype)


def _check_model(
    checks: Sequence[Callable[[Models], Iterator[Result]]],
    config: GPTConfig,
    weights: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Result]:
    models = load_models(config, weights, device, dtype)
    for check in checks:
        yield from check(models)


def _in_threads(tasks: Sequence[Task]) -> Iterator[Result]:
    """Results of the tasks in their order. Threads overlap the compilers, each its own process."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for results in pool.map(lambda task: list(task()), tasks):
            yield from results
    finally:
        pool.shutdown(cancel_futures=True)
