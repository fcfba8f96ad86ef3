"""What kernels with an online softmax share: what scores are shifted by, and a step of it."""

import tilelang.language as T

from minifused.kernels.tile import Tile


def shift_by(maximum):
    """What scores are shifted by: a maximum, or 0 where that is -inf, as -inf - -inf is NaN."""
    return T.if_then_else(maximum == -T.infinity("float32"), 0.0, maximum)


@T.macro
def online_softmax(tile: Tile, s, m, l, rescale, shift, block_sum, scale_log2):
    """Turn scores s (rows, keys) into weights exp2((s - m) * scale_log2), unnormalised.

    m and l (rows) are the running maximum and the sum of the weights so far; both move on.
    `rescale` (rows) becomes the factor by which all earlier weights shrink. shift and block_sum
    (rows) are scratch. Masked scores are -inf.
    """
    rows, keys = int(s.shape[0]), int(s.shape[1])
    T.copy(m, rescale)
    T.reduce_max(s, m, dim=1, clear=False)
    for i in tile.parallel(rows):
        shift[i] = shift_by(m[i])
        rescale[i] = tile.exp2((rescale[i] - shift[i]) * scale_log2)
    for i, j in tile.parallel(rows, keys):
        # Not s * scale - m * scale, which leaves a large score the rounding of its product.
        s[i, j] = tile.exp2((s[i, j] - shift[i]) * scale_log2)
    T.reduce_sum(s, block_sum, dim=1)
    for i in tile.parallel(rows):
        l[i] = l[i] * rescale[i] + block_sum[i]
