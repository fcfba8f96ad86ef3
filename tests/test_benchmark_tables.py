"""Tables of the benchmark, on invented records with ratios worked out by hand."""

import pytest
from test_benchmark_records import MACHINE, make_record, missing

from minifused.benchmark.records import Spread
from minifused.benchmark.tables import markdown_tables, text_tables


def markdown_rows(text, title):
    """The rows of a Markdown table as dicts by column title, and its notes."""
    after = text.split(f"**{title}**\n\n", 1)[1].split("\n\n**")[0].split("\n")
    table = [line for line in after if line.startswith("|")]
    cells = [
        [cell.strip() for cell in line.replace("\\|", "\0")[1:-1].split("|")] for line in table
    ]
    assert len({len(line) for line in table}) == 1, "not aligned"
    assert all(set(cell) <= set("-:") for cell in cells[1])
    titles, _, *rows = cells
    named = [dict(zip(titles, row, strict=True)) for row in rows]
    return named, [line.removeprefix("- ") for line in after if line.startswith("- ")]


def words(line):
    """The cells of a line of text, which are two blanks or more apart."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


MODEL = [
    make_record(
        "model",
        metrics={
            "first_token_ms": Spread(10.0, 9.5, 12.25, 20),
            "ms_per_token": Spread(0.5, 0.45, 0.625, 20),
            "prefill_tokens_per_s": 12800.0,
            "decode_tokens_per_s": 2000.0,
            "peak_memory_mib": 321.0,
            "copy_bandwidth_share": 0.625,
            "matmul_rate_share": 0.4,
        },
    ),
    make_record("model", "torch eager", {"first_token_ms": 15.0, "ms_per_token": 2.0}),
    missing("skipped", "needs\n  CUDA | a GPU", suite="model", contender="compiled"),
]


def test_model_in_markdown():
    (ours, eager, compiled), notes = markdown_rows(markdown_tables(MODEL), "model gpt2, bfloat16")
    assert ours == {
        "case": "a case",
        "contender": "minifused",
        "first token ms": "10.0 (9.5-12.2)",
        "ms/token": "0.500 (0.450-0.625)",
        "prefill tokens/s": "12,800",
        "decode tokens/s": "2,000",
        "peak MiB": "321",
        "of copy bandwidth": "62%",
        "of matmul rate": "40%",
        "x first token": "-",
        "x ms/token": "-",
        "note": "",
    }
    assert (eager["x first token"], eager["x ms/token"]) == ("1.50", "4.00")
    assert eager["first token ms"] == "15.0" and eager["peak MiB"] == "-"
    assert compiled["contender"] == "compiled" and compiled["x ms/token"] == "-"
    assert compiled["note"] == "skipped: needs CUDA \0 a GPU"
    assert "minifused is" in notes[0]


def test_model_in_text():
    text = text_tables(MODEL)
    header, table = text.split("\n\n")
    title, titles, *rows, note = table.split("\n")
    assert title == "model gpt2, bfloat16" and "minifused is" in note
    assert words(titles)[:4] == ["case", "contender", "first token ms", "ms/token"]
    assert words(rows[0])[1:4] == ["minifused", "10.0 (9.5-12.2)", "0.500 (0.450-0.625)"]
    assert words(rows[1])[-2:] == ["1.50", "4.00"]
    assert rows[2].endswith("skipped: needs CUDA | a GPU")
    end = titles.index("ms/token") + len("ms/token")
    assert rows[0][:end].endswith("(0.450-0.625)") and rows[1][:end].endswith(" 2.00")
    assert "1.2" in header and text == text.rstrip()
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_each_model_and_dtype_has_its_own_table():
    other = [
        make_record("model", metrics={"ms_per_token": 1.0}, dtype="float32"),
        make_record("model", "torch", {"ms_per_token": 3.0}, dtype="float32"),
    ]
    text = markdown_tables([*MODEL, *other])
    (_, torch_row), _ = markdown_rows(text, "model gpt2, float32")
    assert torch_row["x ms/token"] == "3.00"
    assert text.count("**model") == 2 and text.count("NVIDIA Test") == 1


def test_a_prefill_alone_has_no_figures_of_decoding():
    alone = [
        make_record("model", name, {"first_token_ms": ms, "matmul_rate_share": 0.5},
                    case="prefill", check={"decode_steps": 0})
        for name, ms in (("minifused", 2.0), ("torch eager", 3.0))
    ]  # fmt: skip
    title = "model gpt2, bfloat16"
    (ours, eager), _ = markdown_rows(markdown_tables(alone), title)
    assert "ms/token" not in ours and "decode tokens/s" not in ours
    assert (ours["of matmul rate"], eager["x first token"]) == ("50%", "1.50")
    assert ours["note"] == "no decoding to check or to time"
    *_, ours, eager = markdown_rows(markdown_tables([*MODEL, *alone]), title)[0]
    for column in ("ms/token", "decode tokens/s", "of copy bandwidth", "x ms/token"):
        assert ours[column] == eager[column] == "-"


def test_without_ours_there_is_no_ratio():
    failed = missing("failed", "boom", suite="model")
    (ours, eager), _ = markdown_rows(markdown_tables([failed, MODEL[1]]), "model gpt2, bfloat16")
    assert ours["note"] == "failed: boom" and "x ms/token" not in eager
    assert eager["ms/token"] == "2.00"


def linear(case, contender="minifused", us=2.0, **metrics):
    return make_record("kernels", contender, {"time_us": us, **metrics}, case=case)


def softmax(case, contender="minifused", us=2.0, **changes):
    shape = {"op": "softmax", "flops": 0, "bytes": 100}
    return make_record("kernels", contender, {"time_us": us}, case=case, shape=shape, **changes)


KERNELS = [
    linear("64x64", us=2.0, tflops=2.0, gb_per_s=1234.0, roofline_share=0.5),
    linear("64x64", "torch", 4.5),
    linear("64x64", "compiled", 4.0),
    linear("8x8", us=2.0),
    linear("8x8", "torch", 1.0),
    softmax("1x9", us=4.0),
    missing("failed", "no kernel", suite="kernels", contender="torch", case="1x9",
            shape=softmax("1x9").shape),
    softmax("1x9", "compiled", 5.0),
    softmax("alone", us=4.0),
]  # fmt: skip


def test_kernels_are_held_against_the_best_rival():
    rows, notes = markdown_rows(markdown_tables(KERNELS), "kernels")
    assert rows[0] == {
        "op": "linear",
        "case": "64x64",
        "dtype": "bfloat16",
        "minifused us": "2.00",
        "best rival": "compiled",
        "rival us": "4.00",
        "ratio": "2.00",
        "TFLOP/s": "2.00",
        "GB/s": "1,234",
        "of roofline": "50%",
        "note": "",
    }
    assert (rows[1]["best rival"], rows[1]["ratio"]) == ("torch", "0.50")
    assert (rows[2]["best rival"], rows[2]["ratio"]) == ("compiled", "1.25")
    assert rows[2]["note"] == "torch failed: no kernel"
    assert (rows[3]["best rival"], rows[3]["ratio"]) == ("-", "-")
    assert notes == ["ratio: time of the best rival / time of minifused"]


def test_ratios_are_summed_up_by_operation():
    (row,), (note,) = markdown_rows(markdown_tables(KERNELS), "kernels by operation")
    # sqrt(2 x 0.5) = 1, where the arithmetic mean is 1.25
    assert row == {
        "dtype": "bfloat16",
        "against": "best rival",
        "linear": "1.00 (0.50-2.00) of 2",
        "softmax": "1.25 (1.25-1.25) of 1",
    }
    assert note.endswith("geometric mean (worst-best) of so many cases")
    assert text_tables(KERNELS).endswith(f"\n{note}")


KINDS = [  # the shape, and the column of its ratio
    ({"op": "linear", "m": 8192}, "linear, M >= 1024"),
    ({"op": "linear+gelu", "m": 1024}, "linear, M >= 1024"),
    ({"op": "linear+residual", "m": 8}, "linear, M = 8"),
    ({"op": "linear", "m": 1}, "linear, M = 1"),
    ({"op": "attention", "causal": True}, "attention, causal"),
    ({"op": "attention", "causal": False}, "attention, not causal"),
    ({"op": "decode_attention"}, "decode attention"),
    ({"op": "layer_norm"}, "layer norm"),
]


def test_kinds_of_work_are_told_apart():
    records = [
        make_record("kernels", contender, {"time_us": us}, case=str(i), dtype=dtype,
                    shape={"flops": 1, "bytes": 1, **shape})
        for dtype, ours in (("bfloat16", 1.0), ("float32", 2.0))
        for i, (shape, _) in enumerate(KINDS)
        for contender, us in (("minifused", ours), ("torch", 2.0 ** i))
    ]  # fmt: skip
    half, full = markdown_rows(markdown_tables(records), "kernels by operation")[0]
    kinds = [kind for _, kind in KINDS]
    assert list(half) == ["dtype", "against", *dict.fromkeys(kinds)]
    assert half["linear, M >= 1024"] == "1.41 (1.00-2.00) of 2"
    assert half["linear, M = 8"] == "4.00 (4.00-4.00) of 1"
    assert half["attention, causal"] == "16.00 (16.00-16.00) of 1"
    assert half["attention, not causal"] == "32.00 (32.00-32.00) of 1"
    assert (full["dtype"], full["linear, M = 1"]) == ("float32", "4.00 (4.00-4.00) of 1")


def test_a_copy_is_a_limit_and_no_rival():
    text = markdown_tables([*KERNELS, softmax("1x9", "copy", 3.0), softmax("alone", "copy", 1.0)])
    rows, notes = markdown_rows(text, "kernels")
    assert [row["of a copy"] for row in rows] == ["-", "-", "75%", "25%"]
    assert (rows[2]["best rival"], rows[2]["ratio"], rows[3]["best rival"]) == (
        *("compiled", "1.25"), "-",
    )  # fmt: skip
    assert notes[-1].startswith("of a copy: ")
    rivals, copies = markdown_rows(text, "kernels by operation")[0]
    assert (copies["against"], copies["linear"]) == ("a copy", "-")
    assert copies["softmax"] == "0.43 (0.25-0.75) of 2"  # sqrt(0.75 x 0.25)
    assert rivals["softmax"] == "1.25 (1.25-1.25) of 1"


def test_a_copy_that_failed_is_told():
    failed = missing("failed", "no memory", contender="copy", case="1x9",
                     shape=softmax("1x9").shape)  # fmt: skip
    (row,), _ = markdown_rows(markdown_tables([softmax("1x9"), failed]), "kernels")
    assert row["note"] == "copy failed: no memory" and "of a copy" not in row


def test_kernels_in_text():
    title, titles, *rows = text_tables(KERNELS).split("\n\n")[1].split("\n")
    assert title == "kernels" and words(titles)[3] == "minifused us"
    assert words(rows[0]) == ["linear", "64x64", "bfloat16", "2.00", "compiled", "4.00", "2.00",
                              "2.00", "1,234", "50%"]  # fmt: skip
    assert words(rows[2])[-1] == "torch failed: no kernel"


def test_ours_that_failed_is_shown_without_a_ratio():
    records = [missing(reason="bad tile", case="8x8"), linear("8x8", "torch", 1.0)]
    (row,), notes = markdown_rows(markdown_tables(records), "kernels")
    assert row["best rival"] == "torch" and row["note"] == "minifused failed: bad tile"
    assert "ratio" not in row and not any("geometric" in note for note in notes)


def test_a_time_of_zero_has_no_ratio():
    records = [linear("64x64", us=0.0), linear("64x64", "torch", 4.5)]
    (row,), _ = markdown_rows(markdown_tables(records), "kernels")
    assert row["rival us"] == "4.50" and "ratio" not in row


def test_scaling_has_a_table_a_sweep():
    batch = {"sweep": "batch", "batch": 8, "context": 512}
    records = [
        make_record("scaling", metrics={"time_us": 2000.0, "peak_memory_mib": 10.0}),
        make_record("scaling", "torch", {"time_us": 5000.0, "peak_memory_mib": 640.0}),
        missing(reason="out of memory", suite="scaling", contender="math"),
        make_record("scaling", metrics={"ms_per_token": 0.25}, shape=batch, case="batch 8"),
        make_record("scaling", "torch", {"ms_per_token": 1.0}, shape=batch, case="batch 8"),
    ]
    text = markdown_tables(records)
    (_, torch_row, math_row), _ = markdown_rows(text, "scaling over length")
    assert (torch_row["us"], torch_row["x us"], torch_row["peak MiB"]) == ("5,000", "2.50", "640")
    assert math_row["note"] == "failed: out of memory" and "ms/token" not in math_row
    (_, torch_row), _ = markdown_rows(text, "scaling over batch")
    assert torch_row["x ms/token"] == "4.00" and "us" not in torch_row
    assert text_tables(records).count("scaling over") == 2


OTHERS = {
    "machine": {**MACHINE, "name": "NVIDIA Other"},
    "driver": {**MACHINE, "driver": "9.9"},
    "versions": {**MACHINE, "versions": {"torch": "3.0"}},
    "commit": {**MACHINE, "commit": "f" * 40 + "-dirty"},
    "no commit": {**MACHINE, "commit": None},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("tables", [text_tables, markdown_tables])
def test_what_differs_in_machine_or_commit_is_never_merged(other, tables):
    rival = linear("64x64", "torch", 4.0)
    apart = make_record("kernels", "torch", {"time_us": 4.0}, case="64x64", machine=OTHERS[other])
    both = tables([KERNELS[0], apart])
    assert both.count("2026-11-02") == 2 and "geometric" not in both
    assert "geometric" in tables([KERNELS[0], rival])


def test_clocks_that_move_do_not_split_a_table():
    clocks = [{**MACHINE, "sm_clock_mhz": float(mhz)} for mhz in (345, 1980)]
    records = [make_record(machine=clocks[0]), make_record(contender="torch", machine=clocks[1])]
    assert text_tables(records).count("2026-11-02") == 1


def test_the_header():
    gpu = {
        **MACHINE,
        "compute_capability": "9.0",
        "sm_count": 132,
        "memory_gib": 139.8,
        "power_limit_w": 700.0,
        "commit": MACHINE["commit"] + "-dirty",
    }
    header = text_tables(
        [make_record(machine=gpu), make_record(machine=gpu, time="2026-11-04T00:00:00+00:00")]
    ).split("\n")[0]
    assert header == (
        "NVIDIA Test, compute capability 9.0, 132 SMs, 139.8 GiB, 700 W, driver 1.2; "
        "torch 2.13.0; commit 0123456789ab-dirty; 2026-11-02 to 2026-11-04"
    )
    cpu = {"device": "cpu", "name": "CPU", "threads": 2, "versions": {"a": "1"}, "commit": None}
    header = text_tables([make_record(machine=cpu)]).split("\n")[0]
    assert header == "CPU, 2 threads; a 1; commit unknown; 2026-11-02"


@pytest.mark.parametrize(
    ("us", "shown"),
    [(0.0123456, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (1234567.0, "1,234,567"), (0.0, "0")],
)
def test_three_digits_of_a_number(us, shown):
    (row,), _ = markdown_rows(markdown_tables([linear("1x1", us=us)]), "kernels")
    assert row["minifused us"] == shown


def test_no_records_no_tables():
    assert text_tables([]) == markdown_tables([]) == ""
