"""A guided tour of TileLang on the kernels that the model runs on.

In the order of a tutorial: each stop says what to look at, shows the kernel's own source, runs it
and gives its key figures. What a stop raises is recorded, and the tour goes on. On a CPU it runs
the CPU's kernels and generates the source for GPUs; on a GPU it runs everything there. Exit code
0, or 1 if a stop failed; one that cannot run here is skipped.

  tour.py                              all of it, in under three minutes
  tour.py --only matmul --only softmax
  tour.py --html tour.html             as a page, with charts if matplotlib is installed
"""

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from minifused.benchmark.machine import machine_info
from minifused.engine import resolve_device
from minifused.errors import UserError, run_cli
from minifused.tour.blocks import Section
from minifused.tour.page import render
from minifused.tour.runner import Report, fair_settings, run_section
from minifused.tour.sections import SECTIONS
from minifused.tour.stage import Stage
from minifused.tour.text import closing_text, section_text

LAST = "cheat_sheet"  # which comes behind the closing table


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    text = f"repeatable; one of {', '.join(SECTIONS)}"
    p.add_argument("--only", action="append", choices=SECTIONS, metavar="NAME", help=text)
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    p.add_argument("--json", action="store_true", help="print one JSON document, not text")
    p.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no network")
    p.add_argument("--list", action="store_true", help="print the stops, and stop")
    return p.parse_args(argv)


def require_writable(path: Path) -> None:
    """A tour takes minutes, and a wrong path is known at once. Leaves no file behind."""
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(f"--html: cannot write {path}: {error.strerror}") from None


def tour(sections: Sequence[Section], stage: Stage, quiet: bool) -> Iterator[Report]:
    """Run the sections, and print each one's text as it ends, unless `quiet`."""
    with tqdm(sections, unit="section", file=sys.stderr) as bar:
        for section in bar:
            bar.set_description(section.name)
            report = run_section(section, stage)
            if not quiet and section.name != LAST:
                tqdm.write(section_text(report), file=sys.stdout)
            yield report


def main(argv: list[str] | None = None) -> int:
    """Run the tour; returns 1 if a section failed, otherwise 0."""
    args = parse_args(argv)
    chosen = [s for s in SECTIONS.values() if not args.only or s.name in args.only]
    if args.list:
        print("\n".join(f"{section.name:15}{section.title}" for section in chosen))
        return 0
    device = resolve_device(args.device)
    if args.html:
        require_writable(args.html)
    with tempfile.TemporaryDirectory(prefix="tour-") as folder, fair_settings(device):
        reports = list(tour(chosen, Stage(device, Path(folder)), args.json))
    facts = machine_info(device)
    if args.json:
        document = {"machine": facts, "sections": [report.to_dict() for report in reports]}
        print(json.dumps(document, indent=1))
    else:
        print(closing_text(reports))
        print("\n".join(section_text(r) for r in reports if r.section.name == LAST), end="")
    if args.html:
        args.html.write_text(render(reports, facts), encoding="utf-8")
        print(f"wrote {args.html}", file=sys.stderr)
    return 1 if any(report.status == "failed" for report in reports) else 0


if __name__ == "__main__":
    run_cli(main)
