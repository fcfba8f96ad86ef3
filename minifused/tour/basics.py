"""The first stops: the machine, a vector addition, a tiled product."""

from collections.abc import Iterator

from minifused.doctor import can_run, diagnose
from minifused.tour.blocks import Block, Figure, Section, Table
from minifused.tour.source import statement
from minifused.tour.stage import Stage, against_torch, median, memory_race, race, race_blocks, right
from minifused.workloads import LinearWorkload, VectorAddWorkload

VECTORS = {
    "cpu": VectorAddWorkload("vectors", 6 << 20),
    "cuda": VectorAddWorkload("vectors", 1 << 26),
}
SQUARES = {
    "cpu": LinearWorkload("square", 512, 512, 512, bias=False),
    "cuda": LinearWorkload("square", 4096, 4096, 4096, bias=False),
}


def run_environment(stage: Stage) -> Iterator[Block | Figure]:
    checks = list(diagnose())
    rows = [(c.name, c.state, c.detail + (f"; fix: {c.fix}" if c.fix else "")) for c in checks]
    yield Table("What the doctor found", ("check", "state", "detail"), tuple(rows))
    yield Figure("faults", sum(c.state == "fault" for c in checks))
    yield Figure("kernels run here", "yes" if can_run(checks) else "no")


def run_vector_add(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("vector_add.py", "with T.Kernel")
    yield from memory_race(stage, "vector_add", VECTORS[stage.device.type])


def run_matmul(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("gemm.py", "for ko in T.Pipelined")
    yield statement("tile.py", "def gemm")
    records = race(stage, "linear", SQUARES[stage.device.type])
    yield from race_blocks(f"{records[0].case}, {records[0].dtype}", records)
    yield right(records[0])
    yield Figure("rate", median(records[0], "tflops"), "TFLOP/s")
    yield against_torch(records)


ENVIRONMENT = Section(
    "environment",
    "The machine",
    "TileLang needs a compiler behind it: g++ or clang++ for the CPU's target c, nvcc for CUDA. "
    "The doctor asks for each part on its own and ends with a kernel that is compiled, run and "
    "compared with float64 on every target of this machine. A line that is not ok names its fix.",
    run_environment,
    needs_compiler=False,
)
VECTOR_ADD = Section(
    "vector_add",
    "Vector addition",
    "The smallest kernel: a grid of blocks, each with a run of elements; only the last block is "
    "masked, so that the others move 16 bytes or more at a time. Memory alone sets its time, and "
    "the figure to look at is the bandwidth beside that of a large copy. A CPU may pass 100% of "
    "it: it reads a line before it writes it, which a copy pays for every second byte it counts "
    "and an addition for every third.",
    run_vector_add,
)
MATMUL = Section(
    "matmul",
    "A tiled matrix product",
    "Two tiles are copied to shared memory and multiplied into a float32 fragment, over and over "
    "along K; T.Pipelined starts the next copies while a product runs. The same lines serve both "
    "machines: tile.gemm is T.gemm, and so tensor cores, where there are some, and loops that the "
    "C compiler vectorises on a CPU. The result is compared with float64 before it is timed "
    "beside PyTorch's own product.",
    run_matmul,
)
