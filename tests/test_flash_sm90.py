"""Attention with the kernel of sm_90: every recipe, lengths around its tiles, and repeats."""

import re
from dataclasses import replace

import pytest
import torch
from helpers import int32, lower_once, needs_sm90, normal, poisoned
from test_attention import check

from minifused import ops
from minifused.kernels import build, flash_attention, flash_attention_sm90, limits, schedule
from minifused.kernels.flash_work import place
from minifused.kernels.rings import share
from minifused.kernels.tile import Tile

SM90 = Tile("sm_90a")
KEYS = (256, 512, 1024, 2048, 4096, 8192, 8193)
RULES = [(dim, causal, keys) for dim in (64, 128) for causal in (True, False) for keys in KEYS]
LENGTHS = (1, 63, 64, 65, 127, 129, 193, 1000, 1024, 1025, 1537, 2049, 4096)
HEADS = pytest.mark.parametrize("head_dim", [64, 128])
MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
# Five blocks, so that each has several pieces of work, of heads side by side.
SIDE_BY_SIDE = {"heads_together": 3, "resident": 5, "overlap": True}
FORMS = {
    "two warpgroups": schedule.FlashSchedule(128, 128, 2, 2, 240, **SIDE_BY_SIDE),
    "pinned": schedule.FlashSchedule(128, 128, 2, 2, 240, pin=True, **SIDE_BY_SIDE),
    "held": schedule.FlashSchedule(128, 128, 2, 2, 240, pin=True, held=True, **SIDE_BY_SIDE),
    "three warpgroups": schedule.FlashSchedule(192, 128, 2, 3, 160, **SIDE_BY_SIDE),
    "one block each": schedule.FlashSchedule(128, 128, 2, 2, 240, overlap=True, held=True),
}
WIDE = ("two warpgroups", "pinned", "held", "one block each")  # with room for heads of 128
FORM_CASES = [(form, 64) for form in FORMS] + [(form, 128) for form in WIDE]
on_each_form = pytest.mark.parametrize(
    ("form", "head_dim"), FORM_CASES, ids=[f"{form}-{dim}" for form, dim in FORM_CASES]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.parametrize(("head_dim", "causal", "keys"), RULES)
def test_rules_break_no_limit(head_dim, causal, keys):
    chosen = schedule.flash_schedule(SM90, head_dim, "bfloat16", causal, keys)
    assert not limits.violation(SM90, "flash_attention_sm90", "bfloat16", chosen, head_dim)


def test_where_blocks_take_several_pieces_of_work():
    chosen = {rule: schedule.flash_schedule(SM90, rule[0], "bfloat16", *rule[1:]) for rule in RULES}
    resident = {rule: s.resident for rule, s in chosen.items() if s.resident}
    assert resident == {
        **{(128, True, keys): 132 for keys in (256, 512, 1024, 2048)},
        **{(dim, False, keys): 132 for dim in (64, 128) for keys in KEYS},
    }


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("together", [1, 3, 4, 9])
@pytest.mark.parametrize(("heads", "blocks"), [(7, 1), (7, 5), (1, 5), (8, 3)])
def test_each_piece_of_work_is_done_once(heads, blocks, together, last_first):
    """Longest first, where the last block is the longest, of heads that stay together."""
    all_pieces, grid = heads * blocks, min(5, heads * blocks)
    shares = [range(first, all_pieces, grid) for first in range(grid)]
    assert [int(share(all_pieces, s.start, grid)) for s in shares] == [len(s) for s in shares]
    placed = [place(index, blocks, heads, together, last_first) for index in range(all_pieces)]
    assert [(int(head), int(block)) for head, block in placed] == [
        (head, block)
        for first in range(0, heads, together)
        for block in (reversed(range(blocks)) if last_first else range(blocks))
        for head in range(first, min(first + together, heads))
    ]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_output_goes_to_memory_when_all_of_it_is_written(head_dim):
    """Of blocks that are not resident; test_lowering looks at the others."""
    chosen = replace(FORMS["one block each"], held=False)
    static = 2, head_dim, False, False, False, 0.125, "bfloat16", chosen
    source = lower_once(flash_attention_sm90.flash_attention_sm90_kernel, SM90, *static)[0]
    computing = source[source.index("warpgroup_reg_alloc") : source.index("warpgroup_reg_dea")]
    before, after = computing.split("tma_store_arrive")
    behind = re.split(r"stmatrix|O_shared\) \+", before)[-1]
    assert "fence_proxy_async" in behind or "fence_async" in behind
    assert re.search(r"__sync_thread_partial\(\d+, 256\);", behind)
    assert "tma_store_wait<0, true>();" in after


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"consumer_registers": 248}, "registers wanted"),  # setmaxnreg would wait for ever
        ({"consumer_registers": 244}, "multiples of 8"),
        ({"num_stages": 4}, "shared memory"),
        ({"block_m": 64}, "64 rows"),
        ({"min_blocks": 2}, "do not fit on an SM"),
        ({"resident": 132, "overlap": False}, "resident blocks overlap"),
        ({"resident": 132, "block_m": 256}, "64 rows a warpgroup"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_schedules_that_cannot_work_are_refused(changed, reason):
    values = vars(schedule.flash_schedule(SM90, 128, "bfloat16", True, 4096)) | changed
    refused = schedule.from_fields(schedule.FlashSchedule, values)
    violations = limits._on_cuda(SM90, "flash_attention_sm90", "bfloat16", refused, 128)
    assert any(reason in violation for violation in violations)


@on_each_form
def test_forms_break_no_limit(form, head_dim):
    chosen = FORMS[form]
    assert not limits.violation(SM90, "flash_attention_sm90", "bfloat16", chosen, head_dim)


def test_queries_that_are_held_take_registers_too():
    few = replace(FORMS["held"], consumer_registers=208)
    assert "192 accumulators" in limits.spill(SM90, "flash_attention_sm90", "bfloat16", few, 128)
    few = replace(few, held=False)
    assert not limits.spill(SM90, "flash_attention_sm90", "bfloat16", few, 128)


def test_switches_of_a_table_are_true_or_false():
    values = vars(schedule.flash_schedule(SM90, 128, "bfloat16", True, 4096))
    with pytest.raises(ValueError, match="overlap is 1: expected true or false"):
        schedule.from_fields(schedule.FlashSchedule, values | {"overlap": 1})


def test_which_heads_it_takes():
    takes = flash_attention_sm90.takes
    assert takes(SM90, 64, "bfloat16") and takes(SM90, 128, "float16")
    assert not takes(SM90, 80, "bfloat16") and not takes(SM90, 64, "float32")
    assert not takes(Tile("sm_80"), 64, "bfloat16") and not takes(Tile("sm_100a"), 64, "bfloat16")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "chosen"),
    [(64, torch.bfloat16, "_sm90"), (80, torch.bfloat16, ""), (64, torch.float32, "")],
)
def test_the_launcher_gives_it_what_it_takes(head_dim, dtype, chosen, monkeypatch):
    monkeypatch.setattr(flash_attention, "tile_for", lambda device: SM90)
    monkeypatch.setattr(flash_attention, "compile_kernel", lambda builder, *static: builder)
    select = flash_attention._select.__wrapped__
    static = 12, head_dim, True, True, False, 0.125, dtype, 1024
    assert select(torch.device("cpu"), *static).__name__ == f"flash_attention{chosen}_kernel"


@pytest.mark.parametrize("length", LENGTHS)
@MASKS
@HEADS
@DTYPES
@needs_sm90
def test_lengths(length, causal, head_dim, dtype):
    check(normal("cuda", dtype)(2, length, 3, 2, head_dim), causal=causal)


@MASKS
@HEADS
@needs_sm90
def test_the_longest(causal, head_dim):
    check(normal("cuda", torch.bfloat16)(1, 8192, 3, 1, head_dim), causal=causal)


@MASKS
@HEADS
@needs_sm90
def test_more_work_than_a_gpu_takes_at_once(causal, head_dim):
    """Blocks that go through several pieces, and groups of heads of which the last is short."""
    check(normal("cuda", torch.bfloat16)(3, 900, 3, 23, head_dim), causal=causal)
    check(normal("cuda", torch.bfloat16)(3, 1100, 3, 23, head_dim), causal=causal)
    check(normal("cuda", torch.bfloat16)(1, 2200, 3, 19, head_dim), causal=causal)


@pytest.mark.parametrize(
    "lengths", [(1, 1000), (63, 2100), (300, 1025), (1025, 300), (129, 1), (2100, 4000)], ids=str
)
@MASKS
@HEADS
@needs_sm90
def test_other_numbers_of_queries_than_keys(lengths, causal, head_dim):
    draw, (q_len, k_len) = normal("cuda", torch.bfloat16), lengths
    k, v = draw(2, k_len, 3, head_dim), draw(2, k_len, 3, head_dim)
    check(draw(2, q_len, 3, head_dim), k, v, causal)


def check_ragged(q_len, k_len, causal, head_dim):
    """What lies past a length changes nothing, and is not written over."""
    draw = normal("cuda", torch.bfloat16)
    q, k, v = (draw(5, n, 3, head_dim) for n in (q_len, k_len, k_len))
    lengths = (0, 1, 65, q_len, 1 << 30), (0, k_len, 64, 130, 1 << 30)
    q_lengths, kv_lengths = (int32(*row, device="cuda") for row in lengths)
    out = check(q, k, v, causal, None, q_lengths, kv_lengths)
    for row, (queries, keys) in enumerate(zip(*lengths, strict=True)):
        q[row, queries:], k[row, keys:], v[row, keys:] = 3e4, 3e4, 3e4
    assert torch.equal(ops.attention(q, k, v, causal, None, q_lengths, kv_lengths), out)


@pytest.mark.parametrize("k_len", [300, 1500, 2500])
@MASKS
@HEADS
@needs_sm90
def test_ragged(k_len, causal, head_dim):
    check_ragged(200, k_len, causal, head_dim)


@MASKS
@HEADS
@needs_sm90
def test_wide_scores(causal, head_dim):
    draw = normal("cuda", torch.bfloat16)
    wide = [draw(2, 700, 3, head_dim, std=s) for s in (8.0, 8.0, 1.0)]
    check(torch.stack(wide, dim=2), causal=causal)


def check_repeats(length, causal, head_dim, times):
    qkv = normal("cuda", torch.bfloat16)(4, length, 3, 12, head_dim)
    first = ops.attention(qkv, causal=causal)
    assert first.any()
    for _ in range(times):
        out = poisoned(*first.shape, device="cuda", dtype=torch.bfloat16)
        ops.attention(qkv, causal=causal, out=out)
        assert torch.equal(out, first)


@pytest.mark.parametrize("length", [200, 1024, 2200])
@MASKS
@HEADS
@needs_sm90
def test_repeats_are_equal_bit_for_bit(length, causal, head_dim):
    check_repeats(length, causal, head_dim, 200)


@pytest.fixture
def chosen_form(form, monkeypatch):
    """All schedules are of a form while a test runs."""
    monkeypatch.setattr(flash_attention, "flash_schedule", lambda *_: FORMS[form])
    flash_attention._select.cache_clear()
    yield
    flash_attention._select.cache_clear()


def in_each_form(test):
    return MASKS(on_each_form(needs_sm90(pytest.mark.usefixtures("chosen_form")(test))))


@pytest.mark.parametrize("length", [1, 63, 65, 512, 1537])
@in_each_form
def test_forms_at_all_lengths(length, causal, head_dim):
    check(normal("cuda", torch.bfloat16)(3, length, 3, 5, head_dim), causal=causal)


@pytest.mark.parametrize("lengths", [(63, 2100), (700, 65), (1025, 300)], ids=str)
@in_each_form
def test_forms_of_other_numbers_of_queries_than_keys(lengths, causal, head_dim):
    draw, (q_len, k_len) = normal("cuda", torch.float16), lengths
    k, v = draw(3, k_len, 5, head_dim), draw(3, k_len, 5, head_dim)
    check(draw(3, q_len, 5, head_dim), k, v, causal)


@in_each_form
def test_forms_of_ragged_batches(causal, head_dim):
    """A piece of work may end before it begins, or have one block of keys."""
    check_ragged(400, 900, causal, head_dim)


@in_each_form
def test_a_piece_of_work_leaves_nothing_to_the_next(causal, head_dim):
    """Heads of infinite values change no other head, whichever pieces a block has."""
    qkv = normal("cuda", torch.bfloat16)(2, 700, 3, 6, head_dim)
    clean = check(qkv, causal=causal)
    qkv[:, :, :, ::2] = torch.inf
    assert torch.equal(ops.attention(qkv, causal=causal)[:, :, 1::2], clean[:, :, 1::2])


@in_each_form
def test_forms_repeat_bit_for_bit(causal, head_dim):
    check_repeats(1024, causal, head_dim, 100)


@pytest.mark.parametrize("captured", [False, True], ids=["one by one", "graph"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])  # 80: the kernel of all machines
@needs_sm90
def test_kernels_launched_ahead_wait(head_dim, captured):
    """Each reads what the one ahead wrote, and writes over what that one read."""
    draw = normal("cuda", torch.bfloat16)
    start, x, out = (draw(3, 700, 5, head_dim) for _ in range(3))
    gain, shift = draw(5 * head_dim), draw(5 * head_dim)

    def chain(after_each):
        for _ in range(8):
            ops.attention(x, x, x, causal=True, out=out)
            after_each()
            ops.layer_norm(out.flatten(2), gain, shift, out=x.flatten(2))
            after_each()

    x.copy_(start)
    chain(torch.cuda.synchronize)
    wanted, graph = x.clone(), torch.cuda.CUDAGraph()
    assert out.any() and wanted.any()
    if captured:
        with torch.cuda.graph(graph):
            chain(lambda: None)
    for _ in range(20):
        x.copy_(start)
        graph.replay() if captured else chain(lambda: None)
        assert torch.equal(x, wanted) and not x.isnan().any()


@needs_sm90
def test_one_compile_for_all_lengths_of_a_recipe():
    draw = normal("cuda", torch.bfloat16)
    ops.attention(draw(1, 10, 3, 2, 64))
    before = build.stats.count
    for batch, length in ((1, 11), (3, 200), (2, 256)):
        assert ops.attention(draw(batch, length, 3, 2, 64)).any()
    assert build.stats.count == before
