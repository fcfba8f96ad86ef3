"""The scaling benchmark on a CPU, in small."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minifused import ops
from minifused.benchmark import clock, records, scaling_suite
from minifused.benchmark.model_suite import Subject
from minifused.benchmark.records import OURS, Journal, Record, Spread
from minifused.benchmark.scaling_suite import DecodeCase, LengthCase, decode_cases, scaling_cases
from minifused.benchmark.suite import Setting, Unavailable, WrongResultError, make_record, run_cases
from minifused.config import PRESETS, GPTConfig
from minifused.parity import eager_attention
from minifused.workloads import AttentionWorkload

SCHEMA = Path(records.__file__).with_name("schema.json")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MACHINE = {"device": "cpu", "name": "Test", "versions": {"torch": "2"}, "commit": None}
CONFIG = GPTConfig(vocab_size=256, n_positions=128, n_embd=40, n_layer=1, n_head=2)
TINY = Subject("tiny", CONFIG)


def make_setting(journal=None):
    journal = journal or Journal(None, resume=False)
    return Setting(CPU, torch.float32, 2, journal, MACHINE, 1e10, 1e11)


def length_case(length, device=CPU):
    return LengthCase("attention", AttentionWorkload("length", 1, length, length, 2, 8), device)


def run(cases):
    """Records of the cases through a journal, each of them valid."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    setting = make_setting()
    run_cases(cases, setting)
    values = [json.loads(json.dumps(r.to_dict(), allow_nan=False)) for r in setting.journal.records]
    for value in values:
        validator.validate(value)
    return [Record.from_dict(value) for value in values]


def test_lengths():
    found = run([length_case(65), length_case(130)])
    assert [(r.shape["length"], r.contender) for r in found] == [
        (length, name) for length in (65, 130) for name in (OURS, "SDPA", "torch eager")
    ]
    for r in found:
        assert r.status == "ok" and r.shape["sweep"] == "length"
        assert set(r.metrics) == {"time_us"} and r.metrics["time_us"].median > 0
        assert 0 <= r.check["rms_error"] < 1e-6


def test_decoding_over_batch_and_context():
    cases = decode_cases(TINY, (OURS, "torch eager"), (1, 2), 24, (8, 47))
    found = run(cases)
    assert len(found) == 2 * len(cases) == 8
    sizes = {(r.shape["sweep"], r.shape["batch"], r.shape["context"]) for r in found}
    assert sizes == {("batch", 1, 24), ("batch", 2, 24), ("context", 1, 8), ("context", 1, 47)}
    for r in found:
        assert r.suite == "scaling" and r.status == "ok", r.reason
        assert r.metrics["ms_per_token"].median > 0
        assert r.shape["new_tokens"] == 33 and r.check["rms_error"] < 1e-5


def test_explicit_attention_is_attention(monkeypatch):
    workload = AttentionWorkload("", 2, 33, 33, 3, 8)
    inputs = workload.inputs(CPU, torch.float64, torch.Generator().manual_seed(0))
    expected = eager_attention(**inputs)
    torch.testing.assert_close(scaling_suite.explicit_attention(**inputs), expected)
    monkeypatch.setattr(scaling_suite, "MAX_EXPLICIT_LENGTH", 32)
    with pytest.raises(Unavailable, match="quadratically"):
        scaling_suite.explicit_attention(**inputs)


def test_a_length_that_is_left_out_is_told(monkeypatch):
    monkeypatch.setattr(scaling_suite, "MAX_EXPLICIT_LENGTH", 64)
    by_name = {r.contender: r for r in run([length_case(65)])}
    assert by_name["torch eager"].status == "skipped"
    assert "quadratically" in by_name["torch eager"].reason
    assert by_name[OURS].status == by_name["SDPA"].status == "ok"


def test_a_wrong_attention_is_never_timed(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("timed before the check")

    attention = ops.attention

    def wrong(*args, out=None, **kwargs):
        result = attention(*args, **kwargs) * 1.01
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(clock, "in_turns", refuse)
    monkeypatch.setattr(ops, "attention", wrong)
    with pytest.raises(WrongResultError, match=r"^attention length, 1x65:65x2x8"):
        list(length_case(65).run(make_setting()))


@pytest.mark.parametrize(("mib", "linear"), [(8.5, True), (9.7, True), (9.9, False), (64.0, False)])
def test_memory_is_held_against_the_shortest_length(mib, linear):
    """2 MiB at 512 positions: at 2048 a linear kernel needs 8, and is given a tenth more and 1."""
    setting, case = make_setting(), length_case(512)
    others = {"other dtype": {"dtype": "bfloat16"}, "rival": {"contender": "SDPA flash"}}
    for changes in ({}, *others.values()):
        peak = Spread.exact(0.1 if changes else 2.0)
        record = make_record(setting, case, OURS, case.shape(torch.float32), {
            "peak_memory_mib": peak
        }, {})  # fmt: skip
        setting.journal.append(replace(record, **changes))
    assert length_case(2048).is_linear(mib, setting) is linear
    assert length_case(512).is_linear(2.0, setting)


def test_resume_skips_what_is_done(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    cases = [length_case(65), length_case(70)]
    run_cases(cases[:1], make_setting(Journal(path, resume=False)))
    ran, case_run = [], LengthCase.run
    monkeypatch.setattr(
        LengthCase, "run", lambda self, setting: ran.append(self.name) or case_run(self, setting)
    )
    journal = Journal(path, resume=True)
    run_cases(cases, make_setting(journal))
    assert ran == [cases[1].name] and len(journal.records) == 6


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("quick", [False, True])
def test_cases(device, quick):
    cases = scaling_cases(device, quick)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    decoding = [case for case in cases if isinstance(case, DecodeCase)]
    for case in decoding:
        case.require_room()
    lengths = [case.length for case in cases if isinstance(case, LengthCase)]
    if quick or device == CPU:
        assert lengths == [512, 1024, 2048]
    else:
        assert lengths[0] == 512 and lengths[-1] == 32768
        assert {case.subject.config for case in decoding} == {PRESETS["gpt2"]}
        assert all(tuple(case.contenders) == ("minifused", "torch eager") for case in decoding)
        compiled = scaling_cases(device, quick, ("minifused", "torch.compile"))[-1]
        assert tuple(compiled.contenders) == ("minifused", "torch.compile")
        sweep = [case.batch for case in decoding if case.sweep == "batch"]
        assert sweep == [1, 4, 16, 64, 256]
        assert max(case.capacity for case in decoding) == 1024
