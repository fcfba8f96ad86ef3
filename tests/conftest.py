"""Settings of the test process."""

import gc
import os

import pytest
import torch

from minifused.kernels import build, schedule_table

# float32 means float32, in the baselines as in the kernels.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False

# Processes that run side by side share the cores: threads of theirs would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# TileLang makes and drops many objects, and each full collection looks at all that was imported.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


_direct_call = build._direct_call


def _checked_call(kernel):
    """Call a CPU kernel directly, but each layout first as TileLang does, which checks all."""
    launch, known = _direct_call(kernel), set()

    def checked(*tensors):
        layout = tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors)
        if layout not in known:
            kernel(*tensors)
            known.add(layout)
        launch(*tensors)

    return checked


# A launcher that hands over a wrong shape or stride fails on a CPU as it would on a GPU.
build._direct_call = _checked_call


@pytest.fixture(scope="session", autouse=True)
def no_table_of_the_users(tmp_path_factory):
    """The schedules are those of the rules and of the package, whatever was tuned here."""
    os.environ["MINIFUSED_CACHE_DIR"] = str(tmp_path_factory.mktemp("no-table"))


@pytest.fixture
def no_tables(tmp_path, monkeypatch):
    """Neither the user's nor the package's table: both would lie in folders of this test."""
    monkeypatch.setenv("MINIFUSED_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(schedule_table, "PACKAGED", tmp_path / "package")
    schedule_table.forget()
    yield
    schedule_table.forget()
