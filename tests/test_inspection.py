"""What inspect_kernel.py shows: read from sources lowered without a GPU."""

import functools
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minifused import assembly, inspection, ops, profiling
from minifused.arguments import OF_KERNEL, for_kernel
from minifused.errors import UserError, run_cli
from minifused.inspection import KERNELS, make_case
from minifused.kernels import build
from minifused.kernels.tile import Tile
from minifused.layout_plot import layouts
from minifused.workloads import DecodeWorkload, LinearWorkload, SoftmaxWorkload

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "inspect_kernel.py"))
needs_nvcc = pytest.mark.skipif(assembly.find_tool("nvcc") is None, reason="no nvcc")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


@pytest.fixture(scope="module", autouse=True)
def lowered_once():
    """Lowering a case gives the same each time and takes seconds: all tests share it."""
    lower, known = inspection.lower, {}

    def lower_once(case):
        key = case.builder, case.tile, case.static, case.schedule
        if key not in known:
            known[key] = lower(case)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "lower", lower_once)
        patch.setattr(profiling, "lower", lower_once)
        patch.setitem(SCRIPT["main"].__globals__, "lower", lower_once)
        yield


@functools.cache
def facts(kernel, arch, shape=""):
    case = make_case(kernel, arch, None, shape)
    return inspection.source_facts(case, inspection.lower(case))


def kinds(kernel, arch, shape=""):
    """The instructions that are there at all."""
    return {name for name in inspection.INSTRUCTIONS if facts(kernel, arch, shape)[name]}


@pytest.fixture
def without_tools(monkeypatch):
    """As where there is no CUDA toolkit: what is asked is the source alone."""
    monkeypatch.setattr(assembly, "find_tool", lambda name: None)


# Instructions

SM80 = {"mma.sync", "cp.async", "ldmatrix", "__syncthreads"}
BULK = {"TMA loads", "TMA stores", "stmatrix", "mbarrier waits", "mbarrier arrivals"}
TENSOR_KINDS = {
    "sm_80": SM80,
    "sm_90a": {"wgmma", "named barriers", "__syncthreads", *BULK},
    "sm_100a": {"mma.sync", "ldmatrix", "named barriers", "__syncthreads", *BULK},
    "c": set(),
}
REDUCING = {"reductions over threads", "__syncthreads"}
ROWS = {
    "skinny_gemm": {"reductions over threads"},
    "decode_attention": REDUCING,
    "append_kv": set(),
    "row_softmax": REDUCING,
    "layer_norm": set(),  # a warp a row
}
OF_A_GPU = {  # which shuffle by themselves
    "gemv": {"mma.sync", "__syncthreads"},
    "decode_attention_split": {"__syncthreads"},
    "piece_sums": REDUCING,
    "piece_values": REDUCING,
}
HELD = {"mma.sync", "cp.async", "__syncthreads"}
RING = {"mma.sync", "ldmatrix", "TMA loads", "mbarrier waits", "mbarrier arrivals", "__syncthreads"}


@pytest.mark.parametrize("arch", TENSOR_KINDS)
def test_instructions_of_gemm(arch):
    assert kinds("gemm", arch) == TENSOR_KINDS[arch]


@pytest.mark.parametrize("arch", TENSOR_KINDS)
def test_instructions_of_flash_attention(arch):
    reductions = set() if arch == "c" else {"reductions over threads"}
    assert kinds("flash_attention", arch) == TENSOR_KINDS[arch] | reductions


@pytest.mark.parametrize("arch", TENSOR_KINDS)
@pytest.mark.parametrize("kernel", [name for name in ROWS if name != "decode_attention"])
def test_instructions_of_kernels_of_rows(kernel, arch):
    assert kinds(kernel, arch) == (set() if arch == "c" else ROWS[kernel])


def test_instructions_of_decode_attention():
    assert kinds("decode_attention", "sm_90a") == ROWS["decode_attention"]


@pytest.mark.parametrize("kernel", OF_A_GPU)
def test_instructions_of_kernels_that_a_cpu_has_not(kernel):
    assert kinds(kernel, "sm_90a") == OF_A_GPU[kernel]
    with pytest.raises(UserError, match=f"{kernel} does not get this shape on c: it goes in float"):
        make_case(kernel, "c")


@pytest.mark.parametrize(("arch", "wanted"), [("sm_80", SM80), ("sm_90a", HELD), ("sm_100a", HELD)])
def test_instructions_of_swap_gemm(arch, wanted):
    assert kinds("swap_gemm", arch) == wanted


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_instructions_of_swap_gemm_with_a_ring(arch):
    assert kinds("swap_gemm", arch, "m=16,n=1600,k=6400") == {*RING, "named barriers"}


def test_every_kernel_is_covered():
    attention = {"flash_attention", "flash_attention_sm90"}
    products = {"gemm", "gemm_sm90", "swap_gemm"}
    assert set(KERNELS) == {*attention, *products, *ROWS, *OF_A_GPU}


# Which kernel runs


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(k, "float32") for k in ("skinny_gemm", "decode_attention")]
    + [(k, "bfloat16") for k in KERNELS if k not in ("skinny_gemm", "decode_attention")],
)  # fmt: skip
def test_the_default_on_a_gpu_is_what_runs(kernel, dtype):
    case = make_case(kernel, "sm_90a")
    runs = inspection.kernel_of(case.tile, case.dtype, case.workload)
    stand_ins = {"piece_sums": "piece_values", **inspection.OWN_FORM}
    assert (runs, case.dtype) == (stand_ins.get(kernel, kernel), dtype)


def test_attention_of_sm90_is_its_own_where_it_takes_the_heads():
    for arch, shape, dtype, kernel in [
        ("sm_90a", "head_dim=128", None, "flash_attention_sm90"),
        ("sm_90a", "head_dim=80", None, "flash_attention"),
        ("sm_90a", "", "float32", "flash_attention"),
        ("sm_100a", "", None, "flash_attention"),
        ("c", "", None, "flash_attention"),
    ]:
        case = make_case("flash_attention", arch, dtype, shape)
        assert case.kernel == kernel and case.builder.__name__ == f"{kernel}_kernel"
    with pytest.raises(UserError, match="in bfloat16 to flash_attention, in float32 to flash_att"):
        make_case("flash_attention_sm90", "sm_100a")


def test_a_switch_of_a_schedule_is_0_or_1():
    case = make_case("flash_attention", "sm_90a", shape="head_dim=128", schedule_fields="pin=0")
    assert case.schedule.pin is False and case.schedule.overlap is True


ROUTES = [  # m, k, dtype, kernel on sm_90a
    (1, 768, "bfloat16", "gemv"),
    (1, 16384, "float16", "gemv"),
    (1, 16392, "float16", "skinny_gemm"),
    (1, 769, "bfloat16", "skinny_gemm"),
    (1, 768, "float32", "skinny_gemm"),
    (2, 768, "bfloat16", "swap_gemm"),
    (128, 768, "float16", "swap_gemm"),
    (129, 768, "bfloat16", "gemm_sm90"),
    (129, 769, "bfloat16", "gemm"),
    (16, 301, "bfloat16", "skinny_gemm"),
    (17, 301, "bfloat16", "gemm"),
    (16, 768, "float32", "skinny_gemm"),
    (17, 768, "float32", "gemm"),
]


class Launched(Exception):
    """Names the kernel that was to run."""


@pytest.fixture
def gpu_without_one(monkeypatch):
    """Tensors of a GPU that have no data; a launch raises Launched."""
    fakes = pytest.importorskip("torch._subclasses.fake_tensor")
    for module in [ops, *(m for name, m in sys.modules.items() if "minifused.kernels." in name)]:
        if hasattr(module, "tile_for"):
            monkeypatch.setattr(module, "tile_for", lambda device: Tile("sm_90a"))
        if hasattr(module, "compile_kernel"):
            monkeypatch.setattr(module, "compile_kernel", refuse_to_compile)
    for name in ("_dense", "_rows"):
        monkeypatch.setattr(ops, name, lambda x: x)
    with fakes.FakeTensorMode():
        yield


def refuse_to_compile(builder, *static):
    raise Launched(builder.__name__.removesuffix("_kernel"))


def launched(launch, *arguments, **named):
    with pytest.raises(Launched) as caught:
        launch(*arguments, **named)
    return str(caught.value)


@pytest.mark.parametrize(("m", "k", "dtype", "kernel"), ROUTES)
def test_a_linear_layer_goes_where_ops_sends_it(m, k, dtype, kernel, gpu_without_one):
    workload = LinearWorkload("", m, 64, k, bias=False)
    assert inspection.kernel_of(Tile("sm_90a"), dtype, workload) == kernel
    x, weight, out = (
        torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        for shape in ((m, k), (64, k), (m, 64))
    )
    assert launched(ops._launch_linear, x, weight, None, None, None, False, out=out) == kernel


@pytest.mark.parametrize(
    ("m", "n", "kernel"),
    [
        (1, 8192, "row_softmax"),
        (1, 8193, "piece_values"),
        (264, 50257, "piece_values"),
        (265, 50257, "row_softmax"),
        (1, 1 << 20, "piece_values"),
        (1, (1 << 20) + 1, "row_softmax"),
    ],
)
def test_a_softmax_goes_where_ops_sends_it(m, n, kernel, gpu_without_one):
    for dtype in (torch.bfloat16, torch.float32):
        name = build.dtype_name(dtype)
        assert inspection.kernel_of(Tile("sm_90a"), name, SoftmaxWorkload("", m, n)) == kernel
        x = torch.empty(m, n, dtype=dtype, device="cuda")
        first = "piece_sums" if kernel == "piece_values" else kernel
        assert launched(ops._launch_softmax, x, n, out=torch.empty_like(x)) == first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding_goes_where_ops_sends_it(dtype, gpu_without_one):
    workload = DecodeWorkload("", (5, 9), 512, 12, 64)
    q, cache = (torch.empty(2, t, 12, 64, dtype=dtype, device="cuda") for t in (1, 512))
    lengths = torch.empty(2, dtype=torch.int32, device="cuda")
    found = launched(
        ops._launch_decode_attention, q, cache, cache, lengths, 1.0, out=torch.empty_like(q)
    )
    assert found == inspection.kernel_of(Tile("sm_90a"), build.dtype_name(dtype), workload)
    assert found == ("decode_attention_split" if dtype.itemsize == 2 else "decode_attention")


# Resources


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_shared_memory_of_gemm_is_that_of_its_stages(arch):
    chosen = make_case("gemm", arch).schedule
    stage = (chosen.block_m + chosen.block_n) * chosen.block_k * 2
    assert facts("gemm", arch)["dynamic shared memory, bytes"] == chosen.num_stages * stage


def test_the_producer_warps_are_threads_of_the_block_too():
    assert facts("gemm", "sm_90a")["threads a block"] == 256 + 128
    assert facts("gemm", "sm_80")["threads a block"] == 256
    assert facts("gemm", "c")["threads a block"] == 1


@pytest.mark.parametrize(
    ("kernel", "arch", "widest"),
    [
        ("gemm", "sm_80", 16),
        ("flash_attention", "sm_90a", None),
        ("append_kv", "sm_90a", 16),
        ("layer_norm", "sm_100a", 32),
        ("append_kv", "c", None),
    ],
)
def test_widest_global_access(kernel, arch, widest):
    assert facts(kernel, arch)["widest global access, bytes"] == widest


def test_a_single_element_is_the_widest_access_where_there_is_no_other():
    body = "k(const bfloat16_t* __restrict__ X, float* Y) {\n Y[0] = ((float)X[threadIdx.x]);"
    assert inspection._widest_access(body) == 4
    assert inspection._widest_access(body.replace("Y[0]", "y")) == 2


# Sizes and schedules


def test_sizes_and_schedule_can_be_others():
    case = make_case("gemm", "sm_100a", "float16", "m=256,n=128", "num_stages=2")
    assert case.sizes == {"m": 256, "n": 128, "k": 768}
    assert (case.schedule.block_m, case.schedule.num_stages) == (128, 2)
    assert case.static[:3] == (128, 768, "float16")


def test_a_choice_is_0_or_1():
    static = make_case("flash_attention", "sm_90a", shape="causal=0,packed=1").static
    assert static[2] is True and static[3] is False
    with pytest.raises(UserError, match="takes 0 to 1"):
        make_case("flash_attention", "sm_90a", shape="causal=2")


def test_float32_is_the_default_where_there_is_no_bfloat16():
    dtypes = [make_case("append_kv", arch).dtype for arch in ("sm_80", "sm_75", "c")]
    assert dtypes == ["bfloat16", "float32", "float32"]


def test_a_narrow_softmax_has_no_padded_columns():
    assert make_case("row_softmax", "sm_90a", shape="n=100").static[:2] == (100, 100)
    assert make_case("row_softmax", "sm_90a", shape="n=100,valid=99").static[:2] == (100, 99)


# The table


def test_the_table_marks_what_differs(without_tools, capsys):
    SCRIPT["main"](["append_kv", "--arch=sm_90a", "--diff=sm_100a"])
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        "append_kv sm_90a bfloat16", "append_kv sm_100a bfloat16",
    ]  # fmt: skip
    assert not [line for line in lines if line.startswith("*")]  # the same text for both
    SCRIPT["main"](["append_kv", "--arch=sm_90a", "--diff=c"])
    marked = [line[2:] for line in capsys.readouterr().out.splitlines() if line[0] == "*"]
    names = [re.split(r"\s{2,}", line)[0] for line in marked]
    assert names == [
        "widest global access, bytes", "threads a block", "threads of the schedule",
        "its limit, bytes",
    ]  # fmt: skip
    assert marked[0].split()[-2:] == ["16", "-"]


def test_schedules_of_two_kinds_are_shown_beside_each_other(without_tools, capsys):
    SCRIPT["main"](["flash_attention", "--arch=sm_90a", "--diff=sm_100a"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[::3] == ["flash_attention_sm90", "flash_attention"]
    assert lines[2].split() == ["block_m=64", "block_m=128"]
    assert any(line.split() == ["pin=False"] for line in lines)


def test_a_schedule_beside_another_and_one_that_does_not_fit(without_tools, capsys):
    SCRIPT["main"](["gemm", "--arch=sm_100a", "--diff-schedule=num_stages=9"])
    captured = capsys.readouterr()
    (row,) = [line for line in captured.out.splitlines() if "dynamic shared" in line]
    assert row.split()[-2:] == ["196608", str(9 * (128 + 256) * 64 * 2)] and row[0] == "*"
    assert captured.err.startswith("warning: 442368 bytes of shared memory do not fit sm_100a")


def test_json_has_the_cases_and_their_facts(without_tools, capsys):
    SCRIPT["main"](["append_kv", "--arch=sm_90a", "--json"])
    (document,) = json.loads(capsys.readouterr().out)
    assert document["kernel"] == "append_kv" and document["arch"] == "sm_90a"
    assert document["shape"] == {"heads": 12, "head_dim": 64, "packed": 1}
    assert document["schedule"] == {"block_n": 1024, "num_threads": 128}
    assert document["facts"] == facts("append_kv", "sm_90a")


def test_source_is_printed(capsys):
    SCRIPT["main"](["append_kv", "--arch=sm_90a", "--source"])
    assert "__global__ void __launch_bounds__(128, 1) append_kv" in capsys.readouterr().out
    SCRIPT["main"](["append_kv", "--arch=c", "--source"])
    source = capsys.readouterr().out
    assert "int32_t append_kv_kernel(" in source and "__global__" not in source


# Assembly

PTXAS = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 4 barriers, 24 bytes cumulative stack size{shared}
"""


@pytest.mark.parametrize(("shared", "static"), [(", 1024 bytes smem", 1024), ("", 0)])
def test_a_log_of_ptxas(shared, static):
    assert assembly.read_ptxas(PTXAS.format(shared=shared)) == {
        "registers a thread": 168,
        "spill stores, bytes": 8,
        "spill loads, bytes": 16,
        "static shared memory, bytes": static,
    }


SASS = """        Function : k
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
                                                             /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @!UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0040*/               @P1 MUFU.EX2 R5, R5 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8] ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R4, R8, R12 ;
        /*1f70*/                   NOP;
"""


def test_a_listing_of_sass_is_counted_by_family():
    counts = assembly.count_sass(SASS)
    total = counts.pop("SASS instructions")
    assert total == 7
    assert {name for name, count in counts.items() if count == 1} == {
        "LDG", "UTMALDG", "LDGSTS", "MUFU", "HGMMA", "HMMA",
    }  # fmt: skip
    assert sum(counts.values()) == 6


@needs_nvcc
def test_nvcc_gives_registers_and_ptx():
    lowered = inspection.lower(make_case("append_kv", "sm_90a"))
    resources = assembly.resources(lowered.source, "sm_90a")
    assert 10 < resources["registers a thread"] < 100
    assert resources["spill stores, bytes"] == 0
    assert ".target sm_90a" in assembly.ptx(lowered.source, "sm_90a")


@needs_nvcc
@pytest.mark.skipif(assembly.find_tool("cuobjdump") is None, reason="no cuobjdump")
def test_cuobjdump_gives_machine_code():
    lowered = inspection.lower(make_case("gemm", "sm_90a"))
    counts = assembly.count_sass(assembly.sass(lowered.source, "sm_90a"))
    assert all(counts[row] > 0 for row in ("HGMMA", "UTMALDG", "UTMASTG", "STSM", "MUFU"))


# Layouts


@pytest.fixture(scope="module")
def tiles():
    case = make_case("gemm", "sm_80", shape="m=256", schedule_fields="block_m=64,block_n=64")
    return {tile.name: tile for tile in layouts(case)}


def test_an_accumulator_lies_as_mma_sync_has_it(tiles):
    acc = tiles["acc"].cells
    for i in range(16):
        for j in range(8):
            thread, register = (int(n[1:]) for n in acc[i][j].label.split())
            assert thread % 32 == i % 8 * 4 + j // 2
            assert register % 4 == i // 8 * 2 + j % 2


def test_a_shared_tile_is_swizzled_over_all_banks(tiles):
    rows = tiles["A_shared"].cells[:8]
    assert len({row[0].colour for row in rows}) == 8  # ldmatrix reads 16 bytes of 8 rows at once
    assert tiles["A_shared"].title == "A_shared: 3 x 64 x 64 in shared memory, bfloat16"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_layouts_are_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"layouts{suffix}"
    SCRIPT["main"](["row_softmax", "--arch=sm_90a", "--shape=n=3000", "--plot", str(path)])
    head = {".png": b"\x89PNG", ".svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(head) and path.stat().st_size > 5000


# The profiler

# Small workloads with the static sizes of those that are inspected.
SMALL = {
    "gemm": {"m": 17},
    "skinny_gemm": {"m": 1},
    "flash_attention": {"batch": 2, "q_len": 33, "k_len": 33},
    "decode_attention": {"lengths": (3, 40), "capacity": 40},
    "append_kv": {"positions": (0, 7), "capacity": 8},
    "row_softmax": {"m": 2},
    "layer_norm": {"m": 3},
}
OPS = {"gemm": "linear", "skinny_gemm": "linear", "row_softmax": "softmax"}
OPS |= {"flash_attention": "attention"}


SHAPES = [(kernel, "") for kernel in SMALL]
SHAPES += [(k, "packed=0") for k in ("flash_attention", "decode_attention", "append_kv")]


PROFILED = [kernel for kernel in OF_KERNEL if kernel in KERNELS]


@pytest.mark.parametrize("kernel", PROFILED)
def test_a_gpu_kernel_gets_as_many_tensors_as_it_takes(kernel):
    case = make_case(kernel, "sm_90a")
    inputs = case.workload.inputs("cpu", torch.bfloat16, torch.Generator())
    program = case.builder(case.tile, *case.static, case.schedule)
    assert len(for_kernel(kernel, inputs, torch.device("cpu"))) == len(program.params)


@pytest.mark.parametrize(("kernel", "shape"), SHAPES)
def test_a_kernel_is_called_as_its_operation_calls_it(kernel, shape):
    case = make_case(kernel, "c", shape=shape)
    workload = replace(case.workload, **SMALL[kernel])
    inputs, expected, before = (
        workload.inputs("cpu", torch.float32, torch.Generator().manual_seed(0)) for _ in range(3)
    )
    arguments = for_kernel(kernel, inputs, torch.device("cpu"))
    if kernel != "append_kv":
        arguments[-1].fill_(torch.nan)
    build.compile_kernel(case.builder, case.tile, *case.static, case.schedule)(*arguments)
    if kernel == "append_kv":
        ops.append_kv(**expected)
        for cache in ("k_cache", "v_cache"):
            assert torch.equal(inputs[cache], expected[cache])
            assert not torch.equal(expected[cache], before[cache])
    else:
        result = getattr(ops, OPS.get(kernel, kernel))(**expected)
        torch.testing.assert_close(arguments[-1].view_as(result), result, rtol=1e-5, atol=1e-5)
        assert result.any()


def test_profile_gives_times_by_both(monkeypatch, capsys):
    monkeypatch.setattr(profiling, "ROUNDS", 3)
    SCRIPT["main"](["layer_norm", "--arch=c", "--shape=n=64", "--profile", "--json"])
    (document,) = json.loads(capsys.readouterr().out)
    found = document["facts"]
    assert document["schedule"] == {"block_n": 64, "num_threads": 1}
    for who in ("TileLang's profiler", "our clock"):
        seconds = found[f"{who}, us"] / 1e6
        flops, moved = (found[f"{unit} by {who}"] for unit in ("TFLOP/s", "GB/s"))
        workload = make_case("layer_norm", "c", shape="n=64").workload
        assert flops == pytest.approx(workload.flops / seconds / 1e12)
        assert moved == pytest.approx(workload.bytes(torch.float32) / seconds / 1e9)
    assert found["our clock, 10%, us"] <= found["our clock, us"] <= found["our clock, 90%, us"]


def test_profile_takes_this_machine_by_itself_and_compares_schedules(monkeypatch, capsys):
    monkeypatch.setattr(profiling, "ROUNDS", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    SCRIPT["main"](["append_kv", "--profile", "--diff-schedule=block_n=64"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("append_kv c float32") == 2
    (row,) = [line for line in lines if "TFLOP/s by our clock" in line]
    assert row.split()[-2:] == ["-", "-"]  # it only copies
    (row,) = [line for line in lines if "our clock, us" in line]
    assert all(float(value) > 0 for value in row.split()[-2:])


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("kernel", PROFILED)
def test_profile_on_a_gpu(kernel, capsys):
    if kernel.endswith("sm90") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of sm_90")
    whole = ["--shape=heads=100"] if kernel == "decode_attention_split" else []  # fills a GPU
    SCRIPT["main"]([kernel, "--profile", "--json", *whole])
    (document,) = json.loads(capsys.readouterr().out)
    times = [document["facts"][name] for name in ("TileLang's profiler, us", "our clock, us")]
    assert min(times) > 0 and max(times) < 1e5


# Mistakes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["gemm", "--arch=sm_90a", "--shape=m=0"], "m=0: gemm takes at least 1"),
        (["gemm", "--arch=sm_90a", "--shape=q=3"], "a name of m, n, k"),
        (["gemm", "--arch=sm_90a", "--shape=m=two"], "NAME=NUMBER"),
        (
            ["skinny_gemm", "--arch=sm_90a", "--shape=m=17"],
            "in bfloat16 to swap_gemm, in float32 to gemm",
        ),
        (["gemm", "--arch=sm_90a", "--dtype=float16", "--shape=m=64"], "float16 to swap_gemm"),
        (["decode_attention", "--arch=sm_90a", "--dtype=bfloat16"], "to decode_attention_split"),
        (["gemv", "--arch=sm_90a", "--shape=m=2"], "a name of n, k"),
        (["flash_attention", "--arch=sm_90a", "--shape=head_dim=257"], "takes 1 to 256"),
        (["row_softmax", "--arch=sm_90a", "--shape=n=9,valid=10"], "takes 1 to 9"),
        (["gemm", "--arch=c", "--dtype=bfloat16"], "kernels for c are float32"),
        (["gemm", "--arch=sm_90a", "--diff-schedule=block_q=1"], "a name of block_m, block_n"),
        (["gemm", "--arch=sm_100a", "--diff-schedule=block_m=7"], "divisible by 16"),
        (["append_kv", "--arch=c", "--ptx"], "a GPU's"),
        (["append_kv", "--arch=sm_90a", "--ptx"], "no nvcc found"),
        (["append_kv", "--arch=sm_75", "--profile"], "this machine is no sm_75: give --arch"),
        (
            ["append_kv", "--arch=c", "--profile", "--diff-schedule=num_threads=2"],
            "has 1 on a CPU",
        ),
        (["append_kv", "--arch=sm_90a", "--sass"], "no cuobjdump found"),
        (["append_kv", "--arch=sm_90a", "--plot=x.pdf"], ".png or .svg"),
        (["append_kv", "--arch=sm_90a", "--plot=x.png"], "no shared tile and no fragment"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_mistake_is_one_message_and_exit_code_2(without_tools, capsys, flags, said):
    with pytest.raises(SystemExit) as exit_:
        run_cli(lambda: SCRIPT["main"](flags))
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and captured.out == ""
    message = captured.err[captured.err.index("error: ") :]
    assert said in message and message.count("\n") <= 2 and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "which KERNEL?"),
        (["softmax"], "invalid choice"),
        (["gemm", "--arch=sm_12"], "invalid choice"),
        (["gemm", "--ptx", "--sass"], "not allowed with"),
        (["gemm", "--ptx", "--profile"], "not allowed with"),
        (["gemm", "--diff=c", "--diff-schedule=block_m=64"], "not allowed with"),
    ],
)
def test_wrong_flags_are_exit_code_2(capsys, flags, said):
    with pytest.raises(SystemExit) as exit_:
        SCRIPT["main"](flags)
    assert exit_.value.code == 2 and said in capsys.readouterr().err


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "absent" / "x.svg"
    with pytest.raises(UserError, match="cannot write"):
        SCRIPT["main"](["row_softmax", "--arch=sm_90a", "--shape=n=3000", "--plot", str(path)])


def test_nvcc_that_fails_says_why(monkeypatch):
    if assembly.find_tool("nvcc") is None:
        pytest.skip("no nvcc")
    with pytest.raises(UserError, match=r"failed: .*error"):
        assembly.ptx("this is not CUDA", "sm_90a")


def test_print_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"T\.print does not build for the CPU's target, c"):
        SCRIPT["main"](["--print", "--arch=sm_90a"])


@pytest.mark.cuda
@needs_cuda
def test_print_prints(capfd):
    SCRIPT["main"](["--print"])
    lines = capfd.readouterr().out.splitlines()
    for name, last in (("X_shared", 7.0), ("squares", 49.0)):
        values = [line for line in lines if name in line]
        assert len(values) == 8 and str(last) in values[-1], lines
