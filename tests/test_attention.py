"""ops.attention: masks, lengths, head sizes and memory layouts."""

import pytest
import torch
from helpers import (
    assert_within_bound,
    int32,
    needs_cuda,
    normal,
    on_each_device,
    on_each_dtype,
    poisoned,
)
from torch.nn import functional as F

from minifused import ops

LENGTHS = {
    "one": 1,
    "less_than_a_tile": 17,
    "tile_minus_one": 63,
    "tile": 64,
    "tile_plus_one": 65,
    "two_tiles_plus_one": 129,
}
Q_AND_K_LENGTHS = {
    "one_query": (1, 65),
    "two_queries": (2, 5),
    "fewer_queries": (63, 129),
    "more_queries": (129, 63),
    "one_key": (65, 1),
}


def visible_keys(q, k, causal, q_lengths=None, kv_lengths=None):
    """Which key each query sees, (B, 1, Tq, Tk)."""
    batch, q_len, k_len = q.shape[0], q.shape[1], k.shape[1]
    q_lengths = q_len if q_lengths is None else q_lengths.clamp(max=q_len).view(batch, 1, 1)
    kv_lengths = k_len if kv_lengths is None else kv_lengths.clamp(max=k_len).view(batch, 1, 1)
    i, j = torch.arange(q_len, device=q.device)[:, None], torch.arange(k_len, device=q.device)
    visible = (i < q_lengths) & (j < kv_lengths)
    if causal:
        visible = visible & (j <= i + kv_lengths - q_lengths)
    return visible.expand(batch, q_len, k_len).unsqueeze(1)


def reference_attention(q, k, v, visible, scale):
    """Attention of (B, T, H, D) in float64, step by step; 0 where no key is visible."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def eager_attention(q, k, v, visible, scale):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return out.where(visible.any(-1, keepdim=True), 0.0).transpose(1, 2)


def check(q, k=None, v=None, causal=True, scale=None, q_lengths=None, kv_lengths=None):
    """Compare with float64 and eager PyTorch; every element of the output has to be written."""
    separate = q.unbind(2) if k is None else (q, k, v)
    out = poisoned(*separate[0].shape, device=q.device, dtype=q.dtype)
    ops.attention(q, k, v, causal, scale, q_lengths, kv_lengths, out=out)
    visible = visible_keys(*separate[:2], causal, q_lengths, kv_lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    assert_within_bound(
        out,
        reference_attention(*separate, visible, scale),
        eager_attention(*separate, visible, scale),
    )
    unseen = ~visible.any(-1).squeeze(1)  # (B, Tq)
    assert not out[unseen.expand(out.shape[:2])].any()
    return out


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@on_each_dtype
def test_lengths(length, device, dtype):
    check(normal(device, dtype)(2, length, 3, 2, 8))


@pytest.mark.parametrize("head_dim", [63, 64])
@on_each_dtype
def test_head_sizes(head_dim, device, dtype):
    check(normal(device, dtype)(1, 65, 3, 2, head_dim))


@pytest.mark.parametrize("head_dim", [1, 20, 40, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@needs_cuda
def test_other_head_sizes_on_a_gpu(head_dim, dtype):
    check(normal("cuda", dtype)(2, 200, 3, 2, head_dim))


@pytest.mark.parametrize(
    ("causal", "scale"), [(True, None), (False, 0.7)], ids=["causal", "full_with_own_scale"]
)
@pytest.mark.parametrize("lengths", Q_AND_K_LENGTHS.values(), ids=Q_AND_K_LENGTHS)
@on_each_dtype
def test_other_numbers_of_queries_than_keys(lengths, causal, scale, device, dtype):
    q_len, k_len = lengths
    draw = normal(device, dtype)
    check(draw(2, q_len, 2, 8), draw(2, k_len, 2, 8), draw(2, k_len, 2, 8), causal, scale)


@on_each_dtype
def test_packed_equals_separate(device, dtype):
    qkv = normal(device, dtype)(2, 65, 3, 2, 8)
    packed, separate = check(qkv), check(*qkv.unbind(2))
    assert (packed - separate).abs().max() <= torch.finfo(dtype).eps * packed.abs().max()


@on_each_dtype
def test_wide_scores(device, dtype):
    """Nearly all the weight of a row is on one key, and the maximum moves from block to block."""
    draw = normal(device, dtype)
    check(torch.stack([draw(2, 200, 2, 8, std=s) for s in (10.0, 10.0, 1.0)], dim=2))


# Alignment of the causal mask, and values known exactly


def uniform(q_len, values, device, dtype):
    """A query of zeros, so that the weights are uniform, and values (1, T, 2, 8)."""
    v = torch.tensor(values, device=device, dtype=dtype)[None, :, None, None].expand(-1, -1, 2, 8)
    return torch.zeros(1, q_len, 2, 8, device=device, dtype=dtype), torch.ones_like(v), v


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([1.0, 2.0, 3.0, 4.0, 5.0], [2.5, 3.0], id="two_of_five"),
        pytest.param([1.0, 2.0, 3.0, 4.0, 5.0], [3.0], id="last_sees_all"),
        pytest.param([1.0, 2.0], [0.0, 0.0, 1.0, 1.5], id="rows_without_a_key"),
        pytest.param(
            [i + 1.0 for i in range(65)], [(i + 2) / 2 for i in range(65)], id="one_past_a_tile"
        ),
    ],
)
@on_each_dtype
def test_causal_mask_ends_at_the_last_key(values, expected, device, dtype):
    q, k, v = uniform(len(expected), values, device, dtype)
    out = ops.attention(q, k, v)
    expected = torch.tensor(expected, device=device)
    torch.testing.assert_close(
        out.float(), expected[None, :, None, None].expand(out.shape), rtol=3e-7, atol=0.0
    )


@on_each_device
def test_chunks_equal_one_pass(device):
    q, k, v = normal(device)(2, 8, 3, 2, 8).unbind(2)
    whole = ops.attention(q, k, v)
    for begin, end in [(0, 3), (3, 7), (7, 8)]:
        chunk = ops.attention(q[:, begin:end], k[:, :end], v[:, :end])
        torch.testing.assert_close(chunk, whole[:, begin:end], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole[:, 0], v[:, 0])  # the first query sees the first key alone


@pytest.mark.filterwarnings("ignore:CPU kernels are float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@on_each_device
def test_scores_beyond_the_range_of_float16(device, dtype):
    """Raw scores are 2,560,000; float16 ends at 65,504."""
    qkv = normal(device, dtype)(1, 2, 3, 2, 64)
    qkv[:, :, 0] = qkv[:, 0, 1] = 200.0
    qkv[:, 1, 1] = 0.0
    out = ops.attention(qkv)
    # p * v / p may round, and so may p for the tensor core: it is not 1 where the largest score,
    # scaled, is subtracted from the product of score and scale in one step.
    torch.testing.assert_close(out[:, 1], qkv[:, 0, 2], rtol=torch.finfo(dtype).eps, atol=0.0)


# Lengths of each batch row's own

RAGGED = {
    "prefill": ((1, 5, 17, 65), (1, 5, 17, 65)),
    "continued": ((1, 1, 16, 65), (1, 40, 65, 129)),
    "nothing_valid": ((0, 5, 0, 65), (0, 0, 129, 1)),
    "more_queries_than_keys": ((65, 64, 2, 65), (1, 63, 1, 64)),
    "lengths_beyond_the_buffer": ((65, 1000, 3, 1 << 30), (129, 129, 1000, 1 << 30)),
}


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@on_each_dtype
def test_ragged(lengths, device, dtype):
    draw = normal(device, dtype)
    q, k, v = draw(4, 65, 2, 8), draw(4, 129, 2, 8), draw(4, 129, 2, 8)
    q_lengths, kv_lengths = (int32(*row, device=device) for row in lengths)
    out = check(q, k, v, True, None, q_lengths, kv_lengths)
    for row, (q_len, k_len) in enumerate(zip(*lengths, strict=True)):
        q[row, q_len:], k[row, k_len:], v[row, k_len:] = 3e4, 3e4, 3e4
    assert torch.equal(ops.attention(q, k, v, True, None, q_lengths, kv_lengths), out)


@on_each_dtype
def test_ragged_packed_without_a_mask(device, dtype):
    qkv, lengths = normal(device, dtype)(3, 65, 3, 2, 8), int32(0, 17, 65, device=device)
    check(qkv, causal=False, q_lengths=lengths, kv_lengths=lengths)


@on_each_dtype
def test_one_of_the_lengths_alone(device, dtype):
    draw, lengths = normal(device, dtype), int32(3, 40, 65, device=device)
    q, k, v = draw(3, 2, 2, 8), draw(3, 65, 2, 8), draw(3, 65, 2, 8)
    check(q, k, v, kv_lengths=lengths)
    check(q, k, v, q_lengths=int32(0, 1, 2, device=device))


@on_each_dtype
def test_full_buffer_with_lengths_equals_its_prefix(device, dtype):
    draw = normal(device, dtype)
    q, k, v = draw(2, 5, 2, 8), draw(2, 200, 2, 8), draw(2, 200, 2, 8)
    whole = ops.attention(q, k, v, kv_lengths=int32(130, 77, device=device))
    for row, length in enumerate((130, 77)):
        part = slice(row, row + 1)
        alone = ops.attention(q[part], k[part, :length], v[part, :length])
        torch.testing.assert_close(whole[part], alone)
        assert whole[part].count_nonzero() > 0.9 * whole[part].numel()


# Memory layouts


@on_each_dtype
def test_prefix_of_a_longer_buffer(device, dtype):
    draw = normal(device, dtype)
    k_cache, v_cache = draw(2, 200, 2, 8), draw(2, 200, 2, 8)
    check(draw(2, 130, 2, 8), k_cache[:, :130], v_cache[:, :130])
    check(draw(2, 200, 3, 2, 8)[:, :130])


@on_each_device
def test_strided_inputs(device):
    draw = normal(device)
    q, k, v = (draw(2, 2, 65, 8).transpose(1, 2) for _ in range(3))
    assert not q.is_contiguous()
    check(q, k, v)
    check(draw(2, 65, 2, 3, 8).transpose(2, 3))
    check(*draw(2, 65, 2, 24).split(8, dim=-1))


@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 8), (2, 0, 3, 2, 8), (2, 5, 3, 0, 8)], ids=str)
@on_each_device
def test_nothing_to_do(shape, device):
    out = ops.attention(torch.empty(shape, device=device))
    assert out.shape == (*shape[:2], *shape[3:])


@on_each_dtype
def test_no_keys(device, dtype):
    draw = normal(device, dtype)
    out = poisoned(2, 5, 2, 8, device=device, dtype=dtype)
    ops.attention(draw(2, 5, 2, 8), draw(2, 0, 2, 8), draw(2, 0, 2, 8), out=out)
    assert torch.equal(out, torch.zeros_like(out))


# Refusals


def refused(match, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        ops.attention(*args, **kwargs)


def test_refusals_name_the_tensor_its_shape_and_the_limit():
    q, k, qkv = torch.ones(2, 5, 2, 8), torch.ones(2, 7, 2, 8), torch.ones(2, 5, 3, 2, 8)
    refused(r"^q is \(1, 5, 3, 2, 257\),.*head size from 1 to 256", torch.ones(1, 5, 3, 2, 257))
    refused(r"^q is \(1, 5, 3, 2, 0\),.*head size from 1 to 256", torch.ones(1, 5, 3, 2, 0))
    refused(r"^q is \(2, 5, 2, 8\),.*\(B, T, 3, H, D\), as k is not given", q)
    refused(r"^q is \(2, 5, 3, 2, 8\),.*\(B, Tq, H, D\)", qkv, k, k)
    refused(r"^q is .*and k and v given", q, k)
    refused(r"^q is .*torch.int64", qkv.long())
    refused(r"^k is \(2, 7, 1, 8\),.*\(2, 7, 2, 8\)", q, k[:, :, :1], k)
    refused(r"^k is .*torch.float16", q, k.half(), k)
    refused(r"^v is \(2, 5, 2, 8\),.*\(2, 7, 2, 8\)", q, k, q)
    refused(r"^out is \(2, 7, 2, 8\),.*\(2, 5, 2, 8\)", q, k, k, out=torch.ones(2, 7, 2, 8))
    refused(r"^out is .*contiguous", q, k, k, out=torch.ones(2, 2, 5, 8).transpose(1, 2))
    refused(r"^q_lengths is \(2,\), torch.int64.*torch.int32", qkv, q_lengths=torch.tensor([1, 2]))
    refused(r"^kv_lengths is \(3,\),.*\(2,\)", qkv, kv_lengths=int32(1, 2, 3))


def test_v_without_k_is_refused():
    with pytest.raises(ValueError, match=r"^v is"):
        ops.attention(torch.ones(2, 5, 3, 2, 8), None, torch.ones(2, 5, 2, 8))


@needs_cuda
def test_more_heads_or_batch_rows_than_a_grid_axis_holds_are_refused():
    refused("batch size is 65536.*65535", torch.ones(65536, 1, 3, 1, 8, device="cuda"))
    refused("number of heads is 65536.*65535", torch.ones(1, 1, 3, 65536, 8, device="cuda"))
