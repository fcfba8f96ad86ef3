"""Compile, judge and time candidates of one task, in the process that may be lost to them."""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tilelang.autotuner import AutoTuner

from minifused import assembly, metrics
from minifused.arguments import empty_output
from minifused.benchmark import clock
from minifused.benchmark.checks import Exam
from minifused.benchmark.kernel_suite import capture
from minifused.benchmark.records import Spread
from minifused.benchmark.rivals import rivals_of
from minifused.benchmark.suite import WrongResultError
from minifused.errors import UserError
from minifused.kernels import build
from minifused.kernels.schedule import Schedule
from minifused.tuning.outcome import COMPILE_ERROR, CRASH, OK, WRONG_RESULT, Finals, Outcome
from minifused.tuning.task import Task, key_of

MAX_TORCH_ERROR = 2e-2  # of a result against PyTorch's, RMS over RMS
WARM_CALLS = 3


class CompileError(RuntimeError):
    """TileLang or its compiler refused a candidate."""


def compile_only(task: Task, schedule: Schedule) -> Outcome:
    """Put a candidate into TileLang's cache; needs no GPU and none of the inputs."""
    try:
        _compile(task, schedule)
    except CompileError as error:
        return Outcome(key_of(schedule), COMPILE_ERROR, str(error))
    return Outcome(key_of(schedule), OK)


def _compile(task: Task, schedule: Schedule) -> Any:
    """Raises UserError for a compiler that is missing, CompileError for all else."""
    builder, static, _ = task.recipe()
    try:
        return build.compile_program(builder, task.tile, *static, schedule)
    except UserError:
        raise
    except Exception as error:
        raise CompileError(reason_of(error)) from error


# What says most, of a compiler above all; what g++ says goes to stderr and not into the exception.
TELLING = r"Check failed|conflict|error:\s*\S|Compilation Failed"


def reason_of(error: Exception) -> str:
    """The line of a message that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if re.search(TELLING, line))
    reason = next(telling, lines[-1] if lines else "no reason given")
    return f"{type(error).__name__}: {reason[:300]}"


class Bench:
    """The inputs of a task on its device, a poisoned output, and the judge of it."""

    def __init__(self, task: Task):
        self.task, self.device = task, task.device
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # as many as our kernels use
        torch.set_float32_matmul_precision("highest")
        generator = torch.Generator(self.device).manual_seed(0)
        self.inputs = task.workload.inputs(self.device, task.dtype, generator)
        self.out = empty_output(task.tunable.op, self.inputs, self.device)
        self.arguments = task.tunable.arguments(self.inputs, self.out)
        self.exam = Exam.of(task.tunable.op, task.workload, self.inputs, task.dtype)

    def measure(self, schedule: Schedule) -> Outcome:
        """Compile a candidate, judge its result, and have TileLang's AutoTuner time it."""
        key = key_of(schedule)
        try:
            seconds = self._autotune(schedule)
            errors = self._judge()  # again, on what the last of many launches left
        except CompileError as error:
            return Outcome(key, COMPILE_ERROR, str(error))
        except WrongResultError as error:
            return Outcome(key, WRONG_RESULT, str(error))
        except UserError:
            raise
        except Exception as error:
            return Outcome(key, CRASH, reason_of(error))
        return Outcome(key, OK, "", seconds, *errors)

    def _autotune(self, schedule: Schedule) -> float:
        """Seconds a launch. One candidate a run, so that each failure has a name and a reason."""
        failures: list[Exception] = []

        def ready(schedule: Schedule, **options: object) -> Any:
            try:
                kernel = _compile(self.task, schedule)
                self._run_poisoned(kernel)
                self._judge()
            except Exception as error:
                failures.append(error)  # the tuner would only log it
                raise
            return kernel

        tuner = AutoTuner.from_kernel(_candidate, [{"schedule": schedule}])
        tuner.jit_compile, tuner.jit_elaborate = ready, _candidate
        tuner.set_compile_args(target=self.task.tile.target)
        tuner.set_profile_args(
            supply_prog=lambda params: self.arguments,
            backend="event" if self.device.type == "cuda" else "wall",
            skip_check=True,  # `ready` has judged
        )
        try:
            # 0: as many launches as fit in TileLang's 25 ms to warm up, and 100 ms. No timeout:
            # the tuner's leaves a hung launch running, so the parent kills this process instead.
            return tuner.run(warmup=0, rep=0, timeout=0).latency / 1e3
        except RuntimeError as error:
            raise (failures[0] if failures else RuntimeError(_logged_reason())) from error

    def _run_poisoned(self, kernel: Any) -> None:
        self.out.fill_(torch.nan)
        kernel(*self.arguments)
        clock.synchronize(self.device)

    def _judge(self) -> tuple[float, float]:
        """RMS errors against float64 and against PyTorch; raises WrongResultError."""
        check = self.exam.require(self.out)
        ours, eager = self.exam.take(self.out), self.exam.eager.double()
        against_torch = metrics.measure(ours, eager).rms
        if not against_torch < MAX_TORCH_ERROR:
            raise WrongResultError(
                f"RMS error of {against_torch:.1e} against PyTorch, limit {MAX_TORCH_ERROR}"
            )
        return float(check["rms_error"] or 0.0), against_torch

    def finals(self, schedules: Sequence[Schedule], rounds: int, registers: bool) -> Finals:
        """Time candidates that passed and PyTorch's own in turns, as the launchers run them."""
        try:
            return self._finals(schedules, rounds, registers)
        except Exception as error:  # the candidates' own results stand
            return Finals({}, failure=reason_of(error))

    def _finals(self, schedules: Sequence[Schedule], rounds: int, registers: bool) -> Finals:
        builder, static, _ = self.task.recipe()
        works: dict[str, clock.Work] = {}
        for schedule in schedules:
            kernel = build.compile_kernel(builder, self.task.tile, *static, schedule)
            works[key_of(schedule)] = self._warm(partial(kernel, *self.arguments))
        rivals = rivals_of(self.task.tunable.op, self.task.workload, self.device)
        name, rival = next(iter(rivals.items()))
        works[name] = self._warm(partial(rival, **self.inputs))
        seconds = clock.in_turns(clock.Stopwatch(self.device), works, rounds)
        spreads = {key: Spread.of(values) for key, values in seconds.items()}
        counts = {key_of(s): self._registers(s) for s in schedules} if registers else {}
        known = {key: count for key, count in counts.items() if count is not None}
        return Finals(
            rival_name=name,
            rival=spreads.pop(name),
            spreads=spreads,
            registers=known if registers else None,
        )

    def _warm(self, work: clock.Work) -> clock.Work:
        for _ in range(WARM_CALLS):
            work()
        clock.synchronize(self.device)
        # a replay, so that no time holds what the host does for a launch
        return (capture(work) if self.device.type == "cuda" else None) or work

    def _registers(self, schedule: Schedule) -> int | None:
        if not self.task.arch or not assembly.find_tool("nvcc"):
            return None
        source = _compile(self.task, schedule).get_kernel_source()
        return assembly.resources(source, self.task.arch)["registers a thread"]


def _candidate(schedule: Schedule, **options: object) -> None:
    """Stands for the kernel in the AutoTuner, which reads its parameters by name."""


def _logged_reason() -> str:
    """The last error in the AutoTuner's log, which it writes where the process is."""
    log = Path("autotuner.log")
    lines = log.read_text().splitlines() if os.path.exists(log) else []
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return errors[-1] if errors else "the benchmark failed and gave no reason"
