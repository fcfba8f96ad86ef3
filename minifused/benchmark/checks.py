"""Is an output right? Judged on a sample of it that float64 can afford.

All of the reference would take longer than the benchmark, and more memory than the GPU has. The
sample holds the first and the last row, where tails are, and others evenly between them; of an
attention it holds all queries of two heads, of a very long one the last queries, which see most.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minifused import metrics, parity
from minifused.benchmark.suite import WrongResultError
from minifused.workloads import Inputs, Workload

Check = dict[str, float | int | str | bool | None]

# Which inputs have a row for each row of the output, and how many rows are looked at.
ROWS: dict[str, tuple[tuple[str, ...], int]] = {
    "linear": (("x", "residual"), 256),
    "softmax": (("x",), 256),
    "layer_norm": (("x",), 256),
    "vector_add": (("x", "y"), 1 << 20),
    "decode_attention": (("q", "k_cache", "v_cache", "lengths"), 8),
}
PAIRS = 1 << 26  # of queries and keys, a head; 512 MiB in float64


@dataclass(frozen=True)
class Sample:
    """The inputs of a part of the work, and where in the output that part lies."""

    inputs: Inputs
    take: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, op: str, inputs: Inputs) -> "Sample":
        """The part of `ops.<op>` on `inputs` to look at."""
        return sample_attention(inputs) if op == "attention" else sample_rows(op, inputs)


def sample_rows(op: str, inputs: Inputs) -> Sample:
    names, limit = ROWS[op]
    count, device = inputs[names[0]].shape[0], inputs[names[0]].device
    steps = torch.linspace(0, count - 1, min(count, limit), dtype=torch.float64)
    index = steps.round().long().to(device)
    picked = {name: inputs[name][index] for name in names if inputs.get(name) is not None}
    return Sample({**inputs, **picked}, lambda out: out[index])


def sample_attention(inputs: Inputs) -> Sample:
    q_len, k_len = inputs["q"].shape[1], inputs["k"].shape[1]
    queries = min(q_len, PAIRS // k_len)  # a mask that aligns bottom-right stays right for the last

    def take(x: Tensor) -> Tensor:
        """The first head of the first row and the last one of the last: (2, T, 1, D)."""
        return x[[0, -1], :, [0, -1]].unsqueeze(2)

    picked = {name: take(inputs[name]) for name in ("k", "v")}
    picked["q"] = take(inputs["q"])[:, -queries:]
    return Sample({**inputs, **picked}, lambda out: take(out)[:, -queries:])


@dataclass(frozen=True)
class Exam:
    """A sample of a workload with what eager PyTorch and float64 make of it."""

    op: str
    case: str
    dtype: torch.dtype
    take: Callable[[Tensor], Tensor]
    eager: Tensor
    reference: Tensor

    @classmethod
    def of(cls, op: str, workload: Workload, inputs: Inputs, dtype: torch.dtype) -> "Exam":
        eager, sample = getattr(parity, f"eager_{op}"), Sample.of(op, inputs)
        return cls(
            op, workload.case, dtype, sample.take,
            eager(**sample.inputs), eager(**parity.upcast(sample.inputs)),
        )  # fmt: skip

    def require(self, output: Tensor) -> Check:
        """The errors of our output. Raises WrongResultError if it is past its bound."""
        if output.isnan().any():
            raise WrongResultError(f"{self.op} {self.case}: NaN in the output")
        outputs = self.take(output), self.eager, self.reference
        if self.op == "softmax":
            results = list(parity.compare_softmax(self.case, self.dtype, outputs))
        else:
            results = [parity.compare(self.op, self.case, self.dtype, outputs)]
        for r in (r for r in results if not r.ok):
            raise WrongResultError(
                f"{r.check} {r.case}, {r.dtype}: RMS error {r.rms_error:.2e}, limit {r.bound:.2e}; "
                f"largest error {r.max_error:.2e}; past its bound: {r.note}"
            )
        first = results[0]
        return {
            "max_error": first.max_error,
            "rms_error": first.rms_error,
            "rms_bound": first.bound,
        }

    def measure(self, output: Tensor) -> Check:
        """The errors of a rival's output, which are told and not judged."""
        errors = metrics.measure(self.take(output), self.reference)
        return {"max_error": _finite(errors.max), "rms_error": _finite(errors.rms)}


def _finite(error: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return error if math.isfinite(error) else str(error)
