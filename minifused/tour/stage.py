"""Where the tour takes place: the device, its ceilings, and a race of one operation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from minifused import ops
from minifused.benchmark import clock
from minifused.benchmark.kernel_suite import KernelCase
from minifused.benchmark.machine import machine_info
from minifused.benchmark.records import OURS, Journal, Record, Spread
from minifused.benchmark.rivals import Rivals
from minifused.benchmark.suite import Setting
from minifused.engine import resolve_dtype
from minifused.tour.blocks import Bar, Block, Chart, Figure, Table
from minifused.workloads import Workload

ROUNDS = {"cpu": 11, "cuda": 30}
SKIPPED_RIVAL = "torch.compile"  # which takes longer to compile than this whole tour


@dataclass(frozen=True)
class Stage:
    """A device, and a folder for what processes write."""

    device: torch.device
    folder: Path

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return resolve_dtype("auto", self.device)

    @cached_property
    def setting(self) -> Setting:
        """The benchmark's setting, with ceilings measured when they are first asked for."""
        return Setting(
            device=self.device,
            dtype=self.dtype,
            rounds=ROUNDS[self.device.type],
            journal=Journal(None, resume=False),
            machine=machine_info(self.device),
            copy_bytes_per_s=clock.copy_bytes_per_s(self.device),
            matmul_flops_per_s=clock.matmul_flops_per_s(self.device, self.dtype),
        )


class TourCase(KernelCase):
    """A case of the benchmark without the rival that takes long to build, and without limits."""

    def rivals(self) -> Rivals:
        return {name: run for name, run in super().rivals().items() if name != SKIPPED_RIVAL}

    def limits(self) -> tuple[str, ...]:
        return ()


def compile_ours(stage: Stage, op: str, workloads: Sequence[Workload]) -> None:
    """Compile our kernels of several workloads side by side."""
    generator = torch.Generator(stage.device).manual_seed(0)
    inputs = [w.inputs(stage.device, stage.dtype, generator) for w in workloads]
    ops.compile_ahead(lambda: [getattr(ops, op)(**given) for given in inputs])


def race(stage: Stage, op: str, workload: Workload) -> list[Record]:
    """Check our operation against float64, then time it in turns with PyTorch's.

    Ours is the first record. Raises WrongResultError before anything is timed if ours is past its
    bound.
    """
    records = list(TourCase(op, workload, stage.device).run(stage.setting))
    return sorted(records, key=lambda record: record.contender != OURS)


def race_blocks(title: str, records: list[Record]) -> Iterator[Block]:
    """The table of a race, and its chart."""
    heads = ("", "us", "10-90%", "TFLOP/s", "GB/s", "of the limit", "RMS error")
    yield Table(title, heads, tuple(map(_row, records)))
    bars = [
        Bar(r.contender, s.median, s.low, s.high)
        for r in records
        if (s := r.metrics.get("time_us")) is not None
    ]
    yield Chart(title, "us", tuple(bars))


def _row(record: Record) -> tuple[str, ...]:
    if record.status != "ok":
        return (record.contender, record.status, record.reason, *[""] * 4)
    time, share = record.metrics["time_us"], record.metrics["roofline_share"].median
    return (
        record.contender,
        f"{time.median:.1f}",
        f"{time.low:.1f}-{time.high:.1f}",
        f"{record.metrics['tflops'].median:.3g}",
        f"{record.metrics['gb_per_s'].median:.3g}",
        f"{100 * share:.0f}%",
        f"{float(record.check['rms_error'] or 0):.1e}",
    )


def memory_race(stage: Stage, op: str, workload: Workload) -> Iterator[Block | Figure]:
    """A race that memory decides: its table, and our bandwidth."""
    records = race(stage, op, workload)
    yield from race_blocks(f"{records[0].case}, {records[0].dtype}", records)
    yield right(records[0])
    yield Figure("bandwidth", median(records[0], "gb_per_s"), "GB/s")
    yield Figure("of a large copy's", 100 * median(records[0], "roofline_share"), "%")
    yield against_torch(records)


def right(ours: Record, name: str = "error") -> Figure:
    """How far our result is from float64, beside what is allowed."""
    error, bound = (float(ours.check[key] or 0) for key in ("rms_error", "rms_bound"))
    return Figure(name, error, f"(allowed {bound:.1e})")


def median(record: Record, metric: str) -> float:
    return record.metrics[metric].median


def fastest_rival(records: list[Record]) -> tuple[str, Spread]:
    """PyTorch's fastest, by name."""
    times = {r.contender: r.metrics["time_us"] for r in records[1:] if r.status == "ok"}
    name = min(times, key=lambda name: times[name].median)
    return name, times[name]


def against_torch(records: list[Record], name: str = "") -> Figure:
    """How many times as fast as PyTorch's fastest ours is."""
    rival, time = fastest_rival(records)
    label = f"{name} speed against {rival}".strip()
    return Figure(label, time.median / median(records[0], "time_us"), "x")
