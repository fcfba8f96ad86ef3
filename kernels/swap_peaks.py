"""What a softmax over a product's rows adds up first: of each part of a row the peak and the sum.

The sum is that of exp(x - peak) (Milakov and Gimelshein, arXiv 1805.02867). The product has its
results in registers, so that the softmax is spared a kernel, and a reading of them all.
"""

import tilelang.language as T

from minifused.kernels.online_softmax import shift_by


@T.macro
def write_peaks(tile, done, peaks, row, col, part):
    """Of done (block_m, block_n), from row and col on, to column 2 * part … of a tensor.

    peaks: that tensor, (m, 2 * parts) float32, and how many columns a row has; or None.
    """
    if peaks is not None:
        P, columns = peaks
        block_m, block_n = int(done.shape[0]), int(done.shape[1])
        x = tile.fragment((block_m, block_n), "float32")
        top = tile.fragment((block_m,), "float32")
        total = tile.fragment((block_m,), "float32")
        for j, i in tile.parallel(block_m, block_n):
            x[j, i] = T.if_then_else(col + i < columns, done[j, i], -T.infinity("float32"))
        T.reduce_max(x, top, dim=1)
        for j, i in tile.parallel(block_m, block_n):
            shift = shift_by(top[j])
            x[j, i] = tile.exp(x[j, i] - shift)
        T.reduce_sum(x, total, dim=1)
        for j in tile.parallel(block_m):
            if row + j < P.shape[0] and 2 * part < P.shape[1]:
                P[row + j, 2 * part] = top[j]
                P[row + j, 2 * part + 1] = total[j]
