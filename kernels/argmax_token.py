"""The first of the largest columns of a row, by one block."""

import tilelang.language as T

from minifused.kernels.draw_token import NUM_THREADS, WARPS


@T.macro
def _keep_better(top, token, other, other_token):
    """Of two maxima with their columns the larger, of equal ones the first, or a NaN."""
    if T.isnan(other) or other > top[0] or (other == top[0] and other_token < token[0]):
        top[0] = other
        token[0] = other_token


def argmax_macro(valid: int):
    """A macro that takes the first of the largest of the first `valid` columns."""

    @T.macro
    def argmax(P, row, tx, token, top):
        """token and top = the first of the largest columns of P[row] and its value, or a NaN's."""
        values = T.alloc_shared((WARPS,), "float32")
        columns = T.alloc_shared((WARPS,), "int32")
        count = -(-valid // NUM_THREADS)
        p = T.alloc_local((count,), "float32")
        for i in T.unroll(count):  # all loads are on their way before the first is compared
            p[i] = P[row, T.min(i * NUM_THREADS + tx, valid - 1)]
        top[0] = p[0]
        token[0] = T.min(tx, valid - 1)
        for i in T.unroll(1, count):
            _keep_better(top, token, p[i], T.min(i * NUM_THREADS + tx, valid - 1))
        for z in T.unroll(5):
            _keep_better(top, token, T.shfl_xor(top[0], 1 << z), T.shfl_xor(token[0], 1 << z))
        if tx % 32 == 0:
            values[tx // 32] = top[0]
            columns[tx // 32] = token[0]
        T.sync_threads()
        for i in T.serial(WARPS):
            _keep_better(top, token, values[i], columns[i])

    return argmax
