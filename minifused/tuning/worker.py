"""A process that serves candidates in turn, and that a candidate may hang or bring down.

It is asked over a pipe. Whoever asks waits for as long as it allows, and then kills the process and
what that has started; the next question starts a new one. A process that a candidate may have
harmed is not asked again either.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from minifused.errors import UserError
from minifused.kernels.schedule import Schedule
from minifused.tuning import bench
from minifused.tuning.outcome import COMPILE_ERROR, CRASH, OK, TIMEOUT, Outcome
from minifused.tuning.task import Task, key_of

START_SECONDS = 180.0  # imports, inputs and the float64 reference
PATHS = ("TILELANG_CACHE_DIR", "MINIFUSED_CACHE_DIR")


class WorkerLostError(Exception):
    """The process ended, or was killed since it did not answer; `status` says which."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


class Worker:
    """One such process at a time, started when it is needed.

    Attributes:
        started: how many processes there have been.
    """

    def __init__(self, folder: Path):
        """`folder` takes its logs."""
        self.folder = folder
        self.started = 0
        self._process: Any = None
        self._task: Task | None = None
        self._prepared = False  # for more than to compile

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def run(self, task: Task, what: str, schedule: Schedule, seconds: float) -> Outcome:
        """The outcome of "compile" or "measure" in some seconds; a lost process is one too."""
        try:
            outcome = self.ask(task, (what, schedule), seconds)
        except WorkerLostError as error:
            return Outcome(key_of(schedule), error.status, str(error))
        if outcome.status not in (OK, COMPILE_ERROR):
            self.stop()  # it may have written where it should not
        return outcome

    def ask(self, task: Task, question: tuple, seconds: float) -> Any:
        """The answer to a question on a task; raises WorkerLostError, and what it raised there."""
        if self._process is None:
            self._start()
        if task is not self._task:
            self._exchange(("task", task), START_SECONDS)
            self._task, self._prepared = task, False
        if question[0] != "compile" and not self._prepared:
            self._exchange(("prepare",), START_SECONDS)
            self._prepared = True
        return self._exchange(question, seconds)

    def _start(self) -> None:
        context = _context()
        self._pipe, other = context.Pipe()
        self.started += 1
        log = self.folder / f"{id(self)}-{self.started}"
        log.mkdir()
        arguments = other, str(log), dict(os.environ)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._receive(START_SECONDS)

    def _exchange(self, question: tuple, seconds: float) -> Any:
        try:
            self._pipe.send(question)
        except OSError:  # it ended since it was last heard of
            raise self._lost(CRASH) from None
        answer = self._receive(seconds)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise self._lost(TIMEOUT, f"no answer in {seconds:g} s")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._lost(CRASH) from None

    def _lost(self, status: str, reason: str = "") -> WorkerLostError:
        if not reason:
            self._process.join(5)
            reason = f"the process ended {_describe(self._process.exitcode)}"
        self.stop()
        return WorkerLostError(status, reason)

    def stop(self) -> None:
        """Kill the process, and the compilers it may have started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # if it had no group of its own yet
            self._process.join(30)
            self._pipe.close()
        self._process = self._task = None


def _context() -> Any:
    """How to start processes: where there is no GPU, as forks of one that has imported all this.

    TileLang asks for GPUs when it is imported, and a fork of a process that found one cannot use
    it: there each process imports for itself.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _describe(code: int | None) -> str:
    if code is None or code >= 0:
        return f"with exit code {code}"
    return f"by {signal.Signals(-code).name}"


def serve(pipe: Connection, folder: str, environment: Mapping[str, str]) -> None:
    """Answer until the pipe closes."""
    _settle(folder, environment)
    pipe.send("ready")
    clerk = Clerk()
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            answer = clerk.answer(*question)
        except UserError as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"in a worker:\n{traceback.format_exc()}")
        pipe.send(answer)


class Clerk:
    """Answers questions on the task that it was given last."""

    def answer(self, what: str, *details: Any) -> Any:
        if what == "task":
            (self.task,) = details
            self.bench = None  # the inputs of the last task go before the next ones come
        elif what == "compile":
            return bench.compile_only(self.task, *details)
        elif what == "prepare":
            self.bench = bench.Bench(self.task)
        else:
            return getattr(self.bench, what)(*details)
        return None


def _settle(folder: str, environment: Mapping[str, str]) -> None:
    """A process group that can be killed as one, a folder for what TileLang writes, and the
    environment of whoever asks, which a fork has as it was when its server started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    os.environ.clear()
    os.environ.update(environment)
    for name in PATHS:
        if os.environ.get(name):
            os.environ[name] = os.path.abspath(os.path.expanduser(os.environ[name]))
    os.chdir(folder)
    tqdm.set_lock(threading.RLock())  # its own, a semaphore, would outlive a kill
    log = os.open("log", os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
