"""Operators that do the work of several: as close to float64 as these, and the same elsewhere."""

import pytest
import torch
from helpers import assert_within_bound, int32, needs_cuda, normal, on_each_device
from torch.nn import functional as F

from minifused import ops

EPS = 1e-5
SHAPES = [(768, 2304), (768, 50304), (1600, 4800), (1000, 77), (64, 8)]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def parameters(n, k, device, dtype, seed=0):
    """Gain and shift of a norm, weight and bias."""
    draw = normal(device, dtype, seed)
    return draw(k) + 1, draw(k), draw(n, k, std=k**-0.5), draw(n)


def residual_stream(*shape, device, seed=1):
    """With a mean, and some channels a hundred times the others, as GPT-2 has."""
    x = normal(device, seed=seed)(*shape) + 5
    x[..., 3::97] *= 100
    return x


def composed(x, gain, shift, weight, bias, activation):
    y = F.linear(F.layer_norm(x, x.shape[-1:], gain, shift, EPS), weight, bias)
    return F.gelu(y, approximate="tanh") if activation else y


def norm_reference(x, *weights, activation=None):
    """In float64, and as eager PyTorch has it in the dtype of the weights."""
    doubles = (t.double() for t in weights)
    exact = composed(x.double(), *doubles, activation)
    eager = composed(x.to(weights[0].dtype), *weights, activation)
    return exact, eager


@on_each_device
def test_on_several_rows_they_are_their_parts(device):
    gain, shift, weight, bias = parameters(48, 192, device, torch.float32)
    x = residual_stream(2, 5, 192, device=device)
    y = ops.layer_norm(x, gain, shift, EPS)
    linear = ops.linear(y, weight, bias, "gelu_tanh")
    assert torch.equal(ops.norm_linear(x, gain, shift, EPS, weight, bias, "gelu_tanh"), linear)
    positions, caches = int32(0, 30, device=device), torch.zeros(4, 2, 33, 2, 8, device=device)
    qkv = ops.norm_qkv(x, gain, shift, EPS, weight, bias, *caches[:2], positions)
    assert linear.any() and qkv.any()
    assert torch.equal(qkv, ops.linear(y, weight, bias).view(2, 5, 3, 2, 8))
    ops.append_kv(*caches[2:], qkv, None, positions)
    assert torch.equal(caches[:2], caches[2:])
    lengths, residual = positions + 3, x[:, :1]
    projection = normal(device, seed=2)(192, 16)
    together = ops.add_decode_attention(
        ops.Stream(residual), qkv[:, :1], *caches[:2], lengths, 0.3, projection
    )
    attended = ops.decode_attention(qkv[:, :1], *caches[:2], lengths, 0.3).flatten(2)
    expected = ops.linear(attended, projection, residual=residual)
    assert torch.equal(together.x, expected) and (expected != residual).any()
    assert torch.equal(ops.add_linear(ops.Stream(residual), attended, projection).x, expected)


@on_each_device
def test_wrong_shapes_are_refused(device):
    gain, shift, weight, bias = parameters(48, 192, device, torch.float32)
    caches = torch.zeros(2, 1, 33, 2, 8, device=device)
    x, at = torch.zeros(1, 1, 192, device=device), int32(0, device=device)
    with pytest.raises(ValueError, match="weight is"):
        ops.norm_qkv(x, gain, shift, EPS, weight[1:], bias[1:], *caches, at)
    with pytest.raises(ValueError, match="x is"):
        ops.norm_linear(x[..., 1:], gain[1:], shift[1:], EPS, weight, bias)
    qkv = ops.norm_qkv(x, gain, shift, EPS, weight, bias, *caches, at)
    with pytest.raises(ValueError, match="weight is"):
        ops.add_decode_attention(ops.Stream(x), qkv, *caches, at + 1, 1.0, weight)


@HALVES
@pytest.mark.parametrize("k, n", SHAPES)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@needs_cuda
def test_norm_linear_of_a_row(k, n, activation, dtype):
    weights = parameters(n, k, "cuda", dtype)
    x = residual_stream(1, 1, k, device="cuda")
    sums = ops.norm_sums(*weights)
    for given in (None, sums):
        y = ops.norm_linear(x, *weights[:2], EPS, *weights[2:], activation, given)
        assert_within_bound(y, *norm_reference(x, *weights, activation=activation))
    for _ in range(5):
        again = ops.norm_linear(x, *weights[:2], EPS, *weights[2:], activation, sums)
        assert torch.equal(y, again)


@HALVES
@pytest.mark.parametrize("heads, head_dim", [(12, 64), (25, 64), (3, 20), (2, 256)])
@needs_cuda
def test_a_layer_of_one_row(heads, head_dim, dtype):
    width, capacity = heads * head_dim, 700
    weights = parameters(3 * width, width, "cuda", dtype)
    sums = ops.norm_sums(*weights)
    draw = normal("cuda", dtype, seed=4)
    projection, bias = draw(width, width, std=width**-0.5), draw(width)
    for length in (0, 1, 63, 64, 511, 699):
        k_cache, v_cache = draw(1, capacity, heads, head_dim), draw(1, capacity, heads, head_dim)
        k_cache[:, length:], v_cache[:, length:] = torch.nan, torch.nan  # as if never written
        x = residual_stream(1, 1, width, device="cuda", seed=length)
        at = int32(length, device="cuda")
        qkv = ops.norm_qkv(x, *weights[:2], EPS, *weights[2:], k_cache, v_cache, at, sums)
        exact, eager = norm_reference(x, *weights)
        assert_within_bound(qkv.flatten(2), exact, eager)
        assert torch.equal(k_cache[:, length], qkv[:, 0, 1])
        assert torch.equal(v_cache[:, length], qkv[:, 0, 2])
        assert k_cache[:, length + 1 :].isnan().all()
        ends = int32(length + 1, device="cuda")
        attention = qkv, k_cache, v_cache, ends, head_dim**-0.5
        y = ops.add_decode_attention(ops.Stream(x), *attention, projection, bias).x

        def attend(q, k, v, weight, shift, residual, end=length + 1):
            q, k, v = (t.transpose(1, 2) for t in (q, k[:, :end], v[:, :end]))
            heads_out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return F.linear(heads_out, weight, shift) + residual

        given = qkv[:, :, 0], k_cache, v_cache, projection, bias
        assert_within_bound(y, attend(*(t.double() for t in given), x.double()), attend(*given, x))


@HALVES
@pytest.mark.parametrize("rows", [2, 3, 16, 17, 33, 96, 128, 129])
@pytest.mark.parametrize("width, inner", [(768, 3072), (1600, 4800), (64, 192)])
@needs_cuda
def test_a_stream_is_prepared_for_its_next_norm(width, inner, rows, dtype):
    draw = normal("cuda", dtype, seed=rows)
    gain, shift, weight, bias = weights = parameters(inner, width, "cuda", dtype)
    x, y = residual_stream(rows, 1, width, device="cuda"), draw(rows, 1, inner)
    back, offset = draw(width, inner, std=inner**-0.5), draw(width)
    stream = ops.add_linear(ops.Stream(x), y, back, offset, gain)
    assert torch.equal(stream.x, ops.add_linear(ops.Stream(x), y, back, offset).x)
    assert (stream.x != x).any()
    assert bool(stream.scaled.numel()) == (rows <= 128)
    up = ops.norm_linear(
        stream, gain, shift, EPS, weight, bias, "gelu_tanh", ops.norm_sums(*weights)
    )
    assert_within_bound(up, *norm_reference(stream.x, *weights, activation="gelu_tanh"))
    if rows <= 128:
        assert torch.equal(stream.scaled, (stream.x * gain).to(dtype))
        poison = ops.Stream(torch.full_like(x, torch.nan), *stream[1:])  # x itself is not needed
        again = ops.norm_linear(
            poison, gain, shift, EPS, weight, bias, "gelu_tanh", ops.norm_sums(*weights)
        )
        assert torch.equal(up, again)


@HALVES
@pytest.mark.parametrize("rows", [2, 7, 40, 128])
@pytest.mark.parametrize("heads, head_dim", [(12, 64), (25, 64), (3, 20)])
@needs_cuda
def test_a_step_of_several_rows_from_its_embeddings(heads, head_dim, rows, dtype):
    width, draw = heads * head_dim, normal("cuda", dtype, seed=3)
    gain, shift, weight, bias = weights = parameters(3 * width, width, "cuda", dtype)
    wte, wpe = draw(500, width) + 0.5, draw(60, width)
    wte[:, 3::97] *= 100
    tokens = torch.arange(rows, device="cuda")[:, None] * 3 % 500
    at = torch.arange(rows, device="cuda", dtype=torch.int32) % 50
    stream = ops.embed(tokens, at, wte, wpe, norm_weight=gain)
    assert torch.equal(stream.x, ops.embed(tokens, at, wte, wpe).x) and stream.x.any()
    assert bool(stream.scaled.numel()) == (width % 8 == 0)
    caches = draw(2, rows, 60, heads, head_dim)
    qkv = ops.norm_qkv(stream, gain, shift, EPS, weight, bias, *caches, at, ops.norm_sums(*weights))
    assert_within_bound(qkv.flatten(2), *norm_reference(stream.x, *weights))
    row = torch.arange(rows, device="cuda")
    assert torch.equal(caches[0][row, at.long()], qkv[:, 0, 1])
    assert torch.equal(caches[1][row, at.long()], qkv[:, 0, 2])


def test_sums_of_a_norm_are_for_kernels_that_take_them():
    assert ops.norm_sums(*parameters(48, 192, "cpu", torch.float32)) is None


@needs_cuda
def test_sums_of_a_norm_and_their_shape():
    gain, shift, weight, bias = weights = parameters(5000, 192, "cuda", torch.bfloat16)
    sums = ops.norm_sums(*weights)
    wide = [t.double() for t in weights]
    expected = torch.stack([wide[2] @ wide[0], wide[2] @ wide[1] + wide[3]])
    assert torch.equal(sums, expected.float())
    x = residual_stream(1, 1, 192, device="cuda")
    with pytest.raises(ValueError, match="sums is"):
        ops.norm_linear(x, gain, shift, EPS, weight, bias, sums=sums[:, 1:].contiguous())


@needs_cuda
def test_what_a_kernel_has_just_written_may_be_a_weight():
    draw = normal("cuda", torch.bfloat16)
    rows, gain, shift = draw(8192, 1024), draw(1024) + 1, draw(1024)
    for count in (1, 3, 20):
        x = draw(count, 1024)
        weight = ops.layer_norm(rows, gain, shift)  # which lets the next kernel start early
        y = ops.linear(x, weight)
        torch.cuda.synchronize()
        assert torch.equal(y, ops.linear(x, weight))
