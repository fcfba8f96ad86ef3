"""The CPU target's own exponentials, over the whole range of float32."""

import pytest
import tilelang.language as T
import torch

from minifused.kernels.build import compile_kernel
from minifused.kernels.tile import CPU


def exponentials(tile, columns):
    """exp of the even rows and exp2 of the odd ones."""
    m = T.dynamic("m")

    @T.prim_func
    def exponentials(X: T.Tensor((m, columns), "float32"), Y: T.Tensor((m, columns), "float32")):
        with T.Kernel(T.ceildiv(m, 2), threads=1) as row:
            for j in tile.parallel(columns):
                Y[2 * row, j] = tile.exp(X[2 * row, j])
            for j in tile.parallel(columns):
                Y[2 * row + 1, j] = tile.exp2(X[2 * row + 1, j])

    return exponentials


def run(x):
    """exp and exp2 of x (n,), by the kernel."""
    rows = torch.stack([x, x])
    out = torch.full_like(rows, float("nan"))
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 1024)).unflatten(1, (-1, 1024))
    pairs = padded.transpose(0, 1).reshape(-1, 1024).contiguous()
    result = torch.full_like(pairs, float("nan"))
    compile_kernel(exponentials, CPU, 1024)(pairs, result)
    out = result.unflatten(0, (-1, 2)).transpose(0, 1).flatten(1)[:, : rows.shape[1]]
    return out[0], out[1]


@pytest.mark.parametrize(("low", "high"), [(-87.3, 88.3), (-1.0, 1.0), (-1e-3, 1e-3)])
def test_accurate_to_the_last_place(low, high):
    x = torch.linspace(low, high, 200_000)
    for result, reference in zip(run(x), (x.double().exp(), x.double().exp2()), strict=True):
        assert ((result - reference) / reference).abs().max() < 1e-7


def test_ends_of_the_range():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, inf, nan, 0.0, -1000.0, 1000.0, -126.0, 127.0])
    exp, exp2 = run(x)
    torch.testing.assert_close(exp[:6], torch.tensor([0, inf, nan, 1, 0, inf]), equal_nan=True)
    torch.testing.assert_close(
        exp2, torch.tensor([0, inf, nan, 1, 0, inf, 2.0**-126, 2.0**127]), equal_nan=True
    )
