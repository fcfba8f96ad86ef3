"""What TileLang makes of a kernel, for machines that need not be here."""

import re
import textwrap
from collections.abc import Iterator

from minifused.inspection import (
    INSTRUCTIONS,
    Case,
    Facts,
    Lowered,
    lower,
    make_case,
    source_facts,
)
from minifused.tour.blocks import Block, Code, Figure, Section, Table
from minifused.tour.source import statement
from minifused.tour.stage import Stage

KERNEL = "gemm"
ARCHS = ("sm_80", "sm_90a", "sm_100a", "c")
BRIEF_LINES, BRIEF_WIDTH = 12, 92
PRODUCTS = ("mma.sync", "wgmma")
COPIES = ("cp.async", "TMA loads")


def run_introspection(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("gemm.py", "for ko in T.Pipelined")
    facts: dict[str, Facts] = {}
    for arch in ARCHS:
        case = make_case(KERNEL, arch)
        lowered = lower(case)
        facts[arch] = source_facts(case, lowered)
        yield generated(case, lowered)
        yield Figure(arch, chosen(facts[arch]))
    rows = tuple(
        (name, *("-" if facts[arch][name] is None else str(facts[arch][name]) for arch in ARCHS))
        for name in facts[ARCHS[0]]
    )
    yield Table("What the compiler chose: places in the source", ("", *ARCHS), rows)


def generated(case: Case, lowered: Lowered) -> Code:
    """The kernel's own part of the source; in brief, a line for each kind of instruction."""
    lines = lowered.body.rstrip().splitlines()
    cut = telling(lines) or main_loop(lines)
    script = f"inspect_kernel.py {case.kernel} --arch {case.tile.arch or 'c'} --source"
    shown = [line if len(line) <= BRIEF_WIDTH else f"{line[:BRIEF_WIDTH]}…" for line in cut]
    brief = "\n".join([*shown, f"… {len(lines) - len(cut)} other lines: {script}"])
    title = f"{case.kernel} for {case.tile.arch or 'c'}, {case.dtype}: {len(lines)} lines"
    return Code(title, "\n".join(lines), brief)


def telling(lines: list[str]) -> list[str]:
    """The first line of each kind of instruction, in the order of the source."""
    kinds = (re.compile(text) for text in INSTRUCTIONS.values())
    found = {next((i for i, line in enumerate(lines) if kind.search(line)), None) for kind in kinds}
    return [lines[i].strip() for i in sorted(i for i in found if i is not None)]


def main_loop(lines: list[str]) -> list[str]:
    """The first lines of the loop over K, where there is no instruction to name."""
    start = next(i for i, line in enumerate(lines) if re.search(r"for \(\w+ ko\b", line))
    return textwrap.dedent("\n".join(lines[start : start + BRIEF_LINES])).splitlines()


def chosen(facts: Facts) -> str:
    """How tiles are copied and multiplied."""
    parts = [name for name in (*COPIES, *PRODUCTS) if facts[name]]
    return " + ".join(parts) or "loops for the C compiler"


INTROSPECTION = Section(
    "introspection",
    "Debugging and introspection",
    "Lowering needs neither a GPU nor nvcc, so the same product is shown as each machine gets it. "
    "Look for how tiles arrive (cp.async on sm_80, TMA with mbarriers from sm_90 on) and how they "
    "are multiplied (mma.sync, or wgmma on sm_90a). The table counts places in the source, one "
    "in a loop once; inspect_kernel.py adds registers, PTX and machine code where nvcc is, and "
    "T.print shows a tile from inside a running kernel.",
    run_introspection,
    needs_compiler=False,
)
