"""The same product cut in several ways: what a schedule changes, and why one is faster."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from minifused.benchmark.records import Spread
from minifused.kernels.build import compile_ahead, compile_kernel
from minifused.kernels.schedule import GemmSchedule
from minifused.tour.basics import SQUARES
from minifused.tour.blocks import Bar, Block, Chart, Figure, Note, Section, Table
from minifused.tour.source import statement
from minifused.tour.stage import ROUNDS, Stage
from minifused.tuning.bench import Bench
from minifused.tuning.report import sm_count
from minifused.tuning.task import Candidate, Task, arch_of, candidates, key_of, occupancy
from minifused.tuning.tunables import TUNABLES

COUNT = 5  # schedules, the rules' own among them
REFUSED = 3  # examples of what is refused before it is compiled


def run_schedules(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("schedule.py", "def _gemm_rule")
    workload = SQUARES[stage.device.type]
    task = Task(TUNABLES["gemm"], workload, arch_of(stage.device), stage.dtype)
    space = candidates(task, COUNT)
    tried: list[GemmSchedule] = [c.schedule for c in space if not c.refused]  # type: ignore[misc]
    spreads = measure(task, tried, ROUNDS[stage.device.type])
    ranked = sorted(tried, key=lambda schedule: spreads[key_of(schedule)].median)
    yield ranking(task, ranked, spreads)
    bars = [Bar.of(short(s), spreads[key_of(s)]) for s in ranked]
    yield Chart(f"{workload.case}, {task.dtype_name}", "us", tuple(bars))
    yield from refusals([c for c in space if c.refused][:REFUSED])
    best, worst, rule = (spreads[key_of(s)].median for s in (ranked[0], ranked[-1], tried[0]))
    yield Note(reason(task, ranked[0], ranked[-1]))
    yield Figure("fastest", short(ranked[0]))
    yield Figure("slowest / fastest", worst / best, "x")
    yield Figure("rules' / fastest", rule / best, "x")


def measure(task: Task, tried: Sequence[GemmSchedule], rounds: int) -> dict[str, Spread]:
    """Seconds of each, by key, once all of them have been found right."""
    bench = Bench(task)
    builder, static, _ = task.recipe()

    def launch(*schedules: GemmSchedule) -> None:
        for schedule in schedules:
            compile_kernel(builder, task.tile, *static, schedule)(*bench.arguments)

    compile_ahead(lambda: launch(*tried))
    for schedule in tried:
        bench.out.fill_(torch.nan)
        launch(schedule)
        bench.exam.require(bench.out)
    finals = bench.finals(tried, rounds, registers=False)
    if finals.failure:
        raise RuntimeError(finals.failure)
    return dict(finals.spreads)


def short(s: GemmSchedule) -> str:
    """The tile, and on a GPU its pipeline and threads."""
    tile = f"{s.block_m}x{s.block_n}x{s.block_k}"
    more = f", {s.num_stages} stages, {s.num_threads} threads" if s.num_threads > 1 else ""
    return tile + more + (", swizzled" if s.swizzle else "")


def ranking(task: Task, ranked: Sequence[GemmSchedule], spreads: dict[str, Spread]) -> Table:
    """The fastest first, with what tells them apart."""
    heads = ("schedule", "us", "10-90%", "TFLOP/s", "blocks", "padding", "tiles, KiB",
             "blocks/SM", "waves")  # fmt: skip
    rows = tuple(_row(task, s, spreads[key_of(s)]) for s in ranked)
    return Table("Schedules of one product, the fastest first", heads, rows)


def _row(task: Task, s: GemmSchedule, spread: Spread) -> tuple[str, ...]:
    fill = occupancy(task, s, sm_count(task))
    bar = Bar.of(short(s), spread)
    return (
        bar.name,
        f"{bar.value:.1f}",
        f"{bar.low:.1f}-{bar.high:.1f}",
        f"{task.workload.flops / spread.median / 1e12:.3g}",
        str(fill.blocks),
        f"{100 * padding(task, s):.0f}%",
        f"{tile_bytes(task, s) / 1024:.0f}",
        str(fill.blocks_an_sm) if task.arch else "-",
        "-" if fill.waves is None else f"{fill.waves:.2f}",
    )


def padding(task: Task, s: GemmSchedule) -> float:
    """Work on rows and columns past the edge, over the work that counts."""
    m, n = (asdict(task.workload)[size] for size in "mn")
    done = -(-m // s.block_m) * s.block_m * (-(-n // s.block_n) * s.block_n)
    return done / (m * n) - 1


def tile_bytes(task: Task, s: GemmSchedule) -> int:
    """Shared memory of a block; on a CPU the local arrays of its loop, which caches hold."""
    if task.arch:
        return task.shared_memory(s)
    return 4 * ((s.block_m + s.block_n) * s.block_k + s.block_m * s.block_n)


def reuse(s: GemmSchedule) -> float:
    """FLOPs for each element copied into a tile."""
    return 2 * s.block_m * s.block_n / (s.block_m + s.block_n)


def reason(task: Task, best: GemmSchedule, worst: GemmSchedule) -> str:
    """What the fastest and the slowest have that differs."""
    place = "shared memory" if task.arch else "caches"
    sides = (
        f"{short(s)}: {reuse(s):.0f} FLOPs for each element copied, "
        f"{tile_bytes(task, s) / 1024:.0f} KiB of {place}, "
        f"{100 * padding(task, s):.0f}% of padding"
        for s in (best, worst)
    )
    return f"The fastest, {next(sides)}. The slowest, {next(sides)}."


def refusals(refused: Sequence[Candidate]) -> Iterator[Table]:
    """Candidates that were not even compiled."""
    if refused:
        rows = tuple((c.key, c.refused) for c in refused)
        yield Table("Refused before compiling", ("schedule", "reason"), rows)


SCHEDULES = Section(
    "schedules",
    "Schedules",
    "A schedule says into what tiles the work is cut, and never changes the result. Large tiles "
    "reuse each element they copy more often; they also take more shared memory, or more of a "
    "CPU's cache, and leave fewer blocks to fill the machine with and more padding at the edges. "
    "The table ranks the rules' choice and some others of the search space, each found right "
    "first.",
    run_schedules,
)
