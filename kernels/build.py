"""Compile a kernel once per key and make it cheap to call.

TileLang keeps compiled kernels on disk (`TILELANG_CACHE_DIR`); this module keeps them in the
process, so that a launcher costs a dictionary lookup and two threads never compile one key twice.
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
from collections.abc import Callable
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
    """How many kernels this process has built or loaded, and the seconds that took."""

    count: int = 0
    seconds: float = 0.0
    on_compile: Callable[[], object] | None = None  # called after each


stats = CompileStats()
_kernels: dict[tuple, Callable[..., None]] = {}
_locks: dict[tuple, threading.Lock] = {}
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


def compile_kernel(builder: Callable, tile: Tile, *static) -> Callable[..., None]:
    """The kernel builder(tile, *static), compiled once per process; it takes tensors or None.

    Raises UserError where the compiler it needs is missing.
    """
    key = (builder, tile, *static)
    kernel = _kernels.get(key)
    return kernel if kernel is not None else _compile_once(key)


def _compile_once(key: tuple) -> Callable[..., None]:
    with _registry_lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _kernels:
            start = time.perf_counter()
            _kernels[key] = _compile(*key)
            with _registry_lock:
                stats.count += 1
                stats.seconds += time.perf_counter() - start
            if stats.on_compile is not None:
                stats.on_compile()
        return _kernels[key]


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
