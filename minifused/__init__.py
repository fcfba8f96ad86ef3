"""A small GPT-2-style language model on TileLang kernels, with a plain PyTorch twin beside it."""

__version__ = "0.1.0"
