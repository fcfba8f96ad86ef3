"""The kernel benchmark on a CPU: ours is checked first, rivals may fail, records hold."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from minifused import ops, workloads
from minifused.benchmark import checks, clock, kernel_suite, records, rivals
from minifused.benchmark.kernel_suite import OPS, KernelCase, kernel_cases
from minifused.benchmark.records import COPY, OURS, Journal, Record
from minifused.benchmark.suite import Setting, Unavailable, WrongResultError, run_cases
from minifused.kernels.row_softmax_split import split_schedule
from minifused.kernels.row_softmax_wide import wide_schedule
from minifused.kernels.schedule import (
    AttentionSchedule,
    FlashSchedule,
    GemmSchedule,
    GemvSchedule,
    RingGemmSchedule,
    RowSchedule,
    SkinnySchedule,
    SplitSchedule,
    SwapSchedule,
)
from minifused.kernels.tile import Tile
from minifused.workloads import (
    AttentionWorkload,
    DecodeWorkload,
    LayerNormWorkload,
    LinearWorkload,
    SoftmaxWorkload,
    VectorAddWorkload,
)

SCHEMA = Path(records.__file__).with_name("schema.json")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MACHINE = {"device": "cpu", "name": "Test", "versions": {"torch": "2"}, "commit": None}
TINY = {
    "linear": LinearWorkload("bias", 20, 64, 64),
    "linear+gelu": LinearWorkload("gelu", 20, 64, 64, "gelu_tanh"),
    "linear+residual": LinearWorkload("residual", 20, 64, 64, **workloads.INTO_RESIDUAL),
    "attention": AttentionWorkload("causal", 2, 65, 65, 2, 8),
    "decode_attention": DecodeWorkload("decode", (33, 33), 40, 2, 8),
    "softmax": SoftmaxWorkload("rows", 20, 100),
    "layer_norm": LayerNormWorkload("rows", 20, 100, x_dtype=None),
    "vector_add": VectorAddWorkload("vectors", 5000),
}
COPIES = 1  # a copy beside what memory bounds
METRICS = {"time_us", "tflops", "gb_per_s", "roofline_share"}


@pytest.fixture
def no_compile(monkeypatch):
    """torch.compile takes seconds a case: here it compiles nothing."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.fixture
def no_timing(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("timed before the check")

    monkeypatch.setattr(clock, "in_turns", refuse)


def make_setting(dtype=torch.float32, journal=None):
    journal = journal or Journal(None, resume=False)
    return Setting(CPU, dtype, 1, journal, MACHINE, 1e10, 1e11)


def case_of(label):
    return KernelCase(label.partition("+")[0], TINY[label], CPU)


def run(label, dtype=torch.float32):
    """Records of a case by contender, each of them valid."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    case = case_of(label)
    by_name = {}
    for record in case.run(make_setting(dtype)):
        value = json.loads(json.dumps(record.to_dict(), allow_nan=False))
        validator.validate(value)
        by_name[record.contender] = Record.from_dict(value)
    assert set(by_name) == set(case.contenders)
    return by_name


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("label", TINY)
def test_records(label):
    by_name = run(label)
    by_name.pop(COPY, None)  # see test_a_copy_takes_turns_where_memory_decides
    assert len(by_name) >= 2
    for name, record in by_name.items():
        assert record.status == "ok" and set(record.metrics) == METRICS
        assert all(spread.median > 0 for spread in record.metrics.values())
        assert record.shape["op"] == label
        assert record.shape["flops"] == TINY[label].flops
        assert record.shape["bytes"] == TINY[label].bytes(torch.float32)
        assert (record.schedule is not None) == (name == OURS)
        assert 0 <= record.check["rms_error"] < 1e-6
        time_us, tflops = record.metrics["time_us"], record.metrics["tflops"]
        assert tflops.median == pytest.approx(TINY[label].flops / time_us.median / 1e6)
    assert by_name[OURS].check["rms_error"] <= by_name[OURS].check["rms_bound"]


@pytest.mark.parametrize(
    ("copy_rate", "matmul_rate", "share"),
    [(6e10, 1e12, 0.5), (1e12, 1e7, 0.25)],
    ids=["memory", "arithmetic"],
)
def test_the_roofline_is_the_slower_of_the_two_ceilings(copy_rate, matmul_rate, share, monkeypatch):
    """5000 sums, which move 60 kB: 1 us at 60 GB/s, and 500 us at 10 MFLOP/s."""
    seconds = 2e-6 if matmul_rate == 1e12 else 2e-3
    monkeypatch.setattr(clock, "in_turns", lambda measure, works, rounds: {
        name: [seconds] for name in works
    })  # fmt: skip
    setting = replace(make_setting(), copy_bytes_per_s=copy_rate, matmul_flops_per_s=matmul_rate)
    ours, _, copy = case_of("vector_add").run(setting)
    assert copy.contender == COPY
    assert ours.metrics["roofline_share"].median == pytest.approx(share)
    assert ours.metrics["time_us"].median == pytest.approx(1e6 * seconds)
    assert ours.metrics["gb_per_s"].median == pytest.approx(60e-6 / seconds)
    assert ours.metrics["tflops"].median == pytest.approx(5e-9 / seconds)


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("label", TINY)
def test_a_copy_takes_turns_where_memory_decides(label, monkeypatch):
    copies, copy_of = [], clock.copy_of

    def keep(moved, device):
        copies.append(copy_of(moved, device))
        return copies[-1]

    monkeypatch.setattr(clock, "copy_of", keep)
    copy = run(label).get(COPY)
    assert (copy is not None) == (label in ("softmax", "layer_norm", "vector_add"))
    if copy is None:
        assert copies == []
        return
    assert copy.status == "ok" and set(copy.metrics) == {"time_us", "gb_per_s"}
    assert set(copy.check) == {"copy_bytes_per_s", "matmul_flops_per_s"}  # nothing to be right
    moved, seconds = TINY[label].bytes(torch.float32), copy.metrics["time_us"].median / 1e6
    assert copy.metrics["gb_per_s"].median == pytest.approx(moved / seconds / 1e9)
    target, again = copies[0](), copies[0]()
    assert target.data_ptr() == again.data_ptr() and (target == 1).all()
    assert 2 * target.nbytes == moved == copy.shape["bytes"]


def test_a_rival_is_compiled():
    record = run("layer_norm")["torch.compile"]
    assert record.status == "ok" and record.check["rms_error"] < 1e-6


@pytest.mark.filterwarnings("ignore:CPU kernels are float32")
@pytest.mark.usefixtures("no_compile")
def test_16_bits():
    by_name = run("softmax", torch.bfloat16)
    assert {r.dtype for r in by_name.values()} == {"bfloat16"}
    assert all(r.status == "ok" for r in by_name.values())


# A wrong kernel has no speed


def one_percent_more(function):
    def wrong(*args, out=None, **kwargs):
        result = function(*args, **kwargs) * 1.01
        return result if out is None else out.copy_(result)

    return wrong


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize("label", TINY)
def test_a_wrong_result_is_never_timed(label, monkeypatch):
    case = case_of(label)
    monkeypatch.setattr(ops, case.op, one_percent_more(getattr(ops, case.op)))
    with pytest.raises(WrongResultError, match=rf"^{case.op} {case.name}, float32: .* limit \d"):
        list(case.run(make_setting()))


@pytest.mark.usefixtures("no_timing")
def test_a_dropped_bias_is_found(monkeypatch):
    linear = ops.linear
    monkeypatch.setattr(ops, "linear", lambda *a, bias, **k: linear(*a, bias=None, **k))
    with pytest.raises(WrongResultError, match=r"^linear bias, 20x64x64"):
        list(case_of("linear").run(make_setting()))


@pytest.mark.usefixtures("no_timing")
def test_what_is_not_written_is_found_outside_the_sample_too(monkeypatch):
    workload = VectorAddWorkload("vectors", 5000)
    monkeypatch.setitem(checks.ROWS, "vector_add", (("x", "y"), 2))

    def forgetful(x, y, out=None):
        result = x + y
        if out is None:
            return result
        out[:100], out[101:] = result[:100], result[101:]
        return out

    monkeypatch.setattr(ops, "vector_add", forgetful)
    with pytest.raises(WrongResultError, match="NaN in the output"):
        list(KernelCase("vector_add", workload, CPU).run(make_setting()))


def test_wrong_small_probabilities_are_found(monkeypatch):
    """They are far below the bound of the whole output."""
    workload = SoftmaxWorkload("sharp", 20, 100, std=30.0)
    softmax = ops.softmax

    def wrong(x, valid=None, out=None):
        result = softmax(x, valid)
        result = torch.where(result < 1e-9, result * 2, result)
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(ops, "softmax", wrong)
    with pytest.raises(WrongResultError, match=r"^softmax elements"):
        list(KernelCase("softmax", workload, CPU).run(make_setting()))


# Samples


def test_samples_hold_the_first_and_the_last_row():
    x = torch.arange(1000.0)[:, None]
    sample = checks.Sample.of("linear", {"x": x, "weight": None, "residual": None})
    rows = sample.inputs["x"].flatten()
    assert len(rows) == 256 and rows[0] == 0 and rows[-1] == 999
    assert torch.equal(sample.take(x), sample.inputs["x"])
    assert sample.inputs["residual"] is None
    assert len(rows.unique()) == 256


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pairs", [1 << 26, 20 * 65], ids=["all_queries", "last_queries"])
def test_samples_of_attention_are_parts_of_the_whole(causal, pairs, monkeypatch):
    monkeypatch.setattr(checks, "PAIRS", pairs)
    workload = AttentionWorkload("", 3, 65, 65, 4, 8, causal=causal)
    inputs = workload.inputs(CPU, torch.float64, torch.Generator().manual_seed(0))
    sample = checks.Sample.of("attention", inputs)
    part = checks.parity.eager_attention(**sample.inputs)
    assert part.shape == (2, 65 if pairs > 65 * 65 else 20, 1, 8)
    torch.testing.assert_close(sample.take(checks.parity.eager_attention(**inputs)), part)


# Rivals


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("no kernel\nC++ trace"), "failed", "RuntimeError: no kernel"),
        (Unavailable("not here"), "skipped", "not here"),
    ],
)
def test_a_rival_that_fails_is_told_and_ours_is_there(error, status, reason, monkeypatch):
    def fail(**inputs):
        raise error

    both = {"first": fail, "second": lambda x, valid: torch.softmax(x, -1)}
    monkeypatch.setattr(kernel_suite, "rivals_of", lambda *arguments: both)
    by_name = run("softmax")
    assert by_name[OURS].status == by_name["second"].status == "ok"
    failed = by_name["first"]
    assert (failed.status, failed.reason, failed.metrics) == (status, reason, {})


@pytest.mark.usefixtures("no_compile")
def test_a_rival_past_the_bound_is_timed_and_its_error_told(monkeypatch):
    monkeypatch.setattr(torch, "add", lambda x, y: (x + y) * torch.nan)
    record = run("vector_add")["torch eager"]
    assert record.status == "ok" and record.check["rms_error"] == "nan"


def test_names_of_contenders_need_no_gpu():
    expected = {
        "linear": {"cuBLAS"},
        "linear+gelu": {"cuBLASLt", "torch eager", "torch.compile"},
        "linear+residual": {"torch eager", "torch.compile"},
        "attention": {"SDPA", "SDPA flash", "SDPA cuDNN"},
        "decode_attention": {"SDPA", "SDPA flash", "SDPA cuDNN", "torch.compile"},
        "softmax": {"torch eager", "torch.compile", COPY},
        "layer_norm": {"torch eager", "torch.compile", COPY},
        "vector_add": {"torch eager", COPY},
    }
    for label, names in expected.items():
        case = KernelCase(label.partition("+")[0], TINY[label], CUDA)
        assert set(case.contenders) == {OURS, *names}


@pytest.mark.parametrize("rival", [rivals.linear_gelu, rivals.linear_into, rivals.float32_product])
def test_forms_of_a_linear_layer_that_cuda_has(rival):
    """On a CPU, where they are not rivals but run; its fused GELU is the erf form."""
    label = {rivals.linear_gelu: "linear+gelu", rivals.linear_into: "linear+residual"}.get(rival)
    workload = TINY[label] if label else LinearWorkload("head", 4, 64, 32, bias=False)
    inputs = workload.inputs(CPU, torch.float32, torch.Generator().manual_seed(0))
    expected = checks.parity.eager_linear(**inputs)
    torch.testing.assert_close(rival(**inputs), expected, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("captured", [True, False])
def test_what_cannot_be_captured_is_timed_as_it_is(captured, monkeypatch):
    replay = object() if captured else None
    monkeypatch.setattr(kernel_suite, "capture", lambda work: replay)
    monkeypatch.setattr(clock, "synchronize", lambda device: None)
    calls = []
    ready = kernel_suite.warm_up(lambda: calls.append(1), {"rms_error": 0.0}, CUDA)
    assert ready.check == {"rms_error": 0.0, "captured": captured}
    assert (ready.work is replay) == captured and len(calls) == kernel_suite.WARM_CALLS


def test_each_workload_has_a_schedule(monkeypatch):
    monkeypatch.setattr(kernel_suite, "tile_for", lambda device: Tile("sm_90a"))
    kinds = set()
    for workload in itertools.chain.from_iterable(workloads.BENCHMARK.values()):
        chosen = kernel_suite.schedule_of(workload, CUDA, torch.bfloat16)
        assert chosen.get("num_threads", 32) >= 32
        kinds.add(tuple(chosen))
    assert len(kinds) == 6  # of products three, of attention two, and of rows


KERNELS_SCHEDULES = [  # workload, fields on sm_90a in bfloat16, in float32, on a CPU
    (LinearWorkload("", 1, 768, 768), GemvSchedule, SkinnySchedule, SkinnySchedule),
    (LinearWorkload("", 8, 768, 768), SwapSchedule, SkinnySchedule, GemmSchedule),
    (LinearWorkload("", 8, 768, 3072), SwapSchedule, SkinnySchedule, GemmSchedule),
    (LinearWorkload("", 1, 768, 301), SkinnySchedule, SkinnySchedule, SkinnySchedule),
    (LinearWorkload("", 1024, 768, 768), RingGemmSchedule, GemmSchedule, GemmSchedule),
    (DecodeWorkload("", (9,), 1024, 12, 64), SplitSchedule, RowSchedule, RowSchedule),
    (AttentionWorkload("", 1, 9, 9, 12, 64), FlashSchedule, AttentionSchedule, AttentionSchedule),
    (AttentionWorkload("", 1, 9, 9, 9, 80), AttentionSchedule, AttentionSchedule,
     AttentionSchedule),
]  # fmt: skip


@pytest.mark.parametrize(("workload", "half", "full", "cpu"), KERNELS_SCHEDULES)
def test_a_record_has_the_schedule_of_the_kernel_that_ran(workload, half, full, cpu, monkeypatch):
    def fields(device, dtype):
        return list(kernel_suite.schedule_of(workload, device, dtype))

    assert fields(CPU, torch.bfloat16) == list(cpu.__dataclass_fields__)
    monkeypatch.setattr(kernel_suite, "tile_for", lambda device: Tile("sm_90a"))
    assert fields(CUDA, torch.bfloat16) == list(half.__dataclass_fields__)
    assert fields(CUDA, torch.float32) == list(full.__dataclass_fields__)


def test_a_record_of_a_softmax_has_the_columns_of_its_form(monkeypatch):
    monkeypatch.setattr(kernel_suite, "tile_for", lambda device: Tile("sm_90a"))
    wide, split = (
        kernel_suite.schedule_of(SoftmaxWorkload("", m, 50257), CUDA, torch.bfloat16)
        for m in (4096, 1)
    )
    assert wide == asdict(wide_schedule("bfloat16"))
    assert split == asdict(split_schedule(1, 50257, "bfloat16")) != wide


def test_backends_of_16_bits_are_not_tried_in_float32():
    case = KernelCase("attention", TINY["attention"], CUDA)
    inputs = TINY["attention"].inputs(CPU, torch.float32, torch.Generator())
    with pytest.raises(Unavailable, match="16-bit"):
        case.rivals()["SDPA flash"](**inputs)


# Cases


def test_case_names_are_unique():
    for device, quick in itertools.product((CPU, CUDA), (False, True)):
        names = [case.name for case in kernel_cases(device, quick, None)]
        assert len(set(names)) == len(names)


def test_the_shapes_that_were_promised():
    cases = kernel_cases(CUDA, False, None)
    assert {case.op for case in cases} == set(OPS)
    sizes = {(w.m, w.n, w.k) for w in workloads.BENCHMARK["linear"]}
    assert {(n, n, n) for n in (2048, 4096, 8192)} < sizes
    assert (1, 50304, 768) in sizes and (8, 50304, 1600) in sizes
    assert (8192, 50304, 768) not in sizes
    for w in workloads.BENCHMARK["attention"]:
        assert 12 <= w.batch * w.heads <= 128 and not w.packed
    assert len(kernel_cases(CPU, False, None)) == len(kernel_cases(CUDA, True, None)) < 15
    assert {case.op for case in kernel_cases(CUDA, False, ["softmax"])} == {"softmax"}


@pytest.mark.usefixtures("no_compile")
def test_resume_skips_what_is_done(monkeypatch, tmp_path):
    path = tmp_path / "journal.jsonl"
    cases = [case_of("vector_add"), case_of("softmax")]
    run_cases(cases[:1], make_setting(journal=Journal(path, resume=False)))
    ran = []
    prepare = kernel_suite.prepare_ours
    monkeypatch.setattr(
        kernel_suite, "prepare_ours", lambda op, *rest: ran.append(op) or prepare(op, *rest)
    )
    journal = Journal(path, resume=True)
    run_cases(cases, make_setting(journal=journal))
    assert ran == ["softmax"]
    assert len(journal.records) == (2 + COPIES) + (3 + COPIES)
