"""The tile dialect: all that differs between a GPU block and a CPU core.

A kernel is written once at tile level. What it cannot know is where a tile lives, how a loop
over a tile runs, how two tiles are multiplied and what an exponential is; it asks a `Tile` for
these. On CUDA they are TileLang's own `alloc_shared`, `alloc_fragment`, `Parallel`, `gemm` and
`exp`; on the CPU (target `c`) tiles are local arrays, tile loops are plain loops, and products and
exponentials are written so that the C compiler vectorises them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import tilelang.language as T
from tvm.target import Target

from minifused.kernels import cpu_math

CPU_MICRO_M, CPU_MICRO_N = 3, 4  # accumulators of a micro-tile: 12 of the 16 AVX2 registers


@dataclass(frozen=True)
class Tile:
    """A machine a kernel is built for.

    `arch` is an architecture TileLang knows ("sm_80", "sm_90a", …) or "" for the CPU.
    """

    arch: str = ""

    @property
    def is_cuda(self) -> bool:
        return bool(self.arch)

    @property
    def capability(self) -> int:
        """Compute capability times ten (80, 90, 100), 0 on the CPU."""
        return int("".join(c for c in self.arch if c.isdigit()) or 0)

    @cached_property
    def target(self) -> Target:
        return Target({"kind": "cuda", "arch": self.arch} if self.is_cuda else "c")

    def has_tensor_core(self, dtype: str) -> bool:
        """Tensor cores round float32 to TF32, so float32 never goes there."""
        return self.is_cuda and dtype != "float32"

    def shared(self, shape, dtype):
        """A tile that all threads of a block see."""
        return (T.alloc_shared if self.is_cuda else T.alloc_local)(shape, dtype)

    def fragment(self, shape, dtype):
        """A tile spread over the registers of a block."""
        return (T.alloc_fragment if self.is_cuda else T.alloc_local)(shape, dtype)

    def parallel(self, *extents):
        """A loop over a tile whose iterations are independent."""
        return (T.Parallel if self.is_cuda else T.grid)(*extents)

    def pdl_trigger(self):
        """Let the next kernel start, as far as its own `pdl_sync` (sm_90 and newer)."""
        return T.pdl_trigger() if self.capability >= 90 else None

    def pdl_sync(self):
        """Wait for what the kernels before this one wrote.

        A kernel that has this is launched before they end (programmatic dependent launch). What
        no kernel still running writes, as weights, may be read before it; all else only behind it.
        """
        return T.pdl_sync() if self.capability >= 90 else None

    def exp(self, x):
        return T.exp(x) if self.is_cuda else cpu_math.exp(x)

    def exp2(self, x):
        return T.exp2(x) if self.is_cuda else cpu_math.exp2(x)

    def gemm(self, a, b, c, transpose_b: bool = False, whole_rows: bool = False):
        """c (m, n) += a (m, k) @ b (k, n), or @ b (n, k) transposed; c is a float32 fragment.

        `whole_rows` gives each warp whole rows of c, so that a row's reduction stays in a warp.
        """
        if self.has_tensor_core(a.dtype):
            policy = T.GemmWarpPolicy.FullRow if whole_rows else T.GemmWarpPolicy.Square
            return T.gemm(a, b, c, transpose_B=transpose_b, policy=policy)
        m, n = (int(extent) for extent in c.shape)
        k = int(a.shape[1])
        if self.is_cuda:
            return (_fma_nt if transpose_b else _fma_nn)(a, b, c, m, n, k)
        return (_dot_nt if transpose_b else _axpy_nn)(a, b, c, m, n, k)


CPU = Tile()


@T.macro
def _fma_nt(a, b, c, m, n, k):
    for kk in T.serial(k):
        for i, j in T.Parallel(m, n):
            c[i, j] += a[i, kk] * b[j, kk]


@T.macro
def _fma_nn(a, b, c, m, n, k):
    for kk in T.serial(k):
        for i, j in T.Parallel(m, n):
            c[i, j] += a[i, kk] * b[kk, j]


def _divisor(extent: int, limit: int) -> int:
    """The largest divisor of `extent` that is at most `limit`."""
    return max(d for d in range(1, limit + 1) if extent % d == 0)


@T.macro
def _dot_nt(a, b, c, m, n, k):
    # Both operands run along k, so k is the vector axis: a micro-tile of dot products.
    mm, mn = _divisor(m, CPU_MICRO_M), _divisor(n, CPU_MICRO_N)
    for i0, j0 in T.grid(m // mm, n // mn):
        dot = T.alloc_local((mm, mn), "float32")
        T.clear(dot)
        for kk in T.serial(k):
            for i in T.unroll(mm):
                for j in T.unroll(mn):
                    dot[i, j] += a[i0 * mm + i, kk] * b[j0 * mn + j, kk]
        for i, j in T.grid(mm, mn):
            c[i0 * mm + i, j0 * mn + j] += dot[i, j]


@T.macro
def _axpy_nn(a, b, c, m, n, k):
    # b runs along n, so n is the vector axis: rows of c gather scaled rows of b.
    mm, mn = _divisor(m, 4), _divisor(n, 32)
    for i0, j0 in T.grid(m // mm, n // mn):
        row = T.alloc_local((mm, mn), "float32")
        for i, j in T.grid(mm, mn):
            row[i, j] = c[i0 * mm + i, j0 * mn + j]
        for kk in T.serial(k):
            for i in T.unroll(mm):
                for j in T.serial(mn):
                    row[i, j] += a[i0 * mm + i, kk] * b[kk, j0 * mn + j]
        for i, j in T.grid(mm, mn):
            c[i0 * mm + i, j0 * mn + j] = row[i, j]
