"""The size of modules, classes and functions: a reader finds the place by its name, and sees it whole."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "lightning_scape"
MODULES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
LONGEST_MODULE = 500
LONGEST_FUNCTION = 60
MOST_METHODS = 20
MOST_ARGUMENTS = 12
"""Of a constructor."""
FACE = "a documented face: its options by name"
MORE_METHODS = {
    "_Machine": "a machine of pickle's instructions: a method for each kind of them",
    "ScapeOptimizer": "torch's interface of an optimizer, and what a user asks of it",
}
MORE_ARGUMENTS = dict.fromkeys(
    ("SparseLoCo", "ScapeOptions", "SparseLoCoOptions", "MethodStrategy", "FabricMethodStrategy"), FACE
)
"""Classes that have more of either, and why."""


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


def counts(node: ast.ClassDef) -> tuple[int, int]:
    """A class's methods (a property is one, with its setter), and the arguments that make one."""
    methods = {each.name: each.args for each in node.body if isinstance(each, ast.FunctionDef)}
    made_of = methods.get("__init__")
    given = [] if made_of is None else [*made_of.posonlyargs, *made_of.args[1:], *made_of.kwonlyargs]
    return len(methods), len(given)


def large(source: str) -> list[str]:
    """Classes with too many methods, or too many arguments to make one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods, arguments = counts(node)
            many = methods > MOST_METHODS and node.name not in MORE_METHODS
            if many or (arguments > MOST_ARGUMENTS and node.name not in MORE_ARGUMENTS):
                found.append(f"{node.name}: {methods} methods, {arguments} arguments")
    return found


def test_no_module_is_long() -> None:
    lines = {module: len(source.splitlines()) for module, source in MODULES.items()}
    assert {module: count for module, count in lines.items() if count > LONGEST_MODULE} == {}


def test_no_function_is_long() -> None:
    assert {module: found for module, source in MODULES.items() if (found := too_long(source))} == {}


def test_no_class_is_large() -> None:
    assert {module: found for module, source in MODULES.items() if (found := large(source))} == {}


def test_each_exception_is_one() -> None:
    classes = [
        node for source in MODULES.values() for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)
    ]
    assert {*MORE_METHODS} == {each.name for each in classes if counts(each)[0] > MOST_METHODS}
    assert {*MORE_ARGUMENTS} == {each.name for each in classes if counts(each)[1] > MOST_ARGUMENTS}


def test_a_large_class_is_found() -> None:
    methods = "".join(f"    def f{number}(self): ...\n" for number in range(MOST_METHODS))
    assert large(f"class A:\n{methods}") == []
    assert large(f"class A:\n{methods}    def g(self): ...\n") == ["A: 21 methods, 0 arguments"]
    arguments = ", ".join(f"a{number}" for number in range(MOST_ARGUMENTS))
    assert large(f"class A:\n    def __init__(self, {arguments}): ...\n") == []
    assert large(f"class A:\n    def __init__(self, {arguments}, *, b): ...\n") == ["A: 1 methods, 13 arguments"]


def test_a_long_function_is_found() -> None:
    lines = "\n".join("    pass" for _ in range(LONGEST_FUNCTION + 1))
    assert too_long(f"def f():\n    '''Text.'''\n{lines}\n") == [f"f: {LONGEST_FUNCTION + 1} lines"]


def test_the_step_fits_one_screen() -> None:
    """Its body, as it stands in the file."""
    tree = ast.parse((ROOT / "scape" / "step.py").read_text(encoding="utf-8"))
    (step,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step")
    assert step.end_lineno is not None
    assert step.end_lineno - step.body[1].lineno + 1 <= 50


def test_the_top_level_holds_what_belongs_there() -> None:
    """A file that a run has left in the clone (a config.yaml of LightningCLI's) is not for the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT.parent, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"git does not list the files: {listed.stderr.strip()}")
    folders = {"lightning_scape", "examples", "configs", "tests", "docs", ".ci", ".github"}
    files = {"pyproject.toml", "CHANGELOG.md", "README.md", "LICENSE", "mkdocs.yml"}
    hidden = {".gitignore", ".pre-commit-config.yaml"}
    assert {name.partition("/")[0] for name in listed.stdout.splitlines()} <= folders | files | hidden
