"""The KV cache: preallocated, with a length for each batch row."""

import torch
from torch import Tensor

from minifused.config import GPTConfig


class KVCache:
    """Keys and values of the positions seen so far, in buffers that are written in place.

    Attributes:
        keys, values: (n_layer, B, capacity, H, D), the one cache layout of all kernels.
        lengths: (B,) int32 on the device: how many positions of each row are filled.
        ends: (B,) int32, the lengths with the positions that are being written.
        longest: the largest length of a row that goes on, as a plain int, so that the host need
            not ask the device.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        shape = (config.n_layer, batch_size, capacity, config.n_head, config.head_dim)
        # Zeros, as a masked key still meets the weight 0, which NaN would survive.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int32)
        self.ends = torch.zeros_like(self.lengths)
        self.longest = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def reset(self) -> None:
        """Forget all positions."""
        self.lengths.zero_()
        self.longest = 0

    def advance(self, counts: int | Tensor, longest: int) -> None:
        """Count new positions, the same of each row or (B,) of them, once all layers wrote them."""
        self.lengths += counts
        self.longest = longest
