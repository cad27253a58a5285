"""Tests and examples look at the package through its public names: read from their sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_scape"
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "object", "attrgetter"}
"""Calls that take an attribute's name: these, monkeypatch's and ``patch.object``."""

OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
"""Public, in spite of their names."""
OF_OPERATIONS = re.compile(r"(ops|naive|chunked|cpu|cpu_\w+|cuda|cuda_\w+)\._\w+$|'\w+' by name$")
TESTS_OF_OPERATIONS = (
    *("kernel_checks", "test_kernels", "test_cpu", "test_ops", "compile_kernels"),
    *("test_sweep_cuda", "test_traffic"),
)
"""Look at operations from inside: which one serves, a kernel's launches, its tables and chunks. No interface needs
them."""
ALLOWED = {
    "examples/pretrain_python.py: model._init_weights": "LitGPT's",
    "tests/warm_server.py: ops._cpu": "each process that it forks makes the choice, and says so, anew",
    "tests/test_strategy_options.py: cli.trainer.strategy._start_method": "Lightning's, which it shows nowhere else",
}
"""Single uses, and why."""


OF_OTHERS = "test_private_names"
"""Holds other packages' private names against what is installed, and so uses them all."""


def _sources() -> list[Path]:
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    return sorted(path for path in paths if path.stem != OF_OTHERS)


def find_private(source: str) -> list[tuple[int, str]]:
    """Line and text of each use of somebody else's private name, where it may be one of the package's.

    A class's own are those that this source gives it; those of modules other than the package are theirs.
    """
    tree = ast.parse(source)
    own, foreign = set(_defined(tree)), _foreign_modules(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not (of_self and node.attr in own) and _root(node) not in foreign:
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom) and _of_package(node.module or ""):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [(node.lineno, ast.unparse(node)) for _ in filter(_is_private, parts)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _of_package(alias.name)]
            found += [(node.lineno, name) for name in names if any(map(_is_private, name.split(".")))]
        elif isinstance(node, ast.Call):
            found += [(node.lineno, f"{name!r} by name") for name in _names_given(node) if name not in own]
    return sorted(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in OF_NAMED_TUPLES


def _of_package(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def _defined(tree: ast.Module) -> Iterator[str]:
    """Private names that a class or a module of this source gives itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _foreign_modules(tree: ast.Module) -> set[str]:
    """Names under which modules of others are imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if not _of_package(alias.name)}
        elif isinstance(node, ast.ImportFrom) and not _of_package(node.module or ""):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with, if it begins with one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names_given(call: ast.Call) -> Iterator[str]:
    """Private names among the arguments of a call that takes an attribute's name, and in a path to patch."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    for argument in call.args:
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            continue
        parts = argument.value.split(".")
        if (function in BY_NAME and len(parts) == 1) or (function in ("patch", "setattr") and _of_package(parts[0])):
            yield from filter(_is_private, parts)


def test_no_private_name_of_the_package_is_used() -> None:
    found = []
    for path in _sources():
        name, of_operations = path.relative_to(ROOT).as_posix(), {path.stem, path.parent.name} & {*TESTS_OF_OPERATIONS}
        found += [
            f"{name}:{line}: {text}"
            for line, text in find_private(path.read_text())
            if f"{name}: {text}" not in ALLOWED and not (of_operations and OF_OPERATIONS.match(text))
        ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "optimizer._run",
        "optimizer.engine._stats",
        "optimizer.engine.masks._pending.wait()",
        "def f(x):\n    return x.communicator._side_stream",
        "self._count(3)",
        "ranks[0]._layout",
        "build()._state",
        "from lightning_scape.scape.clipping import _measure",
        "from lightning_scape._hidden import shown",
        "import lightning_scape._hidden",
        "from lightning_scape.ops import cuda\ncuda._launch()",
        "from lightning_scape.planning import measure as m\nm._cost(1)",
        "import lightning_scape\nlightning_scape.optimizer._Shared",
        "setattr(optimizer, '_mean', mean)",
        "getattr(optimizer, '_mean')",
        "monkeypatch.setattr(measure, '_cost', cost)",
        "monkeypatch.setattr('lightning_scape.planning.measure._cost', cost)",
        "patch('lightning_scape.planning.measure._cost', cost)",
        "mock.patch.object(measure, '_cost', cost)",
        "class A(B):\n    def f(self):\n        self._of_b()",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(find_private(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(1)",
        "import torch\ntorch.cuda._sleep(1)",
        "import torch.distributed as dist\ndist._functional_collectives",
        "from torch.utils._device import _device_constructors",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self):\n        return self._x + self._g()\n"
        "    def _g(self): ...",
        "x.__dict__",
        "'scape::_kernel' in name",
        "for _ in range(3): _",
        "def _helper(): ...\n_helper()",
        "optimizer.engine.masks.pending",
    ],
)
def test_what_is_ones_own_or_anothers_is_not(source: str) -> None:
    assert find_private(source) == []
