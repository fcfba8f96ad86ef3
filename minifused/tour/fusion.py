"""Kernels that keep in registers what PyTorch's operations write to memory in between."""

from collections.abc import Iterator
from functools import partial

import torch

from minifused import ops
from minifused.benchmark import clock
from minifused.benchmark.records import OURS, Spread
from minifused.parity import eager_linear
from minifused.tour.blocks import Bar, Block, Chart, Figure, Note, Section, Table
from minifused.tour.source import statement
from minifused.tour.stage import (
    ROUNDS,
    Stage,
    against_torch,
    compile_ours,
    median,
    memory_race,
    race,
    race_blocks,
    right,
)
from minifused.workloads import AttentionWorkload, LinearWorkload, SoftmaxWorkload

UNFUSED = "torch eager"
PAIR_ROUNDS = 3  # times as many as of a race: the difference is small
MLP_SIZES = {"cpu": (128, 768, 192), "cuda": (8192, 3072, 768)}
ROWS = {"cpu": SoftmaxWorkload("rows", 16, 50257), "cuda": SoftmaxWorkload("rows", 4096, 50257)}
ATTENTION_SIZES = {"cpu": (1, 251, 4, 64), "cuda": (4, 2047, 16, 64)}  # batch, length, heads, dim


def run_epilogue(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("gemm.py", "if has_bias")
    yield statement("gemm.py", "if activation is not None")
    yield statement("epilogue.py", "def activate")
    sizes = MLP_SIZES[stage.device.type]
    workload = LinearWorkload("bias and GELU", *sizes, "gelu_tanh")
    compile_ours(stage, "linear", [workload, LinearWorkload("product", *sizes, bias=False)])
    records = race(stage, "linear", workload)
    yield from race_blocks(f"{records[0].case}, {records[0].dtype}", records)
    times = with_and_without(stage, workload)
    yield from compared("The product alone, and with bias and GELU", times)
    ours, theirs = (
        100 * (times[f"{who}, bias and GELU"].median / times[f"{who}, product"].median - 1)
        for who in (OURS, UNFUSED)
    )
    yield Note(
        f"Timed in turns with the product alone, bias and GELU add {ours:.0f}% to ours, and "
        f"{theirs:.0f}% to PyTorch's, which runs GELU as an operation of its own."
    )
    yield right(records[0])
    yield Figure("bias + GELU cost", ours, "%")
    yield Figure("unfused torch's cost", theirs, "%")
    yield against_torch(records)


def with_and_without(stage: Stage, workload: LinearWorkload) -> dict[str, Spread]:
    """Seconds of the epilogue's operation and of its product alone, ours and PyTorch's."""
    generator = torch.Generator(stage.device).manual_seed(0)
    inputs = workload.inputs(stage.device, stage.dtype, generator)
    product = {**inputs, "bias": None, "activation": None}
    works: dict[str, clock.Work] = {
        f"{OURS}, product": partial(ops.linear, **product),
        f"{OURS}, bias and GELU": partial(ops.linear, **inputs),
        f"{UNFUSED}, product": partial(eager_linear, **product),
        f"{UNFUSED}, bias and GELU": partial(eager_linear, **inputs),
    }
    for work in (*works.values(), *works.values()):  # compiled, and warm
        work()
    rounds = PAIR_ROUNDS * ROUNDS[stage.device.type]
    seconds = clock.in_turns(clock.Stopwatch(stage.device), works, rounds)
    return {name: Spread.of(values) for name, values in seconds.items()}


def compared(title: str, times: dict[str, Spread]) -> Iterator[Block]:
    bars = tuple(Bar.of(name, spread) for name, spread in times.items())
    rows = tuple((b.name, f"{b.value:.1f}", f"{b.low:.1f}-{b.high:.1f}") for b in bars)
    yield Table(title, ("", "us", "10-90%"), rows)
    yield Chart(title, "us", bars)


def run_softmax(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("row_softmax.py", "for block in T.serial(T.ceildiv(valid")
    yield from memory_race(stage, "softmax", ROWS[stage.device.type])


def run_attention(stage: Stage) -> Iterator[Block | Figure]:
    yield statement("flash_attention.py", "for kb in T.Pipelined")
    yield statement("online_softmax.py", "def online_softmax")
    batch, length, heads, dim = ATTENTION_SIZES[stage.device.type]
    workloads = [
        AttentionWorkload(name, batch, length, length, heads, dim, causal)
        for name, causal in (("causal", True), ("not causal", False))
    ]
    compile_ours(stage, "attention", workloads)
    for workload in workloads:
        name = workload.name
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
    "A row of the vocabulary's width does not fit in registers, so it goes in pieces: once for the "
    "running maximum and the sum rescaled to it, once for the values. A CPU reads it twice; a GPU "
    "keeps in shared memory what fits of it, and takes a few rows by the piece. Columns past the "
    "end are masked with -inf, which is neutral for a maximum and has the exponential 0. The "
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
