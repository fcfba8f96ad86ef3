"""Activations, as expressions on a float32 accumulator."""

from __future__ import annotations

import math

import tilelang.language as T

ACTIVATIONS = ("gelu_tanh", "gelu", "relu")


def activate(name: str, x):
    """The activation `name` of the float32 expression x.

    gelu_tanh: the tanh form of GPT-2 (Hendrycks and Gimpel, arXiv 1606.08415); gelu: the exact
    form x Φ(x); relu.
    """
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + T.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    if name == "gelu":
        return 0.5 * x * (1.0 + T.erf(x * math.sqrt(0.5)))
    return T.max(x, 0.0)
