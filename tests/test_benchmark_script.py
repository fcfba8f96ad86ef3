"""benchmark.py from its command line: what it prints and writes, and how it ends."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from minifused import ops
from minifused.benchmark import clock, model_suite, records
from minifused.errors import UserError

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "benchmark.py"))
SMALL = ["model", "--quick", "--device=cpu", "--contender=torch eager", "--rounds=2"]


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    """Ceilings take seconds to measure, and the thread count is the whole process's."""
    monkeypatch.setattr(clock, "copy_bytes_per_s", lambda device: 1e10)
    monkeypatch.setattr(clock, "matmul_flops_per_s", lambda device, dtype: 1e11)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def main(*flags):
    return SCRIPT["main"]([str(flag) for flag in flags])


def test_a_run_prints_a_table_and_json_is_the_last_line(capsys):
    assert main(*SMALL) == 0
    out = capsys.readouterr().out
    assert "demo, batch 1, 64 + 32 tokens" in out and "torch eager" in out
    assert main(*SMALL, "--json=-") == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [record["contender"] for record in document["records"]]
    assert names == ["minifused", "torch eager"]
    assert document["records"][0]["metrics"]["ms_per_token"]["count"] == 2


def test_sizes_that_are_asked_for_are_run_in_small_runs_too(capsys):
    assert main(*SMALL, "--prompt=256", "--new-tokens=1") == 0
    out = capsys.readouterr().out
    assert "demo, batch 1, 256 + 1 tokens" in out and "ms/token " not in out


def test_records_are_kept_resumed_and_shown_again(capsys, tmp_path, monkeypatch):
    file = tmp_path / "records.jsonl"
    assert main(*SMALL, "--json", file) == 0
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    with pytest.raises(UserError, match="--resume"):  # nothing is written over
        main(*SMALL, "--json", file)
    monkeypatch.setattr(model_suite.ModelCase, "run", None)  # what is there is not run again
    assert main(*SMALL, "--resume", file) == 0
    assert file.read_text().splitlines() == lines
    table = capsys.readouterr().out.splitlines()[-3:]
    assert main("--from-json", file, "--markdown") == 0
    assert "| minifused " in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main("--from-json", file, "--plot", tmp_path / "plots") == 0
    out, talk = capsys.readouterr()
    assert out.splitlines()[-3:] == table
    charts = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert charts == ["decode-demo-float32.png", "first-token-demo-float32.png"]
    assert all(f"{name}\n" in talk for name in charts)


def test_a_wrong_kernel_ends_it_before_timing(capsys, tmp_path, monkeypatch):
    norm_linear = ops.norm_linear
    monkeypatch.setattr(ops, "norm_linear", lambda *a, **k: norm_linear(*a, **k) * 1.01)
    monkeypatch.setattr(clock, "in_turns", None)
    file = tmp_path / "records.jsonl"
    assert main(*SMALL, "--json", file) == 1
    out, talk = capsys.readouterr()
    assert "stopped before timing: minifused is past its bound" in talk and out == ""
    assert not file.exists() or file.read_text() == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["model", "--device=cpu", "--model=/nowhere"], "no such folder"),
        (["--from-json=/nowhere/records"], "/nowhere/records"),
        (["model", "--resume=a", "--json=b"], "leave --json FILE out"),
        (["kernels", "--rounds=0"], "--rounds is 0"),
    ],
)
def test_a_users_mistake(flags, said):
    with pytest.raises(UserError, match=said):
        main(*flags)


@pytest.mark.parametrize("flags", [[], ["nothing"], ["kernels", "--op=x"], ["model", "--preset=x"]])
def test_wrong_flags_exit_with_2(flags, capsys):
    with pytest.raises(SystemExit) as end:
        main(*flags)
    assert end.value.code == 2 and "usage:" in capsys.readouterr().err


def test_a_sweep_is_all_combinations(monkeypatch):
    seen = []
    globals_ = SCRIPT["main"].__globals__
    monkeypatch.setitem(globals_, "run_cases", lambda cases, setting: seen.append((cases, setting)))
    monkeypatch.setitem(globals_, "resolve_device", lambda name: torch.device("meta"))
    monkeypatch.setitem(globals_, "machine_info", lambda device: {})
    sizes = ["--preset", "gpt2", "gpt2-xl", "--batch", "1", "8", "--prompt", "64", "128"]
    assert main("model", *sizes, "--new-tokens", "32", "--dtype=float16", "--dtype=float32") == 0
    assert [setting.dtype for _, setting in seen] == [torch.float16, torch.float32]
    cases = seen[0][0]
    assert [(c.subject.name, c.batch, c.prompt, c.new_tokens) for c in cases] == [
        (name, batch, prompt, 32)
        for name in ("gpt2", "gpt2-xl")
        for batch in (1, 8)
        for prompt in (64, 128)
    ]
    assert all(case.contenders == list(SCRIPT["CONTENDERS"]) for case in cases)
    assert cases[0].contenders[0] == records.OURS
