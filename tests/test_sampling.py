"""Sampling: the random stream against published vectors, and each branch of the token choice."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minifused.errors import UserError
from minifused.sampling import (
    SamplingParams,
    apply_penalty,
    draw,
    finite_rows,
    logprobs,
    mark_seen,
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
EVERY_OPTION = {
    "repetition_penalty": 1.3,
    "temperature": 1.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
}


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


def grid_uniforms(seed: int, samples: int, positions: int) -> torch.Tensor:
    """Uniforms (samples, positions), counted from 0."""
    return philox_uniform(seed, torch.arange(samples)[:, None], torch.arange(positions)[None])


def survivors(logits: list[float], **options) -> list[int]:
    """Ids that the filters keep."""
    kept = scale_and_filter(torch.tensor([logits]), SamplingParams(**options), softmax)
    return kept[0].isfinite().nonzero().flatten().tolist()


def logs(*probabilities: float) -> list[float]:
    """Logits whose softmax is these probabilities."""
    return [math.log(p) for p in probabilities]


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
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": -0.5},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.01},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.5},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
    ],
)
def test_wrong_params_are_refused_by_name(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=rf"^{name} must .* not {value}$"):
        SamplingParams(**wrong)


@pytest.mark.parametrize("top_k", [0, 5, 100])
def test_top_k_of_the_vocabulary_or_more_is_unfiltered(top_k):
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.0]])
    kept = softmax(scale_and_filter(logits, SamplingParams(top_k=top_k), softmax))
    torch.testing.assert_close(kept, softmax(logits), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])],
)
def test_top_k_keeps_exactly_k_with_ties_to_the_lowest_id(top_k, expected):
    assert survivors([0.5, 2.0, 0.5, 2.0, 0.5], top_k=top_k) == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-2, 2), min_size=2, max_size=40), st.data())
def test_top_k_equals_a_stable_sort(values, data):
    top_k = data.draw(st.integers(1, len(values) - 1))
    by_rank = sorted(range(len(values)), key=lambda i: -values[i])  # sorted() is stable
    assert survivors([float(v) for v in values], top_k=top_k) == sorted(by_rank[:top_k])


def test_top_k_is_taken_from_each_row_before_scaling():
    # at this temperature the scaled logits of a row are too close for float32
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    kept = scale_and_filter(logits, SamplingParams(temperature=1e37, top_k=1), softmax)
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
    assert not scale_and_filter(logits, params, softmax).isnan().any()
    assert sample(logits, params, uniforms, softmax).tolist() == [1, 1, 1]


def test_huge_temperature_is_uniform_and_keeps_masked_tokens_out():
    logits = torch.tensor([[5.0, -torch.inf, -5.0]])
    probabilities = softmax(scale_and_filter(logits, SamplingParams(temperature=1e300), softmax))
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


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-300, 1), (0.01, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.999, 3), (1.0, 3)],
)
@pytest.mark.parametrize("top_k", [0, 3])
def test_top_p_keeps_the_token_that_crosses(top_p, expected, top_k):
    logits = [math.log(0.3), -math.inf, math.log(0.5), math.log(0.2)]
    assert survivors(logits, top_p=top_p, top_k=top_k) == sorted([2, 0, 3][:expected])


@pytest.mark.parametrize(("top_p", "expected"), [(0.05, 5), (0.3, 30), (0.7, 70), (0.701, 71)])
@pytest.mark.parametrize("top_k", [0, 100])
def test_top_p_of_ties_keeps_the_lowest_ids_and_forgives_rounding(top_p, expected, top_k):
    # float32(0.01) is below 0.01, so that five of it are below 0.05
    logits = [1.0] * 100 + [-200.0] * 900
    assert survivors(logits, top_p=top_p, top_k=top_k) == list(range(expected))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=40), st.data())
def test_top_p_equals_a_stable_sort(weights, data):
    total = 256  # a power of two, so that the oracle below is exact
    weights = [*weights, total - sum(weights)]
    threshold = data.draw(st.integers(1, total - 1))
    top_k = data.draw(st.integers(0, len(weights) + 2))
    expected, reached = [], 0
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or None]
    inside = sum(weights[i] for i in ranked)
    for token in ranked:
        if reached < threshold / total * inside:
            expected.append(token)
        reached += weights[token]
    kept = survivors(logs(*(w / total for w in weights)), top_k=top_k, top_p=threshold / total)
    assert kept == sorted(expected)


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [
        (0.0, [0, 1, 2, 3]),
        (1e-300, [0, 1, 2, 3]),
        (0.4, [0, 1, 2, 3]),
        (0.41, [0, 1, 3]),
        (0.6, [0, 1, 3]),
        (0.61, [1, 3]),
        (1.0, [1, 3]),
    ],
)
def test_min_p_is_relative_to_the_likeliest(min_p, expected):
    assert survivors(logs(0.18, 0.3, 0.12, 0.3), min_p=min_p) == expected


def test_min_p_forgives_rounding():
    # in float32, log(0.2) - log(0.25) is below log(0.8)
    assert survivors(logs(0.25, 0.2), min_p=0.8) == [0, 1]
    assert survivors(logs(0.25, 0.2), min_p=0.80001) == [0]


def test_min_p_is_taken_after_temperature():
    logits = logs(0.5, 0.3, 0.2)  # to the power 1 / 0.5 the second is 0.36 times the first
    assert survivors(logits, min_p=0.5) == [0, 1]
    assert survivors(logits, min_p=0.5, temperature=0.5) == [0]


def test_filters_act_in_the_documented_order():
    logits = logs(0.4, 0.3, 0.2, 0.1)
    # top-k first: of (4/7, 3/7) the first alone reaches 0.5; of the whole it does not
    assert survivors(logits, top_p=0.5) == [0, 1]
    assert survivors(logits, top_k=2, top_p=0.5) == [0]
    # temperature before top-p: squared, the first has 16/30
    assert survivors(logits, temperature=0.5, top_p=0.5) == [0]
    # penalty before all: 2.0 / 3 falls behind 1.0 and out of the top one
    options = {"repetition_penalty": 3.0, "top_k": 1}
    seen = torch.tensor([[True, False]])
    for more in ({}, {"temperature": 0.0}, {"top_p": 0.5}, {"min_p": 1.0}):
        params = SamplingParams(**options, **more)
        assert sample(torch.tensor([[2.0, 1.0]]), params, torch.zeros(1), softmax, seen) == 1


def test_kept_tokens_are_renormalised():
    params = SamplingParams(top_p=0.75)
    kept = softmax(scale_and_filter(torch.tensor([logs(0.5, 0.3, 0.2)]), params, softmax))
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0]]))


def test_only_top_p_needs_a_second_softmax():
    calls = []

    def counted(logits: torch.Tensor) -> torch.Tensor:
        calls.append(logits.shape)
        return softmax(logits)

    for options, expected in (({}, 1), ({"min_p": 0.1}, 1), ({"top_k": 2, "top_p": 0.9}, 2)):
        calls.clear()
        sample(torch.zeros(1, 8), SamplingParams(**options), torch.zeros(1), counted)
        assert len(calls) == expected


def test_penalty_counts_a_token_once_and_lowers_negative_logits():
    logits, seen = torch.tensor([[2.0, -2.0, 1.0]]), torch.zeros(1, 3, dtype=torch.bool)
    mark_seen(seen, torch.tensor([[0, 0, 0, 1]]))
    assert seen.tolist() == [[True, True, False]]
    penalised = apply_penalty(logits, seen, 1.5)
    torch.testing.assert_close(penalised, torch.tensor([[4 / 3, -3.0, 1.0]]))
    assert logits.tolist() == [[2.0, -2.0, 1.0]]


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_penalties_stay_finite(penalty):
    logits, seen = torch.tensor([[50.0, -50.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool)
    penalised = apply_penalty(logits, seen, penalty)
    assert penalised.isfinite().all() and penalised.argmax() == 0


def test_penalty_without_the_mask_is_a_bug():
    with pytest.raises(ValueError, match="seen"):
        sample(torch.zeros(1, 3), SamplingParams(repetition_penalty=2.0), torch.zeros(1), softmax)


def test_greedy_is_the_argmax_after_the_penalty_with_ties_to_the_lowest_id():
    seen = torch.tensor([[True, False, False, False]])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    uniforms = torch.full((1,), LARGEST_UNIFORM)
    logits = torch.tensor([[4.0, 2.0, 3.0, 3.0]])
    assert sample(logits, params, uniforms, softmax, seen) == 2
    logits[0, 2:] = 2.0
    assert sample(logits, params, uniforms, softmax, seen) == 0


@pytest.mark.parametrize("pad", [0, 4, -1, 10**6])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_is_never_marked(pad, dtype):
    tokens = torch.tensor([[5, pad, pad], [1, 2, 1], [pad] * 3], dtype=dtype)
    seen = torch.zeros(3, 6, dtype=torch.bool)
    seen[2, 3] = True  # stays
    mark_seen(seen, tokens, torch.tensor([1, 3, 0], dtype=dtype))
    assert [row.nonzero().flatten().tolist() for row in seen] == [[5], [1, 2], [3]]
    mark_seen(seen, torch.tensor([[0], [2], [3]]))
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0, 5], [1, 2], [3]]


@pytest.mark.parametrize("width", [7, 256, 3000])
def test_a_row_is_the_same_alone_and_in_a_batch(width):
    rows = 12
    logits = grid_uniforms(5, rows, width) * 20 - 10
    logits[::3] = logits[::3].round()  # ties
    prompts = (grid_uniforms(6, rows, 9) * width).long()
    lengths = torch.arange(rows) % 9 + 1
    uniforms, params = grid_uniforms(7, rows, 1)[:, 0], SamplingParams(**EVERY_OPTION)
    seen = torch.zeros(rows, width, dtype=torch.bool)
    mark_seen(seen, prompts, lengths)
    tokens = sample(logits, params, uniforms, softmax, seen)
    for i, length in enumerate(lengths.tolist()):
        own = torch.zeros(1, width, dtype=torch.bool)
        mark_seen(own, prompts[i : i + 1, :length])
        row = slice(i, i + 1)
        assert sample(logits[row], params, uniforms[row], softmax, own) == tokens[i]
        assert logprobs(logits[row], tokens[row]) == logprobs(logits, tokens)[i]


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("TopKLogitsWarper", {"top_k": 20}, {"top_k": 20}),
        ("TopPLogitsWarper", {"top_p": 0.1}, {"top_p": 0.1}),
        ("TopPLogitsWarper", {"top_p": 0.9}, {"top_p": 0.9}),
        ("MinPLogitsWarper", {"min_p": 0.1}, {"min_p": 0.1}),
    ],
)
def test_filters_keep_what_transformers_keeps(name, options, theirs):
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.logit(grid_uniforms(8, 32, 500).clamp(1e-6, 1 - 1e-6))
    expected = getattr(process, name)(**theirs)(None, logits.clone())
    kept = scale_and_filter(logits, SamplingParams(**options), softmax)
    assert torch.equal(kept.isfinite(), expected.isfinite())
    torch.testing.assert_close(softmax(kept), softmax(expected))


def test_penalty_is_that_of_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    logits, prompts = grid_uniforms(8, 6, 50) * 8 - 4, (grid_uniforms(9, 6, 30) * 50).long()
    seen = torch.zeros(6, 50, dtype=torch.bool)
    mark_seen(seen, prompts)
    expected = process.RepetitionPenaltyLogitsProcessor(1.3)(prompts, logits.clone())
    torch.testing.assert_close(apply_penalty(logits, seen, 1.3), expected, rtol=1e-6, atol=0)


def test_all_filters_together_are_those_of_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.logit(grid_uniforms(10, 32, 500).clamp(1e-6, 1 - 1e-6))
    prompts = (grid_uniforms(11, 32, 40) * 500).long()
    chain = [process.RepetitionPenaltyLogitsProcessor(1.3), process.TemperatureLogitsWarper(1.7)]
    chain += [process.TopKLogitsWarper(40), process.TopPLogitsWarper(0.9)]
    expected = logits
    for step in [*chain, process.MinPLogitsWarper(0.05)]:
        expected = step(prompts, expected)
    seen = torch.zeros(32, 500, dtype=torch.bool)
    mark_seen(seen, prompts)
    kept = scale_and_filter(
        apply_penalty(logits, seen, 1.3), SamplingParams(**EVERY_OPTION), softmax
    )
    assert torch.equal(kept.isfinite(), expected.isfinite())
    torch.testing.assert_close(softmax(kept), softmax(expected))


@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (30, 0), (1, 1000), (300, -500)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_logprobs_are_those_of_the_raw_distribution(scale, shift, dtype):
    logits = torch.logit(grid_uniforms(12, 16, 3000).clamp(1e-6, 1 - 1e-6)) * scale + shift
    tokens = (grid_uniforms(13, 16, 1)[:, 0] * 3000).to(dtype)
    tokens[:8] = logits[:8].argmax(dim=-1)
    exact = logits.double().log_softmax(dim=-1).gather(1, tokens.long()[:, None])[:, 0]
    result = logprobs(logits, tokens)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact, rtol=2e-7, atol=1e-9)


def test_logprobs_of_an_impossible_and_of_a_certain_token():
    logits = torch.tensor([[0.0, -torch.inf]]).expand(2, 2)
    assert logprobs(logits, torch.tensor([0, 1])).tolist() == [0.0, -math.inf]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_nan_or_inf_is_not_finite(bad):
    logits = torch.zeros(4, 6)
    assert finite_rows(logits).tolist() == [True] * 4
    logits[2, 5] = bad
    assert finite_rows(logits).tolist() == [True, True, False, True]


def test_masked_tokens_are_finite_but_a_masked_row_is_not():
    logits = torch.zeros(2, 3)
    logits[0, 1:] = -torch.inf
    assert finite_rows(logits).all()
    logits[1] = -torch.inf
    assert finite_rows(logits).tolist() == [True, False]


def test_a_row_of_nan_still_gives_an_id_in_range():
    logits, seen = torch.full((1, 6), torch.nan), torch.zeros(1, 6, dtype=torch.bool)
    for options in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, EVERY_OPTION):
        tokens = sample(logits, SamplingParams(**options), torch.tensor([0.5]), softmax, seen)
        assert 0 <= tokens.item() < 6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_eager_and_captured_equal_the_cpu():
    logits = grid_uniforms(5, 8, 5000) * 20
    params = SamplingParams(temperature=0.7, top_k=50, seed=9)
    sample_ids, step = torch.arange(8, device="cuda"), torch.zeros(1, dtype=torch.int64)
    probabilities = softmax(scale_and_filter(logits, params, softmax))
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("width", [300, 50257])
def test_cuda_captured_options_equal_eager(top_k, width):
    params = SamplingParams(**EVERY_OPTION | {"top_k": top_k})
    logits, uniforms = grid_uniforms(5, 8, width).cuda() * 20, grid_uniforms(6, 8, 1)[:, 0].cuda()
    prompts = (grid_uniforms(7, 8, 9) * width).long().cuda()
    lengths, static = torch.arange(1, 9, device="cuda"), torch.zeros_like(prompts)

    def step(seen: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mark_seen(seen, tokens, lengths)
        chosen = sample(logits, params, uniforms, softmax, seen)
        return chosen, logprobs(logits, chosen)

    expected_seen = torch.zeros(8, width, dtype=torch.bool, device="cuda")
    expected = step(expected_seen, prompts)
    seen, graph = torch.zeros_like(expected_seen), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(seen, static)
    static.copy_(prompts)
    graph.replay()
    assert torch.equal(seen, expected_seen)
    assert all(map(torch.equal, captured, expected))
