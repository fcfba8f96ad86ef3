"""Vector addition, the smallest kernel: all of it is moving memory.

Whole blocks go without a mask, so that each thread moves 16 bytes or more at a time; the block with
the end of the vectors is masked and goes by the element.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels import buckets
from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.schedule import ITEM_BYTES, RowSchedule, row_schedule, tuned
from minifused.kernels.tile import Tile

BLOCK_BYTES = 256 * 32  # of each vector: on most, two accesses a thread are on their way


def vector_add_kernel(tile: Tile, dtype: str, schedule: RowSchedule):
    """Build C (n) = A (n) + B (n), added in float32; n is dynamic."""
    block_n = schedule.block_n
    n = T.dynamic("n", "int64")

    @T.macro
    def add(A, B, C, i):
        C[i] = T.cast(T.cast(A[i], "float32") + T.cast(B[i], "float32"), dtype)

    @T.prim_func
    def vector_add(
        A: T.Tensor((n,), dtype),
        B: T.Tensor((n,), dtype),
        C: T.Tensor((n,), dtype),
    ):
        with T.Kernel(T.ceildiv(n, block_n), threads=schedule.num_threads) as block:
            start = T.cast(block, "int64") * block_n
            if start + block_n <= n:
                for j in tile.parallel(block_n):
                    add(A, B, C, start + j)
            else:
                for j in tile.parallel(block_n):
                    if start + j < n:
                        add(A, B, C, start + j)

    return vector_add


def vector_add_schedule(tile: Tile, dtype: str) -> RowSchedule:
    block_n = BLOCK_BYTES // ITEM_BYTES[dtype]
    rule = row_schedule(tile, block_n, block_n)
    return tuned(tile, "vector_add", buckets.ANY_LENGTH, dtype, rule)


@functools.cache
def _select(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    tile, name = tile_for(device), dtype_name(dtype)
    return compile_kernel(vector_add_kernel, tile, name, vector_add_schedule(tile, name))


def vector_add(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Write x + y to out, all (n,) and contiguous, of one dtype."""
    _select(x.device, x.dtype)(x, y, out)
