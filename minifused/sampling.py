"""Logits to the next token; every random number is a function of (seed, sample, position).

Nothing here reads or writes global random state, and `draw` is exact integer arithmetic, so a
token depends on its own row alone: the same on CPU and CUDA, eager and captured, in any batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minifused.errors import UserError

Word = int | Tensor  # 32 bits, unsigned, held in a Python int or an int64 tensor

_LOW32 = 0xFFFFFFFF
_UNIFORM_BITS = 24  # the integers that float32 holds without gaps
_WEIGHT_BITS = 50  # a sum of weights below 8 is an integer that float64 holds


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).

    Takes and returns 32-bit words, least significant first: Python ints, or int64 tensors that
    broadcast. An int64 product wraps mod 2**64; masking after the shift undoes its sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _LOW32) ^ c1 ^ k0, p1 & _LOW32
        c2, c3 = ((p0 >> 32) & _LOW32) ^ c3 ^ k1, p0 & _LOW32
        k0 = (k0 + 0x9E3779B9) & _LOW32
        k1 = (k1 + 0xBB67AE85) & _LOW32
    return c0, c1, c2, c3


def philox_uniform(seed: int | Tensor, sample: Tensor, position: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), a multiple of 2**-24 each, on the device of the arguments.

    The key is the low and the high word of `seed` (an int, or an int64 tensor); the counter is
    (position, sample, 0, 0), both mod 2**32. `sample` and `position` are integer tensors that
    broadcast: (S, 1) against (1, T) draws float32 (S, T), all numbers of a run at once.
    """
    if isinstance(seed, Tensor):
        seed = seed.to(torch.int64)
    key = (seed & _LOW32, (seed >> 32) & _LOW32)
    low = position.to(torch.int64) & _LOW32
    high = sample.to(torch.int64) & _LOW32
    word = torch.as_tensor(philox4x32((low, high, 0, 0), key)[0])
    return (word >> (32 - _UNIFORM_BITS)).to(torch.float32) * 2.0**-_UNIFORM_BITS


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token: temperature 0 is greedy, top_k 0 keeps the whole vocabulary.

    Raises UserError for a temperature that is negative or not finite, a negative top_k, or a seed
    outside [0, 2**63).
    """

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must be finite and at least 0, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0: no limit), not {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be at least 0 and below 2**63, not {self.seed}")


def _below_top(logits: Tensor, top: Tensor) -> Tensor:
    """True outside the k largest entries of each row, given their values `top` (B, k), descending.

    Of entries equal to the k-th, the lowest ids are inside; topk itself promises no order there.
    """
    kth = top[:, -1:]  # (B, 1)
    room = (top == kth).sum(dim=-1, keepdim=True)  # (B, 1): how many entries of that value fit
    spent = (logits == kth).cumsum(dim=-1) > room  # (B, V): from the first one that does not fit
    return torch.where(spent, logits <= kth, logits < kth)


def scale_and_filter(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits ready for a softmax: float32 (B, V) to float32 (B, V), with a row maximum of 0.

    Exactly min(top_k, V) entries of a row survive (of equal ones the lowest ids), the others are
    -inf. Subtracting the maximum first leaves the argmax finite at any temperature.
    """
    # T and 1/T both stay normal float32 numbers, so 0/0 and 0 * inf cannot arise
    temperature = min(max(params.temperature, 1e-37), 1e37)
    if not 0 < params.top_k < logits.shape[-1]:
        return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)
    # chosen on the raw logits, since scaling can round different ones to a tie
    top = logits.topk(params.top_k, dim=-1).values  # (B, k)
    scaled = (logits - top[:, :1]).div_(temperature)
    return scaled.masked_fill_(_below_top(logits, top), -torch.inf)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: (B, V) and (B,) in [0, 1), both float32, to token ids int64 (B,).

    Rows must sum to about 1. They are rounded down to multiples of 2**-50 and summed as integers,
    so the sum has no rounding and no order, and the last step of the CDF is its total: a token of
    probability zero is never drawn, whatever the uniform.
    """
    cdf = (probabilities * 2.0**_WEIGHT_BITS).to(torch.int64).cumsum(dim=-1)  # (B, V)
    # a float32 uniform is at most 1 - 2**-24, so that the target is below the total
    target = (cdf[:, -1:] * uniforms.double()[:, None]).to(torch.int64)  # (B, 1)
    token = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    # only a row of NaN runs past the end; a valid id lets the loop go on until check_logits
    return token.clamp_(max=probabilities.shape[-1] - 1)


def sample(
    logits: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
    softmax: Callable[[Tensor], Tensor],
) -> Tensor:
    """The next token of each row: float32 (B, V) to int64 (B,).

    Temperature 0 takes the argmax, of equal logits the lowest id, and ignores `uniforms`.
    Otherwise `softmax` (over the last dimension) of the filtered logits is drawn from with
    `uniforms`, float32 (B,) in [0, 1).
    """
    if params.temperature == 0:
        return logits.argmax(dim=-1)  # documented to return the first of equal maxima
    return draw(softmax(scale_and_filter(logits, params)), uniforms)


def check_logits(logits: Tensor, step: int) -> None:
    """Raises FloatingPointError unless each row of logits (B, V) has a finite maximum.

    The message names `step` and the first bad row: one with a NaN, a +inf, or nothing but -inf.
    Waits for the device, so the caller chooses how often to look.
    """
    bad = ~logits.amax(dim=-1).isfinite()  # amax passes a NaN on
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise FloatingPointError(f"logits are not finite at step {step}, row {row}")
