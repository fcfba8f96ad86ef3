"""Tables of measured schedules: which is found, and what becomes of those that are no good."""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from minifused.inspection import make_case
from minifused.kernels import buckets, limits, schedule, schedule_table, table_file
from minifused.kernels.layer_norm import layer_norm_schedule
from minifused.kernels.row_softmax import row_softmax_schedule
from minifused.kernels.schedule import (
    AttentionSchedule,
    FlashSchedule,
    GemmSchedule,
    GemvSchedule,
    RowSchedule,
    SkinnySchedule,
    SwapSchedule,
)
from minifused.kernels.tile import CPU, Tile
from minifused.kernels.vector_add import vector_add_schedule

pytestmark = pytest.mark.usefixtures("no_tables")

ROOT = Path(__file__).parents[1]
PACKAGED = schedule_table.PACKAGED  # before `no_tables` puts another in its place
H200 = Tile("sm_90a")
BF16, F32 = "bfloat16", "float32"
SHAPE = (2048, 2048, 2048)
BUCKET = buckets.gemm(*SHAPE)
RULE = schedule.gemm_schedule(CPU, *SHAPE, F32)
USERS, PACKAGES = GemmSchedule(8, 96, 64, 1, 1), GemmSchedule(12, 48, 64, 1, 1)


def put(path, machine, chosen, kernel="gemm", bucket=BUCKET, dtype=F32):
    table_file.store(path, machine, kernel, dtype, bucket, asdict(chosen))
    schedule_table.forget()


def put_users(chosen, machine=None, **key):
    put(schedule_table.user_table(), machine or schedule_table.machine(CPU), chosen, **key)


def put_packages(chosen, tile=CPU, **key):
    put(schedule_table.packaged_table(tile), schedule_table.arch(tile), chosen, **key)


def of_cpu():
    return schedule.gemm_schedule(CPU, *SHAPE, F32)


# Order


def test_without_tables_the_rules_choose():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_cpu() == RULE


def test_the_users_table_comes_first_then_the_packages_then_the_rules():
    put_packages(PACKAGES)
    assert of_cpu() == PACKAGES
    put_users(USERS)
    assert of_cpu() == USERS
    with schedule_table.rules_only():
        assert of_cpu() == RULE
    assert of_cpu() == USERS


def test_another_machine_version_dtype_or_bucket_is_not_meant():
    machine = schedule_table.machine(CPU)
    put_users(USERS, machine="Another CPU, 1 core, TileLang 0")
    put_users(USERS, machine=machine.replace("TileLang ", "TileLang 9"))
    put_users(USERS, dtype="float16")
    put_users(USERS, bucket=buckets.gemm(4096, 2048, 2048))
    put_users(USERS, kernel="skinny_gemm")
    put_packages(PACKAGES, H200)
    assert of_cpu() == RULE


def test_the_packages_table_serves_a_gpu_that_is_not_here():
    chosen = GemmSchedule(128, 128, 64, 4, 256, 0)
    put_packages(chosen, H200, dtype=BF16)
    assert schedule.gemm_schedule(H200, *SHAPE, BF16) == chosen
    assert schedule.gemm_schedule(Tile("sm_100a"), *SHAPE, BF16) != chosen


def test_a_dtype_of_16_bits_without_a_schedule_gets_the_others():
    first = GemmSchedule(128, 128, 64, 4, 256, 0)
    put_packages(first, H200, dtype=BF16)
    of = {dtype: schedule.gemm_schedule(H200, *SHAPE, dtype) for dtype in (BF16, "float16", F32)}
    assert of[BF16] == of["float16"] == first != of[F32]
    own = GemmSchedule(128, 64, 64, 4, 256, 0)
    put_packages(own, H200, dtype="float16")
    assert schedule.gemm_schedule(H200, *SHAPE, "float16") == own
    assert schedule.gemm_schedule(H200, *SHAPE, BF16) == first


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_machine_without_the_gpu_has_no_table_of_its_own():
    assert schedule_table.machine(H200) is None


class Pretended:
    name, multi_processor_count, major, minor = "NVIDIA H200", 132, 9, 0


def test_the_users_key_has_the_gpu_its_sms_and_the_version(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Pretended)
    monkeypatch.setattr(schedule_table, "tile_for", lambda device: H200)
    assert schedule_table.machine(H200).startswith("NVIDIA H200, 132 SMs, TileLang 0.")
    assert schedule_table.machine(Tile("sm_80")) is None
    chosen = GemmSchedule(128, 128, 64, 4, 256, 0)
    put_users(chosen, schedule_table.machine(H200), dtype=BF16)
    assert schedule.gemm_schedule(H200, *SHAPE, BF16) == chosen


CHOOSERS = [
    (lambda: schedule.gemm_schedule(CPU, 65, 7, 9, F32), "gemm", "m<=128,n=7,k=9",
     GemmSchedule(2, 8, 16, 1, 1)),
    (lambda: schedule.skinny_schedule(CPU, 2, 7, 9, F32), "skinny_gemm", "m<=2,n=7,k=9",
     SkinnySchedule(1, 4, 8, 1)),
    (lambda: schedule.attention_schedule(CPU, 64, F32, False, 300), "flash_attention",
     "head_dim=64,not causal,keys<=512", AttentionSchedule(16, 16, 1, 1)),
    (lambda: schedule.decode_attention_schedule(CPU, 64, F32, 300), "decode_attention",
     "head_dim=64,blocks>256", RowSchedule(4, 1)),
    (lambda: row_softmax_schedule(CPU, 2000, 50257, F32), "row_softmax", "rows>1024,n=50257",
     RowSchedule(512, 1)),
    (lambda: layer_norm_schedule(CPU, 128, 768, F32), "layer_norm", "rows<=128,n=768",
     RowSchedule(512, 1)),
    (lambda: vector_add_schedule(CPU, F32), "vector_add", "any length", RowSchedule(512, 1)),
]  # fmt: skip


CHOOSERS_OF_A_GPU = [
    (lambda: schedule.swap_schedule(H200, 9, 768, 768, BF16), "swap_gemm", "m<=16,n=768,k=768",
     SwapSchedule(16, 64, 64, 4, 128, 2)),
    (lambda: schedule.gemv_schedule(H200, 768, 768, BF16, False), "gemv", "n=768,k=768",
     GemvSchedule(8, 8, 1, 1)),
    (lambda: schedule.gemv_schedule(H200, 768, 768, BF16, True), "gemv", "n=768,k=768,norm",
     GemvSchedule(8, 8, 1, 1)),
    (lambda: schedule.flash_schedule(H200, 64, BF16, True, 300), "flash_attention_sm90",
     "head_dim=64,causal,keys<=512",
     FlashSchedule(128, 64, 2, 2, 240, heads_together=4, overlap=True, pin=True)),
]  # fmt: skip


@pytest.mark.parametrize("choose, kernel, bucket, chosen", CHOOSERS_OF_A_GPU)
def test_each_kernel_of_a_gpu_does_too(choose, kernel, bucket, chosen):
    assert choose() != chosen
    put_packages(chosen, H200, kernel=kernel, bucket=bucket, dtype=BF16)
    assert choose() == chosen


@pytest.mark.parametrize("choose, kernel, bucket, chosen", CHOOSERS, ids=[c[1] for c in CHOOSERS])
def test_each_kernel_looks_its_schedule_up(choose, kernel, bucket, chosen):
    assert choose() != chosen
    put_users(chosen, kernel=kernel, bucket=bucket)
    assert choose() == chosen


def test_what_inspection_shows_is_what_the_table_says():
    put_users(RowSchedule(512, 1), kernel="row_softmax", bucket=buckets.row(1024, 50304))
    assert make_case("row_softmax", "c").schedule == RowSchedule(512, 1)


# Buckets


def test_the_edges_of_a_bucket():
    edges = (64, 128)
    sizes = {1: 64, 63: 64, 64: 64, 65: 128, 128: 128, 129: 129, 10**9: 129}
    assert {size: buckets.ceiling(size, edges) for size in sizes} == sizes
    for top in sizes.values():  # launchers pass what they were given for a size
        assert buckets.ceiling(top, edges) == top


def test_buckets_have_names():
    assert buckets.gemm(8192, 3, 4) == "m<=8192,n=3,k=4"
    assert buckets.gemm(8193, 3, 4) == "m>8192,n=3,k=4"
    assert buckets.skinny_gemm(3, 3, 4) == "m<=4,n=3,k=4"
    assert buckets.swap_gemm(17, 3, 4) == "m<=32,n=3,k=4"
    assert buckets.gemv(3, 4, False) == "n=3,k=4" != buckets.gemv(3, 4, True)
    assert buckets.flash_attention(64, True, 1024) == "head_dim=64,causal,keys<=1024"
    assert buckets.decode_attention(64, 12) == "head_dim=64,blocks<=16"
    assert buckets.row(128, 5) == "rows<=128,n=5" != buckets.row(129, 5)


# Tables that are no good


def warned(choose):
    """What is chosen, and the one warning."""
    with pytest.warns(UserWarning) as seen:
        first, again = choose(), choose()
    assert first == again and len(seen) == 1
    return first, str(seen[0].message)


DAMAGED = {
    "cut off": '{"schedules": {"a',
    "no object": "[]",
    "another document": '{"records": {}}',
    "too shallow": '{"schedules": {"CPU": {"gemm": 3}}}',
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_is_passed_over_with_one_warning(content):
    put_packages(PACKAGES)
    path = schedule_table.user_table()
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    chosen, message = warned(of_cpu)
    assert chosen == PACKAGES and str(path) in message
    with pytest.raises(ValueError):  # nor is it written over
        table_file.store(path, "m", "gemm", F32, "b", {})


def test_a_table_that_cannot_be_read_is_passed_over():
    path = schedule_table.user_table()
    path.mkdir(parents=True)
    chosen, message = warned(of_cpu)
    assert chosen == RULE and str(path) in message


FIELDS = asdict(USERS)
MISFITS = {
    "one missing": {k: v for k, v in FIELDS.items() if k != "swizzle"},
    "one too many": {**FIELDS, "split_k": 2},
    "of another kernel": {"block_n": 64, "num_threads": 1},
    "a text": {**FIELDS, "block_m": "8"},
    "a fraction": {**FIELDS, "block_m": 8.0},
    "a truth": {**FIELDS, "block_m": True},
    "zero": {**FIELDS, "block_m": 0},
    "threads of a GPU": {**FIELDS, "num_threads": 128},
}


@pytest.mark.parametrize("fields", MISFITS.values(), ids=MISFITS)
def test_a_schedule_that_does_not_fit_is_passed_over(fields):
    put_packages(PACKAGES)
    path, machine = schedule_table.user_table(), schedule_table.machine(CPU)
    table_file.store(path, machine, "gemm", F32, BUCKET, fields)
    schedule_table.forget()
    chosen, message = warned(of_cpu)
    assert chosen == PACKAGES and str(path) in message and BUCKET in message


def test_a_schedule_over_the_budget_of_shared_memory_is_passed_over():
    put_packages(GemmSchedule(128, 256, 128, 3, 256, 10), H200, dtype=BF16)
    chosen, message = warned(lambda: schedule.gemm_schedule(H200, *SHAPE, BF16))
    assert "294912 bytes" in message and str(limits.shared_memory_limit(H200)) in message
    with schedule_table.rules_only():
        assert chosen == schedule.gemm_schedule(H200, *SHAPE, BF16)


# Files


def test_storing_keeps_the_others_and_none_takes_out(tmp_path):
    path = tmp_path / "a" / "schedules.json"
    table_file.store(path, "m", "gemm", F32, "b", None)
    assert not path.exists()
    table_file.store(path, "m", "gemm", F32, "b", {"block_m": 1})
    table_file.store(path, "m", "gemm", F32, "c", {"block_m": 2})
    table_file.store(path, "n", "gemm", F32, "b", {"block_m": 3})
    table_file.store(path, "m", "gemm", F32, "b", None)
    table_file.store(path, "n", "gemm", F32, "b", None)
    assert json.loads(path.read_text()) == {
        "schedules": {"m": {"gemm": {F32: {"c": {"block_m": 2}}}}}
    }
    assert [p.name for p in path.parent.iterdir()] == ["schedules.json"]


def test_where_the_users_table_is(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("MINIFUSED_CACHE_DIR", "own")
    assert schedule_table.user_table() == Path("own/schedules.json")
    monkeypatch.delenv("MINIFUSED_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert schedule_table.user_table() == Path("cache/minifused/schedules.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "me")
    assert schedule_table.user_table() == Path("me/.cache/minifused/schedules.json")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert schedule_table.user_table() == Path("me/Library/Caches/minifused/schedules.json")


def test_the_package_has_its_tables_beside_its_modules():
    assert PACKAGED == ROOT / "minifused" / "schedules"


def test_every_table_of_the_package_fits():
    for path in (ROOT / "minifused" / "schedules").glob("*.json"):
        tile = CPU if path.stem == "c" else Tile(path.stem)
        assert set(table_file.read(path)) == {schedule_table.arch(tile)}


# Launchers


def test_launchers_look_up_once_a_bucket(monkeypatch):
    """And give right results with a schedule of the table."""
    from minifused import ops
    from minifused.kernels import row_softmax

    put_users(RowSchedule(4, 1), kernel="row_softmax", bucket=buckets.row(3, 10))
    row_softmax._select.cache_clear()
    lookups = []
    monkeypatch.setattr(
        row_softmax, "row_softmax_schedule",
        lambda *sizes: lookups.append(sizes) or row_softmax_schedule(*sizes),
    )  # fmt: skip
    for rows in (3, 3, 128, 1):
        x = torch.randn(rows, 10)
        assert torch.allclose(ops.softmax(x), x.softmax(-1), atol=1e-6)
    assert lookups == [(CPU, 128, 10, F32)]
    row_softmax._select.cache_clear()
