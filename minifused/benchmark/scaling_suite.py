"""How time and memory grow: attention with its length, decoding with batch and context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from minifused.benchmark import clock
from minifused.benchmark.checks import Check
from minifused.benchmark.kernel_suite import KernelCase, Ready, Seconds
from minifused.benchmark.model_suite import ModelCase, Subject
from minifused.benchmark.records import OURS, Spread
from minifused.benchmark.rivals import Rivals, by_backend
from minifused.benchmark.suite import Case, Setting, Unavailable, allocated, peak_since
from minifused.parity import eager_attention
from minifused.workloads import AttentionWorkload

LENGTHS = tuple(512 << i for i in range(7))  # to 32768
BATCHES, BATCH_CONTEXT = (1, 4, 16, 64, 256), 512
CONTEXTS = (64, 128, 256, 512, 992)
NEW_TOKENS = 33  # (T(33) - T(1)) / 32 is the time of a token; of 1024 positions 992 are left
MAX_EXPLICIT_LENGTH = 16384  # its scores take 8 GiB there, each copy of them
MEMORY_SLACK_MIB = 1.0  # for what does not grow

Shape = dict[str, int | str | bool]


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, **lengths: object) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in so many words, causal; scores and weights are kept whole."""
    if q.shape[1] > MAX_EXPLICIT_LENGTH:
        raise Unavailable(f"memory grows quadratically: not run beyond {MAX_EXPLICIT_LENGTH}")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@dataclass(frozen=True)
class LengthCase(KernelCase):
    """Causal attention of one sequence: its time, and the memory it needs beside its inputs."""

    workload: AttentionWorkload
    suite: str = "scaling"

    @property
    def length(self) -> int:
        return self.workload.q_len

    @property
    def name(self) -> str:
        return f"attention of {self.length} positions"

    def rivals(self) -> Rivals:
        if self.device.type == "cuda":
            flash = by_backend(eager_attention, SDPBackend.FLASH_ATTENTION)
            return {"SDPA flash": flash, "torch eager": explicit_attention}
        return {"SDPA": eager_attention, "torch eager": explicit_attention}

    def shape(self, dtype: torch.dtype) -> Shape:
        return {"sweep": "length", "length": self.length, **super().shape(dtype)}

    def metrics(
        self, name: str, ready: Ready, seconds: Seconds, setting: Setting
    ) -> tuple[Mapping[str, Spread], Check]:
        time_us = Spread.of([1e6 * s for s in seconds])
        before = allocated(setting.device)
        ready.call()
        clock.synchronize(setting.device)
        peak = peak_since(before, setting.device)
        if peak is None:
            return {"time_us": time_us}, {}
        mib = peak / 2**20
        check: Check = {"memory_is_linear": self.is_linear(mib, setting)} if name == OURS else {}
        return {"time_us": time_us, "peak_memory_mib": Spread.exact(mib)}, check

    def is_linear(self, mib: float, setting: Setting) -> bool:
        """Whether our memory has grown no faster than the length, from the shortest measured."""
        peaks = {self.length: mib}
        for r in setting.journal.records:
            ours = r.shape.get("sweep") == "length" and r.contender == OURS
            same = r.dtype == setting.dtype_name and r.machine["name"] == setting.machine["name"]
            if ours and same and "peak_memory_mib" in r.metrics:
                peaks[int(r.shape["length"])] = r.metrics["peak_memory_mib"].median
        shortest = min(peaks)
        return mib <= 1.1 * self.length / shortest * peaks[shortest] + MEMORY_SLACK_MIB


@dataclass(frozen=True)
class DecodeCase(ModelCase):
    """Tokens behind prompts of random tokens, of a batch or a context that `sweep` names."""

    suite: str = "scaling"
    sweep: str = "batch"

    @property
    def name(self) -> str:
        sizes = [f"batch {self.batch}", f"context {self.prompt}"]
        first, second = sizes if self.sweep == "batch" else reversed(sizes)
        return f"{first}, {self.subject.name} at {second}"

    @property
    def shape(self) -> Shape:
        sizes = {"batch": self.batch, "context": self.prompt, "new_tokens": self.new_tokens}
        return {"sweep": self.sweep, "model": self.subject.name, **sizes}


def decode_cases(
    subject: Subject,
    contenders: Sequence[str],
    batches: Sequence[int],
    batch_context: int,
    contexts: Sequence[int],
) -> list[Case]:
    """Both sweeps of decoding: `batches` at one context, `contexts` of one prompt."""
    sizes = [("batch", batch, batch_context) for batch in batches]
    sizes += [("context", 1, context) for context in contexts]
    return [
        DecodeCase(subject, batch, context, NEW_TOKENS, contenders, sweep=sweep)
        for sweep, batch, context in sizes
    ]


def scaling_cases(
    device: torch.device, quick: bool, contenders: Sequence[str] = (OURS, "torch eager")
) -> list[Case]:
    """All sweeps; with `quick`, and on a CPU, they are short, and decode the demo model.

    `contenders` are those of decoding. One that compiles does so anew for each case.
    """
    small = quick or device.type != "cuda"
    lengths = [
        LengthCase("attention", AttentionWorkload("length", 1, n, n, 16, 64), device)
        for n in (LENGTHS[:3] if small else LENGTHS)
    ]
    if small:
        decoding = decode_cases(Subject.of("demo"), contenders, (1, 4, 16), 128, (64, 128, 223))
    else:
        decoding = decode_cases(Subject.of("gpt2"), contenders, BATCHES, BATCH_CONTEXT, CONTEXTS)
    return [*lengths, *decoding]
