"""The size of modules and functions: a reader finds the place by its name, and sees it whole."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "lightning_scape"
MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))
LONGEST_MODULE = 500
LONGEST_FUNCTION = 60


def too_long(source: str) -> list[str]:
    """Functions of more lines than a screen has, docstrings and signatures not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = ast.get_docstring(node) is not None
            body = node.body[1:] if documented else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0
            if lines > LONGEST_FUNCTION:
                found.append(f"{node.name}: {lines} lines")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_long(module: str) -> None:
    assert len((ROOT / module).read_text(encoding="utf-8").splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_long(module: str) -> None:
    assert too_long((ROOT / module).read_text(encoding="utf-8")) == []


def test_a_long_function_is_found() -> None:
    lines = "\n".join("    pass" for _ in range(LONGEST_FUNCTION + 1))
    assert too_long(f"def f():\n    '''Text.'''\n{lines}\n") == [f"f: {LONGEST_FUNCTION + 1} lines"]


def test_the_step_fits_one_screen() -> None:
    """Its body, as it stands in the file."""
    tree = ast.parse((ROOT / "scape" / "step.py").read_text(encoding="utf-8"))
    (step,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step")
    assert step.end_lineno is not None
    assert step.end_lineno - step.body[1].lineno + 1 <= 50
