"""Run sections one by one; whatever one of them raises is its own end, and is recorded."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal

import torch

from minifused.doctor import check_compiler, check_nvcc
from minifused.tour.blocks import Block, Figure, Section, to_dict
from minifused.tour.stage import Stage

Status = Literal["ok", "skipped", "failed"]


@dataclass(frozen=True)
class Report:
    """What became of a section; `reason` says why it is not ok."""

    section: Section
    status: Status
    reason: str
    seconds: float
    blocks: tuple[Block, ...]
    figures: tuple[Figure, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "name": self.section.name,
            "title": self.section.title,
            "about": self.section.about,
            "status": self.status,
            "reason": self.reason,
            "seconds": self.seconds,
            "figures": [asdict(figure) for figure in self.figures],
            "blocks": [to_dict(block) for block in self.blocks],
        }


def run_section(section: Section, stage: Stage) -> Report:
    """The report of one section, with all that it found before it ended, however it did."""
    missing = missing_compiler(stage) if section.needs_compiler else ""
    if missing:
        return Report(section, "skipped", missing, 0.0, (), ())
    found: list[Block | Figure] = []
    status: Status = "ok"
    reason, start = "", time.perf_counter()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # compilers talk; stdout is the tour's
            for item in section.run(stage):
                found.append(item)
    except Exception as error:
        status, reason = "failed", first_line(error)
    seconds = time.perf_counter() - start
    blocks = tuple(item for item in found if not isinstance(item, Figure))
    figures = tuple(item for item in found if isinstance(item, Figure))
    return Report(section, status, reason, seconds, blocks, figures)


def first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"[:300].rstrip(": ")


def missing_compiler(stage: Stage) -> str:
    """Why no kernel can be compiled for the device, "" if one can."""
    checks = chain(check_nvcc() if stage.on_cuda else (), check_compiler())
    faults = (f"{c.name}: {c.detail}; {c.fix}" for c in checks if c.state == "fault")
    return next(faults, "")


@contextlib.contextmanager
def fair_settings(device: torch.device) -> Iterator[None]:
    """One thread on both sides where kernels have one, and float32 that is not TF32."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
