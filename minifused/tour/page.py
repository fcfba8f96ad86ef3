"""The tour as one HTML page that needs nothing else: no network, no script, no font.

Every text goes through `html.escape`; only the style sheet and matplotlib's SVG do not.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from minifused.tour import charts
from minifused.tour.blocks import Block, Chart, Code, Figure, Idioms, Note, Table, Verse
from minifused.tour.page_style import CSS
from minifused.tour.runner import Report
from minifused.tour.text import is_numeric, outcome

LONG = 36  # letters; a cell with more of them may break its line


def render(reports: Sequence[Report], facts: dict[str, Any]) -> str:
    """The page of a tour on a machine of these facts."""
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>A tour of TileLang</title><style>{CSS}</style></head>",
            '<body><div class="layout">',
            f"<header><h1>A tour of TileLang</h1>{_machine(facts)}</header>",
            _contents(reports),
            f"<main>{_summary(reports)}",
            *map(_section, reports),
            "</main></div></body></html>\n",
        )
    )


def _contents(reports: Sequence[Report]) -> str:
    items = (
        f'<li><a href="#{escape(r.section.name)}">{escape(r.section.title)}</a></li>'
        for r in reports
    )
    return f'<nav aria-label="Contents"><b>Contents</b><ol>{"".join(items)}</ol></nav>'


def _machine(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f'<p class="meta">{escape(str(facts["name"]))}. {escape(versions)}.</p>'


def _summary(reports: Sequence[Report]) -> str:
    rows = "".join(
        f'<tr><td><a href="#{escape(r.section.name)}">{escape(r.section.name)}</a></td>'
        f'<td>{_badge(r)}</td><td class="number">{r.seconds:.1f}</td>'
        f'<td class="long">{escape(outcome(r))}</td></tr>'
        for r in reports
    )
    heads = '<th>section</th><th>status</th><th class="number">seconds</th><th>key figures</th>'
    return f'<div class="scroll summary"><table><tr>{heads}</tr>{rows}</table></div>'


def _badge(report: Report) -> str:
    return f'<span class="badge {report.status}">{report.status}</span>'


def _section(report: Report) -> str:
    section = report.section
    parts = [
        f"<h2>{escape(section.title)} {_badge(report)}</h2>",
        f"<p>{escape(section.about)}</p>",
        *_blocks(section.name, report.blocks),
    ]
    if report.figures:
        parts.append(f'<ul class="figures">{"".join(map(_figure, report.figures))}</ul>')
    if report.reason:
        parts.append(f'<p class="{report.status}">{escape(report.reason)}</p>')
    return f'<section id="{escape(section.name)}">{"".join(parts)}</section>'


def _figure(figure: Figure) -> str:
    return f"<li>{escape(figure.name)}<b>{escape(figure.shown)}</b></li>"


def _blocks(section: str, blocks: Sequence[Block]) -> Iterator[str]:
    for at, block in enumerate(blocks):
        yield _block(block, f"{section}-{at}")


def _block(block: Block, place: str) -> str:
    match block:
        case Note(text):
            return f"<p>{escape(text)}</p>"
        case Code(title, text, _):
            return f'<h3>{escape(title)}</h3><pre tabindex="0"><code>{escape(text)}</code></pre>'
        case Verse(text):
            return f'<pre class="verse">{escape(text)}</pre>'
        case Table(title, heads, rows):
            return f"<h3>{escape(title)}</h3>{_table(heads, rows)}"
        case Idioms(rows):
            cells = [(r.name, r.meaning, r.line, r.place) for r in rows]
            return _table(("idiom", "meaning", "a line of these kernels", "where"), cells, (0, 2))
        case Chart():
            svg = charts.draw(block, escape(place))
            return f'<div class="chart">{svg}</div>' if svg else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], code: Sequence[int] = ()) -> str:
    """A table in a box of its own, which scrolls where it is wider than the page."""
    kinds = [_kind(column) for column in zip(*rows, strict=True)]
    head = "".join(
        f"<th{kind if 'number' in kind else ''}>{escape(text)}</th>"
        for text, kind in zip(heads, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(
            f"<td{kind}>{_cell(text, at in code)}</td>"
            for at, (text, kind) in enumerate(zip(row, kinds, strict=True))
        ) + "</tr>"
        for row in rows
    )  # fmt: skip
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{body}</table></div>'


def _kind(column: Sequence[str]) -> str:
    if is_numeric(column):
        return ' class="number"'
    return ' class="long"' if any(len(cell) > LONG for cell in column) else ""


def _cell(text: str, is_code: bool) -> str:
    return f"<code>{escape(text)}</code>" if is_code else escape(text)
