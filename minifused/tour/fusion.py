"""Kernels that keep in registers what PyTorch's operations write to memory in between."""

from collections.abc import Iterator

from minifused.tour.blocks import Block, Figure, Note, Section
from minifused.tour.source import statement
from minifused.tour.stage import Stage, against_torch, median, race, race_blocks, right
from minifused.workloads import AttentionWorkload, LinearWorkload, SoftmaxWorkload

UNFUSED = "torch eager"
MLP_SIZES = {"cpu": (128, 768, 192), "cuda": (8192, 3072, 768)}
ROWS = {"cpu": SoftmaxWorkload("rows", 16, 50257), "cuda": SoftmaxWorkload("rows", 4096, 50257)}
ATTENTION_SIZES = {"cpu": (1, 251, 4, 64), "cuda": (4, 2047, 16, 64)}  # batch, length, heads, dim


def run_epilogue(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("gemm.py", "if has_bias")
    yield statement("gemm.py", "if activation is not None")
    yield statement("epilogue.py", "def activate")
    sizes = MLP_SIZES[stage.device.type]
    plain = race(stage, "linear", LinearWorkload("product alone", *sizes, bias=False))
    fused = race(stage, "linear", LinearWorkload("bias and GELU", *sizes, "gelu_tanh"))
    for records in (plain, fused):
        yield from race_blocks(f"{records[0].case}, {records[0].dtype}", records)
    ours, theirs = (
        100 * (time / median(before, "time_us") - 1)
        for time, before in (
            (median(fused[0], "time_us"), plain[0]),
            (next(median(r, "time_us") for r in fused if r.contender == UNFUSED), plain[1]),
        )
    )
    yield Note(
        f"Bias and GELU add {ours:.0f}% to our product's time, and {theirs:.0f}% to that of "
        f"PyTorch, which runs GELU as an operation of its own."
    )
    yield right(fused[0])
    yield Figure("bias + GELU cost", ours, "%")
    yield Figure("unfused torch's cost", theirs, "%")
    yield against_torch(fused)


def run_softmax(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("row_softmax.py", "for block in T.serial(T.ceildiv(valid")
    records = race(stage, "softmax", ROWS[stage.device.type])
    yield from race_blocks(f"{records[0].case}, {records[0].dtype}", records)
    yield right(records[0])
    yield Figure("bandwidth", median(records[0], "gb_per_s"), "GB/s")
    yield Figure("of a large copy's", 100 * median(records[0], "roofline_share"), "%")
    yield against_torch(records)


def run_attention(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("flash_attention.py", "for kb in T.Pipelined")
    yield statement("online_softmax.py", "def online_softmax")
    batch, length, heads, dim = ATTENTION_SIZES[stage.device.type]
    for name, causal in (("causal", True), ("not causal", False)):
        workload = AttentionWorkload(name, batch, length, length, heads, dim, causal)
        records = race(stage, "attention", workload)
        yield from race_blocks(f"{records[0].case}, {records[0].dtype}", records)
        yield right(records[0], f"{name} error")
        yield Figure(f"{name} rate", median(records[0], "tflops"), "TFLOP/s")
        yield against_torch(records, name)
    scores = batch * heads * length * length * 4
    yield Note(
        f"The score matrix of this shape, {scores / 2**20:.1f} MiB in float32, is never stored."
    )


EPILOGUE = Section(
    "epilogue",
    "A fused epilogue",
    "Before its only store, the product's float32 accumulator takes the bias and the GELU in "
    "place. PyTorch eager stores the product, reads it back for the GELU and stores it again, "
    "rounded in between. Look at what the epilogue adds to the time of the plain product, here "
    "and there: on a GPU it should be little, on one CPU core the exponentials themselves take "
    "time.",
    run_epilogue,
)
SOFTMAX = Section(
    "softmax",
    "Row softmax",
    "A row of the vocabulary's width does not fit in registers, so it is read twice in pieces: "
    "once for the running maximum and the sum rescaled to it, once for the values. Columns past "
    "the end are masked with -inf, which is neutral for a maximum and has the exponential 0. The "
    "check is relative to each probability, not only to the largest, since zeros would pass the "
    "latter.",
    run_softmax,
)
ATTENTION = Section(
    "attention",
    "FlashAttention",
    "A block of queries meets the keys block by block, and keeps the running maximum and sum of "
    "each row; when the maximum moves, what was summed is rescaled. The length is odd on purpose: "
    "the last block of keys is masked, and the same compiled kernel takes any length. Causal "
    "blocks beyond the last visible key are not visited, so the causal case has half the work.",
    run_attention,
)
