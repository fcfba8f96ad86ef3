"""gemm_sm90: rule, limits and CUDA source on a CPU, and ops.linear on a GPU of sm_90."""

import functools
import re

import pytest
import torch
from helpers import ACTIVATIONS, assert_within_bound, lower_once, needs_sm90, normal, poisoned
from torch.nn import functional as F

from minifused import ops
from minifused.kernels import (
    build,
    gemm_sm90,
    gemm_sm90_rule,
    limits,
    schedule,
    schedule_table,
)
from minifused.kernels.gemm_sm90_kernel import gemm_sm90_kernel
from minifused.kernels.schedule import RingGemmSchedule
from minifused.kernels.tile import Tile

F32, BF16, F16 = "float32", "bfloat16", "float16"
SM90 = Tile("sm_90a")


def name_of(s):
    name = f"{s.block_m}x{s.block_n}x{s.num_stages}"
    return name + " in turns" * s.ping_pong + f" by {s.splits}" * (s.splits > 1)


FORMS = {name_of(s): s for s in gemm_sm90_rule.FORMS}
# One of each way to store: in parts, at once, in parts and in turns, at once and in turns, and
# through the ring, for two ways to share an SM.
STORES = (
    "128x256x4", "128x160x4", "128x128x5 in turns", "128x160x4 in turns", "128x64x8", "128x128x3",
    "64x64x6",
)  # fmt: skip
on_forms = pytest.mark.parametrize("chosen", FORMS.values(), ids=FORMS)
EPILOGUES = {  # activation, bias, residual, dtype of the result
    "none": (None, False, False, BF16),
    "bias": (None, True, False, F32),
    "gelu_tanh": ("gelu_tanh", True, False, BF16),
    "gelu": ("gelu", True, False, BF16),
    "relu": ("relu", False, False, BF16),
    "residual": (None, True, True, F32),
    "16_bit_residual": (None, True, True, BF16),
    "all": ("gelu_tanh", True, True, F32),
}
on_epilogues = pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)


# Rule and limits


@pytest.mark.parametrize("width", [8, 64, 72, 768, 1024, 1280, 1600, 4096, 8192])
def test_the_rule_breaks_no_limit(width):
    for m in (129, 200, 512, 513, 1024, 4096, 8192, 8193, 1 << 20):
        for n, k in [(8, width), (width, width), (3 * width, width), (width, 4 * width),
                     (50304, width)]:  # fmt: skip
            chosen = gemm_sm90_rule.ring_gemm_schedule(SM90, m, n, k, BF16)
            assert not limits.violation(SM90, "gemm_sm90", BF16, chosen)


def test_rows_of_a_bucket_share_a_schedule():
    of = functools.partial(gemm_sm90_rule.ring_gemm_schedule, SM90, n=768, k=768, dtype=BF16)
    assert len({of(m=m) for m in range(513, 1025)}) == 1
    assert of(m=200) != of(m=8192)


@pytest.mark.parametrize("m", [256, 512, 1024])
@pytest.mark.parametrize(("n", "k"), [(768, 768), (768, 3072), (1600, 1600)])
def test_few_rows_are_spread_over_many_blocks(m, n, k):
    s = gemm_sm90_rule.ring_gemm_schedule(SM90, m, n, k, BF16)
    assert -(-m // s.block_m) * -(-n // s.block_n) * s.splits >= 48


@pytest.mark.parametrize(
    ("m", "n", "k", "form"),
    [
        (8192, 2304, 768, "128x192x4 in turns"),
        (4096, 3072, 768, "128x192x4 in turns"),
        (1024, 50304, 1600, "128x192x4 in turns"),  # a head
        (8192, 1600, 1600, "128x160x4 in turns"),  # a tenth of a tile less than with 192
        (4096, 768, 768, "128x192x4"),  # 128 tiles: one round
        (4096, 1600, 6400, "128x208x4"),  # so deep that the ends do not count, but rounds do
        (1 << 20, 768, 3072, "128x192x4 in turns"),
        (1024, 4096, 1024, "128x256x4"),  # one round
        (4096, 4096, 4096, "128x256x4"),
        (8192, 8192, 8192, "128x192x4 in turns"),
        (256, 768, 3072, "64x128x8 by 4"),  # 24 tiles of 48 steps
        (512, 768, 3072, "64x96x8 by 2"),
        (256, 768, 768, "64x64x6"),  # so shallow that sums over a cluster cost more
    ],
)
def test_the_form_goes_by_rounds_their_ends_and_depth(m, n, k, form):
    with schedule_table.rules_only():
        chosen = gemm_sm90_rule.ring_gemm_schedule(SM90, m, n, k, BF16)
    assert name_of(chosen) == form


@on_forms
def test_forms_break_no_limit(chosen):
    assert not limits.violation(SM90, "gemm_sm90", BF16, chosen)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"registers": 248}, "registers wanted"),  # setmaxnreg would wait for ever
        ({"registers": 244}, "multiple of 8"),
        ({"num_stages": 5}, "over budget"),
        ({"store_columns": 0}, "over budget"),
        ({"store_columns": 96}, "stored at a time"),
        ({"block_m": 192}, "tiles are of 128 rows"),
        ({"block_n": 264}, "columns by 16"),
        ({"block_k": 32}, "64 deep"),
        ({"min_blocks": 2}, "do not fit on an SM"),
        ({"registers": 0, "min_blocks": 2}, "sums a thread"),
        ({"resident": 0, "ping_pong": True}, "take turns"),
        ({"splits": 3}, "share K"),
        ({"splits": 2}, "not resident"),
    ],
    ids=str,
)
def test_schedules_that_cannot_work_are_refused(changed, reason):
    refused = schedule.from_fields(RingGemmSchedule, vars(FORMS["128x256x4"]) | changed)
    found = list(limits._on_cuda(SM90, "gemm_sm90", BF16, refused, 0))
    assert any(reason in violation for violation in found), found


def test_switches_of_a_table_are_true_or_false():
    with pytest.raises(ValueError, match="ping_pong is 1: expected true or false"):
        schedule.from_fields(RingGemmSchedule, vars(FORMS["128x256x4"]) | {"ping_pong": 1})


def test_which_products_it_takes():
    fits = gemm_sm90.fits
    assert fits(90, 2, 129, 8, 8) and fits(90, 2, 1024, 50304, 768)
    assert not fits(90, 2, 128, 768, 768)  # swap_gemm's
    assert not fits(90, 4, 1024, 768, 768) and not fits(90, 2, 1024, 50257, 768)
    assert not fits(90, 2, 1024, 768, 33)
    assert not fits(80, 2, 1024, 768, 768) and not fits(100, 2, 1024, 768, 768)


@pytest.mark.parametrize("took", [True, False])
def test_linear_gives_it_what_it_takes(took, monkeypatch):
    called = []
    monkeypatch.setattr(ops, "gemm_sm90_takes", lambda rows, weight: took)
    monkeypatch.setattr(ops, "gemm_sm90_kernel", lambda *given: called.append(given[-1]))
    monkeypatch.setattr(ops, "gemm_kernel", lambda *given: called.append("gemm"))
    ops.linear(torch.ones(200, 64), torch.ones(96, 64), constant=True)
    assert called == [True if took else "gemm"]


# CUDA source


def lowered(chosen, n=768, k=768, epilogue=EPILOGUES["gelu_tanh"], ahead=True):
    """The source, and the bytes of dynamic shared memory."""
    activation, has_bias, has_residual, out = epilogue
    static = n, k, BF16, out, activation, has_bias, has_residual, ahead, chosen
    return lower_once(gemm_sm90_kernel, SM90, *static)


@pytest.mark.parametrize("form", STORES)
def test_it_is_warp_specialised_and_asynchronous(form):
    chosen = FORMS[form]
    source, shared = lowered(chosen)
    assert f"__launch_bounds__({chosen.num_threads}, {chosen.min_blocks})" in source
    given = re.findall(r"warpgroup_reg_(?:de)?alloc<(\d+)>", source)
    assert {*map(int, given)} == ({24, chosen.registers} if chosen.registers else set())
    assert shared == limits.shared_memory(SM90, "gemm_sm90", BF16, chosen)
    for word in ("tma_load", "wgmma_ss", "tma_store", "wait_wgmma<1>"):
        assert word in source
    assert source.count("wgmma_ss<") == chosen.groups  # code of each group


@pytest.mark.parametrize("form", [name for name, s in FORMS.items() if s.splits == 1])
def test_the_16_bit_tile_goes_to_memory_behind_barriers(form):
    """No thread writes where others still read, or TMA reads where they still write."""
    chosen = FORMS[form]
    source, _ = lowered(chosen)
    barrier = r"__sync_thread_partial\(\d+, \d+\);"
    stores = r"(?:stmatrix|_local_cast(?:_\d+)? \+ 0\) = )"
    pattern = rf"{barrier}(?:(?!tma_store\().)*?{stores}(?:(?!tma_store\().)*?{barrier}"
    pattern += r"\s*if \(tl::tl_shuffle_elect<\d+>\(\)\) \{\s*tl::fence_proxy_async\(\);"
    turns = chosen.groups * (chosen.block_n // chosen.store_n)
    assert len(re.findall(pattern, source, re.DOTALL)) == turns
    if chosen.resident:  # nor where TMA still reads what was stored before
        waits = rf"tma_store_wait<0, true>\(\);\s*tl::{barrier}"
        assert len(re.findall(waits, source)) == turns
    assert not re.search(r"__syncthreads", source[source.index("cudaTrigger") :])


def test_blocks_that_share_k_meet_before_they_read_each_others_sums_and_before_they_end():
    chosen = FORMS["64x96x8 by 2"]
    source, shared = lowered(chosen, 1600, 3072, EPILOGUES["all"])
    assert shared == limits.shared_memory(SM90, "gemm_sm90", BF16, chosen)
    body = source[source.index("cudaTriggerProgrammaticLaunchCompletion") :]
    products, sums, end = body.split("tl::cluster_sync();")
    assert "wait_wgmma<0>" in products and re.search(r"\bsums\) \+.* = ", products)
    assert "add_from_cluster" not in products and sums.count("add_from_cluster") == 1
    stores = re.findall(r"^ *\*\(float4\*\)\(C \+ .*\) = ", sums, re.MULTILINE)
    assert len(stores) == 1 and "(C + " not in products + end and "atomic" not in source
    for other in ("tma_load(W_desc", "tma_load(A_desc"):
        assert "blockIdx.x) & 1) * 1536" in products[products.index(other) :].split(";")[0]


@pytest.mark.parametrize("n", [768, 1600], ids=["whole_tiles", "a_tail"])
def test_residual_and_float32_results_go_by_vectors(n):
    for chosen in (FORMS["128x128x3"], FORMS["64x64x6"]):
        source, _ = lowered(chosen, n, 768, EPILOGUES["all"])
        for tensor, vector in (("R", "float2"), ("C", "float2"), ("bias", "uint1")):
            assert re.search(rf"\*\({vector}\*\)\({tensor} \+", source)
            assert not re.search(rf"\b{tensor}\[", source)
            uses = re.findall(rf"\b{tensor} \+ (.*)", source)
            assert all("int64_t" in use for use in uses)


@pytest.mark.parametrize("ahead", [True, False])
def test_only_weights_are_read_before_earlier_kernels_end(ahead):
    source, _ = lowered(FORMS["128x128x3"], ahead=ahead)
    body = source[source.index("cudaTriggerProgrammaticLaunchCompletion") :]
    computing, loading = re.split(r"\n  \} else \{\n", body)
    sync = "cudaGridDependencySynchronize"
    assert computing.index(sync) < computing.index("bias")
    before = loading[: loading.index(sync)]
    assert ("W_desc" in before) == ahead
    assert "A_desc" not in before


# On a GPU


def inputs(m, n, k, epilogue, dtype):
    activation, has_bias, has_residual, out = epilogue
    draw, out = normal("cuda", dtype), torch.float32 if out == F32 else dtype
    x, weight = draw(m, k), draw(n, k, std=k**-0.5)
    residual = normal("cuda", out, seed=1)(m, n) if has_residual else None
    return (x, weight, draw(n) if has_bias else None, activation, residual), out


def formula(x, weight, bias, activation, residual, out=torch.float64):
    y = ACTIVATIONS[activation](F.linear(x, weight, bias)).to(out)
    return y if residual is None else y + residual


def assert_right(out, given):
    doubles = (t.double() if isinstance(t, torch.Tensor) else t for t in given)
    assert_within_bound(out, formula(*doubles), formula(*given, out.dtype))


def check(m, n, k, epilogue, dtype=torch.bfloat16):
    given, out_dtype = inputs(m, n, k, epilogue, dtype)
    out = poisoned(m, n, device="cuda", dtype=out_dtype)
    ops.linear(*given, out=out, constant=True)
    assert_right(out, given)
    for _ in range(3):
        assert torch.equal(ops.linear(*given, out_dtype, constant=True), out)


@pytest.mark.parametrize("m", [129, 130, 200, 511, 1000, 1025, 3000, 9000])
@pytest.mark.parametrize(("n", "k"), [(768, 768), (1600, 200), (72, 72), (8, 1600), (3080, 8)])
@needs_sm90
def test_shapes(m, n, k):
    check(m, n, k, EPILOGUES["residual"])


@pytest.mark.parametrize("m", [130, 1025])
@pytest.mark.parametrize(("n", "k"), [(1600, 200), (72, 72)])
@needs_sm90
def test_shapes_in_float16(m, n, k):
    check(m, n, k, EPILOGUES["gelu_tanh"], torch.float16)


@on_epilogues
@pytest.mark.parametrize("m", [200, 1025])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@needs_sm90
def test_epilogues(m, epilogue, dtype):
    check(m, 776, 328, epilogue, dtype)


def check_form(k, epilogue, form, ahead):
    """With tails, and more tiles than resident blocks: each goes through several."""
    m, n, (activation, has_bias, has_residual, out_name) = 5000, 1336, epilogue
    static = n, k, BF16, out_name, activation, has_bias, has_residual
    given, out_dtype = inputs(m, n, k, epilogue, torch.bfloat16)
    kernel = build.compile_kernel(gemm_sm90_kernel, SM90, *static, ahead, form)
    results = [poisoned(m, n, device="cuda", dtype=out_dtype) for _ in range(3)]
    x, weight, bias, _, residual = given
    for result in results:
        kernel(x, weight, bias, residual, result)
    assert_right(results[0], given)
    assert all(torch.equal(result, results[0]) for result in results)


@on_forms
@on_epilogues
@needs_sm90
def test_forms(epilogue, chosen):
    check_form(200, epilogue, chosen, ahead=True)


@on_forms
@pytest.mark.parametrize("k", [64, 1600])
@needs_sm90
def test_forms_of_other_depths_and_orders(k, chosen):
    form = schedule.from_fields(RingGemmSchedule, vars(chosen) | {"swizzle": 5})
    check_form(k, EPILOGUES["residual"], form, ahead=k == 64)


@needs_sm90
def test_a_chain_of_dependent_launches():
    """Each product reads what the one before wrote, and they overlap."""
    draw = normal("cuda", torch.bfloat16)
    weights = [draw(768, 768, std=768**-0.5) for _ in range(6)]
    first = draw(300, 768)
    x = expected = first
    for weight in weights:
        expected = ops.linear(expected, weight)
        torch.cuda.synchronize()
    assert expected.any()
    for _ in range(50):
        x = first
        for weight in weights:
            x = ops.linear(x, weight, constant=True)
        assert torch.equal(x, expected)
