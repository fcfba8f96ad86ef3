"""Timing in turns: contenders take turns in random order, so that a drifting clock hits all alike.

A GPU is timed with events around work that is queued at once, behind a flush of its L2 cache; a
host loop, and a CPU, with a wall clock between synchronisations.
"""

import random
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from minifused.benchmark.records import Spread

FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU so far
CEILING_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}  # of the copy that finds the bandwidth
CEILING_SIZE = {"cuda": 8192, "cpu": 1024}  # of the matrices that find the matmul rate

Work = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


def in_turns(
    measure: Callable[[Work], float], works: Mapping[Name, Work], rounds: int, seed: int = 0
) -> dict[Name, list[float]]:
    """Measure each of `works` once a round, in an order drawn anew; all values, by name."""
    order, generator = list(works), random.Random(seed)
    values: dict[Name, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            values[name].append(measure(works[name]))
    return values


def wall_seconds(work: Work, device: torch.device) -> float:
    """Seconds until the work is done, its launches included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds that a kernel takes on a device that starts with a cold cache."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, work: Work) -> float:
        if self.device.type != "cuda":
            return wall_seconds(work, self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()  # it also keeps the GPU busy while the host queues the work
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def copy_of(moved: int, device: torch.device) -> Callable[[], Tensor]:
    """A copy between two tensors that moves so many bytes: half are read, half are written."""
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def copy_bytes_per_s(device: torch.device, rounds: int = 10) -> float:
    """The memory bandwidth of a large copy: bytes read and bytes written, a second."""
    moved = 2 * CEILING_BYTES[device.type]
    copy = copy_of(moved, device)
    times = [wall_seconds(copy, device) for _ in range(rounds + 2)]
    return moved / Spread.of(times[2:]).median


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """What PyTorch's own product of large random matrices reaches, FLOP/s."""
    n = CEILING_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    times = [wall_seconds(lambda: a @ b, device) for _ in range(rounds + 2)]
    return 2 * n**3 / Spread.of(times[2:]).median
