"""What a search found, as text and as JSON; and a space as a list."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from minifused.benchmark.records import Spread
from minifused.columns import padded
from minifused.kernels.schedule import Schedule
from minifused.tuning.outcome import OK, Outcome
from minifused.tuning.search import Result
from minifused.tuning.task import Candidate, Task, candidates, occupancy

Row = tuple[str, ...]


def sm_count(task: Task) -> int | None:
    """Of this machine's GPU; None if the task is not for it."""
    if not task.arch or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(task.device).multi_processor_count


def ranking(result: Result) -> list[dict[str, Any]]:
    """A candidate that passed a row, the fastest first: those of the finals, then the others."""
    finals = result.finals
    rows = [describe(result, c) for c in result.candidates if result.outcomes[c.key].status == OK]
    place = {True: 0, False: 1}
    return sorted(rows, key=lambda r: (place[r["key"] in finals.spreads], r["time_us"]))


def describe(result: Result, candidate: Candidate) -> dict[str, Any]:
    """A candidate that passed: its time, its work a second, and how it fills the device."""
    task, outcome, key = result.task, result.outcomes[candidate.key], candidate.key
    spread = result.finals.spreads.get(key)
    seconds = (spread.median if spread else outcome.seconds) or 0.0
    rival = result.finals.rival
    registers = (result.finals.registers or {}).get(key)
    return {
        "key": key,
        "schedule": asdict(candidate.schedule),
        "time_us": 1e6 * seconds,
        "low_us": 1e6 * spread.low if spread else None,
        "high_us": 1e6 * spread.high if spread else None,
        "tflops": task.workload.flops / seconds / 1e12,
        "gb_per_s": task.workload.bytes(task.dtype) / seconds / 1e9,
        "torch_ratio": rival.median / spread.median if rival and spread else None,
        "rms_error": outcome.rms_error,
        "torch_error": outcome.torch_error,
        "registers": registers,
        **asdict(occupancy(task, candidate.schedule, sm_count(task), registers)),
        "rule": candidate.schedule == result.rule,
        "chosen": candidate.schedule == result.chosen,
    }


def document(results: Sequence[Result]) -> list[dict[str, Any]]:
    """All of the results as plain JSON values."""
    return [
        {
            "kernel": r.task.tunable.name,
            "case": r.task.workload.case,
            "bucket": r.task.bucket,
            "dtype": r.task.dtype_name,
            "compiled": r.compiled,
            "rule": asdict(r.rule),
            "chosen": asdict(r.chosen),
            "ranking": ranking(r),
            "rival": {"name": r.finals.rival_name, "seconds": _spread(r)},
            "finals_failure": r.finals.failure,
            "failed": [o.to_dict() for o in r.outcomes.values() if o.status != OK],
        }
        for r in results
    ]


def _spread(result: Result) -> dict[str, float] | None:
    return None if result.finals.rival is None else asdict(result.finals.rival)


# Text


def text(result: Result) -> str:
    """A table of those that passed, PyTorch's own among them, and what became of the others."""
    task = result.task
    heads = ("", *_fields(result.rule), "us", "10%-90%", "TFLOP/s", "GB/s", "blocks", "waves",
             "shared", "/SM", "regs", "error")  # fmt: skip
    ranked = ranking(result)
    table = _table([heads, *map(_row, ranked)])
    rival = result.finals.rival
    if rival is not None:  # where it would stand
        faster = [row for row in ranked if row["low_us"] and row["time_us"] < 1e6 * rival.median]
        table.insert(1 + len(faster), _rival_line(result, rival))
    lines = [f"{task.name}, bucket {task.bucket}", *table, *_ends(result), verdict(result)]
    return "\n".join(lines)


def _fields(schedule: Schedule) -> Row:
    return tuple(name.replace("num_", "").replace("block_", "") for name in asdict(schedule))


def _row(row: dict[str, Any]) -> Row:
    mark = ("*" if row["chosen"] else "") + ("r" if row["rule"] else "")
    spread = "screened" if row["low_us"] is None else f"{row['low_us']:.1f}-{row['high_us']:.1f}"
    return (
        mark,
        *map(str, row["schedule"].values()),
        f"{row['time_us']:.1f}",
        spread,
        f"{row['tflops']:.2f}",
        f"{row['gb_per_s']:.0f}",
        str(row["blocks"]),
        "-" if row["waves"] is None else f"{row['waves']:.2f}",
        str(row["shared_memory"]),
        str(row["blocks_an_sm"]),
        str(row["registers"] or "-"),
        f"{row['rms_error']:.1e}",
    )


def _table(rows: Sequence[Row]) -> list[str]:
    return ["  ".join(row) for row in padded(rows)]


def _rival_line(result: Result, rival: Spread) -> str:
    flops = result.task.workload.flops
    low, middle, high = (1e6 * s for s in (rival.low, rival.median, rival.high))
    rate = flops / rival.median / 1e12
    return (
        f"   {result.finals.rival_name}: {middle:.1f} us ({low:.1f}-{high:.1f}), {rate:.2f} TFLOP/s"
    )


def _ends(result: Result) -> list[str]:
    """What became of those that did not pass: counts, and a reason each but for refusals."""
    lines = [f"{count} {status}" for status, count in failures(result).items()]
    reasons = [o for o in result.outcomes.values() if o.status not in (OK, "refused")]
    lines += [f"  {o.status}: {o.key}: {o.reason}" for o in reasons]
    return lines


def verdict(result: Result) -> str:
    """One line: what is used from now on, and why."""
    if result.finals.failure:
        return f"the rules' schedule stays: {result.finals.failure}"
    if result.chosen == result.rule:
        return "the rules' schedule stays: none beats it by more than the spread"
    by_key = {row["key"]: row for row in ranking(result)}
    best = next(row for row in by_key.values() if row["chosen"])
    rule = next((row for row in by_key.values() if row["rule"]), None)
    gain = f"{rule['time_us'] / best['time_us']:.2f} times as fast as" if rule else "in place of"
    return f"chosen: {best['key']}, {gain} the rules' (* chosen, r the rules')"


def failures(result: Result) -> dict[str, int]:
    """How many candidates came to each end but success."""
    counts: dict[str, int] = {}
    for outcome in result.outcomes.values():
        if outcome.status != OK:
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
    return counts


# The space


def listing(task: Task, most: int | None) -> str:
    """Each candidate with its shared memory, how it fills the device, and the filter's verdict."""
    space = candidates(task, most)
    heads = (*_fields(space[0].schedule), "blocks", "waves", "shared", "/SM", "verdict")
    rows = [heads, *(_listed(task, c) for c in space)]
    refused = sum(bool(c.refused) for c in space)
    lines = [line.rstrip() for line in _table([row[:-1] for row in rows])]
    lines = [f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True)]
    total = f"{len(space) - refused} to compile, {refused} refused"
    return "\n".join([f"{task.name}, bucket {task.bucket}", *lines, total])


def _listed(task: Task, candidate: Candidate) -> Row:
    fill = occupancy(task, candidate.schedule, sm_count(task))
    waves = "-" if fill.waves is None else f"{fill.waves:.2f}"
    numbers = (fill.blocks, waves, fill.shared_memory, fill.blocks_an_sm)
    values = asdict(candidate.schedule).values()
    return (*map(str, values), *map(str, numbers), candidate.refused or OK)


def failed_rule(result: Result) -> Outcome | None:
    """What became of the rules' own schedule if it did not pass, as it must."""
    outcome = result.outcomes[next(c.key for c in result.candidates if c.schedule == result.rule)]
    return None if outcome.status == OK else outcome
