"""swap_gemm with its weights in registers, for up to 32 rows: CUDA source, and on a GPU results.

test_swap_gemm.py and test_fold.py go through it too, where they have so few rows.
"""

import re

import pytest
import torch
from helpers import (
    assert_within_bound,
    body_of_kernel,
    halves,
    lower_once,
    needs_cuda,
    normal,
    poisoned,
)
from test_fold import CASES, EPS, assert_followed, check_fold, check_follow, norm_weights
from test_lowering import assert_64_bit_indices, split_barriers
from test_swap_gemm import BF16, EPILOGUES, F32, H200, check, doubles, formula

from minifused.kernels import build, limits, schedule, schedule_table
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel
from minifused.kernels.tile import CPU, Tile


def held(block_n, warp_n, groups, block_k, min_blocks=0, shared_rows=False, rows=8, stages=1):
    threads = 32 * groups * block_n // warp_n
    return SwapSchedule(
        rows, block_n, block_k, stages, threads, 1, groups, True, shared_rows, min_blocks
    )


# Which rows, and which schedules


def by_rule(m, n, k):
    with schedule_table.rules_only():
        return schedule.swap_schedule(H200, m, n, k, BF16)


@pytest.mark.parametrize("width", [768, 1024, 1280, 1600])
def test_up_to_8_rows_of_a_layer_are_for_it_and_no_head_is(width):
    for m in (2, 8):
        for n, k in [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]:
            chosen = schedule.swap_schedule(H200, m, n, k, BF16)
            assert chosen.held
            in_turns = chosen.groups * chosen.block_k < k
            assert not in_turns or (chosen.groups == 8 and not chosen.shared_rows)
            assert chosen.min_blocks * chosen.num_threads <= limits.THREADS_AN_SM
        assert not schedule.swap_schedule(H200, m, 50304, width, BF16).held
    assert not schedule.swap_schedule(Tile("sm_80"), 8, width, width, BF16).held


@pytest.mark.parametrize(("width", "all_held"), [(768, True), (1024, True), (1280, False)])
def test_of_more_rows_all_products_of_a_layer_are_for_it_or_none(width, all_held):
    for m in (9, 16, 17, 32):
        for n, k in [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]:
            chosen = by_rule(m, n, k)
            assert chosen.held == all_held and chosen.block_m < 2 * m
            if all_held:
                blocks = -(-m // chosen.block_m) * -(-n // chosen.block_n)
                assert blocks <= limits.SMS and chosen.groups * chosen.block_k >= k
        assert not schedule.swap_schedule(H200, m, 50304, width, BF16).held
    assert not schedule.swap_schedule(H200, 33, width, width, BF16).held


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (held(24, 8, 1, 64), "power of 2"),
        (held(64, 64, 1, 32), "8, 16 or 32 rows"),
        (SwapSchedule(8, 32, 32, 1, 96, 1, 2, True), "2 groups of 3 warps"),
        (held(16, 16, 4, 480), "120 registers"),
        (held(16, 16, 4, 40), "multiple of 32"),
        (held(16, 16, 1, 32, rows=24), "8, 16 or 32 rows"),
        (SwapSchedule(8, 16, 32, 1, 32, 2, 1, True), "one tile"),
        (held(16, 16, 1, 32, stages=2), "2 stages"),
        (held(16, 16, 1, 32, rows=32, stages=2, shared_rows=True), "2 stages"),
        (held(32, 32, 16, 64, rows=32), "their sums"),
        (held(16, 16, 8, 384, 2, True, rows=32), "2 blocks of"),
        (held(16, 16, 8, 64, 9), "9 blocks of 256 threads"),
        (held(16, 16, 5, 64), "160 threads"),
    ],
)
def test_what_cannot_work_is_refused(chosen, reason):
    assert reason in limits.violation(H200, "swap_gemm", BF16, chosen)


def test_a_cpu_holds_nothing():
    assert "tensor core" in limits.violation(
        CPU, "swap_gemm", F32, SwapSchedule(8, 16, 32, 1, 1, held=True)
    )


# CUDA source


def source(case, width=768, m=8, chosen=None, ahead=True):
    """The body of one of test_fold's cases."""
    n, k, activation, cached, fold, follow, out = CASES[case]
    n, k = int(n * width), k * width
    chosen = chosen or by_rule(m, n, k)
    text, _ = lower_once(
        swap_gemm_kernel, H200, n, k, BF16, out, activation, follow, follow, ahead, chosen, cached,
        (16, EPS) if fold else None, follow,
    )  # fmt: skip
    return body_of_kernel(text)


def has_norm(case):
    """Whether a case ends a layer norm, whose moments wait for the rows to be asked for."""
    return CASES[case][4]


LAYER = ["qkv", "o", "fc1", "fc2"]
READ = r"\*\((\w+)\s*\*\)\({} \+"


@pytest.mark.parametrize("width", [768, 1600])
@pytest.mark.parametrize("case", LAYER)
def test_operands_are_read_16_bytes_at_a_time_the_weights_ahead_of_the_kernel_before(case, width):
    in_a_turn = held(16, 16, 16, 416, 1, True) if (case, width) == ("fc2", 1600) else None
    text = source(case, width, chosen=in_a_turn)
    before, after = halves(text)
    late = case == "qkv"  # which writes to the caches
    assert "cudaTriggerProgrammaticLaunchCompletion" in (after if late else before)
    assert set(re.findall(READ.format("W"), before)) == {"uint4"}
    copied = re.findall(r"cp_async_gs<(\d+)>\(.*&\(A\[", after)
    assert set(re.findall(READ.format("A"), after)) | set(copied) in ({"uint4"}, {"16"})
    assert not re.search(r"\bW( \+|\[)", after) and not re.search(r"\bW\[", text)
    others = r"\b(A|C|R|stats|moments|scaled|K_cache|V_cache|positions)\b"
    assert not re.search(others + r"(\[| \+)", before)
    assert text.count("mma_sync<") == 1 and "tma_load" not in text and "atomic" not in text


@pytest.mark.parametrize(("case", "m"), [("qkv", 9), *((case, 32) for case in LAYER)])
def test_more_rows_meet_the_weights_tile_by_tile_as_they_come(case, m):
    text = source(case, m=m)
    before, after = halves(text)
    assert set(re.findall(READ.format("W"), before)) == {"uint4"}
    assert not re.search(r"\b(A|C|R|stats)(\[| \+)", before)
    assert not re.search(r"\bW( \+|\[)", after)
    n, k = int(CASES[case][0] * 768), CASES[case][1] * 768
    tiles = by_rule(m, n, k).block_m // limits.TILE_ROWS
    assert text.count("mma_sync<") == text.count("cp_async_commit") == tiles
    steps = re.findall(r"cp_async_wait<(\d)>\(\);\n  __syncthreads|(mma_sync<)", after)
    assert steps == [s for t in range(tiles) for s in ((str(tiles - 1 - t), ""), ("", "mma_sync<"))]
    assert split_barriers(text) == []
    assert text.count("__syncthreads") == 1 + tiles + has_norm(case)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_next_rows_are_asked_for_before_the_products_that_they_follow_are_left(stages):
    text = source("qkv", m=32, chosen=held(16, 16, 4, 192, 2, rows=32, stages=stages))
    _, after = halves(text)
    found = re.findall(r"\(uint4\*\)\(A \+|(mma_sync<|__syncthreads)|(sums\w*)\[.* = total", after)
    barrier, product = [("__syncthreads", "")], [("mma_sync<", "")]
    ahead = [("", "")] * (6 * stages) + barrier  # behind which the moments are asked for
    assert found[: len(ahead)] == ahead and found.count(("", "")) == 4 * 6
    rest = found[len(ahead) :]
    for t in range(4):
        wanted = product + [("", "")] * (6 if t + stages < 4 else 0)
        assert rest[: len(wanted)] == wanted and rest[len(wanted)][1]
        rest = rest[len(wanted) + 1 :]
    assert rest == barrier and text.count("__syncthreads") == 2


@pytest.mark.parametrize(
    ("case", "m", "width"), [("qkv", 8, 768), ("qkv", 32, 768), ("fc1", 32, 768), ("qkv", 8, 1600)]
)
def test_moments_are_asked_for_behind_the_rows_and_merged_before_the_products(case, m, width):
    _, after = halves(source(case, width, m))
    rows, stats, merge, product, norms, barriers = (
        [match.start() for match in re.finditer(pattern, after)]
        for pattern in (
            r"\(A \+|&\(A\[", r"\(stats \+", "__shfl_xor_sync", "mma_sync<", r"\bnorms(?: \+|\[)",
            "__syncthreads",
        )
    )  # fmt: skip
    assert rows[-1] < barriers[0] < stats[0] <= stats[-1] < merge[0]
    assert merge[-1] < norms[0] < product[0] <= product[-1] < barriers[-1] < norms[1]


def test_weights_that_may_still_be_written_are_read_after_them():
    text = source("o", ahead=False)
    operands = r"\b(W|A|bias|R|gain) \+"
    body = text[text.index("{") :]
    before, after = body[: body.index("GridDependency")], halves(text)[1]
    assert not re.search(operands, before) and re.search(operands, text)
    assert "mma_sync<" in after


@pytest.mark.parametrize("case", LAYER)
def test_sums_have_one_order_and_barriers_all_threads(case):
    text = source(case, 1600)
    shared = "cp_async_wait<0>" in text
    assert split_barriers(text) == []
    assert text.count("__syncthreads") == 1 + shared + has_norm(case)


def test_all_columns_of_whole_chunks_are_read_without_a_condition():
    """Parts of K differ by a chunk: only the last of a lane's may not be there."""
    before, _ = halves(source("qkv", 1600))  # 50 chunks in 4 parts
    assert len(re.findall(READ.format("W"), before)) == 13
    assert before.count("if (") == 1
    before, _ = halves(source("qkv", 768))
    assert "if (" not in before


def test_a_block_goes_through_more_turns_than_one():
    text = source("fc2", chosen=held(16, 16, 4, 256))
    before, after = halves(text)
    assert re.search(READ.format("W"), before) and re.search(READ.format("W"), after)
    assert "turn" in after and text.count("__syncthreads") == 1


def test_indices_are_64_bit():
    assert_64_bit_indices(source("qkv", width=1_000_000, chosen=held(16, 16, 4, 64)), "W")
    for tensor in ("A", "C", "K_cache", "V_cache"):
        for width in (768, 1600):
            assert_64_bit_indices(source("qkv", width), tensor)


def test_rows_in_shared_memory_are_waited_for_by_all():
    text = source("qkv", 1600)
    wait = text.index("cp_async_wait<0>")
    barrier = text.index("__syncthreads", wait)
    reads = [match.start() for match in re.finditer(r"\*\(uint4\*\)\(A_shared", text)]
    assert text.rindex("cp_async_gs") < text.index("cp_async_commit") < wait < barrier < min(reads)
    assert len(reads) == 13


# On a GPU

ROWS = (2, 3, 7, 8, 9, 16, 17, 31, 32)
VARIANTS = [
    held(16, 16, 1, 224), held(16, 8, 4, 256), held(32, 16, 4, 256), held(32, 32, 8, 128),
    held(64, 16, 4, 256), held(64, 16, 8, 128), held(16, 16, 16, 64, 2), held(64, 32, 16, 64),
    held(16, 16, 2, 128), held(8, 8, 16, 64), held(16, 16, 8, 128, 3, True),
    held(32, 32, 8, 128, 1, True), held(64, 16, 4, 256, 1, True), held(16, 8, 4, 256, 0, True),
    held(8, 8, 32, 32, 1, True), held(16, 16, 2, 128, 0, True),
]  # fmt: skip
MANY = [
    held(16, 16, 4, 256, 2, True, 16), held(32, 16, 4, 256, 2, True, 32),
    held(32, 32, 8, 128, 1, True, 16), held(32, 32, 8, 128, 1, True, 32),
    held(64, 16, 4, 256, 1, True, 16), held(64, 32, 8, 128, 1, True, 16),
    held(8, 8, 16, 64, 1, True, 32), held(16, 8, 4, 256, 1, False, 16),
    held(16, 16, 4, 256, 1, False, 16, 2), held(32, 16, 4, 256, 1, False, 32, 2),
    held(16, 16, 8, 128, 1, False, 32, 4), held(32, 32, 4, 128, 1, False, 32, 2),
    held(16, 16, 2, 96, 0, False, 16, 2),
]  # fmt: skip


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("k", [8, 72, 1000, 3072])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@needs_cuda
def test_odd_sizes(m, k, dtype):
    check(m, 77, k, dtype, "gelu_tanh", has_residual=True)
    check(m, 77, k, dtype, None, out_dtype=torch.float32)
    check_follow("cuda", dtype, m, 77, k)
    for width in (16, 24):
        check_fold("cuda", dtype, m, 77, k, width)


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@needs_cuda
def test_epilogues(epilogue, dtype, out_dtype):
    for m in ROWS:
        check(m, 96, 1000, dtype, *epilogue, out_dtype)


@pytest.mark.parametrize("chosen", VARIANTS + MANY, ids=str)
@pytest.mark.parametrize("m", ROWS)
@needs_cuda
def test_schedules_that_the_rules_do_not_choose(chosen, m):
    """A residual stream and what is made of it, in place, with rows that end within a block."""
    n, k, draw = 200, 1000, normal("cuda", torch.bfloat16)
    x, weight, bias = draw(m, k), draw(n, k, std=k**-0.5), draw(n)
    residual = normal("cuda", seed=1)(m, n)
    gain = norm_weights("cuda", torch.bfloat16, n)[0]
    kernel = build.compile_kernel(
        swap_gemm_kernel, build.tile_for(x.device), n, k, BF16, F32, None, True, True, True, chosen,
        False, None, True,
    )  # fmt: skip
    out, scaled = residual.clone(), poisoned(m, n, device="cuda", dtype=torch.bfloat16)
    moments = poisoned(m, 2 * -(-n // chosen.block_n), device="cuda")
    kernel(x, weight, bias, out, out, *[None] * 5, gain, scaled, moments, None)
    given = x, weight, bias, None, residual
    assert_within_bound(
        out, formula(*doubles(*given)), formula(x, weight, bias, None, None) + residual
    )
    assert_followed(out, gain, scaled, moments.view(m, -1, 2), chosen.block_n)
