"""Records as tables, in text and in Markdown.

Records of each machine, its software and commit stand under a header of their own: a ratio never
compares two of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from statistics import geometric_mean

from minifused.benchmark.records import (
    OURS,
    Record,
    Spread,
    best_rival,
    by_case,
    find_copy,
    find_ours,
    group_by,
    times_faster,
)
from minifused.columns import padded

MISSING = "-"
MANY_ROWS = 1024  # of a product: from here on they are one kind
LEFT_ALIGNED = ("op", "case", "contender", "dtype", "against", "best rival", "note")


@dataclass(frozen=True)
class Table:
    """Cells under their column titles, a title above and lines of notes below."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)


def text_tables(records: Iterable[Record]) -> str:
    """All tables of the records, aligned by spaces."""
    return _render(records, _text)


def markdown_tables(records: Iterable[Record]) -> str:
    """All tables of the records in Markdown, which are aligned as they stand too."""
    return _render(records, _markdown)


def _render(records: Iterable[Record], style: Callable[[Table], list[str]]) -> str:
    machines = group_by(records, lambda record: _machine_line(record.machine))
    blocks = []
    for line, group in machines.items():
        blocks.append([f"{line}; {_dates(group)}"])
        blocks += [style(_without_empty_columns(table)) for table in _tables(group)]
    return "\n\n".join("\n".join(block) for block in blocks)


def _text(table: Table) -> list[str]:
    lines = ["  ".join(cells).rstrip() for cells in _aligned(table.columns, table.rows)]
    return [table.title, *lines, *table.notes]


def _markdown(table: Table) -> list[str]:
    rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in table.rows]
    titles, *lines = [f"| {' | '.join(cells)} |" for cells in _aligned(table.columns, rows)]
    widths = [len(cell) - 2 for cell in titles.strip("|").split("|")]
    rule = [
        "-" * width if column in LEFT_ALIGNED else "-" * (width - 1) + ":"
        for column, width in zip(table.columns, widths, strict=True)
    ]
    notes = [f"- {note}" for note in table.notes]
    block = [f"**{table.title}**", "", titles, f"| {' | '.join(rule)} |", *lines]
    return [*block, "", *notes] if notes else block


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The titles and then the rows, the cells of a column padded to one width of 3 or more."""
    left = [place for place, column in enumerate(columns) if column in LEFT_ALIGNED]
    return padded([columns, *rows], left, least=3)


def _without_empty_columns(table: Table) -> Table:
    kept = [
        i
        for i in range(len(table.columns))
        if any(row[i] not in ("", MISSING) for row in table.rows)
    ]
    rows = [tuple(row[i] for i in kept) for row in table.rows]
    return Table(table.title, tuple(table.columns[i] for i in kept), rows, table.notes)


# Above the tables


def _machine_line(machine: dict) -> str:
    """The machine, versions and commit: what has to be one for figures to be compared."""
    facts = [machine["name"]]
    for name, form in (
        ("compute_capability", "compute capability {}"),
        ("sm_count", "{} SMs"),
        ("memory_gib", "{} GiB"),
        ("power_limit_w", "{:g} W"),
        ("driver", "driver {}"),
        ("threads", "{} threads"),
    ):
        if machine.get(name) is not None:
            facts.append(form.format(machine[name]))
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{', '.join(facts)}; {versions}; commit {short_commit(machine)}"


def short_commit(machine: dict) -> str:
    """The first 12 digits of the commit, and whether it was changed."""
    commit, dash, changed = (machine["commit"] or "unknown").partition("-")
    return commit[:12] + dash + changed


def _dates(records: Iterable[Record]) -> str:
    days = sorted({record.time[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


# Cells


def _number(value: float | None, like: float | None = None) -> str:
    """Three digits or more of a number; decimals as many as those of `like`, if it is given."""
    if value is None:
        return MISSING
    size = abs(value if like is None else like)
    decimals = max(0, 2 - floor(log10(size))) if size else 0
    return f"{value:,.{decimals}f}"


def _median(record: Record | None, metric: str) -> str:
    spread = record.metrics.get(metric) if record else None
    return _number(spread.median if spread else None)


def _with_spread(record: Record, metric: str) -> str:
    spread = record.metrics.get(metric)
    return MISSING if spread is None else _number(spread.median) + _range(spread)


def _range(spread: Spread) -> str:
    if spread.count == 1:
        return ""
    low, high = (_number(value, like=spread.median) for value in (spread.low, spread.high))
    return f" ({low}-{high})"


def _percent(record: Record | None, metric: str) -> str:
    spread = record.metrics.get(metric) if record else None
    return _share(spread.median if spread else None)


def _share(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{100 * ratio:.0f}%"


def _times(record: Record, ours: Record | None, metric: str) -> str:
    """How many times faster ours is than the record, nothing for ours itself."""
    return MISSING if record is ours else _ratio(times_faster(record, ours, metric))


def _ratio(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}"


def _note(record: Record) -> str:
    """Why there are no figures, or none of decoding, in one line."""
    if record.status == "ok":
        return "no decoding to check or to time" if record.check.get("decode_steps") == 0 else ""
    return " ".join(f"{record.status}: {record.reason}".split())


# Tables


def _tables(records: Iterable[Record]) -> list[Table]:
    suites = group_by(records, lambda r: r.suite)
    models = group_by(suites.get("model", []), lambda r: f"model {r.shape['model']}, {r.dtype}")
    sweeps = group_by(suites.get("scaling", []), lambda r: f"scaling over {r.shape['sweep']}")
    return [
        *(_by_contender(title, group, MODEL_COLUMNS) for title, group in models.items()),
        *_kernel_tables(suites.get("kernels", [])),
        *(_by_contender(title, group, SCALING_COLUMNS) for title, group in sweeps.items()),
    ]


Cell = Callable[[Record, Record | None], str]  # of a record, beside ours of the same case

MODEL_COLUMNS: dict[str, Cell] = {
    "case": lambda r, ours: r.case,
    "contender": lambda r, ours: r.contender,
    "first token ms": lambda r, ours: _with_spread(r, "first_token_ms"),
    "ms/token": lambda r, ours: _with_spread(r, "ms_per_token"),
    "prefill tokens/s": lambda r, ours: _median(r, "prefill_tokens_per_s"),
    "decode tokens/s": lambda r, ours: _median(r, "decode_tokens_per_s"),
    "peak MiB": lambda r, ours: _median(r, "peak_memory_mib"),
    "of copy bandwidth": lambda r, ours: _percent(r, "copy_bandwidth_share"),
    "of matmul rate": lambda r, ours: _percent(r, "matmul_rate_share"),
    "x first token": lambda r, ours: _times(r, ours, "first_token_ms"),
    "x ms/token": lambda r, ours: _times(r, ours, "ms_per_token"),
    "note": lambda r, ours: _note(r),
}
SCALING_COLUMNS: dict[str, Cell] = {
    "case": lambda r, ours: r.case,
    "dtype": lambda r, ours: r.dtype,
    "contender": lambda r, ours: r.contender,
    "us": lambda r, ours: _with_spread(r, "time_us"),
    "ms/token": lambda r, ours: _with_spread(r, "ms_per_token"),
    "peak MiB": lambda r, ours: _median(r, "peak_memory_mib"),
    "x us": lambda r, ours: _times(r, ours, "time_us"),
    "x ms/token": lambda r, ours: _times(r, ours, "ms_per_token"),
    "note": lambda r, ours: _note(r),
}


def _by_contender(title: str, records: Sequence[Record], columns: dict[str, Cell]) -> Table:
    """A row for each contender of each case."""
    rows = []
    for case in by_case(records):
        ours = find_ours(case)
        rows += [tuple(cell(record, ours) for cell in columns.values()) for record in case]
    note = f"x: how many times faster {OURS} is, by the medians"
    return Table(title, tuple(columns), rows, [note])


def _kernel_tables(records: Sequence[Record]) -> list[Table]:
    """A row for each case, ours beside the best rival; then what that comes to by operation."""
    cases = by_case(records)
    return [table for table in (_kernel_table(cases), _summary(cases)) if table.rows]


def _kernel_table(cases: Sequence[Sequence[Record]]) -> Table:
    columns = (
        *("op", "case", "dtype", f"{OURS} us", "best rival", "rival us", "ratio"),
        *("TFLOP/s", "GB/s", "of roofline", "of a copy", "note"),
    )
    notes = [f"ratio: time of the best rival / time of {OURS}"]
    if any(map(find_copy, cases)):
        notes.append(f"of a copy: time of a copy that moves as many bytes / time of {OURS}")
    return Table("kernels", columns, [_kernel_row(case) for case in cases], notes)


def _kernel_row(case: Sequence[Record]) -> tuple[str, ...]:
    ours, rival = find_ours(case), best_rival(case, "time_us")
    missing = [f"{r.contender} {_note(r)}" for r in case if r.status != "ok"]
    return (
        *(str(case[0].shape["op"]), case[0].case, case[0].dtype),
        MISSING if ours is None else _with_spread(ours, "time_us"),
        MISSING if rival is None else rival.contender,
        MISSING if rival is None else _with_spread(rival, "time_us"),
        _ratio(times_faster(rival, ours, "time_us")),
        *(_median(ours, "tflops"), _median(ours, "gb_per_s"), _percent(ours, "roofline_share")),
        _share(times_faster(find_copy(case), ours, "time_us")),
        "; ".join(missing),
    )


# What the ratios of a summary are of, by name.
AGAINST: dict[str, Callable[[Sequence[Record]], Record | None]] = {
    "best rival": lambda case: best_rival(case, "time_us"),
    "a copy": find_copy,
}


def _summary(cases: Iterable[Sequence[Record]]) -> Table:
    """A column for each kind of work, a row for each dtype and what the times are held against."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = {}
    for case in cases:
        for name, find in AGAINST.items():
            if ratio := times_faster(find(case), find_ours(case), "time_us"):
                row = ratios.setdefault((case[0].dtype, name), {})
                row.setdefault(_kind(case[0]), []).append(ratio)
    kinds = list(dict.fromkeys(kind for row in ratios.values() for kind in row))
    rows = [
        (*names, *(_mean(row[kind]) if kind in row else MISSING for kind in kinds))
        for names, row in ratios.items()
    ]
    note = f"their time / time of {OURS}: geometric mean (worst-best) of so many cases"
    return Table("kernels by operation", ("dtype", "against", *kinds), rows, [note])


def _kind(record: Record) -> str:
    """The op, with what of its shape decides which kernel does it."""
    shape, op = record.shape, str(record.shape["op"])
    if op == "attention" and "causal" in shape:
        return "attention, causal" if shape["causal"] else "attention, not causal"
    if op.startswith("linear") and "m" in shape:
        rows = int(shape["m"])
        return f"linear, M = {rows}" if rows < MANY_ROWS else f"linear, M >= {MANY_ROWS}"
    return op.replace("_", " ")


def _mean(ratios: Sequence[float]) -> str:
    mean, worst, best = (f"{f(ratios):.2f}" for f in (geometric_mean, min, max))
    return f"{mean} ({worst}-{best}) of {len(ratios)}"
