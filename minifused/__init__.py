"""A small GPT-2-style language model on fused TileLang kernels, proved against a PyTorch twin."""

from minifused.environment import prepare_tilelang

__version__ = "0.1.0"

prepare_tilelang()  # before any module imports TileLang
