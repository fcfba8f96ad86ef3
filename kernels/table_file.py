"""The files that tables of schedules are, and the folder of the user's own.

JSON: {"schedules": {machine: {kernel: {dtype: {bucket: {field: number}}}}}}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Entries = dict[str, dict[str, dict[str, dict[str, int]]]]  # kernel, dtype, bucket, field


def cache_folder() -> Path:
    """$MINIFUSED_CACHE_DIR, or `minifused` in the platform's folder for caches.

    Raises RuntimeError where there is no home.
    """
    own = os.environ.get("MINIFUSED_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "minifused"


def read(path: Path) -> dict[str, Entries]:
    """The schedules of a file by machine, none if it is not there.

    Raises OSError if it cannot be read, and ValueError if it is not such a file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    document = json.loads(text)
    schedules = document.get("schedules") if isinstance(document, dict) else None
    if schedules is None or not _is_nested(schedules, 5):
        raise ValueError('expected {"schedules": {machine: {kernel: {dtype: {bucket: {…}}}}}}')
    return schedules


def _is_nested(value: Any, depth: int) -> bool:
    """Whether there are objects in objects, `depth` of them."""
    if not isinstance(value, dict):
        return False
    return depth == 1 or all(_is_nested(inner, depth - 1) for inner in value.values())


def store(
    path: Path,
    machine: str,
    kernel: str,
    dtype: str,
    bucket: str,
    fields: Mapping[str, int] | None,
) -> None:
    """Write one schedule to a file, or with None take it out; the others stay.

    Raises OSError and ValueError as `read` does: what cannot be read is not overwritten.
    """
    schedules = read(path)
    entries = schedules.setdefault(machine, {}).setdefault(kernel, {}).setdefault(dtype, {})
    if fields is None:
        entries.pop(bucket, None)
    else:
        entries[bucket] = dict(fields)
    if fields is None and not path.exists():
        return
    write_whole(path, json.dumps({"schedules": _pruned(schedules)}, indent=1, sort_keys=True))


def _pruned(value: Any) -> Any:
    """Without objects that hold nothing."""
    if not isinstance(value, dict):
        return value
    inner = {name: _pruned(child) for name, child in value.items()}
    return {name: child for name, child in inner.items() if child != {}}


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(temporary, 0o644)  # a temporary file is its owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
