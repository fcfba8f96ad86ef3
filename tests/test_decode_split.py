"""Split-KV decode attention: its arithmetic, its CUDA source, and on a GPU its results."""

import functools
import re

import pytest
import torch
from helpers import (
    WAIT,
    assert_within_bound,
    body_of_kernel,
    halves,
    int32,
    lower_once,
    needs_cuda,
    normal,
    poisoned,
)
from test_attention import eager_attention, reference_attention, visible_keys
from test_cache_ops import check_decode
from test_lowering import append, assert_64_bit_indices, normed_gemv, split_barriers

from minifused import ops
from minifused.kernels.decode_attention_combine import decode_attention_combine_kernel
from minifused.kernels.decode_attention_split import (
    decode_attention_partials,
    decode_attention_split_kernel,
)
from minifused.kernels.schedule import SplitSchedule, split_schedule, swap_schedule
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel
from minifused.kernels.tile import Tile

TRIGGER = "cudaTriggerProgrammaticLaunchCompletion"
LOG2_E = 1.4426950408889634
LENGTHS = (0, 1, 63, 64, 65, 511, 640, 1023, 1024, 2000)  # the last is past the capacity
CAPACITY = 1024


# The arithmetic, in PyTorch: what the kernels compute, as `decode_attention_partials` says it


def parts_of(capacity, splits, keys):
    """Which keys each part has: `keys` at a time, the parts in turn. (splits, capacity)."""
    return torch.arange(capacity) // keys % splits == torch.arange(splits)[:, None]


def partials(q, k, v, lengths, scale, splits, keys=32):
    """o (b, h, splits, d) and ml (b, h, splits, 2) of q (b, h, d) and caches (b, n, h, d)."""
    capacity = k.shape[1]
    s = torch.einsum("bhd,bnhd->bhn", q * (scale * LOG2_E), k)
    valid = torch.arange(capacity) < lengths[:, None]
    mask = valid[:, None, None] & parts_of(capacity, splits, keys)
    s = s[:, :, None].masked_fill(~mask, -torch.inf)
    m = s.amax(-1, keepdim=True)
    p = torch.exp2(s - m.masked_fill(m == -torch.inf, 0.0))
    return torch.einsum("bhsn,bnhd->bhsd", p, v), torch.cat([m, p.sum(-1, keepdim=True)], dim=-1)


def combined(o, ml):
    m, sums = ml.unbind(-1)
    most = m.amax(-1, keepdim=True)
    weights = torch.exp2(m - most.masked_fill(most == -torch.inf, 0.0))
    total = (weights * sums).sum(-1)[..., None]
    return torch.where(total == 0, 0.0, (weights[..., None] * o).sum(2) / total)


@pytest.mark.parametrize("splits", [1, 2, 8, 16])
def test_partial_softmaxes_add_up_to_the_whole(splits):
    draw, batch = normal(), len(LENGTHS)
    q, k, v = draw(batch, 3, 20), draw(batch, CAPACITY, 3, 20), draw(batch, CAPACITY, 3, 20)
    lengths = int32(*LENGTHS)
    out = combined(*partials(q, k, v, lengths, 0.3, splits))
    visible = visible_keys(q[:, None], k, causal=False, kv_lengths=lengths)
    reference = reference_attention(q[:, None], k, v, visible, 0.3)[:, 0]
    torch.testing.assert_close(out, reference.float(), rtol=1e-5, atol=1e-6)
    assert not out[0].any()


# The schedule


def test_blocks_are_split_until_there_is_one_for_each_sm_and_enough_keys_for_each():
    splits = {blocks: split_schedule(blocks, 1024).splits for blocks in (1, 12, 25, 48, 96, 192)}
    assert splits == {1: 8, 12: 8, 25: 5, 48: 2, 96: 1, 192: 1}
    by_capacity = {n: split_schedule(12, n).splits for n in (0, 1, 319, 320, 640, 4096, 10**6)}
    assert by_capacity == {0: 1, 1: 1, 319: 3, 320: 3, 640: 5, 4096: 11, 10**6: 11}


# The CUDA source


def split_source(arch, dtype="bfloat16", head_dim=64, splits=8, ahead=False):
    """Of the form that writes partials if there are several splits."""
    static = 12, head_dim, True, head_dim**-0.5, dtype, splits > 1, ahead
    schedule = SplitSchedule(splits, 4, 256)
    return body_of_kernel(
        lower_once(decode_attention_split_kernel, Tile(arch), *static, schedule)[0]
    )


def combine_source(arch):
    static = 12, 64, 8, "bfloat16"
    return body_of_kernel(lower_once(decode_attention_combine_kernel, Tile(arch), *static)[0])


SOURCES = {
    "partials": split_source,
    "unsplit": functools.partial(split_source, splits=1),
    "combine": combine_source,
}
each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "float16"), ("sm_90a", "bfloat16")])
def test_keys_and_values_are_read_16_bytes_at_a_time(arch, dtype):
    source = split_source(arch, dtype)
    for tensor in "QKV":
        reads = re.findall(rf"\*\((\w+)\s*\*\)\({tensor} \+", source)
        assert set(reads) == {"uint4"}
        assert not re.search(rf"\b{tensor}\[", source), f"{tensor} is read by the element too"


@pytest.mark.parametrize(("head_dim", "width"), [(20, "uint2"), (80, "uint4"), (256, "uint4")])
def test_other_heads_are_read_as_wide_as_their_rows_are_aligned(head_dim, width):
    source = split_source("sm_90a", head_dim=head_dim)
    for tensor in "QKV":
        assert set(re.findall(rf"\*\((\w+)\s*\*\)\({tensor} \+", source)) == {width}


def test_the_first_loads_all_come_before_what_uses_one():
    """In this order, with a barrier to keep it, ptxas has all of them on their way at once."""
    source = split_source("sm_90a")
    order = ("lengths[", "*)(V +", "__syncwarp()", "*)(K +", "*)(Q +", "__shfl_xor_sync")
    places = [source.index(text) for text in order]
    assert places == sorted(places)


@each_source
def test_nothing_is_read_before_the_kernels_ahead_have_ended(make):
    source = make("sm_90a")
    body = source[source.index("{") :]
    assert body.index(TRIGGER) < body.index(WAIT)
    before = body[: body.index(WAIT)]
    assert not re.search(r"\b(Q|K|V|lengths|O|ML|O_partial|ML_partial)\b", before)
    assert not re.search("cudaGridDependency|cudaTrigger", make("sm_80"))


@pytest.mark.parametrize("splits", [1, 8])
def test_older_keys_alone_are_read_ahead_of_the_kernel_before(splits):
    source = split_source("sm_90a", splits=splits, ahead=True)
    before, behind = halves(source)
    assert re.search(r"\b(K|V|lengths)\b", before)
    assert not re.search(r"\b(Q|O|ML)\b", before)
    guards = re.findall(r"if \((.+)\) \{", before)
    assert len(guards) == 2
    assert all(guard.endswith("+ 1) < valid") for guard in guards)
    assert behind.count("== (valid - 1)") == 2


def test_whoever_writes_a_row_of_a_cache_lets_the_next_kernel_start_late():
    """Decode attention reads older rows before its wait: those were written two kernels ago."""
    tile = Tile("sm_90a")
    held, ring = (swap_schedule(tile, m, 2304, 768, "bfloat16") for m in (8, 128))
    assert (held.held, ring.held) == (True, False)
    static = 2304, 768, "bfloat16", "bfloat16", None, True, False, True
    writers = [(swap_gemm_kernel, tile, *static, chosen, True) for chosen in (held, ring)]
    for recipe in (normed_gemv(tile, "bfloat16"), *writers):
        source = body_of_kernel(lower_once(*recipe)[0])
        assert "K_cache" in source
        assert source.index(WAIT) < source.index(TRIGGER)
    assert TRIGGER not in lower_once(*append(tile, "bfloat16"))[0]


@each_source
def test_results_repeat(make):
    assert not re.search("atomic", make("sm_90a"), re.IGNORECASE)


@each_source
def test_no_barrier_splits_a_group_of_threads(make):
    assert split_barriers(make("sm_90a")) == []


def test_global_indices_are_64_bit():
    for tensor in ("Q", "K", "V", "O", "ML"):
        assert_64_bit_indices(split_source("sm_90a"), tensor)
    for tensor in ("O_partial", "ML_partial", "O"):
        assert_64_bit_indices(combine_source("sm_90a"), tensor)


# On a GPU

SHAPES = [
    (1, 12, 64), (1, 25, 64), (3, 12, 64), (32, 12, 64), (1, 12, 128), (3, 2, 128),
    (1, 12, 20), (3, 12, 80), (1, 3, 256), (32, 25, 64), (3, 2, 1), (3, 2, 63),
]  # fmt: skip


def ragged(batch):
    """Lengths of a batch, each of LENGTHS in it if there is room."""
    spread = torch.arange(batch) * 7 % len(LENGTHS)
    return torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")[spread.cuda()]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "heads", "head_dim"), SHAPES)
@needs_cuda
def test_shapes(batch, heads, head_dim, dtype, packed):
    draw = normal("cuda", dtype)
    q = draw(batch, 1, 3, heads, head_dim) if packed else draw(batch, 1, heads, head_dim)
    caches = [draw(batch, CAPACITY, heads, head_dim) for _ in "kv"]
    check_decode(q, *caches, ragged(batch) if batch > 1 else int32(640, device="cuda"))


@pytest.mark.parametrize("length", LENGTHS)
@needs_cuda
def test_lengths_of_one_row(length):
    draw = normal("cuda", torch.bfloat16)
    caches = [draw(1, CAPACITY, 12, 64) for _ in "kv"]
    check_decode(draw(1, 1, 3, 12, 64), *caches, int32(length, device="cuda"))


@pytest.mark.parametrize("scale", [0.7, -0.7])
@needs_cuda
def test_wide_scores_and_own_scale(scale):
    draw = normal("cuda", torch.bfloat16)
    caches = draw(3, CAPACITY, 12, 64, std=3.0), draw(3, CAPACITY, 12, 64)
    q = draw(3, 1, 12, 64, std=3.0)
    check_decode(q, *caches, int32(1024, 511, 0, device="cuda"), scale=scale)


@pytest.mark.parametrize("batch", [1, 3, 32])
@needs_cuda
def test_results_repeat_bit_for_bit(batch):
    draw = normal("cuda", torch.bfloat16)
    q, caches = draw(batch, 1, 12, 64), [draw(batch, CAPACITY, 12, 64) for _ in "kv"]
    lengths = ragged(batch) if batch > 1 else int32(1023, device="cuda")
    first = ops.decode_attention(q, *caches, lengths)
    for _ in range(5):
        assert torch.equal(ops.decode_attention(q, *caches, lengths), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
@needs_cuda
def test_partials_are_what_they_are_said_to_be(splits, dtype):
    draw, batch, scale = normal("cuda", dtype), len(LENGTHS), 64**-0.5
    q, k, v = draw(batch, 12, 64), draw(batch, CAPACITY, 12, 64), draw(batch, CAPACITY, 12, 64)
    lengths = int32(*LENGTHS, device="cuda")
    o, ml = (poisoned(batch, 12, splits, width, device="cuda") for width in (64, 2))
    decode_attention_partials(q, k, v, lengths, scale, o, ml)
    keys = split_schedule(batch * 12, CAPACITY).num_threads // 8  # at a time: 8 lanes have one
    o64, ml64 = partials(*(x.cpu().double() for x in (q, k, v)), lengths.cpu(), scale, splits, keys)
    torch.testing.assert_close(ml[..., 0].cpu().double(), ml64[..., 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ml[..., 1].cpu().double(), ml64[..., 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(o.cpu().double(), o64, rtol=1e-4, atol=1e-4)


@needs_cuda
def test_a_captured_graph_follows_the_lengths():
    draw = normal("cuda", torch.bfloat16)
    q, caches = draw(1, 1, 12, 64), [draw(1, CAPACITY, 12, 64) for _ in "kv"]
    lengths, out = int32(5, device="cuda"), poisoned(1, 1, 12, 64, device="cuda").bfloat16()
    ops.decode_attention(q, *caches, lengths, out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            ops.decode_attention(q, *caches, lengths, out=out)
    for length in (1, 640, 1024):
        lengths.fill_(length)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, ops.decode_attention(q, *caches, lengths))
        visible = visible_keys(q, caches[0], causal=False, kv_lengths=lengths)
        reference, eager = (attend(q, *caches, visible, 0.125)
                            for attend in (reference_attention, eager_attention))  # fmt: skip
        assert_within_bound(out, reference, eager)
