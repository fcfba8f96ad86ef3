"""swap_gemm whose blocks share K: CUDA source, and every epilogue on a GPU."""

import pytest
import torch
from helpers import body_of_kernel, lower_once, needs_cuda, normal, poisoned
from test_fold import EPS, check_fold, check_follow, norm_weights, stream, sums_of
from test_swap_gemm import EPILOGUES, H200, assert_kept, check

from minifused.kernels import limits, schedule, swap_gemm
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel

BF16, F32 = "bfloat16", "float32"
FORMS = {  # rows, rows of weight, stages, threads, blocks that share K
    "128x64 by 8": SwapSchedule(128, 64, 64, 6, 128, splits=8),
    "64x64 by 8": SwapSchedule(64, 64, 64, 6, 128, splits=8),
    "32x32 by 4": SwapSchedule(32, 32, 64, 4, 64, splits=4),
    "16x16 by 2": SwapSchedule(16, 16, 32, 2, 32, splits=2),
}
on_each_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def chosen(request, monkeypatch, form):
    """The form, which all products of the test then have."""
    monkeypatch.setattr(swap_gemm, "swap_schedule", lambda *_: FORMS[form])
    monkeypatch.setattr(schedule, "swap_schedule", lambda *_: FORMS[form])
    swap_gemm._select.cache_clear()
    yield FORMS[form]
    swap_gemm._select.cache_clear()


# CUDA source


def lowered(chosen, k=3072):
    static = 768, k, BF16, F32, None, True, True, True, chosen, False, None, True
    source, shared = lower_once(swap_gemm_kernel, H200, *static)
    return body_of_kernel(source), shared


@on_each_form
def test_forms_keep_the_limits_and_shared_memory_is_as_counted(form):
    chosen = FORMS[form]
    assert limits.violation(H200, "swap_gemm", BF16, chosen) == ""
    source, shared = lowered(chosen)
    own = 4 * (chosen.block_m // chosen.splits) * (chosen.block_n + 4)
    assert f"float whole[{own // 4}]" in source
    counted = limits.shared_memory(H200, "swap_gemm", BF16, chosen)
    counted += limits.swap_bytes(H200, chosen) - 12 * chosen.block_m - own
    assert shared == counted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"splits": 3}, "share K"),
        ({"splits": 16}, "share K"),
        ({"block_m": 4}, "some of 4 rows"),
        ({"groups": 2, "num_threads": 256}, "one group"),
        ({"tiles": 2}, "one tile"),
        ({"held": True, "block_m": 32, "splits": 4}, "share no K"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(change, reason):
    values = {**vars(FORMS["128x64 by 8"]), **change}
    assert reason in limits.violation(H200, "swap_gemm", BF16, SwapSchedule(**values))


def test_blocks_meet_before_they_read_each_others_sums_and_before_they_end():
    source, _ = lowered(FORMS["128x64 by 8"])
    before, after = source.split("cudaGridDependencySynchronize")
    assert "tma_load(W_desc" in before and "tma_load(A_desc" not in before
    products, sums, end = after.split("tl::cluster_sync();")
    assert "warpgroup_wait<0>" in products and "((float*)sums)[" in products
    assert "add_from_cluster" not in products and sums.count("add_from_cluster") == 1
    for tensor in ("C", "scaled", "moments"):
        assert tensor in sums and f"({tensor} +" not in products + end
    assert "atomic" not in source
    for load in (before, products):
        at = load.index("tma_load(")
        assert "blockIdx.x) & 7) * 384" in load[at:].split(";")[0]


# On a GPU


ROWS = (15, 33, 100, 128)


@on_each_form
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@needs_cuda
def test_epilogues(chosen, form, epilogue, dtype):
    for m, n, k in ((33, 200, 1000), (128, 768, 3072)):
        check(m, n, k, dtype, *epilogue, torch.float32)
    check(17, 77, 2056, dtype, *epilogue)


@on_each_form
@pytest.mark.parametrize("m", ROWS)
@needs_cuda
def test_norms_before_and_behind(chosen, form, m):
    check_fold("cuda", torch.bfloat16, m, 200, 1000, 64)
    check_follow("cuda", torch.bfloat16, m, 200, 3072)


@on_each_form
@needs_cuda
def test_caches(chosen, form):
    m, heads, d, capacity = 33, 3, 8, 50
    draw, n, k = normal("cuda", torch.bfloat16), 3 * heads * d, 2048
    x, weight, bias = draw(m, k), draw(n, k, std=k**-0.5), draw(n)
    places = torch.arange(m, dtype=torch.int32, device="cuda") * 7 % 54 - 2
    caches = [
        torch.full((m, capacity, heads, d), 9.0, dtype=torch.bfloat16, device="cuda") for _ in "kv"
    ]
    out = poisoned(m, n, device="cuda", dtype=torch.bfloat16)
    swap_gemm.swap_gemm(x, weight, bias, None, None, out, True, (*caches, places))
    assert_kept(caches, out, places)


@on_each_form
@needs_cuda
def test_peaks(chosen, form):
    m, n, k, valid = 33, 200, 1000, 131
    x, weight = stream("cuda", m, k), normal("cuda", torch.bfloat16)(n, k, std=k**-0.5)
    gain, shift = norm_weights("cuda", torch.bfloat16, k)
    parts = -(-n // chosen.block_n)
    out, peaks = poisoned(m, n, device="cuda"), poisoned(m, parts, 2, device="cuda")
    stats = torch.stack([x.sum(1), (x - x.mean(1, keepdim=True)).square().sum(1)], 1)
    fold = stats[:, None].contiguous(), 1024, sums_of(weight, gain, shift, None), EPS
    scaled = (x * gain.float()).to(torch.bfloat16)
    swap_gemm.swap_gemm(
        scaled, weight, None, None, None, out, True, None, fold, peaks=(peaks, valid)
    )
    counted = out.double().masked_fill(torch.arange(n, device="cuda") >= valid, -torch.inf)
    pad = (0, parts * chosen.block_n - n)
    counted = torch.nn.functional.pad(counted, pad, value=-torch.inf).view(m, parts, -1)
    top = counted.amax(2)
    assert torch.equal(peaks[..., 0].double(), top)
    sums = (counted - top.clamp(min=-1e30)[..., None]).exp().sum(2)
    torch.testing.assert_close(peaks[..., 1].double(), sums, rtol=1e-5, atol=0)


@on_each_form
@needs_cuda
def test_results_repeat_bit_for_bit(chosen, form):
    given, out = check(100, 768, 3072, torch.bfloat16, None, True, True, torch.float32)
    for _ in range(20):
        again = poisoned(100, 768, device="cuda")
        swap_gemm.swap_gemm(*given, again, True)
        assert torch.equal(again, out)
