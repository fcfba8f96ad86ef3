"""A picture of where a kernel's tiles lie: the thread and register, or the bank, of each element.

TileLang's own visualizer (`tl.layout_visualization_enable`) draws fragments only, one file each in
a folder of its choice, and an inch for every element: a 128 x 256 tile would be 21 feet wide. So
the layouts are taken where that pass looks at them, and the corner of each is drawn into one file.
"""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilelang
import tilelang.language as T
from tilelang import tvm
from tvm import tirx
from tvm.ir.instrument import pass_instrument
from tvm.tirx.stmt_functor import post_order_visit

from minifused.errors import UserError
from minifused.inspection import Case

ROWS, COLUMNS = 16, 32  # of the corner: a swizzle repeats after 8 rows, an mma tile after 16
BANKS, BANK_BYTES = 32, 4
INCHES_A_CELL = 0.3


@dataclass(frozen=True)
class Cell:
    """One element's label and what it is coloured by, from 0 to 31: its lane, or its bank."""

    label: str
    colour: int


@dataclass(frozen=True)
class Layout:
    """The corner of a tile, row by row, and a title that says what the whole is."""

    name: str
    title: str
    cells: list[list[Cell]]


def layouts(case: Case) -> list[Layout]:
    """The layouts that TileLang inferred for the shared tiles and the fragments of a case."""
    found: dict[str, Layout] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.SBlock) and "layout_map" in node.annotations:
            for buffer, layout in node.annotations["layout_map"].items():
                found.setdefault(buffer.name, _corner(buffer, layout))

    @pass_instrument
    class AfterInference:
        def run_after_pass(self, module: Any, info: Any) -> None:
            if info.name == "tl.LayoutInference":
                for function in module.functions.values():
                    post_order_visit(function.body, visit)

    context = tvm.transform.PassContext(instruments=[AfterInference()])
    with case.tile.target, context, contextlib.redirect_stdout(sys.stderr):
        program = case.builder(case.tile, *case.static, case.schedule)
        tilelang.lower(program, target=case.tile.target)
    return list(found.values())


def _corner(buffer: Any, layout: Any) -> Layout:
    shape = [int(n) for n in layout.get_input_shape()]
    rows, columns = min(ROWS, shape[-2] if len(shape) > 1 else 1), min(COLUMNS, shape[-1])
    lead = [0] * (len(shape) - 2)  # of a pipelined tile: the first stage
    indices = [[[*lead, i, j][-len(shape) :] for j in range(columns)] for i in range(rows)]
    size = " x ".join(map(str, shape))
    if isinstance(layout, T.Fragment):
        title = f"{buffer.name}: {size} fragment over {int(layout.get_thread_size())} threads"
        return Layout(
            buffer.name, title, [[_register(layout, at) for at in row] for row in indices]
        )
    title = f"{buffer.name}: {size} in shared memory, {buffer.dtype}"
    item = tvm.DataType(str(buffer.dtype)).itemsize
    return Layout(buffer.name, title, [[_bank(layout, at, item) for at in row] for row in indices])


def _register(layout: Any, at: list[int]) -> Cell:
    """Of copies in several threads, the first."""
    index = [0, *at] if int(layout.replicate_size) > 1 else at
    thread = int(layout.map_forward_thread(index)[0])
    return Cell(f"T{thread}\nR{int(layout.map_forward_index(index)[0])}", thread % 32)


def _bank(layout: Any, at: list[int], item_bytes: int) -> Cell:
    offset = 0
    for index, extent in zip(layout.map_forward_index(at), layout.get_output_shape(), strict=True):
        offset = offset * int(extent) + int(index)
    bank = offset * item_bytes // BANK_BYTES % BANKS
    return Cell(f"{offset}\nB{bank}", bank)


def plot(case: Case, path: Path) -> None:
    """Draw the layouts of a case into a .png or .svg file; raises UserError if it cannot."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--plot {path}: end the name in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--plot needs matplotlib: python -m pip install 'minifused[bench]'"
        ) from None
    shown = layouts(case)
    if not shown:
        where = case.tile.arch or "c"
        raise UserError(f"--plot: {case.kernel} has no shared tile and no fragment on {where}")
    heights = [len(layout.cells) + 2 for layout in shown]
    size = (COLUMNS * INCHES_A_CELL, sum(heights) * INCHES_A_CELL)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(len(shown), squeeze=False, height_ratios=heights)
    for axes, layout in zip(panels[:, 0], shown, strict=True):
        _draw(axes, layout)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _draw(axes: Any, layout: Layout) -> None:
    colours = [[cell.colour for cell in row] for row in layout.cells]
    axes.imshow(colours, cmap="hsv", vmin=0, vmax=32, alpha=0.5, aspect="equal")
    for i, row in enumerate(layout.cells):
        for j, cell in enumerate(row):
            axes.text(j, i, cell.label, ha="center", va="center", fontsize=4)
    axes.set_title(layout.title, fontsize=8, loc="left")
    axes.set_xlim(-0.5, COLUMNS - 0.5)
    axes.tick_params(labelsize=5)
