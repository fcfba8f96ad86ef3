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
    folder = os.environ.get("TILELANG_CACHE_DIR") or "~/.tilelang/cache"
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(
            f"kernels are compiled anew in each process, as {folder} cannot be written "
            f"({getattr(error, 'strerror', None) or error}): set TILELANG_CACHE_DIR to a folder "
            "that can",
            stacklevel=2,
        )
        temporary = tempfile.mkdtemp(prefix="tilelang-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        os.environ["TILELANG_CACHE_DIR"] = temporary
        if isinstance(error, RuntimeError):
            os.environ["HOME"] = temporary  # TVM does not start without one
