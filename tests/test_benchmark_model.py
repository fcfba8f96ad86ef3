"""Whole generations in the benchmark: contenders that agree, and what is made of their times."""

import dataclasses
import functools

import pytest
import torch

from minifused import ops
from minifused.benchmark import clock, model_suite
from minifused.benchmark.contenders import CONTENDERS, Minifused
from minifused.benchmark.model_suite import FORCED_STEPS, ModelCase, Subject
from minifused.benchmark.records import Journal, Record
from minifused.benchmark.suite import Setting, WrongResultError, run_cases
from minifused.benchmark.tables import text_tables
from minifused.config import GPTConfig
from minifused.errors import UserError
from minifused.workloads import decode_bytes, prefill_flops

CPU = torch.device("cpu")
# The width of tests/test_model.py, which compiles its kernels already.
CONFIG = GPTConfig(vocab_size=256, n_positions=128, n_embd=40, n_layer=1, n_head=2)
SUBJECT = Subject("tiny", CONFIG)
OURS_AND_EAGER = ("minifused", "torch eager")


def setting(rounds=2, journal=None):
    machine = {"device": "cpu", "name": "a CPU", "threads": 1, "versions": {}, "commit": None}
    return Setting(CPU, torch.float32, rounds, journal or Journal(None, False), machine, 1e9, 1e10)


def case(*contenders):
    return ModelCase(SUBJECT, 2, 20, 8, contenders or OURS_AND_EAGER)


@pytest.fixture
def no_timing(monkeypatch):
    def fail(*_):
        raise AssertionError("timed what was not right")

    monkeypatch.setattr(clock, "wall_seconds", fail)


def text_of(a_case):
    weights = a_case.subject.weights(CPU, torch.float32)
    return weights, model_suite.Text.choose(a_case, weights, setting())


@pytest.fixture
def traced_only(monkeypatch):
    """torch.compile traces and functionalises as ever; generating C++ would take 10 s."""
    compile_with = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda f, mode, **options: compile_with(f, **options))


@pytest.mark.parametrize("name", CONTENDERS)
def test_each_contender_gives_the_logits_of_float64_and_as_many_tokens_as_asked(name, traced_only):
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    a_case = case(name)
    weights, text = text_of(a_case)
    contender = CONTENDERS[name](CONFIG, weights)
    contender.prepare(a_case.batch, a_case.capacity)
    check = text.check(name, contender, torch.float32)
    assert check["rms_error"] < 2e-6 and check["greedy_difference"] is None
    for count in (1, 8):
        tokens = contender.generate(text.prompts, count)
        assert tokens.shape == (2, count) and tokens.dtype == torch.int64
        assert ((tokens >= 0) & (tokens < 256)).all()
    again = text.check(name, contender, torch.float32)  # generating leaves nothing behind
    assert again["rms_error"] == pytest.approx(check["rms_error"], rel=0.5)


@pytest.mark.parametrize("name", CONTENDERS)
def test_each_contender_reads_a_prompt_that_fills_the_model(name, traced_only):
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    a_case = ModelCase(SUBJECT, 2, CONFIG.n_positions, 1, (name,))
    a_case.require_room()
    assert a_case.capacity == CONFIG.n_positions
    weights, text = text_of(a_case)
    assert text.exact.shape == (2, 1, 256) and torch.equal(text.tokens, text.prompts)
    contender = CONTENDERS[name](CONFIG, weights)
    contender.prepare(a_case.batch, a_case.capacity)
    for _ in range(2):
        check = text.check(name, contender, torch.float32)
        assert check["rms_error"] < 2e-6 and check["decode_steps"] == 0
        tokens = contender.generate(text.prompts, 1)
        assert tokens.shape == (2, 1) and ((tokens >= 0) & (tokens < 256)).all()


def test_a_prefill_alone():
    """One run is timed and not two, and nothing is said of decoding."""
    journal = Journal(None, False)
    run_cases([ModelCase(SUBJECT, 2, 128, 1, OURS_AND_EAGER)], setting(journal=journal))
    assert [record.contender for record in journal.records] == list(OURS_AND_EAGER)
    for record in journal.records:
        assert Record.from_dict(record.to_dict()) == record and record.status == "ok"
        assert record.metrics.keys() == {
            "first_token_ms", "tokens_per_s", "prefill_tokens_per_s", "matmul_rate_share"
        }  # fmt: skip
        assert record.metrics["first_token_ms"].count == 2
        assert record.check["decode_steps"] == 0 and record.check["greedy_difference"] is None
    flops, seconds = prefill_flops(CONFIG, 2, 128), record.metrics["first_token_ms"].median / 1e3
    assert record.metrics["matmul_rate_share"].median == pytest.approx(flops / seconds / 1e10)
    assert "no decoding to check" in text_tables(journal.records)


def test_a_wrong_prefill_alone_stops_the_run(monkeypatch, no_timing):
    norm_linear = ops.norm_linear
    monkeypatch.setattr(ops, "norm_linear", lambda *a, **k: norm_linear(*a, **k) * 1.01)
    with pytest.raises(WrongResultError, match="'decode_steps': 0"):
        list(ModelCase(SUBJECT, 2, 128, 1, OURS_AND_EAGER).run(setting()))


@pytest.mark.parametrize(
    ("prompt", "new", "compared"), [(20, 8, 16), (20, 1, 1), (120, 8, 9), (127, 2, 2), (128, 1, 1)]
)
def test_as_many_tokens_are_compared_as_fit(prompt, new, compared):
    a_case = ModelCase(SUBJECT, 1, prompt, new)
    a_case.require_room()
    assert a_case.compared == compared
    assert a_case.capacity == prompt + max(new, compared) - 1 <= 128


def test_contenders_share_the_weights():
    weights = SUBJECT.weights(CPU, torch.float32)
    total = sum(weight.nbytes for weight in weights.values())
    shared = {
        name: model_suite.shared_bytes(CONTENDERS[name](CONFIG, weights), weights)
        for name in OURS_AND_EAGER
    }
    assert shared["torch eager"] == total
    assert shared["minifused"] == total  # 256 rows need no padding, which would be a copy


def test_draws_follow_the_distribution():
    weights = SUBJECT.weights(CPU, torch.float32)
    weights = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    weights["ln_f.bias"] = torch.ones(40)  # logits are then the sums of the table's rows
    weights["wte.weight"][7] = 5.0 / 40
    weights["wte.weight"][9] = 4.0 / 40
    expected = torch.zeros(256)
    expected[7], expected[9] = 5.0, 4.0
    expected = expected.softmax(-1)
    torch.manual_seed(0)
    for name in OURS_AND_EAGER:
        contender = CONTENDERS[name](CONFIG, weights)
        contender.prepare(64, 65)
        tokens = contender.generate(torch.zeros(64, 2, dtype=torch.int64), 64)
        counts = torch.bincount(tokens.flatten(), minlength=256) / tokens.numel()
        assert (counts - expected).abs().max() < 0.03


def test_records_of_a_case():
    journal = Journal(None, False)
    run_cases([case()], setting(journal=journal))
    assert [record.contender for record in journal.records] == list(OURS_AND_EAGER)
    for record in journal.records:
        assert Record.from_dict(record.to_dict()) == record and record.status == "ok"
        assert record.shape == {"model": "tiny", "batch": 2, "prompt": 20, "new_tokens": 8}
        assert record.metrics["first_token_ms"].count == 2
        assert record.check["rms_error"] <= record.check["rms_bound"]
        assert "peak_memory_mib" not in record.metrics  # on a CPU nobody counts it


def test_metrics_from_known_times(monkeypatch):
    a_case, counts = case(), []
    monkeypatch.setattr(Minifused, "generate", lambda self, prompts, count: counts.append(count))

    def seconds(work, device):
        work()
        return {1: 0.5, 8: 1.2}[counts.pop()]

    monkeypatch.setattr(clock, "wall_seconds", seconds)
    ours = next(iter(case("minifused").run(setting())))
    median = {name: spread.median for name, spread in ours.metrics.items()}
    assert median["first_token_ms"] == pytest.approx(500)
    assert median["ms_per_token"] == pytest.approx(100)
    assert median["tokens_per_s"] == pytest.approx(16 / 1.2)
    assert median["decode_tokens_per_s"] == pytest.approx(20)
    assert median["prefill_tokens_per_s"] == pytest.approx(80)
    moved = decode_bytes(CONFIG, 2, 24, torch.float32)
    assert median["copy_bandwidth_share"] == pytest.approx(moved / 0.1 / 1e9)
    flops = prefill_flops(CONFIG, 2, 20)
    assert median["matmul_rate_share"] == pytest.approx(flops / 0.5 / 1e10)
    assert a_case.capacity == 20 + FORCED_STEPS - 1


def test_work_of_a_model_by_hand():
    config = GPTConfig(vocab_size=100, n_embd=8, n_head=1, n_layer=3, n_inner=10)
    layer = 8 * 24 + 8 * 8 + 8 * 10 + 10 * 8
    keys_and_values = 3 * 2 * 8 * 4 * 50
    assert decode_bytes(config, 4, 50, torch.float16) == 2 * (3 * layer + 100 * 8 + keys_and_values)
    pairs = 5 * 6 // 2
    assert prefill_flops(config, 2, 5) == 2 * (2 * 5 * 3 * layer + 3 * 4 * 8 * pairs + 2 * 100 * 8)


def test_a_wrong_kernel_stops_the_run_before_any_timing(monkeypatch, no_timing):
    add_linear = ops.add_linear

    def without_bias(x, y, weight, bias, *arguments):
        return add_linear(x, y, weight, None, *arguments)

    subject = dataclasses.replace(SUBJECT)
    weights = SUBJECT.weights(CPU, torch.float32)
    weights["h.0.attn.c_proj.bias"] = torch.randn(40, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(Subject, "weights", lambda *_: weights)
    monkeypatch.setattr(ops, "add_linear", without_bias)
    journal = Journal(None, False)
    with pytest.raises(WrongResultError, match="minifused is past its bound"):
        run_cases([ModelCase(subject, 2, 20, 8, OURS_AND_EAGER)], setting(journal=journal))
    assert journal.records == []


@pytest.mark.parametrize("fault", ["logits", "crash"])
def test_a_rival_that_fails_is_a_record_and_ours_goes_on(monkeypatch, fault):
    class Broken(Minifused):
        def logits(self, tokens, prompt):
            if fault == "crash":
                raise RuntimeError("no such kernel\nand more")
            return super().logits(tokens, prompt) * 1.01

    monkeypatch.setitem(CONTENDERS, "torch eager", Broken)
    rival, ours = case().run(setting())
    assert (rival.contender, rival.status, rival.metrics) == ("torch eager", "failed", {})
    expected = "no such kernel" if fault == "crash" else "torch eager is past its bound"
    assert expected in rival.reason and "and more" not in rival.reason
    assert (ours.contender, ours.status) == ("minifused", "ok")


def test_another_greedy_choice_is_shown_with_its_margin_and_refused_in_float32():
    _, text = text_of(case())

    class Fixed:
        def __init__(self, logits):
            self._logits = logits

        def logits(self, tokens, prompt):
            return self._logits

    logits = text.exact.float()
    best, second = logits[1, 5].topk(2).indices.tolist()
    below = (text.exact[1, 5, best] - text.exact[1, 5, second]).item()
    logits[1, 5, second] = logits[1, 5, best] + 1e-6
    with pytest.raises(WrongResultError, match="'greedy_difference': 5"):
        text.check("minifused", Fixed(logits), torch.float32)
    assert text._departure(logits) == (5, pytest.approx(below))


def test_what_is_not_there_is_skipped_with_its_remedy(monkeypatch, no_timing):
    monkeypatch.setattr(model_suite, "find_spec", lambda name: None)
    monkeypatch.setattr(clock, "in_turns", lambda measure, works, rounds: {})
    (record,) = case("transformers").run(setting())
    assert (record.status, record.metrics) == ("skipped", {})
    assert record.reason == "not installed: pip install 'minifused[hf]'"
    (record,) = case("transformers static").run(setting())
    assert record.status == "skipped"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 20, 8), "--batch is 0"),
        ((1, 0, 8), "--prompt is 0"),
        ((1, 20, 0), "--new-tokens is 0: at least 1"),
        ((1, 129, 1), "129 positions, but the model has 128"),
        ((1, 120, 32), "151 positions, but the model has 128"),
    ],
)
def test_sizes_that_no_run_can_have(sizes, said):
    with pytest.raises(UserError, match=said):
        ModelCase(SUBJECT, *sizes).require_room()


def test_random_weights_repeat_and_leave_the_global_state_alone():
    state = torch.get_rng_state()
    first, second = (SUBJECT.weights(CPU, torch.float32) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["h.0.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.1)
