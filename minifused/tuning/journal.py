"""What a tuning has found so far, in a file, so that none of it is done twice.

A file holds one task: a kernel's space for a workload and a dtype on one machine. The first line
says which, each other one has the outcome of a candidate, or of finals. A line that was cut off by
the end of the process is done again.
"""

import hashlib
import inspect
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from minifused.errors import UserError
from minifused.kernels import schedule_table, table_file
from minifused.tuning.outcome import Finals, Outcome
from minifused.tuning.task import Candidate, Task, candidates


def task_key(task: Task) -> dict[str, str]:
    """What the outcomes depend on, the kernel's own source included."""
    builder, static, _ = task.recipe()
    source = Path(inspect.getsourcefile(builder) or "").read_bytes()
    space = sorted(candidate.key for candidate in candidates(task))
    return {
        "kernel": task.tunable.name,
        "bucket": task.bucket,
        "workload": repr(task.workload),
        "dtype": task.dtype_name,
        "machine": schedule_table.machine(task.tile) or task.arch,
        "space": _digest("\n".join(space).encode()),
        "source": _digest(source + repr(static).encode()),
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Journal:
    """The outcomes of a task, in memory and in its file."""

    def __init__(self, task: Task, fresh: bool = False):
        """Read what is there, or with `fresh` forget it; raises UserError without a folder."""
        key = task_key(task)
        name = f"{task.tunable.name}-{_digest(json.dumps(key).encode())}.jsonl"
        self.outcomes: dict[str, Outcome] = {}
        self._finals: list[Finals] = []
        try:
            self.path = table_file.cache_folder() / "tuning" / name
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                self.path.unlink(missing_ok=True)
            self._open(key)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"the results of tuning cannot be kept ({error}): "
                "set MINIFUSED_CACHE_DIR to a folder that can be written"
            ) from error

    def _open(self, key: dict[str, str]) -> None:
        """Take in the lines that are whole, and leave the file with those alone."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        lines = [{"task": key}, *filter(None, map(self._take, text.splitlines()[1:]))]
        table_file.write_whole(self.path, "\n".join(map(json.dumps, lines)))

    def _take(self, line: str) -> dict[str, Any] | None:
        """The line's content if it is sound, after it was added to what is known."""
        try:
            content = json.loads(line)
            if "outcome" in content:
                outcome = Outcome.from_dict(content["outcome"])
                self.outcomes[outcome.key] = outcome
            else:
                self._finals.append(Finals.from_dict(content["finals"]))
        except (ValueError, TypeError, KeyError):
            return None
        return content

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.key] = outcome
        self._append({"outcome": outcome.to_dict()})

    def add_finals(self, finals: Finals) -> None:
        self._finals.append(finals)
        self._append({"finals": finals.to_dict()})

    def _append(self, content: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def left(self, wanted: Sequence[Candidate]) -> list[Candidate]:
        """Those of which nothing is known."""
        return [c for c in wanted if not c.refused and c.key not in self.outcomes]

    def finals_of(self, keys: Collection[str], registers: bool) -> Finals | None:
        """Finals of exactly these that succeeded, with their registers if those are asked for."""
        for finals in reversed(self._finals):
            complete = finals.registers is not None or not registers
            if complete and set(finals.spreads) == set(keys):
                return finals
        return None
