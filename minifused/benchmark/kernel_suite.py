"""Single operations, by our kernels and by the best that PyTorch has for the same work.

Ours is checked against float64 before anything is timed. Then all take turns: on a GPU each as a
replay of a CUDA graph, so that no one's time holds what its launches cost the host, and behind a
flush of the L2 cache. With an operation that memory bounds, a copy of as many bytes takes turns
too: no rival, as it computes nothing, but what any kernel may at best come near.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from minifused import ops
from minifused.benchmark import clock
from minifused.benchmark.checks import Check, Exam
from minifused.benchmark.clock import Work
from minifused.benchmark.records import COPY, OURS, Record, Spread
from minifused.benchmark.rivals import Rivals, rivals_of
from minifused.benchmark.suite import Case, Setting, Unavailable, make_record, release_memory
from minifused.inspection import kernel_of
from minifused.kernels.build import dtype_name, tile_for
from minifused.tuning.tunables import RECIPES
from minifused.workloads import (
    BENCHMARK,
    BENCHMARK_QUICK,
    DecodeWorkload,
    Inputs,
    LinearWorkload,
    Workload,
)

WARM_CALLS = 3
OPS = tuple(BENCHMARK)
MEMORY_BOUND = ("softmax", "layer_norm", "vector_add")

Seconds = Sequence[float]


@dataclass(frozen=True)
class Ready:
    """A contender that was checked and warmed up.

    Attributes:
        call: the operation as a user calls it, output allocated; for its memory.
        work: what is timed.
    """

    call: Callable[[], Tensor]
    work: Work
    check: Check


@dataclass(frozen=True)
class KernelCase:
    """`ops.<op>` on one workload, and its rivals on the same inputs."""

    op: str
    workload: Workload
    device: torch.device
    suite: str = "kernels"

    @property
    def name(self) -> str:
        return self.workload.case

    @property
    def contenders(self) -> Sequence[str]:
        return (OURS, *self.rivals(), *self.limits())

    def limits(self) -> Sequence[str]:
        """What takes turns and is no rival."""
        return (COPY,) if self.op in MEMORY_BOUND else ()

    def rivals(self) -> Rivals:
        return rivals_of(self.op, self.workload, self.device)

    def shape(self, dtype: torch.dtype) -> dict[str, int | str | bool]:
        """The op, its work, and the sizes of the workload."""
        work = {"flops": self.workload.flops, "bytes": self.workload.bytes(dtype)}
        return {"op": op_label(self.op, self.workload), **work, **dimensions(self.workload)}

    def run(self, setting: Setting) -> Iterator[Record]:
        """Check and time all contenders; see `suite.Case`."""
        ready: dict[str, Ready] = {}
        yield from self._prepare(ready, setting)
        yield from self._time(ready, setting)
        ready.clear()
        release_memory()

    def _prepare(self, ready: dict[str, Ready], setting: Setting) -> Iterator[Record]:
        """Fill `ready`, ours first; yields records of the rivals that are not there or fail."""
        generator = torch.Generator(setting.device).manual_seed(0)
        inputs = self.workload.inputs(setting.device, setting.dtype, generator)
        exam = Exam.of(self.op, self.workload, inputs, setting.dtype)
        ready[OURS] = prepare_ours(self.op, inputs, exam, setting.device)
        for name, call in self._others(inputs, setting).items():
            try:
                check = {} if name in self.limits() else exam.measure(call())
                ready[name] = warm_up(call, check, setting.device)
            except Exception as error:  # a rival's failure is a finding, not the end of the run
                skipped, shape = isinstance(error, Unavailable), self.shape(setting.dtype)
                yield make_record(setting, self, name, shape, {}, {}, _reason(error), skipped)

    def _others(self, inputs: Inputs, setting: Setting) -> dict[str, Callable[[], Tensor]]:
        """The calls of the rivals and limits, by name."""
        calls = {name: partial(rival, **inputs) for name, rival in self.rivals().items()}
        moved = self.workload.bytes(setting.dtype)
        return {**calls, **{name: clock.copy_of(moved, setting.device) for name in self.limits()}}

    def _time(self, ready: Mapping[str, Ready], setting: Setting) -> Iterator[Record]:
        works = {name: r.work for name, r in ready.items()}
        seconds = clock.in_turns(clock.Stopwatch(setting.device), works, setting.rounds)
        chosen = schedule_of(self.workload, setting.device, setting.dtype)
        for name, r in ready.items():
            measured, check = self.metrics(name, r, seconds[name], setting)
            yield make_record(
                setting, self, name, self.shape(setting.dtype), measured, {**r.check, **check},
                schedule=chosen if name == OURS else None,
            )  # fmt: skip

    def metrics(
        self, name: str, ready: Ready, seconds: Seconds, setting: Setting
    ) -> tuple[Mapping[str, Spread], Check]:
        """What is told of a contender's times, and what is added to its check."""
        flops, moved = self.workload.flops, self.workload.bytes(setting.dtype)
        floor = max(flops / setting.matmul_flops_per_s, moved / setting.copy_bytes_per_s)
        measured = {
            "time_us": Spread.of([1e6 * s for s in seconds]),
            "gb_per_s": Spread.of([moved / s / 1e9 for s in seconds]),
        }
        if name != COPY:
            measured["tflops"] = Spread.of([flops / s / 1e12 for s in seconds])
            measured["roofline_share"] = Spread.of([floor / s for s in seconds])
        return measured, {}


def kernel_cases(device: torch.device, quick: bool, ops: Sequence[str] | None) -> list[Case]:
    """A case for each workload of `ops`, functions of `minifused.ops`; None for all of `OPS`.

    With `quick`, and on a CPU, they are few and small.
    """
    sets = BENCHMARK_QUICK if quick or device.type != "cuda" else BENCHMARK
    return [KernelCase(op, workload, device) for op in ops or OPS for workload in sets[op]]


def prepare_ours(op: str, inputs: Inputs, exam: Exam, device: torch.device) -> Ready:
    """Our operation. Raises WrongResultError if it is past its bound, in NaN-filled memory.

    It is timed as its rivals are: as a user calls it, its output allocated each time.
    """
    call = partial(getattr(ops, op), **inputs)
    check = exam.require(call(out=torch.full_like(call(), torch.nan)))
    return warm_up(call, check, device)


def warm_up(call: Callable[[], Tensor], check: Check, device: torch.device) -> Ready:
    """Make ready for timing, on a GPU as a CUDA graph if the call can be captured."""
    for _ in range(WARM_CALLS):
        call()
    if device.type != "cuda":
        return Ready(call, call, check)
    clock.synchronize(device)
    replay = capture(call)
    return Ready(call, replay or call, {**check, "captured": replay is not None})


def capture(work: Work) -> Work | None:
    """The replay of a CUDA graph of the work; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        # a capture that fails leaves its own stream the current one; this puts that right
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return None
    graph.replay()  # the first one uploads the graph too
    return graph.replay


def op_label(op: str, workload: Workload) -> str:
    """The op, and what else its kernel does."""
    if isinstance(workload, LinearWorkload) and workload.residual:
        return "linear+residual"
    if isinstance(workload, LinearWorkload) and workload.activation:
        return "linear+gelu"
    return op


def dimensions(workload: Workload) -> dict[str, int | str | bool]:
    """The sizes and options of a workload, as far as they are numbers, texts or booleans."""
    sizes = {name: value for name, value in vars(workload).items() if name != "name"}
    if isinstance(workload, DecodeWorkload):
        sizes |= {"batch": len(workload.lengths), "context": workload.lengths[0]}
    return {name: value for name, value in sizes.items() if isinstance(value, int | str)}


def schedule_of(workload: Workload, device: torch.device, dtype: torch.dtype) -> dict:
    """The schedule that our kernel takes for a workload."""
    tile = tile_for(device)
    name = dtype_name(dtype if tile.is_cuda else torch.float32)
    return asdict(RECIPES[kernel_of(tile, name, workload)](tile, name, workload)[2])


def _reason(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return str(error)
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}"
