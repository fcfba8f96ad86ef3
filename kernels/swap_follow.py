"""What the kernel that writes a residual stream makes of it for the layer norm to come.

See swap_fold.py, which completes that norm.
"""

import tilelang.language as T

from minifused.kernels.swap_fold import part_columns


@T.macro
def follow_tile(tile, done, after, gain, row, col, part):
    """Also write done * gain, and the two moments of each row of done, which are of `part`."""
    if after is not None:
        write_scaled(tile, done, gain, after[1], row, col)
        write_moments(tile, done, after[1].shape[1], after[2], row, col, part)


@T.macro
def write_scaled(tile, done, gain, scaled, row, col):
    for j, i in tile.parallel(done.shape[0], done.shape[1]):
        if row + j < scaled.shape[0] and col + i < scaled.shape[1]:
            y = done[j, i] * T.cast(gain[i], "float32")
            scaled[row + j, col + i] = T.cast(y, scaled.dtype)


@T.macro
def write_moments(tile, done, n, moments, row, col, part):
    """moments[row + j, 2 part …] = sum of done[j], and of squared deviations from its mean."""
    block_m, block_n = int(done.shape[0]), int(done.shape[1])
    x = tile.fragment((block_m, block_n), "float32")
    total = tile.fragment((block_m,), "float32")
    squares = tile.fragment((block_m,), "float32")
    count = part_columns(part, block_n, n)
    for j, i in tile.parallel(block_m, block_n):
        x[j, i] = T.if_then_else(col + i < n, done[j, i], 0.0)
    T.reduce_sum(x, total, dim=1)
    for j, i in tile.parallel(block_m, block_n):
        off = done[j, i] - total[j] / count
        x[j, i] = T.if_then_else(col + i < n, off * off, 0.0)
    T.reduce_sum(x, squares, dim=1)
    for j in tile.parallel(block_m):
        if row + j < moments.shape[0] and 2 * part < moments.shape[1]:
            moments[row + j, 2 * part] = total[j]
            moments[row + j, 2 * part + 1] = squares[j]
