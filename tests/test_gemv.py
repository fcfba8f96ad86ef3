"""The matrix-vector product of decoding one row: its CUDA source, and on a GPU its results."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ACTIVATIONS,
    WAIT,
    assert_within_bound,
    body_of_kernel,
    halves,
    int32,
    needs_cuda,
    normal,
    poisoned,
)
from test_decode_split import combined
from test_lowering import assert_64_bit_indices, split_barriers
from torch._subclasses.fake_tensor import FakeTensorMode

from minifused.kernels import build
from minifused.kernels.gemv import MAX_COLUMNS, gemv, norm_sums, takes
from minifused.kernels.gemv_kernel import gemv_kernel
from minifused.kernels.schedule import gemv_schedule
from minifused.kernels.tile import Tile

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5


# What is for it


@pytest.mark.parametrize(
    ("rows", "k", "dtype", "arch", "expected"),
    [
        (1, 768, BF16, "sm_90a", True),
        (1, 8, F16, "sm_80", True),
        (1, MAX_COLUMNS, BF16, "sm_90a", True),
        (2, 768, BF16, "sm_90a", False),
        (0, 768, BF16, "sm_90a", False),
        (1, 768, F32, "sm_90a", False),
        (1, 770, BF16, "sm_90a", False),
        (1, MAX_COLUMNS + 8, BF16, "sm_90a", False),
        (1, 768, F16, "sm_75", False),
        (1, 768, BF16, "", False),
    ],
)
def test_it_takes_one_row_and_16_bit_weights_in_whole_vectors(
    rows, k, dtype, arch, expected, monkeypatch
):
    monkeypatch.setattr("minifused.kernels.gemv.tile_for", lambda device: Tile(arch))
    device = "cuda" if arch else "cpu"
    with FakeTensorMode():
        assert takes(rows, torch.empty(5, k, dtype=dtype, device=device)) == expected


# The CUDA source


@functools.cache
def source(
    arch="sm_90a", n=768, k=768, dtype="bfloat16", out="float32", eps=None, parts=None,
    cached=False, ahead=True, valid=None,
):  # fmt: skip
    tile = Tile(arch)
    schedule = gemv_schedule(tile, n, k, dtype, eps is not None)
    static = n, k, dtype, out, "gelu_tanh", True, True, eps, parts, cached, ahead, schedule, valid
    return body_of_kernel(build.lower(gemv_kernel, tile, *static))


FORMS = {
    "plain": {"k": 3072},
    "norm": {"eps": EPS},
    "parts": {"parts": (8, 64)},
    "cached": {"n": 2304, "eps": EPS, "cached": True, "out": "bfloat16"},
    "ragged": {"n": 77, "k": 1000},
    "peaks": {"n": 200, "eps": EPS, "valid": 131},
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@each_form
def test_weights_are_read_16_bytes_at_a_time(form):
    text = source(**form)
    assert set(re.findall(r"\*\((\w+)\s*\*\)\(W \+", text)) == {"uint4"}
    assert not re.search(r"\bW\[", text)


@each_form
def test_weights_are_read_before_the_kernels_ahead_have_ended_and_all_else_after(form):
    before, after = halves(source(**form))
    late = form.get("cached")
    assert "cudaTriggerProgrammaticLaunchCompletion" in (after if late else before)
    constants = r"\b(W|bias|gain|sums)( \+|\[)"
    rest = r"\b(X|O|ML|R|Y|peaks|positions|[KV]_cache)( \+|\[)"
    assert re.search(constants, before) and not re.search(rest, before)
    assert re.search(rest, after) and not re.search(constants, after)


@each_form
def test_weights_that_may_still_be_written_are_read_after_them(form):
    text = source(**form, ahead=False)
    body = text[text.index("{") :]
    assert not re.search(r"\b(W|bias|gain|sums|X|O|ML|R)\b", body[: body.index(WAIT)])


@each_form
def test_without_programmatic_launch_there_is_no_wait(form):
    assert not re.search("cudaGridDependency|cudaTrigger", source("sm_80", **form))


@each_form
def test_sums_have_one_order_and_barriers_all_threads(form):
    text = source(**form)
    assert not re.search("atomic", text, re.IGNORECASE)
    assert split_barriers(text) == []


def test_peaks_are_written_once_and_not_read():
    text = source(**FORMS["peaks"])
    uses = re.findall(r"^ *(\S*\bpeaks\b.*?) = ", text, re.MULTILINE)
    assert len(re.findall(r"\bpeaks(?: \+|\[)", text)) == len(uses) == 2
    assert "peaks" not in source(**FORMS["norm"])


def test_indices_into_a_weight_of_more_than_2_31_elements_are_64_bit():
    assert_64_bit_indices(source(n=3_000_000), "W")


def test_indices_into_caches_are_64_bit():
    for cache in ("K_cache", "V_cache"):
        assert_64_bit_indices(source(**FORMS["cached"]), cache)


# On a GPU

SMALL = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
XL = [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)]
ODD = [(77, 1000), (37, 8), (1, 72), (640, 768), (50257, 768), (3, MAX_COLUMNS)]
SHAPES = [(*shape, BF16) for shape in SMALL + XL + ODD] + [(768, 768, F16), (77, 1000, F16)]
each_shape = pytest.mark.parametrize(("n", "k", "dtype"), SHAPES)


def layer_of(n, k, dtype, seed=0):
    draw = normal("cuda", dtype, seed)
    return draw(n, k, std=k**-0.5), draw(n)


def check(
    x, weight, bias, activation, residual, out_dtype, prepare=None, bias_apart=True, **arguments
):
    """Compare with float64 and eager PyTorch; `prepare` makes the row of x in a dtype."""
    prepare = prepare or (lambda x, dtype: x.to(dtype))

    def compute(dtype):
        weight_, bias_ = weight.to(dtype), None if bias is None else bias.to(dtype)
        y = ACTIVATIONS[activation](F.linear(prepare(x, dtype), weight_, bias_))
        y = y if dtype == torch.float64 else y.to(out_dtype)
        return y if residual is None else y + residual.to(y.dtype)

    out = poisoned(1, weight.shape[0], device="cuda", dtype=out_dtype)
    gemv(x, weight, bias if bias_apart else None, activation, residual, out, **arguments)
    assert_within_bound(out, compute(torch.float64), compute(weight.dtype))
    return out


def norm_of(k, dtype):
    draw = normal("cuda", dtype, seed=1)
    return draw(k, std=0.2) + 1, draw(k), EPS


def check_normed(x, norm, layer, activation=None, **arguments):
    gain, shift, eps = norm
    norm_ = gain, norm_sums(gain, shift, *layer), eps
    prepare, dtype = normalised(norm), gain.dtype
    return check(x, *layer, activation, None, dtype, prepare, False, norm=norm_, **arguments)


def normalised(norm):
    gain, shift, eps = norm

    def prepare(x, dtype):
        wide = torch.promote_types(dtype, F32)
        return F.layer_norm(x.to(wide), gain.shape, gain.to(wide), shift.to(wide), eps).to(dtype)

    return prepare


@each_shape
@needs_cuda
def test_shapes(n, k, dtype):
    x, residual = normal("cuda", dtype)(1, k), normal("cuda")(1, n)
    check(x, *layer_of(n, k, dtype), None, residual, F32)


EPILOGUES = [
    *[(name, True, True, True, dtype) for name in ACTIVATIONS for dtype in (BF16, F16)],
    ("gelu_tanh", False, True, True, BF16),
    ("gelu_tanh", True, False, True, BF16),
    (None, False, False, True, BF16),
    (None, True, True, False, BF16),
]


@pytest.mark.parametrize(("activation", "has_bias", "has_residual", "ahead", "dtype"), EPILOGUES)
@needs_cuda
def test_epilogues(activation, has_bias, has_residual, ahead, dtype):
    draw = normal("cuda", dtype)
    weight, bias = layer_of(77, 1000, dtype)
    residual = draw(1, 77) if has_residual else None
    bias = bias if has_bias else None
    check(draw(1, 1000), weight, bias, activation, residual, dtype, ahead=ahead)


def stream(k, kind):
    """A row of a residual stream, with outliers as trained models have them."""
    x = normal("cuda")(1, k)
    if kind == "outliers":
        x[:, ::97] *= 100
    return x + 10 * x.std() if kind == "far from 0" else x


@pytest.mark.parametrize("kind", ["normal", "outliers", "far from 0"])
@each_shape
@needs_cuda
def test_layer_norm_first(n, k, kind, dtype):
    check_normed(stream(k, kind), norm_of(k, dtype), layer_of(n, k, dtype), "gelu_tanh")


def parts_of(heads, splits, head_dim, with_keys):
    """o and ml as decode_attention_partials makes them, with keys in some parts, or in all."""
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(1, heads, splits, head_dim, generator=generator)
    top = torch.randn(1, heads, splits, generator=generator) * 3
    ml = torch.stack([top, torch.rand(1, heads, splits, generator=generator) * 20 + 0.5], dim=-1)
    empty = torch.rand(1, heads, splits, generator=generator) >= with_keys
    o[empty], ml[empty] = 0.0, torch.tensor([-torch.inf, 0.0])
    return o.cuda(), ml.cuda()


def check_parts(n, heads, splits, head_dim, with_keys, dtype=BF16):
    o, ml = parts_of(heads, splits, head_dim, with_keys)
    row = combined(o.double(), ml.double()).flatten(1)
    weight, bias = layer_of(n, heads * head_dim, dtype)
    residual = normal("cuda")(1, n)
    return check(
        None, weight, bias, None, residual, F32, lambda _, dtype: row.to(dtype), parts=(o, ml)
    )


@pytest.mark.parametrize("with_keys", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(
    ("heads", "splits", "head_dim", "dtype"),
    [
        *[(12, splits, 64, BF16) for splits in (1, 2, 4, 8, 16)],
        (12, 8, 64, F16),
        (25, 8, 64, BF16),
        (8, 3, 20, BF16),
        (3, 2, 8, BF16),
    ],
)
@needs_cuda
def test_attention_in_parts(heads, splits, head_dim, with_keys, dtype):
    check_parts(heads * head_dim, heads, splits, head_dim, with_keys, dtype)


@needs_cuda
def test_attention_to_no_key_is_0():
    o, ml = parts_of(12, 8, 64, with_keys=0.0)
    out = poisoned(1, 768, device="cuda")
    gemv(None, layer_of(768, 768, BF16)[0], None, None, None, out, parts=(o, ml))
    assert not out.any()


@pytest.mark.parametrize("position", [0, 3, 6, 7, 99, -1, -(2**31), 2**31 - 1])
@needs_cuda
def test_keys_and_values_land_in_their_row_and_nowhere_else(position):
    norm, capacity = norm_of(768, BF16), 7
    caches = [poisoned(1, capacity, 12, 64, device="cuda", dtype=BF16) for _ in "kv"]
    positions = int32(position, device="cuda")
    x, layer = stream(768, "normal"), layer_of(2304, 768, BF16)
    out = check_normed(x, norm, layer, caches=(*caches, positions))
    for cache, made in zip(caches, out.view(3, 12, 64)[1:], strict=True):
        written = torch.arange(capacity, device="cuda") == position
        assert cache[0, ~written].isnan().all()
        assert (cache[0, written] == made).all()


@needs_cuda
def test_a_residual_is_added_in_place():
    (weight, bias), x = layer_of(768, 768, BF16), normal("cuda", BF16)(1, 768)
    residual = normal("cuda", seed=2)(1, 768)
    apart = poisoned(1, 768, device="cuda")
    gemv(x, weight, bias, None, residual, apart)
    gemv(x, weight, bias, None, residual, residual)
    assert apart.any() and torch.equal(residual, apart)


def feed_forward(x, norm, up, down, hidden, out):
    gain, shift, eps = norm
    sums = norm_sums(gain, shift, *up)
    gemv(x, up[0], None, "gelu_tanh", None, hidden, norm=(gain, sums, eps), ahead=True)
    gemv(hidden, *down, None, x, out, ahead=True)


def feed_forward_arguments(width=768):
    up, down = layer_of(4 * width, width, BF16), layer_of(width, 4 * width, BF16, seed=3)
    hidden = poisoned(1, 4 * width, device="cuda", dtype=BF16)
    x, out = stream(width, "outliers"), poisoned(1, width, device="cuda")
    return x, norm_of(width, BF16), up, down, hidden, out


@needs_cuda
def test_results_repeat_bit_for_bit():
    *arguments, hidden, out = feed_forward_arguments()
    feed_forward(*arguments, hidden, out)
    first = hidden.clone(), out.clone()
    assert first[0].any() and first[1].any()
    for _ in range(20):
        hidden.fill_(torch.nan), out.fill_(torch.nan)
        feed_forward(*arguments, hidden, out)
        assert torch.equal(hidden, first[0]) and torch.equal(out, first[1])


@needs_cuda
def test_a_captured_chain_is_what_it_is_launch_by_launch():
    """Each kernel starts before the last one ends, and a replay before the copies ahead of it."""
    x, *arguments, hidden, out = feed_forward_arguments()
    feed_forward(x, *arguments, hidden, out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(12):  # x goes through the layer again and again
            feed_forward(x, *arguments, hidden, out)
            feed_forward(out, *arguments, hidden, x)
    for seed in range(5):
        start = normal("cuda", seed=seed)(1, 768)
        x.copy_(start)
        graph.replay()
        replayed = x.clone()
        x.copy_(start)
        for _ in range(12):
            feed_forward(x, *arguments, hidden, out)
            torch.cuda.synchronize()
            feed_forward(out, *arguments, hidden, x)
            torch.cuda.synchronize()
        assert replayed.isfinite().all()
        assert torch.equal(replayed, x)
