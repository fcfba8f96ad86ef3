"""One thing to tune, its candidates, and what is known of them before they are compiled."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from minifused import workloads
from minifused.inspection import form_of, kernel_of
from minifused.kernels import limits, schedule_table
from minifused.kernels.build import dtype_name, tile_for
from minifused.kernels.limits import REGISTERS_AN_SM, THREADS_AN_SM
from minifused.kernels.schedule import Schedule
from minifused.kernels.tile import Tile
from minifused.tuning.tunables import TUNABLES, Tunable
from minifused.workloads import Workload

BLOCKS_AN_SM = 32


@dataclass(frozen=True)
class Task:
    """A kernel, one of its workloads, and the machine: an architecture, "" for the CPU."""

    tunable: Tunable
    workload: Workload
    arch: str
    dtype: torch.dtype

    @property
    def tile(self) -> Tile:
        return Tile(self.arch)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.arch else "cpu")

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def bucket(self) -> str:
        return self.tunable.bucket(self.workload)

    @property
    def name(self) -> str:
        return f"{self.tunable.name} {self.workload.case} {self.dtype_name}"

    @property
    def head_dim(self) -> int:
        return getattr(self.workload, "head_dim", 0)

    def recipe(self) -> tuple[Any, tuple, Schedule]:
        """The builder, its static arguments, and the schedule of the rules."""
        with schedule_table.rules_only():
            return self.tunable.recipe(self.tile, self.dtype_name, self.workload)

    @property
    def unused(self) -> str:
        """Why `ops` would not take a schedule that was found, "" if it would."""
        other = kernel_of(self.tile, self.dtype_name, self.workload)
        if other != self.tunable.name:
            return f"in {self.dtype_name} on this device it goes to {other}"
        return ""

    def shared_memory(self, schedule: Schedule) -> int:
        """Bytes of a block."""
        name = self.tunable.name
        return limits.shared_memory(self.tile, name, self.dtype_name, schedule, self.head_dim)


def task_of(tunable: Tunable, workload: Workload, arch: str, dtype: torch.dtype) -> Task:
    """Of a kernel, or of its architecture's own form where that is what runs."""
    form = form_of(tunable.name, Tile(arch), dtype_name(dtype), workload)
    return Task(tunable if form == tunable.name else TUNABLES[form], workload, arch, dtype)


def named_tasks(tunable: Tunable, arch: str, dtype: torch.dtype) -> list[Task]:
    """The benchmark's shapes whose schedule is used, the first of each bucket; few on a CPU."""
    table = workloads.BENCHMARK if arch else workloads.BENCHMARK_QUICK
    tasks = [task_of(tunable, workload, arch, dtype) for workload in table[tunable.op]]
    chosen: dict[str, Task] = {}
    for task in tasks:
        if not task.unused:
            chosen.setdefault(task.bucket, task)
    return list(chosen.values())


def arch_of(device: torch.device) -> str:
    """ "sm_90a" and the like, "" for a CPU."""
    return tile_for(device).arch


@dataclass(frozen=True)
class Candidate:
    """A schedule of the space; `refused` says why it is not to be compiled, "" if it is."""

    schedule: Schedule
    refused: str = ""

    @property
    def key(self) -> str:
        return key_of(self.schedule)


def key_of(schedule: Schedule) -> str:
    return ",".join(f"{name}={value}" for name, value in asdict(schedule).items())


def candidates(task: Task, most: int | None = None) -> list[Candidate]:
    """The space, the schedule of the rules first; at most `most` of those to compile.

    Fewer are spread evenly over the space. Those refused are all in it, at the end.
    """
    tunable, rule = task.tunable, task.recipe()[2]
    schedules = dict.fromkeys((rule, *tunable.space(task.tile, task.dtype_name, task.workload)))
    judged = [Candidate(s, refusal(task, s, is_rule=s == rule)) for s in schedules]
    open_ = [c for c in judged if not c.refused]
    return spread_evenly(open_, most) + [c for c in judged if c.refused]


def refusal(task: Task, schedule: Schedule, is_rule: bool) -> str:
    """Why a schedule is not worth a compile; the rules' own may be slow."""
    known = (task.tile, task.tunable.name, task.dtype_name, schedule, task.head_dim)
    return limits.violation(*known) or ("" if is_rule else limits.spill(*known))


def spread_evenly(items: Sequence[Candidate], most: int | None) -> list[Candidate]:
    """The first, and others at even distances."""
    if most is None or len(items) <= most:
        return list(items)
    if most == 1:
        return list(items[:1])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


@dataclass(frozen=True)
class Occupancy:
    """How a grid fills a GPU.

    Attributes:
        blocks: of the grid. shared_memory: bytes a block.
        blocks_an_sm: that shared memory, threads and, if known, registers allow at once.
        waves: rounds in which the SMs take the blocks; None if their number is not known.
    """

    blocks: int
    shared_memory: int
    blocks_an_sm: int
    waves: float | None


def occupancy(
    task: Task, schedule: Schedule, sms: int | None, registers: int | None = None
) -> Occupancy:
    blocks, shared = task.tunable.blocks(task.workload, schedule), task.shared_memory(schedule)
    if not task.arch:
        return Occupancy(blocks, 0, 1, None)
    threads = schedule.num_threads
    if task.tile.capability >= 90 and task.tunable.name in limits.PIPELINED:
        threads += limits.PRODUCER_THREADS
    # an SM has 1 KiB more than its largest block may take, and a block takes 1 KiB for the system
    memory = limits.shared_memory_limit(task.tile) + 2048
    fit = [BLOCKS_AN_SM, THREADS_AN_SM // threads, memory // (shared + 1024)]
    if registers:
        fit.append(REGISTERS_AN_SM // (registers * threads))
    resident = min(fit)
    return Occupancy(blocks, shared, resident, blocks / (sms * max(1, resident)) if sms else None)
