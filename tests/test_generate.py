"""generate.py through its main(), on the bundled model."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minifused import checkpoint, ops
from minifused.config import GPTConfig
from minifused.engine import DEMO_FOLDER, GPT
from minifused.errors import UserError, run_cli
from minifused.sampling import SamplingParams
from minifused.twin import Twin

SCRIPT_FILE = Path(__file__).parents[1] / "scripts" / "generate.py"
SCRIPT = runpy.run_path(str(SCRIPT_FILE))
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def generate(capsys, *flags):
    """What --json prints for some flags."""
    SCRIPT["main"]([*flags, "--device=cpu", "--json"])
    return json.loads(capsys.readouterr().out)


def fails(capsys, *flags):
    """The one line on stderr of a run that has to exit with code 2."""
    with pytest.raises(SystemExit) as exit_:
        run_cli(lambda: SCRIPT["main"](list(flags)))
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


def test_streams_the_prompt_and_what_follows(capsys):
    SCRIPT["main"](["--prompt=JULIET:\n", "--max-new-tokens=40", "--device=cpu"])
    text, talk = capsys.readouterr()
    assert text.startswith("JULIET:\n") and len(text) == len("JULIET:\n") + 40 + 1
    last = talk.strip().splitlines()[-1]
    for part in ("first token", "ms per token", "tokens/s", "compile"):
        assert part in last


def test_writes_words(capsys):
    text = generate(capsys, "--max-new-tokens=240")["completions"][0]["text"]
    words = text.lower().replace(",", " ").replace(".", " ").split()
    common = {"the", "and", "to", "i", "of", "you", "my", "a", "that", "in", "is", "not", "thou"}
    assert len(words) > 25 and sum(word in common for word in words) > len(words) / 10


def test_verbose_names_the_kernels_of_a_step(capsys):
    SCRIPT["main"](["--verbose", "--max-new-tokens=2", "--device=cpu"])
    text, talk = capsys.readouterr()
    assert "mlp.c_fc" not in text
    assert [line.split()[:2] for line in talk.splitlines() if line.startswith("mlp.c_fc")] == [
        ["mlp.c_fc", "skinny_gemm"]
    ]
    SCRIPT["main"](["--verbose", "--max-new-tokens=2", "--device=cpu", "--backend=torch"])
    assert "no kernels" in capsys.readouterr().err


def test_json_document(capsys):
    out = generate(capsys, "--max-new-tokens=5", "--num-samples=2", "--seed=3", "--top-k=9")
    assert set(out) == {"model", "backend", "device", "dtype", "temperature", "top_k", "top_p",
                        "min_p", "repetition_penalty", "seed", "stop", "completions",
                        "timing"}  # fmt: skip
    assert (out["backend"], out["device"], out["dtype"]) == ("tilelang", "cpu", "float32")
    assert (out["seed"], out["top_k"], out["temperature"]) == (3, 9, 0.8)
    assert [c["sample"] for c in out["completions"]] == [0, 1]
    for sample in out["completions"]:
        assert bytes(sample["tokens"]).decode(errors="replace") == sample["text"]
        assert len(sample["tokens"]) == 5 and sample["finish_reason"] == "length"
        assert sample["prompt"] == "ROMEO:\n" and sample["logprobs"] is None
    timing = out["timing"]
    assert timing["steps"] == 5 and timing["tokens"] == 10
    assert timing["first_token_seconds"] > 0 and timing["ms_per_token"] > 0


def test_both_backends_write_the_same_text(capsys):
    flags = ["--max-new-tokens=64", "--seed=5", "--num-samples=2"]
    fused = generate(capsys, *flags)["completions"]
    twin = generate(capsys, *flags, "--backend=torch")["completions"]
    assert fused == twin
    assert fused[0] != fused[1]


def test_a_sample_is_the_same_in_any_batch_and_at_any_time(capsys):
    one = generate(capsys, "--max-new-tokens=30", "--seed=7")["completions"]
    four = generate(capsys, "--max-new-tokens=30", "--seed=7", "--num-samples=4")["completions"]
    assert one[0] == four[0]
    assert len({sample["text"] for sample in four}) == 4
    assert generate(capsys, "--max-new-tokens=30", "--seed=7")["completions"] == one
    assert generate(capsys, "--max-new-tokens=30", "--seed=8")["completions"] != one


def test_temperature_0_or_nearly_and_top_k_1_are_greedy(capsys):
    cold = generate(capsys, "--max-new-tokens=20", "--temperature=0")["completions"]
    for flag in ("--top-k=1", "--temperature=1e-6", "--temperature=1e-300"):
        assert generate(capsys, "--max-new-tokens=20", flag, "--seed=9")["completions"] == cold


def test_global_random_state_is_untouched(capsys):
    state = torch.random.get_rng_state()
    generate(capsys, "--max-new-tokens=3")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_prompt_file(capsys, tmp_path):
    (tmp_path / "prompts").write_text("JULIET: Ó \nROMEO:\n", encoding="utf-8")
    out = generate(capsys, "--prompt-file", str(tmp_path / "prompts"), "--max-new-tokens=1")
    assert [c["prompt"] for c in out["completions"]] == ["JULIET: Ó ", "ROMEO:"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\nb"}\n{"prompt": "c"}\n')
    out = generate(capsys, "--prompt-file", str(tmp_path / "p.jsonl"), "--max-new-tokens=1")
    assert [c["prompt"] for c in out["completions"]] == ["a\nb", "c"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": 1}\n')
    assert "line 2" in fails(capsys, "--prompt-file", str(tmp_path / "p.jsonl"), "--device=cpu")


def test_stops_where_the_context_ends(capsys):
    flags = ["--prompt", "x" * 250, "--max-new-tokens=50"]
    out = generate(capsys, *flags)
    assert out["timing"]["steps"] == 256 - 250 + 1  # the last token needs no position
    assert out["completions"][0]["finish_reason"] == "context"
    full = generate(capsys, "--prompt", "x" * 256, "--max-new-tokens=50")
    assert full["timing"]["steps"] == 1
    SCRIPT["main"]([*flags, "--device=cpu"])
    assert "context of 256" in capsys.readouterr().err


def test_truncate_left_leaves_room_for_the_new_tokens(capsys):
    prompt = "".join(chr(97 + i % 23) for i in range(300))
    flags = ["--max-new-tokens=50", "--truncate=left"]
    SCRIPT["main"](["--prompt", prompt, *flags, "--device=cpu", "--json"])
    out, talk = capsys.readouterr()
    (done,) = json.loads(out)["completions"]
    kept = 256 - 50 + 1  # the last token needs no position
    assert "note: dropped the first 93 tokens of a prompt" in talk and kept == 300 - 93
    assert len(done["tokens"]) == 50 and done["finish_reason"] == "length"
    (short,) = generate(capsys, "--prompt", prompt[-kept:], *flags)["completions"]
    assert short["tokens"] == done["tokens"]
    SCRIPT["main"](["--prompt", prompt[-kept:], *flags, "--device=cpu"])
    assert "dropped" not in capsys.readouterr().err


def test_ignore_eos_runs_on(capsys, tmp_path):
    (free,) = generate(capsys, "--max-new-tokens=20")["completions"]
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    config["eos_token_id"] = eos = free["tokens"][7]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(DEMO_FOLDER / "model.safetensors")
    flags = ["--model", str(tmp_path), "--max-new-tokens=20"]
    (done,) = generate(capsys, *flags)["completions"]
    assert done["tokens"] == free["tokens"][: free["tokens"].index(eos)]
    assert done["finish_reason"] == "eos"
    assert generate(capsys, *flags, "--ignore-eos")["completions"] == [free]


def test_16_bit_weights_run_on_a_cpu(capsys):
    ops._warn_of_cast.cache_clear()  # another test may have been the first to be warned
    with pytest.warns(UserWarning, match="float32"):
        out = generate(capsys, "--max-new-tokens=2", "--dtype=bfloat16")
    assert out["dtype"] == "bfloat16" and out["timing"]["steps"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens=0"], "--max-new-tokens is 0"),
        (["--num-samples=0"], "--num-samples is 0"),
        (["--temperature=-1"], "temperature"),
        (["--top-k=-1"], "top_k"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--dtype=float8"], "invalid choice"),
        (["--prompt="], "prompt is empty"),
        (["--prompt", "x" * 257], "257 tokens but the model's context 256"),
        (["--model=/no/such/folder"], "/no/such/folder"),
        (["--prompt-file=/no/such/file"], "/no/such/file"),
    ],
    ids=lambda value: value[0][:20] if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_line_and_exit_code_2(capsys, flags, message):
    assert message in fails(capsys, *flags, *([] if "--device" in flags else ["--device=cpu"]))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("model.safetensors", None, "no model.safetensors or model.safetensors.index.json"),
        ("model.safetensors", b"\x08\0\0\0", "4 bytes, an incomplete download"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("model.safetensors", b"<!DOCTYPE html>", "15 bytes that look like a web page"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"wte.weight": "model-1.safetensors"}}',
            "model-1.safetensors: named by model.safetensors.index.json, but missing",
        ),
    ],
    ids=["none", "four-bytes", "lfs", "html", "missing-shard"],
)
def test_a_broken_model_folder_is_one_line_and_exit_code_2(capsys, tmp_path, name, data, said):
    (tmp_path / "config.json").write_bytes((DEMO_FOLDER / "config.json").read_bytes())
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit) as exit_:
        run_cli(lambda: SCRIPT["main"](["--model", str(tmp_path), "--device=cpu"]))
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == ""
    assert err.startswith(f"error: {tmp_path}") and err.count("\n") == 1 and said in err


@needs_no_gpu
def test_cuda_without_a_gpu(capsys):
    assert "--device cpu" in fails(capsys, "--device=cuda")


def test_weights_that_give_nan_are_named(capsys, tmp_path):
    config = GPTConfig(vocab_size=256, n_positions=16, n_embd=40, n_layer=1, n_head=2)
    twin = Twin(config)
    with torch.no_grad():
        twin.ln_f.weight[0] = float("nan")
    checkpoint.save(tmp_path, config, twin.state_dict())
    flags = ["--model", str(tmp_path), "--prompt=a", "--device=cpu", "--json"]
    assert "step 0, row 0" in fails(capsys, *flags)


def test_a_missing_compiler_is_named(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    environment |= {"PATH": str(tmp_path), "TILELANG_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, str(SCRIPT_FILE), "--device=cpu", "--json"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2 and run.stdout == ""
    assert "no C++ compiler" in run.stderr and "g++" in run.stderr
    assert "Traceback" not in run.stderr


def test_cpu_generation_leaves_cuda_alone_and_transformers_is_imported_on_demand():
    code = (
        "import runpy, sys, torch, minifused.interop;"
        f"runpy.run_path({str(SCRIPT_FILE)!r})['main'](['--device=cpu', '--max-new-tokens=2']);"
        "assert not torch.cuda.is_initialized();"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_generates_on_a_gpu(dtype):
    engine = GPT.from_pretrained(DEMO_FOLDER, "tilelang", "cuda", dtype)
    twin = GPT.from_pretrained(DEMO_FOLDER, "torch", "cuda", dtype)
    params, prompt = SamplingParams(temperature=0), engine.encode("ROMEO:\n")
    fused, plain = (
        [e.completion for e in m.stream([prompt], 64, params)][-1] for m in (engine, twin)
    )
    assert len(set(fused.tokens)) > 8
    if dtype == "float32":
        assert fused == plain


def test_engine_refuses_prompts_by_name():
    engine = GPT.from_pretrained(DEMO_FOLDER, "torch", "cpu")
    with pytest.raises(UserError, match="empty"):
        engine.encode("")
    assert engine.room(engine.encode("abc")) == 254
