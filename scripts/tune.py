"""Search for the fastest schedules on this machine, and use them from the next start on.

Each candidate is compiled, judged against float64 and against PyTorch, and timed, in a process that
may hang or crash without ending the search. The fastest then take turns with PyTorch's own
operation. One that beats the rules' choice by more than the spread of the times goes into the
user's table, schedules.json in $MINIFUSED_CACHE_DIR (else the cache folder). What was found is
kept there: a second run compiles and times nothing.

  tune.py gemm --shape 2048,2048,2048          schedules of a matrix product, beside cuBLAS
  tune.py gemm --shape 2048,2048,2048 --list   the space, and why parts of it are refused
  tune.py flash_attention                      each bucket of the benchmark's shapes
"""

import itertools
import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from minifused.engine import DTYPES, resolve_device, resolve_dtype
from minifused.errors import UserError, run_cli
from minifused.inspection import ARCHS
from minifused.tuning import report
from minifused.tuning.journal import Journal
from minifused.tuning.search import Options, Result, Searcher, default_jobs
from minifused.tuning.tables import store
from minifused.tuning.task import Task, arch_of, candidates, named_tasks, task_of
from minifused.tuning.tunables import TUNABLES, Tunable
from minifused.workloads import Workload


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    p.add_argument("kernel", choices=TUNABLES, metavar="KERNEL", help=", ".join(TUNABLES))
    sizes = "; ".join(f"{name}: {','.join(t.sizes)}" for name, t in TUNABLES.items())
    text = f"one shape, in place of the benchmark's. {sizes}"
    p.add_argument("--shape", metavar="N,N,…", help=text)
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    text = "auto: bfloat16 on a GPU, float32 on a CPU"
    p.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=text)
    p.add_argument("--list", action="store_true", help="print the space and stop")
    p.add_argument("--arch", choices=ARCHS, metavar="ARCH", help="with --list: another machine's")
    p.add_argument("--json", action="store_true", help="print the results as one JSON document")
    add_search_flags(p)
    args = p.parse_args(argv)
    if args.arch and not args.list:
        p.error("--arch goes with --list: only this machine's kernels can be timed")
    return args


def add_search_flags(p: ArgumentParser) -> None:
    text = "candidates to compile, spread over the space; default: all"
    p.add_argument("--max", type=positive, metavar="N", help=text)
    text = "for a candidate to be judged and timed, or its process is killed (default: 30)"
    p.add_argument("--timeout", type=seconds, default=30.0, metavar="SECONDS", help=text)
    text = "for it to compile (default: 300)"
    p.add_argument("--compile-timeout", type=seconds, default=300.0, metavar="SECONDS", help=text)
    text = "compile in N processes before anything is timed; 0: one by one (default: by cores)"
    p.add_argument("--jobs", type=count, metavar="N", help=text)
    p.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    p.add_argument("--registers", action="store_true", help="ask nvcc how many the finalists take")
    p.add_argument("--save", action="store_true", help="write the package's table as well")


def count(text: str) -> int:
    """The number of a flag, 0 or more."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def positive(text: str) -> int:
    """The number of a flag, 1 or more."""
    if count(text) == 0:
        raise ValueError(text)
    return int(text)


def seconds(text: str) -> float:
    """The time of a flag, more than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def make_tasks(args: Namespace) -> list[Task]:
    """What the flags ask for, a task a bucket."""
    tunable, arch, device = TUNABLES[args.kernel], args.arch, None
    if arch is None:
        device = resolve_device(args.device)
        arch = arch_of(device)
    arch = "" if arch == "c" else arch
    dtype = task_dtype(args.dtype, device, arch)
    if args.shape:
        return [task_of(tunable, w, arch, dtype) for w in shape(tunable, args.shape)]
    return named_tasks(tunable, arch, dtype)


def refuse_unused(tasks: Sequence[Task], args: Namespace) -> None:
    """A table entry that no launcher looks up would only seem to be of use."""
    for task in tasks:
        if task.unused:
            raise UserError(f"--shape {args.shape} is not {args.kernel}'s to tune: {task.unused}")
    if not tasks:
        raise UserError(
            f"{args.kernel} gets none of the benchmark's shapes in this dtype on this device: "
            "give one of its own with --shape, or another --dtype"
        )


def task_dtype(name: str, device: torch.device | None, arch: str) -> torch.dtype:
    if not arch and name not in ("auto", "float32"):
        raise UserError(f"--dtype {name}: kernels for a CPU are float32; leave it out")
    if device is not None:
        return resolve_dtype(name, device)
    auto = "bfloat16" if arch and arch != "sm_75" else "float32"
    return DTYPES[auto if name == "auto" else name]


def shape(tunable: Tunable, text: str) -> Sequence[Workload]:
    """The workloads of --shape."""
    parts = [part.strip() for part in text.split(",")]
    wanted = ",".join(tunable.sizes)
    if len(parts) != len(tunable.sizes) or not all(p.isdecimal() and int(p) for p in parts):
        raise UserError(f"--shape {text}: expected {wanted} for {tunable.name}, all from 1 on")
    return tunable.workloads(*map(int, parts))


def search(args: Namespace, tasks: Sequence[Task]) -> list[Result]:
    """Tune all tasks; each one's schedule is in the tables when the next one starts."""
    on_cuda = bool(tasks[0].arch)
    options = Options(
        timeout=args.timeout,
        compile_timeout=args.compile_timeout,
        jobs=default_jobs(on_cuda) if args.jobs is None else args.jobs,
        most=args.max,
        fresh=args.fresh,
        registers=args.registers,
    )
    results = []
    compiled = itertools.count(1)  # beside the bar, which waits for the timing
    with (
        tempfile.TemporaryDirectory(prefix="tune-") as folder,
        progress(tasks, args) as bar,
        Searcher(
            Path(folder),
            options,
            on_candidate=bar.update,
            on_compile=lambda: bar.set_postfix_str(f"{next(compiled)} compiled"),
        ) as searcher,
    ):
        for task in tasks:
            bar.set_description(task.name)
            results.append(searcher.tune(task))
            save(results[-1], args.save)
            if not args.json:
                tqdm.write(report.text(results[-1]) + "\n", file=sys.stdout)
    return results


def progress(tasks: Sequence[Task], args: Namespace) -> tqdm:
    """A bar over the candidates of which nothing is known; none if there is none."""
    total = 0
    for task in tasks:
        space = candidates(task, args.max)
        total += len(Journal(task, args.fresh).left(space))
    return tqdm(total=total, unit="candidate", file=sys.stderr, disable=None if total else True)


def save(result: Result, package: bool) -> None:
    """Store what was chosen, and say where."""
    try:
        paths = store(result, package)
    except (OSError, ValueError) as error:
        raise UserError(
            f"a table of schedules cannot be written ({error}): "
            "repair or remove the file, or set MINIFUSED_CACHE_DIR to another folder"
        ) from error
    if result.chosen != result.rule:
        tqdm.write(f"wrote {', '.join(map(str, paths))}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Do what the flags say; returns 1 if the rules' own schedule failed, otherwise 0."""
    args = parse_args(argv)
    tasks = make_tasks(args)
    refuse_unused(tasks, args)
    if args.list:
        print("\n\n".join(report.listing(task, args.max) for task in tasks))
        return 0
    results = search(args, tasks)
    if args.json:
        print(json.dumps(report.document(results), indent=1))
    failed = [(r.task.name, o) for r in results if (o := report.failed_rule(r)) is not None]
    for name, outcome in failed:
        print(f"{name}: the rules' schedule: {outcome.status}: {outcome.reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
