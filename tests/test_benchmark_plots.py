"""Charts of the benchmark: which files come of which records, and what they show."""

import subprocess
import sys

import matplotlib
import pytest
from PIL import Image
from test_benchmark_records import MACHINE, make_record, missing

from minifused.benchmark import plots
from minifused.benchmark.plots import OURS_COLOUR, RIVAL_COLOURS, plot_all
from minifused.benchmark.records import Spread
from minifused.errors import UserError

CEILINGS = {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 6e14}
RIVALS = ("torch eager", "torch.compile", "transformers eager")


def spread(value):
    return Spread(value, 0.9 * value, 1.2 * value, 10)


def model_records(metric="ms_per_token", model="gpt2", **changes):
    return [
        make_record(
            "model",
            contender,
            {metric: spread(batch * times)},
            case=f"batch {batch}",
            shape={"model": model, "batch": batch, "prompt": 128, "new_tokens": 64},
            **changes,
        )
        for batch in (1, 8)
        for times, contender in enumerate(("minifused", *RIVALS), 1)
    ]


def kernel_records(check=CEILINGS, **changes):
    return [
        make_record(
            "kernels",
            contender,
            {"time_us": spread(us)},
            case=f"{op}, {flops}",
            shape={"op": op, "flops": flops, "bytes": 10**6},
            check=check,
            **changes,
        )
        for op, flops in (("linear", 10**9), ("linear", 10**7), ("append_kv", 0))
        for contender, us in (("minifused", 2.0), ("torch", 4.0))
    ]


def sweep_records(sweep, metric, values=(128, 512, 2048), memory=False, **changes):
    more = {"peak_memory_mib": 100.0} if memory else {}
    return [
        make_record(
            "scaling",
            contender,
            {metric: spread(value * times), **more},
            case=f"{sweep} {value}",
            shape={"sweep": sweep, sweep: value},
            **changes,
        )
        for value in values
        for contender, times in (("minifused", 1), ("torch", 3))
    ]


SCALING = [
    *sweep_records("length", "time_us", memory=True),
    *sweep_records("batch", "ms_per_token"),
    *sweep_records("context", "ms_per_token"),
]
EVERYTHING = [
    *model_records(),
    *model_records("first_token_ms", dtype="float16"),
    *kernel_records(),
    *SCALING,
]
FILLED = {
    "everything": (
        EVERYTHING,
        {
            "decode-gpt2-bfloat16.png",
            "first-token-gpt2-float16.png",
            "kernels-bfloat16.png",
            "roofline-bfloat16.png",
            "scaling-attention.png",
            "scaling-decode.png",
        },
    ),
    "nothing": ([], set()),
    "timed and wrong": (model_records(status="failed", reason="other tokens"), set()),
    "all failed": ([missing(), missing("skipped", suite="model")], set()),
    "two dtypes": (
        [*kernel_records(check={}), *kernel_records(check={}, dtype="float32")],
        {"kernels-bfloat16.png", "kernels-float32.png"},
    ),
    "no rivals": (kernel_records()[::2], {"roofline-bfloat16.png"}),
    "no operations": (kernel_records()[-2:], {"kernels-bfloat16.png"}),
    "no bytes": (
        [make_record(check=CEILINGS, shape={"op": "linear", "flops": 8, "bytes": 0})],
        set(),
    ),
    "only rivals": (model_records()[1:4], {"decode-gpt2-bfloat16.png"}),
    "only a copy": (
        [make_record("kernels", "copy", check=CEILINGS), make_record(check={})],
        set(),
    ),
    "a prefill alone": (model_records("first_token_ms"), {"first-token-gpt2-bfloat16.png"}),
    "a model's folder": (model_records(model="../a b/c"), {"decode-a-b-c-bfloat16.png"}),
    "batch only": (sweep_records("batch", "ms_per_token", (1,)), {"scaling-decode.png"}),
    "no memory": (sweep_records("length", "time_us"), {"scaling-attention.png"}),
}


@pytest.mark.parametrize("name", FILLED)
def test_exactly_the_charts_that_the_records_fill(name, tmp_path):
    records, names = FILLED[name]
    folder = tmp_path / "new" / "charts"
    paths = plot_all(records, folder)
    assert len(paths) == len(names) and {path.name for path in paths} == names
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(paths)
    for path in paths:
        assert path.parent == folder and 5_000 < path.stat().st_size < 120_000
        with Image.open(path) as image:
            assert image.format == "PNG" and image.width == 1050 and image.height > 250
            assert len(image.convert("RGB").getcolors(1 << 20)) > 8  # not a blank sheet


def test_forty_kernels_are_a_long_chart_and_a_small_file(tmp_path):
    records = [
        make_record("kernels", contender, {"time_us": us}, case=f"a shape, {i}x2304x768", check={})
        for i in range(40)
        for contender, us in (("minifused", 2.0 + i), ("torch.compile", 30.0))
    ]
    (path,) = plot_all(records, tmp_path)
    with Image.open(path) as image:
        assert image.height > 1500
    assert path.stat().st_size < 120_000


def test_two_machines_are_not_mixed(tmp_path):
    other = {**MACHINE, "name": "NVIDIA Other (2)"}
    paths = plot_all([*model_records(), *model_records(machine=other)], tmp_path)
    name = "decode-gpt2-bfloat16.png"
    assert paths == [tmp_path / "NVIDIA-Test" / name, tmp_path / "NVIDIA-Other-2" / name]


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """A function from records to the figures by file name, drawn before they are checked."""

    def draw(records):
        drawn = {}
        monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.update({path.name: figure}))
        plot_all(records, tmp_path)
        for figure in drawn.values():
            figure.draw_without_rendering()
        return drawn

    return draw


def colour_of(artist):
    return matplotlib.colors.to_hex(artist.get_facecolor()).upper()


def test_bars_show_each_contender_in_its_colour(figures):
    axes = figures(model_records())["decode-gpt2-bfloat16.png"].axes[0]
    bars = {c.get_label(): c.patches for c in axes.containers if hasattr(c, "patches")}
    assert {name: [b.get_height() for b in row] for name, row in bars.items()} == {
        name: [times, 8 * times] for times, name in enumerate(("minifused", *RIVALS), 1)
    }
    colours = {name: colour_of(row[0]) for name, row in bars.items()}
    assert colours.pop("minifused") == OURS_COLOUR
    assert len({*colours.values()} & {*RIVAL_COLOURS}) == len(RIVALS)
    assert [t.get_text() for t in axes.get_xticklabels()] == [
        "batch 1\n128 + 64",
        "batch 8\n128 + 64",
    ]
    assert axes.get_ylabel() == "ms per token" and axes.get_yscale() == "log"  # 1 to 32
    assert "NVIDIA Test, bfloat16, commit 0123456789ab" in [t.get_text() for t in axes.texts]


def test_a_short_range_is_linear(figures):
    assert figures(model_records()[:4])["decode-gpt2-bfloat16.png"].axes[0].get_yscale() == "linear"


def test_ratio_bars(figures):
    records = kernel_records()
    slow = make_record("kernels", "fast rival", {"time_us": 1.0}, case=records[2].case,
                       shape=records[2].shape)  # fmt: skip
    axes = figures([*records, slow])["kernels-bfloat16.png"].axes[0]
    bars = next(c.patches for c in axes.containers if hasattr(c, "patches"))
    assert [bar.get_width() for bar in bars] == [2.0, 0.5, 2.0]
    assert [colour_of(bar) == OURS_COLOUR for bar in bars] == [True, False, True]
    assert [t.get_text().split() for t in axes.texts][:2] == [
        ["2.00", "torch"],
        ["0.50", "fast", "rival"],
    ]
    assert any(list(line.get_xdata()) == [1, 1] for line in axes.lines)
    (errors,) = axes.collections[0].get_segments()[:1]
    assert errors[:, 0].tolist() == pytest.approx([3.6 / 2.4, 4.8 / 1.8])


def test_a_copy_is_no_rival_in_a_chart(figures):
    records = kernel_records()
    copies = [
        make_record("kernels", "copy", {"time_us": 0.5}, case=r.case, shape=r.shape, check=CEILINGS)
        for r in records[::2]
    ]
    before, after = (
        {name: [(line.get_color(), *line.get_xydata().flatten()) for line in f.axes[0].lines]
         for name, f in figures(some).items()}
        for some in (records, [*records, *copies])
    )  # fmt: skip
    assert before == after and len(before["roofline-bfloat16.png"]) == 4 + 1


def test_roofline_is_where_the_ceilings_are(figures):
    axes = figures(kernel_records())["roofline-bfloat16.png"].axes[0]
    *points, roof = axes.lines
    places = {(p.get_xdata()[0], round(p.get_ydata()[0], 6)): p.get_color() for p in points}
    assert places[1000, 500.0] == OURS_COLOUR != places[1000, 250.0]  # 1e9 FLOPs in 2 us
    assert set(places) == {(1000, 500.0), (1000, 250.0), (10, 5.0), (10, 2.5)}
    assert list(roof.get_xdata()) == [5, 150, 2000]
    assert list(roof.get_ydata()) == pytest.approx([20, 600, 600])
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_scaling_curves(figures):
    drawn = figures(SCALING)
    time, memory = drawn["scaling-attention.png"].axes
    assert "us" in time.get_ylabel() and "MiB" in memory.get_ylabel()
    assert time.get_xscale() == time.get_yscale() == memory.get_yscale() == "log"
    lines = {line[0].get_color(): list(line[0].get_ydata()) for line in time.containers}
    assert lines[OURS_COLOUR] == [128, 512, 2048] and [384, 1536, 6144] in lines.values()
    assert [t.get_text() for t in time.get_xticklabels()] == ["128", "512", "2k"]
    batch, context = drawn["scaling-decode.png"].axes
    assert "batch" in batch.get_xlabel() and "context" in context.get_xlabel()


@pytest.mark.parametrize("values", [(110, 130), (1, 2), (1, 10), (1, 10**6)])
def test_a_logarithmic_axis_always_has_a_few_numbers(figures, values):
    ours = sweep_records("length", "time_us", values)[::2]
    axes = figures(ours)["scaling-attention.png"].axes[0]
    low, high = axes.get_ylim()
    assert 2 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 12


def test_dtypes_of_a_sweep_are_told_apart(figures):
    records = [
        r for d in ("float32", "float16") for r in sweep_records("length", "time_us", dtype=d)
    ]
    axes = figures(records)["scaling-attention.png"].axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert sorted(labels) == [
        "minifused, float16",
        "minifused, float32",
        "torch, float16",
        "torch, float32",
    ]
    assert len({line[0].get_linestyle() for line in axes.containers}) == 2


LONG = "a contender of a very long name"


def test_nothing_overlaps_or_is_cut(figures):
    """Texts beside bars end within the sheet, and legends too, at names of some length."""
    records = [
        *kernel_records(),
        *model_records(),
        make_record("kernels", LONG, {"time_us": 3.9}, case=kernel_records()[0].case,
                    shape=kernel_records()[0].shape),
        *(make_record("model", f"{LONG} {i}", {"ms_per_token": 9.0}, case="batch 1",
                      shape=model_records()[0].shape) for i in range(3)),
    ]  # fmt: skip
    for figure in figures(records).values():
        sheet = figure.bbox
        texts = [text for axes in figure.axes for text in axes.texts]
        for artist in (*texts, *figure.legends):
            box = artist.get_window_extent()
            assert sheet.x0 <= box.x0 and box.x1 <= sheet.x1 + 1, artist
            assert sheet.y0 <= box.y0 and box.y1 <= sheet.y1 + 1, artist


def test_settings_of_matplotlib_are_left_alone(tmp_path):
    plot_all(model_records(), tmp_path)
    for name in plots.STYLE:
        assert matplotlib.rcParams[name] == matplotlib.rcParamsDefault[name], name


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'minifused\[bench\]'"):
        plot_all(model_records(), tmp_path / "charts")
    assert not (tmp_path / "charts").exists()


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, minifused.benchmark.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        plot_all(model_records(), tmp_path / "file" / "charts")
