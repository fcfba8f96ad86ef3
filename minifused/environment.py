"""What TileLang reads from the environment when it is imported."""

import atexit
import os
import shutil
import tempfile
import warnings
from pathlib import Path


def prepare_tilelang() -> None:
    """Keep TileLang from printing, and give it a cache folder that can be written.

    Where the usual one cannot, a temporary folder of this process serves, and a warning says so.
    """
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    folder = Path(os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        warnings.warn(
            f"kernels are compiled anew in each process, as {folder} cannot be written "
            f"({error.strerror}): set TILELANG_CACHE_DIR to a folder that can",
            stacklevel=2,
        )
        os.environ["TILELANG_CACHE_DIR"] = tempfile.mkdtemp(prefix="tilelang-")
        atexit.register(shutil.rmtree, os.environ["TILELANG_CACHE_DIR"], ignore_errors=True)
