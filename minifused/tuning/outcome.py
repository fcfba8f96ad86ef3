"""What became of a candidate, and of those that were timed against each other."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from minifused.benchmark.records import Spread

OK = "ok"
REFUSED = "refused"  # before it was compiled
COMPILE_ERROR = "compile error"
WRONG_RESULT = "wrong result"
TIMEOUT = "timeout"  # and the process killed
CRASH = "crash"  # of the process, or of the device
STATUSES = (OK, REFUSED, COMPILE_ERROR, WRONG_RESULT, TIMEOUT, CRASH)


@dataclass(frozen=True)
class Outcome:
    """Of one candidate.

    Attributes:
        key: its schedule as text. status: one of STATUSES. reason: why it is not OK.
        seconds: of a launch, the mean that TileLang's AutoTuner measured.
        rms_error: of the result against float64; its bound is `metrics.BOUNDS["op"]`.
        torch_error: of the result against PyTorch's, RMS over RMS.
    """

    key: str
    status: str
    reason: str = ""
    seconds: float | None = None
    rms_error: float | None = None
    torch_error: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Outcome":
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Finals:
    """Seconds of those that took turns.

    Attributes:
        spreads: by key of the schedule. rival: of PyTorch's own. rival_name: which that is.
        registers: a thread, by key, where nvcc was asked.
        failure: why there are no spreads, "" if there are.
    """

    spreads: Mapping[str, Spread]
    rival_name: str = ""
    rival: Spread | None = None
    registers: Mapping[str, int] | None = None
    failure: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Finals":
        spreads = {key: Spread(**spread) for key, spread in values["spreads"].items()}
        rival = None if values["rival"] is None else Spread(**values["rival"])
        return cls(**{**values, "spreads": spreads, "rival": rival})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def winner(rule: str, finals: Finals) -> str:
    """The key of the fastest, if all but its slowest runs beat all but the fastest of the rule's.

    Otherwise, and where there were no finals, that of the rule; if the rule's own did not get
    there, of the fastest.
    """
    if not finals.spreads:
        return rule
    best = min(finals.spreads, key=lambda key: finals.spreads[key].median)
    if rule not in finals.spreads or finals.spreads[best].high < finals.spreads[rule].low:
        return best
    return rule
