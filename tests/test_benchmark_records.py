"""Records of the benchmark, their schema and files, and what is said of the machine."""

import json
import shutil
import socket
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minifused.benchmark import machine, records
from minifused.benchmark.records import Journal, Record, Spread, document, load
from minifused.errors import UserError

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads(Path(records.__file__).with_name("schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
MACHINE = {
    "device": "cuda",
    "name": "NVIDIA Test",
    "driver": "1.2",
    "versions": {"torch": "2.13.0"},
    "commit": "0123456789abcdef0123456789abcdef01234567",
}
SHAPES = {
    "model": {"model": "gpt2", "batch": 1, "prompt": 128, "new_tokens": 64},
    "kernels": {"op": "linear", "flops": 4_000_000, "bytes": 20_000, "causal": True},
    "scaling": {"sweep": "length", "length": 512},
}


def make_record(suite="kernels", contender="minifused", metrics=None, **changes):
    """An invented record; each of its `metrics` may be a number or a Spread."""
    metrics = {"time_us": 2.0} if metrics is None else metrics
    spreads = {n: v if isinstance(v, Spread) else Spread.exact(v) for n, v in metrics.items()}
    record = Record(
        suite=suite,
        case="a case",
        contender=contender,
        shape=SHAPES[suite],
        dtype="bfloat16",
        schedule={"block_m": 64} if contender == "minifused" else None,
        metrics=spreads,
        status="ok",
        reason="",
        check={"max_error": 1e-3, "tokens_equal": True, "note": None},
        machine=MACHINE,
        time="2026-11-02T10:00:00+00:00",
    )
    return replace(record, **changes)


def missing(status="failed", reason="out of memory", **changes):
    return make_record(metrics={}, status=status, reason=reason, **changes)


def test_percentiles_lie_between_samples():
    samples = [7, 1, 3, 9, 5, 11]  # in order: 1 3 5 7 9 11
    assert Spread.of(samples) == Spread(median=6, low=2, high=10, count=6)
    assert Spread.of(list(range(101))) == Spread(median=50, low=10, high=90, count=101)
    assert Spread.of([4.5]) == Spread(4.5, 4.5, 4.5, 1) == Spread.exact(4.5)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_percentiles_of_nothing_are_refused(samples):
    with pytest.raises(ValueError, match="finite sample"):
        Spread.of(samples)


ROUND_TRIPS = {
    "model": make_record("model", metrics={"ms_per_token": Spread(2.0, 1.5, 3.0, 20)}),
    "kernels": make_record("kernels", "torch"),
    "length": make_record("scaling"),
    "batch": make_record("scaling", shape={"sweep": "batch", "batch": 8, "context": 512}),
    "context": make_record("scaling", shape={"sweep": "context", "context": 512, "batch": 1}),
    "skipped": missing("skipped", "no GPU"),
    "no commit": make_record(machine={**MACHINE, "commit": None}),
    "time in Z": make_record(time="2026-11-02T10:00:00.123Z"),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_and_schema(name):
    record = ROUND_TRIPS[name]
    text = json.dumps(record.to_dict(), allow_nan=False)
    VALIDATOR.validate(json.loads(text))
    assert Record.from_dict(json.loads(text)) == record
    assert record.to_dict()["schema_version"] == 1


def test_time_is_now_by_default():
    fields = {n: v for n, v in vars(make_record()).items() if n != "time"}
    VALIDATOR.validate(Record(**fields).to_dict())


def test_schema_of_a_document():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    good = document(ROUND_TRIPS.values())
    VALIDATOR.validate(good)
    for damage in (
        {"schema_version": 2},
        {"records": {}},
        {"records": [{}]},
        {"note": "more"},
    ):
        assert not VALIDATOR.is_valid({**good, **damage}), damage


# Where in a record of which suite, the value put there, and what the message says. None: removed.
REMOVED = object()
DAMAGES = [
    ("kernels", ["schema_version"], REMOVED, "no 'schema_version'"),
    ("kernels", ["schema_version"], 2, "schema_version has to be 1, not 2"),
    ("kernels", ["schema_version"], True, "schema_version"),
    ("kernels", ["extra"], 1, "unknown 'extra'"),
    ("kernels", ["suite"], "kernel", "suite has to be one of model, kernels, scaling"),
    ("kernels", ["suite"], [], "suite"),
    ("kernels", ["case"], "", "case"),
    ("kernels", ["contender"], 3, "contender"),
    ("kernels", ["shape"], [], "shape"),
    ("kernels", ["shape", "m"], 1.5, "shape"),
    ("kernels", ["shape", "op"], REMOVED, "shape of suite kernels has no str 'op'"),
    ("kernels", ["shape", "flops"], "many", "no int 'flops'"),
    ("kernels", ["shape", "bytes"], True, "no int 'bytes'"),
    ("model", ["shape", "batch"], REMOVED, "no int 'batch'"),
    ("model", ["shape", "model"], 1, "no str 'model'"),
    ("scaling", ["shape", "sweep"], REMOVED, "sweep"),
    ("scaling", ["shape", "sweep"], "width", "one of length, batch, context"),
    ("scaling", ["shape", "sweep"], "batch", "no int 'batch'"),
    ("kernels", ["dtype"], None, "dtype"),
    ("kernels", ["schedule"], "fast", "schedule"),
    ("kernels", ["metrics"], {}, "metrics are empty"),
    ("kernels", ["metrics", "time_us"], 2.0, "metrics"),
    ("kernels", ["metrics", "time_us", "median"], "2", "metrics"),
    ("kernels", ["metrics", "time_us", "low"], -1, "low <= median"),
    ("kernels", ["metrics", "time_us", "high"], REMOVED, "metrics"),
    ("kernels", ["metrics", "time_us", "count"], 0, "count >= 1"),
    ("kernels", ["metrics", "time_us", "p99"], 3.0, "metrics"),
    ("kernels", ["metrics", "my_own_us"], 2.0, "metrics"),
    ("kernels", ["status"], "done", "status has to be one of ok, skipped, failed"),
    ("kernels", ["status"], "failed", "reason"),
    ("kernels", ["reason"], "slow", "reason"),
    ("kernels", ["reason"], None, "reason"),
    ("kernels", ["check", "shape"], [1, 2], "check"),
    ("kernels", ["machine"], "H200", "machine"),
    ("kernels", ["machine", "name"], REMOVED, "machine"),
    ("kernels", ["machine", "device"], "", "machine"),
    ("kernels", ["machine", "versions"], None, "machine"),
    ("kernels", ["machine", "commit"], REMOVED, "machine"),
    ("kernels", ["machine", "commit"], 7, "machine"),
    ("kernels", ["time"], "yesterday", "time"),
    ("kernels", ["time"], "2026-11-02T10:00:00", "UTC"),
    ("kernels", ["time"], "2026-11-02T10:00:00+02:00", "UTC"),
    ("kernels", ["time"], 1.7e9, "time"),
]


@pytest.mark.parametrize(("suite", "place", "value", "message"), DAMAGES)
def test_each_kind_of_damage_is_named(suite, place, value, message):
    damaged = json.loads(json.dumps(make_record(suite).to_dict()))
    inner = damaged
    for name in place[:-1]:
        inner = inner[name]
    if value is REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    with pytest.raises(UserError) as error:
        Record.from_dict(damaged)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not VALIDATOR.is_valid(damaged)
    assert not VALIDATOR.is_valid({"schema_version": 1, "records": [damaged]})


def test_a_record_is_an_object():
    with pytest.raises(UserError, match="an object"):
        Record.from_dict([1])
    assert not VALIDATOR.is_valid([1])


def test_percentiles_out_of_order_are_refused():
    damaged = make_record().to_dict()
    damaged["metrics"]["time_us"]["low"] = 5.0
    with pytest.raises(UserError, match="low <= median"):
        Record.from_dict(damaged)


# The journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def written(path, *items):
    """A journal in which these records were written."""
    journal = Journal(path, resume=False)
    for item in items:
        journal.append(item)
    return journal


CASES = [make_record(case=f"case {i}") for i in range(3)]


def test_a_line_is_on_disk_when_append_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(records.os, "fsync", lambda fd: synced.append(path.read_bytes()))
    journal = Journal(path, resume=False)
    for count, record in enumerate(CASES, 1):
        journal.append(record)
        assert len(path.read_text().splitlines()) == len(synced[-1].splitlines()) == count
    assert journal.records == CASES == load(path)


def test_resume_goes_on_after_what_is_there(path):
    written(path, *CASES[:2])
    journal = Journal(path, resume=True)
    assert journal.records == CASES[:2]
    there = [journal.has("kernels", r.case, "bfloat16", MACHINE) for r in CASES]
    assert there == [True, True, False]
    journal.append(CASES[2])
    assert Journal(path, resume=True).records == CASES


def test_resume_begins_a_new_file(path):
    assert Journal(path, resume=True).records == []
    Journal(path, resume=False).append(CASES[0])  # an empty file is nobody's
    assert load(path) == CASES[:1]


def test_only_the_same_case_on_the_same_device_is_there(path):
    journal = written(path, CASES[0])
    here = {"suite": "kernels", "case": "case 0", "dtype": "bfloat16", "machine": MACHINE}
    assert journal.has(**here)
    assert journal.has(**{**here, "machine": {**MACHINE, "commit": "other", "driver": "9"}})
    for other in (
        {"suite": "model"},
        {"case": "case 1"},
        {"dtype": "float16"},
        {"machine": {**MACHINE, "name": "NVIDIA Other"}},
        {"contenders": ["minifused", "torch"]},
    ):
        assert not journal.has(**{**here, **other}), other


def test_failed_is_redone_and_skipped_is_not(path):
    written(path, make_record(), missing(contender="torch"), missing("skipped", case="other"))
    journal = Journal(path, resume=True)
    assert not journal.has("kernels", "a case", "bfloat16", MACHINE)
    assert journal.has("kernels", "other", "bfloat16", MACHINE)
    again = [make_record(metrics={"time_us": 3.0}), make_record(contender="torch")]
    for record in again:
        journal.append(record)
    assert journal.has("kernels", "a case", "bfloat16", MACHINE, ["minifused", "torch"])
    assert journal.records == load(path) == [*again, missing("skipped", case="other")]


def test_records_of_two_machines_are_both_kept(path):
    other = make_record(machine={**MACHINE, "name": "NVIDIA Other"})
    assert written(path, make_record(), other).records == [make_record(), other]


@pytest.mark.parametrize("kept", [1, 30, -2])
def test_a_last_line_cut_short_is_dropped(path, kept, capsys):
    written(path, *CASES)
    whole = path.read_bytes()
    *lines, last = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + last[:kept])
    journal = Journal(path, resume=True)
    assert journal.records == CASES[:2] and path.read_bytes() == b"".join(lines)
    note = capsys.readouterr()
    assert str(path) in note.err and "last line" in note.err and note.out == ""
    journal.append(CASES[2])
    assert path.read_bytes() == whole


def test_a_last_line_without_its_newline_is_kept(path, capsys):
    written(path, *CASES)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert Journal(path, resume=True).records == CASES
    assert path.read_bytes() == whole and capsys.readouterr().err == ""


@pytest.mark.parametrize("end", ["cut short", "whole"])
@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize("damage", ["{", "", '{"schema_version": 1}', "[]", '{"a": NaN}', "\xff"])
def test_a_damaged_line_is_refused_by_number(path, damage, line, end):
    written(path, *CASES)
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = damage.encode("latin-1")
    data = b"\n".join(lines)[: -9 if end == "cut short" else None]
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        Journal(path, resume=True)
    assert f"{path}, line {line}:" in str(error.value)
    assert path.read_bytes() == data


def test_a_file_of_something_else_is_never_cut(path):
    path.write_text("my notes")
    with pytest.raises(UserError, match="line 1"):
        Journal(path, resume=True)
    assert path.read_text() == "my notes"


def test_a_file_in_the_way_is_refused(path):
    written(path, *CASES)
    whole = path.read_bytes()
    with pytest.raises(UserError, match="--resume"):
        Journal(path, resume=False)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("place", [".", "missing/results.jsonl"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, place, resume):
    with pytest.raises(UserError, match="cannot write"):
        Journal(tmp_path / place, resume)


def test_a_journal_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, resume=False)
    journal.append(CASES[0])
    assert journal.records == CASES[:1] and not list(tmp_path.iterdir())
    assert journal.has("kernels", "case 0", "bfloat16", MACHINE)


def test_a_number_that_is_not_finite_is_not_written(path):
    journal = Journal(path, resume=False)
    with pytest.raises(ValueError):
        journal.append(make_record(metrics={"time_us": float("nan")}))
    assert path.read_bytes() == b""


@pytest.mark.parametrize("indent", [None, 1])
def test_load_reads_a_document(path, indent):
    path.write_text(json.dumps(document(CASES), indent=indent))
    assert load(path) == CASES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no records"),
        ('{"schema_version": 1, "records": []}', "holds no records"),
        ('{"schema_version": 2, "records": []}', "schema version 1"),
        ('{"schema_version": 1, "records": {}}', "schema version 1"),
        ('{"schema_version": 1, "records": [{}]}', "record 1: a record has no"),
        ('{"schema_version": 1, "records": [', "line 1"),
        ('{"schema_version": 1}\n', "line 1"),
    ],
)
def test_load_names_the_damage(path, text, message):
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_load_needs_a_file(path):
    with pytest.raises(UserError, match="cannot read"):
        load(path)


# The machine

CPU = torch.device("cpu")


def test_machine_of_a_cpu():
    info = machine.machine_info(CPU)
    assert info["device"] == "cpu" and info["threads"] == torch.get_num_threads()
    assert info["versions"]["torch"] == torch.__version__ and info["versions"]["tilelang"]
    VALIDATOR.validate(make_record(machine=info).to_dict())


def test_machine_without_git_and_proc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MINIFUSED_COMMIT", raising=False)
    assert machine.machine_info(CPU)["commit"] is None
    monkeypatch.setenv("MINIFUSED_COMMIT", "abc")
    assert machine.machine_info(CPU)["commit"] == "abc"
    monkeypatch.setattr(machine, "Path", lambda name: tmp_path / "missing")
    assert machine.machine_info(CPU)["name"]


def test_packages_that_are_missing_have_no_version(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("jsonschema", "no-such-package"))
    versions = machine.machine_info(CPU)["versions"]
    assert "jsonschema" in versions and "no-such-package" not in versions


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_commit_of_a_checkout(tmp_path, monkeypatch):
    def git(*command):
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ("git", "-C", tmp_path, *who, *command), check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    monkeypatch.setattr(machine, "SOURCE", tmp_path)
    monkeypatch.setenv("MINIFUSED_COMMIT", "of a copy")
    git("init", "-q")
    assert machine.machine_info(CPU)["commit"] == "of a copy"  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    head = git("rev-parse", "HEAD")
    assert machine.machine_info(CPU)["commit"] == head and len(head) == 40
    (tmp_path / "results").write_text("untracked")
    assert machine.machine_info(CPU)["commit"] == head
    (tmp_path / "a").write_text("2")
    assert machine.machine_info(CPU)["commit"] == f"{head}-dirty"
    (tmp_path / "site-packages").mkdir()  # installed within somebody else's checkout
    monkeypatch.setattr(machine, "SOURCE", tmp_path / "site-packages")
    assert machine.machine_info(CPU)["commit"] == "of a copy"


@pytest.fixture
def gpu(monkeypatch):
    properties = types.SimpleNamespace(
        name="NVIDIA Test",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=140 * 2**30,
        uuid="0123-4567",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda", 0)


SMI_FACTS = ("driver", "sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz",
             "max_memory_clock_mhz", "power_limit_w")  # fmt: skip


def test_machine_of_a_gpu_without_nvidia_smi(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    info = machine.machine_info(gpu)
    assert (info["device"], info["name"], info["compute_capability"]) == (
        "cuda", "NVIDIA Test", "9.0")  # fmt: skip
    assert (info["sm_count"], info["memory_gib"]) == (132, 140)
    assert [info[name] for name in SMI_FACTS] == [None] * 6
    VALIDATOR.validate(make_record(machine=info).to_dict())


@pytest.mark.parametrize(
    ("output", "facts"),
    [
        ("580.1, 345, 1980, 3201, 3202, 700.00", ["580.1", 345, 1980, 3201, 3202, 700]),
        ("[N/A], 345, [N/A], 3201, [Not Supported], 700", [None, 345, None, 3201, None, 700]),
        ("No devices were found", [None] * 6),
        ("", [None] * 6),
    ],
)
def test_what_nvidia_smi_says(gpu, monkeypatch, tmp_path, output, facts):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "query = ('driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit')\n"
        "assert f'--query-gpu={query}' in sys.argv and sys.argv[-2:] == ['-i', 'GPU-0123-4567']\n"
        f"print({output!r})\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    info = machine.machine_info(gpu)
    assert [info[name] for name in SMI_FACTS] == facts
    VALIDATOR.validate(make_record(machine=info).to_dict())


def test_nothing_of_the_site_is_told():
    text = json.dumps(machine.machine_info(CPU))
    assert str(Path.home()) not in text and str(machine.SOURCE) not in text
    assert socket.gethostname() not in text.split('"')
