"""Who may import whom, read from the source; and what may not be in it."""

import ast
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = sorted((ROOT / "kernels").glob("*.py"))
SOURCES = [
    path
    for folder in (
        "minifused",
        "minifused/benchmark",
        "minifused/tuning",
        "minifused/tour",
        "scripts",
    )
    for path in sorted((ROOT / folder).glob("*.py"))
]
# Only these know that there are kernels: the seam all of them, the others compile statistics and,
# to say what it was that they timed, schedules.
KERNEL_USERS = {
    "ops.py": None,
    "timing.py": {"build"},
    # What looks into kernels and their compiler, which is all that these do.
    "inspection.py": None,
    "assembly.py": None,
    "layout_plot.py": None,
    "profiling.py": {"build", "limits"},
    "doctor.py": None,
    # The tour compiles schedules side by side, and kernels that fail on purpose.
    "schedules.py": {"build", "schedule"},
    "autotuning.py": {"schedule"},
    "survival.py": {"schedule"},
    "faults.py": None,
    "kernel_suite.py": {"build"},
    "step_kernels.py": {"build", "schedule", "tile"},
    "machine.py": {"processor"},
}


def imported_modules(path):
    """Dotted names of all that a file imports, wherever in it; of `from a import b` a.b as well."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def kernels_of(names):
    """Which kernel modules are imported."""
    return {n.split(".")[2] for n in names if n.startswith("minifused.kernels.")} | {
        n for n in names if n == "minifused.kernels" or n.split(".")[0] == "kernels"
    } - {"minifused.kernels"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_only_the_seam_imports_kernels(path):
    # All of tuning is about kernels, which it compiles with schedules of its own.
    allowed = None if path.parent.name == "tuning" else KERNEL_USERS.get(path.name, set())
    names = imported_modules(path)
    if allowed is not None:
        assert kernels_of(names) <= allowed
        assert not any(n.split(".")[0] in ("tilelang", "tvm") for n in names)


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_kernels_import_nothing_of_the_model(path):
    own = {n for n in imported_modules(path) if n.startswith("minifused")}
    assert {n for n in own if not n.startswith(("minifused.kernels", "minifused.errors"))} == set()
    assert "torch.nn" not in imported_modules(path)


def test_the_twin_shares_only_the_configuration():
    names = imported_modules(ROOT / "minifused" / "twin.py")
    assert {n.split(".")[0] for n in names} <= {"torch", "einops", "minifused"}
    own = {n for n in names if n.startswith("minifused")}
    assert own == {"minifused.config", "minifused.config.GPTConfig"}


def test_the_model_knows_operations_and_no_kernel():
    names = imported_modules(ROOT / "minifused" / "model.py")
    assert {n.split(".")[0] for n in names} <= {"collections", "torch", "einops", "minifused"}
    own = {n for n in names if n.startswith("minifused.")}
    assert {n.split(".")[1] for n in own} <= {"ops", "cache", "config"}


def test_kernels_are_a_folder_linked_into_the_package():
    link = ROOT / "minifused" / "kernels"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_a_kernel_file_is_short():
    lengths = {}
    for path in KERNELS:
        text = path.read_text(encoding="utf-8")
        if "with T.Kernel(" in text:
            lengths[path.name] = len(text.splitlines())
    assert len(lengths) >= 7
    assert {name: n for name, n in lengths.items() if n > 150} == {}


def tracked_texts():
    """Text files in git, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".json", ".cfg")
    return [p for p in paths if p.suffix in kinds or p.parent.name == ".ci" if p.is_file()]


def test_no_text_names_a_path_of_one_machine():
    texts = tracked_texts()
    assert ROOT / "pyproject.toml" in texts
    for folder in ("work", "root", "home"):
        path = f"/{folder}" + "/"
        guilty = [p.relative_to(ROOT) for p in texts if path in p.read_text(encoding="utf-8")]
        assert not guilty, path
