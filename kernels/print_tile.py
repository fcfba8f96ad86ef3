"""T.print at work: a block prints a tile from shared memory and one from its registers.

For learning to look into a kernel. On CUDA only: T.print does not build for target c.
"""

import tilelang.language as T
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.tile import Tile

COLUMNS = 8


def print_tile_kernel(tile: Tile, dtype: str):
    """Build Y (1, 8) = X (1, 8) squared; the first thread prints both on their way."""

    @T.prim_func
    def print_tile(X: T.Tensor((1, COLUMNS), dtype), Y: T.Tensor((1, COLUMNS), dtype)):
        with T.Kernel(1, threads=32):
            X_shared = tile.shared((1, COLUMNS), dtype)
            squares = tile.shared((1, COLUMNS), dtype)
            T.copy(X, X_shared)
            T.print(X_shared, msg="X_shared")
            for i, j in tile.parallel(1, COLUMNS):
                squares[i, j] = X_shared[i, j] * X_shared[i, j]
            T.print(squares, msg="squares")
            T.copy(squares, Y)

    return print_tile


def print_tile(x: Tensor, out: Tensor) -> None:
    """Write x (1, 8) squared to out (1, 8), both on CUDA; prints when the device is in step."""
    compile_kernel(print_tile_kernel, tile_for(x.device), dtype_name(x.dtype))(x, out)
