"""Bars as inline SVG, drawn by matplotlib, in the colours of the page around them."""

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

from minifused.benchmark.plots import OURS_COLOUR, RIVAL_COLOURS, STYLE
from minifused.benchmark.records import OURS
from minifused.tour.blocks import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 5.2  # inches, so that letters are still read at a phone's width
INK = "#010203"  # stands for the colour of the page's text
PAGE_STYLE: dict[Any, Any] = {
    **STYLE,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "svg.fonttype": "none",  # letters stay letters
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": False,
}


def draw(chart: Chart, prefix: str) -> str:
    """The `<svg>` of a chart, "" where matplotlib is not installed.

    `prefix` makes its ids differ from those of the page's other charts.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    file = io.StringIO()
    with matplotlib.rc_context({**PAGE_STYLE, "svg.hashsalt": prefix}):
        figure = Figure(figsize=(WIDTH, 0.75 + 0.34 * len(chart.bars)), layout="constrained")
        _fill(figure.subplots(), chart)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return inline(file.getvalue(), chart.title, prefix)


def _fill(axes: "Axes", chart: Chart) -> None:
    """Horizontal bars, the first one on top."""
    bars = chart.bars
    names, rows = [bar.name for bar in bars], range(len(bars))
    spread = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
    colours = [OURS_COLOUR if name.startswith(OURS) else RIVAL_COLOURS[0] for name in names]
    axes.barh(rows, [bar.value for bar in bars], 0.66, xerr=spread, color=colours, ecolor=INK)
    axes.set_yticks(rows, names)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{chart.unit}, less is better")


def inline(svg: str, title: str, prefix: str) -> str:
    """The element alone, without addresses, with ids of its own and the page's colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\s(width|height)="[^"]*pt"', "", svg, count=2)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = svg.replace(INK, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
