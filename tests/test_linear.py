"""ops.linear on the kernels of a CPU and of float32: skinny_gemm for a few rows, gemm for more.

A GPU takes up to 16 rows for few and a CPU up to 2; what is few rows here is so on both. In 16 bits
up to 128 rows go to other kernels on a GPU, which test_swap_gemm.py and test_gemv.py cover too.
"""

import math
import warnings

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    assert_within_bound,
    needs_cuda,
    normal,
    on_each_device,
    on_each_dtype,
    poisoned,
)
from torch.nn import functional as F

from minifused import ops

ROWS = {
    "one_row": 1,
    "two_rows": 2,
    "three_rows": 3,
    "odd_rows": 7,
    "tile_minus_one": 15,
    "tile": 16,
    "tile_plus_one": 17,
    "tiles_with_tail": 130,
}
WIDTHS = {  # N, K
    "one_column": (1, 33),
    "fewer_columns_than_a_tile": (8, 64),
    "odd_depth": (96, 33),
    "tails_and_two_blocks_of_depth": (104, 300),
}
# Every schedule for one width, two for the others: each is a compile.
SHAPES = [
    pytest.param(m, *WIDTHS[width], id=f"{rows}-{width}")
    for width in WIDTHS
    for rows, m in ROWS.items()
    if width == "tails_and_two_blocks_of_depth" or m in (2, 15, 16, 130)
]
BOTH_KERNELS = pytest.mark.parametrize("m", [2, 50], ids=["skinny", "gemm"])


def formula(x, weight, bias, activation, residual, out_dtype):
    y = ACTIVATIONS[activation](F.linear(x, weight, bias)).to(out_dtype)
    return y if residual is None else y + residual


def check(x, weight, bias=None, activation=None, residual=None, out_dtype=None):
    """Compare with float64 and eager PyTorch; every element of the output has to be written."""
    out_dtype = out_dtype or x.dtype
    out = poisoned(*x.shape[:-1], weight.shape[0], device=x.device, dtype=out_dtype)
    ops.linear(x, weight, bias, activation, residual, out=out)
    x64, weight64, bias64, residual64 = (
        None if t is None else t.double() for t in (x, weight, bias, residual)
    )
    assert_within_bound(
        out,
        formula(x64, weight64, bias64, activation, residual64, torch.float64),
        formula(x, weight, bias, activation, residual, out_dtype),
    )
    returned = ops.linear(x, weight, bias, activation, residual, out_dtype)
    assert returned.dtype == out_dtype
    assert torch.equal(returned, out)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@on_each_dtype
def test_shapes(m, n, k, device, dtype):
    draw = normal(device, dtype)
    check(draw(m, k), draw(n, k, std=k**-0.5), draw(n), "gelu_tanh")


@pytest.mark.parametrize("m", [1, 17], ids=["skinny", "gemm"])
@on_each_dtype
def test_one_column_of_depth_one_without_bias(m, device, dtype):
    draw = normal(device, dtype)
    check(draw(m, 1), draw(1, 1))


@pytest.mark.parametrize("m", [17, 200, 1100], ids=["small_tile", "wide_tile", "widest_tile"])
@pytest.mark.parametrize("n", [2304, 50304])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@needs_cuda
def test_model_widths_on_a_gpu(m, n, dtype):
    draw = normal("cuda", dtype)
    check(draw(m, 768), draw(n, 768, std=768**-0.5))


EPILOGUES = {  # activation, residual; all have a bias
    "bias": (None, False),
    "residual": (None, True),
    "gelu": ("gelu", False),
    "relu": ("relu", False),
    "activation_before_residual": ("gelu_tanh", True),
}


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@BOTH_KERNELS
@on_each_dtype
def test_epilogues(m, epilogue, device, dtype):
    activation, residual = epilogue
    draw = normal(device, dtype)
    x, weight, bias = draw(m, 33), draw(96, 33, std=0.2), draw(96)
    check(x, weight, bias, activation, draw(m, 96) if residual else None)


@BOTH_KERNELS
@on_each_dtype
def test_float32_residual_stream(m, device, dtype):
    """The residual keeps the bits that the dtype of the product lacks."""
    draw = normal(device, dtype)
    x, weight, bias = draw(m, 33), draw(96, 33, std=0.2), draw(96)
    residual = normal(device, torch.float32, seed=1)(m, 96, std=100.0)
    check(x, weight, bias, None, residual, torch.float32)
    out = ops.linear(torch.zeros_like(x), weight, torch.zeros_like(bias), residual=residual)
    assert torch.equal(out, residual)


@BOTH_KERNELS
@on_each_device
def test_strided_inputs(m, device):
    draw = normal(device)
    x, weight = draw(33, m).T, draw(33, 96, std=0.2).T
    bias, residual = draw(192)[::2], draw(96, m).T
    assert not any(t.is_contiguous() for t in (x, weight, bias, residual))
    check(x, weight, bias, None, residual)


@on_each_device
def test_slice_of_a_longer_buffer(device):
    draw = normal(device)
    check(draw(3, 20, 40)[:, :9, 2:35], draw(200, 33)[100:196], draw(96))


@on_each_device
def test_leading_dimensions(device):
    draw = normal(device)
    weight, bias = draw(96, 33, std=0.2), draw(96)
    for shape in [(33,), (2, 1, 33), (2, 3, 4, 33)]:
        check(draw(*shape), weight, bias)


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33)], ids=str)
@on_each_device
def test_no_rows(shape, device):
    out = ops.linear(torch.empty(shape, device=device), torch.ones(96, 33, device=device))
    assert out.shape == (*shape[:-1], 96)


@on_each_device
def test_more_row_tiles_than_a_grid_axis_holds(device):
    m = 64 * 65536 + 1
    x = torch.zeros(m, 1, device=device)
    x[-2:, 0] = torch.tensor([5.0, 7.0])
    out = poisoned(m, 1, device=device)
    ops.linear(x, torch.full((1, 1), 3.0, device=device), out=out)
    assert out[-2:, 0].tolist() == [15.0, 21.0]
    assert not out[:-2].any()


@needs_cuda
def test_more_than_2_31_outputs():
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of GPU memory")
    m, n, k = 699_136, 3072, 64
    draw = normal("cuda", torch.bfloat16)
    x, weight = draw(m, k), draw(n, k)
    out = ops.linear(x, weight)
    for row in (0, 699_049, 699_050, 699_051, m - 1):
        assert_within_bound(
            out[row], F.linear(x[row].double(), weight.double()), F.linear(x[row], weight)
        )


@pytest.mark.parametrize("m", [17, 200])
@needs_cuda
def test_more_column_tiles_than_a_grid_axis_holds(m):
    n = 65535 * 64 + 1  # one tile of 64 too many
    x, weight = torch.ones(m, 1, device="cuda"), torch.ones(n, 1, device="cuda")
    with pytest.raises(ValueError, match="65535"):
        ops.linear(x, weight)


# What activations are


def activated(values, m, activation):
    """Up to 96 values through the activation of a linear layer of m rows, (m, len(values))."""
    inputs, weight = values.new_zeros(m, 33), values.new_zeros(96, 33)
    inputs[:, 32], weight[: len(values), 32] = 1.0, values
    out = ops.linear(inputs, weight, values.new_zeros(96), activation)
    return out[:, : len(values)]


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@BOTH_KERNELS
@on_each_device
def test_gelu_is_the_form_it_is_named_for(m, activation, device):
    x = torch.linspace(-8, 8, 96, device=device)
    x[:3] = torch.tensor([1.0, -2.7, 0.0])
    out = activated(x, m, activation)
    known = {"gelu_tanh": (0.8411920, -0.0088876, 0.0), "gelu": (0.8413447, -0.0093608, 0.0)}
    assert out[-1, :3].tolist() == pytest.approx(known[activation], abs=1e-6)
    other = "gelu" if activation == "gelu_tanh" else "gelu_tanh"
    own_gap, other_gap = (
        (out - ACTIVATIONS[form](x.double())).abs().max().item() for form in (activation, other)
    )
    assert own_gap < 1e-6
    assert other_gap > 4e-4


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu"])
@BOTH_KERNELS
@on_each_dtype
def test_activations_of_large_values(m, activation, device, dtype):
    x = torch.tensor([100.0, -100.0, 1e4, -1e4, 6e4, -6e4, 0.0], device=device, dtype=dtype)
    out = activated(x, m, activation)
    assert torch.equal(out, x.clamp(min=0).expand(m, -1))


@BOTH_KERNELS
@on_each_dtype
def test_bias_is_applied_once(m, device, dtype):
    zeros = {"device": device, "dtype": dtype}
    out = ops.linear(
        torch.ones(m, 300, **zeros), torch.zeros(104, 300, **zeros), torch.ones(104, **zeros),
        "gelu_tanh",
    )  # fmt: skip
    assert torch.equal(out, torch.full_like(out, 0.8411919906))  # gelu(2) would be 1.95


@BOTH_KERNELS
@on_each_dtype
def test_infinite_and_nan_inputs_are_not_hidden(m, device, dtype):
    draw = normal(device, dtype)
    x, weight = draw(m, 33), draw(96, 33)
    x[0, 4], x[1, 32] = math.nan, math.inf
    out = ops.linear(x, weight, draw(96))
    assert out[0].isnan().all()
    assert out[1].isinf().all()
    assert out[2:].isfinite().all()


# 16-bit tensors on a CPU


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_on_a_cpu_are_cast_with_one_warning(dtype):
    ops._warn_of_cast.cache_clear()
    draw = normal("cpu", dtype)
    x, weight, bias = draw(2, 33), draw(96, 33, std=0.2), draw(96)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, _ = ops.linear(x, weight, bias), ops.linear(x, weight, bias)
    assert [str(w.message) for w in caught] == [
        f"CPU kernels are float32: {dtype} tensors are cast to it"
    ]
    assert torch.equal(out, ops.linear(x.float(), weight.float(), bias.float()).to(dtype))
    assert out.count_nonzero() > 0.9 * out.numel()
    wide = ops.linear(x, weight, bias, out_dtype=torch.float32)
    assert torch.equal(wide.to(dtype), out)


# Refusals


def refused(match, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        ops.linear(*args, **kwargs)


def test_refusals_name_the_tensor_its_shape_and_the_limit():
    x, weight = torch.ones(3, 33), torch.ones(96, 33)
    refused(r"^x is \(3, 32\), torch.float32 on cpu: expected \(\.\.\., 33\)", x[:, :32], weight)
    refused(r"^x is \(\),", torch.tensor(1.0), weight)
    refused(r"^x is .*torch.int64.*expected float32, float16 or bfloat16", x.long(), weight)
    refused(r"^weight is \(96,\),.*expected \(N, K\)", x, weight[:, 0])
    refused(r"^weight is \(96, 0\),.*expected \(N, K\), neither 0", x[:, :0], weight[:, :0])
    refused(r"^weight is .*torch.float16.*expected \(96, 33\), torch.float32", x, weight.half())
    refused(r"^bias is \(95,\),.*expected \(96,\)", x, weight, torch.ones(95))
    refused(r"^bias is .*torch.float16.*torch.float32", x, weight, torch.ones(96).half())
    refused(r"^activation is 'swish'.*'gelu_tanh', 'gelu', 'relu'", x, weight, None, "swish")
    refused(r"^residual is \(3, 1\),.*\(3, 96\)", x, weight, residual=torch.ones(3, 1))
    refused(r"^residual is .*torch.float16.*torch.float32", x, weight,
            residual=torch.ones(3, 96).half(), out_dtype=torch.float32)  # fmt: skip
    refused(r"^out is \(3, 95\),.*contiguous \(3, 96\)", x, weight, out=torch.ones(3, 95))
    refused(r"^out is .*contiguous \(3, 96\)", x, weight, out=torch.ones(96, 3).T)
    refused(r"^out is .*torch.int64", x, weight, out=torch.ones(3, 96).long())


@needs_cuda
def test_tensors_of_two_devices_are_refused():
    x, weight = torch.ones(3, 33, device="cuda"), torch.ones(96, 33)
    refused(r"^weight is .*on cpu: expected .*on cuda", x, weight)
    refused(r"^out is .*on cpu: expected .*on cuda", x, weight.cuda(), out=torch.ones(3, 96))
