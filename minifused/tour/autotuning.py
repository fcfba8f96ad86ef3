"""A small search for the best schedule, by the tuner of `scripts/tune.py`."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from minifused.kernels.schedule import GemmSchedule
from minifused.tour.blocks import Bar, Block, Chart, Figure, Note, Section, Table
from minifused.tour.fusion import MLP_SIZES
from minifused.tour.schedules import short
from minifused.tour.source import function
from minifused.tour.stage import Stage
from minifused.tuning import report
from minifused.tuning.search import Options, Result, Searcher, default_jobs
from minifused.tuning.task import Task, arch_of
from minifused.tuning.tunables import TUNABLES
from minifused.workloads import LinearWorkload

MOST = {"cpu": 5, "cuda": 16}  # candidates


def run_autotuning(stage: Stage) -> Iterator[Block | Figure]:
    tunable = TUNABLES["gemm"]
    yield function("the space of the search, minifused/tuning/spaces.py", tunable.space)
    workload = LinearWorkload("tour", *MLP_SIZES[stage.device.type], bias=False)
    task = Task(tunable, workload, arch_of(stage.device), stage.dtype)
    options = Options(most=MOST[stage.device.type], jobs=default_jobs(stage.on_cuda))
    with Searcher(stage.folder, options) as searcher:
        result = searcher.tune(task)
    if (failed := report.failed_rule(result)) is not None:
        raise RuntimeError(f"the rules' schedule: {failed.status}: {failed.reason}")
    rows = report.ranking(result)
    yield ranking(result, rows)
    yield Chart(task.name, "us", tuple(map(_bar, rows)))
    yield Note(verdict(result))
    yield Figure("candidates", len(result.candidates))
    yield Figure("compiled now", result.compiled)
    yield Figure("passed", len(rows))
    rule = next(row["time_us"] for row in rows if row["rule"])
    yield Figure("fastest against the rules'", rule / rows[0]["time_us"], "x")


def ranking(result: Result, rows: list[dict[str, Any]]) -> Table:
    """Those that passed, the fastest first, and behind them what became of the others."""
    heads = ("schedule", "us", "TFLOP/s", "blocks", "torch / this", "RMS error", "")
    passed = tuple(
        (
            name_of(row["schedule"]),
            f"{row['time_us']:.1f}",
            f"{row['tflops']:.3g}",
            str(row["blocks"]),
            f"{row['torch_ratio']:.2f}" if row["torch_ratio"] else "-",
            f"{row['rms_error']:.1e}",
            ", ".join(word for word, is_so in (("rules'", row["rule"]), ("chosen", row["chosen"]))
                      if is_so),
        )
        for row in rows
    )  # fmt: skip
    ends = tuple(
        (f"{count} {status}", *[""] * 6) for status, count in report.failures(result).items()
    )
    return Table(result.task.name, heads, passed + ends)


def verdict(result: Result) -> str:
    """What tune.py would do with it."""
    if result.chosen == result.rule:
        return "None beats the rules' choice by more than the spread of the times, so it stays."
    return (
        f"{name_of(asdict(result.chosen))} beats the rules' choice by more than the spread of the "
        "times: tune.py would put it into the table of schedules, which the tour leaves as it is."
    )


def name_of(fields: dict[str, int]) -> str:
    return short(GemmSchedule(**fields))


def _bar(row: dict[str, Any]) -> Bar:
    middle = row["time_us"]
    name = name_of(row["schedule"])
    return Bar(name, middle, row["low_us"] or middle, row["high_us"] or middle)


AUTOTUNING = Section(
    "autotuning",
    "Autotuning",
    "The tuner filters a space of schedules by what must fit, compiles the rest, judges each "
    "against float64 and PyTorch, and has TileLang's AutoTuner time it; the fastest then take "
    "turns with the rules' choice, since a lucky run is no reason to change. Here it looks at a "
    "few candidates only; tune.py looks at all. What was found is kept, so that a second run "
    "compiles nothing.",
    run_autotuning,
)
