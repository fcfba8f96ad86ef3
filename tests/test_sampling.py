"""Sampling: the random stream against published vectors, and each branch of the token choice."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minifused.errors import UserError
from minifused.sampling import (
    SamplingParams,
    check_logits,
    draw,
    philox4x32,
    philox_uniform,
    sample,
    scale_and_filter,
)

ONES = 0xFFFFFFFF
# Philox4x32-10 rows of the known-answer file that Random123 ships: counter, key, output
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# (2 samples, 4 positions) of seed 2**40 + 7, in units of 2**-24
PINNED_SEED = 2**40 + 7
PINNED_TICKS = [
    [3405790, 6160989, 4980637, 9064679],
    [2563117, 2396180, 1474662, 9977214],
]
LARGEST_UNIFORM = 1 - 2**-24


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


def grid_uniforms(seed: int, samples: int, positions: int) -> torch.Tensor:
    """Uniforms (samples, positions), counted from 0."""
    return philox_uniform(seed, torch.arange(samples)[:, None], torch.arange(positions)[None])


def survivors(logits: list[float], top_k: int) -> list[int]:
    """Ids that the filter keeps."""
    kept = scale_and_filter(torch.tensor([logits]), SamplingParams(top_k=top_k))
    return kept[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_matches_the_published_vectors(counter, key, expected):
    def tensors(words):
        return tuple(torch.tensor(word) for word in words)

    assert philox4x32(counter, key) == expected
    assert [int(word) for word in philox4x32(tensors(counter), tensors(key))] == list(expected)


def test_pinned_seed_gives_pinned_uniforms():
    uniforms = grid_uniforms(PINNED_SEED, 2, 4)
    assert uniforms.dtype == torch.float32
    assert (uniforms * 2**24).tolist() == PINNED_TICKS
    # counter 0 and key 0: the top 24 bits of the first published word
    assert grid_uniforms(0, 1, 1).item() == 0x6627E8 / 2**24


def test_seed_may_be_a_tensor_and_its_high_word_counts():
    args = (torch.arange(3), torch.arange(3))
    expected = philox_uniform(PINNED_SEED, *args)
    assert torch.equal(philox_uniform(torch.tensor(PINNED_SEED), *args), expected)
    assert not torch.equal(philox_uniform(7, *args), expected)


def test_uniforms_do_not_depend_on_batch_or_order():
    whole = grid_uniforms(3, 5, 9)
    samples, positions = torch.tensor([4, 0, 2]), torch.tensor([8, 1, 1], dtype=torch.int32)
    assert torch.equal(philox_uniform(3, samples, positions), whole[samples, positions.long()])
    assert torch.equal(philox_uniform(3, torch.tensor(2), torch.arange(9)), whole[2])


def test_uniforms_fill_the_unit_interval_evenly():
    uniforms = grid_uniforms(11, 100, 100).flatten()
    assert uniforms.min() >= 0 and uniforms.max() <= LARGEST_UNIFORM
    assert chi_square(uniforms.mul(16).long(), torch.full((16,), 1 / 16)) < 37.7  # 0.1 %, 15 dof


def test_global_random_state_is_untouched():
    before = torch.get_rng_state()
    logits = torch.zeros(2, 8)
    sample(logits, SamplingParams(top_k=3), grid_uniforms(0, 2, 1)[:, 0], softmax)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -3},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_wrong_params_are_refused_by_name(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=rf"^{name} must .* not {value}$"):
        SamplingParams(**wrong)


@pytest.mark.parametrize("top_k", [0, 5, 100])
def test_top_k_of_the_vocabulary_or_more_is_unfiltered(top_k):
    assert survivors([0.5, 2.0, -1.0, 2.0, 0.0], top_k) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])],
)
def test_top_k_keeps_exactly_k_with_ties_to_the_lowest_id(top_k, expected):
    assert survivors([0.5, 2.0, 0.5, 2.0, 0.5], top_k) == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-2, 2), min_size=2, max_size=40), st.data())
def test_top_k_equals_a_stable_sort(values, data):
    top_k = data.draw(st.integers(1, len(values) - 1))
    by_rank = sorted(range(len(values)), key=lambda i: -values[i])  # sorted() is stable
    assert survivors([float(v) for v in values], top_k) == sorted(by_rank[:top_k])


def test_top_k_is_taken_from_each_row_before_scaling():
    # at this temperature the scaled logits of a row are too close for float32
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    kept = scale_and_filter(logits, SamplingParams(temperature=1e37, top_k=1))
    assert kept.isfinite().tolist() == [[False, False, True], [True, False, False]]


def test_top_k_of_one_equals_greedy():
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.0], [4.0, 2.0, -1.0, 2.0, 4.0]])
    for uniform in (0.0, 0.5, LARGEST_UNIFORM):
        tokens = sample(logits, SamplingParams(top_k=1), torch.full((2,), uniform), softmax)
        assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("width", [4, 1000])
def test_greedy_takes_the_lowest_id_of_a_tie(width):
    logits = torch.full((3, width), -5.0)
    logits[:, :4] = torch.tensor([1, 3, 3, -2], dtype=torch.float16).float()
    logits[2, -1] = 3.0
    tokens = sample(logits, SamplingParams(temperature=0.0), torch.full((3,), 0.9), softmax)
    assert tokens.tolist() == [1, 1, 1]
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("temperature", [1e-4, 1e-38, 1e-300])
@pytest.mark.parametrize("top_k", [0, 2])
def test_tiny_temperature_gives_the_argmax(temperature, top_k):
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(3, 3)
    params = SamplingParams(temperature, top_k)
    uniforms = torch.tensor([0.0, 0.5, LARGEST_UNIFORM])
    assert not scale_and_filter(logits, params).isnan().any()
    assert sample(logits, params, uniforms, softmax).tolist() == [1, 1, 1]


def test_huge_temperature_is_uniform_and_keeps_masked_tokens_out():
    logits = torch.tensor([[5.0, -torch.inf, -5.0]])
    probabilities = softmax(scale_and_filter(logits, SamplingParams(temperature=1e300)))
    assert probabilities.tolist() == [[0.5, 0.0, 0.5]]


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic of drawn ids (N,) against probabilities (V,)."""
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_draw_frequencies_follow_the_probabilities(seed):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.0])
    params = SamplingParams(temperature=0.8, seed=seed)
    uniforms = grid_uniforms(seed, 100, 200).flatten()
    tokens = sample(logits.expand(len(uniforms), -1), params, uniforms, softmax)
    assert chi_square(tokens, softmax(logits / 0.8)) < 24.4  # 0.1 % point, 7 degrees of freedom


def test_draw_inverts_the_cdf_at_its_steps():
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    below = 0.25 - 2**-24
    uniforms = torch.tensor([0.0, below, 0.25, 0.75 - 2**-24, 0.75, LARGEST_UNIFORM])
    assert draw(probabilities.expand(6, 4), uniforms).tolist() == [0, 0, 2, 2, 3, 3]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.1, 1.0, 7.0]), min_size=1, max_size=300),
    st.integers(0, 2**24 - 1),
)
def test_draw_never_returns_a_token_of_probability_zero(weights, tick):
    weights = torch.tensor([*weights, 1.0, 0.0])
    probabilities = (weights / weights.sum()).expand(3, -1)
    tokens = draw(probabilities, torch.tensor([0.0, tick / 2**24, LARGEST_UNIFORM]))
    assert (probabilities[0, tokens] > 0).all()


def test_draw_of_a_row_is_the_same_alone_and_in_a_batch():
    logits = grid_uniforms(5, 16, 5000) * 20
    uniforms = grid_uniforms(6, 16, 1)[:, 0]
    probabilities = softmax(logits)
    alone = [draw(probabilities[i : i + 1], uniforms[i : i + 1]).item() for i in range(16)]
    assert draw(probabilities, uniforms).tolist() == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_check_logits_names_the_step_and_the_row(bad):
    logits = torch.zeros(4, 6)
    check_logits(logits, step=12)
    logits[2, 5] = bad
    with pytest.raises(FloatingPointError, match=r"step 12, row 2$"):
        check_logits(logits, step=12)


def test_check_logits_allows_masked_tokens_but_not_a_masked_row():
    logits = torch.zeros(2, 3)
    logits[0, 1:] = -torch.inf
    check_logits(logits, step=0)
    logits[1] = -torch.inf
    with pytest.raises(FloatingPointError, match=r"step 0, row 1$"):
        check_logits(logits, step=0)


def test_a_row_of_nan_still_gives_an_id_in_range():
    logits = torch.full((1, 6), torch.nan)
    for params in (SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, top_k=2)):
        assert 0 <= sample(logits, params, torch.tensor([0.5]), softmax).item() < 6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_eager_and_captured_equal_the_cpu():
    logits = grid_uniforms(5, 8, 5000) * 20
    params = SamplingParams(temperature=0.7, top_k=50, seed=9)
    sample_ids, step = torch.arange(8, device="cuda"), torch.zeros(1, dtype=torch.int64)
    probabilities = softmax(scale_and_filter(logits, params))
    expected = draw(probabilities, philox_uniform(9, sample_ids.cpu(), step))
    step, probabilities = step.cuda(), probabilities.cuda()

    def token() -> torch.Tensor:
        return draw(probabilities, philox_uniform(9, sample_ids, step))

    assert torch.equal(token().cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = token()
    graph.replay()
    assert torch.equal(captured.cpu(), expected)
