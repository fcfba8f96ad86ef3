"""What nvcc makes of a generated source: registers and spills, PTX, and machine code (SASS)."""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tilelang.contrib.cc import get_cplus_compiler
from tilelang.contrib.nvcc import default_compile_options
from tilelang.env import CUDA_HOME

from minifused.errors import UserError

NO_NVCC = "python -m pip install 'minifused[nvcc]', or set CUDA_HOME to a CUDA toolkit"

# Rows of the table: families of SASS opcodes, by the name they start with.
SASS_ROWS = {
    "HGMMA": "HGMMA", "HMMA": "HMMA", "FFMA": "FFMA", "MUFU": "MUFU",
    "UTMALDG": "UTMALDG", "UTMASTG": "UTMASTG", "LDGSTS": "LDGSTS",
    "LDSM": "LDSM", "STSM": "STSM", "LDG": "LDG", "STG": "STG", "LDS": "LDS", "STS": "STS",
    "SHFL": "SHFL", "BAR": "BAR", "SYNCS": "SYNCS",
}  # fmt: skip


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit that TileLang uses, or else of PATH."""
    inside = os.path.join(CUDA_HOME, "bin", name) if CUDA_HOME else None
    return (shutil.which(inside) if inside else None) or shutil.which(name)


def resources(source: str, arch: str) -> dict[str, int | None]:
    """Registers, spills and static shared memory, from ptxas -v."""
    with tempfile.TemporaryDirectory() as folder:
        log = _nvcc(source, arch, "cubin", Path(folder) / "kernel.cubin")
    return read_ptxas(log)


def read_ptxas(log: str) -> dict[str, int | None]:
    """The rows of a ptxas -v log of one kernel."""
    patterns = {
        "registers a thread": r"Used (\d+) registers",
        "spill stores, bytes": r"(\d+) bytes spill stores",
        "spill loads, bytes": r"(\d+) bytes spill loads",
        "static shared memory, bytes": r"(\d+) bytes smem",
    }
    found = {row: re.search(pattern, log) for row, pattern in patterns.items()}
    # ptxas names shared memory where there is some
    numbers = {row: int(match[1]) if match else None for row, match in found.items()}
    return {**numbers, "static shared memory, bytes": numbers["static shared memory, bytes"] or 0}


def ptx(source: str, arch: str) -> str:
    """The PTX of a source; raises UserError without nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        _nvcc(source, arch, "ptx", path)
        return path.read_text()


def sass(source: str, arch: str) -> str:
    """The machine code of a source; raises UserError without nvcc and cuobjdump."""
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        raise UserError(
            "no cuobjdump found, which SASS needs: "
            "put a CUDA toolkit's bin folder on PATH, or set CUDA_HOME to a toolkit with it"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        _nvcc(source, arch, "cubin", path)
        return _run([cuobjdump, "--dump-sass", str(path)]).stdout


def count_sass(text: str) -> dict[str, int]:
    """How often each family of SASS_ROWS is in a listing, and how many instructions there are."""
    line = r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)"
    counts = Counter(re.findall(line, text, re.MULTILINE))
    rows = {row: counts[opcode] for row, opcode in SASS_ROWS.items()}
    return {"SASS instructions": sum(counts.values()) - counts["NOP"], **rows}


def _nvcc(source: str, arch: str, kind: str, path: Path) -> str:
    """Compile to a file of a kind, with the options TileLang uses; returns what was printed."""
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise UserError(f"no nvcc found, which this needs: {NO_NVCC}")
    text = path.with_suffix(".cu")
    text.write_text(source)
    host = [f"-ccbin={compiler}"] if (compiler := get_cplus_compiler()) else []
    done = _run(
        [nvcc, *host, f"--{kind}", "-O3", f"-arch={arch}", *default_compile_options(),
         "-Xptxas=-v", "-o", str(path), str(text)]
    )  # fmt: skip
    return done.stdout + done.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reason = next((line for line in said if "error" in line or "fatal" in line), said[-1:])
        raise UserError(f"{command[0]} failed: {reason or 'it printed nothing'}")
    return done
