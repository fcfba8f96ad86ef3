"""ops.append_kv and ops.decode_attention on caches of (B, capacity, H, D)."""

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
from test_attention import eager_attention, reference_attention, visible_keys

from minifused import ops

CAPACITY = 33  # two blocks of keys and one more

# append_kv


def empty_caches(batch, device, dtype=torch.float32, capacity=CAPACITY):
    return tuple(poisoned(batch, capacity, 2, 8, device=device, dtype=dtype) for _ in range(2))


def written_by_hand(cache, x, positions):
    cache = cache.clone()
    for row, position in enumerate(positions):
        for t in range(x.shape[1]):
            if 0 <= position + t < cache.shape[1]:
                cache[row, position + t] = x[row, t]
    return cache


def check_append(qkv, positions, capacity, packed):
    """Append to empty caches, (B, capacity, 2, 8); all else in them has to stay."""
    _, k, v = qkv.unbind(2)
    caches = empty_caches(qkv.shape[0], qkv.device, qkv.dtype, capacity)
    expected = [written_by_hand(c, x, positions) for c, x in zip(caches, (k, v), strict=True)]
    k, v = (qkv, None) if packed else (k, v)
    ops.append_kv(*caches, k, v, int32(*positions, device=qkv.device))
    for cache, by_hand in zip(caches, expected, strict=True):
        assert torch.equal(cache.nan_to_num(1e3), by_hand.nan_to_num(1e3))


APPENDS = {  # new rows, position of each batch row
    "first_token": (1, (0, 0, 0)),
    "prompt": (17, (0, 0, 0)),
    "row_by_row": (1, (0, 5, 32)),
    "chunks": (5, (3, 0, 28)),
    "whole_cache": (33, (0, 0, 0)),
    "past_the_end": (5, (30, 33, 1000)),
    "before_the_start": (5, (-3, -5, -1)),
    "more_rows_than_the_cache": (40, (0, -2, 20)),
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
@pytest.mark.parametrize("case", APPENDS.values(), ids=APPENDS)
@on_each_dtype
def test_append_writes_its_rows_and_no_other(case, packed, device, dtype):
    length, positions = case
    check_append(normal(device, dtype)(3, length, 3, 2, 8), positions, CAPACITY, packed)


@on_each_device
def test_append_copies_strided_keys_and_values(device):
    draw, caches = normal(device), empty_caches(2, device)
    k, v = draw(2, 2, 5, 8).transpose(1, 2), draw(2, 9, 2, 8)[:, ::2]
    ops.append_kv(*caches, k, v, int32(7, 3, 0, 9, device=device)[:2])
    for cache, x in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[0, 7:12], x[0])
        assert torch.equal(cache[1, 3:8], x[1])


@pytest.mark.filterwarnings("ignore:CPU kernels are float32")
def test_append_of_16_bits_on_a_cpu():
    qkv = normal("cpu", torch.bfloat16)(2, 5, 3, 2, 8)
    caches = empty_caches(2, "cpu", torch.bfloat16)
    ops.append_kv(*caches, qkv, None, int32(0, 28))
    for slot, cache in enumerate(caches, start=1):
        assert torch.equal(cache[0, :5], qkv[0, :, slot])
        assert torch.equal(cache[1, 28:], qkv[1, :, slot])
        assert cache[0, 5:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 8), (3, 0, 3, 2, 8)], ids=str)
@on_each_device
def test_append_nothing(shape, device):
    caches = empty_caches(shape[0], device)
    ops.append_kv(*caches, torch.empty(shape, device=device), None,
                  int32(*[0] * shape[0], device=device))  # fmt: skip
    assert all(cache.isnan().all() for cache in caches)


def test_append_refusals():
    cache, k, positions = torch.ones(2, 33, 2, 8), torch.ones(2, 5, 2, 8), int32(0, 0)

    def refused(match, *args):
        with pytest.raises(ValueError, match=match):
            ops.append_kv(*args)

    long = torch.ones(2, 40, 2, 8)
    refused(r"^k_cache has strides \(640, 16, 8, 1\)", long[:, :33], cache, k, k, positions)
    refused(r"^v_cache has strides", cache, cache.mT.contiguous().mT, k, k, positions)
    refused(r"^k_cache is \(2, 33, 16\),.*\(B, capacity, H, D\)", cache.flatten(2), cache, k, k,
            positions)  # fmt: skip
    refused(r"^k_cache is \(3, 33, 2, 8\),.*\(2, 33, 2, 8\)", torch.ones(3, 33, 2, 8), cache, k, k,
            positions)  # fmt: skip
    refused(r"^v_cache is \(2, 40, 2, 8\),.*\(2, 33, 2, 8\)", cache, long, k, k, positions)
    refused(r"^v_cache is .*float16.*float32", cache, cache.half(), k, k, positions)
    refused(r"^k is \(2, 5, 2, 8\),.*\(B, T, 3, H, D\), as v is not", cache, cache, k, None,
            positions)  # fmt: skip
    refused(r"^v is \(2, 4, 2, 8\),.*\(2, 5, 2, 8\)", cache, cache, k, k[:, :4], positions)
    refused(r"^positions is .*int64.*int32", cache, cache, k, k, positions.long())
    refused(r"^positions is \(1,\),.*\(2,\)", cache, cache, k, k, positions[:1])


# decode_attention


def check_decode(q, k_cache, v_cache, lengths, scale=None):
    """Compare with float64 and eager PyTorch, the cache being NaN where it is not valid."""
    single = q[:, :, 0] if q.dim() == 5 else q
    visible = visible_keys(single, k_cache, causal=False, kv_lengths=lengths)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    reference, eager = (
        attend(single, k_cache, v_cache, visible, factor)
        for attend in (reference_attention, eager_attention)
    )
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for row, length in enumerate(lengths.tolist()):
        k_cache[row, length:] = v_cache[row, length:] = float("nan")
    out = poisoned(*single.shape, device=q.device, dtype=q.dtype)
    ops.decode_attention(q, k_cache, v_cache, lengths, scale, out=out)
    assert_within_bound(out, reference, eager)
    assert not out[lengths == 0].any()


DECODE_LENGTHS = {
    "empty": (0, 0),
    "first_token": (1, 1),
    "of_each_row": (0, 17),
    "block_and_one_less": (16, 15),
    "full": (33, 33),
    "one_full": (32, 33),
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
@pytest.mark.parametrize("lengths", DECODE_LENGTHS.values(), ids=DECODE_LENGTHS)
@on_each_dtype
def test_decode(lengths, packed, device, dtype):
    draw = normal(device, dtype)
    q = draw(2, 1, 3, 2, 8) if packed else draw(2, 1, 2, 8)
    caches = draw(2, CAPACITY, 2, 8), draw(2, CAPACITY, 2, 8)
    check_decode(q, *caches, int32(*lengths, device=device))


@on_each_dtype
def test_decode_wide_scores_and_own_scale(device, dtype):
    draw = normal(device, dtype)
    b = 256  # with few rows the error is chance: it comes from the near-ties
    caches = draw(b, 50, 2, 20, std=3.0), draw(b, 50, 2, 20)
    lengths = torch.randint(0, 51, (b,), generator=torch.Generator().manual_seed(0))
    check_decode(draw(b, 1, 2, 20, std=3.0), *caches, lengths.to(device, torch.int32), scale=0.7)


@pytest.mark.parametrize("head_dim", [1, 63, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@needs_cuda
def test_decode_head_sizes_on_a_gpu(head_dim, dtype):
    draw = normal("cuda", dtype)
    caches = draw(2, 1000, 2, head_dim), draw(2, 1000, 2, head_dim)
    check_decode(draw(2, 1, 2, head_dim), *caches, int32(999, 130, device="cuda"))


@on_each_dtype
def test_lengths_beyond_the_capacity_mean_all_of_it(device, dtype):
    draw = normal(device, dtype)
    q, caches = draw(2, 1, 2, 8), (draw(2, CAPACITY, 2, 8), draw(2, CAPACITY, 2, 8))
    full, beyond = (
        ops.decode_attention(q, *caches, int32(n, n, device=device)) for n in (CAPACITY, 1 << 30)
    )
    assert torch.equal(full, beyond) and full.count_nonzero() > 0.9 * full.numel()


@on_each_device
def test_decode_equals_attention_of_one_query(device):
    draw, lengths = normal(device), int32(9, 33, device=device)
    q, k, v = draw(2, 1, 2, 8), draw(2, CAPACITY, 2, 8), draw(2, CAPACITY, 2, 8)
    decoded = ops.decode_attention(q, k, v, lengths)
    torch.testing.assert_close(decoded, ops.attention(q, k, v, kv_lengths=lengths))
    assert decoded.all()


@on_each_device
def test_a_row_does_not_depend_on_its_neighbours(device):
    draw, lengths = normal(device), int32(9, 33, device=device)
    q, k, v = draw(2, 1, 2, 8), draw(2, CAPACITY, 2, 8), draw(2, CAPACITY, 2, 8)
    both = ops.decode_attention(q, k, v, lengths)
    for row in (0, 1):
        part = slice(row, row + 1)
        alone = ops.decode_attention(q[part], k[part], v[part], lengths[part])
        assert torch.equal(alone, both[part])
    assert both.all()


@on_each_device
def test_decode_without_rows_or_capacity(device):
    q, no_lengths = torch.ones(2, 1, 2, 8, device=device), int32(device=device)
    cache = torch.ones(2, 33, 2, 8, device=device)
    assert ops.decode_attention(q[:0], cache[:0], cache[:0], no_lengths).shape == (0, 1, 2, 8)
    out = ops.decode_attention(q, cache[:, :0], cache[:, :0], int32(3, 3, device=device))
    assert torch.equal(out, torch.zeros_like(out))


def test_decode_refusals():
    q, cache, lengths = torch.ones(2, 1, 2, 8), torch.ones(2, 33, 2, 8), int32(1, 2)

    def refused(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            ops.decode_attention(*args, **kwargs)

    prefix = torch.ones(2, 40, 2, 8)[:, :33]
    refused(r"^k_cache has strides .*whole contiguous buffer", q, prefix, cache, lengths)
    refused(r"^v_cache has strides .*whole contiguous buffer", q, cache, prefix, lengths)
    refused(r"^q is \(2, 2, 2, 8\),.*one query a row", cache[:, :2], cache, cache, lengths)
    refused(r"^q is .*torch.int32", q.int(), cache, cache, lengths)
    refused(r"^k_cache is \(2, 33, 2, 9\),.*\(2, 33, 2, 8\)", q, torch.ones(2, 33, 2, 9), cache,
            lengths)  # fmt: skip
    refused(r"^lengths is .*int64.*int32", q, cache, cache, lengths.long())
    refused(r"^lengths is \(1,\),.*\(2,\)", q, cache, cache, lengths[:1])
    refused(r"^out is \(2, 2, 8\),.*\(2, 1, 2, 8\)", q, cache, cache, lengths,
            out=torch.ones(2, 2, 8))  # fmt: skip
    wide = torch.ones(2, 33, 2, 257)
    refused(r"^q is .*head size from 1 to 256", wide[:, :1], wide, wide, lengths)
