"""ops.vector_add: sums of any length, and the CUDA source they come from."""

import re

import pytest
import torch
from helpers import (
    assert_within_bound,
    body_of_kernel,
    needs_cuda,
    normal,
    on_each_device,
    on_each_dtype,
    poisoned,
)

from minifused import ops, parity
from minifused.kernels import build
from minifused.kernels.schedule import ITEM_BYTES
from minifused.kernels.tile import CPU, Tile
from minifused.kernels.vector_add import vector_add_kernel, vector_add_schedule
from minifused.workloads import VectorAddWorkload

BLOCK = 2048  # elements of a float32 block; one of 16 bits has twice as many
SIZES = {
    "one_element": 1,
    "odd": 7,
    "block_less_one": BLOCK - 1,
    "block": BLOCK,
    "block_and_one": BLOCK + 1,
    "wide_block_less_one": 2 * BLOCK - 1,
    "wide_block_and_one": 2 * BLOCK + 1,
    "blocks": 6 * BLOCK,
}


def test_the_sizes_are_around_a_block():
    for tile in (CPU, Tile("sm_90a")):
        assert vector_add_schedule(tile, "float32").block_n == BLOCK
        assert vector_add_schedule(tile, "bfloat16").block_n == 2 * BLOCK


def check(x, y):
    """Compare with float64 and eager PyTorch; every element of the output has to be written."""
    out = poisoned(*x.shape, device=x.device, dtype=x.dtype)
    ops.vector_add(x, y, out=out)
    assert_within_bound(out, x.double() + y.double(), x + y)
    assert torch.equal(out, x + y)
    return out


@pytest.mark.parametrize("n", SIZES.values(), ids=SIZES)
@on_each_dtype
def test_sizes(n, device, dtype):
    draw = normal(device, dtype)
    check(draw(n), draw(n))


@pytest.mark.parametrize("offsets", [(1, 0, 0), (0, 1, 0), (0, 0, 16), (3, 2, 16)], ids=str)
@on_each_dtype
def test_vectors_that_start_within_memory(offsets, device, dtype):
    """Inputs also lie where no access of 16 bytes may begin, the output at a multiple of 32."""
    n, draw = 2 * BLOCK + 5, normal(device, dtype)
    whole = [draw(n + 16), draw(n + 16), poisoned(n + 16, device=device, dtype=dtype)]
    x, y, out = (tensor[offset : offset + n] for tensor, offset in zip(whole, offsets, strict=True))
    ops.vector_add(x, y, out=out)
    assert torch.equal(out, x + y)
    assert whole[2].isnan().sum() == 16  # nothing beside it was written


@on_each_device
def test_shapes_and_strides(device):
    draw = normal(device)
    check(draw(5, 3, 7), draw(5, 3, 7))
    check(draw(7, 5).T, draw(5, 7))
    check(draw(5, 20)[:, 3:10], draw(14, 5).T[:, ::2])
    assert ops.vector_add(draw(), draw()).shape == ()
    for shape in [(0,), (2, 0, 7)]:
        empty = torch.empty(shape, device=device)
        assert ops.vector_add(empty, empty).shape == shape


@on_each_dtype
def test_infinity_and_nan_pass(device, dtype):
    x = torch.tensor([torch.inf, torch.inf, torch.nan, -torch.inf, 0.0], device=device, dtype=dtype)
    y = torch.tensor([1.0, -torch.inf, 1.0, 1.0, -0.0], device=device, dtype=dtype)
    torch.testing.assert_close(ops.vector_add(x, y), x + y, equal_nan=True)


@pytest.mark.filterwarnings("ignore:CPU kernels are float32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_on_a_cpu_are_added_in_float32(dtype):
    draw = normal(dtype=dtype)
    check(draw(100), draw(100))


@needs_cuda
def test_more_than_2_31_elements():
    n = (1 << 31) + BLOCK + 1
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    x = torch.ones(n, device="cuda", dtype=torch.float16)
    out = poisoned(n, device="cuda", dtype=torch.float16)
    ops.vector_add(x, x, out=out)
    for start in range(0, n, 1 << 28):
        assert (out[start : start + (1 << 28)] == 2).all()


def test_refusals():
    x = torch.ones(3, 7)

    def refused(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            ops.vector_add(*args, **kwargs)

    refused(r"^y is \(7,\),.*\(3, 7\)", x, x[0])
    refused(r"^y is \(3, 1\),.*\(3, 7\)", x, x[:, :1])
    refused(r"^y is .*torch.float16.*torch.float32", x, x.half())
    refused(r"^x is .*torch.int64", x.long(), x.long())
    refused(r"^out is \(21,\),.*\(3, 7\)", x, x, out=torch.ones(21))
    refused(r"^out is .*contiguous", x, x, out=torch.ones(7, 3).T)
    refused(r"^out is .*torch.float16.*torch.float32", x, x, out=x.half())


def test_parity_and_the_count_of_its_work():
    check, everywhere, _ = parity.OPERATIONS["vector_add"]
    results = [r for w in everywhere for r in check(w, torch.device("cpu"), torch.float32)]
    assert len(results) == 3 and all(r.ok for r in results)
    workload = VectorAddWorkload("", 100)
    assert (workload.flops, workload.bytes(torch.bfloat16)) == (100, 600)


# The generated source


def lowered(arch, dtype):
    """The body of the kernel."""
    tile = Tile(arch)
    static = dtype, vector_add_schedule(tile, dtype)
    return body_of_kernel(build.lower(vector_add_kernel, tile, *static))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_whole_blocks_go_by_16_bytes_or_more(arch, dtype):
    whole, tail = lowered(arch, dtype).split("} else {")
    wide = {"ulonglong4"} if arch == "sm_100a" else {"uint4", "float4"}
    for tensor in "ABC":
        accesses = set(re.findall(rf"\*\((\w+)\s*\*\)\({tensor} \+", whole))
        assert accesses and accesses <= wide
        assert not re.search(rf"\b{tensor}\[", whole), f"{tensor} goes by the element too"
        assert re.search(rf"\b{tensor}\[", tail)
    assert ITEM_BYTES[dtype] * vector_add_schedule(Tile(arch), dtype).block_n == 256 * 32


def test_indices_are_64_bit():
    source = lowered("sm_90a", "bfloat16")
    assert "int64_t n)" in source
    for tensor in "ABC":
        uses = re.findall(rf"\b{tensor}(?: \+ |\[)(.*)", source)
        assert uses and all("(int64_t)" in use for use in uses)


def test_the_cpu_source_is_plain_c():
    source = build.lower(vector_add_kernel, CPU, "float32", vector_add_schedule(CPU, "float32"))
    assert not re.search(r"threadIdx|__shared__|__global__", source)
    assert "int32_t" in source
