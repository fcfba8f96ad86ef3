"""ops.softmax and ops.layer_norm: rows from one column to more than registers hold."""

import math

import pytest
import torch
from helpers import (
    assert_errors_within,
    assert_within_bound,
    needs_cuda,
    normal,
    on_each_device,
    on_each_dtype,
    poisoned,
)
from torch.nn import functional as F

from minifused import ops
from minifused.metrics import measure_elementwise

WIDTHS = {
    "one_column": 1,
    "odd": 7,
    "one_block": 1000,  # on a GPU a warp has the row, as in the next two
    "a_vector": 8,
    "whole_warps": 2048,
    "vocabulary": 50257,
    "blocks_without_tail": 131072,
}
WIDE = 131072  # 16 pieces of 8192 columns
PIECE = 8192


# softmax


def check_softmax(x, valid=None, out_dtype=None):
    """Compare with float64 and eager PyTorch; every element of the output has to be written."""
    n, out_dtype = x.shape[-1], out_dtype or x.dtype
    valid = n if valid is None else valid
    out = poisoned(*x.shape, device=x.device, dtype=out_dtype)
    ops.softmax(x, valid, out=out)
    reference = F.pad(x[..., :valid].double().softmax(-1), (0, n - valid))
    eager = F.pad(x[..., :valid].softmax(-1).to(out_dtype), (0, n - valid))
    assert_within_bound(out, reference, eager)
    assert not out[..., valid:].any()
    tolerance = 1e-5 if out_dtype == torch.float32 else 1e-2
    assert (out.double().sum(-1) - 1).abs().max() < tolerance
    return out


@pytest.mark.parametrize("n", WIDTHS.values(), ids=WIDTHS)
@on_each_dtype
def test_softmax_widths(n, device, dtype):
    check_softmax(normal(device, dtype)(5, n, std=3.0))  # more than a block may have


@pytest.mark.parametrize("n", WIDTHS.values(), ids=WIDTHS)
@on_each_dtype
def test_softmax_of_a_constant_row(n, device, dtype):
    for constant in (0.0, -3e4, 3e4):
        x = torch.full((2, n), constant, device=device, dtype=dtype)
        out = ops.softmax(x, out_dtype=torch.float32)
        torch.testing.assert_close(out, torch.full_like(out, 1 / n), rtol=1e-5, atol=0.0)
        assert (out.double().sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(("n", "valid"), [(7, 3), (1008, 999), (50304, 50257)], ids=str)
@on_each_dtype
def test_softmax_of_padded_rows(n, valid, device, dtype):
    x = normal(device, dtype)(3, n)
    out = check_softmax(x, valid)
    for pad in (3e4, math.inf, math.nan):
        x[:, valid:] = pad
        assert torch.equal(ops.softmax(x, valid), out)


@on_each_device
def test_softmax_of_shifted_rows(device):
    x = torch.zeros(3, 7, device=device)
    x[:, :3] = torch.tensor([0.0, 1.0, 2.0]) + torch.tensor([[0.0], [1000.0], [-1000.0]])
    out = ops.softmax(x, valid=3)
    expected = torch.tensor([0.0900306, 0.2447285, 0.6652410], device=device).expand(3, 3)
    torch.testing.assert_close(out[:, :3], expected, rtol=0.0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:CPU kernels are float32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_each_device
def test_softmax_exponentials_are_float32_in_16_bits(dtype, device):
    x = torch.arange(7, device=device, dtype=dtype)
    out = ops.softmax(x, valid=3)
    expected = torch.tensor([0.0900306, 0.2447285, 0.6652410], device=device).to(dtype)
    assert torch.equal(out[:3], expected)


def check_small_probabilities(out, eager, reference):
    """Compare each probability with itself, where the dtype holds it as a normal number."""
    floor = torch.finfo(out.dtype).smallest_normal
    errors, eager_errors = (measure_elementwise(y, reference, floor) for y in (out, eager))
    assert_errors_within(errors, eager_errors)


@pytest.mark.parametrize("n", [1000, 50257], ids=["one_block", "vocabulary"])
@on_each_dtype
def test_softmax_of_wide_logits_is_right_where_it_is_small(n, device, dtype):
    x = normal(device, dtype)(8, n, std=40.0)
    check_small_probabilities(check_softmax(x), x.softmax(-1), x.double().softmax(-1))


@on_each_dtype
def test_softmax_of_float32_results(device, dtype):
    """The logits are in 16 bits, the probabilities are not."""
    x = normal(device, dtype)(3, 50257, std=3.0)
    out, eager = check_softmax(x, out_dtype=torch.float32), x.softmax(-1, dtype=torch.float32)
    check_small_probabilities(out, eager, x.double().softmax(-1))


@pytest.mark.parametrize("n", [1000, WIDE], ids=["one_block", "pieces"])
@on_each_dtype
def test_softmax_of_rows_of_minus_infinity_is_nan(n, device, dtype):
    x = normal(device, dtype)(3, n)
    x[1] = -math.inf
    out = ops.softmax(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


FINITE_COLUMNS = {
    "last_piece": slice(WIDE - PIECE, WIDE),
    "last_column": slice(WIDE - 1, WIDE),
    "first_piece": slice(0, PIECE),
    "first_column": slice(0, 1),
    "across_two_pieces": slice(3 * PIECE - 5, 3 * PIECE + 5),
    "every_second_column": slice(None, None, 2),
}


@pytest.mark.parametrize("finite", FINITE_COLUMNS.values(), ids=FINITE_COLUMNS)
@on_each_dtype
def test_softmax_of_pieces_of_minus_infinity(finite, device, dtype):
    values = normal(device, dtype)(2, WIDE)
    x = torch.full_like(values, -math.inf)
    x[:, finite] = values[:, finite]
    out = check_softmax(x)
    assert torch.equal(out == 0, x == -math.inf)


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize(
    ("n", "column"),
    [(1, 0), (1000, 0), (1000, 999), (WIDE, 0), (WIDE, 5 * PIECE), (WIDE, WIDE - 1)],
    ids=str,
)
@on_each_dtype
def test_softmax_does_not_hide_infinity_or_nan(n, column, value, device, dtype):
    x = normal(device, dtype)(3, n)
    x[1, column] = value
    out = ops.softmax(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@on_each_device
def test_softmax_shapes_and_strides(device):
    draw = normal(device)
    check_softmax(draw(7))
    check_softmax(draw(2, 3, 7))
    check_softmax(draw(7, 5).T)
    check_softmax(draw(5, 20)[:, 3:10])
    for shape in [(0, 7), (2, 0, 7)]:
        assert ops.softmax(torch.empty(shape, device=device)).shape == shape


@needs_cuda
def test_softmax_of_more_than_2_31_elements():
    m, n = 42_800, 50_257  # the 2^31st is in row 42,730
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, n, device="cuda", dtype=torch.float16, generator=generator)
    out = poisoned(m, n, device="cuda", dtype=torch.float16)
    ops.softmax(x, out=out)
    for row in (0, 42_729, 42_730, 42_731, m - 1):
        assert_within_bound(out[row], x[row].double().softmax(-1), x[row].softmax(-1))


def test_softmax_refusals():
    x = torch.ones(3, 7)

    def refused(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            ops.softmax(*args, **kwargs)

    refused(r"^x is \(3, 0\),.*at least one column", x[:, :0])
    refused(r"^x is \(\),.*at least one column", torch.tensor(1.0))
    refused(r"^x is .*torch.int64", x.long())
    refused(r"^valid is 8: expected 1 to 7", x, 8)
    refused(r"^valid is 0: expected 1 to 7", x, 0)
    refused(r"^valid is -1: expected 1 to 7", x, -1)
    refused(r"^out is \(3, 6\),.*\(3, 7\)", x, out=torch.ones(3, 6))
    refused(r"^out is .*contiguous", x, out=torch.ones(7, 3).T)


# layer norm


def check_layer_norm(x, dtype):
    """Compare with float64 and eager PyTorch, with weight, bias and result in `dtype`."""
    n = x.shape[-1]
    draw = normal(x.device, dtype, seed=1)
    weight, bias = draw(n), draw(n)
    out = poisoned(*x.shape, device=x.device, dtype=dtype)
    ops.layer_norm(x, weight, bias, 1e-5, out=out)
    reference = F.layer_norm(x.double(), (n,), weight.double(), bias.double(), 1e-5)
    eager = F.layer_norm(x.to(dtype), (n,), weight, bias, 1e-5)
    assert_within_bound(out, reference, eager)


@pytest.mark.parametrize("n", [1, 7, 192, 1600, 10000])
@on_each_dtype
def test_layer_norm_widths(n, device, dtype):
    check_layer_norm(normal(device, dtype)(5, n), dtype)


@pytest.mark.parametrize("n", [192, 10000], ids=["one_block", "pieces"])
@on_each_dtype
def test_layer_norm_of_a_float32_stream(n, device, dtype):
    check_layer_norm(normal(device, torch.float32)(5, n, std=30.0), dtype)


@pytest.mark.parametrize("n", [192, 1600, 10000])
@on_each_dtype
def test_layer_norm_keeps_a_small_variance_beside_a_large_mean(n, device, dtype):
    check_layer_norm(normal(device, torch.float32)(5, n, std=1e-2) + 1000.0, dtype)


@on_each_dtype
def test_layer_norm_of_a_constant_row_is_its_bias(device, dtype):
    x = torch.full((2, 192), 3.0, device=device, dtype=dtype)
    weight, bias = torch.ones_like(x[0]), torch.arange(192, device=device, dtype=dtype)
    assert torch.equal(ops.layer_norm(x, weight, bias), bias.expand(2, 192))


@on_each_dtype
def test_layer_norm_does_not_hide_infinity_or_nan(device, dtype):
    x = normal(device, dtype)(3, 192)
    x[0, 5], x[1, 191] = math.nan, math.inf
    out = ops.layer_norm(x, x[2], x[2])
    assert out[:2].isnan().all()
    assert out[2].isfinite().all()


@on_each_device
def test_layer_norm_shapes_and_strides(device):
    draw = normal(device)
    for x in (draw(192), draw(2, 3, 192), draw(192, 5).T, draw(5, 400)[:, 3:195]):
        check_layer_norm(x, torch.float32)
    for shape in [(0, 192), (2, 0, 192)]:
        out = ops.layer_norm(torch.empty(shape, device=device), draw(192), draw(192))
        assert out.shape == shape


def test_layer_norm_refusals():
    x, weight = torch.ones(3, 7), torch.ones(7)

    def refused(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            ops.layer_norm(*args, **kwargs)

    refused(r"^x is \(3, 0\),.*at least one column", x[:, :0], weight[:0], weight[:0])
    refused(r"^x is .*torch.int64", x.long(), weight, weight)
    refused(r"^weight is \(6,\),.*\(7,\)", x, weight[:6], weight)
    refused(r"^bias is \(1, 7\),.*\(7,\)", x, weight, weight[None])
    refused(r"^bias is .*torch.float16.*torch.float32", x, weight, weight.half())
    refused(r"^out is \(7,\),.*\(3, 7\)", x, weight, weight, out=torch.ones(7))
