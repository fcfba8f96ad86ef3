"""The doctor: each fault is provoked and seen, with its fix, and nothing is a traceback."""

import importlib
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tilelang
import torch
from tilelang.contrib import cc

from minifused import doctor, ops
from minifused.benchmark import machine
from minifused.doctor import Check
from minifused.kernels import build, schedule
from minifused.kernels.gemm import gemm_kernel
from minifused.kernels.tile import Tile

ROOT = Path(__file__).parents[1]
SCRIPT_FILE = ROOT / "scripts" / "doctor.py"
SCRIPT = runpy.run_path(str(SCRIPT_FILE))
ENV = sys.modules["tilelang.env"]  # the attribute of that name is an object in it


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A function that makes torch report one GPU of a capability."""

    def pretend(capability):
        info = {"name": "Pretended", "memory_gib": 15.0, "driver": "580.1"}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(machine, "machine_info", lambda device: info)

    return pretend


@pytest.fixture
def compiler(monkeypatch):
    """A function that sets CXX, and PATH if given, and lets TileLang look again."""

    def choose(cxx, path=None):
        monkeypatch.setenv("CXX", cxx)
        monkeypatch.delenv("CC", raising=False)
        if path is not None:
            monkeypatch.setenv("PATH", path)
        cc.get_cplus_compiler.cache_clear()

    yield choose
    monkeypatch.undo()
    cc.get_cplus_compiler.cache_clear()


def only(checks):
    """The only line of a check."""
    (check,) = checks
    assert bool(check.fix) == (check.state != "ok")
    return check


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# The whole report


def report(*flags, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT_FILE), *flags],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_machine_that_is_fit(no_gpu, capsys):
    assert SCRIPT["main"]([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "generate.py can run here"
    for name in ("python", *doctor.REQUIRED, "C++ compiler", "demo model", "kernel on cpu"):
        assert any(line.startswith(f"ok    {name}") for line in lines), name
    (kernel,) = [line for line in lines if "kernel on cpu" in line]
    assert re.search(r"float32 compiled and right, \d+\.\d s$", kernel)


def test_json_is_the_same_report(no_gpu, capsys):
    assert SCRIPT["main"](["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert {frozenset(check) for check in document["checks"]} == {
        frozenset(("name", "state", "detail", "fix"))
    }
    names = [check["name"] for check in document["checks"]]
    assert {*doctor.REQUIRED, *doctor.OPTIONAL, "GPU", "nvcc", "kernel on cpu"} <= set(names)


def test_no_compiler_and_no_writable_folder_is_a_report_and_exit_code_1(tmp_path):
    (tmp_path / "file").touch()
    cache = str(tmp_path / "file" / "cache")
    run = report(PATH="", CXX="", CC="", TILELANG_CACHE_DIR=cache, HOME=cache)
    assert run.returncode == 1 and "Traceback" not in run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert "FAULT C++ compiler   not found" in lines
    assert lines[lines.index("FAULT C++ compiler   not found") + 1].endswith(
        "fix: install g++ or clang++, or set CXX to one"
    )
    assert any(line.startswith("note  kernel cache   not writable") for line in lines)
    assert any(line.startswith("FAULT kernel on cpu  no C++ compiler") for line in lines)
    assert lines[-1] == "generate.py cannot run: C++ compiler, kernel on cpu"


def test_a_fault_is_exit_code_1_in_json_too(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"x": lambda: [Check("x", "fault", "broken", "mend it")]})
    assert SCRIPT["main"](["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "checks": [{"name": "x", "state": "fault", "detail": "broken", "fix": "mend it"}],
    }


def test_a_wrong_flag_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        SCRIPT["main"](["--jsno"])
    assert exit_.value.code == 2 and "--jsno" in capsys.readouterr().err


def test_a_check_that_breaks_is_its_own_line(monkeypatch, capsys):
    def breaks():
        print("talk")
        yield Check("first", "ok", "fine")
        raise ZeroDivisionError("why\nand how")

    monkeypatch.setattr(doctor, "CHECKS", {"a": breaks, "b": lambda: [Check("b", "ok", "fine")]})
    assert SCRIPT["main"]([]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "note  a              not known: ZeroDivisionError: why",
        f"{'':21}fix: see the other lines",
        "ok    b              fine",
        "generate.py can run here",
    ]
    assert captured.err == "talk\n"  # stdout is the report's


# Packages


def test_the_lowest_versions_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)[1]
    names = dict(re.findall(r'"([\w-]+)(?:>=([\d.]+))?', listed))
    assert names == doctor.REQUIRED
    for name, extra in doctor.OPTIONAL.items():
        assert re.search(rf'^{extra} = \["{name}', text, re.MULTILINE)


def test_a_package_that_does_not_import_is_a_fault(monkeypatch):
    def no_module(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", no_module)
    check = only(doctor.check_required("torch"))
    assert check.state == "fault" and "libcudart.so.13" in check.detail
    assert "'torch>=2.11'" in check.fix


@pytest.mark.parametrize(
    ("version", "state"), [("2.10.1", "fault"), ("2.11.0+cu130", "ok"), ("2.13", "ok")]
)
def test_a_package_that_is_too_old_is_a_fault(monkeypatch, version, state):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert only(doctor.check_required("torch")).state == state


def test_an_optional_package_that_is_missing_is_a_note(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    checks = list(doctor.check_optional())
    assert [c.state for c in checks] == ["note"] * 3 and doctor.can_run(checks)
    assert "'minifused[bpe]'" in checks[0].fix


def test_a_missing_model_is_a_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MODEL", tmp_path / "model.safetensors")
    assert only(doctor.check_model()).state == "fault"


# Devices


def test_no_gpu_is_well(no_gpu, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert only(doctor.check_gpu()) == Check("GPU", "ok", "none: kernels run on the CPU")


@pytest.mark.parametrize(
    ("cuda", "said"), [(None, "built without CUDA"), ("13.0", "out of PyTorch's reach")]
)
def test_a_gpu_that_only_nvidia_smi_sees_is_a_note(no_gpu, monkeypatch, tmp_path, cuda, said):
    program(tmp_path / "nvidia-smi", "echo 'Tesla T4, 580.1'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    check = only(doctor.check_gpu())
    assert check.state == "note" and "Tesla T4" in check.detail and said in check.detail
    assert ("torch" if cuda is None else "CUDA 13.0") in check.fix


@pytest.mark.parametrize(
    ("capability", "state", "fix"),
    [
        ((9, 0), "ok", ""),
        ((8, 0), "ok", ""),
        ((7, 5), "note", "use float32"),
        ((7, 0), "note", "--device cpu"),
    ],
)
def test_what_an_old_gpu_can_do_is_said(pretended_gpu, capability, state, fix):
    pretended_gpu(capability)
    check = only(doctor.check_gpu())
    assert check.state == state and fix in check.fix
    name = "sm_" + "".join(map(str, capability))
    assert check.detail == f"Pretended, {name}, 15.0 GiB, driver 580.1"


def test_what_is_said_of_sm_75_is_so():
    tile = Tile("sm_75")
    shared, body = {}, {}
    for dtype in ("float16", "float32"):
        chosen = schedule.gemm_schedule(tile, 65, 128, 128, dtype)
        with tile.target:
            program = gemm_kernel(tile, 128, 128, dtype, dtype, None, False, False, chosen)
            artifact = tilelang.lower(program, target=tile.target)
        body[dtype] = artifact.kernel_source
        (function,) = artifact.device_mod.functions.values()
        shared[dtype] = int(function.attrs["dyn_shared_memory_buf"])
    assert shared["float16"] == 96 * 1024 and shared["float32"] <= 64 * 1024
    assert "mma_sync<" in body["float16"] and "mma_sync<" not in body["float32"]
    chosen = schedule.attention_schedule(tile, 112, "float32")
    tiles = 112 * (chosen.block_m + 2 * chosen.block_n) + chosen.block_m * chosen.block_n
    assert 4 * tiles == 64 * 1024


# Compilers


def test_no_nvcc_is_a_fault_with_a_gpu_only(monkeypatch, no_gpu, pretended_gpu):
    monkeypatch.setattr(ENV, "CUDA_HOME", "")
    assert only(doctor.check_nvcc()).state == "ok"
    pretended_gpu((9, 0))
    check = only(doctor.check_nvcc())
    assert check.state == "fault"
    assert all(part in check.fix for part in ("minifused[nvcc]", "CUDA_HOME", "--device cpu"))


@pytest.mark.parametrize(
    ("text", "state"),
    [("echo 'Cuda compilation tools, release 13.0, V13.0.88'", "ok"), ("exit 1", "fault")],
)
def test_nvcc_is_asked_for_its_version(monkeypatch, pretended_gpu, tmp_path, text, state):
    pretended_gpu((9, 0))
    (tmp_path / "bin").mkdir()
    nvcc = program(tmp_path / "bin" / "nvcc", text)
    monkeypatch.setattr(ENV, "CUDA_HOME", str(tmp_path))
    check = only(doctor.check_nvcc())
    assert check.state == state and nvcc in check.detail
    assert ("13.0" in check.detail) == (state == "ok")


def test_no_compiler_is_a_fault(compiler):
    compiler(cxx="", path="")
    check = only(doctor.check_compiler())
    assert (check.state, check.detail) == ("fault", "not found") and "CXX" in check.fix


def test_a_wrong_cxx_is_a_fault(compiler, tmp_path):
    for wrong in (str(tmp_path / "absent"), program(tmp_path / "broken", "exit 1")):
        compiler(cxx=wrong)
        check = only(doctor.check_compiler())
        assert check.state == "fault" and f"{wrong}, from CXX" in check.detail


def test_a_compiler_is_named(compiler, tmp_path):
    compiler(cxx=program(tmp_path / "c++", "echo 'own 1.2'"))
    check = only(doctor.check_compiler())
    assert check.state == "ok" and check.detail.startswith("own 1.2, ")


# The cache


def test_the_cache_has_its_size(monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel.so").write_bytes(bytes(2_500_000))
    assert only(doctor.check_cache()).detail == f"{tmp_path}, writable, 2.5 MB"


def test_a_cache_that_cannot_be_written_is_a_note(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = only(doctor.check_cache())
    assert check.state == "note" and "TILELANG_CACHE_DIR" in check.fix


# Kernels


def test_a_kernel_is_compiled_and_not_taken_from_the_cache(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "linear", lambda x, weight, activation: seen.append(
        ENV.CacheState.is_enabled()) or torch.zeros(33, 40))  # fmt: skip
    before = ENV.CacheState.is_enabled()
    doctor.check_kernel("cpu", needed=True)
    assert seen == [False] and ENV.CacheState.is_enabled() == before


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_wrong_result_is_a_fault_where_it_is_needed(monkeypatch, value):
    wrong = torch.full((33, 40), value)
    monkeypatch.setattr(ops, "linear", lambda x, weight, activation: wrong)
    check = only([doctor.check_kernel("cpu", needed=True)])
    assert check.state == "fault" and check.detail.startswith("wrong by ")
    assert "--backend torch" in check.fix
    assert doctor.check_kernel("cpu", needed=False).state == "note"


def test_a_kernel_that_does_not_compile_says_what_the_compiler_said(monkeypatch):
    def fails(x, weight, activation):
        raise RuntimeError("int main() {}\nCompilation error:\nk.cu(7): error: no such thing\n")

    monkeypatch.setattr(ops, "linear", fails)
    check = only([doctor.check_kernel("cpu", needed=True)])
    assert check.state == "fault"
    assert check.detail == "does not run: RuntimeError: k.cu(7): error: no such thing"
    assert "nightly" in check.fix


def test_the_gpu_is_what_has_to_work_where_there_is_one(monkeypatch, pretended_gpu):
    ran = SimpleNamespace(on=[])

    def run(device):
        ran.on.append(device)
        raise RuntimeError("no")

    pretended_gpu((9, 0))
    monkeypatch.setattr(doctor, "_run_kernel", run)
    checks = {check.name: check.state for check in doctor.check_kernels()}
    assert ran.on == ["cpu", "cuda"]
    assert checks == {"kernel on cpu": "note", "kernel on cuda": "fault"}


def test_the_compiler_of_a_kernel_that_is_missing_is_named(monkeypatch, compiler):
    compiler(cxx="", path="")
    monkeypatch.setattr(build, "_kernels", {})  # as in a new process
    from minifused.kernels import gemm

    gemm._select.cache_clear()
    check = only([doctor.check_kernel("cpu", needed=True)])
    assert check.state == "fault" and check.detail.startswith("no C++ compiler found")
    assert "g++" in check.fix


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_gpu_is_fit(capsys):
    assert SCRIPT["main"]([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("GPU 0", "nvcc", "kernel on cpu", "kernel on cuda"):
        assert any(line.startswith(f"ok    {name}") for line in lines), lines
