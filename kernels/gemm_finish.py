"""What gemm_sm90 makes of its products: the epilogue, and stores, as macros of a block."""

import math
from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.epilogue import activate
from minifused.kernels.tile import Tile

RESIDUAL_AHEAD = 128  # registers a thread for sums and residual, if that is loaded ahead


class Output(NamedTuple):
    tile: Tile
    activation: str | None
    bias: Any  # (n,), None without one
    R: Any  # (m, n), None without one
    C: Any


@T.macro
def begin_tile(out: Output, acc, b, row, col):
    """acc = bias: adding it first costs no more than zeros."""
    if out.bias is None:
        T.clear(acc)
    else:
        T.copy(out.bias[col], b)
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            acc[i, j] = T.cast(b[j], "float32")


@T.macro
def load_residual(out: Output, r, row, col):
    for i, j in T.Parallel(r.shape[0], r.shape[1]):
        if row + i < out.C.shape[0] and col + j < out.C.shape[1]:
            r[i, j] = out.R[row + i, col + j]


@T.macro
def finish_tile(out: Output, acc, r, staged, row, col):
    """C from row and col on = act(acc) + r, in its dtype."""
    if out.activation is not None:
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            acc[i, j] = _activate(out, acc[i, j])
    if out.R is not None:
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            acc[i, j] += T.cast(r[i, j], "float32")
    if staged is None:
        for i, j in T.Parallel(acc.shape[0], acc.shape[1]):
            if row + i < out.C.shape[0] and col + j < out.C.shape[1]:
                out.C[row + i, col + j] = T.cast(acc[i, j], out.C.dtype)
    else:
        T.copy(acc, staged)
        T.copy(staged, out.C[row : row + acc.shape[0], col : col + acc.shape[1]])


def _activate(out: Output, x):
    """With --use_fast_math T.tanh is one instruction, off by 2^-11 at most: less than bfloat16."""
    if out.activation == "gelu_tanh" and out.C.dtype == "bfloat16":
        half = 0.5 * x
        u = x * (math.sqrt(2 / math.pi) + math.sqrt(2 / math.pi) * 0.044715 * (x * x))
        return half + half * T.tanh(u)
    return activate(out.tile, out.activation, x)
