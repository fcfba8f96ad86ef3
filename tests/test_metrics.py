"""Error measures and bounds: what they let through, and what they must not."""

import math

import pytest
import torch

from minifused.metrics import BOUNDS, Bound, Errors, measure, measure_elementwise, rms, within

EXACT = Errors(max=0.0, rms=0.0)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_errors_are_relative_to_the_rms_of_the_reference():
    reference = torch.tensor([3.0, -4.0, 0.0, 0.0], dtype=torch.float64)  # RMS 2.5
    errors = measure(torch.tensor([3.0, -4.0, 0.5, 0.0]), reference)
    assert errors.max == pytest.approx(0.5 / 2.5)
    assert errors.rms == pytest.approx(0.25 / 2.5)
    scaled = measure(torch.tensor([3e-9, -4e-9, 0.5e-9, 0.0]), reference * 1e-9)
    assert scaled.max == pytest.approx(errors.max) and scaled.rms == pytest.approx(errors.rms)


def test_the_error_of_a_large_element_is_relative_to_itself():
    reference = torch.tensor([100.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert measure(torch.tensor([101.0, 1.0, 1.0, 1.0]), reference).max == pytest.approx(0.01)


def test_an_exact_output_has_no_error():
    reference = normal(5, 7)
    assert measure(reference, reference) == EXACT
    zeros = torch.zeros(3, dtype=torch.float64)
    assert measure(zeros, zeros) == EXACT  # and no division by its RMS
    assert measure(torch.tensor([0.0, 1e-3, 0.0]), zeros).max == pytest.approx(1e-3)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_fails(bound, wrong):
    reference = normal(1000)
    output = reference.clone()
    output[999] = wrong
    generous = BOUNDS[bound].limits(Errors(max=1e30, rms=1e30))
    assert not within(measure(output, reference), generous)


@pytest.mark.parametrize("bound", BOUNDS)
def test_an_output_of_zeros_fails_at_any_scale(bound):
    """Even where all values are tiny, as the probabilities of a wide softmax."""
    reference = torch.softmax(normal(2, 8192), dim=-1)
    eager = measure(reference.to(torch.bfloat16), reference)
    errors = measure(torch.zeros_like(reference), reference)
    assert errors.rms == pytest.approx(1) and not within(errors, BOUNDS[bound].limits(eager))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_wrong_element_in_a_million_fails(dtype):
    reference = normal(1_000_000)
    output = eager = reference.to(dtype)
    limits = BOUNDS["model"].limits(measure(eager, reference))
    assert within(measure(output, reference), limits)
    output = output.clone()
    output[123_456] += 0.25
    errors = measure(output, reference)
    assert errors.rms <= max(limits.rms, 3e-4) and not within(errors, limits)


@pytest.mark.parametrize("count", [1, 10, 1000, 10_000])
def test_rounding_of_the_same_size_is_not_flagged(count):
    """An error drawn afresh with eager's own deviation is in its bounds, few or many elements."""
    reference = normal(count)
    flagged = 0
    for seed in range(1, 21):
        eager, errors = (
            measure(reference + 1e-3 * normal(count, seed=s), reference) for s in (seed, -seed)
        )
        flagged += not within(errors, BOUNDS["op"].limits(eager))
    assert flagged == 0 or count < 1000  # of one draw nothing can be said


@pytest.mark.parametrize("name", ["op", "model"])
def test_the_factor_decides(name):
    limit, eager = BOUNDS[name].factor, Errors(max=4e-3, rms=1e-3)
    limits = BOUNDS[name].limits(eager)
    assert within(Errors(max=limit * 4e-3, rms=limit * 1e-3), limits)
    assert not within(Errors(max=limit * 4e-3, rms=limit * 1.01e-3), limits)
    assert not within(Errors(max=limit * 6.01e-3, rms=1e-3), limits)


def test_bounds_are_those_of_the_design():
    assert {name: (b.factor, b.slack) for name, b in BOUNDS.items()} == {
        "op": (2, 1e-6),
        "model": (3, 1e-6),
        "copy": (0, 0),
    }
    assert BOUNDS["copy"].limits(EXACT) == EXACT
    assert Bound(factor=2).limits(EXACT) == Errors(max=1e-6, rms=1e-6)


def test_elementwise_errors_see_small_elements_and_skip_those_below_the_floor():
    reference = torch.tensor([0.999, 1e-3, 1e-9], dtype=torch.float64)
    output = torch.tensor([0.999, 1.1e-3, 0.0], dtype=torch.float64)
    assert measure(output, reference).max < 1e-3
    assert measure_elementwise(output, reference, floor=1e-6).max == pytest.approx(0.1)
    assert measure_elementwise(output, reference, floor=1e-12).max == pytest.approx(1.0)


def test_shapes_and_dtypes_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        measure(torch.zeros(2, 3), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="float64"):
        measure(torch.zeros(3), torch.zeros(3))


def test_rms_of_16_bit_numbers_does_not_overflow():
    assert rms(torch.full((4,), 60000.0, dtype=torch.float16)) == pytest.approx(60000, rel=1e-3)
