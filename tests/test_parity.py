"""Parity passes as it stands, and each fault planted in a kernel makes it fail."""

import importlib.util
import itertools
import json
import math
import runpy
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from minifused import checkpoint, ops, parity, workloads
from minifused.errors import run_cli
from minifused.metrics import Errors
from minifused.model import GPTModel
from minifused.workloads import AttentionWorkload, LinearWorkload

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "parity.py"))
CPU = torch.device("cpu")

# Kernel file, its text, the text with the fault, and the named shape that catches it.
FAULTS = {
    "dropped_bias": ("gemm", "if has_bias:", "if False:", "first gemm"),
    "erf_for_tanh_gelu": ("gemm", "activation, acc", '"gelu", acc', "first gemm"),
    "last_k_tile_skipped": ("gemm", "T.ceildiv(k, block_k)", "k // block_k", "first gemm"),
    "last_row_unwritten": ("gemm", "T.ceildiv(m,", "T.ceildiv(m - 1,", "tails in M N K"),
    "mask_off_by_one": ("flash_attention", "q_valid + 1", "q_valid + 2", "chunk"),
    "top_left_alignment": ("flash_attention", "kv_valid - q_valid + 1", "1", "chunk"),
    "k_and_v_swapped": ("flash_attention", "(3, 1, 2) if", "(3, 2, 1) if", "packed"),
    "scale_by_padded_head_size": (
        "flash_attention",
        "= scale * math",
        "= (-(-head_dim // 16) * 16) ** -0.5 * math",
        "head size of 20",
    ),
    "stale_cache_slot": ("append_kv", "length, T.ceildiv", "length - 1, T.ceildiv", "one token"),
}
FAMILIES = {"gemm": "linear", "flash_attention": "attention", "append_kv": "append_kv"}


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """A function that puts a kernel file with one piece of its text replaced to work."""

    def plant(name, text, fault):
        source = (ROOT / "kernels" / f"{name}.py").read_text()
        assert source.count(text) == 1, f"kernels/{name}.py has changed: plant {text!r} anew"
        path = tmp_path / f"faulty_{name}.py"
        path.write_text(source.replace(text, fault))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(ops, f"{name}_kernel", getattr(module, name))

    return plant


def results_of(family, name=None, dtype=torch.float32):
    """Results of a family on the CPU: on all its shapes, or on those called `name`."""
    check, shapes, _ = parity.OPERATIONS[family]
    chosen = [shape for shape in shapes if name in (None, shape.name)]
    return [result for shape in chosen for result in check(shape, CPU, dtype)]


def load_demo():
    config = checkpoint.load_config(parity.DEMO_FOLDER)
    weights = checkpoint.load_weights(parity.DEMO_FOLDER, config)
    return parity.load_models(config, weights, CPU, torch.float32)


demo = pytest.fixture(load_demo, scope="module")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault, plant):
    kernel, text, planted, name = FAULTS[fault]
    family = FAMILIES[kernel]
    clean = results_of(family, name)
    plant(kernel, text, planted)
    faulty = results_of(family, name)
    assert clean and all(result.ok for result in clean)
    assert not all(result.ok for result in faulty)
    worst = max(faulty, key=lambda result: result.rms_error / (result.bound or 1))
    assert not worst.rms_error <= 100 * worst.bound  # caught by far, or NaN


def tf32(x):
    """x with the 10 mantissa bits that a tensor core leaves of a float32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(("launcher", "name"), [("skinny_gemm", "head"), ("gemm", "into residual")])
def test_a_single_tf32_product_is_caught(launcher, name, monkeypatch):
    launch = getattr(ops, f"{launcher}_kernel")
    clean = results_of("linear", name)
    monkeypatch.setattr(
        ops, f"{launcher}_kernel", lambda x, weight, *rest: launch(tf32(x), tf32(weight), *rest)
    )
    faulty = results_of("linear", name)
    assert all(result.ok for result in clean) and not all(result.ok for result in faulty)
    assert max(result.rms_error for result in faulty) < 1e-3  # it looks like nothing at all


def test_the_model_passes():
    with ThreadPoolExecutor() as pool:  # their compilations overlap
        lists = pool.map(lambda check: list(check(load_demo())), parity.MODEL_CHECKS.values())
    results = list(itertools.chain(*lists))
    assert all(result.ok for result in results)
    counts = {name: sum(r.check == name for r in results) for name in ("layer", "logits")}
    assert counts == {"layer": 6, "logits": 1}
    cached = [result.case for result in results if result.check == "cached"]
    assert cached[:8] == [f"{n - 1} + 1" for n in (1, 2, 63, 64, 65, 127, 128, 129)]
    assert cached[8] == "3 + 4 + 1"
    assert results[-1].check == "greedy" and results[-1].case == "64 tokens"


def test_a_stale_cache_slot_is_caught_in_the_model(demo, plant):
    plant(*FAULTS["stale_cache_slot"][:3])
    assert not any(result.ok for result in parity.check_cached(demo))
    [greedy] = parity.check_greedy(demo)
    assert not greedy.ok and "step 1 (margin" in greedy.note


def test_a_fault_of_one_layer_is_located(demo):
    weights = {name: w.clone() for name, w in demo.eager.state_dict().items()}
    weights["h.3.mlp.c_proj.bias"][5] += 0.01
    config = demo.fused.config
    models = parity.Models(
        torch.float32, GPTModel.from_weights(config, weights), demo.eager, demo.exact, demo.tokens
    )
    failed = [result.case for result in parity.check_forward(models) if not result.ok]
    assert failed == ["h.3", "h.4", "h.5", "256 tokens"]


class Scripted:
    """A model whose logits are a table by the last token."""

    def __init__(self, table):
        self.table, self.config = table, types.SimpleNamespace(n_positions=99)

    def new_cache(self, batch_size, capacity):
        return None

    def __call__(self, tokens, cache=None, last_only=False):
        return self.table[tokens]


def greedy_of_scripted(dtype, gap, error):
    """The greedy check where float64 puts token 1 `gap` below token 0, and fused prefers it."""
    exact = torch.tensor([[8.0, 8.0 - gap, 0.0]] * 3, dtype=torch.float64)
    eager = exact + error * torch.tensor([1.0, -1.0, 1.0])
    fused = exact + torch.tensor([-0.51, 0.51, 0.0]) * gap
    tokens = torch.zeros(1, 70, dtype=torch.int64)
    models = parity.Models(dtype, Scripted(fused), Scripted(eager), Scripted(exact), tokens)
    return next(parity.check_greedy(models))


def test_a_near_tie_may_differ_in_16_bits_alone_and_is_shown():
    tie = greedy_of_scripted(torch.bfloat16, gap=0.01, error=0.01)
    assert tie.ok and "near-ties" in tie.note and "step 0 (margin 1.0e-02)" in tie.note
    same = greedy_of_scripted(torch.float32, gap=0.01, error=0.01)
    assert not same.ok and "other tokens than the twin's" in same.note
    assert "step 63" in same.note
    far = greedy_of_scripted(torch.bfloat16, gap=0.5, error=0.01)
    assert not far.ok and "step 0 (margin 5.0e-01)" in far.note


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_dtypes_run_on_a_cpu(dtype):
    results = [r for family in ("append_kv", "layer_norm") for r in results_of(family, dtype=dtype)]
    assert all(result.ok for result in results)
    assert {result.dtype for result in results} == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize(
    ("errors", "note"),
    [
        (Errors(max=math.nan, rms=math.nan), "NaN or infinity"),
        (Errors(max=math.inf, rms=math.inf), "NaN or infinity"),
        (Errors(max=1.0, rms=1.0), "RMS error"),
        (Errors(max=0.1, rms=1e-3), "an error over 1.2e-02"),
    ],
)
def test_a_verdict_says_why(errors, note):
    result = parity.judge("x", "y", torch.float32, errors, Errors(max=4e-3, rms=1e-3))
    assert not result.ok and result.note.startswith(note)


def test_eager_attention_aligns_bottom_right():
    q, v = torch.zeros(1, 2, 1, 4), torch.arange(1.0, 6.0).view(1, 5, 1, 1).expand(1, 5, 1, 4)
    chunk = parity.eager_attention(q, torch.zeros_like(v), v)
    assert chunk[0, :, 0, 0].tolist() == [2.5, 3.0]
    alone = parity.eager_attention(torch.zeros(1, 4, 1, 4), torch.zeros(1, 2, 1, 4), v[:, :2])
    assert alone[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.5]


def test_eager_attention_with_lengths_is_each_row_alone():
    shape = AttentionWorkload("", 2, 7, 9, 2, 8, q_lengths=(3, 7), kv_lengths=(5, 9))
    inputs = shape.inputs(CPU, torch.float32, torch.Generator().manual_seed(0))
    out = parity.eager_attention(**inputs)
    for row, (q_len, k_len) in enumerate(((3, 5), (7, 9))):
        q, k, v = (
            inputs[name][row : row + 1, :length]
            for name, length in (("q", q_len), ("k", k_len), ("v", k_len))
        )
        torch.testing.assert_close(out[row : row + 1, :q_len], parity.eager_attention(q, k, v))
        assert not out[row, q_len:].any()


def test_work_is_counted():
    linear = LinearWorkload("", 3, 5, 7, residual=True, out_dtype=torch.float32)
    assert linear.flops == 2 * 3 * 5 * 7
    assert linear.bytes(torch.float16) == 2 * (3 * 7 + 5 * 7 + 5) + 4 * 2 * 3 * 5
    chunk = AttentionWorkload("", 2, 3, 5, 4, 8)
    assert chunk.flops == 4 * 2 * 4 * 8 * (3 + 4 + 5)
    assert chunk.bytes(torch.float32) == 4 * 2 * (2 * 3 + 2 * 5) * 4 * 8
    hidden = AttentionWorkload("", 1, 4, 2, 1, 8)  # two queries see no key
    assert hidden.flops == 4 * 8 * (1 + 2)
    decode = workloads.DecodeWorkload("", (3, 5), 9, 2, 8)
    assert decode.flops == 4 * 8 * 2 * 8 and decode.bytes(torch.float16) == 2 * 2 * 8 * (16 + 4)
    append = workloads.AppendWorkload("", (0, 8), 3, 9, 2, 8)  # two of six rows do not fit
    assert append.bytes(torch.float32) == 4 * 4 * 4 * 2 * 8
    softmax = workloads.SoftmaxWorkload("", 2, 10, valid=7)
    assert softmax.flops == 5 * 14 and softmax.bytes(torch.float16) == 2 * 2 * 17
    norm = workloads.LayerNormWorkload("", 2, 10)
    assert norm.flops == 160 and norm.bytes(torch.float16) == 4 * 20 + 2 * (20 + 20)


def test_workloads_repeat_and_reach_each_dtype():
    for _, shapes, _ in parity.OPERATIONS.values():
        first, again = (
            shapes[0].inputs(CPU, torch.bfloat16, torch.Generator().manual_seed(1))
            for _ in range(2)
        )
        for name, value in first.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.nan_to_num(), again[name].nan_to_num())
        assert any(
            isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16 for v in first.values()
        )


def test_linear_layers_of_a_model_multiply_out_to_its_forward_pass():
    config = checkpoint.load_config(parity.DEMO_FOLDER)
    shapes = workloads.layer_linears(config, rows=5)
    in_block = {(s.n, s.k) for s in shapes[:-1]}
    expected = checkpoint.expected_shapes(config)
    assert in_block == {
        shape for name, shape in expected.items() if name.startswith("h.0") and len(shape) == 2
    }
    assert (shapes[-1].n, shapes[-1].k) == expected["wte.weight"]
    assert {s.m for s in shapes} == {5}


def main(*flags):
    return SCRIPT["main"](["--device=cpu", *flags])


CHEAP = ("--check=append_kv", "--check=layer_norm")


def test_the_script_prints_a_table_and_returns_0(capsys):
    assert main(*CHEAP) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["check", "case", "dtype"]
    assert lines[-1] == f"{len(lines) - 2} comparisons on cpu, 0 past their bound"
    assert all(line.split("  ")[-1].strip() == "ok" for line in lines[1:-1])
    assert len({line.index("float32") for line in lines[1:-1]}) == 1


def test_the_script_prints_one_strict_json_document(capsys):
    assert main("--json", *CHEAP) == 0

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert set(document) == {"device", "torch", "tilelang", "model", "failed", "results"}
    assert document["failed"] == 0 and len(document["results"]) == 8
    fields = set(parity.Result.__dataclass_fields__)
    assert all(set(result) == fields for result in document["results"])
    exact = document["results"][0]
    assert exact["check"] == "append_kv" and exact["ratio"] is None and exact["ok"] is True


def test_a_fault_exits_with_1(plant, capsys):
    plant(*FAULTS["stale_cache_slot"][:3])
    with pytest.raises(SystemExit) as end:
        run_cli(lambda: main("--check=append_kv"))
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("FAIL RMS error" in line for line in lines) == 3
    assert lines[-1] == "3 comparisons on cpu, 3 past their bound"


def test_json_of_an_unwritten_output_is_still_strict(monkeypatch, capsys):
    monkeypatch.setattr(ops, "layer_norm_kernel", lambda *arguments: None)
    assert main("--json", "--check=layer_norm") == 1
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["failed"] == len(document["results"]) == 5
    first = document["results"][0]
    assert first["rms_error"] is None and first["ok"] is False
    assert first["note"] == "NaN or infinity"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model=absent"], "absent: no such folder"),
        (["--device=cuda"], "--device cuda: PyTorch sees no GPU; use --device cpu"),
    ],
)
def test_mistakes_exit_with_2(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        run_cli(lambda: main(*flags))
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"error: {said}" in captured.err


@pytest.mark.parametrize("flag", ["--dtype=float64", "--check=nothing", "--device=tpu"])
def test_unknown_choices_exit_with_2(flag, capsys):
    with pytest.raises(SystemExit) as end:
        main(flag)
    assert end.value.code == 2 and "invalid choice" in capsys.readouterr().err


def test_dtypes_default_to_what_the_device_computes_in():
    pick, cuda = SCRIPT["pick_dtypes"], torch.device("cuda")
    every = [torch.float32, torch.float16, torch.bfloat16]
    assert pick(None, CPU) == [torch.float32] and pick(None, cuda) == every
    assert pick(["all"], CPU) == every
    assert pick(["bfloat16", "float16", "bfloat16"], cuda) == every[1:]


def test_float32_is_never_tf32_while_parity_runs():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        running = parity.run(CPU, [torch.float32], checks=["append_kv"])
        next(running)
        assert torch.get_float32_matmul_precision() == "highest"
        running.close()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
