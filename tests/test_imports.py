"""Who imports whom, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lightning_scape"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

LAYERS = (
    {"__about__"},
    {"core", "comm"},
    {"ops"},
    {"checkpoint"},
    {"scape", "sparseloco"},
    {"hosts"},
    {"strategies"},
    {"api"},
    {"tools"},
    {"__init__"},
    {"__main__"},
)
"""From the bottom up: a module imports from the layers below its own, and from its own folder."""
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
ONLY_IN = {
    "lightning": ("hosts", "strategies", "tools"),
    "litgpt": ("tools",),
    "numba": ("ops.cpu",),
    "triton": ("ops.cuda",),
}
MESSAGES = ("all_", "reduce", "gather", "scatter", "broadcast", "send", "recv", "isend", "irecv", "barrier", "new_")
"""How names of torch.distributed begin that send something: only ``comm`` has them, because it counts the bytes.

And the doctor, which trains nothing, and the words, of 20 bytes each."""


def violations(module: str, source: str) -> Iterator[str]:
    """What a source, as ``lightning_scape.<module>``, does that its place forbids."""
    tree = ast.parse(source)
    here = module.split(".")[0]
    for name in imported(tree, module):
        root, *below = name.split(".")
        if root in ONLY_IN and not module.startswith(ONLY_IN[root]):
            yield f"{module} imports {name}"
        if root == PACKAGE:
            part = below[0] if below and below[0] in LAYER_OF else "__init__"
            together = {here, part} <= {"core", "comm"} or here == part
            if not together and LAYER_OF[part] >= LAYER_OF[here]:
                yield f"{module} imports {name}, which is not below it"
            if here == "hosts" and part in ("scape", "sparseloco"):  # a host trains any method
                yield f"{module} imports {name}, a method"
    for node in ast.walk(tree):
        sends = isinstance(node, ast.Attribute) and node.attr.startswith(MESSAGES)
        if (
            here != "comm"
            and module not in ("tools.doctor", "hosts.words")
            and sends
            and ast.unparse(node.value) in ("dist", "torch.distributed")
        ):
            yield f"{module} sends messages by {node.attr}"


def imported(tree: ast.AST, module: str) -> Iterator[str]:
    """The full name of all that is imported, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.rglob("*.py"))
}


def test_modules_keep_to_their_places() -> None:
    assert [each for module, source in SOURCES.items() for each in violations(module, source)] == []


def test_imports_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, source in SOURCES.items():
        names = [name.removeprefix(f"{PACKAGE}.") for name in imported(ast.parse(source), module)]
        graph[module] = {part for name in names for part in (name, name.rpartition(".")[0]) if part in SOURCES}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.layout", "def f():\n    from lightning_scape.scape import mask"),
        ("core.layout", "from lightning_scape import ScapeStrategy"),
        ("hosts.common", "from lightning_scape.scape.config import ScapeConfig"),
        ("scape.optimizer", "import lightning.pytorch as pl"),
        ("ops.naive", "import triton.language as tl"),
        ("scape.step", "import torch.distributed as dist\ndist.all_reduce(x)"),
    ],
)
def test_a_violation_is_found(module: str, source: str) -> None:
    assert list(violations(module, source))
