"""Records as charts: PNG files of 1050 pixels width, drawn by matplotlib, which is an extra."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from minifused.benchmark.records import (
    COPY,
    OURS,
    Record,
    Spread,
    best_rival,
    by_case,
    find_ours,
    group_by,
    times_faster,
)
from minifused.benchmark.tables import short_commit
from minifused.errors import UserError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 7.0, 150  # inches
LOG_RANGE = 20  # a longer range of values gets a logarithmic axis

# One strong colour for ours. The muted ones differ in lightness too, and so without colour.
OURS_COLOUR = "#D55E00"
RIVAL_COLOURS = ("#4A6A8A", "#A9C1D9", "#6E6E6E", "#C8C8C8", "#7D6B91", "#CBBBD8", "#A39781")
MARKERS = "osD^vP*X<>"
INK = "#333333"

STYLE: dict[Any, Any] = {  # its names are literal types in newer releases only
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "errorbar.capsize": 2,
}

Colours = dict[str, str]


def plot_all(records: Iterable[Record], folder: Path) -> list[Path]:
    """Draw the charts that the records can fill into `folder`, and return their paths.

    Records of several machines get a subfolder each. Raises UserError if matplotlib is missing or
    the folder cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("charts need matplotlib: pip install 'minifused[bench]'") from None
    measured = (r for r in records if r.status == "ok" and r.contender != COPY)
    machines = group_by(measured, lambda record: record.machine["name"])
    written = []
    with matplotlib.rc_context(STYLE):
        for name, group in machines.items():
            place = folder / _slug(name) if len(machines) > 1 else folder
            written += [_save(figure, place / file) for file, figure in _charts(group)]
    return written


def _save(figure: "Figure", path: Path) -> Path:
    """Write a PNG of 64 colours: charts have few, and the file is a fourth in size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # what matplotlib itself writes with

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
    image = image.convert("RGB").quantize(64)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, optimize=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return path


def _charts(records: Sequence[Record]) -> Iterator[tuple[str, "Figure"]]:
    """File names and figures of one machine's records."""
    colours = _colours(records)
    suites = group_by(records, lambda r: r.suite)
    models = group_by(suites.get("model", []), lambda r: (str(r.shape["model"]), r.dtype))
    for (model, dtype), group in models.items():
        for stem, metric, title, label in (
            ("decode", "ms_per_token", "time per token", "ms per token"),
            ("first-token", "first_token_ms", "time to first token", "ms to first token"),
        ):
            if measured := [r for r in group if metric in r.metrics]:
                figure = _bars(measured, metric, f"{model}, {title}", label, colours)
                yield f"{stem}-{_slug(model)}-{dtype}.png", figure
    timed = [r for r in suites.get("kernels", []) if "time_us" in r.metrics]
    for dtype, group in group_by(timed, lambda r: r.dtype).items():
        if ratios := [case for case in by_case(group) if _ratio(case)]:
            yield f"kernels-{dtype}.png", _ratio_bars(ratios)
        if points := [r for r in group if _is_under_roofline(r)]:
            yield f"roofline-{dtype}.png", _roofline(points, colours)
    scaling = suites.get("scaling", [])
    if attention := _sweep(scaling, "length", "time_us"):
        yield "scaling-attention.png", _attention_scaling(attention, colours)
    if sweeps := [s for x in ("batch", "context") if (s := _sweep(scaling, x, "ms_per_token"))]:
        yield "scaling-decode.png", _decode_scaling(sweeps, colours)


def _slug(name: str) -> str:
    """A file's name of any name."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def _colours(records: Iterable[Record]) -> Colours:
    """One colour a contender for all charts, ours first."""
    rivals = sorted({r.contender for r in records} - {OURS})
    return {OURS: OURS_COLOUR, **dict(zip(rivals, cycle(RIVAL_COLOURS)))}


# What the charts share


def _new_figure(height: float, panels: int = 1) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _set_title(axes: "Axes", title: str, records: Sequence[Record]) -> None:
    axes.set_title(f"{title}\n", pad=3)  # the second line is for the one below
    below = axes.annotate(
        *(_subtitle(records), (0, 1), (0, 5)),
        xycoords="axes fraction",
        textcoords="offset points",
        color="#666666",
        fontsize=9,
    )
    below.set_in_layout(False)  # it may reach over the next panel


def _subtitle(records: Sequence[Record]) -> str:
    dtypes = group_by(records, lambda r: r.dtype)
    commits = group_by(records, lambda r: short_commit(r.machine))
    return f"{records[0].machine['name']}, {', '.join(dtypes)}, commit {', '.join(commits)}"


def _legend(figure: "Figure", axes: "Axes") -> None:
    """The labels of `axes`, below everything."""
    _draw_legend(figure, *axes.get_legend_handles_labels())


def _draw_legend(figure: "Figure", handles: Sequence["Artist"], labels: Sequence[str]) -> None:
    """As many columns as fit beside each other, at 0.09 inches a letter."""
    fitting = max(1, int(WIDTH / (0.7 + 0.09 * max(map(len, labels)))))
    columns = min(len(labels), fitting)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _error_bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """From each median down and up, as matplotlib takes them."""
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def _log_scale(axes: "Axes", which: str, values: Iterable[float]) -> None:
    """A logarithmic axis, "x" or "y", with ticks in plain numbers, as many as fit."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    present = [value for value in values if value > 0]
    ratio = max(present) / min(present) if present else 1
    subs = (1, 2, 5) if ratio < 1000 else (1,)
    axis.set_major_locator(AutoLocator() if ratio < 4 else LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


# The model


def _bars(
    records: Sequence[Record], metric: str, title: str, label: str, colours: Colours
) -> "Figure":
    """A group of bars a case, the small ones first, and a bar a contender."""
    figure, (axes,) = _new_figure(4.4)
    cases = sorted(by_case(records), key=lambda case: _case_sizes(case[0]))
    present = {r.contender for r in records}
    contenders = [name for name in colours if name in present]
    width = 0.84 / len(contenders)
    for i, name in enumerate(contenders):
        shown = [(x, r) for x, case in enumerate(cases) for r in case if r.contender == name]
        spreads = [r.metrics[metric] for _, r in shown]
        axes.bar(
            [x + (i - (len(contenders) - 1) / 2) * width for x, _ in shown],
            [s.median for s in spreads],
            width * 0.94,
            yerr=_error_bars(spreads),
            color=colours[name],
            ecolor=INK,
            label=name,
        )
    medians = [r.metrics[metric].median for r in records]
    if max(medians) > LOG_RANGE * min(medians):
        _log_scale(axes, "y", medians)
        axes.set_ylim(bottom=min(medians) / 2)
    axes.grid(axis="x", visible=False)
    labels = [_case_label(case[0]) for case in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=10 if len(cases) <= 8 else 7.5)
    axes.set_xlabel("prompt + new tokens")
    axes.set_ylabel(label)
    _set_title(axes, title, records)
    _legend(figure, axes)
    return figure


def _case_label(record: Record) -> str:
    batch, prompt, new_tokens = _case_sizes(record)
    return f"batch {batch}\n{prompt} + {new_tokens}"


def _case_sizes(record: Record) -> list[Any]:
    return [record.shape[size] for size in ("batch", "prompt", "new_tokens")]


# The kernels


def _ratio(case: Sequence[Record]) -> float | None:
    return times_faster(best_rival(case, "time_us"), find_ours(case), "time_us")


def _ratio_spread(case: Sequence[Record]) -> tuple[Spread, str]:
    """The ratio to the best rival, as far off as both spreads allow, and the rival's name."""
    rival, ours = best_rival(case, "time_us"), find_ours(case)
    assert rival and ours  # as `_ratio` found
    theirs, mine = rival.metrics["time_us"], ours.metrics["time_us"]
    low, high = theirs.low / mine.high, theirs.high / (mine.low or mine.median)
    return Spread(theirs.median / mine.median, low, high, mine.count), rival.contender


def _ratio_bars(cases: Sequence[Sequence[Record]]) -> "Figure":
    """A bar a case: how many times faster ours is than the best rival."""
    figure, (axes,) = _new_figure(1.5 + 0.27 * len(cases))
    spreads, rivals = zip(*map(_ratio_spread, cases), strict=True)
    rows = range(len(cases))
    ratios = [s.median for s in spreads]
    axes.barh(
        rows,
        ratios,
        0.72,
        xerr=_error_bars(spreads),
        color=[OURS_COLOUR if ratio >= 1 else RIVAL_COLOURS[1] for ratio in ratios],
        ecolor=INK,
    )
    for row, spread, rival in zip(rows, spreads, rivals, strict=True):
        text = f"  {spread.median:.2f}  {rival}"
        axes.text(max(1, spread.high), row, text, va="center", fontsize=8.5, color=INK)
    axes.axvline(1, color=INK, linewidth=1.2)
    names = [f"{case[0].shape['op']}: {case[0].case}" for case in cases]
    axes.set_xlim(0, 1.05 * max(1, *(s.high for s in spreads)))  # the layout makes room for texts
    axes.set_ylim(len(cases) - 0.4, -0.6)  # the first case on top
    axes.set_yticks(rows, names, fontsize=9)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"time of the best rival / time of {OURS}\n(over 1: {OURS} is faster)")
    _set_title(axes, "kernels against the best rival", [r for case in cases for r in case])
    figure.draw_without_rendering()  # the first layout falls short of the room for long texts
    return figure


CEILINGS = ("copy_bytes_per_s", "matmul_flops_per_s")


def _is_under_roofline(record: Record) -> bool:
    """Whether a record has a place in the chart: a copy has no operations."""
    ceilings = [record.check.get(name) for name in CEILINGS]
    return all((*ceilings, record.shape["bytes"])) and _tflops(record) > 0


def _roofline(records: Sequence[Record], colours: Colours) -> "Figure":
    """TFLOP/s over FLOPs per byte, below what copies and matmuls were measured to reach."""
    figure, (axes,) = _new_figure(4.8)
    intensities = [_intensity(r) for r in records]
    ops = list(group_by(records, lambda r: str(r.shape["op"])))
    for record in sorted(records, key=lambda r: r.contender == OURS):  # ours on top
        ours = record.contender == OURS
        axes.plot(
            *(_intensity(record), _tflops(record)),
            color=colours[record.contender],
            marker=MARKERS[ops.index(str(record.shape["op"])) % len(MARKERS)],
            markersize=7 if ours else 5,
            markeredgecolor="white",
            markeredgewidth=0.6,
        )
    _draw_ceilings(axes, records, intensities)
    _log_scale(axes, "x", intensities)
    _log_scale(axes, "y", map(_tflops, records))
    axes.set_xlabel("FLOPs per byte moved at least")
    axes.set_ylabel("TFLOP/s")
    _set_title(axes, "kernels under the measured roofline", records)
    present = group_by(records, lambda r: r.contender)
    _roofline_legend(figure, ops, [name for name in colours if name in present], colours)
    return figure


def _intensity(record: Record) -> float:
    return int(record.shape["flops"]) / int(record.shape["bytes"])


def _tflops(record: Record) -> float:
    return int(record.shape["flops"]) / record.metrics["time_us"].median / 1e6


def _draw_ceilings(axes: "Axes", records: Sequence[Record], intensities: Sequence[float]) -> None:
    """Measured anew with each run, so of several the median."""
    bandwidth, rate = (median(float(r.check[name] or 0) for r in records) for name in CEILINGS)
    ridge = rate / bandwidth
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    tera = [bandwidth * low / 1e12, rate / 1e12, rate / 1e12]
    axes.plot([low, ridge, high], tera, color=INK, linewidth=1.4, zorder=1)
    label = f"copy {bandwidth / 1e12:.2f} TB/s\nmatmul {rate / 1e12:.3g} TFLOP/s"
    axes.text(0.03, 0.96, label, transform=axes.transAxes, va="top", color=INK)


def _roofline_legend(
    figure: "Figure", ops: Sequence[str], contenders: Sequence[str], colours: Colours
) -> None:
    """Contenders by colour, and behind them operations by marker."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colours[n], marker="s", markersize=8, linestyle="") for n in contenders
    ]
    handles += [
        Line2D([], [], color=INK, marker=MARKERS[i % len(MARKERS)], fillstyle="none", linestyle="")
        for i in range(len(ops))
    ]
    _draw_legend(figure, handles, [*contenders, *ops])


# Scaling


def _sweep(records: Iterable[Record], sweep: str, metric: str) -> list[Record]:
    return [r for r in records if r.shape["sweep"] == sweep and metric in r.metrics]


def _curves(axes: "Axes", records: Sequence[Record], metric: str, colours: Colours) -> None:
    """A line a contender, dashed for a second dtype, over what the sweep varies; log-log."""
    sweep = str(records[0].shape["sweep"])
    records = [r for r in records if metric in r.metrics]
    dtypes = list(group_by(records, lambda r: r.dtype))
    names = list(colours)
    ordered = sorted(records, key=lambda r: (names.index(r.contender), r.shape[sweep]))
    for (name, dtype), line in group_by(ordered, lambda r: (r.contender, r.dtype)).items():
        spreads = [r.metrics[metric] for r in line]
        axes.errorbar(
            [int(r.shape[sweep]) for r in line],
            [s.median for s in spreads],
            yerr=_error_bars(spreads),
            color=colours[name],
            marker=MARKERS[names.index(name) % len(MARKERS)],
            linestyle=("-", "--", ":")[dtypes.index(dtype) % 3],
            label=name if len(dtypes) == 1 else f"{name}, {dtype}",
            zorder=3 if name == OURS else 2,
        )
    _log_scale(axes, "y", [r.metrics[metric].median for r in records])
    _power_ticks(axes, sorted({int(r.shape[sweep]) for r in records}))


def _power_ticks(axes: "Axes", values: Sequence[int]) -> None:
    """Ticks at the measured lengths, at most eight of them; 1k is 1024."""
    shown = values[:: -(-len(values) // 8)]
    axes.set_xscale("log", base=2)
    labels = [f"{v // 1024}k" if v and v % 1024 == 0 else str(v) for v in shown]
    axes.set_xticks(shown, labels)
    axes.set_xticks([], minor=True)


def _attention_scaling(records: Sequence[Record], colours: Colours) -> "Figure":
    remembered = [r for r in records if "peak_memory_mib" in r.metrics]
    figure, panels = _new_figure(3.9, 2 if remembered else 1)
    _curves(panels[0], records, "time_us", colours)
    panels[0].set_ylabel("time, us")
    if remembered:
        _curves(panels[1], remembered, "peak_memory_mib", colours)
        panels[1].set_ylabel("peak memory, MiB")
    for axes in panels:
        axes.set_xlabel("length, tokens")
    _set_title(panels[0], "attention over length", records)
    _legend(figure, panels[0])
    return figure


def _decode_scaling(sweeps: Sequence[Sequence[Record]], colours: Colours) -> "Figure":
    figure, panels = _new_figure(3.9, len(sweeps))
    for axes, records in zip(panels, sweeps, strict=True):
        _curves(axes, records, "ms_per_token", colours)
        sweep = records[0].shape["sweep"]
        axes.set_xlabel("batch, rows" if sweep == "batch" else "context, tokens")
        axes.set_ylabel("ms per token")
    _set_title(panels[0], "decoding over batch and context", [r for s in sweeps for r in s])
    _legend(figure, panels[0])
    return figure
