"""Settings of the test process."""

import gc
import os

import pytest
from xdist.scheduler import LoadFileScheduling

# Processes that run side by side share the cores: threads of theirs would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# TileLang makes and drops many objects, and each full collection looks at all that was imported.
gc.set_threshold(50_000)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


# Files that build the same kernels: side by side, each would compile or lower them for itself.
FAMILIES = (
    ("swap_gemm", "swap_held", "fold", "peaks"),
    ("engine", "model", "hf_generation", "benchmark_model"),
)
FAMILY_OF = {f"tests/test_{name}.py": family[0] for family in FAMILIES for name in family}


class FamilyScheduling(LoadFileScheduling):
    """--dist loadfile, but that a family is one file."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return FAMILY_OF.get(file, file)


def pytest_xdist_make_scheduler(config, log):
    return FamilyScheduling(config, log) if config.option.dist == "loadfile" else None


# PyTorch and TileLang are for the processes that run tests; the one that hands them out does not.


@pytest.fixture(scope="session", autouse=True)
def settings(tmp_path_factory):
    """One thread a process and float32 that is float32, in the baselines as in the kernels; and
    the schedules are those of the rules and of the package, whatever was tuned here."""
    import torch

    from minifused.kernels import build

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    os.environ["MINIFUSED_CACHE_DIR"] = str(tmp_path_factory.mktemp("no-table"))
    # A launcher that hands over a wrong shape or stride fails on a CPU as it would on a GPU.
    direct_call = build._direct_call
    build._direct_call = lambda kernel: _checked_call(kernel, direct_call(kernel))


def _checked_call(kernel, launch):
    """Call a CPU kernel directly, but each layout first as TileLang does, which checks all."""
    known = set()

    def checked(*tensors):
        layout = tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors)
        if layout not in known:
            kernel(*tensors)
            known.add(layout)
        launch(*tensors)

    return checked


@pytest.fixture
def no_tables(tmp_path, monkeypatch):
    """Neither the user's nor the package's table: both would lie in folders of this test."""
    from minifused.kernels import schedule_table

    monkeypatch.setenv("MINIFUSED_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(schedule_table, "PACKAGED", tmp_path / "package")
    schedule_table.forget()
    yield
    schedule_table.forget()
