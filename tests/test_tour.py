"""The tour: each stop on the CPU from end to end, what becomes of failures, and the page."""

import builtins
import json
import re
import runpy
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import needs_cuda

from minifused.doctor import Check
from minifused.errors import run_cli
from minifused.tour import (
    autotuning,
    basics,
    charts,
    cheat_sheet,
    fusion,
    runner,
    schedules,
    survival,
)
from minifused.tour import stage as stages
from minifused.tour.blocks import (
    Bar,
    Chart,
    Code,
    Figure,
    Idiom,
    Idioms,
    Note,
    Section,
    Table,
    Verse,
    number,
)
from minifused.tour.page import render
from minifused.tour.runner import Report, run_section
from minifused.tour.sections import SECTIONS
from minifused.tour.source import statement
from minifused.tour.stage import Stage
from minifused.tour.text import WIDTH, closing_text, section_text
from minifused.workloads import LinearWorkload, SoftmaxWorkload, VectorAddWorkload

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "tour.py"))
FACTS = {"name": "a machine", "versions": {"python": "3"}, "device": "cpu"}
SMALL = {
    (basics, "VECTORS"): VectorAddWorkload("vectors", 1 << 16),
    (basics, "SQUARES"): LinearWorkload("square", 96, 96, 96, bias=False),
    (schedules, "SQUARES"): LinearWorkload("square", 96, 96, 96, bias=False),
    (fusion, "ROWS"): SoftmaxWorkload("rows", 4, 50257),
    (fusion, "ATTENTION_SIZES"): (1, 33, 2, 64),
    (fusion, "MLP_SIZES"): (48, 96, 64),
    (autotuning, "MLP_SIZES"): (48, 96, 64),
    (autotuning, "MOST"): 2,
    (stages, "ROUNDS"): 3,
    (fusion, "ROUNDS"): 3,
    (schedules, "ROUNDS"): 3,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One tour of all sections, of small shapes."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in SMALL.items():
            patch.setitem(getattr(module, name), "cpu", value)
        patch.setattr(schedules, "COUNT", 2)
        patch.setattr(survival, "HANG_SECONDS", 4.0)
        patch.setenv("MINIFUSED_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        stage = Stage(torch.device("cpu"), tmp_path_factory.mktemp("tour"))
        with runner.fair_settings(stage.device):
            return {r.section.name: r for r in SCRIPT["tour"](SECTIONS.values(), stage, True)}


def figures(report):
    return {figure.name: figure.value for figure in report.figures}


# Each section


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_runs_on_a_cpu(reports, name):
    report = reports[name]
    assert (report.status, report.reason) == ("ok", "")
    assert report.figures and report.blocks
    sentences = re.findall(r"[.:](?= [A-Z]|$)", report.section.about)
    assert 2 <= len(sentences) <= 4


def test_code_is_that_of_the_kernels(reports):
    quoted = [b for r in reports.values() for b in r.blocks if isinstance(b, Code)]
    places = [re.fullmatch(r"(kernels/\w+\.py):(\d+)-(\d+)", code.title) for code in quoted]
    assert sum(place is not None for place in places) >= 10
    for place, code in zip(places, quoted, strict=True):
        if place is not None:
            lines = (ROOT / place[1]).read_text().splitlines()[int(place[2]) - 1 : int(place[3])]
            assert [line.strip() for line in lines] == [x.strip() for x in code.text.splitlines()]


def test_a_statement_that_is_gone_is_said():
    with pytest.raises(LookupError, match=r"kernels/gemm\.py has no statement .*'while True'"):
        statement("gemm.py", "while True")


def test_a_decorator_belongs_to_its_function():
    assert statement("online_softmax.py", "def online_softmax").text.startswith("@T.macro\ndef")


def test_errors_stand_beside_their_bounds(reports):
    for name in ("vector_add", "matmul", "epilogue", "softmax"):
        (error,) = [f for f in reports[name].figures if f.name == "error"]
        allowed = float(re.fullmatch(r"\(allowed (.*)\)", error.unit)[1])
        assert 0 < error.value < allowed < 1e-4


def test_schedules_are_ranked(reports):
    (table,) = [b for b in reports["schedules"].blocks if isinstance(b, Table)]
    times = [float(row[1]) for row in table.rows]
    assert len(times) == 2 and times == sorted(times)
    assert table.rows[0][0] == figures(reports["schedules"])["fastest"]


def test_padding_and_reuse_of_a_tile():
    task = schedules.Task(
        schedules.TUNABLES["gemm"], LinearWorkload("w", 100, 96, 64), "", torch.float32
    )
    schedule = schedules.GemmSchedule(32, 96, 64, 1, 1)
    assert schedules.padding(task, schedule) == pytest.approx(0.28)
    assert schedules.tile_bytes(task, schedule) == 4 * (128 * 64 + 32 * 96)
    assert schedules.reuse(schedule) == 48.0
    pipelined = schedules.GemmSchedule(64, 128, 64, 3, 128, 10)
    assert schedules.short(pipelined) == "64x128x64, 3 stages, 128 threads, swizzled"
    on_gpu = replace(task, arch="sm_90a", dtype=torch.bfloat16)
    assert schedules.tile_bytes(on_gpu, pipelined) == 3 * 192 * 64 * 2
    said = schedules.reason(on_gpu, pipelined, schedule)
    assert said.startswith("The fastest, 64x128x64, 3 stages") and "KiB of shared memory" in said


def test_refused_schedules_are_told():
    refused = [schedules.Candidate(schedules.GemmSchedule(1, 2, 3, 4, 5), "over budget")]
    (table,) = schedules.refusals(refused)
    assert table.rows[0][1] == "over budget"
    assert list(schedules.refusals([])) == []


def test_the_tuner_compiled_its_candidates_and_left_no_table(reports):
    assert figures(reports["autotuning"])["compiled now"] == 2


def test_planted_faults_end_as_they_should(reports):
    ends = {name: end for name, (_, end) in survival.PLANTED.items()}
    assert set(ends.values()) == {"compile error", "wrong result", "timeout", "ok"}
    found = figures(reports["survival"])
    assert {name: found[name] for name in ends} == ends and found["processes"] == 3
    (table,) = [b for b in reports["survival"].blocks if isinstance(b, Table)]
    reasons = {row[1]: row[3] for row in table.rows}
    assert "K shape check failed" in reasons["compile error"]
    assert "past its bound" in reasons["wrong result"]
    assert reasons["timeout"] == "no answer in 4 s"


def test_a_fault_that_is_not_found_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(survival, "PLANTED", {"the softmax": (survival.faults.GOOD, "timeout")})
    report = run_section(SECTIONS["survival"], Stage(torch.device("cpu"), tmp_path))
    assert report.status == "failed" and report.reason.endswith("as expected: the softmax")


def test_source_for_every_architecture(reports):
    codes = [b for b in reports["introspection"].blocks if isinstance(b, Code)]
    texts = {code.title.split()[2].rstrip(","): code for code in codes if " for " in code.title}
    assert set(texts) == {"sm_80", "sm_90a", "sm_100a", "c"}
    assert "cp_async" in texts["sm_80"].brief and "wgmma" in texts["sm_90a"].brief
    assert texts["c"].brief.startswith("for (int32_t ko")
    assert figures(reports["introspection"])["c"] == "loops for the C compiler"


def test_the_model_writes_a_line(reports):
    (verse,) = [b for b in reports["model"].blocks if isinstance(b, Verse)]
    assert verse.text.startswith("ROMEO:\n") and len(verse.text) > 12


@needs_cuda
def test_every_section_runs_on_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MINIFUSED_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(autotuning.MOST, "cuda", 3)
    code = SCRIPT["main"](["--device=cuda", "--json"])
    ends = {s["name"]: s["reason"] for s in json.loads(capsys.readouterr().out)["sections"]}
    assert list(ends) == list(SECTIONS)
    assert (code, {name: reason for name, reason in ends.items() if reason}) == (0, {})


# The cheat sheet


@pytest.mark.parametrize("idiom", cheat_sheet.idioms(), ids=lambda idiom: idiom.name)
def test_a_line_of_the_cheat_sheet_is_in_its_file(idiom):
    file, _, line = idiom.place.partition(":")
    assert (ROOT / file).read_text().splitlines()[int(line) - 1].strip() == idiom.line
    assert idiom.name.split(".")[-1] in idiom.line or idiom.name.startswith("mask of")


def test_an_idiom_that_no_kernel_has_is_said():
    with pytest.raises(LookupError, match="no kernel has"):
        cheat_sheet.find("T.no_such_thing")


# Failures


def section(name, run, needs_compiler=False):
    return Section(name, f"About {name}", "One. Two.", run, needs_compiler)


def fails(stage):
    yield Note("before")
    raise ValueError("first line\nsecond line")


def works(stage):
    print("a compiler talks")
    yield Table("numbers", ("", "n"), (("one", "1"),))
    yield Figure("rate", 1234.5, "GB/s")


@pytest.fixture
def two_sections(monkeypatch):
    """In place of the real ones, one that fails and one that works."""
    sections = {"fails": section("fails", fails), "works": section("works", works)}
    monkeypatch.setitem(SCRIPT["main"].__globals__, "SECTIONS", sections)
    return sections


def test_a_section_that_fails_does_not_stop_the_tour(two_sections, capsys):
    assert SCRIPT["main"](["--device=cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: ValueError: first line\n" in out and "second line" not in out
    assert "before" in out and "Key figures: rate 1,234 GB/s." in out
    rows = [line.split() for line in out.splitlines()]
    assert ["works", "ok", "0.0", "rate", "1,234", "GB/s"] in rows
    assert ["fails", "failed", "0.0", "ValueError:", "first", "line"] in rows


def test_only_some(two_sections, capsys):
    assert SCRIPT["main"](["--device=cpu", "--only=works"]) == 0
    captured = capsys.readouterr()
    assert "About works" in captured.out and "About fails" not in captured.out
    assert "a compiler talks" in captured.err and "a compiler talks" not in captured.out


def test_json_is_one_document(two_sections, capsys):
    assert SCRIPT["main"](["--device=cpu", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["device"] == "cpu"
    failed, worked = document["sections"]
    assert failed["status"] == "failed" and failed["reason"] == "ValueError: first line"
    assert failed["blocks"] == [{"kind": "note", "text": "before"}]
    assert worked["figures"] == [{"name": "rate", "value": 1234.5, "unit": "GB/s"}]
    assert worked["blocks"][0]["kind"] == "table" and worked["seconds"] >= 0


def test_the_whole_tour_is_json(reports):
    text = json.dumps([r.to_dict() for r in reports.values()], allow_nan=False)
    assert [s["name"] for s in json.loads(text)] == list(SECTIONS)


def test_without_a_compiler_kernels_are_skipped(monkeypatch, two_sections, capsys):
    lacking = runner.missing_compiler
    monkeypatch.setattr(runner, "missing_compiler", lambda stage: "C++ compiler: not found")
    two_sections["works"] = section("works", works, needs_compiler=True)
    assert SCRIPT["main"](["--device=cpu", "--only=works"]) == 0
    out = capsys.readouterr().out
    assert "SKIPPED: C++ compiler: not found" in out
    assert lacking(Stage(torch.device("cpu"), Path())) == ""


def test_the_doctor_says_what_is_missing(monkeypatch):
    fault = Check("C++ compiler", "fault", "not found", "install g++")
    monkeypatch.setattr(runner, "check_compiler", lambda: [fault])
    stage = Stage(torch.device("cpu"), Path())
    assert runner.missing_compiler(stage) == "C++ compiler: not found; install g++"


def test_settings_are_put_back():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    try:
        with runner.fair_settings(torch.device("cpu")):
            assert torch.get_num_threads() == 1
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, precision)
    finally:
        torch.set_num_threads(threads)


def test_the_list_has_all(capsys):
    assert SCRIPT["main"](["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(SECTIONS) and len(names) == 12


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only=nothing"], "invalid choice"),
        (["--device=tpu"], "invalid choice"),
        (["--html=/no/such/folder/page.html"], "--html: cannot write"),
    ],
)
def test_a_mistake_is_exit_code_2(two_sections, capsys, flags, said):
    with pytest.raises(SystemExit) as exit_:
        run_cli(lambda: SCRIPT["main"](flags))
    captured = capsys.readouterr()
    assert exit_.value.code == 2 and captured.out == ""
    assert said in captured.err and "Traceback" not in captured.err


def test_a_page_that_can_be_written_is_not_yet_there(tmp_path):
    SCRIPT["require_writable"](tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


# Text


def test_lines_of_text_fit(reports):
    closing = closing_text(list(reports.values()))
    assert max(map(len, closing.splitlines())) <= WIDTH
    about = section_text(reports["matmul"]).split("\n\n")[1]
    assert max(map(len, about.splitlines())) <= WIDTH


def test_figures():
    assert str(Figure("rate", 1.5, "GB/s")) == "rate 1.5 GB/s"
    assert str(Figure("share", 12.34, "%")) == "share 12.3%"
    assert str(Figure("end", "timeout")) == "end: timeout"


def test_numbers():
    shown = [number(x) for x in (0.12345, 2.6e-08, 12345.6, 12345, "yes")]
    assert shown == ["0.123", "2.6e-08", "12,346", "12,345", "yes"]


# The page

EMPTY = {"meta", "br", "use"}


class Page(HTMLParser):
    """What a page consists of; raises where tags do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def values(self, name):
        return [value for _, key, value in self.attributes if key == name]


EVIL = "<script>alert('&\"')</script>"


def evil_report(status="failed"):
    """Every text that a page has, and each one a script."""
    blocks = (
        Note(EVIL),
        Table(EVIL, (EVIL, EVIL), ((EVIL, EVIL), (EVIL * 3, "1"))),
        Code(EVIL, EVIL, EVIL),
        Verse(EVIL),
        Chart(EVIL, EVIL, (Bar(EVIL, 2.0, 1.0, 3.0), Bar("minifused", 1.0, 1.0, 1.0))),
        Idioms((Idiom(EVIL, EVIL, EVIL, EVIL),)),
    )
    evil = Section("evil", EVIL, EVIL, works)
    return Report(evil, status, EVIL, 1.0, blocks, (Figure(EVIL, EVIL, EVIL),))


def check_page(text):
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert "http" not in text.replace(EVIL, "") and "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    targets = [value for value in page.values("href")]
    assert targets and all(value[0] == "#" and value[1:] in ids for value in targets)
    assert not any(key.startswith("on") for _, key, _ in page.attributes)
    return page


def test_every_text_of_a_page_is_escaped():
    text = render([evil_report()], {"name": EVIL, "versions": {EVIL: EVIL}})
    assert "<script" not in text
    page = check_page(text)
    assert sum(EVIL in piece for piece in page.texts) >= 15


def test_the_page_of_the_tour(reports):
    text = render(list(reports.values()), FACTS)
    page = check_page(text)
    assert set(SECTIONS) <= set(page.values("id"))
    assert ("meta", "name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    for table in re.finditer(r"<table>", text):  # which scrolls in a box of its own
        assert re.search(r'<div class="scroll[^>]*>$', text[: table.start()])
    drawn = page.tags.count("svg")
    bars = sum(isinstance(b, Chart) for r in reports.values() for b in r.blocks)
    assert drawn == (bars if find_spec("matplotlib") else 0) and bars >= 8


def test_a_chart_has_the_pages_colours_and_no_address():
    pytest.importorskip("matplotlib")
    svg = charts.draw(Chart("t", "us", (Bar("minifused", 2.0, 1.0, 3.0),)), "a-1")
    assert svg.startswith('<svg role="img" aria-label="t"') and "currentColor" in svg
    assert "http" not in svg and charts.INK not in svg and 'width="' not in svg[:200]


def test_without_matplotlib_there_is_no_chart(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    text = render([evil_report("ok")], FACTS)
    assert "<svg" not in text and 'class="chart"' not in text


def test_html_is_written(two_sections, tmp_path, capsys):
    path = tmp_path / "tour.html"
    assert SCRIPT["main"](["--device=cpu", "--html", str(path)]) == 1
    check_page(path.read_text(encoding="utf-8"))
    assert f"wrote {path}" in capsys.readouterr().err
