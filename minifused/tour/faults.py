"""A softmax whose schedules fail, each in its own way; a module, as workers have to import it."""

from dataclasses import replace
from typing import Any

import tilelang.language as T

from minifused.kernels.row_softmax import row_softmax_kernel
from minifused.kernels.schedule import RowSchedule
from minifused.kernels.tile import Tile
from minifused.tuning.tunables import TUNABLES
from minifused.workloads import SoftmaxWorkload

# What a block of this many columns does.
DOES_NOT_COMPILE, IS_WRONG, HANGS, GOOD = 1, 2, 3, 64
STEPS = 1 << 36  # hours on a GPU, minutes on a CPU: it ends even if nobody ends it


def broken_kernel(n: int, threads: int) -> Any:
    """Multiplies tiles that do not fit: 16 columns by 32 rows."""
    m = T.dynamic("m")

    @T.prim_func
    def broken(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):  # type: ignore
        with T.Kernel(m, threads=threads) as row:
            a = T.alloc_shared((16, 16), "float16")
            b = T.alloc_shared((32, 16), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            T.gemm(a, b, c)
            Y[row, 0] = X[row, 0] + c[0, 0]

    return broken


def endless_kernel(n: int, threads: int) -> Any:
    """Adds up for longer than anyone waits."""
    m = T.dynamic("m")

    @T.prim_func
    def endless(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):  # type: ignore
        with T.Kernel(m, threads=threads) as row:
            for i in T.serial(STEPS):
                Y[row, i % n] = Y[row, (i + 1) % n] * 0.5 + X[row, i % n]

    return endless


def faulty_kernel(
    tile: Tile, n: int, valid: int, dtype: str, out_dtype: str, schedule: RowSchedule
) -> Any:
    """The model's softmax, or a fault in its place."""
    if schedule.block_n == DOES_NOT_COMPILE:
        return broken_kernel(n, schedule.num_threads)
    if schedule.block_n == HANGS:
        return endless_kernel(n, schedule.num_threads)
    good = rule(tile)
    if schedule.block_n == IS_WRONG:  # it leaves out the last column
        return row_softmax_kernel(tile, n, valid - 1, dtype, out_dtype, good)
    return row_softmax_kernel(tile, n, valid, dtype, out_dtype, good)


def rule(tile: Tile) -> RowSchedule:
    return RowSchedule(GOOD, 32 if tile.is_cuda else 1)


def recipe(tile: Tile, dtype: str, workload: SoftmaxWorkload) -> tuple[Any, tuple, RowSchedule]:
    return faulty_kernel, (workload.n, workload.n, dtype, dtype), rule(tile)


TUNABLE = replace(TUNABLES["row_softmax"], recipe=recipe)
