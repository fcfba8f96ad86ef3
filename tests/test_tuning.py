"""The tuner: candidates that fail in every way, the choice, and the script from end to end."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import faulty_kernels as faulty
import pytest
import torch
from helpers import needs_cuda

from minifused import ops
from minifused.benchmark.records import Spread
from minifused.errors import UserError, run_cli
from minifused.inspection import Case, lower
from minifused.kernels import limits, schedule, schedule_table
from minifused.kernels.schedule import GemmSchedule, RingGemmSchedule, RowSchedule
from minifused.kernels.tile import CPU, Tile
from minifused.tuning import report, worker
from minifused.tuning.journal import Journal
from minifused.tuning.outcome import (
    COMPILE_ERROR,
    CRASH,
    OK,
    REFUSED,
    TIMEOUT,
    WRONG_RESULT,
    Finals,
    Outcome,
    winner,
)
from minifused.tuning.search import Options, Result, Searcher
from minifused.tuning.tables import store
from minifused.tuning.task import Task, arch_of, candidates, key_of, named_tasks, occupancy
from minifused.tuning.tunables import TUNABLES
from minifused.workloads import (
    AttentionWorkload,
    DecodeWorkload,
    LayerNormWorkload,
    LinearWorkload,
    SoftmaxWorkload,
    VectorAddWorkload,
)

pytestmark = pytest.mark.usefixtures("no_tables")

ROOT = Path(__file__).parents[1]
SCRIPT_FILE = ROOT / "scripts" / "tune.py"
SCRIPT = runpy.run_path(str(SCRIPT_FILE))
SMALL = SoftmaxWorkload("small", 8, 40)
SECONDS = {"timeout": 2.0, "compile_timeout": 4.0}  # a good candidate takes about one


def tune(task, folder, **options):
    options = Options(**{**SECONDS, **options})
    with Searcher(folder, options) as searcher:
        result = searcher.tune(task)
        return result, searcher.processes


def cpu_task(tunable, workload=SMALL):
    return Task(tunable, workload, "", torch.float32)


# Failures


def test_every_way_to_fail_is_recorded_and_the_search_goes_on(tmp_path):
    task = cpu_task(faulty.tunable())
    result, processes = tune(task, tmp_path)
    ends = {
        faulty.RAISES: (COMPILE_ERROR, "ValueError: no such tile"),
        faulty.HANGS_RUNNING: (TIMEOUT, "no answer in 6 s"),
        faulty.DIES: (CRASH, "by SIGSEGV"),
        faulty.LIES: (WRONG_RESULT, "past its bound"),
        faulty.LEAVES_A_HOLE: (WRONG_RESULT, "NaN in the output"),
    }
    for fault, (status, reason) in ends.items():
        outcome = result.outcomes[key_of(RowSchedule(fault, 1))]
        assert (outcome.status, reason in outcome.reason) == (status, True), outcome
    for refused, reason in ((faulty.OVER_BUDGET, "over budget"), (faulty.TWO_THREADS, "threads")):
        outcome = result.outcomes[key_of(refused)]
        assert outcome.status == REFUSED and reason in outcome.reason
    for passed in (faulty.RULE, faulty.GOOD):
        outcome = result.outcomes[key_of(passed)]
        assert outcome.status == OK and outcome.seconds > 0 and outcome.rms_error < 1e-6
    assert set(result.finals.spreads) == {key_of(faulty.RULE), key_of(faulty.GOOD)}
    assert result.finals.rival.median > 0 and result.finals.rival_name == "torch eager"
    assert result.chosen in (faulty.RULE, faulty.GOOD)
    assert processes == 5  # a new one after each that was lost or may be harmed
    assert {p.name for p in Path.cwd().glob("autotuner.log")} == set()
    shown = report.text(result)
    for text in ("1 timeout", "1 crash", "2 wrong result", "1 compile error", "2 refused",
                 "no such tile", "SIGSEGV"):  # fmt: skip
        assert text in shown
    json.dumps(report.document([result]), allow_nan=False)

    again, processes = tune(task, tmp_path)  # failures are known too
    assert processes == 0 and again.compiled == 0
    assert again.outcomes == result.outcomes and again.finals == result.finals


def test_a_compiler_that_hangs_is_killed_and_the_others_compile_ahead(tmp_path):
    task = cpu_task(faulty.tunable(space=faulty.hanging_space))
    result, _ = tune(task, tmp_path, jobs=2)
    hung = result.outcomes[key_of(RowSchedule(faulty.HANGS_COMPILING, 1))]
    assert (hung.status, hung.reason) == (TIMEOUT, "no answer in 4 s")
    assert result.outcomes[key_of(faulty.GOOD)].status == OK


def test_rules_that_fail_are_told_and_nothing_is_chosen_for_them(tmp_path):
    task = cpu_task(faulty.tunable(faulty.faulty_recipe, faulty.faulty_space))
    result, _ = tune(task, tmp_path)
    assert result.chosen == result.rule and "no candidate passed" in result.finals.failure
    assert "no such tile" in report.failed_rule(result).reason


def test_a_missing_compiler_ends_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "absent")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "kernels"))
    with pytest.raises(SystemExit) as exit_:
        flags = ("--shape", "8,40", "--device", "cpu", "--max", "3", "--jobs", "1")
        run_cli(lambda: main("row_softmax", *flags))
    assert exit_.value.code == 2
    assert "no C++ compiler" in capsys.readouterr().err


@needs_cuda
def test_a_launch_that_hangs_a_gpu_is_killed(tmp_path):
    tunable = faulty.tunable(faulty.gpu_recipe, faulty.gpu_space)
    task = Task(tunable, SMALL, arch_of(torch.device("cuda")), torch.float32)
    result, processes = tune(task, tmp_path, jobs=1, timeout=20.0, compile_timeout=120.0)
    statuses = [result.outcomes[c.key].status for c in result.candidates]
    assert statuses == [OK, TIMEOUT, OK] and processes == 3
    assert len(result.finals.spreads) == 2


# Choice


def finals(**spreads):
    return Finals({key: Spread(*values, 9) for key, values in spreads.items()})


def test_a_winner_beats_the_rules_by_more_than_the_spread():
    clear = {"rule": (10.0, 9.5, 11.0), "fast": (8.0, 7.0, 9.4), "slow": (20.0, 19.0, 21.0)}
    assert winner("rule", finals(**clear)) == "fast"
    assert winner("rule", finals(**{**clear, "fast": (8.0, 7.0, 9.6)})) == "rule"
    assert winner("rule", finals(rule=(1.0, 1.0, 1.0))) == "rule"
    assert winner("rule", finals(fast=(1.0, 1.0, 1.0))) == "fast"  # the rules' own has failed
    assert winner("rule", Finals({}, failure="timeout")) == "rule"


@pytest.fixture
def result(tmp_path):
    """A result of no run: GOOD was chosen."""
    task = cpu_task(faulty.tunable())
    space = candidates(task)
    known = {c.key: Outcome(c.key, OK, seconds=1.0, rms_error=0.0) for c in space}
    spreads = finals(**{key_of(faulty.GOOD): (1.0, 1.0, 1.0)})
    return Result(task, space, known, spreads, faulty.RULE, faulty.GOOD, 0)


def stored(path):
    return json.loads(path.read_text())["schedules"] if path.exists() else {}


def test_what_is_chosen_lands_in_the_users_table_and_the_rules_take_it_out(result):
    (path,) = store(result)
    assert path == schedule_table.user_table()
    machine = schedule_table.machine(CPU)
    entry = {"rows<=128,n=40": {"block_n": 16, "num_threads": 1}}
    assert stored(path) == {machine: {"row_softmax": {"float32": entry}}}
    store(replace(result, chosen=result.rule))
    assert stored(path) == {}


def test_the_packages_table_is_written_when_asked(result):
    package, users = store(result, package=True)
    assert package.name == "c.json" and list(stored(package)) == ["c"]
    assert stored(users) == {}  # it would say the same
    # where the rules are better here than the package's, the user's table says so
    store(replace(result, chosen=result.rule))
    assert stored(users) and list(stored(package)) == ["c"]


def test_a_journal_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    task = cpu_task(faulty.tunable())
    journal = Journal(task)
    for candidate in candidates(task)[:3]:
        journal.add(Outcome(candidate.key, OK, seconds=1.0))
    whole = journal.path.read_text()
    journal.path.write_text(whole[:-20])
    assert len(Journal(task).outcomes) == 2
    assert len(journal.path.read_text().splitlines()) == 3
    assert Journal(task, fresh=True).outcomes == {}
    other = replace(task, workload=replace(SMALL, m=9))
    assert Journal(other).path != journal.path


# Spaces


def gpu_task(name, workload, arch="sm_90a", dtype=torch.bfloat16):
    return Task(TUNABLES[name], workload, arch, dtype)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", TUNABLES)
def test_every_space_begins_with_the_rules_and_has_others_that_fit(name, arch):
    for task in tasks_of(name, arch, torch.bfloat16) + tasks_of(name, arch, torch.float32):
        space = candidates(task)
        assert space[0].schedule == task.recipe()[2] and not space[0].refused
        usable = [c for c in space if not c.refused]
        assert 2 <= len(usable) <= 150 and len({c.key for c in space}) == len(space)
        most = limits.shared_memory_limit(Tile(arch))
        assert all(task.shared_memory(c.schedule) <= most for c in usable)


@pytest.mark.parametrize("name", TUNABLES)
def test_every_space_of_a_cpu_has_some_that_fit(name):
    for task in tasks_of(name, "", torch.float32):
        usable = [c for c in candidates(task) if not c.refused]
        assert 2 <= len(usable) <= 40


ONLY_16_BITS = {"gemv", "swap_gemm", "gemm_sm90", "flash_attention_sm90"}
ONLY_FLOAT32 = {"skinny_gemm", "decode_attention"}


@pytest.mark.parametrize(
    ("arch", "dtype", "none"),
    [
        ("", torch.float32, ONLY_16_BITS),
        ("sm_90a", torch.float32, ONLY_16_BITS),
        ("sm_90a", torch.bfloat16, ONLY_FLOAT32),
    ],
)
def test_every_bucket_of_the_benchmark_is_tuned_once(arch, dtype, none):
    for name in TUNABLES:
        tasks = tasks_of(name, arch, dtype)
        assert len({task.bucket for task in tasks}) == len(tasks)
        assert (tasks == []) == (name in none), name
    causal = {task.workload.causal for task in tasks_of("flash_attention", arch, dtype)}
    assert causal == {True, False}


def tasks_of(name, arch, dtype):
    return named_tasks(TUNABLES[name], arch, dtype)


@pytest.mark.parametrize(
    ("arch", "dtype", "kernel", "kind"),
    [
        ("sm_90a", torch.bfloat16, "flash_attention_sm90", schedule.FlashSchedule),
        ("sm_90a", torch.float32, "flash_attention", schedule.AttentionSchedule),
        ("sm_80", torch.bfloat16, "flash_attention", schedule.AttentionSchedule),
    ],
)
def test_the_attention_that_runs_is_the_one_tuned(arch, dtype, kernel, kind):
    for task in tasks_of("flash_attention", arch, dtype):
        assert task.tunable.name == kernel
        assert all(type(c.schedule) is kind for c in candidates(task))


UNUSED = [
    (
        "skinny_gemm",
        LinearWorkload("", 8, 768, 768),
        "bfloat16 on this device it goes to swap_gemm",
    ),
    ("skinny_gemm", LinearWorkload("", 1, 768, 768), "it goes to gemv"),
    ("gemm", LinearWorkload("", 17, 768, 768), "it goes to swap_gemm"),
    ("row_softmax", SoftmaxWorkload("", 64, 50257), "it goes to piece_values"),
    ("decode_attention", DecodeWorkload("", (9,), 16, 2, 64), "it goes to decode_attention_split"),
]


@pytest.mark.parametrize("name, workload, reason", UNUSED)
def test_what_no_launcher_would_look_up_is_not_tuned(name, workload, reason):
    assert reason in gpu_task(name, workload).unused
    assert not gpu_task("skinny_gemm", LinearWorkload("", 8, 768, 301)).unused


GEMM = LinearWorkload("square", 2048, 2048, 2048, bias=False, out_dtype=torch.float32)


def test_what_is_over_budget_or_breaks_a_rule_is_refused():
    task = gpu_task("gemm", GEMM)
    known = [
        (GemmSchedule(128, 256, 128, 3, 256), "294912 bytes of shared memory"),
        (GemmSchedule(8, 64, 64, 2, 128), "multiples of 16"),
        (GemmSchedule(64, 72, 64, 2, 128), "multiples of 16"),
        (GemmSchedule(16, 16, 64, 2, 128), "4 warps for 2 tiles"),
        (GemmSchedule(64, 64, 64, 2, 96 + 1), "whole warps"),
        (GemmSchedule(64, 64, 64, 2, 1024), "at most 1024"),
    ]
    for refused, reason in known:
        found = limits.violation(task.tile, "gemm", "bfloat16", refused)
        assert reason in found, refused
    attention = schedule.AttentionSchedule
    for tile, dtype, refused, reason in [
        (Tile("sm_80"), "bfloat16", attention(64, 64, 2, 128), "without TMA"),
        (Tile("sm_90a"), "bfloat16", attention(64, 64, 1, 256), "16 rows"),
        (Tile("sm_90a"), "float32", attention(64, 32, 1, 128), "one thread a row"),
    ]:
        assert reason in limits.violation(tile, "flash_attention", dtype, refused, 64)
    gemv = schedule.GemvSchedule
    for refused, reason in [
        (gemv(20, 8, 4, 1), "a divisor of 20"),
        (gemv(64, 64, 1, 1), "64 rows a warp"),
        (gemv(32, 8, 4, 5), "5 blocks of 512 threads do not fit"),
    ]:
        assert reason in limits.violation(Tile("sm_90a"), "gemv", "bfloat16", refused)
    groups = schedule.SwapSchedule(16, 16, 64, 32, 512, 1, 16)
    assert "named barrier" in limits.violation(Tile("sm_90a"), "swap_gemm", "bfloat16", groups)
    rows = limits.violation(Tile("sm_90a"), "layer_norm", "bfloat16", RowSchedule(768, 96))
    assert "power of 2" in rows


def test_a_few_of_a_space_are_spread_over_it():
    task = gpu_task("gemm", GEMM)
    every = [c for c in candidates(task) if not c.refused]
    for most in (1, 2, 5, len(every), 10**6):
        some = [c for c in candidates(task, most) if not c.refused]
        assert some[0] == every[0] and len(some) == min(most, len(every))
        assert some[-1] == every[-1] or most == 1


def test_how_a_grid_fills_a_gpu():
    task = gpu_task("gemm", GEMM)
    large = occupancy(task, GemmSchedule(128, 256, 64, 4, 256, 10), sms=132)
    assert (large.blocks, large.shared_memory, large.blocks_an_sm) == (128, 196608, 1)
    assert large.waves == pytest.approx(128 / 132)
    small = GemmSchedule(64, 64, 64, 3, 128, 10)
    assert occupancy(task, small, 132).blocks_an_sm == 233472 // (49152 + 1024)
    assert occupancy(task, small, 132, registers=168).blocks_an_sm == 65536 // (168 * 256)
    assert occupancy(task, small, None).waves is None
    for splits, blocks in ((1, 512), (4, 2048)):
        shared = RingGemmSchedule(64, 128, 4, 1, splits=splits)
        assert occupancy(gpu_task("gemm_sm90", GEMM), shared, 132).blocks == blocks


@pytest.mark.parametrize(("n", "blocks"), [(2048, 3), (1001, 9), (2056, 9)])
def test_a_block_has_several_short_rows(n, blocks):
    for task in (
        gpu_task("row_softmax", SoftmaxWorkload("", 9, n)),
        gpu_task("layer_norm", LayerNormWorkload("", 9, n, x_dtype=None)),
    ):
        assert occupancy(task, RowSchedule(2048, 128), sms=132).blocks == blocks


SAMPLES = [
    ("gemm", GEMM, torch.bfloat16, 2),
    ("gemm", GEMM, torch.float32, 1),
    ("gemm_sm90", GEMM, torch.bfloat16, 1),
    ("skinny_gemm", LinearWorkload("few rows", 4, 768, 768), torch.float32, 1),
    ("swap_gemm", LinearWorkload("few rows", 4, 768, 768), torch.bfloat16, 1),
    ("gemv", LinearWorkload("one row", 1, 768, 768), torch.bfloat16, 1),
    ("flash_attention", AttentionWorkload("a", 4, 1024, 1024, 16, 80), torch.bfloat16, 1),
    ("flash_attention_sm90", AttentionWorkload("a", 4, 1024, 1024, 16, 64), torch.bfloat16, 1),
    ("flash_attention", AttentionWorkload("a", 4, 1024, 1024, 16, 128), torch.float32, 1),
    ("decode_attention", DecodeWorkload("d", (640,), 1024, 12, 64), torch.float32, 1),
    ("row_softmax", SoftmaxWorkload("rows", 4096, 50257), torch.bfloat16, 1),
    ("layer_norm", LayerNormWorkload("rows", 8192, 768, x_dtype=None), torch.bfloat16, 1),
    ("vector_add", VectorAddWorkload("vectors", 1 << 26), torch.bfloat16, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, workload, dtype, most", SAMPLES, ids=[f"{s[0]}-{s[2]}" for s in SAMPLES]
)
def test_candidates_lower_and_take_the_shared_memory_that_was_said(name, workload, dtype, most):
    task = gpu_task(name, workload, dtype=dtype)
    builder, static, _ = task.recipe()
    for candidate in candidates(task, most + 1)[1 : most + 1]:
        assert not candidate.refused
        case = Case(name, task.tile, task.dtype_name, {}, builder, static, candidate.schedule)
        shared = lower(case).shared_bytes
        if name in (*limits.PIPELINED, "swap_gemm", "flash_attention_sm90"):
            assert shared == task.shared_memory(candidate.schedule)
        assert shared <= limits.shared_memory_limit(task.tile)


@pytest.mark.parametrize(
    "arch, chosen",
    [
        ("sm_80", GemmSchedule(64, 128, 64, 2, 128, 10)),
        (
            "sm_90a",
            GemmSchedule(192, 128, 32, 4, 384, 10),
        ),  # the output takes more than the pipeline
    ],
)
def test_the_shared_memory_of_a_gemm_is_as_said(arch, chosen):
    task = gpu_task("gemm", GEMM, arch)
    builder, static, _ = task.recipe()
    case = Case("gemm", task.tile, task.dtype_name, {}, builder, static, chosen)
    assert lower(case).shared_bytes == task.shared_memory(chosen)


# The script


def main(*argv):
    return SCRIPT["main"](list(argv))


NEXT_START = """
import torch
from minifused import ops
from minifused.kernels import gemm
x, weight = torch.randn(96, 256), torch.randn(192, 256)
seen = []
compile_kernel = gemm.compile_kernel
gemm.compile_kernel = lambda *key: seen.append(key[-1]) or compile_kernel(*key)
y = ops.linear(x, weight)
print(seen, torch.allclose(y, x @ weight.T, atol=1e-3))
"""


def test_a_gemm_is_tuned_used_at_the_next_start_and_not_tuned_twice(monkeypatch, capsys, tmp_path):
    cache = tmp_path / "kernels"
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(cache))
    slow = GemmSchedule(1, 1, 8, 1, 1)
    monkeypatch.setattr(schedule, "_gemm_rule", lambda *sizes: slow)
    flags = ("gemm", "--shape", "96,192,256", "--device", "cpu", "--max", "3", "--json")
    assert main(*flags) == 0
    out, err = capsys.readouterr()
    (first,) = json.loads(out)
    assert first["compiled"] == 3 and first["failed"] == [] and first["rival"]["name"] == "torch"
    assert first["rule"]["block_n"] == 1 and first["chosen"] != first["rule"]
    assert [row["rule"] for row in first["ranking"]] == [False, False, True]
    assert "schedules.json" in err
    assert len(list(cache.rglob("*.so"))) == 3

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", NEXT_START], env=environment, capture_output=True, text=True
    )
    assert run.stdout == f"[{GemmSchedule(**first['chosen'])!r}] True\n", run.stderr
    assert len(list(cache.rglob("*.so"))) <= 4  # bias or not is a kernel of its own

    monkeypatch.setattr(worker.Worker, "_start", None)  # no process can be had
    assert main(*flags) == 0
    (second,) = json.loads(capsys.readouterr().out)
    assert second == {**first, "compiled": 0}


@needs_cuda
def test_a_gemm_is_tuned_on_a_gpu(capsys):
    flags = ("--shape", "512,512,512", "--max", "3", "--jobs", "2", "--json", "--registers")
    assert main("gemm", *flags) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["compiled"] == 3 and told["rival"]["name"] == "cuBLAS"
    assert len(told["ranking"]) + len([f for f in told["failed"] if f["status"] != REFUSED]) == 3
    assert all(row["waves"] > 0 and row["torch_error"] < 2e-2 for row in told["ranking"])


def test_a_softmax_is_tuned_and_told(capsys):
    assert main("row_softmax", "--shape", "64,300", "--device", "cpu", "--max", "2") == 0
    out, _ = capsys.readouterr()
    assert re.match(r"row_softmax shape, 64x300 float32, bucket rows<=128,n=300\n", out)
    assert "torch eager: " in out and out.count("-") >= 2
    assert "stays" in out or "chosen" in out
    assert ops.softmax(torch.zeros(2, 300)).sum() == pytest.approx(2)


def test_the_list_times_nothing(capsys, monkeypatch):
    monkeypatch.setattr(worker.Worker, "_start", None)
    assert main("gemm_sm90", "--shape", "2048,2048,2048", "--list", "--arch", "sm_90a") == 0
    assert re.search(
        r"over budget: \d+ bytes of shared memory, and sm_90a", capsys.readouterr().out
    )
    assert main("gemm", "--shape", "2048,2048,2048", "--list", "--arch", "sm_100a") == 0
    out, _ = capsys.readouterr()
    assert "128  256   64       4      256       10     128" in out
    assert re.search(r"over budget: \d+ bytes of shared memory, and sm_100a has 231424", out)
    assert re.search(r"\d+ to compile, \d+ refused$", out.strip())
    assert main("gemv", "--shape", "768,768", "--list", "--arch", "sm_90a") == 0
    assert re.search(r"\d+ to compile, 0 refused$", capsys.readouterr().out.strip())
    assert main("flash_attention", "--list", "--device", "cpu") == 0
    assert capsys.readouterr().out.count("bucket head_dim=64") == 2
    assert not schedule_table.user_table().parent.exists()


WRONG = {
    "no kernel": [],
    "unknown kernel": ["append"],
    "two sizes": ["gemm", "--shape", "64,64"],
    "a size of 0": ["gemm", "--shape", "0,64,64"],
    "no number": ["row_softmax", "--shape", "a,b"],
    "rows of another kernel": ["gemm", "--shape", "1,64,64"],
    "a kernel of a GPU": ["gemv", "--shape", "64,64"],
    "no shapes of its own": ["swap_gemm"],
    "what goes elsewhere on a GPU": [
        "skinny_gemm",
        "--arch",
        "sm_90a",
        "--shape",
        "8,768,768",
        "--list",
    ],
    "too many rows": ["skinny_gemm", "--shape", "64,64,64"],
    "a head too large": ["flash_attention", "--shape", "1,64,2,512"],
    "a cached head too large": ["decode_attention", "--shape", "1,64,2,512"],
    "16 bits on a CPU": ["gemm", "--dtype", "bfloat16"],
    "an arch to time": ["gemm", "--arch", "sm_90a"],
    "no candidates": ["gemm", "--max", "0"],
    "no time": ["gemm", "--timeout", "0"],
    "jobs below 0": ["gemm", "--jobs", "-1"],
}


@pytest.mark.parametrize("flags", WRONG.values(), ids=WRONG)
def test_a_wrong_flag_is_said_in_two_lines(flags, capsys, monkeypatch):
    monkeypatch.setattr(worker.Worker, "_start", None)
    with pytest.raises(SystemExit) as exit_:
        run_cli(lambda: main(*flags, *(["--device", "cpu"] if "--arch" not in flags else [])))
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == ""
    assert "Traceback" not in err and "error: " in err


def test_a_damaged_table_is_not_written_over(result):
    path = schedule_table.user_table()
    path.parent.mkdir(exist_ok=True)
    path.write_text("{")
    with pytest.raises(UserError, match="repair or remove"):
        SCRIPT["save"](result, False)
    assert path.read_text() == "{"


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINIFUSED_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(SystemExit) as exit_:
        run_cli(lambda: main("row_softmax", "--shape", "8,40", "--device", "cpu"))
    assert exit_.value.code == 2 and "MINIFUSED_CACHE_DIR" in capsys.readouterr().err
