"""The tour as text for a terminal."""

import re
import textwrap
from collections.abc import Sequence

from minifused.columns import padded
from minifused.tour.blocks import Block, Chart, Code, Idioms, Note, Table, Verse
from minifused.tour.runner import Report

WIDTH, CLOSING_INDENT = 96, 36
NUMBER = re.compile(r"[\d.,]+(e[+-]\d+)?(-[\d.,]+)?%?")


def section_text(report: Report) -> str:
    """A section with its title, explanation, blocks and key figures."""
    title = report.section.title
    parts = [f"{title}\n{'=' * len(title)}", wrap(report.section.about)]
    parts += filter(None, map(block_text, report.blocks))
    if report.figures:
        parts.append(wrap("Key figures: " + "; ".join(map(str, report.figures)) + "."))
    if report.reason:
        parts.append(f"{report.status.upper()}: {report.reason}")
    return "\n\n".join(parts) + "\n"


def block_text(block: Block) -> str:
    match block:
        case Note(text):
            return wrap(text)
        case Code(title, text, brief):
            return f"{title}\n{textwrap.indent(brief or text, '    ')}"
        case Verse(text):
            return textwrap.indent(text, "    ")
        case Table(title, heads, rows):
            return "\n".join([title, *align([heads, *rows])])
        case Idioms(rows):
            return "\n".join(f"{r.name}: {r.meaning}\n    {r.place}  {r.line}" for r in rows)
        case Chart():  # the table beside it has its numbers
            return ""


def wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side; those of words to the left, those of numbers to the right."""
    columns = zip(*rows, strict=True)
    words = [place for place, column in enumerate(columns) if not is_numeric(column[1:])]
    return ["  " + "  ".join(row).rstrip() for row in padded(rows, left=words)]


def is_numeric(cells: Sequence[str]) -> bool:
    """Whether most of what is there is a number, a range or a share."""
    there = [cell for cell in cells if cell not in ("", "-")]
    return 2 * sum(NUMBER.fullmatch(cell) is not None for cell in there) > len(there)


def closing_text(reports: Sequence[Report]) -> str:
    """A line a section: status, seconds and key figures, or the reason."""
    rows = [("section", "status", "seconds", "key figures")]
    for report in reports:
        first, *others = textwrap.wrap(outcome(report), WIDTH - CLOSING_INDENT) or [""]
        rows.append((report.section.name, report.status, f"{report.seconds:.1f}", first))
        rows += [("", "", "", line) for line in others]
    return "\n".join(align(rows)) + "\n"


def outcome(report: Report) -> str:
    """Why a section is not ok, and what it found."""
    return "; ".join(filter(None, (report.reason, *map(str, report.figures))))
