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
_ROUNDING = 2.0**-20  # how far, relatively, rounding may put a probability off its threshold


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
    """How to choose a token: penalty, temperature, top-k, top-p, min-p and a draw, in that order.

    Attributes:
        temperature: at least 0; divides the logits. 0 is greedy: the likeliest token, always.
        top_k: at least 0; keeps the k likeliest tokens. 0 is off.
        seed: in [0, 2**63).
        top_p: in (0, 1]; keeps the smallest set of likeliest tokens whose probability reaches p,
            with the token that crosses it (nucleus sampling, Holtzman et al., arXiv 1904.09751).
            1 is off.
        min_p: in [0, 1]; drops tokens less likely than min_p times the likeliest one (Nguyen et
            al., arXiv 2407.01082). 0 is off, 1 keeps only ties of the likeliest.
        repetition_penalty: above 0; tokens seen so far become less likely (see apply_penalty), or
            likelier below 1. 1 is off.

    Of equally likely tokens the lowest ids are kept. A probability within float32 rounding
    (2**-20, relative) of what top_p or min_p asks for has reached it.

    Raises UserError for a value outside its range, or not finite.
    """

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must be finite and at least 0, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0: no limit), not {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be at least 0 and below 2**63, not {self.seed}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1 (1: off), not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be at least 0 (0: off) and at most 1, not {self.min_p}")
        penalty = self.repetition_penalty
        if not (math.isfinite(penalty) and penalty > 0):
            raise UserError(
                f"repetition_penalty must be finite and above 0 (1: off), not {penalty}"
            )

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is chosen, without a draw."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """The model's own logits, or their softmax, are what is chosen by."""
        if self.repetition_penalty != 1:
            return False
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.is_greedy or (self.temperature == 1 and not filtered)


def mark_seen(seen: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> None:
    """Set seen[b, t], in place, for each token t of row b: the mask that the penalty reads.

    Args:
        seen: bool (B, V); what is set stays set.
        tokens: integer (B, T), ids below V.
        lengths: integer (B,), from 0 to T: the columns from lengths[b] on are padding, which may
            hold any id. Without it every column counts.

    Shapes do not depend on values and nothing waits for the device, so a CUDA graph can hold it.
    """
    ids = tokens.to(torch.int64)
    if lengths is None:
        seen.scatter_(1, ids, True)
        return
    rows, vocab = seen.shape
    column = torch.arange(ids.shape[1], device=ids.device)
    ids = torch.where(column < lengths[:, None], ids, vocab)  # pads: to a column past the end
    marks = seen.new_zeros(rows, vocab + 1).scatter_(1, ids, True)
    seen.logical_or_(marks[:, :vocab])


def apply_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits after the repetition penalty of Keskar et al., arXiv 1909.05858: float32 (B, V).

    Where `seen`, bool (B, V), is set, a positive logit of `logits`, float32 (B, V), is divided by
    `penalty`, and a negative one multiplied, however often its token occurred: dividing that as
    well, as the paper's formula does, would make the token likelier.
    """
    penalty = min(max(penalty, 1e-18), 1e18)  # further out a finite logit could become inf
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def _below(values: Tensor, last: Tensor, room: Tensor) -> Tensor:
    """True outside the largest entries of each row of `values` (B, V), as a mask (B, V).

    Inside are those above `last` (B, 1) and, of those equal to it, the `room` (B, 1) lowest ids.
    """
    spent = (values == last).cumsum(dim=-1) > room  # (B, V): from the first one that does not fit
    return torch.where(spent, values <= last, values < last)


def _scale_and_top_k(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature and top-k: (B, V) to (B, V) with a row maximum of 0, -inf outside the top k.

    Subtracting the maximum first leaves the argmax finite at any temperature.
    """
    # T and 1/T both stay normal float32 numbers, so 0/0 and 0 * inf cannot arise
    temperature = min(max(params.temperature, 1e-37), 1e37)
    if not 0 < params.top_k < logits.shape[-1]:
        return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)
    # chosen before scaling, which can round different logits to a tie
    top = logits.topk(params.top_k, dim=-1).values  # (B, k), descending
    last = top[:, -1:]
    room = (top == last).sum(dim=-1, keepdim=True)  # topk itself promises no order of ties
    scaled = (logits - top[:, :1]).div_(temperature)
    return scaled.masked_fill_(_below(logits, last, room), -torch.inf)


def _outside_top_p(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """True outside the smallest set of likeliest tokens that reaches top_p: (B, V) to (B, V)."""
    if 0 < params.top_k < probabilities.shape[-1]:
        ranked = probabilities.topk(params.top_k, dim=-1).values  # (B, k); the others are 0
    else:
        # floats that are not negative are in the order of their bits, and integers sort faster
        bits = probabilities.view(torch.int32).sort(dim=-1, descending=True).values
        ranked = bits.view(torch.float32)  # (B, V)
    cdf = _cdf(ranked)
    target = (cdf[:, -1:].double() * (params.top_p * (1 - _ROUNDING))).to(torch.int64)
    # the rank that crosses, (B, 1); only a row of NaN runs past the end
    rank = torch.searchsorted(cdf, target).clamp_(max=ranked.shape[-1] - 1)
    last = ranked.gather(1, rank)
    room = rank + 1 - (ranked > last).sum(dim=-1, keepdim=True)
    return _below(probabilities, last, room)


def scale_and_filter(
    logits: Tensor, params: SamplingParams, softmax: Callable[[Tensor], Tensor]
) -> Tensor:
    """Temperature, top-k, top-p and min-p: logits float32 (B, V) to float32 (B, V).

    The row maximum of the result is 0 and what a filter drops is -inf, so that its softmax is the
    distribution to draw from, of sum 1 again. top-k keeps exactly min(top_k, V) entries of a row.
    `softmax`, over the last dimension, gives top-p the probabilities after temperature and top-k;
    it is called for nothing else. An option that is off costs nothing.
    """
    scaled = _scale_and_top_k(logits, params)
    if params.top_p < 1:
        scaled.masked_fill_(_outside_top_p(softmax(scaled), params), -torch.inf)
    if params.min_p > 0:
        # the row maximum is 0: scaled is the log of the ratio to the likeliest, whatever is kept
        scaled.masked_fill_(scaled < math.log(params.min_p) - _ROUNDING, -torch.inf)
    return scaled


def _cdf(probabilities: Tensor) -> Tensor:
    """Running sums (B, V) in units of 2**-50, int64, of probabilities rounded down to that unit.

    A sum of integers has no rounding and no order: it is the same on any device, in any batch.
    """
    return (probabilities * 2.0**_WEIGHT_BITS).to(torch.int64).cumsum(dim=-1)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: (B, V) and (B,) in [0, 1), both float32, to token ids int64 (B,).

    Rows must sum to about 1. The last step of the CDF is its own total: a token of probability
    zero is never drawn, whatever the uniform.
    """
    cdf = _cdf(probabilities)  # (B, V)
    # a float32 uniform is at most 1 - 2**-24, so that the target is below the total
    target = (cdf[:, -1:] * uniforms.double()[:, None]).to(torch.int64)  # (B, 1)
    token = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    # only a row of NaN runs past the end; a valid id lets the loop go on until finite_rows is read
    return token.clamp_(max=probabilities.shape[-1] - 1)


def sample(
    logits: Tensor,
    params: SamplingParams,
    uniforms: Tensor,
    softmax: Callable[[Tensor], Tensor],
    seen: Tensor | None = None,
) -> Tensor:
    """The next token of each row: float32 (B, V) to int64 (B,).

    The order is repetition penalty, temperature, top-k, top-p, min-p, draw. The penalty reads
    `seen`, bool (B, V), the tokens of a row's own prompt and output (see mark_seen). Temperature 0
    takes the argmax after the penalty, of equal logits the lowest id, and ignores the rest.
    Otherwise `softmax` (over the last dimension) of the filtered logits is drawn from with
    `uniforms`, float32 (B,) in [0, 1).

    Raises ValueError for a penalty without `seen`.
    """
    scores = scores_to_draw(logits, params, softmax, seen)
    if params.is_greedy:
        return scores.argmax(dim=-1)  # documented to return the first of equal maxima
    return draw(scores, uniforms)


def scores_to_draw(
    logits: Tensor,
    params: SamplingParams,
    softmax: Callable[[Tensor], Tensor],
    seen: Tensor | None = None,
) -> Tensor:
    """What `sample` draws from, or takes the largest of if greedy: float32 (B, V) to (B, V)."""
    if params.repetition_penalty != 1:
        if seen is None:
            raise ValueError("a repetition penalty needs seen, the mask of the tokens so far")
        logits = apply_penalty(logits, seen, params.repetition_penalty)
    return logits if params.is_greedy else softmax(scale_and_filter(logits, params, softmax))


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Natural log of the probability of each row's token: (B, V) and (B,) to float32 (B,).

    `logits`, float32, are the model's own, and so is the distribution: before the penalty, the
    temperature and the filters. `tokens` are integer ids. Summed in float64, so that the value of
    a row does not depend on its batch.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    total = shifted.exp().sum(dim=-1, dtype=torch.float64)
    chosen = shifted.gather(1, tokens.to(torch.int64)[:, None]).squeeze(1)
    return (chosen - total.log()).to(torch.float32)


def finite_rows(logits: Tensor) -> Tensor:
    """Which rows of logits (B, V) have a finite maximum, bool (B,).

    The others hold a NaN, a +inf, or nothing but -inf, and must not be drawn from.
    """
    return logits.amax(dim=-1).isfinite()  # amax passes a NaN on
