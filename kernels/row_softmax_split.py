"""Softmax of a few wide rows: too few to give each core of a GPU one, so that pieces of them go.

See row_softmax_pieces for the kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel
from minifused.kernels.limits import SMS
from minifused.kernels.row_lanes import VECTOR_BYTES, row_lanes
from minifused.kernels.row_softmax_pieces import (
    count_pieces,
    piece_sums_kernel,
    piece_values_kernel,
)
from minifused.kernels.schedule import ITEM_BYTES, RowSchedule, next_power_of_2
from minifused.kernels.tile import Tile

SPLIT_ROWS = (1, 8, 32, 128, 264)  # edges of what is compiled apart; more rows fill a GPU's cores
BLOCKS = 4 * SMS  # of a grid, or more: four for each core
PIECES = (1024, 8192)  # columns, so that a piece is worth a block and fits in its registers
MAX_PIECES = 128  # a thread each to merge
THREAD_VECTORS = 4  # of a piece, that a thread asks for at once
MAX_PARTS = 1024  # of a row with peaks: to merge more costs what another kernel would
MIN_SPLIT, MAX_SPLIT = 8192, MAX_PIECES * PIECES[1]  # columns of a row: more than, and up to


def split_schedule(rows: int, n: int, dtype: str) -> RowSchedule:
    """The columns of a piece, and the threads that share them.

    float32 rows are cut alike whatever their number: a row of a length that is a multiple of a
    vector has the same result, bit for bit, alone and among up to 264.
    """
    least, most = PIECES
    columns = least if dtype == "float32" else next_power_of_2(rows * n // BLOCKS)
    columns = max(columns, least, next_power_of_2(-(-min(n, MAX_SPLIT) // MAX_PIECES)))
    columns = min(columns, most)
    vectors, pieces = columns * ITEM_BYTES[dtype] // VECTOR_BYTES, -(-n // columns)
    return RowSchedule(columns, min(256, max(vectors // THREAD_VECTORS, next_power_of_2(pieces))))


def piece_columns(n: int) -> int:
    """The columns of a piece of a float32 row."""
    return split_schedule(1, n, "float32").block_n


def is_split(rows: int, valid: int) -> bool:
    """Whether a GPU takes so many rows in pieces, with the kernels of row_softmax_split."""
    return rows <= SPLIT_ROWS[-1] and MIN_SPLIT < valid <= MAX_SPLIT


def count_masses(rows: int, n: int, valid: int) -> int:
    """The pieces of a float32 row on a GPU whose masses `row_softmax` leaves, 0 for none.

    It does where rows are cut, and all begin where a vector does, so that all are cut alike.
    """
    if not is_split(rows, valid) or n * ITEM_BYTES["float32"] % VECTOR_BYTES:
        return 0
    return max(1, -(-(valid - valid % 4) // piece_columns(n)))


def compile_split(
    tile: Tile, n: int, valid: int, dtype: str, out_dtype: str, schedule: RowSchedule
) -> Callable[..., None]:
    """A function of x (m, n), out (m, n), masses and peaks that runs row_softmax_split's kernels.

    With peaks (m, parts, 2) of not too many parts the first of the two is spared.
    """
    static = tile, n, valid, dtype, out_dtype
    pieces = count_pieces(row_lanes(tile, valid, dtype, out_dtype, schedule))

    def launch(
        x: Tensor, out: Tensor, masses: Tensor | None = None, peaks: Tensor | None = None
    ) -> None:
        if peaks is None or peaks.shape[1] > MAX_PARTS:
            peaks = torch.empty(x.shape[0], pieces, 2, dtype=torch.float32, device=x.device)
            compile_kernel(piece_sums_kernel, *static, schedule)(x, peaks)
        to_draw, parts = masses is not None, peaks.shape[1]
        values = compile_kernel(piece_values_kernel, *static, to_draw, schedule, parts)
        values(x, peaks, out, masses)

    return launch
