"""Records of measurements, and the file that keeps them while a benchmark runs.

`schema.json` beside this file says the same of a record as `Record.from_dict` checks.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from minifused.errors import UserError

SCHEMA_VERSION = 1
OURS = "minifused"  # the contender that all others are rivals of
COPY = "copy"  # but this one: it moves as many bytes and computes nothing, which is a limit
STATUSES = ("ok", "skipped", "failed")

# What the shape of a case has to hold, as tables and charts read it. A scaling case names in
# `sweep` what varies: the length of an attention, or the batch or context of decoding.
SHAPES: dict[str, dict[str, type]] = {
    "model": {"model": str, "batch": int, "prompt": int, "new_tokens": int},
    "kernels": {"op": str, "flops": int, "bytes": int},
    "scaling": {"sweep": str},
}
SWEEPS = ("length", "batch", "context")

Key = TypeVar("Key")

_LINE_START = b'{"schema_version": '


@dataclass(frozen=True)
class Spread:
    """The median of `count` samples, with their 10th and 90th percentiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The spread of samples; between two of them, percentiles are linear.

        Raises ValueError if there are none, or one is not finite.
        """
        if not samples or not all(map(math.isfinite, samples)):
            raise ValueError(f"expected one finite sample or more, not {list(samples)}")
        ordered = sorted(map(float, samples))
        median, low, high = (_percentile(ordered, share) for share in (0.5, 0.1, 0.9))
        return cls(median, low, high, len(ordered))

    @classmethod
    def exact(cls, value: float) -> "Spread":
        """A figure that is derived and not sampled."""
        return cls(value, value, value, 1)


def _percentile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def utc_now() -> str:
    """The time in UTC by ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Record:
    """What was measured of one contender in one case.

    Attributes:
        suite: "model", "kernels" or "scaling".
        case: readable, and of one meaning within its suite and dtype.
        contender: who did the work; "minifused" is ours, "copy" a limit and no rival.
        shape: the numbers behind the case, among them those of `SHAPES`.
        dtype: as "bfloat16".
        schedule: of our kernel, None where there is none.
        metrics: by name, which carries the unit.
        status: "ok", "skipped" or "failed".
        reason: why the status is not "ok"; empty if it is.
        check: what was verified before timing, and the ceilings it is held against.
        machine: of `machine.machine_info`.
        time: of the measurement, ISO 8601 in UTC.
    """

    suite: str
    case: str
    contender: str
    shape: dict[str, int | str | bool]
    dtype: str
    schedule: dict | None
    metrics: dict[str, Spread]
    status: str
    reason: str
    check: dict[str, float | int | str | bool | None]
    machine: dict
    time: str = field(default_factory=utc_now)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Suite, case, dtype and contender: the same for a measurement and its repetition."""
        return self.suite, self.case, self.dtype, self.contender

    def to_dict(self) -> dict:
        """Plain JSON values, the schema version first."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: object) -> "Record":
        """The inverse of `to_dict`. Raises UserError naming what is wrong."""
        if not isinstance(value, dict):
            raise UserError(f"a record has to be an object, not {_shown(value)}")
        for name in (*(_FIELDS.keys() - value.keys()), *(value.keys() - _FIELDS.keys())):
            raise UserError(f"a record has {'no' if name in _FIELDS else 'an unknown'} {name!r}")
        for name, (expected, fits) in _FIELDS.items():
            if not fits(value[name]):
                raise UserError(f"{name} has to be {expected}, not {_shown(value[name])}")
        _check_together(value)
        fields = {name: value[name] for name in _FIELDS if name != "schema_version"}
        fields["metrics"] = {name: Spread(**s) for name, s in value["metrics"].items()}
        return cls(**fields)


# What a field has to be, in words and as a test


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_whole(value: object) -> bool:
    return type(value) is int  # a bool is none


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_spread(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"median", "low", "high", "count"}:
        return False
    numbers = value["low"], value["median"], value["high"]
    if not all(map(_is_number, numbers)) or not _is_whole(value["count"]):
        return False
    return 0 <= numbers[0] <= numbers[1] <= numbers[2] and value["count"] >= 1


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value.replace("Z", "+00:00")).utcoffset() == timedelta(0)
    except (AttributeError, ValueError):
        return False


def _is_machine(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("device"))
        and _is_text(value.get("name"))
        and isinstance(value.get("versions"), dict)
        and isinstance(value.get("commit", 0), str | None)
    )


def _maps_to(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_fact(value: object) -> bool:
    return value is None or isinstance(value, str | bool) or _is_number(value)


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema_version": (str(SCHEMA_VERSION), lambda v: _is_whole(v) and v == SCHEMA_VERSION),
    "suite": (f"one of {', '.join(SHAPES)}", lambda v: v in list(SHAPES)),
    "case": ("a text", _is_text),
    "contender": ("a text", _is_text),
    "shape": ("integers, texts and booleans by name", _maps_to(lambda v: isinstance(v, int | str))),
    "dtype": ("a text", _is_text),
    "schedule": ("an object or null", lambda v: isinstance(v, dict | None)),
    "metrics": ("0 <= low <= median <= high and a count >= 1 by name", _maps_to(_is_spread)),
    "status": (f"one of {', '.join(STATUSES)}", lambda v: v in STATUSES),
    "reason": ("a text", lambda v: isinstance(v, str)),
    "check": ("numbers, texts, booleans and nulls by name", _maps_to(_is_fact)),
    "machine": ("an object with device, name, versions and commit", _is_machine),
    "time": ("a time in UTC by ISO 8601", _is_time),
}


def _check_together(value: dict) -> None:
    """Raise UserError where fields, each right by itself, do not go together."""
    if (value["status"] == "ok") != (value["reason"] == ""):
        raise UserError("reason has to be empty if the status is ok, and only then")
    if value["status"] == "ok" and not value["metrics"]:
        raise UserError("metrics are empty though the status is ok")
    shape, wanted = value["shape"], dict(SHAPES[value["suite"]])
    if "sweep" in wanted:
        if shape.get("sweep") not in SWEEPS:
            raise UserError(f"shape has to name a sweep, one of {', '.join(SWEEPS)}")
        wanted[shape["sweep"]] = int
    for name, kind in wanted.items():
        if type(shape.get(name)) is not kind:
            raise UserError(f"shape of suite {value['suite']} has no {kind.__name__} {name!r}")


# Files


class Journal:
    """Records as they come, in a file of JSON lines: a killed run loses at most the last line.

    With `path` None they are kept in memory only. A file that holds something is refused unless
    `resume` is set, and then it is read first.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        """Open a journal. Raises UserError if the file is damaged, in the way or not writable."""
        self._path = path
        self._records: list[Record] = []
        if path is None:
            return
        try:
            with path.open("ab"):  # creates it, or says now that it cannot be written
                pass
            if not resume and path.stat().st_size:
                raise UserError(f"{path} exists: pass --resume to go on with it, or another name")
            self._records = _recover(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    @property
    def records(self) -> list[Record]:
        """All records, of a repeated measurement the last."""
        return _latest(self._records)

    def append(self, record: Record) -> None:
        """Keep a record, on disk when this returns."""
        self._records.append(record)
        if self._path is None:
            return
        line = json.dumps(record.to_dict(), allow_nan=False)
        with self._path.open("a", encoding="ascii") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def has(
        self,
        suite: str,
        case: str,
        dtype: str,
        machine: Mapping,
        contenders: Iterable[str] = (),
    ) -> bool:
        """Whether a case is done on a machine of that name, and so need not be run again.

        It is if there are records of it, those of `contenders` among them, and none has failed.
        """
        statuses = {
            r.contender: r.status
            for r in self.records
            if (*r.key[:3], r.machine["name"]) == (suite, case, dtype, machine["name"])
        }
        done = {name for name, status in statuses.items() if status != "failed"}
        return bool(statuses) and done >= {*statuses, *contenders}


def _latest(records: Iterable[Record]) -> list[Record]:
    """The last record of each key and machine, where the first one was."""
    return list({(*r.key, r.machine["name"]): r for r in records}.values())


def _recover(path: Path) -> list[Record]:
    """The records of a journal, whose last line may be cut short: it is then cut off."""
    data = path.read_bytes()
    *lines, tail = data.split(b"\n")
    cut = _is_cut_short(tail)
    records = _parse_lines(path, lines if cut else [*lines, tail])
    if cut and tail:
        os.truncate(path, len(data) - len(tail))
        print(f"{path}: dropped the last line, which was cut short", file=sys.stderr)
    elif tail:
        with path.open("ab") as file:
            file.write(b"\n")
    return records


def _is_cut_short(line: bytes) -> bool:
    """Whether a line is the beginning of a record, if only of 0 bytes, and not some other text."""
    try:
        json.loads(line)
    except ValueError:
        return line[: len(_LINE_START)] == _LINE_START[: len(line)]
    return False


def _parse_lines(path: Path, lines: Sequence[bytes]) -> list[Record]:
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(Record.from_dict(json.loads(line)))
        except (ValueError, UserError) as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    return records


def document(records: Iterable[Record]) -> dict:
    """All records as one JSON document."""
    return {"schema_version": SCHEMA_VERSION, "records": [r.to_dict() for r in records]}


def load(path: Path) -> list[Record]:
    """Records from a journal or a document, of a repeated measurement the last.

    Raises UserError if the file cannot be read, is damaged or holds none.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        whole = json.loads(data)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "records" in whole:
        records = _parse_document(path, whole)
    else:
        records = _parse_lines(path, data.removesuffix(b"\n").split(b"\n") if data else [])
    if not records:
        raise UserError(f"{path} holds no records")
    return _latest(records)


def _parse_document(path: Path, whole: dict) -> list[Record]:
    if whole.get("schema_version") != SCHEMA_VERSION or not isinstance(whole["records"], list):
        raise UserError(f"{path} is no list of records of schema version {SCHEMA_VERSION}")
    records = []
    for number, value in enumerate(whole["records"], 1):
        try:
            records.append(Record.from_dict(value))
        except UserError as error:
            raise UserError(f"{path}, record {number}: {error}") from None
    return records


# What tables and charts both ask


def group_by(records: Iterable[Record], name: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """The records of each name, both in the order in which they come."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(name(record), []).append(record)
    return groups


def by_case(records: Iterable[Record]) -> list[list[Record]]:
    """The contenders of each case."""
    return list(group_by(records, lambda r: r.key[:3]).values())


def find_ours(case: Iterable[Record]) -> Record | None:
    """Our own record of a case, None if it did not run."""
    return _find(case, OURS)


def find_copy(case: Iterable[Record]) -> Record | None:
    """The copy of as many bytes, None where a case has none."""
    return _find(case, COPY)


def _find(case: Iterable[Record], contender: str) -> Record | None:
    return next((r for r in case if r.contender == contender and r.status == "ok"), None)


def best_rival(case: Iterable[Record], metric: str) -> Record | None:
    """The rival with the smallest median, None if none has any."""
    others = [r for r in case if r.contender not in (OURS, COPY)]
    rivals = [r for r in others if r.status == "ok" and metric in r.metrics]
    return min(rivals, key=lambda r: r.metrics[metric].median, default=None)


def times_faster(rival: Record | None, ours: Record | None, metric: str) -> float | None:
    """The rival's median over ours, None where one of them is missing."""
    if rival is None or ours is None or metric not in rival.metrics or metric not in ours.metrics:
        return None
    mine = ours.metrics[metric].median
    return rival.metrics[metric].median / mine if mine else None
