"""A layer norm without a kernel of its own: what prepares it, and what completes it."""

import functools
import re

import pytest
import torch
from helpers import DEVICES, assert_within_bound, body_of_kernel, needs_cuda, normal, poisoned
from test_choose_token import tables
from test_lowering import split_barriers
from torch.nn import functional as F

from minifused.kernels import build, embed, limits, schedule, swap_fold
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_gemm import part_width, swap_gemm, takes_fold
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel
from minifused.kernels.tile import Tile

F32, BF16 = "float32", "bfloat16"
H200 = Tile("sm_90a")
EPS = 1e-5
on_each_machine = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="cpu-float32"),
        pytest.param("cuda", torch.float16, id="cuda-float16", marks=DEVICES[1].marks),
        pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=DEVICES[1].marks),
    ],
)


def stream(device, *shape):
    """A residual stream: means like the deviations, and two channels a hundred times the others."""
    x = normal(device, seed=3)(*shape) + 1.0
    x[..., [5, shape[-1] // 2]] *= 100
    return x


def norm_weights(device, dtype, width):
    draw = normal(device, dtype, seed=7)
    return draw(width, std=0.3) + 1, draw(width, std=0.2)


def moments(x, width):
    """stats of rows, in float64: of each part the sum and the squared deviations from its mean."""
    parts = x.double().split(width, dim=1)
    squares = [(part - part.mean(1, keepdim=True)).square().sum(1) for part in parts]
    return torch.stack([torch.stack([p.sum(1) for p in parts], 1), torch.stack(squares, 1)], 2)


def assert_followed(x, gain, scaled, stats, width):
    assert x.any()
    assert torch.equal(scaled, (x * gain.float()).to(gain.dtype))
    wanted = moments(x, width)
    assert stats.shape == wanted.shape
    magnitudes = moments(x.abs(), width)[..., 0]  # sums are of terms of either sign
    assert ((stats - wanted)[..., 0].abs() <= 2e-6 * magnitudes).all()
    assert ((stats - wanted)[..., 1].abs() <= 1e-5 * wanted[..., 1] + 1e-6).all()


def linear_of_norm(x, gain, shift, weight, bias, activation=F.gelu):
    """In the dtype of weight but for the norm's input, or all in float64."""
    if weight.dtype == torch.float64:
        return activation(F.linear(F.layer_norm(x, x.shape[1:], gain, shift, EPS), weight, bias))
    y = F.layer_norm(x, x.shape[1:], gain.float(), shift.float(), EPS).to(weight.dtype)
    return activation(F.linear(y, weight, bias))


def sums_of(weight, gain, shift, bias):
    weight, gain, shift = weight.double(), gain.double(), shift.double()
    offset = weight @ shift if bias is None else weight @ shift + bias.double()
    return torch.stack([weight @ gain, offset]).float()


def run_fold(x, weight, bias, activation, width, out_dtype, caches=None, norm=None):
    """swap_gemm of layer_norm(x), from what a kernel with parts of `width` would have written."""
    gain, shift = norm or norm_weights(x.device, weight.dtype, x.shape[1])
    fold = moments(x, width).float(), width, sums_of(weight, gain, shift, bias), EPS
    out = poisoned(x.shape[0], weight.shape[0], device=x.device, dtype=out_dtype)
    scaled = (x * gain.float()).to(weight.dtype)
    swap_gemm(scaled, weight, None, activation, None, out, True, caches, fold)
    return out


def check_fold(device, dtype, m, n, k, width, *, gelu=True, has_bias=True, out_dtype=None):
    draw, out_dtype = normal(device, dtype), out_dtype or dtype
    weight, bias = draw(n, k, std=k**-0.5), draw(n) if has_bias else None
    x, norm = stream(device, m, k), norm_weights(device, dtype, k)
    given = x, *norm, weight, bias
    activation = F.gelu if gelu else torch.nn.Identity()
    out = run_fold(x, weight, bias, "gelu" if gelu else None, width, out_dtype)
    exact = [None if t is None else t.double() for t in given]
    eager = linear_of_norm(*given, activation).to(out_dtype)
    assert_within_bound(out, linear_of_norm(*exact, activation), eager)
    return out


def check_follow(device, dtype, m, n, k):
    draw = normal(device, dtype)
    x, weight, bias, residual = draw(m, k), draw(n, k), draw(n), stream(device, m, n)
    gain, width = norm_weights(device, dtype, n)[0], part_width(m, weight)
    out, plain = (poisoned(m, n, device=device) for _ in range(2))
    scaled = poisoned(m, n, device=device, dtype=dtype)
    stats = poisoned(m, -(-n // width), 2, device=device)
    given = x, weight, bias, None, residual
    swap_gemm(*given, out, True, follow=(gain, scaled, stats))
    swap_gemm(*given, plain, True)
    assert torch.equal(out, plain)
    assert_followed(out, gain, scaled, stats, width)


SIZES = [(3, 77, 24), (17, 200, 200), (33, 130, 1024)]


@pytest.mark.parametrize(("m", "n", "width"), SIZES)
@on_each_machine
def test_any_parts_of_a_row_merge_into_its_norm(device, dtype, m, n, width):
    check_fold(device, dtype, m, n, 200, width)


@pytest.mark.parametrize(("m", "n", "k"), [(17, 77, 200), (33, 256, 72)])
@on_each_machine
def test_a_residual_stream_comes_with_its_moments(device, dtype, m, n, k):
    check_follow(device, dtype, m, n, k)


@pytest.mark.parametrize("width", [8, 768, 1000, 1600])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (8, 1), (2, 3)])
@on_each_machine
def test_an_embedding_comes_with_its_moments(device, dtype, width, batch, length):
    wte, wpe = tables(width, dtype, device)
    tokens = (torch.arange(batch * length) * 5 % 11).view(batch, length).to(device)
    starts = torch.arange(batch, dtype=torch.int32, device=device)
    gain, part = norm_weights(device, dtype, width)[0], embed.part_width(tokens.device, width)
    out, plain = (poisoned(batch, length, width, device=device) for _ in range(2))
    scaled = poisoned(batch * length, width, device=device, dtype=dtype)
    stats = poisoned(batch * length, -(-width // part), 2, device=device)
    embed.embed(tokens, starts, wte, wpe, out, follow=(gain, scaled, stats))
    embed.embed(tokens, starts, wte, wpe, plain)
    assert torch.equal(out, plain)
    assert_followed(out.view(-1, width), gain, scaled, stats, part)


@on_each_machine
def test_a_mean_far_from_zero_does_not_cancel_in_the_variance(device, dtype):
    """The parts' sums are around 1000, their deviations 1: squares of sums would lose those."""
    x = normal(device)(4, 64) + 1000.0
    weight = torch.zeros(64, 64, device=device, dtype=dtype)
    one, zero = torch.ones(64, device=device), torch.zeros(64, device=device)
    fold = moments(x, 16).float(), 16, torch.stack([-one, zero]), EPS
    out = poisoned(4, 64, device=device)
    swap_gemm(weight[:4], weight, None, None, None, out, True, None, fold)  # mean / deviation
    exact = x.double().mean(1) / (x.double().var(1, correction=0) + EPS).sqrt()
    assert ((out - exact[:, None]) / exact[:, None]).abs().max() < 1e-5


def test_only_tma_takes_part():
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert not takes_fold(8, weight)


# CUDA source


CASES = {  # n / C, k / C, activation, cached, fold, follow, dtype of the result
    "qkv": (3, 1, None, True, True, False, BF16),
    "o": (1, 1, None, False, False, True, F32),
    "fc1": (4, 1, "gelu_tanh", False, True, False, BF16),
    "fc2": (1, 4, None, False, False, True, F32),
    "head": (65.5, 1, None, False, True, False, F32),
}


@functools.cache
def lowered(case, m, width=768):
    n, k, activation, cached, fold, follow, out = CASES[case]
    n, k = int(n * width), k * width
    chosen = schedule.swap_schedule(H200, m, n, k, BF16)
    parts = schedule.swap_schedule(H200, m, width, 4 * width, BF16).block_n
    source = build.lower(
        swap_gemm_kernel, H200, n, k, BF16, out, activation, follow, follow, True, chosen, cached,
        (parts, EPS) if fold else None, follow,
    )  # fmt: skip
    return body_of_kernel(source), chosen


# "o" differs from "fc2" in its depth alone, which groups of warps share, or blocks of a cluster.
FEW = [(case, m) for case in CASES for m in (8, 33) if (case, m) != ("o", 8)]
on_each_case = pytest.mark.parametrize(("case", "m"), [*FEW, ("fc2", 128)])


@on_each_case
def test_only_constants_are_read_ahead_of_the_kernel_before(case, m):
    source, _ = lowered(case, m)
    before, after = source.split("cudaGridDependencySynchronize", 1)
    late = case == "qkv"  # which writes to the caches
    assert "cudaTriggerProgrammaticLaunchCompletion" in (after if late else before)
    assert "tma_load(A_desc" not in before
    body = before[before.index("{") :]
    names = r"\b(C|R|stats|moments|scaled|K_cache|V_cache|positions)\b"
    assert not re.search(names + r"(\[| \+)", body)
    assert "atomic" not in source


def barriers_of(case, chosen):
    """Of a whole block, where sums go through shared memory."""
    if chosen.held:  # also for the tiles of rows, and between these and the moments
        return 1 + chosen.shared_rows * chosen.block_m // limits.TILE_ROWS + CASES[case][4]
    return 5 if chosen.splits > 1 else 3  # the sums of a cluster's blocks lie where operands did


@on_each_case
def test_barriers_are_for_all_threads(case, m):
    source, chosen = lowered(case, m)
    assert all("partial" in barrier for _, barrier in split_barriers(source))  # of a group
    if limits.staged_bytes(chosen):  # of the sums, and of what is loaded
        assert source.count("__syncthreads") == barriers_of(case, chosen)


@pytest.mark.parametrize("m", [33])
@pytest.mark.parametrize("case", ["qkv", "fc1", "head"])
def test_moments_are_on_their_way_before_the_rows_and_merged_before_a_wait(case, m):
    source, _ = lowered(case, m)
    (load,) = re.finditer(r"\*\(float4\*\)\(x \+ .*= \*\(float4\*\)\(stats \+", source)
    merge = source.index("__shfl_xor_sync")
    assert load.start() < source.index("tma_load(A_desc") < merge < source.index(".wait(")
    assert source.count("__shfl_xor_sync") == 2


@pytest.mark.parametrize(
    ("case", "m"), [("fc2", 8), ("fc2", 16), ("fc2", 128), ("o", 33), ("o", 128)]
)
def test_a_rows_moments_are_summed_within_a_warp(case, m):
    source, _ = lowered(case, m)
    sums = re.findall(r"AllReduce<tl::SumOp, (\d+), 1, ", source)
    assert len(sums) == 2
    assert max(map(int, sums)) <= 32


@pytest.mark.parametrize(
    ("block_m", "parts", "threads", "shape"),
    [
        (16, 48, 128, (1, 3, 4)),  # 8 lanes a row
        (16, 100, 512, (1, 2, 4)),  # a warp a row
        (64, 25, 256, (1, 7, 2)),  # odd: a part an access
        (128, 24, 64, (2, 12, 4)),  # two rows a lane
        (16, 3, 1, (16, 3, 2)),
        (16, 6, 1024, (1, 1, 4)),
    ],
)
def test_lanes_share_the_parts_of_a_row(block_m, parts, threads, shape):
    assert swap_fold.moments_shape(block_m, 2 * parts, threads) == shape


def test_static_memory_has_room_beside_the_sums():
    assert limits.STATIC_BYTES + 128 * 8 + 128 * 4 + 64 * 8 <= 48 * 1024
    too_much = SwapSchedule(64, 64, 64, 4, 512, groups=4)
    assert limits.staged_bytes(too_much) == 0


# On a GPU


on_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROWS = (2, 3, 8, 16, 17, 32, 33, 64, 65, 128)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("k", [768, 1600])
@on_16_bits
@needs_cuda
def test_gpt2_folds(m, k, dtype):
    width = part_width(m, torch.empty(k, 4 * k, dtype=dtype, device="cuda"))
    for parts in (width, 1024):
        check_fold("cuda", dtype, m, 4 * k, k, parts)
    check_fold(
        "cuda", dtype, m, 50304, k, width, gelu=False, has_bias=False, out_dtype=torch.float32
    )


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n", [768, 1600])
@on_16_bits
@needs_cuda
def test_gpt2_follows(m, n, dtype):
    check_follow("cuda", dtype, m, n, n)
    check_follow("cuda", dtype, m, n, 4 * n)


@pytest.mark.parametrize("m", [2, 8, 17, 33, 128])
@pytest.mark.parametrize("heads", [12, 25])
@on_16_bits
@needs_cuda
def test_a_folded_norm_and_caches(m, heads, dtype):
    k, capacity = 64 * heads, 50
    draw, x = normal("cuda", dtype), stream("cuda", m, k)
    weight, bias = draw(3 * k, k, std=k**-0.5), draw(3 * k)
    places = torch.arange(m, dtype=torch.int32, device="cuda") * 7 % 54 - 2
    caches = [torch.full((m, capacity, heads, 64), 9.0, dtype=dtype, device="cuda") for _ in "kv"]
    out = run_fold(x, weight, bias, None, 32, dtype, (*caches, places))
    assert out.any()
    assert torch.equal(out, run_fold(x, weight, bias, None, 32, dtype))
    for cache, kind in zip(caches, out.chunk(3, dim=1)[1:], strict=True):
        wanted = torch.full_like(cache, 9.0)
        for row, place in enumerate(places.tolist()):
            if 0 <= place < capacity:
                wanted[row, place] = kind[row].view(heads, 64)
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [2, 8, 33, 128])
@needs_cuda
def test_layers_in_a_chain_repeat_bit_for_bit(m, captured):
    """Each kernel is launched before the one whose moments it reads has ended."""
    dtype, width = torch.bfloat16, 768
    draw = normal("cuda", dtype)
    up, down = draw(3072, width, std=width**-0.5), draw(width, 3072, std=3072**-0.5)
    (gain, shift), part = norm_weights("cuda", dtype, width), part_width(m, down)
    sums = sums_of(up, gain, shift, None)
    x, middle = torch.empty(m, width, device="cuda"), draw(m, 3072)
    scaled, stats = draw(m, width), torch.empty(m, -(-width // part), 2, device="cuda")

    def step(wait):
        for _ in range(4):
            swap_gemm(middle, down, None, None, x, x, True, follow=(gain, scaled, stats))
            wait()
            fold = stats, part, sums, EPS
            swap_gemm(scaled, up, None, "gelu_tanh", None, middle, True, None, fold)
            wait()

    starts = [(stream("cuda", m, width) * (i + 1), draw(m, 3072)) for i in range(10)]

    def run(start, launch):
        x.copy_(start[0])
        middle.copy_(start[1])
        launch()
        return x.clone(), middle.clone(), stats.clone()

    wanted = [run(start, functools.partial(step, torch.cuda.synchronize)) for start in starts]
    launch = functools.partial(step, lambda: None)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        launch = graph.replay
    for start, result in zip(starts, wanted, strict=True):
        for got, before in zip(run(start, launch), result, strict=True):
            assert got.isfinite().all() and got.any()
            assert torch.equal(got, before)
