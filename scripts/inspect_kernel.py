"""Show what TileLang makes of a kernel: tensor-core operations, copies, barriers, resources.

The kernel has GPT-2's sizes and the schedule that the rules give it, so what is shown is what runs.
It needs no GPU. With nvcc the table has registers and spills, with cuobjdump machine code too.
Counts are of places in the generated source: an instruction in a loop counts once.

  inspect_kernel.py gemm --arch sm_90a                    for an H100 or H200, in bfloat16
  inspect_kernel.py gemm --arch sm_90a --diff sm_80       beside an A100
  inspect_kernel.py gemm --diff-schedule block_n=128      beside the same with other tiles
  inspect_kernel.py flash_attention --shape head_dim=128 --plot layouts.png
  inspect_kernel.py row_softmax --arch c --source         the C that a CPU runs
  inspect_kernel.py gemm --profile                        how long it takes on this machine
"""

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from minifused import assembly
from minifused.columns import padded
from minifused.errors import UserError, run_cli
from minifused.inspection import (
    ARCHS,
    DTYPES,
    KERNELS,
    Case,
    default_arch,
    lower,
    make_case,
    own_arch,
    print_on_device,
    source_facts,
)

Column = tuple[Case, Mapping[str, float | None]]


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    p.add_argument("kernel", nargs="?", choices=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    text = f"{', '.join(ARCHS)} (the CPU); default: the GPU here, else sm_90a"
    p.add_argument("--arch", choices=ARCHS, metavar="ARCH", help=text)
    text = "default: bfloat16, and float32 below sm_80 and on c"
    p.add_argument("--dtype", choices=DTYPES, help=text)
    sizes = "; ".join(f"{name}: {', '.join(kernel.sizes)}" for name, kernel in KERNELS.items())
    text = f"other sizes than GPT-2's, as m=64,n=768. {sizes}"
    p.add_argument("--shape", default="", metavar="NAME=N,…", help=text)
    p.add_argument("--json", action="store_true", help="print one JSON document, not a table")
    add_outputs(p)
    other = p.add_mutually_exclusive_group()
    other.add_argument("--diff", choices=ARCHS, metavar="ARCH2", help="a second column: of ARCH2")
    text = "a second column: with other fields of the schedule, as block_m=64,num_stages=2"
    other.add_argument("--diff-schedule", metavar="NAME=N,…", help=text)
    args = p.parse_args(argv)
    if args.kernel is None and not args.print:
        p.error(f"which KERNEL? One of {', '.join(KERNELS)}")
    args.arch = args.arch or (own_arch() if args.profile else default_arch())
    return args


def add_outputs(p: ArgumentParser) -> None:
    """What to print instead of the table."""
    output = p.add_mutually_exclusive_group()
    output.add_argument("--source", action="store_true", help="print the source TileLang generates")
    output.add_argument("--ptx", action="store_true", help="print the PTX; needs nvcc")
    output.add_argument("--sass", action="store_true", help="print SASS; needs nvcc and cuobjdump")
    text = "draw which thread, register or bank has each element of a tile, to .png or .svg"
    output.add_argument("--plot", type=Path, metavar="FILE", help=text)
    text = "time it on this machine: by TileLang's profiler, and by our clock"
    output.add_argument("--profile", action="store_true", help=text)
    text = "run a small kernel with T.print in it; needs a GPU, and no KERNEL"
    output.add_argument("--print", action="store_true", help=text)


def cases(args: Namespace) -> list[Case]:
    """The case asked for, and the one beside it, if any."""
    first = make_case(args.kernel, args.arch, args.dtype, args.shape)
    if args.diff:
        return [first, make_case(args.kernel, args.diff, args.dtype, args.shape)]
    if args.diff_schedule:
        changed = make_case(args.kernel, args.arch, args.dtype, args.shape, args.diff_schedule)
        return [first, changed]
    return [first]


def column(case: Case) -> Column:
    """All that can be known of a case on this machine."""
    lowered = lower(case)
    facts = source_facts(case, lowered)
    if case.tile.is_cuda and assembly.find_tool("nvcc"):
        facts |= assembly.resources(lowered.source, case.tile.arch)
        if assembly.find_tool("cuobjdump"):
            facts |= assembly.count_sass(assembly.sass(lowered.source, case.tile.arch))
    shared, limit = facts["dynamic shared memory, bytes"], facts["its limit, bytes"]
    if limit is not None and shared is not None and shared > limit:
        print(f"warning: {shared} bytes of shared memory do not fit {case.tile.arch}, "
              f"which has {limit}: it would not launch", file=sys.stderr)  # fmt: skip
    return case, facts


def profiled(case: Case) -> Column:
    """How long a case takes on this machine."""
    from minifused.profiling import profile

    return case, profile(case)


def table(columns: list[Column]) -> str:
    """A row a fact; where there are two columns, a * marks those that differ."""
    heads = [describe_heads(case) for case, _ in columns]
    rows = [("", *titles) for titles in zip_longest(*heads, fillvalue="")]
    names = list(dict.fromkeys(name for _, facts in columns for name in facts))
    rows += [(name, *(cell(facts.get(name)) for _, facts in columns)) for name in names]
    marks = ["*" if len(set(row[1:])) > 1 and row[0] else " " for row in rows]
    lines = ["  ".join(row) for row in padded(rows, left=(0,))]
    return "\n".join(f"{mark} {line}" for mark, line in zip(marks, lines, strict=True))


def cell(value: float | None) -> str:
    """An integer as it is, four digits of a measurement."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def describe_heads(case: Case) -> list[str]:
    """The lines above a column."""
    about = case.describe()
    shape = " ".join(f"{name}={value}" for name, value in about["shape"].items())
    return [
        f"{about['kernel']} {about['arch']} {about['dtype']}",
        shape,
        *(f"{name}={value}" for name, value in about["schedule"].items()),
    ]


def document(columns: list[Column]) -> str:
    """The table as JSON; a fact that is not there is null."""
    return json.dumps([{**case.describe(), "facts": facts} for case, facts in columns], indent=1)


def text_of(args: Namespace) -> Callable[[str, str], str] | None:
    """What turns the source for an architecture into the text asked for, if one is."""
    if args.source:
        return lambda source, arch: source
    return assembly.ptx if args.ptx else assembly.sass if args.sass else None


def print_text(args: Namespace, show: Callable[[str, str], Any]) -> None:
    for case in cases(args):
        if not args.source and not case.tile.is_cuda:
            raise UserError("PTX and SASS are a GPU's: give an --arch such as sm_90a, or --source")
        print(show(lower(case).source, case.tile.arch))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.print:
        print_on_device()
    elif args.plot:
        from minifused.layout_plot import plot

        plot(cases(args)[0], args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    elif show := text_of(args):
        print_text(args, show)
    else:
        show_column = profiled if args.profile else column
        columns = [show_column(case) for case in cases(args)]
        print(document(columns) if args.json else table(columns))


if __name__ == "__main__":
    run_cli(main)
