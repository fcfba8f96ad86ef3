"""The kernels' own source: a statement with its place in the file."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

from minifused.tour.blocks import Code

KERNELS = Path(__file__).parents[1] / "kernels"


def statement(file: str, start: str) -> Code:
    """The first statement of a kernel file that starts with `start`, decorators and all.

    Raises LookupError if there is none: the kernel has changed, and so has what is told of it.
    """
    text = (KERNELS / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    for node in sorted(found, key=lambda node: node.lineno):
        if lines[node.lineno - 1].strip().startswith(start):
            return _code(file, lines, _first_line(node), node.end_lineno or node.lineno)
    raise LookupError(f"kernels/{file} has no statement that starts with {start!r}")


def _first_line(node: ast.stmt) -> int:
    """Decorators stand above the line of their function."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _code(file: str, lines: list[str], first: int, last: int) -> Code:
    text = textwrap.dedent("\n".join(lines[first - 1 : last]))
    return Code(f"kernels/{file}:{first}-{last}", text)


def function(title: str, what: Callable) -> Code:
    """The source of a Python function of this package."""
    return Code(title, textwrap.dedent(inspect.getsource(what)).rstrip())
