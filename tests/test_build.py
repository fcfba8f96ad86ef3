"""The compile cache, shared by processes or damaged, and a machine without a compiler."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import poisoned
from tilelang.contrib import cc
from tilelang.env import TILELANG_TEMPLATE_PATH as TEMPLATES

from minifused import ops
from minifused.errors import UserError
from minifused.kernels import build
from minifused.kernels.build import compile_ahead, compile_kernel
from minifused.kernels.row_softmax import row_softmax_kernel
from minifused.kernels.schedule import row_schedule
from minifused.kernels.tile import CPU

ROOT = Path(__file__).parents[1]
SCRIPT = """
import os, sys
import torch
from minifused import ops
from minifused.kernels.build import stats

children, (ready, go) = [], os.pipe()
for _ in range(int(sys.argv[1]) - 1):  # imports take seconds, and forks have done them
    children.append(os.fork())
    if not children[-1]:
        children.clear()
        break
os.close(go)
os.read(ready, 1)  # so that all start together: it ends once each has closed its `go`
x = torch.arange(21.0).view(3, 7).sin()
print(ops.softmax(x).sum(0).tolist(), stats.count, flush=True)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def run(cache, processes=1):
    """What so many processes printed, each a line, and their warnings."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(processes)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "TILELANG_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == processes  # no log on stdout
    return lines, run.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that was absent when four processes came to it, and what they printed."""
    cache = tmp_path_factory.mktemp("compile") / "absent" / "cache"
    return cache, run(cache, 4)[0]


def libraries(cache):
    return sorted(cache.rglob("*.so"))


def test_four_processes_share_an_empty_cache(filled):
    cache, outputs = filled
    assert len(set(outputs)) == 1
    assert outputs[0].endswith("] 1")
    assert len(libraries(cache)) == 1


def test_a_damaged_library_is_compiled_again(filled):
    cache, outputs = filled
    (library,) = libraries(cache)
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    assert run(cache)[0] == outputs[:1]
    assert len(library.read_bytes()) == len(whole)


def test_a_cache_folder_that_cannot_be_written_is_one_warning(filled, tmp_path):
    _, outputs = filled
    (tmp_path / "file").touch()
    lines, errors = run(tmp_path / "file" / "cache")
    assert lines == outputs[:1]
    assert errors.count("TILELANG_CACHE_DIR") == 1


def test_without_a_home_a_temporary_folder_serves():
    code = (
        "import os, pwd; del os.environ['HOME']\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "import torch; from minifused import ops\n"
        "print(ops.softmax(torch.zeros(1, 4)).tolist())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TILELANG_CACHE_DIR"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert run.stdout == "[[0.25, 0.25, 0.25, 0.25]]\n" and "TILELANG_CACHE_DIR" in run.stderr


@pytest.fixture
def no_compiler(monkeypatch):
    for name in ("PATH", "CXX", "CC"):
        monkeypatch.setenv(name, "")
    cc.get_cplus_compiler.cache_clear()
    yield
    monkeypatch.undo()
    cc.get_cplus_compiler.cache_clear()


def test_no_compiler_is_a_user_error_that_names_it(no_compiler):
    static = 19, 19, "float32", "float32", row_schedule(CPU, 19, 19)  # columns of no other test
    with pytest.raises(UserError, match=r"^no C\+\+ compiler") as caught:
        compile_kernel(row_softmax_kernel, CPU, *static)
    assert all(name in str(caught.value) for name in ("g++", "clang++", "CXX"))


def test_the_compiler_of_a_cpu_kernel_reads_nothing_of_half_hpp():
    source, flags = "#include <tl_templates/cpp/common.h>\n", build.CPU_FLAGS
    command = [cc.get_cplus_compiler(), "-std=c++17", "-x", "c++", "-", f"-I{TEMPLATES}", *flags]
    unused = subprocess.run([*command, "-M"], input=source, capture_output=True, text=True)
    assert "common.h" in unused.stdout and "istream" not in unused.stdout, unused.stderr
    use = subprocess.run(
        [*command, "-fsyntax-only"], input=source + "half x;", capture_output=True, text=True
    )
    assert "incomplete type" in use.stderr  # rather than a wrong result


def test_no_nvcc_is_a_user_error_that_names_the_remedies(tmp_path):
    script = (
        "from minifused.kernels.build import compile_kernel\n"
        "from minifused.kernels.row_softmax import row_softmax_kernel\n"
        "from minifused.kernels.schedule import row_schedule\n"
        "from minifused.kernels.tile import Tile\n"
        "import minifused.kernels.build as build\n"
        "tile = Tile('sm_90a')\n"
        "build._nvcc = lambda: None  # as where no toolkit is installed\n"
        "static = (8, 8, 'float32', 'float32', row_schedule(tile, 8, 8))\n"
        "compile_kernel(row_softmax_kernel, tile, *static)\n"
    )
    environment = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path), "PATH": "", "CUDA_HOME": ""}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("minifused.errors.UserError: no nvcc found")
    assert all(part in message for part in ("minifused[nvcc]", "CUDA_HOME", "--device cpu"))


# What is compiled ahead. Softmax has a kernel for each number of columns: these are of no other
# test.


def softmax_is_right(x, out):
    return torch.allclose(out, x.softmax(-1), rtol=0, atol=1e-6)


def test_work_compiled_ahead_launches_nothing_and_then_compiles_nothing():
    wide, narrow, outs = torch.rand(3, 41), torch.rand(3, 42), [poisoned(3, 41), poisoned(3, 42)]
    ops.softmax(wide)  # a kernel that is compiled is not launched either

    def work():
        for _ in range(2):
            ops.softmax(wide, out=outs[0])
            ops.softmax(narrow, out=outs[1])

    before = build.stats.count
    compile_ahead(work)
    assert build.stats.count == before + 1
    assert all(out.isnan().all() for out in outs)
    work()
    assert build.stats.count == before + 1
    assert softmax_is_right(wide, outs[0]) and softmax_is_right(narrow, outs[1])


def test_only_the_thread_that_compiles_ahead_launches_nothing():
    x, out, results = torch.rand(3, 43), poisoned(3, 43), []

    def work():
        ops.softmax(x, out=out)  # leaves a kernel that is not compiled to whoever comes next
        with ThreadPoolExecutor(1) as other:
            results.append(other.submit(ops.softmax, x).result())

    compile_ahead(work)
    assert out.isnan().all() and softmax_is_right(x, results[0])


def test_a_kernel_is_launched_again_after_work_that_failed():
    x = torch.rand(3, 44)
    with pytest.raises(ZeroDivisionError):
        compile_ahead(lambda: ops.softmax(x) / (1 // 0))
    assert softmax_is_right(x, ops.softmax(x))


def test_work_that_itself_compiles_ahead_launches_nothing_after_that():
    x, out = torch.rand(3, 47), poisoned(3, 47)

    def work():
        compile_ahead(lambda: ops.softmax(x))
        ops.softmax(x, out=out)

    compile_ahead(work)
    assert out.isnan().all() and softmax_is_right(x, ops.softmax(x))


def test_a_compiled_model_is_compiled_ahead_too():
    x = torch.rand(3, 45)
    graph = torch.compile(lambda x: ops.softmax(x) * 2, fullgraph=True, backend="eager")
    before = build.stats.count
    compile_ahead(lambda: graph(x))
    assert build.stats.count == before + 1
    assert softmax_is_right(x, graph(x) / 2) and build.stats.count == before + 1


def test_kernels_compile_side_by_side_and_their_seconds_count_once(monkeypatch):
    together, each, calls = threading.Barrier(2, timeout=60), [], []

    def compile_slowly(*key):
        start = time.perf_counter()
        together.wait()
        time.sleep(0.1)
        each.append(time.perf_counter() - start)
        return calls.append

    monkeypatch.setattr(build, "_compile", compile_slowly)
    monkeypatch.setattr(build.stats, "on_compile", lambda: calls.append("compiled"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(build, "_kernels", {})
    count, seconds = build.stats.count, build.stats.seconds

    def work():
        for builder in (len, min, len):
            compile_kernel(builder, CPU)(None)

    compile_ahead(work)
    assert build.stats.count == count + 2 and calls == ["compiled"] * 2
    assert max(each) <= build.stats.seconds - seconds < sum(each)
    work()
    assert calls[2:] == [None] * 3


def test_a_kernel_that_does_not_compile_ahead_is_a_user_error_then_and_later(monkeypatch):
    x, count = torch.rand(3, 46), build.stats.count
    with monkeypatch.context() as without:
        for name in ("PATH", "CXX", "CC"):
            without.setenv(name, "")
        cc.get_cplus_compiler.cache_clear()
        for call in (lambda: compile_ahead(lambda: ops.softmax(x)), lambda: ops.softmax(x)):
            with pytest.raises(UserError, match=r"^no C\+\+ compiler"):
                call()
    cc.get_cplus_compiler.cache_clear()
    assert build.stats.count == count
    assert softmax_is_right(x, ops.softmax(x)) and build.stats.count == count + 1
