"""A softmax whose schedules fail, each in its own way; in a module that workers import too."""

import os
import signal
import time

import tilelang.language as T

from minifused.kernels.row_softmax import row_softmax_kernel
from minifused.kernels.schedule import RowSchedule
from minifused.tuning.tunables import TUNABLES, Tunable

# What a block of this many columns does.
RAISES, HANGS_COMPILING, HANGS_RUNNING, DIES, LIES, LEAVES_A_HOLE = range(1, 7)
FAULTS = (RAISES, HANGS_RUNNING, DIES, LIES, LEAVES_A_HOLE)
GOOD, RULE = RowSchedule(16, 1), RowSchedule(32, 1)
OVER_BUDGET, TWO_THREADS = RowSchedule(1 << 20, 1), RowSchedule(16, 2)


def endless_kernel(tile, n):
    threads = 32 if tile.is_cuda else 1
    m = T.dynamic("m")

    @T.prim_func
    def endless(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=threads) as row:
            for i in T.serial(1 << 60):
                Y[row, i % n] = Y[row, (i + 1) % n] * 0.5 + X[row, i % n]

    return endless


def faulty_kernel(tile, n, valid, dtype, out_dtype, schedule):
    fault = schedule.block_n
    if fault == RAISES:
        raise ValueError("no such tile")
    if fault == HANGS_COMPILING:
        time.sleep(600)
    if fault == HANGS_RUNNING:
        return endless_kernel(tile, n)
    if fault == DIES:
        os.kill(os.getpid(), signal.SIGSEGV)
    good = RowSchedule(16, 1)
    if fault == LIES:  # a softmax over all but the last column
        return row_softmax_kernel(tile, n, valid - 1, dtype, out_dtype, good)
    if fault == LEAVES_A_HOLE:
        return hollow_kernel(tile, n)
    return row_softmax_kernel(tile, n, valid, dtype, out_dtype, schedule)


def hollow_kernel(tile, n):
    """Writes nothing."""
    m = T.dynamic("m")

    @T.prim_func
    def hollow(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=1) as row:
            if X[row, 0] > 1e30:
                Y[row, 0] = 0.0

    return hollow


def recipe(tile, dtype, workload):
    return faulty_kernel, (workload.n, workload.n, dtype, dtype), RULE


def space(tile, dtype, workload):
    return [*(RowSchedule(fault, 1) for fault in FAULTS), OVER_BUDGET, TWO_THREADS, GOOD]


def hanging_space(tile, dtype, workload):
    return [RowSchedule(HANGS_COMPILING, 1), GOOD]


def gpu_recipe(tile, dtype, workload):
    return faulty_kernel, (workload.n, workload.n, dtype, dtype), RowSchedule(128, 32)


def gpu_space(tile, dtype, workload):
    return [RowSchedule(HANGS_RUNNING, 32), RowSchedule(64, 32)]


def faulty_space(tile, dtype, workload):
    return [RowSchedule(RAISES, 1)]


def faulty_recipe(tile, dtype, workload):
    return faulty_kernel, (workload.n, workload.n, dtype, dtype), RowSchedule(RAISES, 1)


def tunable(recipe=recipe, space=space) -> Tunable:
    real = TUNABLES["row_softmax"]
    return Tunable(
        "row_softmax", recipe, space, real.bucket, real.blocks, real.sizes, real.workloads
    )  # fmt: skip
