"""What a section of the tour consists of; `text`, `page` and JSON each show the same blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifused.benchmark.records import Spread
    from minifused.tour.stage import Stage


@dataclass(frozen=True)
class Figure:
    """A number, or a word, that is worth its place in the closing table."""

    name: str
    value: float | int | str
    unit: str = ""

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return number(self.value) + (self.unit if self.unit == "%" else f" {self.unit}".rstrip())

    def __str__(self) -> str:
        return f"{self.name}{':' if isinstance(self.value, str) else ''} {self.shown}"


@dataclass(frozen=True)
class Note:
    """A sentence or two on what was found."""

    text: str


@dataclass(frozen=True)
class Table:
    """All cells are texts; the first column is a name and the others are numbers, mostly."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Code:
    """Source as it stands in a file, or as TileLang generated it; `brief` is for a terminal."""

    title: str
    text: str
    brief: str = ""


@dataclass(frozen=True)
class Verse:
    """What the model wrote, with its line breaks."""

    text: str


@dataclass(frozen=True)
class Bar:
    """The median of a bar, and its 10th and 90th percentile."""

    name: str
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, name: str, seconds: Spread) -> Bar:
        """Microseconds of a spread of seconds."""
        return cls(name, 1e6 * seconds.median, 1e6 * seconds.low, 1e6 * seconds.high)


@dataclass(frozen=True)
class Chart:
    """Bars beside each other; only the page draws them, since a table has their numbers."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Idiom:
    """An idiom of TileLang, what it means, and a line of the kernels that uses it."""

    name: str
    meaning: str
    place: str
    line: str


@dataclass(frozen=True)
class Idioms:
    """The cheat sheet."""

    rows: tuple[Idiom, ...]


Block = Note | Table | Code | Verse | Chart | Idioms


@dataclass(frozen=True)
class Section:
    """A stop of the tour.

    Attributes:
        about: two to four sentences: what to look at, and why.
        run: yields blocks and figures as it finds them; what it raises ends it, and it alone.
        needs_compiler: whether it runs kernels, and so is skipped where none can be compiled.
    """

    name: str
    title: str
    about: str
    run: Callable[[Stage], Iterator[Block | Figure]]
    needs_compiler: bool = True


def number(value: float | int | str) -> str:
    """Three digits of a float, and all of an integer."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def to_dict(block: Block) -> dict[str, Any]:
    """As plain JSON values, with the kind of block."""
    return {"kind": type(block).__name__.lower(), **asdict(block)}
