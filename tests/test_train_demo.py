"""The training script, on a text and a model small enough for seconds."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from minifused import checkpoint
from minifused.errors import run_cli
from minifused.twin import Twin

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "train_demo.py"))
SENTENCE = b"the quick brown fox jumps over the lazy dog. "
TINY = ["--n-layer=1", "--n-embd=64", "--n-positions=32", "--batch-size=8", "--eval-every=20"]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_bytes(SENTENCE * 50 + SENTENCE[:13])
    return tmp_path / "text"


def train(text, out, *flags):
    SCRIPT["main"](["--text", str(text), "--out", str(out), "--device=cpu", *TINY, *flags])


def loss_by_hand(folder, data):
    """Nats per byte of the weights in `folder`, one window at a time."""
    config = checkpoint.load_config(folder)
    twin = Twin(config).eval()
    twin.load_state_dict(checkpoint.load_weights(folder, config))
    losses = []
    for start in range(0, len(data), config.n_positions):
        window = torch.tensor(list(data[start : start + config.n_positions]))[None]
        if window.shape[1] > 1:
            with torch.no_grad():
                logits = twin(window[:, :-1])[0]
            losses.append(F.cross_entropy(logits, window[0, 1:], reduction="none"))
    return torch.cat(losses).double().mean().item()


def test_trains_and_saves_what_it_reports(text, tmp_path, capsys):
    train(text, tmp_path / "out", "--steps=60")
    line = capsys.readouterr().out
    data = text.read_bytes()
    loss = loss_by_hand(tmp_path / "out", data[len(data) * 9 // 10 :])
    assert line.count("\n") == 1 and f"validation loss {loss:.4f} nats per byte" in line
    assert "68,544 parameters, 60 steps" in line
    assert loss < 2.7  # uniform guessing costs 5.55, the frequencies of the letters 3.05


def test_weights_are_float16_with_their_config(text, tmp_path):
    train(text, tmp_path / "out", "--steps=2", "--dropout=0.25")
    config = checkpoint.load_config(tmp_path / "out")
    assert (config.vocab_size, config.n_head, config.head_dim) == (256, 1, 64)
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.25,) * 3
    weights = checkpoint.load_weights(tmp_path / "out", config)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}


def test_a_seed_repeats_every_bit(text, tmp_path):
    flags = {"a": "--seed=1", "b": "--seed=1", "c": "--seed=2"}
    for name, flag in flags.items():
        train(text, tmp_path / name, "--steps=3", flag)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in flags)
    assert a == b and a != c


def test_best_weights_are_kept(text, tmp_path, capsys, monkeypatch):
    """Later evaluations that are worse change nothing of what is saved."""
    losses = iter([1.5, 9.0, float("nan")])
    seen = []

    def fake_validate(average, data):
        seen.append(average.ln_f.weight.half().clone())
        return next(losses)

    monkeypatch.setitem(SCRIPT["train"].__globals__, "validate", fake_validate)
    train(text, tmp_path / "out", "--steps=6", "--eval-every=2")
    config = checkpoint.load_config(tmp_path / "out")
    saved = checkpoint.load_weights(tmp_path / "out", config)["ln_f.weight"]
    assert len(seen) == 3 and torch.equal(saved, seen[0]) and not torch.equal(saved, seen[2])
    assert "validation loss 1.5000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text=absent"], "--text absent: No such file"),
        (["--text=."], "--text .: Is a directory"),
        (["--n-embd=100"], "--n-embd is 100; give a multiple of the head size 64"),
        (["--n-positions=1000"], "2,263 bytes; give a text of at least 10,010"),
        (["--steps=0"], "--steps must be at least 1"),
        (["--dropout=2"], "embd_pdrop is 2.0"),
        (["--steps=2", "--learning-rate=nan"], "--learning-rate must be"),
    ],
)
def test_mistakes_exit_with_2_and_save_nothing(text, tmp_path, capsys, flags, said):
    with pytest.raises(SystemExit) as end:
        run_cli(lambda: train(text, tmp_path / "out", *flags))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_that_diverges_saves_nothing(text, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_cli(lambda: train(text, tmp_path / "out", "--steps=12", "--learning-rate=1e30"))
    assert end.value.code == 2 and "diverged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
