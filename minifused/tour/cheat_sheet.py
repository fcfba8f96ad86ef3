"""TileLang on a page: each idiom with the line of the kernels in which it stands."""

import re
from collections.abc import Iterator

from minifused.tour.blocks import Block, Figure, Idiom, Idioms, Section
from minifused.tour.source import KERNELS
from minifused.tour.stage import Stage

# The first file that has an idiom shows it; those not named here come last.
ORDER = ("gemm.py", "flash_attention.py", "row_softmax.py", "online_softmax.py", "tile.py")

# Name, how its line begins to be found, and what it means.
IDIOMS = (
    ("@T.prim_func", r"@T\.prim_func$", "the function below is a kernel, traced and not run"),
    ("T.Tensor", r": T\.Tensor\(", "an argument: a contiguous tensor of a shape and a dtype"),
    ("T.dynamic", r"T\.dynamic\(", "a size that is known only at the call: no compile for it"),
    ("T.Kernel", r"with T\.Kernel\(", "the grid, the threads of a block, and the block's index"),
    ("T.ceildiv", r"T\.ceildiv\(", "blocks that cover a size, the last one partly"),
    ("T.alloc_shared", r"T\.alloc_shared", "a tile in shared memory, which all threads see"),
    ("T.alloc_fragment", r"T\.alloc_fragment", "a tile spread over the registers of a block"),
    ("T.alloc_local", r"= T\.alloc_local\(", "an array of one thread; on the CPU, any tile"),
    ("tile.shared", r"= tile\.shared\(", "the dialect: shared memory, or a CPU's local array"),
    ("tile.fragment", r"= tile\.fragment\(", "the dialect: registers, or a CPU's local array"),
    ("T.clear", r"T\.clear\(", "zeros in all of a tile"),
    ("T.fill", r"T\.fill\(", "one value in all of a tile"),
    ("T.copy", r"T\.copy\(", "a tile from one memory to another; edges past the end give 0"),
    ("T.Pipelined", r"T\.Pipelined\(", "a loop whose copies run num_stages ahead of its work"),
    ("T.gemm", r"T\.gemm\(", "c += a @ b on tensor cores, wgmma or mma.sync as the machine has"),
    ("T.GemmWarpPolicy", r"T\.GemmWarpPolicy", "the part of c a warp has: FullRow, whole rows"),
    ("T.Parallel", r"T\.Parallel", "a loop over a tile, its iterations spread over the threads"),
    ("T.serial", r"in T\.serial\(", "a loop that runs in order"),
    ("T.unroll", r"in T\.unroll\(", "a loop written out"),
    ("T.grid", r"in T\.grid\(", "plain nested loops, which is what tile loops are on a CPU"),
    ("T.reduce_max", r"T\.reduce_max\(", "maximum along an axis; clear=False goes on"),
    ("T.reduce_sum", r"T\.reduce_sum\(", "sum along a dimension, over the threads too"),
    ("T.use_swizzle", r"T\.use_swizzle\(", "blocks in panels, so that neighbours share their L2"),
    ("T.if_then_else", r"T\.if_then_else\(", "a choice between values, as an expression"),
    ("T.cast", r"T\.cast\(", "another dtype: sums are float32, whatever comes in"),
    ("T.infinity", r"-T\.infinity\(", "the neutral value of a maximum is minus infinity"),
    ("mask of a load", r"T\.if_then_else\(col < valid, T\.cast", "a tail reads its neutral value"),
    ("mask of a store", r"if col < n:", "a tail is not written"),
    ("T.macro", r"@T\.macro$", "a piece of kernel that is written into its callers"),
    ("T.print", r"T\.print\(", "prints a tile from inside a running kernel, on CUDA"),
    ("Target", r"return Target\(", "the machine a kernel is lowered for; it need not be here"),
    ("tilelang.compile", r"tilelang\.compile\(", "a callable kernel, from the disk cache if there"),
    ("tilelang.lower", r"tilelang\.lower\(", "the generated source, with no GPU and no compiler"),
)  # fmt: skip


def run_cheat_sheet(stage: Stage) -> Iterator[Block | Figure]:
    rows = idioms()
    yield Idioms(rows)
    yield Figure("idioms", len(rows))


def idioms() -> tuple[Idiom, ...]:
    """All of IDIOMS. Raises LookupError for one that no kernel uses any more."""
    return tuple(Idiom(name, meaning, *find(pattern)) for name, pattern, meaning in IDIOMS)


def find(pattern: str) -> tuple[str, str]:
    """The place, as file:line, and the text of the first line with a pattern."""
    others = sorted(path.name for path in KERNELS.glob("*.py") if path.name not in ORDER)
    for name in (*ORDER, *others):
        lines = (KERNELS / name).read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines, start=1):
            if re.search(pattern, line) and not line.lstrip().startswith("#"):
                return f"kernels/{name}:{at}", line.strip()
    raise LookupError(f"no kernel has {pattern!r}")


CHEAT_SHEET = Section(
    "cheat_sheet",
    "TileLang on a page",
    "Each idiom with one line of what it means, and a line of these kernels in which it stands. "
    "A kernel asks its tile for what differs between a GPU and a CPU, so some of TileLang's own "
    "names stand in kernels/tile.py.",
    run_cheat_sheet,
    needs_compiler=False,
)
