"""The architecture, read from the source: who imports whom, who may use Lightning, Triton and the network; lengths."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lightning_scape"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

# From the bottom up: a module may import from the layers below its own, and a folder's modules from one another. A new
# module at the top, or a new folder, has to be given its place here.
LAYERS = (
    ("__about__", "data", "moved"),
    ("core", "comm"),
    ("ops",),
    ("wire",),
    ("planning",),
    ("checkpoint",),
    ("scape", "sparseloco"),
    ("reporting",),
    ("hosts",),
    ("strategies",),
    ("tools",),
    ("__init__",),
    ("__main__",),
)
LAYER_OF = {module: number for number, modules in enumerate(LAYERS) for module in modules}
# Within a layer modules do not know one another, but for these, which still form no circle.
SIDEWAYS = ({"core", "comm"},)

# `registration` is on the list for one purpose: it registers the strategies by name.
MAY_IMPORT_LIGHTNING = {"hosts", "data", "tools"}
# What the hosts share knows neither.
MAY_NOT_IMPORT_LIGHTNING = {
    *("hosts.setup", "hosts.rendezvous"),
    *("hosts.two_level", "hosts.outsiders", "hosts.buffers", "hosts.own_clipping"),
}
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "litgpt", "pytorch_lightning"}
MAY_IMPORT_TRITON = {
    "ops.cuda.gradients",
    "ops.cuda.launch",
    "ops.cuda.masks",
    "ops.cuda.numbers",
    "ops.cuda.sweep",
    "ops.cuda.update",
    "ops.cuda.wire",
}
MAY_IMPORT_NUMBA = {"ops.cpu.numbers", "ops.cpu.update"}
MAY_COMMUNICATE = {"comm.channel", "comm.collectives", "comm.pairs", "comm.round_trips"}
# Prefixes, so that all_gather_into_tensor, reduce_scatter_tensor or broadcast_object_list are covered too.
MESSAGE = re.compile(
    r"_?(all_reduce|all_gather|all_to_all|reduce|gather|scatter|broadcast|i?send|i?recv|batch_isend|P2POp"
    r"|(monitored_)?barrier|new_group|new_subgroups|split_group)|_functional_collectives$|nn$"
)
# The methods of a ProcessGroup object, whatever holds it.
GROUP_METHOD = re.compile(r"_?(allreduce|allgather|alltoall|reduce_scatter_base)")


def find_violations(module: str, source: str) -> list[str]:
    """What ``source``, as the module ``lightning_scape.<module>``, does that its place forbids; one line each."""
    if _component(module) not in LAYER_OF:
        return [f"{module} has no layer yet: give it one in {Path(__file__).name}"]
    tree = ast.parse(source)
    imported = list(_imported(tree, module))
    found = [(line, why) for line, name in imported for why in _forbidden_import(module, name)]
    if module not in MAY_COMMUNICATE:
        found += [(line, f"sends messages by {name}") for line, name in _messages(tree, imported)]
    return [f"{module}, line {line}: {why}" for line, why in sorted(set(found))]


def _forbidden_import(module: str, name: str) -> Iterator[str]:
    here, root = _component(module), name.split(".")[0]
    if root in LIGHTNING and (here not in MAY_IMPORT_LIGHTNING or module in MAY_NOT_IMPORT_LIGHTNING):
        yield f"imports {name}"
    if root == "triton" and module not in MAY_IMPORT_TRITON:
        yield f"imports {name}"
    if root == "numba" and module not in MAY_IMPORT_NUMBA:
        yield f"imports {name}"
    if root == PACKAGE and not _may_import(here, _ours(name)):
        yield f"imports {_ours(name)}, which is not below {here}"


def _may_import(importer: str, imported: str) -> bool:
    if importer == imported:  # the files of one subpackage
        return True
    if LAYER_OF[imported] == LAYER_OF[importer]:
        return any({importer, imported} <= group for group in SIDEWAYS)
    return LAYER_OF[imported] < LAYER_OF[importer]


def _component(module: str) -> str:
    """``ops.cuda`` and ``ops.__init__`` are parts of ``ops``."""
    return module.split(".")[0]


def _ours(name: str) -> str:
    """Which of our modules an import of ``lightning_scape.<...>`` reaches; a name of no module is the package's own."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYER_OF else "__init__"


def _imported(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that is imported, anywhere in the file, also by import_module("...")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    path = [PACKAGE, *module.split(".")]
    return ".".join([*path[: -node.level], *(node.module or "").split(".")]).rstrip(".")


def _messages(tree: ast.AST, imported: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Line and name of every use of a communication call, under whatever name it goes in the file."""
    yield from ((line, name) for line, name in imported if _is_message(name))
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        name = _dotted(node, aliases)
        if name is not None and _is_message(name):
            yield node.lineno, name
        elif isinstance(node, ast.Attribute) and GROUP_METHOD.match(node.attr):
            yield node.lineno, f"the method {node.attr} of a process group"


def _is_message(name: str) -> bool:
    head, _, rest = name.partition("torch.distributed.")
    return not head and any(part == "*" or MESSAGE.match(part) for part in rest.split(".") if part)


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What the file's names stand for, as far as imports and plain assignments say."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):  # as often as there are assignments would be exact; one alias of an alias is enough
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            meaning = _dotted(node.value, aliases)
            if meaning is not None:
                aliases[node.targets[0].id] = meaning
    return aliases


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The full name that ``a.b.c`` or ``getattr(a.b, "c")`` stands for, or None."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base, last = _dotted(node.value, aliases), node.attr
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) >= 2
        and isinstance(node.args[1], ast.Constant)
    ):
        base, last = _dotted(node.args[0], aliases), str(node.args[1].value)
    else:
        return None
    return None if base is None else f"{base}.{last}"


@functools.cache
def _modules() -> dict[str, str]:
    """Dotted name below the package, and source, of each of its files."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
    }


def test_modules_keep_to_their_places():
    assert {name: found for name, source in _modules().items() if (found := find_violations(name, source))} == {}


METHODS = ("scape", "sparseloco")


def names_of_methods(source: str) -> list[str]:
    """Where a source imports one of the package's own methods, or has its name as a string."""
    tree = ast.parse(source)
    own = [f"imports {name}" for _, name in _imported(tree, "hosts.x") if _ours(name) in METHODS]
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return own + [f"says {text!r}" for text in strings if isinstance(text, str) and text in METHODS]


def test_hosts_and_checkpoints_know_no_method_by_name():
    """They ask the registry; names are for the faces of the package's own methods (``lightning_scape.strategies``)."""
    asking = {name: source for name, source in _modules().items() if name.startswith(("hosts.", "checkpoint."))}
    assert asking
    assert {name: found for name, source in asking.items() if (found := names_of_methods(source))} == {}


def test_a_name_of_a_method_is_found():
    assert names_of_methods("from lightning_scape.scape.config import A") == ["imports lightning_scape.scape.config.A"]
    assert names_of_methods("from ..sparseloco import A\nx = ('scape', 'scape_ranks')") == [
        "imports lightning_scape.sparseloco.A",
        "says 'scape'",
    ]
    assert names_of_methods('"""The scape of it."""\nfrom lightning_scape.core import method') == []


def test_imports_form_no_circle():
    modules = _modules()
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        names = [name.removeprefix(f"{PACKAGE}.") for _, name in _imported(ast.parse(source), module)]
        ours = {part for name in names for part in (name, name.rpartition(".")[0]) if part in modules}
        graph.setdefault(module, set()).update(ours - {module})
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("core.layout", "from lightning_scape.scape.optimizer import ScapeOptimizer", "imports scape"),
        ("core.layout", "def f():\n    from ..scape import mask", "imports scape"),
        ("core.quota", "from .. import ops", "imports ops"),
        ("core.quota", "from lightning_scape import ScapeStrategy", "imports __init__"),
        ("ops.naive", "from ..scape.optimizer import ScapeOptimizer", "imports scape"),
        ("ops.naive", "from ..wire import values", "imports wire"),
        ("comm.collectives", "from lightning_scape.scape.mask import Masks", "imports scape"),
        ("sparseloco.wrapper", "from lightning_scape.hosts import setup", "imports hosts"),
        ("scape.mask", "from lightning_scape.reporting import page", "imports reporting"),
        ("planning.cost_model", "from lightning_scape.scape import cost", "imports scape"),
        ("wire.values", "from lightning_scape.scape.config import ScapeConfig", "imports scape"),
        ("data", "import lightning_scape.core.layout", "imports core"),
        (
            "scape.optimizer",
            "if TYPE_CHECKING:\n    from lightning_scape.hosts.trainer import A",
            "imports hosts",
        ),
        ("hosts.fabric", "from lightning_scape.tools import cli", "imports tools"),
        ("hosts.setup", "import lightning.pytorch as pl", "imports lightning.pytorch"),
        ("scape.optimizer", "from litgpt import GPT", "imports litgpt.GPT"),
        ("scape.mask", "importlib.import_module('pytorch_lightning')", "imports pytorch_lightning"),
        ("ops.naive", "import triton.language as tl", "imports triton.language"),
        ("ops.cuda", "import numba", "imports numba"),
        ("ops.__init__", "from triton import jit", "imports triton.jit"),
        ("scape.optimizer", "import torch.distributed as dist\ndist.all_reduce(x)", "torch.distributed.all_reduce"),
        ("comm.worker", "import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("scape.step", "from torch import distributed as d\nd.broadcast_object_list(x)", "broadcast_object_list"),
        ("hosts.setup", "from torch.distributed import new_group as make", "torch.distributed.new_group"),
        ("scape.step", "from torch.distributed import *", "torch.distributed.*"),
        (
            "tools.cli",
            "import torch.distributed as dist\nd = dist\nf = d.all_gather_into_tensor",
            "all_gather_into_tensor",
        ),
        ("tools.cli", "import torch.distributed as dist\ngetattr(dist, 'all_to_all_single')(x)", "all_to_all_single"),
        (
            "tools.cli",
            "from torch.distributed import distributed_c10d as c\nc.reduce_scatter_tensor(x)",
            "reduce_scatter",
        ),
        ("tools.cli", "from torch.distributed import _functional_collectives", "_functional_collectives"),
        ("scape.mask", "self.group.allreduce(x)", "allreduce"),
        ("newcomer", "", "has no layer"),
    ],
)
def test_violation_is_found(module, source, complaint):
    violations = find_violations(module, source)
    assert violations
    assert complaint in "; ".join(violations)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("comm.collectives", "import torch.distributed as dist\ndist.all_reduce(x)"),
        (
            "hosts.trainer",
            "from lightning.pytorch.strategies import DDPStrategy\nfrom lightning_scape.hosts import setup",
        ),
        ("hosts.trainer", "from torch.distributed import ProcessGroup\nself.broadcast(x)"),
        ("hosts.setup", "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler"),
        ("scape.optimizer", "from functools import reduce\nreduce(f, x)\nself.collectives.all_gather(x)"),
        (
            "ops.cuda.masks",
            "import triton\nfrom lightning_scape.ops import naive\nfrom lightning_scape.core.layout import Piece",
        ),
        ("ops.__init__", "from .naive import fold\nfrom . import naive"),
        ("scape.step", "from lightning_scape.scape import mask\nfrom lightning_scape.comm import worker"),
        ("core.layout", "import torch\nfrom .quota import Quota"),
        ("__init__", "from lightning_scape.strategies import ScapeStrategy"),
    ],
)
def test_what_a_module_may_do_is_no_violation(module, source):
    assert find_violations(module, source) == []
