"""On what a benchmark ran: the device, the versions and the commit, without names of the site."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from minifused import __version__
from minifused.kernels.processor import processor_name

SOURCE = Path(__file__).resolve().parents[2]
PACKAGES = ("tilelang", "transformers", "triton")

# our name: that of nvidia-smi
_SMI_NUMBERS = {
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
}


def machine_info(device: torch.device) -> dict:
    """Facts on `device` and the software, as plain JSON values; None where one is not known."""
    facts = _gpu(device) if device.type == "cuda" else _cpu()
    return {
        "device": device.type,
        **facts,
        "versions": _versions(),
        "commit": _commit(SOURCE) or os.environ.get("MINIFUSED_COMMIT") or None,
    }


def _gpu(device: torch.device) -> dict:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        # CUDA_VISIBLE_DEVICES renumbers the devices of torch, and those of nvidia-smi not
        **_ask_nvidia_smi(f"GPU-{properties.uuid}"),
    }


def _ask_nvidia_smi(gpu: str) -> dict:
    """The driver's version, clocks now and at most, and the power limit; None where unknown."""
    query = ",".join(("driver_version", *_SMI_NUMBERS.values()))
    command = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", gpu)
    values = [value.strip() for value in (_output(*command) or "").split(",")]
    if len(values) != 1 + len(_SMI_NUMBERS):
        values = ["[N/A]"] * (1 + len(_SMI_NUMBERS))
    driver = None if values[0].startswith("[") else values[0]
    return {"driver": driver, **dict(zip(_SMI_NUMBERS, map(_number, values[1:]), strict=True))}


def _number(text: str) -> float | None:
    """None for [N/A] and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def _cpu() -> dict:
    return {"name": processor_name(), "threads": torch.get_num_threads()}


def _versions() -> dict[str, str]:
    """Of what is installed; nothing is imported for it."""
    versions = {
        "minifused": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit(source: Path) -> str | None:
    """The commit checked out in `source`, "-dirty" behind it if a tracked file was changed.

    None if that is not the top of a checkout: an installed package may lie within another one.
    """
    git = ("git", "--no-optional-locks", "-C", str(source))
    top, _, commit = (_output(*git, "rev-parse", "--show-toplevel", "HEAD") or "").rpartition("\n")
    if not top or not source.samefile(top):
        return None
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _output(*command: str) -> str | None:
    """What a command prints, None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
