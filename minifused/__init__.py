"""A small GPT-2-style language model on fused TileLang kernels, proved against a PyTorch twin."""

from typing import TYPE_CHECKING, Any

from minifused.environment import prepare_tilelang

if TYPE_CHECKING:
    from minifused.engine import GPT as GPT

__version__ = "0.1.0"

prepare_tilelang()  # before any module imports TileLang


def __getattr__(name: str) -> Any:
    """`minifused.GPT`, imported when it is asked for: it brings PyTorch and TileLang."""
    if name == "GPT":
        from minifused.engine import GPT

        return GPT
    raise AttributeError(f"module 'minifused' has no attribute {name!r}")
