"""Importing the package is cheap, and registers the strategies whenever Lightning is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lightning_scape

ANSWERED_AT_ONCE = """
import contextlib, io, sys
import lightning_scape
from lightning_scape.tools import cli, commands

def run(main, *words):
    sys.argv = ["command", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            status = main()
        except SystemExit as ended:
            status = ended.code
    assert out.getvalue(), words
    return status or 0

asked = [["--version"], ["--help"], *([name, "--help"] for name in commands.COMMANDS)]
helped = [run(commands.main, *words) for words in asked]
wrong = [["pln"], ["torchrun"], ["plan", "--nodes", "x"], ["doctor", "--timeout=x"]]
wrong += [[name, "--nonsens"] for name in commands.COMMANDS if name != "torchrun"]
mistyped = [run(commands.main, *words) for words in wrong]
helped += [run(cli.main, word) for word in ("--help", "-h", "--version")]
assert set(helped) == {0} and set(mistyped) == {2}, (helped, mistyped)
slow = {"torch", "numpy", "lightning", "matplotlib", "litgpt", "yaml"} & set(sys.modules)
assert not slow, slow
"""
HOST = """
class Registry(dict):
    def register(self, name, strategy, description="", override=False, **options):
        self[name] = lambda: strategy(**options)

{name} = Registry()
"""
REGISTERED = """
import sys
import {first}
import {second}
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

for registry in (STRATEGY_REGISTRY, StrategyRegistry):
    assert list(registry) == ["scape", "scape_notebook", "sparseloco", "sparseloco_notebook"], list(registry)
assert not [name for name in sys.modules if name.startswith("lightning_scape.integrations")]
lightning_scape.SparseLoCoStrategy = lambda **options: options
lightning_scape.ScapeStrategy = lambda **options: options
assert StrategyRegistry["scape"]() == StrategyRegistry["sparseloco"]() == {{}}
assert StrategyRegistry["scape_notebook"]() == {{"start_method": "fork"}}
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "lightning_scape.hosts.registration"]
assert lightning.__loader__.get_source("lightning") == "import lightning.fabric, lightning.pytorch" + chr(10)
"""


def run(text: str, cwd: Path, *options: str) -> float:
    began = time.perf_counter()
    command = [sys.executable, *options, "-c", text]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - began


def test_help_version_and_a_mistyped_word_need_neither_torch_nor_lightning(tmp_path: Path) -> None:
    """They took six seconds."""
    assert run(ANSWERED_AT_ONCE, tmp_path) < 5


@pytest.mark.parametrize("order", [("lightning", "lightning_scape"), ("lightning_scape", "lightning")])
def test_strategies_are_registered_once_both_packages_are_imported(tmp_path: Path, order: tuple[str, str]) -> None:
    """With a Lightning of three lines: the real one takes seconds."""
    for host, name in (("fabric", "STRATEGY_REGISTRY"), ("pytorch", "StrategyRegistry")):
        (tmp_path / "lightning" / host).mkdir(parents=True)
        (tmp_path / "lightning" / host / "__init__.py").touch()
        (tmp_path / "lightning" / host / "strategies.py").write_text(HOST.format(name=name))
    (tmp_path / "lightning" / "__init__.py").write_text("import lightning.fabric, lightning.pytorch\n")
    run(REGISTERED.format(first=order[0], second=order[1]), tmp_path)


def test_an_import_of_lightning_that_fails_is_not_the_last_chance(tmp_path: Path) -> None:
    (tmp_path / "lightning.py").write_text("raise ImportError('broken')\n")
    text = (
        "import lightning_scape, sys\ntry:\n    import lightning\nexcept ImportError as error:\n    said = str(error)\n"
    )
    check = "assert said == 'broken' and 'lightning_scape' in type(sys.meta_path[0]).__module__, sys.meta_path\n"
    run(text + check, tmp_path)


def test_every_public_name_has_its_home_where_type_checkers_see_it() -> None:
    tree = ast.parse(Path(str(lightning_scape.__file__)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: str(node.module).removeprefix("lightning_scape.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == lightning_scape.HOMES
    assert sorted({*seen, "__version__"}) == sorted(lightning_scape.__all__)
    assert set(lightning_scape.__all__) <= set(dir(lightning_scape))


def test_modules_are_attributes_and_other_names_are_not() -> None:
    assert lightning_scape.core.__name__ == "lightning_scape.core"
    with pytest.raises(AttributeError, match="module 'lightning_scape' has no attribute 'ScapeStrateg'"):
        lightning_scape.ScapeStrateg  # noqa: B018
