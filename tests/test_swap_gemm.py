"""swap_gemm: arithmetic on a CPU, CUDA source, and ops.linear on a GPU."""

import math
import re

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    assert_within_bound,
    body_of_kernel,
    lower_once,
    needs_cuda,
    normal,
    poisoned,
)
from torch.nn import functional as F

from minifused import ops
from minifused.kernels import limits, schedule, schedule_table
from minifused.kernels.build import compile_kernel
from minifused.kernels.schedule import SwapSchedule
from minifused.kernels.swap_gemm import swap_gemm
from minifused.kernels.swap_gemm_kernel import swap_gemm_kernel
from minifused.kernels.tile import CPU, Tile

F32, BF16 = "float32", "bfloat16"
H200 = Tile("sm_90a")
EPILOGUES = {  # activation, bias, residual
    "none": (None, False, False),
    "bias": (None, True, False),
    "gelu_tanh": ("gelu_tanh", True, False),
    "gelu": ("gelu", True, False),
    "relu": ("relu", False, False),
    "residual": (None, True, True),
    "all": ("gelu_tanh", True, True),
}


def formula(x, weight, bias, activation, residual):
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual


def doubles(*tensors):
    return [t.double() if isinstance(t, torch.Tensor) else t for t in tensors]


# Arithmetic, on the CPU


def run_on_cpu(x, weight, bias, activation, residual, chosen):
    (m, k), n = x.shape, weight.shape[0]
    epilogue = activation, bias is not None, residual is not None
    out = poisoned(m, n)
    kernel = compile_kernel(swap_gemm_kernel, CPU, n, k, F32, F32, *epilogue, True, chosen)
    kernel(x, weight, bias, residual, out)
    return out


@pytest.mark.parametrize(
    ("m", "n", "k", "tiles"),
    [(17, 33, 70, 2), (5, 300, 70, 2)],
    ids=["last_block_short_of_tiles", "many_blocks"],
)
def test_tiles_cover_all_once(m, n, k, tiles):
    draw = normal()
    x, weight, bias, residual = draw(m, k), draw(n, k, std=k**-0.5), draw(n), draw(m, n)
    given = x, weight, bias, "gelu_tanh", residual
    out = run_on_cpu(*given, SwapSchedule(16, 16, 32, 1, 1, tiles))
    assert_within_bound(out, formula(*doubles(*given)), formula(*given))


@pytest.mark.parametrize("epilogue", ["none", "all"])
def test_the_epilogue_comes_after_the_sum(epilogue):
    activation, has_bias, has_residual = EPILOGUES[epilogue]
    draw = normal()
    given = (
        draw(4, 64), draw(40, 64, std=0.2), draw(40) if has_bias else None, activation,
        draw(4, 40) if has_residual else None,
    )  # fmt: skip
    out = run_on_cpu(*given, SwapSchedule(16, 16, 32, 1, 1, 1))
    assert_within_bound(out, formula(*doubles(*given)), formula(*given))


@pytest.mark.parametrize("width", [16, 10], ids=["a_kind_a_block", "blocks_of_two_kinds"])
def test_keys_and_values_go_to_their_rows_of_the_caches(width):
    draw, (m, capacity) = normal(), (18, 7)
    x, weight, bias = draw(m, 40), draw(3 * width, 40, std=40**-0.5), draw(3 * width)
    positions = torch.tensor([-1, 0, 6, 7, 3, 2**31 - 1] * 3, dtype=torch.int32)
    out = poisoned(m, 3 * width)
    caches = [torch.full((m, capacity, width), 9.0) for _ in range(2)]
    kernel = compile_kernel(
        swap_gemm_kernel, CPU, 3 * width, 40, F32, F32, None, True, False, True,
        SwapSchedule(16, 16, 32, 1, 1), True,
    )  # fmt: skip
    kernel(x, weight, bias, None, out, positions, *caches, *[None] * 6)
    given = x, weight, bias, None, None
    assert_within_bound(out, formula(*doubles(*given)), formula(*given))
    assert_kept(caches, out, positions)


def assert_kept(caches, out, positions):
    """Each row's key and value lie at its position, and 9 everywhere else."""
    _, *kinds = out.chunk(3, dim=1)
    for cache, kind in zip(caches, kinds, strict=True):
        wanted = torch.full_like(cache, 9.0)
        for row, position in enumerate(positions.tolist()):
            if 0 <= position < cache.shape[1]:
                wanted[row, position] = kind[row].view(cache.shape[2:])
        assert torch.equal(cache, wanted)


# CUDA source


GPT2 = {  # rows of weight, columns, activation, bias, residual, dtype of the result
    "qkv": (2304, 768, None, True, False, BF16),
    "o": (768, 768, None, True, True, F32),
    "fc1": (3072, 768, "gelu_tanh", True, False, BF16),
    "fc2": (768, 3072, None, True, True, F32),
    "head": (50304, 768, None, False, False, F32),
}


def lowered(tile, m, n, k, out_dtype=F32, activation=None, has_bias=True, has_residual=True):
    """The body of the CUDA kernel, its schedule, and its bytes of dynamic shared memory."""
    chosen = schedule.swap_schedule(tile, m, n, k, BF16)
    epilogue = activation, has_bias, has_residual
    static = n, k, BF16, out_dtype, *epilogue, True, chosen
    source, shared = lower_once(swap_gemm_kernel, tile, *static)
    return body_of_kernel(source), chosen, shared


def of_gpt2(case, m):
    n, k, activation, has_bias, has_residual, out_dtype = GPT2[case]
    return lowered(H200, m, n, k, out_dtype, activation, has_bias, has_residual)


def positions(pattern, source):
    return [match.start() for match in re.finditer(pattern, source)]


@pytest.mark.parametrize(
    ("arch", "n", "k", "wanted"),
    [
        ("sm_90a", 4800, 1600, {"wgmma_ss", "tma_load"}),
        ("sm_90a", 1600, 6400, {"mma_sync", "ldmatrix", "tma_load"}),
        ("sm_100a", 4800, 1600, {"mma_sync", "ldmatrix", "tma_load"}),
        ("sm_80", 768, 3072, {"mma_sync", "ldmatrix", "cp_async_gs<16>"}),
    ],
)
def test_tensor_cores_and_wide_copies_are_used(arch, n, k, wanted):
    source, _, _ = lowered(Tile(arch), 16, n, k)
    assert {word for word in wanted if word in source} == wanted
    assert "atomic" not in source


@pytest.mark.parametrize(
    ("case", "m"), [("head", 8), *((case, m) for case in ("o", "fc2", "head") for m in (33, 128))]
)
def test_only_weights_are_read_ahead_of_the_kernel_before(case, m):
    source, chosen, _ = of_gpt2(case, m)
    (trigger,) = positions("cudaTriggerProgrammaticLaunchCompletion", source)
    (sync,) = positions("cudaGridDependencySynchronize", source)
    of_weights, of_rows = (
        positions(r"tma_load\(W_desc", source),
        positions(r"tma_load\(A_desc", source),
    )
    assert trigger < of_weights[0] < sync < of_rows[0]
    first_ring = re.search(r"i < (\d+)", source[trigger:sync])
    assert chosen.num_stages == int(first_ring.group(1))
    for tensor in ("C", "R"):
        assert all(place > sync for place in positions(rf"\b{tensor}(\[| \+)", source))


@pytest.mark.parametrize(
    ("m", "n", "k", "groups"), [(8, 50304, 768, 1), (128, 768, 3072, 8), (16, 1600, 6400, 8)]
)
def test_a_slot_is_filled_again_once_all_its_threads_have_read_it(m, n, k, groups):
    with schedule_table.rules_only():
        source, chosen, _ = lowered(H200, m, n, k)
    assert chosen.groups == groups
    loops = source[source.index(".wait(") :]
    refills = positions(r"tma_load\(W_desc", loops)[:: 1 + (chosen.block_k > 64)]
    assert len(refills) == len(positions(r"\.wait\(", loops)) == groups
    assert chosen.num_stages % groups == 0  # a group sees each phase of its slots' barriers
    for refill in refills:
        product = max(match for match in positions("mma_sync|wgmma_ss", loops) if match < refill)
        threads = chosen.num_threads // groups
        sync = r"__syncthreads\(" if groups == 1 else rf"__sync_thread_partial\(\d+, {threads}\)"
        assert re.search(sync, loops[product:refill])
        assert "warpgroup_wait<0>" in loops[product:refill] or "wgmma" not in loops
    assert len(positions(r"arrive_and_expect_tx\(", source)) == 1 + groups


@pytest.mark.parametrize("case", ["o", "fc2"])
def test_no_group_waits_for_another_before_the_sums(case):
    for m in (33, 128):
        with schedule_table.rules_only():
            source, chosen, _ = of_gpt2(case, m)
        waits, products = positions(r"\.wait\(", source), positions("mma_sync", source)
        assert len(waits) == chosen.groups > 1
        assert "__syncthreads" not in source[waits[0] : products[-1]]
        assert source[products[-1] :].count("__syncthreads") == 1


@pytest.mark.parametrize(("k", "steps"), [(64, 1), (320, 5), (768, 12)])
def test_a_group_without_a_step_waits_for_none(k, steps):
    chosen = SwapSchedule(16, 16, 64, 12, 256, groups=8)
    static = 768, k, BF16, F32, None, True, True, True, chosen
    source, _ = lower_once(swap_gemm_kernel, H200, *static)
    assert len(positions(r"\.wait\(", source)) == min(steps, 8)
    assert len(positions("mma_sync", source)) == 2 * min(steps, 8)  # 16 x 8 each


@pytest.mark.parametrize("case", ["qkv", "o", "fc1", "fc2"])
def test_stores_are_wide_and_go_along_rows(case):
    for m in (8, 128):
        source, chosen, _ = of_gpt2(case, m)
        (store,) = re.findall(r"^ *(.*\bC\b.*) = .*;$", source, re.MULTILINE)
        elements = chosen.block_n * chosen.block_m // chosen.num_threads  # of a thread
        alone = rf"C\[.*& \(int64_t\){chosen.block_n - 1}\)\)\]"
        assert re.match(r"\*\((float[24]|uint[12])\*\)\(C" if elements > 1 else alone, store)


def test_barriers_are_taken_by_all_threads():
    for case in GPT2:
        source, _, _ = of_gpt2(case, 33)
        inside = re.findall(
            r"if \(tl::tl_shuffle_elect<\d+>\(\)\) \{(.*?)\n  \}", source, re.DOTALL
        )
        assert inside and not any("sync" in body for body in inside)


@pytest.mark.parametrize("case", GPT2)
def test_shared_memory_is_as_counted(case):
    for m in (8, 128):
        source, chosen, shared = of_gpt2(case, m)
        assert shared == limits.shared_memory(H200, "swap_gemm", BF16, chosen)
        found = re.search(r"float (?:sums|whole)\[(\d+)\]", source)
        assert limits.staged_bytes(chosen) == (4 * int(found.group(1)) if found else 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("width", [8, 64, 72, 768, 1024, 1280, 1600, 4096])
def test_the_rules_keep_the_limits(arch, width):
    tile = Tile(arch)
    for m in (2, 16, 17, 33, 64, 65, 128):
        for n, k in [
            (1, width),
            (77, width),
            (3 * width, width),
            (width, 4 * width),
            (50304, width),
        ]:
            chosen = schedule.swap_schedule(tile, m, n, k, BF16)
            assert limits.violation(tile, "swap_gemm", BF16, chosen) == ""
            assert chosen.block_m < max(17, 2 * m)
            assert chosen.groups <= math.ceil(k / chosen.block_k) * (2 if chosen.held else 1)


# On a GPU


def check(m, n, k, dtype, activation=None, has_bias=True, has_residual=False, out_dtype=None):
    draw, out_dtype = normal("cuda", dtype), out_dtype or dtype
    x, weight = draw(m, k), draw(n, k, std=k**-0.5)
    bias = draw(n) if has_bias else None
    residual = normal("cuda", out_dtype, seed=1)(m, n) if has_residual else None
    given = x, weight, bias, activation, residual
    out = poisoned(m, n, device="cuda", dtype=out_dtype)
    ops.linear(*given, out=out)
    eager = ACTIVATIONS[activation](F.linear(x, weight, bias)).to(out_dtype)
    assert_within_bound(
        out, formula(*doubles(*given)), eager if residual is None else eager + residual
    )
    return given, out


on_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROWS = (2, 3, 8, 15, 16, 17, 32, 33, 64, 65, 100, 128)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("case", GPT2)
@on_16_bits
@needs_cuda
def test_gpt2(m, case, dtype):
    n, k, activation, has_bias, has_residual, out = GPT2[case]
    check(m, n, k, dtype, activation, has_bias, has_residual,
          torch.float32 if out == F32 else dtype)  # fmt: skip


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n", [1, 77, 1000, 17000])
@pytest.mark.parametrize("k", [8, 64, 72, 200, 1600])
@needs_cuda
def test_odd_sizes(m, n, k):
    check(m, n, k, torch.bfloat16, "gelu_tanh", has_residual=True)


@pytest.mark.parametrize("m", [65, 128])
@pytest.mark.parametrize("k", [8, 72, 200, 768])
@needs_cuda
def test_wide_tiles_of_odd_sizes(m, k):
    n = 40001
    chosen = schedule.swap_schedule(H200, m, n, k, BF16)
    assert (chosen.block_m, chosen.block_n) == schedule.WIDE_TILE
    check(m, n, k, torch.bfloat16, "gelu_tanh", has_residual=True)


@pytest.mark.parametrize("n", [1600, 4800, 6400, 50304])
@pytest.mark.parametrize("m", [8, 32, 64, 128])
@needs_cuda
def test_gpt2_xl(m, n):
    check(m, n, 1600, torch.bfloat16, out_dtype=torch.float32, has_residual=n == 1600)
    if n == 1600:
        check(m, n, 6400, torch.bfloat16, out_dtype=torch.float32, has_residual=True)


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize(("n", "k"), [(96, 72), (96, 1024)], ids=["short", "deep"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@on_16_bits
@needs_cuda
def test_epilogues(n, k, epilogue, dtype, out_dtype):
    check(9, n, k, dtype, *epilogue, out_dtype)


@pytest.mark.parametrize("case", GPT2)
@pytest.mark.parametrize("m", [8, 33, 128])
@needs_cuda
def test_results_repeat_bit_for_bit(m, case):
    n, k, activation, has_bias, has_residual, _ = GPT2[case]
    given, out = check(
        m, n, k, torch.bfloat16, activation, has_bias, has_residual, torch.float32
    )  # fmt: skip
    for _ in range(20):
        again = poisoned(m, n, device="cuda")
        ops.linear(*given, out=again)
        assert torch.equal(again, out)


@pytest.mark.parametrize("heads", [12, 3], ids=["gpt2", "blocks_of_two_kinds"])
@pytest.mark.parametrize("m", [2, 8, 17, 32, 64, 128])
@on_16_bits
@needs_cuda
def test_caches_on_a_gpu(m, heads, dtype):
    draw, k, capacity = normal("cuda", dtype), 64 * heads, 50
    d = 64 if heads == 12 else 8
    n = 3 * heads * d
    x, weight, bias = draw(m, k), draw(n, k, std=k**-0.5), draw(n)
    places = torch.arange(m, dtype=torch.int32, device="cuda") * 7 % 54 - 2
    caches = [torch.full((m, capacity, heads, d), 9.0, dtype=dtype, device="cuda") for _ in "kv"]
    out = poisoned(m, n, device="cuda", dtype=dtype)
    swap_gemm(x, weight, bias, None, None, out, True, (*caches, places))
    given = x, weight, bias, None, None
    assert_within_bound(out, formula(*doubles(*given)), formula(*given))
    assert_kept(caches, out, places)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@needs_cuda
def test_a_chain_reads_what_the_kernel_before_wrote(captured):
    """Two layers, each launched before the other has ended, whose input changes between runs."""
    draw = normal("cuda", torch.bfloat16)
    up, down = draw(3072, 768, std=768**-0.5), draw(768, 3072, std=3072**-0.5)
    x, middle = draw(8, 768), draw(8, 3072)

    def step():
        ops.linear(x, up, None, "gelu_tanh", out=middle)
        ops.linear(middle, down, out=x)

    inputs = [draw(8, 768) for _ in range(20)]
    wanted = []
    for start in inputs:
        x.copy_(start)
        for _ in range(3):
            step()
            torch.cuda.synchronize()
        wanted.append(x.clone())
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                step()
    for start, result in zip(inputs, wanted, strict=True):
        x.copy_(start)
        if captured:
            graph.replay()
        else:
            for _ in range(3):
                step()
        assert torch.equal(x, result)


@needs_cuda
def test_weights_written_just_before_are_seen():
    draw = normal("cuda", torch.bfloat16)
    x, weight = draw(8, 768), draw(50304, 768, std=768**-0.5)
    out = ops.linear(x, weight)
    for _ in range(50):
        weight.neg_()
        out = out.neg()
        assert torch.equal(ops.linear(x, weight), out)


@needs_cuda
def test_a_copied_weight_is_waited_for():
    draw = normal("cuda", torch.bfloat16)
    x, weight = draw(8, 768), draw(768, 4096, std=768**-0.5)
    wanted = ops.linear(x, weight.T.contiguous())
    for _ in range(20):
        out = ops.linear(x, weight.T)
        assert_within_bound(out, F.linear(x.double(), weight.T.double()), wanted)


@needs_cuda
def test_infinite_and_nan_rows_stay_in_their_rows():
    draw = normal("cuda", torch.bfloat16)
    x, weight = draw(5, 72), draw(96, 72)
    x[0, 4], x[1, 71] = math.nan, math.inf
    out = ops.linear(x, weight)
    assert out[0].isnan().all()
    assert out[1].isinf().all()
    assert out[2:].isfinite().all()
