"""The CUDA source of each kernel, generated without a GPU: does it use what it should?"""

import re

import pytest
from helpers import body_of_kernel, lower_once

from minifused.kernels import build, schedule
from minifused.kernels.append_kv import append_kv_kernel
from minifused.kernels.choose_token import choose_token_kernel
from minifused.kernels.decode_attention import decode_attention_kernel
from minifused.kernels.decode_attention_combine import decode_attention_combine_kernel
from minifused.kernels.decode_attention_split import decode_attention_split_kernel
from minifused.kernels.embed import embed_kernel
from minifused.kernels.flash_attention import flash_attention_kernel
from minifused.kernels.flash_attention_sm90 import flash_attention_sm90_kernel
from minifused.kernels.gemm import gemm_kernel
from minifused.kernels.gemv import gemv_kernel
from minifused.kernels.layer_norm import MAX_COLUMNS_IN_REGISTERS, layer_norm_kernel
from minifused.kernels.limits import shared_memory, shared_memory_limit
from minifused.kernels.row_softmax import row_softmax_kernel
from minifused.kernels.skinny_gemm import skinny_gemm_kernel
from minifused.kernels.swap_gemm import swap_gemm_kernel
from minifused.kernels.tile import CPU, Tile

ARCHS = ("sm_80", "sm_90a", "sm_100a")
BF16, F32 = "bfloat16", "float32"


# What each machine is given, in GPT-2's sizes with the schedules chosen for them.


def gemm(tile, dtype, m=512, n=2304, k=768):
    chosen = schedule.gemm_schedule(tile, m, n, k, dtype)
    return gemm_kernel, tile, n, k, dtype, dtype, "gelu_tanh", True, True, chosen


def skinny(tile, dtype, m=8, n=768, k=768):
    chosen = schedule.skinny_schedule(tile, m, n, k, dtype)
    return skinny_gemm_kernel, tile, n, k, dtype, F32, None, True, True, chosen


def attention(tile, dtype, head_dim=64):
    chosen = schedule.attention_schedule(tile, head_dim, dtype)
    return (flash_attention_kernel, tile, 12, head_dim, True, True, True, head_dim**-0.5, dtype,
            chosen)  # fmt: skip


def flash(tile, dtype, head_dim=64, causal=True, keys=1024):
    """Queries, keys and values apart, and lengths, where there is no mask."""
    chosen = schedule.flash_schedule(tile, head_dim, dtype, causal, keys)
    static = 12, head_dim, causal, causal, not causal, head_dim**-0.5, dtype
    return flash_attention_sm90_kernel, tile, *static, chosen


def flash_resident(tile, dtype, head_dim=64, held=False):
    chosen = schedule.FlashSchedule(
        128, 128, 2, 2, 240, resident=132, overlap=True, pin=True, held=held
    )
    static = 12, head_dim, False, False, True, head_dim**-0.5, dtype
    return flash_attention_sm90_kernel, tile, *static, chosen


def decode(tile, dtype, head_dim=64):
    chosen = schedule.decode_attention_schedule(tile, head_dim, dtype)
    return decode_attention_kernel, tile, 12, head_dim, True, head_dim**-0.5, dtype, chosen


def append(tile, dtype):
    return append_kv_kernel, tile, 768, True, dtype, schedule.row_schedule(tile, 768, 1024)


def softmax(tile, dtype, n=768):
    chosen = schedule.row_schedule(tile, n, MAX_COLUMNS_IN_REGISTERS)
    return row_softmax_kernel, tile, n, n, dtype, F32, chosen


def followed_embed(tile, dtype):
    return (*embed(tile, dtype), True)


def layer_norm(tile, dtype, n=768):
    chosen = schedule.row_schedule(tile, n, MAX_COLUMNS_IN_REGISTERS)
    return layer_norm_kernel, tile, n, 1e-5, F32, dtype, chosen


# The same of rows that are too long for a warp.


def block_softmax(tile, dtype):
    return softmax(tile, dtype, n=4096)


def block_layer_norm(tile, dtype):
    return layer_norm(tile, dtype, n=4096)


# Kernels that only a GPU is given, but for embed.


def swap(tile, dtype, m=8, n=2304, k=768):
    chosen = schedule.swap_schedule(tile, m, n, k, dtype)
    return swap_gemm_kernel, tile, n, k, dtype, F32, "gelu_tanh", True, True, True, chosen


def gemv(tile, dtype, n=768, k=768):
    chosen = schedule.gemv_schedule(tile, n, k, dtype, False)
    return gemv_kernel, tile, n, k, dtype, F32, None, True, True, None, None, False, True, chosen


def normed_gemv(tile, dtype, n=2304, k=768):
    chosen = schedule.gemv_schedule(tile, n, k, dtype, True)
    return gemv_kernel, tile, n, k, dtype, dtype, None, True, False, 1e-5, None, True, True, chosen


def merged_gemv(tile, dtype, n=768, k=768):
    chosen = schedule.gemv_schedule(tile, n, k, dtype, False)
    return (gemv_kernel, tile, n, k, dtype, F32, None, True, True, None, (8, 64), False, True,
            chosen)  # fmt: skip


def decode_split(tile, dtype):
    chosen = schedule.split_schedule(12, 1024)
    static = 12, 64, True, 0.125, dtype, chosen.splits > 1, True
    return decode_attention_split_kernel, tile, *static, chosen


def combine(tile, dtype):
    return decode_attention_combine_kernel, tile, 12, 64, 8, dtype


def drawn(tile, dtype, greedy=False):
    return choose_token_kernel, tile, 50304, 50257, greedy, -1, True


def greedy(tile, dtype):
    return drawn(tile, dtype, greedy=True)


def embed(tile, dtype):
    return embed_kernel, tile, 768, dtype, True, schedule.row_schedule(tile, 768, 1024)


# What each may read before the kernels launched earlier have ended: what they do not write.
OF_A_STEP = {
    swap: {"W", "bias"},
    gemv: {"W", "bias"},
    normed_gemv: {"W", "bias", "gain", "sums"},
    merged_gemv: {"W", "bias"},
    attention: set(),
    flash: set(),
    decode_split: {"K", "V", "lengths"},  # rows that a step wrote before this one
    combine: set(),
    drawn: set(),
    greedy: set(),
    embed: set(),
    followed_embed: set(),
    append: set(),
    layer_norm: set(),
    softmax: set(),
    block_layer_norm: set(),
    block_softmax: set(),
}


def lowered(make, arch, dtype, **sizes):
    """The body of the CUDA kernel, and the bytes of dynamic shared memory it asks for."""
    source, shared = lower_once(*make(Tile(arch), dtype, **sizes))
    return body_of_kernel(source), shared


def instructions(source):
    """Which of the instructions that matter are in a source."""
    patterns = {
        "wgmma": r"wgmma_[rs]s",
        "mma": r"mma_sync",
        "ldmatrix": r"ldmatrix",
        "cp_async": r"cp_async_gs",
        "tma_load": r"tma_load",
        "tma_store": r"tma_store",
        "warp_specialised": r"warpgroup_reg_alloc",
    }
    return {name for name, pattern in patterns.items() if re.search(pattern, source)}


EXPECTED = {
    "sm_80": {"mma", "ldmatrix", "cp_async"},
    "sm_90a": {"wgmma", "tma_load", "tma_store", "warp_specialised"},
    "sm_100a": {"mma", "ldmatrix", "tma_load", "tma_store", "warp_specialised"},
}
# Those without TMA lower in 6 s each, so few: one of sm_80, and of the sizes that are no multiple
# of 8 the one that has to be copied by the element.
ATTENTION_CASES = {
    **{("bfloat16", 64, arch): EXPECTED[arch] for arch in ARCHS},
    ("bfloat16", 63, "sm_90a"): {"wgmma"},
    ("float32", 64, "sm_90a"): {"tma_load", "tma_store", "warp_specialised"},
}
attention_cases = pytest.mark.parametrize(
    ("dtype", "head_dim", "arch"),
    ATTENTION_CASES,
    ids=[f"{arch}-{head_dim}-{dtype}" for dtype, head_dim, arch in ATTENTION_CASES],
)


# Instructions


@pytest.mark.parametrize("arch", ARCHS)
def test_gemm_uses_tensor_cores_and_bulk_copies(arch):
    assert instructions(lowered(gemm, arch, BF16)[0]) >= EXPECTED[arch]


def test_gemm_of_many_rows_does_too():
    assert instructions(lowered(gemm, "sm_90a", BF16, m=8192)[0]) >= EXPECTED["sm_90a"]


@attention_cases
def test_attention_uses_tensor_cores_and_bulk_copies(dtype, head_dim, arch):
    source, _ = lowered(attention, arch, dtype, head_dim=head_dim)
    assert instructions(source) >= ATTENTION_CASES[dtype, head_dim, arch]


# One of each form of a grid of all work: several blocks an SM, or one that overlaps.
@pytest.mark.parametrize(
    ("head_dim", "causal", "keys", "registers", "min_blocks"),
    [(64, True, 1024, (24, 128), 3), (64, True, 8192, (24, 160), 1),
     (128, True, 4096, (24, 240), 1)],
)  # fmt: skip
def test_attention_of_sm90_is_warp_specialised(head_dim, causal, keys, registers, min_blocks):
    sizes = {"head_dim": head_dim, "causal": causal, "keys": keys}
    source, shared = lowered(flash, "sm_90a", BF16, **sizes)
    assert instructions(source) == EXPECTED["sm_90a"]
    given = re.findall(r"warpgroup_reg_(?:de)?alloc<(\d+)>", source)
    assert sorted(map(int, given)) == list(registers)
    chosen = flash(Tile("sm_90a"), BF16, **sizes)[-1]
    assert source.startswith(f"__launch_bounds__({chosen.num_threads}, {min_blocks})")
    # No tile lies in another's memory, but for the output in that of the queries.
    assert shared == shared_memory(Tile("sm_90a"), "flash_attention_sm90", BF16, chosen, head_dim)
    assert split_barriers(source) == []
    # Each role has its loop over the keys.
    loops = [loop for loop in re.findall(r"for \(int \w+ = 0; (.*); \+\+", source)
             if not re.search(r"< \d+$", loop)]  # fmt: skip
    assert len(loops) == 2
    assert ("wait_wgmma<1>" in source) == chosen.overlap


on_resident_forms = pytest.mark.parametrize(("head_dim", "held"), [(64, False), (128, True)])


@on_resident_forms
def test_resident_blocks_of_attention_wait_for_no_other_warp(head_dim, held):
    sizes = {"head_dim": head_dim, "held": held}
    source, shared = lowered(flash_resident, "sm_90a", BF16, **sizes)
    chosen = flash_resident(Tile("sm_90a"), BF16, **sizes)[-1]
    assert shared == shared_memory(Tile("sm_90a"), "flash_attention_sm90", BF16, chosen, head_dim)
    # But for turns at the tensor cores: of the first scores, of each step, and of a new piece.
    named = re.findall(r"__sync_thread_partial\((.*)\);", source)
    assert len(named) == 3 and all("threadIdx.x) >> 7) + 8), 256" in turn for turn in named)
    assert source.count("__syncthreads") == 1  # of the barriers' first state
    # A warp's rows are in shared memory, for TMA to see, before one of its lanes stores them.
    end = source.index("stmatrix")
    order = ["fence_proxy_async", "__syncwarp", "tl_shuffle_elect<32>", "tma_store(O_desc"]
    places = [source.index(word, end) for word in order]
    assert places == sorted(places)
    assert source.rindex("tma_store_wait", 0, end) < source.rindex("__syncwarp", 0, end)
    # Scores: the first, of a step, of a new piece. Their products: the last two, and the very last.
    assert (source.count("wgmma_ss<"), source.count("wgmma_rs<")) == ((0, 6) if held else (3, 3))
    assert "ldmatrix" in source if held else "ldmatrix" not in source


@on_resident_forms
def test_resident_blocks_of_attention_begin_each_piece_of_work_anew(head_dim, held):
    source, _ = lowered(flash_resident, "sm_90a", BF16, head_dim=head_dim, held=held)
    roles = source.split("warpgroup_reg_dealloc")
    for role in roles:  # which go through the rings from where the piece before has ended
        assert re.search(r"(done\w*)\[0\] = \(\1\[0\] \+ work\w*\[4\]\)", role)
        assert re.search(r"begin\w* = done\w*\[0\]", role)
        assert re.search(r"work\w*\[4\] = \(\(max\(\w+, 1\)", role)  # also of no visible key
    computing = roles[0]
    for state in "lm":  # of the first piece, and of the one that begins beside the end of another
        assert len(re.findall(rf"\({state} \+ 0\) = make_float", computing)) == 2
    assert re.search(r"ahead\[0\] = .*\(\(t \+ 1\) \* ", computing)
    *products, _ = computing.split("wait_wgmma<1>")
    assert len(products) == 2  # of each step, and of a new piece
    for product in products:
        assert "rescale" in product[product.rindex("__sync_thread_partial") :]
    # Pinned: a wait for what comes is between the weights and the end of the product beside them.
    besides = re.findall(r"wait_wgmma<1>.*?wait_wgmma<0>", computing, re.DOTALL)
    assert len(besides) == 2 and all("v_full[" in beside for beside in besides)
    freed = re.findall(r"q_free\[.*\]\.arrive", computing)
    assert len(freed) == (2 if held else 1)
    after = computing.rpartition("tma_store(O_desc")[2]
    assert re.search(r"\(o \+ .*\) = make_float4\(", after)
    assert re.search(r"work\[(\w+)\] = ahead\[\1\]", after)
    assert "tma_store_wait" in after


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (gemm, {}),
        (attention, {"head_dim": 64}),
        (skinny, {}),
        (decode, {}),
        (softmax, {}),
        (embed, {}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_float32_is_never_tf32(make, sizes):
    source, _ = lowered(make, "sm_90a", F32, **sizes)
    words = r"mma_|wgmma|::mma|tf32|tfloat32|__nv_bfloat|half_t"  # not the mma of "programmatic"
    assert not re.search(words, source, re.IGNORECASE)


# 16 bits never come to decode_attention on a GPU: decode_attention_split takes them.
OF_ROWS = [
    *((make, dtype) for make in (skinny, append, softmax, layer_norm) for dtype in (BF16, F32)),
    *((make, dtype) for make in (block_softmax, block_layer_norm) for dtype in (BF16, F32)),
    (decode, F32),
]
of_rows = pytest.mark.parametrize(
    ("make", "dtype"), OF_ROWS, ids=[f"{make.__name__}-{dtype}" for make, dtype in OF_ROWS]
)


LOADS = {
    skinny: ("A", "W"),
    **dict.fromkeys((softmax, layer_norm, block_softmax, block_layer_norm), ("X",)),
    append: ("K", "V"),
}


@pytest.mark.parametrize("make", LOADS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_rows_are_read_16_bytes_at_a_time_or_more(make, dtype):
    source, _ = lowered(make, "sm_90a", dtype)
    for tensor in LOADS[make]:
        reads = re.findall(rf"\*\((\w+)\s*\*\)\({tensor} \+", source)
        assert reads, f"no vector is read from {tensor}"
        assert set(reads) <= {"uint4", "float4", "ulonglong4"}
        assert not re.search(rf"\b{tensor}\[", source), f"{tensor} is read by the element too"


# Indices


def assert_64_bit_indices(source, tensor):
    uses = re.findall(rf"\b{tensor}(?: \+ |\[)(.*)", source)
    assert uses, f"{tensor} is not used"
    for use in uses:
        assert "(int64_t)" in use, f"{tensor}: {use}"


@of_rows
def test_global_indices_are_64_bit(make, dtype):
    tensors = {skinny: "ARC", decode: "QKVO", append: ("K", "V", "K_cache", "V_cache")}.get(
        make, "XY"
    )
    for tensor in tensors:
        assert_64_bit_indices(lowered(make, "sm_90a", dtype)[0], tensor)


def test_indices_into_a_weight_of_more_than_2_31_elements_are_64_bit():
    assert_64_bit_indices(lowered(skinny, "sm_90a", BF16, n=3_000_000)[0], "W")


def test_indices_without_bulk_copies_are_64_bit():
    for tensor in "AC":
        assert_64_bit_indices(lowered(gemm, "sm_80", BF16)[0], tensor)
    for tensor in "QKVO":
        assert_64_bit_indices(lowered(attention, "sm_80", BF16, head_dim=64)[0], tensor)


# Barriers

BARRIER = re.compile(r"__syncthreads\(|__sync_thread_partial|__syncwarp\(|\bbar_sync\b")


def split_barriers(source):
    """Barriers inside a branch that some threads do not take.

    The two roles of a warp-specialised kernel may have barriers of their own; those name the number
    of threads they wait for, as __syncthreads does not.
    """
    found, headers = [], []
    for line in map(str.strip, source.splitlines()):
        if line.startswith("}"):
            header = headers.pop()
            if line.startswith("} else"):
                headers.append(header)
        elif line.endswith("{"):
            headers.append(line)
        for header in headers if BARRIER.search(line) else ():
            if header.startswith("if") and "threadIdx" in header:
                is_role = re.fullmatch(r"if \(\(\(int\)threadIdx\.x\) < (128|256|384)\) \{", header)
                if not is_role or "__syncthreads" in line:
                    found.append((header, line))
    return found


def test_split_barriers_are_seen():
    body = """__launch_bounds__(256, 1) f() {{
  __syncthreads();
  if ({condition}) {{
    for (int i = 0; i < 4; ++i) {{
      x = 1;
    }}
  }} else {{
    {barrier};
  }}
  __syncthreads();
}}"""
    half, role = "(((int)threadIdx.x) >> 6) == 0", "((int)threadIdx.x) < 128"
    partial = "tl::__sync_thread_partial(3, 128)"
    for condition, barrier, count in [
        (half, "__syncthreads()", 1),
        (half, partial, 1),
        (role, "__syncthreads()", 1),
        (role, partial, 0),
        ("kb < 3", "__syncthreads()", 0),
    ]:
        assert len(split_barriers(body.format(condition=condition, barrier=barrier))) == count


@attention_cases
def test_no_barrier_in_attention_splits_a_group_of_threads(dtype, head_dim, arch):
    assert split_barriers(lowered(attention, arch, dtype, head_dim=head_dim)[0]) == []


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_no_barrier_in_gemm_splits_a_group_of_threads(dtype):
    assert split_barriers(lowered(gemm, "sm_90a", dtype)[0]) == []


@of_rows
def test_no_barrier_splits_a_group_of_threads(make, dtype):
    assert split_barriers(lowered(make, "sm_90a", dtype)[0]) == []


@pytest.mark.parametrize("make", [softmax, layer_norm], ids=lambda m: m.__name__)
def test_warps_that_have_a_row_each_wait_for_no_other(make):
    source, shared = lowered(make, "sm_90a", BF16)
    assert not BARRIER.search(source) and "__shared__" not in source and shared == 0
    assert "shfl" in source or "warp_reduce" in source


@pytest.mark.parametrize("make", OF_A_STEP, ids=lambda m: m.__name__)
def test_kernels_of_a_step_wait_before_they_read_what_others_write(make):
    source, shared = lowered(make, "sm_90a", BF16)
    assert_shared_memory_fits("sm_90a", shared)
    assert split_barriers(source) == []
    assert "atomic" not in source.lower()
    assert_waits(source, OF_A_STEP[make], triggers=0 if make is append else 1)


@pytest.mark.parametrize("make", [combine, embed, append, layer_norm, softmax],
                         ids=lambda m: m.__name__)  # fmt: skip
def test_kernels_of_a_step_lower_for_older_machines(make):
    source, shared = lowered(make, "sm_80", BF16)
    assert_shared_memory_fits("sm_80", shared)
    assert split_barriers(source) == []
    assert "Programmatic" not in source and "GridDependency" not in source


def assert_waits(source, unwritten, triggers=1):
    """Only what no kernel still running writes is read before the kernels launched earlier end."""
    assert source.count("cudaTriggerProgrammaticLaunchCompletion()") == triggers
    before, after = source.split("cudaGridDependencySynchronize()")
    assert {name for name in tensors(source) if is_used(name, body_of(before))} == unwritten
    assert any(is_used(name, after) for name in tensors(source))


def tensors(source):
    """The arguments of a kernel that lie in global memory, copied by TMA or not."""
    signature = source[: source.index("{")]
    return re.findall(r"(?:\*\s*(?:__restrict__\s+)?|CUtensorMap )(\w+?)(?:_desc)?[,)]", signature)


def body_of(source):
    return "\n".join(line for line in source.splitlines()[1:] if "prefetch_tma" not in line)


def is_used(name, text):
    return re.search(rf"\b{name}(?:\[| \+ |\)|_desc\b)", text) is not None


# Shared memory


def assert_shared_memory_fits(arch, shared):
    assert shared <= shared_memory_limit(Tile(arch))


@pytest.mark.parametrize("arch", ARCHS)
def test_gemm_fits_in_shared_memory(arch):
    shared = lowered(gemm, arch, BF16)[1]
    assert shared > 0
    assert_shared_memory_fits(arch, shared)
    # A float32 tile has the same size on each machine.
    assert_shared_memory_fits(arch, lowered(gemm, "sm_90a", F32)[1])


def test_the_largest_gemm_fits_in_shared_memory():
    assert_shared_memory_fits("sm_90a", lowered(gemm, "sm_90a", BF16, m=8192)[1])


@attention_cases
def test_attention_fits_in_shared_memory(dtype, head_dim, arch):
    assert_shared_memory_fits(arch, lowered(attention, arch, dtype, head_dim=head_dim)[1])


def test_the_largest_head_fits_in_shared_memory():
    assert_shared_memory_fits("sm_90a", lowered(attention, "sm_90a", F32, head_dim=256)[1])


@of_rows
def test_kernels_of_rows_fit_in_shared_memory(make, dtype):
    assert_shared_memory_fits("sm_90a", lowered(make, "sm_90a", dtype)[1])


# The CPU's source


@pytest.mark.parametrize("make", [gemm, skinny, append, softmax, layer_norm],
                         ids=lambda m: m.__name__)  # fmt: skip
def test_the_cpu_source_is_plain_c(make):
    source = build.lower(*make(CPU, F32))
    assert not re.search(r"threadIdx|__shared__|__global__|mma|_mm256|_mm512", source)
    assert "int32_t" in source
