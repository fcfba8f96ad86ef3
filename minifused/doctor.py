"""Whether this machine can run minifused: small checks, each with a fix where it is not well.

A check imports what it asks about itself, so that a package that is missing or broken is a line of
the report and not the end of it. Only what keeps generate.py from running is a fault.
"""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from minifused.errors import UserError

# Lowest versions, as pyproject.toml has them.
REQUIRED = {"torch": "2.11", "tilelang": "0.1.15", "einops": "", "safetensors": "", "tqdm": ""}
OPTIONAL = {"tokenizers": "bpe", "transformers": "hf", "matplotlib": "bench"}  # name: our extra
MODEL = Path(__file__).parent / "assets" / "demo" / "model.safetensors"

NO_NVCC = "python -m pip install 'minifused[nvcc]', or set CUDA_HOME to a CUDA toolkit"
NO_COMPILER = "install g++ or clang++, or set CXX to one"
NIGHTLY = "python -m pip install -U --pre tilelang -f https://tile-ai.github.io/whl/nightly"
# What kernels lowered for sm_75 and put through nvcc 13.0 show; none was run on such a GPU.
BELOW_SM80 = (
    "use float32, the default here: every kernel builds, with attention heads up to 112; float16 "
    "has tensor cores, but its gemm of over 64 rows and columns needs 96 KiB of shared memory, "
    "and there are 64; bfloat16 has none before sm_80, and not all its attention compiles"
)
BELOW_SM75 = "use --device cpu or --backend torch: CUDA 13 builds for sm_75 and newer only"


State = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Check:
    """A line of the report; `fix` says what to do where the state is not ok."""

    name: str
    state: State
    detail: str
    fix: str = ""


def diagnose() -> Iterator[Check]:
    """Run all checks, and yield each one's lines as they come; nothing is raised or printed."""
    for name, check in CHECKS.items():
        yield from attempt(name, check)


def attempt(name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """The lines of one check. If the check itself breaks, that is a line, and no fault: whether
    kernels run is asked of the kernels."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # compilers talk; stdout is the report's
            return list(check())
    except Exception as error:
        return [Check(name, "note", f"not known: {_one_line(error)}", "see the other lines")]


def can_run(checks: Iterable[Check]) -> bool:
    """Whether generate.py can run, with its defaults."""
    return all(check.state != "fault" for check in checks)


# Packages


def check_python() -> Iterator[Check]:
    system = f"{platform.system()} {platform.machine()}"
    yield Check("python", "ok", f"{platform.python_version()}, {system}")


def check_required(name: str) -> Iterator[Check]:
    """That a package we depend on can be imported, and is not too old."""
    lowest = REQUIRED[name]
    install = f"python -m pip install -U '{name}{f'>={lowest}' if lowest else ''}'"
    try:
        importlib.import_module(name)
        version = importlib.metadata.version(name)
    except Exception as error:
        yield Check(name, "fault", _one_line(error), install)
        return
    old = bool(lowest) and _numbers(version) < _numbers(lowest)
    yield (
        Check(name, "fault", f"{version}: too old", install) if old else Check(name, "ok", version)
    )


def check_optional() -> Iterator[Check]:
    for name, extra in OPTIONAL.items():
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            fix = f"if you want it: python -m pip install 'minifused[{extra}]'"
            yield Check(name, "note", "not installed; optional", fix)


# Devices


def check_torch_cuda() -> Iterator[Check]:
    import torch

    built = torch.version.cuda
    yield Check("CUDA of torch", "ok", built or "none: a CPU build")


def check_gpu() -> Iterator[Check]:
    import torch

    count = gpu_count()
    if count:
        for index in range(count):
            yield _gpu(index)
        return
    seen = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not seen:
        yield Check("GPU", "ok", "none: kernels run on the CPU")
    elif torch.version.cuda is None:
        fix = "python -m pip install --force-reinstall torch, which brings CUDA"
        yield Check(
            "GPU", "note", f"{seen.splitlines()[0]}: this PyTorch is built without CUDA", fix
        )
    else:
        fix = f"update the driver to one for CUDA {torch.version.cuda}, or see CUDA_VISIBLE_DEVICES"
        yield Check("GPU", "note", f"{seen.splitlines()[0]}: out of PyTorch's reach", fix)


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu(index: int) -> Check:
    import torch

    from minifused.benchmark.machine import machine_info

    device = torch.device("cuda", index)
    info, capability = machine_info(device), torch.cuda.get_device_capability(device)
    name = f"GPU {index}"
    detail = (
        f"{info['name']}, sm_{capability[0]}{capability[1]}, {info['memory_gib']} GiB, "
        f"driver {info['driver'] or 'not known'}"
    )
    if capability >= (8, 0):
        return Check(name, "ok", detail)
    return Check(name, "note", detail, BELOW_SM80 if capability >= (7, 5) else BELOW_SM75)


# Compilers


def check_nvcc() -> Iterator[Check]:
    from tilelang.env import CUDA_HOME

    nvcc = os.path.join(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None
    broken: State = "fault" if gpu_count() else "note"
    if nvcc is None or shutil.which(nvcc) is None:
        if broken == "fault":
            where = f"not found in CUDA_HOME, {CUDA_HOME}" if CUDA_HOME else "not found"
            yield Check("nvcc", "fault", where, f"{NO_NVCC}, or use --device cpu")
        else:
            yield Check("nvcc", "ok", "none: only a GPU needs it")
        return
    release = re.search(r"release ([\d.]+)", _output(nvcc, "--version") or "")
    if release is None:
        yield Check("nvcc", broken, f"{nvcc} does not run", NO_NVCC)
    else:
        yield Check("nvcc", "ok", f"{release[1]}, {nvcc}")


def check_compiler() -> Iterator[Check]:
    """The C++ compiler of the CPU's kernels, which nvcc calls too."""
    from tilelang.contrib.cc import get_cplus_compiler

    compiler = get_cplus_compiler()
    if compiler is None:
        yield Check("C++ compiler", "fault", "not found", NO_COMPILER)
        return
    variable = next((name for name in ("CXX", "CC") if os.environ.get(name)), None)
    origin = f"{compiler}, from {variable}" if variable else compiler
    version = _output(compiler, "--version")
    if version is None:
        yield Check("C++ compiler", "fault", f"{origin}, does not run", NO_COMPILER)
    else:
        yield Check("C++ compiler", "ok", f"{version.splitlines()[0]}, {origin}")


# The cache of compiled kernels


def check_cache() -> Iterator[Check]:
    folder = Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")
    fix = "set TILELANG_CACHE_DIR to a folder that can be written"
    # minifused.environment has put a temporary folder in place of one that cannot be written.
    if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("tilelang-"):
        yield Check("kernel cache", "note", "not writable: each process compiles anew", fix)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        yield Check("kernel cache", "note", f"{folder}: {error.strerror}", fix)
        return
    yield Check("kernel cache", "ok", f"{folder}, writable, {_folder_bytes(folder) / 1e6:.1f} MB")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process may delete it
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def check_model() -> Iterator[Check]:
    if MODEL.is_file():
        yield Check("demo model", "ok", f"{MODEL.stat().st_size / 1e6:.1f} MB")
    else:
        fix = "install minifused again, or pass --model DIR to generate.py"
        yield Check("demo model", "fault", f"{MODEL} is missing", fix)


# Kernels


def check_kernels() -> Iterator[Check]:
    """A small kernel on each target that this machine has."""
    has_gpu = bool(gpu_count())
    yield check_kernel("cpu", needed=not has_gpu)
    if has_gpu:
        yield check_kernel("cuda", needed=True)


def check_kernel(device: str, needed: bool) -> Check:
    """Compile a gemm with GELU and compare it with float64; `needed` makes a failure a fault."""
    name = f"kernel on {device}"
    broken: State = "fault" if needed else "note"
    start = time.perf_counter()
    try:
        dtype, error, bound = _run_kernel(device)
    except UserError as problem:
        detail, _, fix = str(problem).partition(": ")
        return Check(name, broken, detail, fix)
    except Exception as problem:
        fix = NIGHTLY if device == "cuda" else f"update the compiler, or: {NIGHTLY}"
        return Check(name, broken, f"does not run: {_one_line(problem)}", fix)
    seconds = time.perf_counter() - start
    if not error <= bound:  # NaN too
        detail = f"wrong by {error:.1e} in {dtype}, allowed {bound:.0e}"
        return Check(name, broken, detail, f"use --backend torch; or: {NIGHTLY}")
    return Check(name, "ok", f"gemm in {dtype} compiled and right, {seconds:.1f} s")


def _run_kernel(device: str) -> tuple[str, float, float]:
    """The dtype that generate.py takes, the kernel's largest relative error, and its bound."""
    import torch

    from minifused import ops
    from minifused.engine import resolve_dtype

    where = torch.device(device)
    dtype = resolve_dtype("auto", where)
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 72, generator=draw).to(where, dtype) for n in (33, 40))
    with _fresh_compile():
        y = ops.linear(x, weight, activation="gelu_tanh").double()
    exact = x.double() @ weight.double().T
    exact = torch.nn.functional.gelu(exact, approximate="tanh")
    error = float((y - exact).abs().max() / exact.abs().max())
    return str(dtype).removeprefix("torch."), error, 4 * torch.finfo(dtype).eps


@contextlib.contextmanager
def _fresh_compile() -> Iterator[None]:
    """Without the cache on disk, in which a kernel outlives the compiler that made it."""
    import tilelang
    from tilelang.env import CacheState

    was_enabled = CacheState.is_enabled()
    tilelang.disable_cache()
    try:
        yield
    finally:
        if was_enabled:
            tilelang.enable_cache()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _output(*command: str) -> str | None:
    """What a command prints; None if it is not there, fails, hangs or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A failed compile prints its source first, and then what the compiler said.
    said = (line for line in lines if re.search(r"\berror: \S|No such file", line))
    text = next(said, lines[0] if lines else "")
    return f"{type(error).__name__}: {text}"[:160].rstrip(": ")


CHECKS: dict[str, Callable[[], Iterable[Check]]] = {
    "python": check_python,
    **{name: partial(check_required, name) for name in REQUIRED},
    "optional packages": check_optional,
    "CUDA of torch": check_torch_cuda,
    "GPU": check_gpu,
    "nvcc": check_nvcc,
    "C++ compiler": check_compiler,
    "kernel cache": check_cache,
    "demo model": check_model,
    "kernels": check_kernels,
}
