"""What TileLang makes of a kernel: the instructions it chose and the resources they take.

A case is a kernel with the static sizes of a workload and the schedule that a launcher would take:
what runs. It is lowered to source without a GPU, and the source is read. Counts are of places in
the text: one in a loop counts once. `assembly.py` asks nvcc for what only the machine code shows.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from minifused import workloads
from minifused.config import PRESETS
from minifused.errors import UserError
from minifused.kernels import (
    append_kv,
    buckets,
    flash_attention_sm90,
    gemm_sm90,
    gemv,
    row_softmax,
    schedule,
    swap_gemm,
)
from minifused.kernels.append_kv import append_kv_kernel
from minifused.kernels.build import dtype_name, lower_program, tile_for
from minifused.kernels.decode_attention import decode_attention_kernel
from minifused.kernels.decode_attention_split import decode_attention_split_kernel
from minifused.kernels.flash_attention import flash_attention_kernel
from minifused.kernels.gemm import gemm_kernel
from minifused.kernels.gemm_sm90_kernel import gemm_sm90_kernel
from minifused.kernels.gemm_sm90_rule import ring_gemm_schedule
from minifused.kernels.layer_norm import layer_norm_kernel, layer_norm_schedule
from minifused.kernels.limits import ITEM_BYTES, shared_memory_limit
from minifused.kernels.print_tile import COLUMNS, print_tile
from minifused.kernels.row_softmax import row_softmax_kernel, row_softmax_schedule
from minifused.kernels.row_softmax_pieces import piece_sums_kernel, piece_values_kernel
from minifused.kernels.row_softmax_split import MAX_SPLIT, SPLIT_ROWS, split_schedule
from minifused.kernels.skinny_gemm import skinny_gemm_kernel
from minifused.kernels.tile import CPU, Tile
from minifused.ops import MAX_HEAD_DIM, MAX_SKINNY_ROWS
from minifused.workloads import (
    AppendWorkload,
    AttentionWorkload,
    DecodeWorkload,
    LayerNormWorkload,
    LinearWorkload,
    SoftmaxWorkload,
    VectorAddWorkload,
    Workload,
    layer_linears,
)

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120", "c")
DTYPES = ("bfloat16", "float16", "float32")
CHOICES = ("causal", "packed")  # sizes that are 0 for no and 1 for yes
EPS = 1e-5

Facts = dict[str, int | None]
# A builder, its static arguments and their schedule, of (tile, dtype, workload).
Recipe = Callable[[Tile, str, Any], tuple[Callable, tuple, Any]]


@dataclass(frozen=True)
class Kernel:
    """A workload that stands for it, the fields of that one may set, and how both become code."""

    workload: Workload
    sizes: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True)
class Case:
    """A kernel for one machine, with all that is static."""

    kernel: str
    tile: Tile
    dtype: str
    sizes: Mapping[str, int]
    builder: Callable
    static: tuple
    schedule: Any
    workload: Workload | None = None  # what it was made from, if it was

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "kernel": self.kernel,
            "arch": self.tile.arch or "c",
            "dtype": self.dtype,
            "shape": dict(self.sizes),
            "schedule": asdict(self.schedule),
        }


@dataclass(frozen=True)
class Lowered:
    """The whole generated source, the kernel's own part of it, and its dynamic shared memory."""

    source: str
    body: str
    shared_bytes: int


# Which kernel runs

BY_WORKLOAD: dict[type, str] = {
    AppendWorkload: "append_kv",
    LayerNormWorkload: "layer_norm",
    VectorAddWorkload: "vector_add",
}
LAST_OF_ITS_OPERATION = {"piece_sums": "piece_values"}  # of several launches
OWN_FORM = {  # an architecture's, of the same signature
    "flash_attention": "flash_attention_sm90",
    "gemm": "gemm_sm90",
}


def kernel_of(tile: Tile, dtype: str, w: Workload) -> str:
    """The kernel that `ops` launches for a workload; of several, the one that gives the result."""
    if isinstance(w, LinearWorkload):
        return _kernel_of_linear(tile, dtype, w)
    if isinstance(w, AttentionWorkload):
        is_own = flash_attention_sm90.takes(tile, w.head_dim, dtype)
        return "flash_attention_sm90" if is_own else "flash_attention"
    if isinstance(w, DecodeWorkload):
        return "decode_attention_split" if tile.has_tensor_core(dtype) else "decode_attention"
    if isinstance(w, SoftmaxWorkload):
        is_wide = row_softmax.MAX_COLUMNS_IN_REGISTERS < (w.valid or w.n) <= MAX_SPLIT
        return "piece_values" if _has_few_rows(tile, w) and is_wide else "row_softmax"
    return BY_WORKLOAD[type(w)]


def form_of(kernel: str, tile: Tile, dtype: str, w: Workload) -> str:
    """A kernel's name, or that of the architecture's own form of it if that is what runs."""
    runs = kernel_of(tile, dtype, w)
    return runs if runs == OWN_FORM.get(kernel) else kernel


def _kernel_of_linear(tile: Tile, dtype: str, w: LinearWorkload) -> str:
    if tile.has_tensor_core(dtype) and w.k % 8 == 0:  # 16 bits, in rows of whole vectors
        if w.m == 1 and w.k <= gemv.MAX_COLUMNS:
            return "gemv"
        if 2 <= w.m <= swap_gemm.MAX_ROWS and tile.capability >= 80:
            return "swap_gemm"
        if gemm_sm90.fits(tile.capability, ITEM_BYTES[dtype], w.m, w.n, w.k):
            return "gemm_sm90"
    most = MAX_SKINNY_ROWS["cuda" if tile.is_cuda else "cpu"]
    return "skinny_gemm" if w.m <= most else "gemm"


def _has_few_rows(tile: Tile, w: SoftmaxWorkload) -> bool:
    return tile.is_cuda and w.m <= SPLIT_ROWS[-1]


# From a workload to a kernel


def _linear(
    builder: Callable, choose: Callable, tile: Tile, dtype: str, w: LinearWorkload
) -> tuple[Callable, tuple, Any]:
    out_dtype = dtype if w.out_dtype is None else dtype_name(w.out_dtype)
    static = (w.n, w.k, dtype, out_dtype, w.activation, w.bias, w.residual)
    return builder, static, choose(tile, w.m, w.n, w.k, dtype)


def _swap(tile: Tile, dtype: str, w: LinearWorkload) -> tuple[Callable, tuple, Any]:
    """As the model calls it."""
    ahead = True  # no kernel writes the weights
    choose = schedule.swap_schedule
    builder, static, chosen = _linear(swap_gemm.swap_gemm_kernel, choose, tile, dtype, w)
    return builder, (*static, ahead), chosen


def _ring_gemm(tile: Tile, dtype: str, w: LinearWorkload) -> tuple[Callable, tuple, Any]:
    """As the model calls it."""
    ahead = True  # no kernel writes the weights
    builder, static, chosen = _linear(gemm_sm90_kernel, ring_gemm_schedule, tile, dtype, w)
    return builder, (*static, ahead), chosen


def _gemv(tile: Tile, dtype: str, w: LinearWorkload) -> tuple[Callable, tuple, Any]:
    """As the model calls it, with a row that needs no preparation."""
    eps, parts, cached, ahead = None, None, False, True
    builder, static, chosen = _linear(gemv.gemv_kernel, _gemv_schedule, tile, dtype, w)
    return builder, (*static, eps, parts, cached, ahead), chosen


def _gemv_schedule(tile: Tile, m: int, n: int, k: int, dtype: str) -> schedule.GemvSchedule:
    return schedule.gemv_schedule(tile, n, k, dtype, normed=False)


def _attention(
    builder: Callable, choose: Callable, tile: Tile, dtype: str, w: AttentionWorkload
) -> tuple[Callable, tuple, Any]:
    ragged = w.q_lengths is not None or w.kv_lengths is not None
    static = (w.heads, w.head_dim, w.packed, w.causal, ragged, w.head_dim**-0.5, dtype)
    keys = buckets.ceiling(w.k_len, buckets.KEYS)
    return builder, static, choose(tile, w.head_dim, dtype, w.causal, keys)


def _decode(tile: Tile, dtype: str, w: DecodeWorkload) -> tuple[Callable, tuple, Any]:
    static = (w.heads, w.head_dim, w.packed, w.head_dim**-0.5, dtype)
    blocks = len(w.lengths) * w.heads
    chosen = schedule.decode_attention_schedule(tile, w.head_dim, dtype, blocks)
    return decode_attention_kernel, static, chosen


def _decode_split(tile: Tile, dtype: str, w: DecodeWorkload) -> tuple[Callable, tuple, Any]:
    chosen = schedule.split_schedule(len(w.lengths) * w.heads, w.capacity)
    static = (w.heads, w.head_dim, w.packed, w.head_dim**-0.5, dtype, chosen.splits > 1, True)
    return decode_attention_split_kernel, static, chosen


def _append(tile: Tile, dtype: str, w: AppendWorkload) -> tuple[Callable, tuple, Any]:
    width = w.heads * w.head_dim
    chosen = schedule.row_schedule(tile, width, append_kv.MAX_COLUMNS_A_BLOCK)
    return append_kv_kernel, (width, w.packed, dtype), chosen


def _softmax(tile: Tile, dtype: str, w: SoftmaxWorkload) -> tuple[Callable, tuple, Any]:
    chosen = row_softmax_schedule(tile, w.m, w.n, dtype)
    return row_softmax_kernel, (w.n, w.valid or w.n, dtype, dtype), chosen


def _softmax_pieces(
    builder: Callable, options: tuple, tile: Tile, dtype: str, w: SoftmaxWorkload
) -> tuple[Callable, tuple, Any]:
    rows = buckets.ceiling(w.m, row_softmax.GPU_ROWS)
    static = (w.n, w.valid or w.n, dtype, dtype, *options)
    return builder, static, split_schedule(rows, w.n, dtype)


def _layer_norm(tile: Tile, dtype: str, w: LayerNormWorkload) -> tuple[Callable, tuple, Any]:
    x_dtype = dtype if w.x_dtype is None else dtype_name(w.x_dtype)
    chosen = layer_norm_schedule(tile, w.m, w.n, dtype)
    return layer_norm_kernel, (w.n, EPS, x_dtype, dtype), chosen


def _mlp_in(rows: int) -> LinearWorkload:
    """GPT-2's layer with bias and GELU."""
    return next(w for w in layer_linears(PRESETS["gpt2"], rows) if w.name == "mlp.c_fc")


KERNELS: dict[str, Kernel] = {
    "gemm": Kernel(
        _mlp_in(1024), ("m", "n", "k"), partial(_linear, gemm_kernel, schedule.gemm_schedule)
    ),
    "gemm_sm90": Kernel(_mlp_in(1024), ("m", "n", "k"), _ring_gemm),
    "skinny_gemm": Kernel(
        _mlp_in(1),
        ("m", "n", "k"),
        partial(_linear, skinny_gemm_kernel, schedule.skinny_schedule),
    ),
    "swap_gemm": Kernel(_mlp_in(16), ("m", "n", "k"), _swap),
    "gemv": Kernel(_mlp_in(1), ("n", "k"), _gemv),
    "flash_attention": Kernel(
        workloads.GPT2_ATTENTION[0],
        ("heads", "head_dim", "causal", "packed"),
        partial(_attention, flash_attention_kernel, schedule.attention_schedule),
    ),
    "flash_attention_sm90": Kernel(
        workloads.GPT2_ATTENTION[0],
        ("heads", "head_dim", "causal", "packed"),
        partial(
            _attention, flash_attention_sm90.flash_attention_sm90_kernel, schedule.flash_schedule
        ),
    ),
    "decode_attention": Kernel(workloads.GPT2_DECODE[0], ("heads", "head_dim", "packed"), _decode),
    "decode_attention_split": Kernel(
        workloads.GPT2_DECODE[0], ("heads", "head_dim", "packed"), _decode_split
    ),
    "append_kv": Kernel(workloads.GPT2_APPEND[0], ("heads", "head_dim", "packed"), _append),
    "row_softmax": Kernel(
        replace(workloads.GPT2_SOFTMAX[0], m=1024), ("m", "n", "valid"), _softmax
    ),
    "piece_sums": Kernel(
        workloads.GPT2_SOFTMAX[0],
        ("m", "n", "valid"),
        partial(_softmax_pieces, piece_sums_kernel, ()),
    ),
    "piece_values": Kernel(
        workloads.GPT2_SOFTMAX[0],
        ("m", "n", "valid"),
        partial(_softmax_pieces, piece_values_kernel, (False,)),
    ),
    "layer_norm": Kernel(workloads.GPT2_LAYER_NORM[0], ("n",), _layer_norm),
}


# Cases


def own_arch() -> str:
    """This machine's GPU, or c."""
    return tile_for(torch.device("cuda")).arch if torch.cuda.is_available() else "c"


def default_arch() -> str:
    """This machine's GPU, or sm_90a."""
    arch = own_arch()
    return arch if arch in ARCHS and arch != "c" else "sm_90a"


def make_case(
    kernel: str,
    arch: str,
    dtype: str | None = None,
    shape: str = "",
    schedule_fields: str = "",
) -> Case:
    """The case of these names; raises UserError for values that make none.

    Args:
        kernel: one of KERNELS, or what runs in its place (`form_of`). arch: one of ARCHS.
        dtype: one of DTYPES; None for bfloat16 where the machine has it and `ops` gives it to the
            kernel, else float32.
        shape: "m=64,n=768": sizes other than those of the kernel's workload.
        schedule_fields: "block_m=64": fields other than those that the rules give.
    """
    entry = KERNELS[kernel]
    tile = CPU if arch == "c" else Tile(arch)
    if not tile.is_cuda and dtype not in (None, "float32"):
        raise UserError(f"--dtype {dtype}: kernels for c are float32; leave it out or pass float32")
    changes = _parse("--shape", shape, entry.sizes)
    if "n" in changes and "valid" in entry.sizes:
        changes.setdefault("valid", None)  # the default's is of the default's n
    values = {name: getattr(entry.workload, name) for name in entry.sizes} | changes
    sizes = {name: int(value) for name, value in values.items() if value is not None}
    _check_sizes(kernel, tile, sizes)
    changes |= {name: bool(changes[name]) for name in CHOICES if name in changes}
    workload = replace(entry.workload, **changes)
    dtype = _checked_dtype(kernel, tile, dtype, workload)
    kernel = form_of(kernel, tile, dtype, workload)
    builder, static, chosen = KERNELS[kernel].recipe(tile, dtype, workload)
    names = [field.name for field in fields(chosen)]
    changed = _parse("--diff-schedule", schedule_fields, names)
    kinds = {name: type(getattr(chosen, name)) for name in changed}  # a switch is 0 or 1
    chosen = replace(chosen, **{name: kinds[name](value) for name, value in changed.items()})
    return Case(kernel, tile, dtype, sizes, builder, static, chosen, workload)


def _parse(flag: str, text: str, names: Collection[str]) -> dict[str, Any]:
    """The numbers of "name=1,other=2"."""
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in names or not value.isdecimal():
            raise UserError(
                f"{flag} {part!r}: expected NAME=NUMBER with a name of {', '.join(names)}"
            )
        values[name] = int(value)
    return values


def _check_sizes(kernel: str, tile: Tile, sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        most = {"head_dim": MAX_HEAD_DIM, "valid": sizes.get("n"), **dict.fromkeys(CHOICES, 1)}
        least, limit = int(name not in CHOICES), most.get(name)
        if value < least or (limit is not None and value > limit):
            bounds = f"at least {least}" if limit is None else f"{least} to {limit}"
            raise UserError(f"--shape {name}={value}: {kernel} takes {bounds}")


def _checked_dtype(kernel: str, tile: Tile, dtype: str | None, workload: Workload) -> str:
    """The dtype meant, if `ops` gives the workload to this kernel: what is shown is what runs."""
    usual = ("bfloat16", "float32") if tile.capability >= 80 else ("float32",)
    others = {}
    for choice in usual if dtype is None else (dtype,):
        others[choice] = kernel_of(tile, choice, workload)
        own = form_of(kernel, tile, choice, workload)
        if others[choice] == LAST_OF_ITS_OPERATION.get(kernel, own):
            return choice
    said = ", ".join(f"in {choice} to {other}" for choice, other in others.items())
    raise UserError(f"{kernel} does not get this shape on {tile.arch or 'c'}: it goes {said}")


# Lowering


def lower(case: Case) -> Lowered:
    """Generate the source of a case; needs neither a GPU nor a compiler.

    Raises UserError where TileLang cannot.
    """
    try:
        # What TileLang says of a failure goes to stdout, which is the table's.
        with contextlib.redirect_stdout(sys.stderr):
            artifact = lower_program(case.builder, case.tile, *case.static, case.schedule)
    except Exception as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason"]
        reason = next((line for line in said if re.search("Check failed|conflict", line)), said[-1])
        raise UserError(
            f"{case.kernel} does not lower for {case.tile.arch or 'c'} in {case.dtype} "
            f"with {case.schedule}:\n{reason[:300]}"
        ) from error
    attributes = [f.attrs for f in artifact.device_mod.functions.values() if f.attrs]
    shared = [int(a["dyn_shared_memory_buf"]) for a in attributes if "dyn_shared_memory_buf" in a]
    source = artifact.kernel_source
    start = source.rfind("__launch_bounds__")  # the first one is the declaration's
    return Lowered(source, source[max(start, 0) :], max(shared, default=0))


# Reading the source

INSTRUCTIONS = {
    "mma.sync": r"\bmma_sync<",
    "wgmma": r"\bwgmma_[rs]s<",
    "cp.async": r"\bcp_async_gs(?:_conditional)?<",
    "TMA loads": r"\btma_load(?:_\w+)?[<(]",
    "TMA stores": r"\btma_store[<(]",
    "ldmatrix": r"\bptx_ldmatrix_",
    "stmatrix": r"\bptx_stmatrix_",
    "mbarrier waits": r"\b\w+\[[^;]*\.wait\(",
    "mbarrier arrivals": r"\b\w+\[[^;]*\.arrive\w*\(",
    "named barriers": r"\b__sync_thread_partial\(|\bbar_sync\b",
    "__syncthreads": r"\b__syncthreads\(",
    "reductions over threads": r"\bAllReduce<",
}
VECTOR_BYTES = {
    "uint1": 4, "float1": 4, "uint2": 8, "float2": 8, "uint4": 16, "float4": 16, "ulonglong4": 32,
}  # fmt: skip
ELEMENT_BYTES = {"float": 4, "int": 4, "half_t": 2, "bfloat16_t": 2}


def source_facts(case: Case, lowered: Lowered) -> Facts:
    """The rows that the source gives; None for what a CPU has none of."""
    body = lowered.body
    cuda = case.tile.is_cuda
    counts = {name: len(re.findall(text, body)) for name, text in INSTRUCTIONS.items()}
    bounds = re.match(r"__launch_bounds__\((\d+)", body)
    return {
        **counts,
        "widest global access, bytes": _widest_access(body) if cuda else None,
        "threads a block": int(bounds[1]) if bounds else 1,
        "threads of the schedule": case.schedule.num_threads,
        "dynamic shared memory, bytes": lowered.shared_bytes,
        "its limit, bytes": shared_memory_limit(case.tile) if cuda else None,
    }


def _widest_access(body: str) -> int | None:
    """Of the accesses that threads make themselves; None if all global memory goes through TMA."""
    signature = body[: body.index("{")]
    pointers = dict(
        (name, kind)
        for kind, name in re.findall(r"(\w+)\s*\*\s*(?:__restrict__\s+)?(\w+)", signature)
    )
    widths = [int(n) for n in re.findall(r"\bcp_async_gs(?:_conditional)?<(\d+)", body)]
    for name, kind in pointers.items():
        vectors = re.findall(rf"\*\((\w+)\s*\*\)\({name} \+", body)
        widths += [VECTOR_BYTES[vector] for vector in vectors if vector in VECTOR_BYTES]
        if re.search(rf"\b{name}\[", body):
            widths.append(ELEMENT_BYTES.get(kind, 0))
    return max(widths, default=None)


# A look from inside


def print_on_device() -> None:
    """Run the kernel of kernels/print_tile.py; what it prints comes on stdout."""
    if not torch.cuda.is_available():
        raise UserError(
            "--print needs an NVIDIA GPU, and PyTorch sees none: T.print does not build for the "
            "CPU's target, c"
        )
    x = torch.arange(COLUMNS, dtype=torch.float32, device="cuda").view(1, -1)
    print_tile(x, torch.empty_like(x))
    torch.cuda.synchronize()  # a device's printf comes no earlier
