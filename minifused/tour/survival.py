"""The runner that outlives what it runs: three planted faults, and a good kernel behind them."""

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from minifused.kernels.schedule import RowSchedule
from minifused.tour import faults
from minifused.tour.blocks import Block, Figure, Section, Table
from minifused.tour.source import function
from minifused.tour.stage import Stage
from minifused.tuning.outcome import COMPILE_ERROR, OK, TIMEOUT, WRONG_RESULT, Outcome
from minifused.tuning.task import Task, arch_of
from minifused.tuning.worker import Worker
from minifused.workloads import SoftmaxWorkload

SECONDS = 120.0  # for a candidate to compile, or to be judged and timed; a busy machine is slow
HANG_SECONDS = 6.0  # for one that never returns
# What is planted, in this order, and how it has to end.
PLANTED = {
    "tiles that do not fit": (faults.DOES_NOT_COMPILE, COMPILE_ERROR),
    "a column left out": (faults.IS_WRONG, WRONG_RESULT),
    "a loop without end": (faults.HANGS, TIMEOUT),
    "the model's own softmax": (faults.GOOD, OK),
}


def run_survival(stage: Stage) -> Iterator[Block | Figure]:
    yield function("the planted faults, minifused/tour/faults.py", faults.faulty_kernel)
    workload = SoftmaxWorkload("small", 8, 40)
    task = Task(faults.TUNABLE, workload, arch_of(stage.device), torch.float32)
    rows, wrong = [], []
    with Worker(stage.folder) as worker:
        for name, (fault, expected) in PLANTED.items():
            start = time.perf_counter()
            schedule = replace(faults.rule(task.tile), block_n=fault)
            limit = HANG_SECONDS if expected == TIMEOUT else SECONDS
            outcome = attempt(worker, task, schedule, limit)
            seconds = f"{time.perf_counter() - start:.1f}"
            rows.append((name, outcome.status, seconds, outcome.reason or "-"))
            wrong += [name] if outcome.status != expected else []
            yield Figure(name, outcome.status)
        started = worker.started
    heads = ("planted", "ended as", "seconds", "reason recorded")
    yield Table("Four candidates in a row", heads, tuple(rows))
    yield Figure("processes", started)
    if wrong:
        raise RuntimeError(f"did not end as expected: {', '.join(wrong)}")


def attempt(worker: Worker, task: Task, schedule: RowSchedule, limit: float) -> Outcome:
    """Compile a candidate; judge and time it, for `limit` seconds at most, if that succeeds."""
    compiled = worker.run(task, "compile", schedule, SECONDS)
    if compiled.status != OK:
        return compiled
    return worker.run(task, "measure", schedule, limit)


SURVIVAL = Section(
    "survival",
    "A runner that survives failures",
    "Candidates are compiled and run in a process of their own, asked over a pipe. A kernel that "
    "does not compile, writes a wrong result or never returns ends as a recorded reason: after a "
    "wrong result the process is replaced, since it may have written where it should not, and "
    "after a time-out it is killed with the compilers it started. The last line shows that the "
    "next candidate runs as if nothing had been.",
    run_survival,
)
