"""Compile a kernel once per key and make it cheap to call.

TileLang keeps compiled kernels on disk (`TILELANG_CACHE_DIR`); this module keeps them in the
process, so that a launcher costs a dictionary lookup and two threads never compile one key twice.
What some work will launch can be compiled side by side before it is done: `compile_ahead`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilelang
import torch
from tilelang.contrib.cc import get_cplus_compiler
from torch import Tensor
from tvm.ir.transform import PassContext

from minifused.errors import UserError
from minifused.kernels.tile import CPU, Tile

# What lets g++ vectorise sums and exponentials without assuming away infinities. -ffast-math
# would switch the whole process to flush-to-zero when the library is loaded, and -march=native
# would make cached libraries crash on another CPU.
CPU_FLAGS = [
    "-O3", "-fno-math-errno", "-fno-trapping-math",
    "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math",
]  # fmt: skip
if platform.machine() in ("x86_64", "AMD64"):
    CPU_FLAGS += ["-mavx2", "-mfma"]
# Instead of the header for 16-bit values, three quarters of what a small kernel takes to compile.
NO_HALF = str(Path(__file__).with_name("no_half.h"))
if len(NO_HALF.split()) == 1:  # TileLang splits flags at spaces
    CPU_FLAGS += ["-DHALF_HALF_HPP", "-include", NO_HALF]

# TileLang logs to stdout, which belongs to the text; some of its loggers set levels of their own.
for _handler in logging.getLogger("tilelang").handlers:
    _handler.setLevel(logging.ERROR)


@dataclass
class CompileStats:
    """How many kernels this process has built or loaded, and the seconds in which it did.

    Those in which it built several at a time count once.
    """

    count: int = 0
    seconds: float = 0.0
    on_compile: Callable[[], object] | None = None  # called after each, from any thread
    _running: int = 0
    _since: float = 0.0

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Count what is compiled meanwhile, unless it fails, and the seconds."""
        with _registry_lock:
            if self._running == 0:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
            with _registry_lock:
                self.count += 1
        finally:
            with _registry_lock:
                self._running -= 1
                if self._running == 0:
                    self.seconds += time.perf_counter() - self._since


class Kernel:
    """A kernel to call with tensors or None; what is not compiled yet is so by the first call."""

    def __init__(self, key: tuple):
        self._key, self._lock = key, threading.Lock()
        self._launch: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        if _thread.missing is None:
            (self._launch or self.compile())(*tensors)
        elif self._launch is None:
            _thread.missing.append(self)

    def compile(self) -> Callable[..., None]:
        """Compile it unless that was done, and return what launches it."""
        with self._lock:
            if self._launch is None:
                with stats.compiling():
                    self._launch = _compile(*self._key)
                if stats.on_compile is not None:
                    stats.on_compile()
            return self._launch


class _Thread(threading.local):
    """While nothing is launched in this thread, what would have to be compiled for it."""

    missing: list[Kernel] | None = None


stats = CompileStats()
_thread = _Thread()
_kernels: dict[tuple, Kernel] = {}
_registry_lock = threading.Lock()


def dtype_name(dtype: torch.dtype) -> str:
    """The name TileLang and PyTorch share: "float32", "float16" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def tile_for(device: torch.device) -> Tile:
    """The machine a device is."""
    if device.type != "cuda":
        return CPU
    major, minor = torch.cuda.get_device_capability(device)
    # The "a" targets carry wgmma and the other instructions of one architecture only.
    return Tile(f"sm_{major}{minor}" + ("a" if major in (9, 10) else ""))


def compile_kernel(builder: Callable, tile: Tile, *static) -> Kernel:
    """The kernel builder(tile, *static), compiled once per process; it takes tensors or None.

    Raises UserError where the compiler it needs is missing.
    """
    key = (builder, tile, *static)
    kernel = _kernels.get(key)
    if kernel is None:
        with _registry_lock:
            kernel = _kernels.setdefault(key, Kernel(key))
    if kernel._launch is None and _thread.missing is None:
        kernel.compile()
    return kernel


def compile_ahead(work: Callable[[], object]) -> None:
    """Compile, side by side, the kernels that `work` launches.

    To know them, `work` is done once with launches that do nothing: what kernels write is then
    undefined, which the work must not mind. Raises what compiling one of them raises.
    """
    missing: list[Kernel] = []
    outer, _thread.missing = _thread.missing, missing
    try:
        work()
    finally:
        _thread.missing = outer
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        list(pool.map(Kernel.compile, dict.fromkeys(missing)))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits for those under way alone


def _compile(builder: Callable, tile: Tile, *static) -> Callable[..., None]:
    kernel = compile_program(builder, tile, *static)
    return kernel if tile.is_cuda else _direct_call(kernel)


def compile_program(builder: Callable, tile: Tile, *static) -> tilelang.JITKernel:
    """The kernel as TileLang has it, from its cache on disk if it is there.

    Raises UserError where the compiler it needs is missing.
    """
    flags = None if tile.is_cuda else CPU_FLAGS
    with tile.target:
        prim_func = builder(tile, *static)
        try:
            return tilelang.compile(prim_func, target=tile.target, compile_flags=flags)
        except Exception as error:
            _explain_missing_compiler(tile, error)
            raise


def lower(builder: Callable, tile: Tile, *static) -> str:
    """The source TileLang generates for a kernel; needs neither a GPU nor a compiler."""
    return lower_program(builder, tile, *static).kernel_source


def lower_program(builder: Callable, tile: Tile, *static) -> Any:
    """The same as TileLang has it, with what else it says of the program."""
    with tile.target:
        prim_func = builder(tile, *static)
        configs = prim_func.attrs.get("tilelang_pass_configs")  # tilelang.compile heeds it itself
        with PassContext(opt_level=3, config=dict(configs or {})):
            return tilelang.lower(prim_func, target=tile.target)


def _direct_call(kernel) -> Callable[..., None]:
    """Call a CPU kernel's library itself: 1 µs instead of the 10 to 40 of TileLang's checks.

    The checks are the launchers' work. The library takes a pointer a tensor, the value of each
    dynamic size in the order in which the tensors first name it, and a stream.
    """
    adapter = kernel.adapter
    sizes = [(tensor, dim) for _, tensor, dim, _ in adapter.dynamic_symbolic_map.values()]
    call = adapter.lib.call
    pointers = [ctypes.c_void_p] * len(adapter.params)
    call.argtypes = [*pointers, *[ctypes.c_int64] * len(sizes), ctypes.c_void_p]

    def launch(*tensors: Tensor | None) -> None:
        arguments = [None if t is None else t.data_ptr() for t in tensors]
        arguments += [tensors[tensor].shape[dim] for tensor, dim in sizes]
        if call(*arguments, None) != 0:
            raise RuntimeError(adapter.lib.get_last_error().decode())

    return launch


def _explain_missing_compiler(tile: Tile, error: Exception) -> None:
    """Raise UserError if the compile failed for want of a compiler."""
    if not tile.is_cuda and not _is_program(get_cplus_compiler()):
        raise UserError(
            "no C++ compiler found, which CPU kernels need: install g++ or clang++, "
            "or set CXX to one, or use --backend torch"
        ) from error
    if tile.is_cuda and not _is_program(_nvcc()):
        raise UserError(
            f"no nvcc found, which kernels for {tile.arch} need: pip install 'minifused[nvcc]', "
            "or set CUDA_HOME to a CUDA toolkit, or use --device cpu or --backend torch"
        ) from error


def _nvcc() -> str | None:
    from tilelang.env import CUDA_HOME

    return os.path.join(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None


def _is_program(path: str | None) -> bool:
    return path is not None and shutil.which(path) is not None
