"""Ends of a product: activations and all else, as expressions on a float32 accumulator."""

from __future__ import annotations

import math

import tilelang.language as T

from minifused.kernels.tile import Tile

ACTIVATIONS = ("gelu_tanh", "gelu", "relu")


def activate(tile: Tile, name: str, x):
    """The activation `name` of the float32 expression x.

    gelu_tanh: the tanh form of GPT-2 (Hendrycks and Gimpel, arXiv 1606.08415); gelu: the exact
    form x Φ(x); relu.
    """
    if name == "gelu_tanh":
        # 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)), which keeps its digits where tanh u is near -1.
        minus_2_log2e = -2.0 * math.log2(math.e)
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return x / (1.0 + tile.exp2(minus_2_log2e * u))
    if name == "gelu":
        return 0.5 * x * (1.0 + T.erf(x * math.sqrt(0.5)))
    return T.max(x, 0.0)


def finish(tile: Tile, activation: str | None, total, bias, residual):
    """The float32 expression act(total + bias) + residual; bias and residual may be None."""
    if bias is not None:
        total += T.cast(bias, "float32")
    if activation is not None:
        total = activate(tile, activation, total)
    return total if residual is None else total + T.cast(residual, "float32")
