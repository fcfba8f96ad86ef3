"""The name of this machine's processor; nothing but the standard library is needed to know it."""

import functools
import platform
from pathlib import Path


@functools.cache
def processor_name() -> str:
    """As /proc/cpuinfo has it, or what Python knows where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, (*names, platform.processor(), platform.machine())), "CPU")
