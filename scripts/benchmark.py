"""Time minifused beside what a user would take instead, after checking that all are right.

  benchmark.py model     whole generations: PyTorch eager and compiled, transformers
  benchmark.py kernels   each kernel: cuBLAS, cuBLASLt, flash and cuDNN attention, torch.compile
  benchmark.py scaling   attention against length, decoding against batch and context

A wrong result of ours stops the run before it is timed (exit code 1). All contenders run in this
process, in turns. It also runs on a CPU, with one thread on both sides.
"""

import json
import sys
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from argparse import RawDescriptionHelpFormatter as Raw
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from minifused.benchmark import clock
from minifused.benchmark.contenders import CONTENDERS
from minifused.benchmark.kernel_suite import OPS, kernel_cases
from minifused.benchmark.machine import machine_info
from minifused.benchmark.model_suite import ModelCase, Subject
from minifused.benchmark.plots import plot_all
from minifused.benchmark.records import OURS, Journal, Record, document, load
from minifused.benchmark.scaling_suite import scaling_cases
from minifused.benchmark.suite import Case, Setting, WrongResultError, run_cases
from minifused.benchmark.tables import markdown_tables, text_tables
from minifused.config import PRESETS
from minifused.engine import DTYPES, resolve_device, resolve_dtype
from minifused.errors import UserError, run_cli

ROUNDS = {"model": 7, "kernels": 30, "scaling": 7}
QUICK_ROUNDS = 3
# Of a generation: what a size is, its usual sweep, and the only one of a small run.
SIZES: dict[str, tuple[str, list[int], list[int]]] = {
    "batch": ("prompts at once", [1, 8, 32, 128], [1]),
    "prompt": ("tokens of a prompt", [512], [64]),
    "new_tokens": ("tokens behind it, 1 for the prefill alone", [128], [32]),
}


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__, formatter_class=Raw)
    p.add_argument(
        "--from-json", type=Path, metavar="FILE", help="no run: tables and plots of these records"
    )
    add_output_flags(p)
    suites = p.add_subparsers(dest="suite", metavar="SUITE")
    for name, add_flags in (
        ("model", add_model_flags),
        ("kernels", add_kernel_flags),
        ("scaling", lambda p: add_contender_flag(p, "minifused and torch eager")),
    ):
        suite = suites.add_parser(name, formatter_class=ArgumentDefaultsHelpFormatter)
        add_flags(suite)
        add_run_flags(suite, ROUNDS[name])
        add_output_flags(suite)
    args = p.parse_args(argv)
    if (args.suite is None) == (args.from_json is None):
        p.error("give a suite (model, kernels, scaling), or --from-json FILE")
    return args


def add_run_flags(p: ArgumentParser, rounds: int) -> None:
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    text = "repeatable; auto: bfloat16 on a GPU, float32 on a CPU"
    p.add_argument("--dtype", action="append", choices=("auto", *DTYPES), help=text)
    p.add_argument("--rounds", type=int, default=rounds, help="times that each is timed")
    p.add_argument("--quick", action="store_true", help="a few small cases, under a minute")
    p.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on with the records of an earlier --json"
    )


def add_output_flags(p: ArgumentParser) -> None:
    p.add_argument(
        "--json",
        metavar="FILE",
        help="append a record a line as cases end; -: one document as the last line of stdout",
    )
    p.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    p.add_argument("--plot", type=Path, metavar="DIR", help="write charts there (extra bench)")


def add_model_flags(p: ArgumentParser) -> None:
    models = p.add_mutually_exclusive_group()
    models.add_argument(
        "--preset",
        nargs="+",
        choices=(*PRESETS, "demo"),
        help="sizes, with random weights; demo: the bundled model, as on a CPU",
    )
    models.add_argument("--model", type=Path, metavar="DIR", help="a model folder")
    for name, (what, usual, small) in SIZES.items():
        sweep = " ".join(map(str, usual))
        text = f"{what}; default: {sweep}, with --quick and on a CPU {small[0]}"
        p.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="+", help=text)
    add_contender_flag(p, "all")


def add_contender_flag(p: ArgumentParser, default: str) -> None:
    text = f"repeatable; {OURS} always runs; default: {default}"
    p.add_argument("--contender", action="append", choices=tuple(CONTENDERS), help=text)


def add_kernel_flags(p: ArgumentParser) -> None:
    p.add_argument("--op", action="append", choices=OPS, help="repeatable; default: all")


def model_cases(args: Namespace, device: torch.device) -> list[Case]:
    """The sweep of the flags; --quick and a CPU take a small case where none is asked for."""
    small = args.quick or device.type == "cpu"
    if args.model is not None:
        subjects = [Subject.load(args.model)]
    else:
        default = ["demo"] if device.type == "cpu" else ["gpt2"]
        subjects = [Subject.of(name) for name in args.preset or default]
    names = pick_contenders(args, tuple(CONTENDERS))
    batches, prompts, counts = (
        getattr(args, name) or (least if small else usual)
        for name, (_, usual, least) in SIZES.items()
    )
    sizes = product(subjects, batches, prompts, counts)
    cases = [ModelCase(s, b, p, n, names) for s, b, p, n in sizes]
    for case in cases:
        case.require_room()
    return list(cases)


def pick_contenders(args: Namespace, default: Sequence[str]) -> list[str]:
    return [n for n in CONTENDERS if n == OURS or n in (args.contender or default)]


def pick_cases(args: Namespace, device: torch.device) -> Sequence[Case]:
    if args.suite == "model":
        return model_cases(args, device)
    if args.suite == "kernels":
        return kernel_cases(device, args.quick, args.op)
    return scaling_cases(device, args.quick, pick_contenders(args, ("torch eager",)))


def run(args: Namespace, journal: Journal) -> None:
    """Run the cases of the flags in each dtype; the records go to `journal`."""
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}: at least 1")
    device = resolve_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as many as our kernels use
    cases = pick_cases(args, device)
    machine, copy_rate = machine_info(device), clock.copy_bytes_per_s(device)
    for name in args.dtype or ["auto"]:
        dtype = resolve_dtype(name, device)
        run_cases(
            cases,
            Setting(
                device=device,
                dtype=dtype,
                rounds=min(args.rounds, QUICK_ROUNDS) if args.quick else args.rounds,
                journal=journal,
                machine=machine,
                copy_bytes_per_s=copy_rate,
                matmul_flops_per_s=clock.matmul_flops_per_s(device, dtype),
            ),
        )


def open_journal(args: Namespace) -> Journal:
    if args.resume is not None and args.json not in (None, "-", str(args.resume)):
        raise UserError("--resume FILE is also where the records go: leave --json FILE out")
    path = args.resume or (Path(args.json) if args.json not in (None, "-") else None)
    return Journal(path, resume=args.resume is not None)


def show(args: Namespace, records: Sequence[Record]) -> None:
    """Print the tables, and write what the flags ask for."""
    if args.json != "-":
        print(markdown_tables(records) if args.markdown else text_tables(records))
    if args.plot is not None:
        for path in plot_all(records, args.plot):
            print(f"wrote {path}", file=sys.stderr)
    if args.json == "-":
        print(json.dumps(document(records)))


def main(argv: list[str] | None = None) -> int:
    """Run what the flags say; returns 1 if a result of ours was wrong, otherwise 0."""
    args = parse_args(argv)
    warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice about rivals' kernels
    if args.from_json is not None:
        show(args, load(args.from_json))
        return 0
    journal = open_journal(args)
    try:
        run(args, journal)
    except WrongResultError as error:
        print(f"stopped before timing: {error}", file=sys.stderr)
        return 1
    show(args, journal.records)
    return 0


if __name__ == "__main__":
    run_cli(main)
