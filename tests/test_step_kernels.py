"""What is said of a step's kernels is what runs."""

import dataclasses

import pytest
import torch
from helpers import needs_cuda

from minifused import GPT
from minifused.config import PRESETS
from minifused.kernels.build import tile_for
from minifused.kernels.tile import CPU, Tile
from minifused.step_kernels import step_kernels, step_table

H200 = Tile("sm_90a")
GPT2 = PRESETS["gpt2"]


def kernels(config, tile, dtype, batch):
    return [kernel for _, kernel, _ in step_kernels(config, tile, dtype, batch, 1024)]


def test_one_row_goes_through_gemv():
    linear = ["gemv"] * 4
    assert kernels(GPT2, H200, "bfloat16", 1) == [
        "gemv", "decode_attention_split", *linear, "piece_values",
    ]  # fmt: skip


def test_a_few_rows_go_through_the_swapped_gemm():
    assert kernels(GPT2, H200, "float16", 8).count("swap_gemm") == 5


@pytest.mark.parametrize("config", [GPT2, dataclasses.replace(GPT2, n_embd=36, n_head=3)])
def test_a_shape_that_nothing_was_made_for_says_so(config):
    dtype = "float32" if config is GPT2 else "bfloat16"  # rows of 36 columns are no whole vectors
    rows = kernels(config, H200, dtype, 3)
    assert rows.count("skinny_gemm (general)") == (5 if config is GPT2 else 4)


def test_on_a_cpu_there_is_nothing_else():
    assert not any("general" in kernel for kernel in kernels(GPT2, CPU, "float32", 1))


def test_a_line_for_each_part():
    lines = step_table(GPT2, torch.device("cpu"), torch.bfloat16, 2).splitlines()
    assert [line.split()[0] for line in lines] == [
        "attn.c_attn", "attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "head", "softmax",
    ]  # fmt: skip
    assert lines[0].split()[1:] == ["skinny_gemm", "block_m=1,", "block_n=8,", "block_k=8,",
                                    "num_threads=1"]  # fmt: skip


@needs_cuda
def test_they_are_those_that_run():
    demo = GPT.from_pretrained(device="cuda", dtype="bfloat16", cuda_graph=False)
    demo.generate("R", max_new_tokens=3)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        demo.generate("R", max_new_tokens=3)
    ran = {event.name.removesuffix("_kernel") for event in profile.events()}
    for kernel in kernels(demo.config, tile_for(demo.device), "bfloat16", 1):
        assert any(name.startswith(kernel) for name in ran), kernel  # the end tells its form
