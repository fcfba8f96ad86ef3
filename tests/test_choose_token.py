"""Both ends of a decoding step on the device: the embeddings, and the choice of a token."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    body_of_kernel,
    int32,
    needs_cuda,
    normal,
    on_each_dtype,
    peaks_of,
    poisoned,
)
from test_lowering import assert_64_bit_indices, split_barriers

from minifused import ops
from minifused.kernels import build
from minifused.kernels.choose_token import choose_token, choose_token_kernel
from minifused.kernels.embed import embed, embed_kernel
from minifused.kernels.schedule import row_schedule
from minifused.kernels.tile import Tile
from minifused.sampling import draw, finite_rows, philox_uniform

CAPACITY = 3
# Of seed 0, at position 1: the streams that give 0 and the largest number below 1.
SAMPLE_OF_ZERO, SAMPLE_OF_LAST, LAST_UNIFORM = 3474781, 20763007, 1 - 2.0**-24


# Embeddings


def tables(width, dtype, device):
    draw_ = normal(device, dtype)
    return draw_(11, width), draw_(7, width)


def embedded(tokens, starts, wte, wpe):
    out = poisoned(*tokens.shape, wte.shape[1], device=wte.device)
    embed(tokens, starts, wte, wpe, out)
    return out


@on_each_dtype
@pytest.mark.parametrize("width", [20, 63, 768])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (2, 5)])
def test_an_embedding_is_the_sum_of_two_rows(device, dtype, width, batch, length):
    wte, wpe = tables(width, dtype, device)
    tokens = (torch.arange(batch * length) * 5 % 11).view(batch, length).to(device)
    starts = int32(*range(batch), device=device)
    positions = starts[:, None] + torch.arange(length, device=device)
    expected = F.embedding(tokens, wte).float() + F.embedding(positions, wpe).float()
    assert torch.equal(embedded(tokens, starts, wte, wpe), expected)


@on_each_dtype
def test_past_the_last_position_the_last_one_is_taken(device, dtype):
    wte, wpe = tables(20, dtype, device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    out = embedded(tokens, int32(5, 2_000_000_000, device=device), wte, wpe)
    positions = torch.tensor([[5, 6, 6], [6, 6, 6]], device=device)
    assert torch.equal(out, wte[0].float() + wpe[positions].float())


@on_each_dtype
def test_a_token_that_is_none_is_nan(device, dtype):
    wte, wpe = tables(20, dtype, device)
    tokens = torch.tensor([[-1, 0, 10, 11, 2**40, -(2**63)]], device=device)
    isnan = embedded(tokens, int32(0, device=device), wte, wpe).isnan()
    expected = torch.tensor([True, False, False, True, True, True], device=device)
    assert torch.equal(isnan, expected[None, :, None].expand_as(isnan))


# The CUDA source


def embed_source(arch):
    tile = Tile(arch)
    return build.lower(embed_kernel, tile, 768, "bfloat16", True, row_schedule(tile, 768, 1024))


def choose_source(arch, greedy, pieces=None, parts=None):
    static = 50304, 50257, greedy, 50256, True, pieces, parts
    return build.lower(choose_token_kernel, Tile(arch), *static)


@functools.cache
def source(kernel, arch="sm_90a"):
    return body_of_kernel(KERNELS[kernel](arch))


KERNELS = {
    "embed": embed_source,
    "draw": functools.partial(choose_source, greedy=False),
    "draw by masses": functools.partial(choose_source, greedy=False, pieces=(50, 1024)),
    "greedy": functools.partial(choose_source, greedy=True),
    "greedy by peaks": functools.partial(choose_source, greedy=True, parts=393),
    "greedy by many peaks": functools.partial(choose_source, greedy=True, parts=3144),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@each_kernel
def test_nothing_is_read_before_the_kernels_ahead_have_ended(kernel):
    text = source(kernel)
    before = text[text.index("{") : text.index("cudaGridDependencySynchronize")]
    assert "cudaTriggerProgrammaticLaunchCompletion" in before
    tensors = re.findall(r"\* (\w+)[,)]", text[: text.index("{")] + ")")
    assert len(tensors) >= 5
    assert not re.search(rf"\b({'|'.join(tensors)})\b(\[| \+)", before)
    assert not re.search("cudaGridDependency|cudaTrigger", source(kernel, "sm_80"))


@each_kernel
def test_results_repeat_and_barriers_are_for_all_threads(kernel):
    assert not re.search("atomic", source(kernel), re.IGNORECASE)
    assert split_barriers(source(kernel)) == []


def test_global_indices_are_64_bit():
    for tensor in ("X", "wte", "wpe", "tokens"):
        assert_64_bit_indices(source("embed"), tensor)
    assert_64_bit_indices(source("draw by masses"), "M")
    for kernel in ("greedy by peaks", "greedy by many peaks"):
        assert_64_bit_indices(source(kernel), "K")
    for kernel in ("draw", "greedy", "greedy by peaks"):
        for tensor in ("P", "chosen", "finite", "tokens"):
            assert_64_bit_indices(source(kernel), tensor)


def test_by_peaks_only_one_part_of_a_row_is_read():
    for parts, kernel in ((393, "greedy by peaks"), (3144, "greedy by many peaks")):
        text = source(kernel)
        (use,) = re.findall(r"\bP(?:\[| \+).*", text)
        assert "token[" in use  # which is within the part
        assert set(re.findall(r"\*\((\w+)\s*\*\)\(K \+", text)) == {"float2"}
        width = 50304 // parts
        assert f"(token[0] * {width})" in text and f"min(((int)threadIdx.x), {width - 1})" in text


def test_rows_of_an_embedding_are_read_and_written_as_vectors():
    text = source("embed")
    assert set(re.findall(r"\*\((\w+)\s*\*\)\(X \+", text)) == {"float4"}
    assert not re.search(r"\b(wte|wpe|X)\[", text)


# On a GPU: the choice

VALID = [1, 2, 5, 31, 256, 1000, 1025, 50257]
KINDS = ("normal", "peaked", "sparse", "even", "one", "first", "last", "none")


def probabilities(kind, rows, valid):
    """Rows of one kind of distribution."""
    generator = torch.Generator().manual_seed(valid)
    logits = torch.randn(rows, valid, generator=generator) * (8.0 if kind == "peaked" else 1.0)
    if kind == "sparse":
        dropped = torch.rand(rows, valid, generator=generator) > 0.1
        dropped[:, valid // 2] = False
        logits.masked_fill_(dropped, -torch.inf)
    elif kind == "even":
        logits.zero_()
    elif kind not in ("normal", "peaked"):
        columns = {"first": 0, "last": valid - 1}.get(kind, torch.arange(rows) * 97 % valid)
        weights = torch.zeros(rows, valid)
        weights[torch.arange(rows), columns] = 0.0 if kind == "none" else 1.0
        return weights
    return torch.softmax(logits, dim=-1)


def samples_of(rows):
    samples = torch.arange(rows) * 2**31  # beyond 32 bits: the streams begin again
    samples[0], samples[-1] = SAMPLE_OF_ZERO, SAMPLE_OF_LAST
    return samples


def uniforms_of(rows, steps=1):
    return philox_uniform(0, samples_of(rows), torch.as_tensor(steps))


def test_the_streams_reach_both_ends():
    assert uniforms_of(2).tolist() == [0.0, LAST_UNIFORM]


class State:
    """What a step reads and leaves, on a GPU: all rows at step 1 of CAPACITY unless told."""

    def __init__(self, rows, steps=None, left=None, going=None, lengths=None):
        self.steps = torch.ones(rows, dtype=torch.int64) if steps is None else steps.clone()
        self.left = torch.full((rows,), 5) if left is None else left
        self.going = torch.ones(rows) if going is None else going
        self.chosen = torch.full((CAPACITY, rows), -7)
        self.finite = torch.zeros(CAPACITY, rows, dtype=torch.bool)
        self.tokens = torch.full((rows,), -7)
        self.seed, self.samples = torch.zeros(1, dtype=torch.int64), samples_of(rows)
        self.starts = torch.zeros(rows)
        self.lengths = torch.full((rows,), 9) if lengths is None else lengths
        for name, value in vars(self).items():
            counts = name in ("left", "going", "starts", "lengths")
            setattr(self, name, (value.int() if counts else value).cuda())

    def choose(self, scores, valid, greedy, eos=-1, width=None):
        """Take a step; scores (rows, valid) get a column of weight behind them.

        With a width, by the peaks of parts of so many columns.
        """
        padded = torch.full((len(scores), valid + valid % 2), 1e9)
        padded[:, :valid] = scores
        peaks = width and peaks_of(padded, valid, width).float().cuda()
        return self.choose_from(padded.cuda(), valid, greedy=greedy, eos=eos, peaks=peaks)

    def choose_from(self, scores, valid, masses=None, greedy=False, eos=-1, peaks=None):
        choose_token(
            scores, valid, None if greedy else (self.seed, self.samples, self.starts), eos,
            self.steps, self.chosen, self.finite, self.tokens, self.left, self.going, self.lengths,
            masses, peaks,
        )  # fmt: skip
        for name, value in vars(self).items():
            setattr(self, name, value.cpu())
        return self


@pytest.mark.parametrize("valid", VALID)
@needs_cuda
def test_a_draw_is_that_of_sampling(valid):
    rows = 64
    for kind in KINDS:
        weights, uniforms = probabilities(kind, rows, valid), uniforms_of(rows)
        state = State(rows).choose(weights, valid, greedy=False)
        expected = draw(weights, uniforms)
        assert torch.equal(state.tokens, expected), kind
        assert torch.equal(state.chosen[1], expected)
        assert state.finite[1].all()


@pytest.mark.parametrize("valid", [8200, 8201, 50176, 50177, 50178, 50257, 131072, 300000])
@needs_cuda
def test_a_draw_by_the_masses_of_pieces_is_the_same(valid):
    rows, n = 64, -(-valid // 4) * 4 + 4
    for kind, std in (("flat", 0.1), ("peaked", 9.0), ("last", 0.0), ("first", 0.0)):
        logits = normal("cuda")(rows, n, std=1.0) * std
        if kind in ("last", "first"):
            logits[:, valid - 1 if kind == "last" else 0] += 99
        logits[-1] = torch.nan
        weights, masses = ops.softmax_to_draw(logits, valid)
        assert masses.numel() and weights[:-1].any()
        expected = draw(weights[:-1, :valid].cpu(), uniforms_of(rows)[:-1])
        states = [State(rows), State(rows)]
        for state, given in zip(states, (None, masses), strict=True):
            state.choose_from(weights, valid, given)
            assert torch.equal(state.tokens[:-1].cpu(), expected), kind
            assert not state.finite[1, -1] and 0 <= state.tokens[-1] < valid


def logits_of(kind, rows, valid):
    generator = torch.Generator().manual_seed(valid)
    logits = torch.randn(rows, valid, generator=generator) * 9
    if kind == "ties":
        logits = (logits / 9).round()
    elif kind == "infinities":
        logits[::3] = -torch.inf
        logits[1::3, valid // 2] = torch.inf
    elif kind == "last":
        logits[:, -1] = 99.0
    return torch.zeros(rows, valid) if kind == "equal" else logits


@pytest.mark.parametrize("valid", VALID)
@needs_cuda
def test_greedy_is_the_first_of_the_largest(valid):
    rows = 64
    for kind in ("normal", "ties", "infinities", "equal", "last"):
        logits = logits_of(kind, rows, valid)
        state = State(rows).choose(logits, valid, greedy=True)
        assert torch.equal(state.tokens, logits.argmax(dim=-1)), kind
        assert torch.equal(state.chosen[1], state.tokens)
        assert torch.equal(state.finite[1], finite_rows(logits))


def assert_same_choice(state, other):
    for name in ("tokens", "chosen", "finite", "steps", "left", "going", "lengths"):
        assert torch.equal(getattr(state, name), getattr(other, name)), name


each_width = pytest.mark.parametrize("width", [16, 32, 128])


@each_width
@pytest.mark.parametrize("valid", VALID)
@needs_cuda
def test_greedy_by_the_peaks_of_parts_is_the_same(valid, width):
    rows = 64
    for kind in ("normal", "ties", "infinities", "equal", "last"):
        logits = logits_of(kind, rows, valid)
        by_peaks = State(rows).choose(logits, valid, True, eos=3, width=width)
        assert torch.equal(by_peaks.tokens, logits.argmax(dim=-1)), kind
        assert_same_choice(by_peaks, State(rows).choose(logits, valid, True, eos=3))


@each_width
@pytest.mark.parametrize("valid", [2, 31, 1025, 50257])
@needs_cuda
def test_by_peaks_too_what_is_not_finite_is_noted_and_gives_some_token(valid, width):
    logits = logits_of("normal", 7, valid)
    logits[0] = logits[1, 0] = logits[2, valid - 1] = logits[3, valid // 2] = torch.nan
    logits[3, 0] = logits[4, 0] = logits[4, valid - 1] = torch.inf
    logits[5] = -torch.inf
    state = State(7).choose(logits, valid, True, width=width)
    assert state.finite[1].tolist() == [False] * 6 + [True]
    assert ((state.tokens >= 0) & (state.tokens < valid)).all()
    assert logits[4, state.tokens[4]] == torch.inf and state.tokens[5] == 0
    assert state.tokens[6] == logits[6].argmax()


@each_width
@needs_cuda
def test_by_peaks_only_the_best_part_is_looked_at(width):
    rows, n = 3, 4096
    scores = logits_of("normal", rows, n).cuda()
    peaks = peaks_of(scores, n, width).float()
    best = torch.tensor([0, 7, n // width - 1])
    peaks[torch.arange(rows), best, 0] = 1e9
    state = State(rows).choose_from(scores, n, greedy=True, peaks=peaks)
    tops = scores.cpu().view(rows, -1, width)[torch.arange(rows), best].argmax(dim=-1)
    assert torch.equal(state.tokens, best * width + tops)
    assert state.finite[1].all()


@needs_cuda
def test_a_draw_passes_over_peaks():
    weights = probabilities("normal", 64, 1000)
    plain = State(64).choose(weights, 1000, greedy=False)
    assert_same_choice(State(64).choose(weights, 1000, greedy=False, width=32), plain)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("valid", [1, 31, 1025, 50257])
@needs_cuda
def test_rows_of_nan_are_noted_and_give_some_token(valid, greedy):
    scores = torch.full((3, valid), torch.nan)
    state = State(3).choose(scores, valid, greedy)
    assert not state.finite[1].any()
    assert ((state.tokens >= 0) & (state.tokens < valid)).all()


@pytest.mark.parametrize("column", [0, 500, 1024, 50256])
@needs_cuda
def test_one_nan_makes_greedy_logits_not_finite(column):
    logits = logits_of("normal", 2, 50257)
    logits[1, column] = torch.nan
    state = State(2).choose(logits, 50257, greedy=True)
    assert state.finite[1].tolist() == [True, False]
    assert state.tokens[0] == logits[0].argmax()
    assert 0 <= state.tokens[1] < 50257


@pytest.mark.parametrize("eos", [-1, 3])
@pytest.mark.parametrize("greedy", [True, False])
@needs_cuda
def test_a_step_leaves_what_a_batch_notes(greedy, eos):
    rows, generator = 64, torch.Generator().manual_seed(0)
    left = torch.randint(0, 3, (rows,), generator=generator)
    going = torch.randint(0, 2, (rows,), generator=generator) * (left > 0)
    steps = torch.randint(0, CAPACITY + 3, (rows,), generator=generator)
    weights, uniforms = probabilities("normal", rows, 5), uniforms_of(rows, steps)
    state = State(rows, steps, left, going).choose(weights, 5, greedy, eos)
    noted = steps < CAPACITY
    token = weights.argmax(-1) if greedy else draw(weights, uniforms)
    assert torch.equal(state.tokens, token)
    chosen, finite = torch.full((CAPACITY, rows), -7), torch.zeros(CAPACITY, rows, dtype=torch.bool)
    chosen[steps[noted], noted.nonzero()[:, 0]] = token[noted]
    finite[steps[noted], noted.nonzero()[:, 0]] = True
    assert torch.equal(state.chosen, chosen) and torch.equal(state.finite, finite)
    assert torch.equal(state.steps, steps + 1)
    assert torch.equal(state.lengths, (9 + going).int())
    left = left - going  # as Batch does it
    assert torch.equal(state.left, left.int())
    assert torch.equal(state.going, (going * left.clamp(max=1) * (token != eos)).int())


@needs_cuda
def test_draws_repeat():
    weights = probabilities("even", 64, 50257)
    first = State(64).choose(weights, 50257, greedy=False)
    for _ in range(20):
        again = State(64).choose(weights, 50257, greedy=False)
        assert torch.equal(again.tokens, first.tokens)


@needs_cuda
def test_a_captured_step_goes_on_where_the_last_one_ended():
    weights = probabilities("normal", 4, 1000).cuda()
    seed, samples = torch.tensor([2**40 + 5], device="cuda"), torch.arange(4, device="cuda")
    starts = int32(3, 0, 700, 1, device="cuda")
    positions = starts + torch.arange(8, device="cuda")[:, None]
    uniforms = philox_uniform(seed, samples, positions)
    steps, tokens = (torch.zeros(4, dtype=torch.int64, device="cuda") for _ in range(2))
    chosen = torch.zeros(8, 4, dtype=torch.int64, device="cuda")
    left, going = int32(5, 9, 1, 9, device="cuda"), int32(1, 1, 1, 1, device="cuda")
    finite = torch.zeros(8, 4, dtype=torch.bool, device="cuda")
    step = functools.partial(
        choose_token, weights, 1000, (seed, samples, starts), -1, steps, chosen, finite, tokens,
        left, going, None,
    )  # fmt: skip
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(), step()
    for _ in range(3):
        graph.replay()
    expected = torch.stack([draw(weights, uniforms[i]) for i in range(7)])
    assert torch.equal(chosen[:7], expected) and finite[:7].all()
    assert not chosen[7].any() and not finite[7].any()
    assert steps.tolist() == [7] * 4
    assert left.tolist() == [0, 2, 0, 2] and going.tolist() == [0, 1, 0, 1]
