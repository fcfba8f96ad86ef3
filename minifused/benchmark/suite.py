"""What the suites share: the setting of a run, its records, and the loop over its cases."""

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tqdm import tqdm

from minifused.benchmark.records import Journal, Record, Spread


class WrongResultError(RuntimeError):
    """Our own result is past its bound: the benchmark stops, since a wrong kernel has no speed."""


class Unavailable(Exception):
    """A contender that this machine does not have."""


@dataclass(frozen=True)
class Setting:
    """What all cases of a run have in common.

    Attributes:
        rounds: how often each contender is timed.
        copy_bytes_per_s, matmul_flops_per_s: the measured ceilings of this machine and dtype.
    """

    device: torch.device
    dtype: torch.dtype
    rounds: int
    journal: Journal
    machine: dict
    copy_bytes_per_s: float
    matmul_flops_per_s: float

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def ceilings(self) -> dict[str, float]:
        names = ("copy_bytes_per_s", "matmul_flops_per_s")
        return {name: getattr(self, name) for name in names}


class Case(Protocol):
    """One thing to measure, by all its contenders."""

    @property
    def suite(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def contenders(self) -> Sequence[str]: ...

    def run(self, setting: Setting) -> Iterable[Record]:
        """Check, then time; raises WrongResultError before timing if ours is past its bound."""


def make_record(
    setting: Setting,
    case: Case,
    contender: str,
    shape: Mapping[str, int | str | bool],
    metrics: Mapping[str, Spread],
    check: Mapping[str, float | int | str | bool | None],
    reason: str = "",
    skipped: bool = False,
    schedule: dict | None = None,
) -> Record:
    """A record of one contender; with a `reason` it failed, or was skipped."""
    status = "ok" if not reason else "skipped" if skipped else "failed"
    return Record(
        suite=case.suite,
        case=case.name,
        contender=contender,
        shape=dict(shape),
        dtype=setting.dtype_name,
        schedule=schedule,
        metrics=dict(metrics),
        status=status,
        reason=reason,
        check={**check, **setting.ceilings},
        machine=setting.machine,
    )


def run_cases(cases: Sequence[Case], setting: Setting) -> None:
    """Run the cases that the journal does not hold yet; their records go there as each ends."""
    journal = setting.journal
    left = [
        case
        for case in cases
        if not journal.has(
            case.suite, case.name, setting.dtype_name, setting.machine, case.contenders
        )
    ]
    with tqdm(left, unit="case", file=sys.stderr, disable=None if left else True) as bar:
        for case in bar:
            bar.set_description(case.name)
            for record in case.run(setting):
                journal.append(record)


# Memory


def allocated(device: torch.device) -> int:
    """Bytes in use on a GPU, after counting their peak anew; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_since(before: int, device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def release_memory() -> None:
    """Drop compiled code and its graphs, which hold memory and count against a limit."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
