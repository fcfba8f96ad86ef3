"""Which schedule was measured to be the best: the user's table, then the package's.

The user's has those tuned on this very machine: the device by name, its number of SMs and the
version of TileLang. The package's has one file an architecture. A file is read once a process, and
a launcher keeps the schedule it got: none of this is paid for at a launch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import tilelang
import torch

from minifused.kernels import table_file
from minifused.kernels.build import tile_for
from minifused.kernels.processor import processor_name
from minifused.kernels.table_file import Entries
from minifused.kernels.tile import Tile

SIXTEEN_BITS = {"float16": "bfloat16", "bfloat16": "float16"}
PACKAGED = Path(__file__).parents[1] / "schedules"  # of minifused, where kernels/ is a link

S = TypeVar("S")

_rules_only: ContextVar[bool] = ContextVar("_rules_only", default=False)
_warned: set[Path] = set()


@contextmanager
def rules_only() -> Iterator[None]:
    """Find nothing within: schedules are what the rules say."""
    token = _rules_only.set(True)
    try:
        yield
    finally:
        _rules_only.reset(token)


# Where, and for what


def user_table() -> Path:
    """Raises RuntimeError where there is no home to put a cache in."""
    return table_file.cache_folder() / "schedules.json"


def packaged_table(tile: Tile) -> Path:
    return PACKAGED / f"{arch(tile)}.json"


def arch(tile: Tile) -> str:
    """Also the package's key: "sm_90a", or "c" for a CPU."""
    return tile.arch or "c"


def machine(tile: Tile) -> str | None:
    """The user's key; None if no device of this machine is a `tile`.

    Of several GPUs it is the current one.
    """
    version = f"TileLang {tilelang.__version__}"
    if not tile.is_cuda:
        return f"{processor_name()}, 1 core, {version}"
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    if tile_for(device) != tile:
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} SMs, {version}"


# Lookup


def find(
    tile: Tile,
    kernel: str,
    bucket: str,
    dtype: str,
    parse: Callable[[dict[str, int]], S],
    user: bool = True,
) -> S | None:
    """The schedule of the first table that has one; None without.

    A dtype of 16 bits without a schedule gets that of the other: as many bytes, and products at
    the same rate. `parse` makes it of its fields and raises ValueError for those that it refuses;
    the table is then passed over, with a warning. Without `user`, only the package's table counts.
    """
    for path, entries in _tables(tile, user) if not _rules_only.get() else ():
        dtypes = entries.get(kernel, {})
        fields = dtypes.get(dtype, {}).get(bucket)
        if fields is None and dtype in SIXTEEN_BITS:
            fields = dtypes.get(SIXTEEN_BITS[dtype], {}).get(bucket)
        if fields is not None:
            try:
                return parse(fields)
            except ValueError as error:
                _warn(path, f"{kernel}, {bucket}, {dtype}: {error}")
    return None


def _tables(tile: Tile, user: bool) -> Iterator[tuple[Path, Entries]]:
    if user:
        try:
            path = user_table()
        except RuntimeError:  # no home
            path = None
        if path is not None and (schedules := _load(path)):
            yield path, schedules.get(machine(tile) or "", {})
    path = packaged_table(tile)
    yield path, _load(path).get(arch(tile), {})


@functools.cache
def _load(path: Path) -> dict[str, Entries]:
    try:
        return table_file.read(path)
    except (OSError, ValueError) as error:
        _warn(path, str(error))
        return {}


def _warn(path: Path, reason: str) -> None:
    """Once a file."""
    if path not in _warned:
        _warned.add(path)
        warnings.warn(f"schedules of {path} are passed over: {reason}", stacklevel=2)


def forget() -> None:
    """Read the files anew at the next lookup; launchers keep what they have."""
    _load.cache_clear()
    _warned.clear()
