"""Peak host memory of loading a model: about the size of its file, whoever the weights are for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minifused import checkpoint
from minifused.config import GPTConfig

SCRIPT = """
import re, sys
from pathlib import Path
import torch
from minifused import checkpoint
from minifused.engine import load_model

def resident(field):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(field + r":\\s+(\\d+)", status)[1])

torch.ones(1024, 1024).t().contiguous().sum()  # threads and imports are not the load's
torch.nn.init.normal_(torch.empty(1, device="meta"))
folder, backend, dtype = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
config = checkpoint.load_config(folder)
before = resident("VmRSS")
model = load_model(folder, config, backend, torch.device("cpu"), dtype)
total = sum(float(tensor.sum()) for tensor in model.parameters())  # reads every page
print(resident("VmHWM") - before)
"""
# 8195 rows are padded to 8256 for the fused model, and the table is a good part of the file.
CONFIG = GPTConfig(vocab_size=8195, n_positions=64, n_embd=1024, n_layer=4, n_head=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    shapes = checkpoint.expected_shapes(CONFIG)
    checkpoint.save(folder, CONFIG, {name: torch.zeros(shape) for name, shape in shapes.items()})
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to measure with")
@pytest.mark.parametrize(
    ("backend", "dtype", "low", "high"),
    [
        ("tilelang", "float32", 0.9, 1.2),
        ("torch", "float32", 0.9, 1.2),
        ("tilelang", "bfloat16", 0.45, 0.9),
    ],
)
def test_peak_memory_of_a_load_is_about_what_stays(folder, backend, dtype, low, high):
    size = (folder / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", SCRIPT, str(folder), backend, dtype]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert low * size < peak < high * size
