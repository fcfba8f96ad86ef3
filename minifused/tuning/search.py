"""The search: filter, compile, judge and time each candidate, then the best against the rules.

Compiling and timing go on in processes of their own (see `worker`), so that no candidate can end
the search: what becomes of it is recorded, and the next one is taken.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from minifused.kernels.schedule import Schedule
from minifused.tuning.journal import Journal
from minifused.tuning.outcome import OK, REFUSED, Finals, Outcome, winner
from minifused.tuning.task import Candidate, Task, candidates, key_of
from minifused.tuning.worker import Worker, WorkerLostError

FINALISTS = 8
MIN_ROUNDS, MAX_ROUNDS = 9, 60
FINALS_SECONDS = 10.0  # what the rounds may take, about


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        timeout: seconds a compiled candidate may take to be judged and timed.
        compile_timeout: seconds it may take to compile.
        jobs: processes that compile ahead of the timing; 0 for none: each is compiled where it is
            timed, one after the other.
        most: candidates to compile, None for all. fresh: forget earlier outcomes.
        registers: ask nvcc for the registers of the finalists.
    """

    timeout: float = 30.0
    compile_timeout: float = 300.0
    jobs: int = 0
    most: int | None = None
    fresh: bool = False
    registers: bool = False


@dataclass(frozen=True)
class Result:
    """What a search found; `outcomes` by the key of the schedule, those refused included.

    Attributes:
        rule, chosen: schedules; the same one where nothing beat the rules'.
        compiled: how many candidates this search compiled and timed; 0 if all were known.
    """

    task: Task
    candidates: Sequence[Candidate]
    outcomes: dict[str, Outcome]
    finals: Finals
    rule: Schedule
    chosen: Schedule
    compiled: int


@dataclass
class Searcher:
    """Tunes tasks one after the other, with processes that it starts when there is work for them.

    `on_compile` is called after each candidate that was compiled ahead, from any thread, and
    `on_candidate` once all is known of one.
    """

    folder: Path
    options: Options
    on_candidate: Callable[[], object] = lambda: None
    on_compile: Callable[[], object] = lambda: None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Searcher":
        self._timer, *self._compilers = (
            self._stack.enter_context(Worker(self.folder)) for _ in range(1 + self.options.jobs)
        )
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    @property
    def processes(self) -> int:
        """How many have been started so far."""
        return sum(worker.started for worker in (self._timer, *self._compilers))

    def tune(self, task: Task) -> Result:
        """Search for the best schedule of a task; tables stay as they are."""
        space = candidates(task, self.options.most)
        journal = Journal(task, self.options.fresh)
        left = journal.left(space)
        for outcome in self._outcomes(task, left):
            journal.add(outcome)
            self.on_candidate()
        tried = [c for c in space if not c.refused]
        outcomes = {c.key: journal.outcomes[c.key] for c in tried}
        rule = task.recipe()[2]
        finals = self._finals(task, rule, tried, journal)
        best = winner(key_of(rule), finals)
        chosen = next(c.schedule for c in space if c.key == best)
        refused = {c.key: Outcome(c.key, REFUSED, c.refused) for c in space if c.refused}
        return Result(task, space, {**outcomes, **refused}, finals, rule, chosen, len(left))

    def _outcomes(self, task: Task, left: Sequence[Candidate]) -> Iterator[Outcome]:
        seconds = self.options.timeout
        if not self._compilers:
            seconds += self.options.compile_timeout  # it is compiled where it is timed
        for candidate, compiled in zip(left, self._compiled(task, left), strict=True):
            if compiled.status == OK:
                yield self._timer.run(task, "measure", candidate.schedule, seconds)
            else:
                yield compiled

    def _compiled(self, task: Task, left: Sequence[Candidate]) -> Sequence[Outcome]:
        """Outcomes of compiling, all of them before the first is timed: compilers disturb it."""
        if not self._compilers:
            return [Outcome(candidate.key, OK) for candidate in left]
        free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._compilers:
            free.put(worker)
        pool = ThreadPoolExecutor(len(self._compilers))
        try:
            return list(pool.map(lambda candidate: self._compile(free, task, candidate), left))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for those under way alone

    def _compile(self, free: "SimpleQueue[Worker]", task: Task, candidate: Candidate) -> Outcome:
        worker = free.get()
        try:
            seconds = self.options.compile_timeout
            outcome = worker.run(task, "compile", candidate.schedule, seconds)
        finally:
            free.put(worker)
        self.on_compile()
        return outcome

    def _finals(
        self, task: Task, rule: Schedule, tried: Sequence[Candidate], journal: Journal
    ) -> Finals:
        """The fastest and the rules' own, timed in turns, or as they were timed before."""
        seconds = {c.key: journal.outcomes[c.key].seconds for c in tried}
        passed = [c for c in tried if seconds[c.key] is not None]
        ranked = sorted(passed, key=lambda c: seconds[c.key] or 0.0)
        of_rule = [c for c in passed if c.schedule == rule]
        finalists = list(dict.fromkeys((*of_rule, *ranked[:FINALISTS])))
        if not finalists:
            return Finals({}, failure="no candidate passed")
        known = journal.finals_of([c.key for c in finalists], self.options.registers)
        if known is not None:
            return known
        total = sum(seconds[c.key] or 0.0 for c in finalists)
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(FINALS_SECONDS / max(total, 1e-6))))
        finals = self._run_finals(task, finalists, rounds)
        journal.add_finals(finals)
        return finals

    def _run_finals(self, task: Task, finalists: Sequence[Candidate], rounds: int) -> Finals:
        question = ("finals", [c.schedule for c in finalists], rounds, self.options.registers)
        each = self.options.timeout + self.options.compile_timeout * self.options.registers
        try:
            return self._timer.ask(task, question, FINALS_SECONDS + each * (1 + len(finalists)))
        except WorkerLostError as error:
            return Finals({}, failure=f"{error.status}: {error}")


def default_jobs(on_cuda: bool) -> int:
    """Lowering takes a core a process; a CPU's candidates are timed on the same cores."""
    return min(16, os.cpu_count() or 1) if on_cuda else 0
