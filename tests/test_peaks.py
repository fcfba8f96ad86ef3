"""What the head leaves beside its scores: of each part of a row the maximum and the sum.

Who reads them is in test_row_softmax_split.py and test_choose_token.py.
"""

import math
import re

import pytest
import torch
from helpers import body_of_kernel, halves, lower_once, needs_cuda, normal, peaks_of, poisoned
from test_fold import EPS, H200, moments, norm_weights, stream, sums_of
from test_lowering import assert_64_bit_indices, split_barriers
from test_swap_split import FORMS
from torch._subclasses.fake_tensor import FakeTensorMode

from minifused import ops
from minifused.kernels import gemv, limits, schedule, swap_gemm
from minifused.kernels.build import compile_kernel
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel
from minifused.kernels.tile import CPU

F32, BF16 = "float32", "bfloat16"


def assert_peaks(peaks, scores, valid, width):
    """The maxima are those of the scores; the sums are theirs but for float32."""
    wanted = peaks_of(scores, valid, width)
    assert peaks.shape == wanted.shape
    assert torch.equal(peaks[..., 0].double(), wanted[..., 0])
    torch.testing.assert_close(peaks[..., 1].double(), wanted[..., 1], rtol=1e-5, atol=0)
    assert (peaks[..., 1][peaks[..., 0] > -math.inf] >= 1).all()


def loud_behind(weight, valid):
    """A weight whose columns of the result from `valid` on would be every row's largest."""
    weight[valid:] *= 100
    return weight


# Arithmetic, on the CPU


def run_on_cpu(x, weight, valid, tiles):
    (m, k), n = x.shape, weight.shape[0]
    chosen = SwapSchedule(16, 16, 32, 1, 1, tiles)
    static = n, k, F32, F32, None, False, False, True, chosen, False, None, False, valid
    out, peaks = poisoned(m, n), poisoned(m, 2 * -(-n // 16))
    compile_kernel(swap_gemm_kernel, CPU, *static)(x, weight, None, None, out, *[None] * 8, peaks)
    return out, peaks.view(m, -1, 2)


SIZES = {  # m, n, k, valid, tiles a block
    "all": (17, 33, 70, 33, 2),
    "a part ends early and one has none": (17, 33, 70, 20, 2),
    "blocks without a valid column": (5, 300, 70, 17, 2),
    "one column": (3, 33, 70, 1, 1),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_peaks_are_those_of_the_valid_columns(size):
    m, n, k, valid, tiles = size
    draw = normal()
    x, weight = draw(m, k), loud_behind(draw(n, k, std=3 * k**-0.5), valid)
    out, peaks = run_on_cpu(x, weight, valid, tiles)
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-4)
    assert_peaks(peaks, out, valid, 16)


def test_what_is_not_finite_is_seen_in_the_sum_of_its_part():
    m, n, k, valid, tiles = SIZES["a part ends early and one has none"]
    draw = normal()
    x, weight = draw(m, k), draw(n, k)
    x[0, 0], weight[2], weight[valid:] = math.nan, math.inf, math.nan
    x[1:], weight[18] = x[1:].abs(), 0.0
    out, peaks = run_on_cpu(x, weight, valid, tiles)
    assert out[0].isnan().all() and (out[1:, 2] == math.inf).all()
    sums = peaks[..., 1]
    assert sums[0, :2].isnan().all() and sums[1:, 0].isnan().all()
    assert sums[1:, 1].isfinite().all()
    assert torch.equal(peaks[:, 2], torch.tensor([-math.inf, 0.0]).expand(m, 2))


# CUDA source

KERNELS = {  # m, n, k, and a schedule other than the rules'
    "tiles": (8, 50304, 768, None),
    "tiles of 64 rows": (33, 50304, 768, None),
    "groups": (33, 200, 776, None),
    "held": (8, 200, 776, None),
    "held, of more rows": (32, 200, 776, None),
    "shared by blocks": (33, 200, 1000, FORMS["32x32 by 4"]),
}
TILES = [name for name in KERNELS if "tiles" in name]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def chosen_for(kernel):
    m, n, k, chosen = KERNELS[kernel]
    return chosen or schedule.swap_schedule(H200, m, n, k, BF16)


def lowered(kernel):
    """A folded product with peaks, which lie in P, and its bytes of dynamic shared memory."""
    _, n, k, _ = KERNELS[kernel]
    static = n, k, BF16, F32, None, False, False, True, chosen_for(kernel), False, (16, EPS), False
    text, shared = lower_once(swap_gemm_kernel, H200, *static, n - 47)
    return body_of_kernel(text), shared


def positions(pattern, text):
    return [match.start() for match in re.finditer(pattern, text)]


def test_the_kernels_are_what_they_say():
    forms = {name: chosen_for(name) for name in KERNELS}
    assert [name for name, s in forms.items() if s.tiles > 1] == TILES
    assert [name for name, s in forms.items() if s.groups > 1 and not s.held] == ["groups"]
    assert [name for name, s in forms.items() if s.held] == [n for n in KERNELS if "held" in n]
    assert all(map(limits.may_stage, forms.values()))


@each_kernel
def test_peaks_are_written_once_a_tile_and_not_read(kernel):
    text, _ = lowered(kernel)
    before, after = halves(text)
    assert "atomic" not in text and not re.search(r"\b[PC](\[| \+)", before)
    stores = re.findall(r"^ *\S*\bP(?:\[| \+).* = ", after, re.MULTILINE)
    assert len(stores) == len(positions(r"\bP(?:\[| \+)", after)) == 2
    assert all(("tile_index" in store) == (kernel in TILES) for store in stores)
    assert_64_bit_indices(text, "P")


@each_kernel
def test_a_row_of_a_tile_is_added_up_within_a_warp(kernel):
    text, _ = lowered(kernel)
    assert all("partial" in barrier for _, barrier in split_barriers(text))  # of a group
    behind = text[positions(r"\bC(?:\[| \+)", text)[-1] :]
    sums = re.findall(r"AllReduce<tl::(Max|Sum)Op, (\d+), 1, ", behind)
    assert [kind for kind, _ in sums] == ["Max", "Sum"]
    assert all(int(width) <= 32 for _, width in sums) and "__syncthreads" not in behind


@pytest.mark.parametrize("kernel", TILES)
def test_the_sums_of_a_tile_wait_for_those_before_to_be_read(kernel):
    text, _ = lowered(kernel)
    loop = text[text.index("for (int tile_index") :]
    uses, barriers = positions(r"\bsums_2\[|\(sums_2 \+", loop), positions("__syncthreads", loop)
    product = positions("wgmma_ss", loop)[-1]
    assert barriers[0] < positions(r"\.wait\(", loop)[0] < product < uses[0]
    assert uses[0] < barriers[-1] < uses[1] and len(barriers) == 4  # two of the ring's
    assert set(re.findall(r"\*\((\w+)\*\)\(C \+.* = ", loop)) == {"float4"}


@pytest.mark.parametrize("kernel", TILES)
def test_staged_tiles_leave_the_ring_as_many_stages_as_fit(kernel):
    text, shared = lowered(kernel)
    chosen = chosen_for(kernel)
    stage = (chosen.block_m + chosen.block_n) * chosen.block_k * 2
    staged = 4 * int(re.search(r"float sums_2\[(\d+)\]", text).group(1))
    assert staged == 4 * chosen.block_m * (chosen.block_n + 4) <= limits.STATIC_BYTES
    room = limits.shared_memory_limit(H200) - staged - 12 * chosen.block_m
    assert shared == stage * min(chosen.num_stages, room // stage)


# The operation


def test_where_it_is_not_one_kernel_it_is_a_norm_and_a_product_without_peaks():
    draw = normal()
    x, gain, shift, weight = draw(5, 192), draw(192), draw(192), draw(96, 192)
    scores, peaks = ops.scores(x, gain, shift, EPS, weight, 77)
    expected = ops.norm_linear(x, gain, shift, EPS, weight, out_dtype=torch.float32)
    assert torch.equal(scores, expected) and scores.any()
    assert peaks.shape == (5, 0, 2)
    out, masses = ops.softmax_to_draw(scores, 77, peaks)
    assert torch.equal(out, ops.softmax(scores, 77)) and not masses.numel()


@pytest.mark.parametrize("m", [1, 2, 64, 65, 129])
def test_up_to_64_rows_of_gpt2s_head_have_peaks(m, monkeypatch):
    for kernel in (gemv, swap_gemm):
        monkeypatch.setattr(kernel, "tile_for", lambda device: H200)
    with FakeTensorMode():
        x, sums = (torch.empty(shape, device="cuda") for shape in ((m, 1, 768), (2, 50304)))
        gain, weight = (x.new_empty(shape, dtype=torch.bfloat16) for shape in (768, (50304, 768)))
        prepared = ops.Stream(x, x.to(torch.bfloat16), x.new_empty(m, 48, 2))
        scores, peaks = ops.scores(prepared, gain, gain, EPS, weight, 50257, sums)
        parts = -(-50304 // width_of(m, weight)) if m <= 64 else 0
        assert scores.shape == (m, 1, 50304) and peaks.shape == (m, parts, 2)
        _, peaks = ops.scores(prepared, gain, gain, EPS, weight, 50257)  # without sums
        assert peaks.shape == (m, 0, 2)


@pytest.mark.parametrize("valid", [0, 97, -1])
def test_columns_that_are_not_there_are_refused(valid):
    draw = normal()
    with pytest.raises(ValueError, match=f"valid is {valid}: expected 1 to 96"):
        ops.scores(draw(5, 192), draw(192), draw(192), EPS, draw(96, 192), valid)


@pytest.mark.parametrize("shape", [(4, 3, 2), (5, 3, 1), (5, 3)], ids=str)
def test_peaks_of_other_rows_are_refused(shape):
    with pytest.raises(ValueError, match="peaks is"):
        ops.softmax_to_draw(normal()(5, 96), 77, torch.ones(shape))
    with pytest.raises(ValueError, match="peaks is"):
        ops.softmax_to_draw(normal()(5, 96), 77, torch.ones(5, 3, 2, dtype=torch.float64))


# On a GPU

ROWS = (1, 2, 8, 17, 33, 64)  # more have tiles that leave none, if there are many columns
HEAD = (50304, 768, 50257)
HEADS = [HEAD, (50304, 1600, 50257), (17000, 1600, 16001)]
ODD = [(200, 776, 131), (77, 72, 77), (1000, 64, 1), (8200, 264, 8000)]


def head_of(m, n, k, valid, dtype=torch.bfloat16):
    """A prepared stream of m rows, and all else that `ops.scores` takes but `valid`."""
    weight = loud_behind(normal("cuda", dtype)(n, k, std=k**-0.5), valid)
    x, (gain, shift) = stream("cuda", m, k), norm_weights("cuda", dtype, k)
    scaled = (x * gain.float()).to(dtype)[:, None]
    prepared = ops.Stream(x[:, None], scaled, moments(x, 16).float())
    return prepared, gain, shift, weight, sums_of(weight, gain, shift, None)


def width_of(rows, weight):
    """Columns of a part."""
    return gemv.part_width(weight) if rows == 1 else swap_gemm.part_width(rows, weight)


def run(head, valid=None):
    """Scores and peaks from outputs of NaN, as `ops.scores` launches the kernels."""
    (x, scaled, stats), gain, _, weight, sums = head
    m, n = len(x), len(weight)
    out = poisoned(m, n, device="cuda")
    peaks = poisoned(m, -(-n // width_of(m, weight)), 2, device="cuda")
    options = {} if valid is None else {"peaks": (peaks, valid)}
    if m == 1:
        norm = gain, sums, EPS
        gemv.gemv(x[:, 0], weight, None, None, None, out, norm, ahead=True, **options)
    else:
        given, fold = (scaled[:, 0], weight, None, None, None), (stats, 16, sums, EPS)
        swap_gemm.swap_gemm(*given, out, True, None, fold, **options)
    return out, peaks


def check(m, n, k, valid, dtype=torch.bfloat16):
    head = head_of(m, n, k, valid, dtype)
    out, peaks = run(head, valid)
    assert not out.isnan().any() and torch.equal(out, run(head)[0])
    assert_peaks(peaks, out, valid, width_of(m, head[3]))
    return head, out, peaks


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("size", HEADS, ids=str)
@needs_cuda
def test_peaks_of_heads(m, size):
    check(m, *size)


@pytest.mark.parametrize("m", [*ROWS, 65, 128])
@pytest.mark.parametrize("size", ODD, ids=str)
@needs_cuda
def test_peaks_of_odd_sizes(m, size):
    check(m, *size)


@pytest.mark.parametrize("m", [1, 8, 33])
@needs_cuda
def test_peaks_of_float16(m):
    check(m, 200, 776, 131, torch.float16)


@pytest.mark.parametrize("m", ROWS)
@needs_cuda
def test_peaks_repeat_bit_for_bit(m):
    head, out, peaks = check(m, *HEAD)
    for _ in range(20):
        again = run(head, HEAD[2])
        assert torch.equal(again[0], out) and torch.equal(again[1], peaks)


@pytest.mark.parametrize("size", [HEAD, ODD[0]], ids=str)
@pytest.mark.parametrize("m", [1, 2, 33, 65, 128])
@needs_cuda
def test_scores_are_those_of_norm_linear_and_have_their_peaks_if_there_is_room(m, size):
    n, k, valid = size
    prepared, gain, shift, weight, sums = head_of(m, n, k, valid)
    norm = gain, shift, EPS, weight
    scores, peaks = ops.scores(prepared, *norm, valid, sums)
    linear = ops.norm_linear(prepared, *norm, sums=sums, out_dtype=torch.float32)
    assert scores.shape == (m, 1, n) and torch.equal(scores, linear) and scores.any()
    if size == HEAD and m > 64:
        assert peaks.shape == (m, 0, 2)
    else:
        assert_peaks(peaks, scores[:, 0], valid, width_of(m, weight))
    results = torch.library.opcheck(
        torch.ops.minifused.scores.default, (prepared.x, *norm, valid, sums, *prepared[1:]),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("m", [1, 3, 33])
@needs_cuda
def test_a_nan_is_seen_in_the_sum_of_its_part_alone(m):
    n, k, valid = ODD[0]
    prepared, gain, shift, weight, _ = head_of(m, n, k, valid)
    column = 70
    weight[column] = math.nan
    head = prepared, gain, shift, weight, sums_of(weight, gain, shift, None)
    out, peaks = run(head, valid)
    assert out[:, column].isnan().all() and out.isnan().sum() == m
    expected = torch.arange(peaks.shape[1], device="cuda") == column // width_of(m, weight)
    assert torch.equal(peaks[..., 1].isnan(), expected.expand(m, -1))


@pytest.mark.parametrize("m", [1, 3, 33])
@needs_cuda
def test_what_is_chosen_and_drawn_by_peaks_is_what_the_scores_say(m):
    valid = HEAD[2]
    prepared, gain, shift, weight, sums = head_of(m, *HEAD)
    scores, peaks = ops.scores(prepared, gain, shift, EPS, weight, valid, sums)
    scores = scores[:, 0]
    probabilities, masses = ops.softmax_to_draw(scores, valid, peaks)
    plain, _ = ops.softmax_to_draw(scores, valid)
    assert masses.numel() and ((probabilities - plain).abs() <= 1e-6 * plain).all()
    assert not probabilities[:, valid:].any()
    tokens, finite = chosen_by(scores, valid, peaks)
    assert torch.equal(tokens, scores[:, :valid].argmax(-1)) and finite.all()


def chosen_by(scores, valid, peaks):
    """Tokens of a greedy step, and whether they are finite."""
    rows = scores.shape[0]

    def zeros(dtype, *shape):
        return torch.zeros(shape, dtype=dtype, device="cuda")

    steps, tokens = zeros(torch.int64, rows), zeros(torch.int64, rows)
    chosen, finite = zeros(torch.int64, 1, rows), zeros(torch.bool, 1, rows)
    left, going = zeros(torch.int32, rows), zeros(torch.int32, rows)
    state = steps, chosen, finite, tokens, left, going
    ops.choose_token(scores, valid, None, -1, *state, peaks=peaks)
    return tokens, finite
