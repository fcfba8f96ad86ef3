"""Named shapes of each operation, the data that goes in, and what the work amounts to.

A workload's `inputs` are the keyword arguments of its function in `minifused.ops`. `flops` counts
multiplications, additions and the like of the mathematics; `bytes` counts each input read and each
output written once, which is the least that any kernel can move. Sets for parity are named for
the branch they take.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from minifused.config import PRESETS, GPTConfig

Inputs = dict[str, Any]

INTO_RESIDUAL: Inputs = {"residual": True, "out_dtype": torch.float32}


def normal(
    shape: tuple[int, ...],
    device: torch.device | str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Standard normal numbers, drawn in float32 on the generator's device and then moved."""
    return torch.randn(shape, generator=generator, device=generator.device).to(device, dtype)


def _int32(values: tuple[int, ...] | None, device: torch.device | str) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class LinearWorkload:
    """activation(x (m, k) @ weight (n, k)^T + bias) + residual; out_dtype None is the inputs'."""

    name: str
    m: int
    n: int
    k: int
    activation: str | None = None
    bias: bool = True
    residual: bool = False
    out_dtype: torch.dtype | None = None

    @property
    def case(self) -> str:
        return f"{self.name}, {self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def bytes(self, dtype: torch.dtype) -> int:
        read = self.m * self.k + self.n * self.k + self.n * self.bias
        out = self.m * self.n * (1 + self.residual)
        return read * dtype.itemsize + out * (self.out_dtype or dtype).itemsize

    def inputs(
        self, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
    ) -> Inputs:
        x, weight, bias = (
            normal(shape, device, dtype, generator)
            for shape in ((self.m, self.k), (self.n, self.k), (self.n,))
        )
        residual = normal((self.m, self.n), device, self.out_dtype or dtype, generator)
        return {
            "x": x,
            "weight": weight * self.k**-0.5,  # keeps the sums near 1, as trained weights do
            "bias": bias if self.bias else None,
            "activation": self.activation,
            "residual": residual if self.residual else None,
            "out_dtype": self.out_dtype,
        }


@dataclass(frozen=True)
class AttentionWorkload:
    """q (b, q_len, h, d) against keys and values (b, k_len, h, d), or packed as one QKV."""

    name: str
    batch: int
    q_len: int
    k_len: int
    heads: int
    head_dim: int
    causal: bool = True
    packed: bool = False
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None

    @property
    def case(self) -> str:
        lengths = f"{self.q_len}:{self.k_len}"
        return f"{self.name}, {self.batch}x{lengths}x{self.heads}x{self.head_dim}"

    @property
    def flops(self) -> int:
        pairs = sum(self._visible(*lengths) for lengths in zip(*self._lengths(), strict=True))
        return 4 * pairs * self.heads * self.head_dim

    def _lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many queries and keys of each batch row are valid."""
        q_lengths = self.q_lengths or (self.q_len,) * self.batch
        return q_lengths, self.kv_lengths or (self.k_len,) * self.batch

    def _visible(self, q_len: int, k_len: int) -> int:
        """Pairs of a query and a key that it sees."""
        if not self.causal:
            return q_len * k_len
        seeing = min(q_len, k_len)  # queries that see any key; the last one sees all
        return seeing * (2 * k_len - seeing + 1) // 2

    def bytes(self, dtype: torch.dtype) -> int:
        q_lengths, kv_lengths = self._lengths()
        rows = sum(q_lengths) + 2 * sum(kv_lengths) + self.batch * self.q_len
        return rows * self.heads * self.head_dim * dtype.itemsize

    def inputs(
        self, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
    ) -> Inputs:
        head = (self.heads, self.head_dim)
        inputs: Inputs = {
            "causal": self.causal,
            "q_lengths": _int32(self.q_lengths, device),
            "kv_lengths": _int32(self.kv_lengths, device),
        }
        if self.packed:
            shape = (self.batch, self.q_len, 3, *head)
            return {"q": normal(shape, device, dtype, generator), **inputs}
        for name, length in (("q", self.q_len), ("k", self.k_len), ("v", self.k_len)):
            inputs[name] = normal((self.batch, length, *head), device, dtype, generator)
        return inputs


@dataclass(frozen=True)
class DecodeWorkload:
    """One query a row against the first lengths[b] rows of a cache (b, capacity, h, d)."""

    name: str
    lengths: tuple[int, ...]
    capacity: int
    heads: int
    head_dim: int
    packed: bool = False

    @property
    def case(self) -> str:
        shape = (len(self.lengths), self.capacity, self.heads, self.head_dim)
        return f"{self.name}, {'x'.join(map(str, shape))}"

    @property
    def flops(self) -> int:
        return 4 * sum(self.lengths) * self.heads * self.head_dim

    def bytes(self, dtype: torch.dtype) -> int:
        rows = 2 * sum(self.lengths) + 2 * len(self.lengths)
        return rows * self.heads * self.head_dim * dtype.itemsize

    def inputs(
        self, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
    ) -> Inputs:
        """The cache rows behind each length are NaN: they are never to be read."""
        batch, head = len(self.lengths), (self.heads, self.head_dim)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        stale = torch.arange(self.capacity, device=device) >= lengths[:, None]  # (B, capacity)
        caches = [
            normal((batch, self.capacity, *head), device, dtype, generator).masked_fill_(
                stale[:, :, None, None], torch.nan
            )
            for _ in range(2)
        ]
        q = normal((batch, 1, *((3,) if self.packed else ()), *head), device, dtype, generator)
        return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "lengths": lengths}


@dataclass(frozen=True)
class AppendWorkload:
    """`length` new keys and values a row, into caches (b, capacity, h, d) from positions[b] on."""

    name: str
    positions: tuple[int, ...]
    length: int
    capacity: int
    heads: int
    head_dim: int
    packed: bool = False

    @property
    def case(self) -> str:
        shape = (len(self.positions), self.length, self.capacity, self.heads, self.head_dim)
        return f"{self.name}, {'x'.join(map(str, shape))}"

    @property
    def flops(self) -> int:
        return 0

    def bytes(self, dtype: torch.dtype) -> int:
        rows = sum(max(0, min(self.length, self.capacity - p)) for p in self.positions)
        return 4 * rows * self.heads * self.head_dim * dtype.itemsize

    def inputs(
        self, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
    ) -> Inputs:
        """The caches hold numbers already, which rows not written have to keep."""
        batch, head = len(self.positions), (self.heads, self.head_dim)
        cache = (batch, self.capacity, *head)
        new = (batch, self.length, *((3,) if self.packed else ()), *head)
        return {
            "k_cache": normal(cache, device, dtype, generator),
            "v_cache": normal(cache, device, dtype, generator),
            "k": normal(new, device, dtype, generator),
            "v": None if self.packed else normal(new, device, dtype, generator),
            "positions": _int32(self.positions, device),
        }


@dataclass(frozen=True)
class SoftmaxWorkload:
    """Softmax of x (m, n), normal numbers of deviation `std`, over the first `valid` columns."""

    name: str
    m: int
    n: int
    valid: int | None = None
    std: float = 3.0

    @property
    def case(self) -> str:
        return f"{self.name}, {self.m}x{self.n}"

    @property
    def flops(self) -> int:
        # maximum, difference, exponential, sum, quotient
        return 5 * self.m * (self.valid or self.n)

    def bytes(self, dtype: torch.dtype) -> int:
        return self.m * ((self.valid or self.n) + self.n) * dtype.itemsize

    def inputs(
        self, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
    ) -> Inputs:
        x = normal((self.m, self.n), device, dtype, generator) * self.std
        return {"x": x, "valid": self.valid}


@dataclass(frozen=True)
class LayerNormWorkload:
    """Layer norm of x (m, n), normal numbers around `mean`; x in `x_dtype`, None for weight's."""

    name: str
    m: int
    n: int
    mean: float = 1.0
    x_dtype: torch.dtype | None = torch.float32

    @property
    def case(self) -> str:
        return f"{self.name}, {self.m}x{self.n}"

    @property
    def flops(self) -> int:
        # sum, difference, square, sum of squares, and four to scale and shift
        return 8 * self.m * self.n

    def bytes(self, dtype: torch.dtype) -> int:
        x = self.m * self.n * (self.x_dtype or dtype).itemsize
        return x + (self.m * self.n + 2 * self.n) * dtype.itemsize

    def inputs(
        self, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
    ) -> Inputs:
        return {
            "x": normal((self.m, self.n), device, self.x_dtype or dtype, generator) + self.mean,
            "weight": normal((self.n,), device, dtype, generator),
            "bias": normal((self.n,), device, dtype, generator),
        }


@dataclass(frozen=True)
class VectorAddWorkload:
    """x (n) + y (n)."""

    name: str
    n: int

    @property
    def case(self) -> str:
        return f"{self.name}, {self.n}"

    @property
    def flops(self) -> int:
        return self.n

    def bytes(self, dtype: torch.dtype) -> int:
        return 3 * self.n * dtype.itemsize

    def inputs(
        self, device: torch.device | str, dtype: torch.dtype, generator: torch.Generator
    ) -> Inputs:
        return {name: normal((self.n,), device, dtype, generator) for name in ("x", "y")}


Workload = (
    LinearWorkload
    | AttentionWorkload
    | DecodeWorkload
    | AppendWorkload
    | SoftmaxWorkload
    | LayerNormWorkload
    | VectorAddWorkload
)


def layer_linears(config: GPTConfig, rows: int) -> tuple[LinearWorkload, ...]:
    """The linear layers of a model for `rows` tokens, the padded head last."""
    width, inner, vocab = config.n_embd, config.inner_dim, -(-config.vocab_size // 64) * 64
    return (
        LinearWorkload("attn.c_attn", rows, 3 * width, width),
        LinearWorkload("attn.c_proj", rows, width, width, **INTO_RESIDUAL),
        LinearWorkload("mlp.c_fc", rows, inner, width, config.activation),
        LinearWorkload("mlp.c_proj", rows, width, inner, **INTO_RESIDUAL),
        LinearWorkload("head", rows, vocab, width, bias=False, out_dtype=torch.float32),
    )


def decode_bytes(config: GPTConfig, batch: int, context: float, dtype: torch.dtype) -> float:
    """The least that a decoding step moves: all weights, and keys and values of `context`."""
    width, inner = config.n_embd, config.inner_dim
    linears = config.n_layer * width * (4 * width + 2 * inner)
    cached = 2 * config.n_layer * width * batch * context
    return (linears + config.vocab_size * width + cached) * dtype.itemsize


def prefill_flops(config: GPTConfig, batch: int, length: int) -> int:
    """Arithmetic of prompts (batch, length): linears, causal attention, one head a prompt."""
    width, inner = config.n_embd, config.inner_dim
    linears = 2 * length * config.n_layer * width * (4 * width + 2 * inner)
    attention = 4 * config.n_layer * width * length * (length + 1) // 2
    return batch * (linears + attention + 2 * config.vocab_size * width)


# Sets for parity. Row counts and lengths are free; another width, head or option is a compile.

LINEAR = (
    *(LinearWorkload("skinny rows", m, 200, 300, "gelu_tanh") for m in (1, 2, 3, 7, 16)),
    LinearWorkload("first gemm", 17, 200, 300, "gelu_tanh"),
    LinearWorkload("tails in M N K", 385, 200, 300, "gelu_tanh"),
    LinearWorkload("odd K", 33, 64, 301, "gelu"),
    LinearWorkload("one column", 33, 1, 64, "relu"),
    LinearWorkload("K of one", 33, 64, 1),
    LinearWorkload("into residual", 7, 64, 256, residual=True, out_dtype=torch.float32),
    LinearWorkload("into residual", 192, 64, 256, residual=True, out_dtype=torch.float32),
    LinearWorkload("head", 1, 320, 64, bias=False, out_dtype=torch.float32),
    LinearWorkload("head", 65, 320, 64, bias=False, out_dtype=torch.float32),
)
ATTENTION = (
    *(
        AttentionWorkload("packed", 2, length, length, 2, 64, packed=True)
        for length in (1, 17, 63, 64, 65, 129)
    ),
    AttentionWorkload("chunk", 2, 65, 129, 2, 64),
    AttentionWorkload("last query", 2, 1, 129, 2, 64),
    AttentionWorkload("more queries than keys", 2, 70, 5, 2, 64),
    AttentionWorkload("not causal", 2, 65, 129, 2, 64, causal=False),
    AttentionWorkload(
        "ragged", 4, 70, 129, 2, 64, q_lengths=(70, 1, 33, 0), kv_lengths=(129, 65, 20, 7)
    ),
    *(
        AttentionWorkload(f"head size of {head_dim}", 1, 65, 65, 2, head_dim, packed=True)
        for head_dim in (20, 33, 128, 256)
    ),
)
DECODE = (
    DecodeWorkload("packed", (1, 15, 16, 17, 0, 129), 130, 2, 64, packed=True),
    DecodeWorkload("full cache", (64, 64), 64, 2, 64, packed=True),
    DecodeWorkload("odd head size", (1, 65), 65, 2, 20),
)
APPEND = (
    AppendWorkload("one token", (0, 7, 15), 1, 16, 2, 64, packed=True),
    AppendWorkload("chunk past the end", (0, 7, 13), 5, 16, 2, 64, packed=True),
    AppendWorkload("odd head size", (0, 7, 15), 1, 16, 2, 20),
)
SOFTMAX = (
    SoftmaxWorkload("one column", 5, 1),
    SoftmaxWorkload("narrow", 70, 7),
    SoftmaxWorkload("odd", 70, 1000),
    SoftmaxWorkload("padded vocabulary", 5, 50304, valid=50257),
    SoftmaxWorkload("wide", 3, 131072),
    SoftmaxWorkload("wide and sharp", 3, 131072, std=30.0),
)
LAYER_NORM = (
    LayerNormWorkload("one column", 5, 1),
    LayerNormWorkload("tail", 70, 200),
    LayerNormWorkload("mean far from 0", 70, 200, mean=100.0),
    LayerNormWorkload("input in the output's dtype", 70, 200, x_dtype=None),
    LayerNormWorkload("in pieces", 3, 10000),
)
VECTOR_ADD = (
    VectorAddWorkload("one element", 1),
    VectorAddWorkload("no whole block", 1000),
    VectorAddWorkload("whole blocks and a tail", 100_000),
)

# GPT-2's own shapes, in parity on a GPU: prompts of 1024 tokens, and decoding.

_GPT2 = PRESETS["gpt2"]
_HEADS = (_GPT2.n_head, _GPT2.head_dim)
GPT2_LINEAR = tuple(w for rows in (1, 16, 1024) for w in layer_linears(_GPT2, rows))
GPT2_ATTENTION = (
    AttentionWorkload("gpt2 prompt", 2, 1024, 1024, *_HEADS, packed=True),
    AttentionWorkload("gpt2 chunk", 2, 128, 1024, *_HEADS, kv_lengths=(1024, 700)),
)
GPT2_DECODE = (DecodeWorkload("gpt2", (1, 512, 1023, 1024), 1024, *_HEADS, packed=True),)
GPT2_APPEND = (AppendWorkload("gpt2", (0, 512, 1023), 1, 1024, *_HEADS, packed=True),)
GPT2_SOFTMAX = (SoftmaxWorkload("gpt2 vocabulary", 64, 50304, valid=50257),)
GPT2_LAYER_NORM = (LayerNormWorkload("gpt2", 1024, _GPT2.n_embd),)
GPT2_VECTOR_ADD = (VectorAddWorkload("gpt2 residual", 1024 * _GPT2.n_embd),)

# What the benchmark times, by function of `ops`: the whole, and what a CPU does in milliseconds.


def _model_linears(model: str, rows: int) -> tuple[LinearWorkload, ...]:
    """The linear layers of a preset; without the head where it would fill gigabytes of logits."""
    linears = layer_linears(PRESETS[model], rows)
    chosen = linears if rows <= 1024 else linears[:-1]
    return tuple(replace(w, name=f"{model} {w.name}") for w in chosen)


def _self_attention(batch: int, heads: int, head_dim: int, length: int) -> list[AttentionWorkload]:
    return [
        AttentionWorkload(name, batch, length, length, heads, head_dim, causal)
        for name, causal in (("causal", True), ("not causal", False))
    ]


def _decoding(model: str, batch: int, context: int) -> DecodeWorkload:
    c = PRESETS[model]
    lengths = (context,) * batch
    return DecodeWorkload(f"{model}, context {context}", lengths, 1024, c.n_head, c.head_dim)


_MODELS = ("gpt2", "gpt2-xl")

BENCHMARK: dict[str, tuple[Workload, ...]] = {
    "linear": (
        *(LinearWorkload("square", n, n, n, bias=False) for n in (2048, 4096, 8192)),
        *chain.from_iterable(
            _model_linears(model, rows) for rows in (8192, 1024, 8, 1) for model in _MODELS
        ),
    ),
    "attention": tuple(
        workload
        for batch, heads, head_dim, length in (
            *((8, 12, 64, 512), (8, 12, 64, 1024), (4, 25, 64, 1024)),
            *((4, 16, 64, 2048), (4, 16, 64, 4096), (2, 16, 64, 8192)),
            *((8, 16, 128, 512), (8, 16, 128, 1024)),
            *((4, 16, 128, 2048), (4, 16, 128, 4096), (2, 16, 128, 8192)),
        )
        for workload in _self_attention(batch, heads, head_dim, length)
    ),
    "decode_attention": tuple(
        _decoding(model, batch, context)
        for model in _MODELS
        for batch in (1, 8, 32)
        for context in (640, 1024)
    ),
    "softmax": (
        *(SoftmaxWorkload("rows", 4096, n) for n in (1000, 4096, 50257, 50304, 131072)),
        *(SoftmaxWorkload("rows", m, 50257) for m in (64, 1)),
    ),
    "layer_norm": tuple(
        LayerNormWorkload(model, 8192, PRESETS[model].n_embd, x_dtype=None) for model in _MODELS
    ),
    "vector_add": tuple(VectorAddWorkload("vectors", n) for n in (1 << 26, 1 << 20)),
}
BENCHMARK_QUICK: dict[str, tuple[Workload, ...]] = {
    "linear": (
        LinearWorkload("square", 512, 512, 512, bias=False),
        LinearWorkload("mlp.c_fc", 128, 768, 192, "gelu_tanh"),
        LinearWorkload("mlp.c_proj", 128, 192, 768, **INTO_RESIDUAL),
        LinearWorkload("head", 1, 50304, 192, bias=False, out_dtype=torch.float32),
    ),
    "attention": tuple(_self_attention(1, 4, 64, 256)),
    "decode_attention": (
        DecodeWorkload("context 640", (640,) * 8, 1024, _GPT2.n_head, _GPT2.head_dim),
    ),
    "softmax": (SoftmaxWorkload("rows", 64, 4096), SoftmaxWorkload("rows", 8, 50257)),
    "layer_norm": (LayerNormWorkload("rows", 512, 768, x_dtype=None),),
    "vector_add": (VectorAddWorkload("vectors", 1 << 23),),
}
