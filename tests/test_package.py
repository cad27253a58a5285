"""Importing the package registers the strategies; the commands answer at once."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_scape
from lightning_scape import api

COMMAND = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code
assert not {"torch", "lightning"} & set(sys.modules)
"""


def test_help_and_a_star_know_the_public_names_alone() -> None:
    assert lightning_scape.__all__ == api.__all__
    assert "class ScapeStrategy" in pydoc.plain(pydoc.render_doc(lightning_scape))


@pytest.mark.parametrize("word", ["--version", "--help"])
@pytest.mark.parametrize("command", ["lightning-scape", "litgpt-scape"])
def test_help_and_version_need_neither_torch_nor_lightning(command: str, word: str) -> None:
    """Importing them takes seconds."""
    script = Path(sys.executable).with_name(command)
    done = subprocess.run([sys.executable, "-c", COMMAND, script, word], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert word != "--version" or done.stdout.split()[-1] == lightning_scape.__version__


def test_importing_the_package_registers_the_strategies() -> None:
    for registry, prefix in ((StrategyRegistry, ""), (STRATEGY_REGISTRY, "Fabric")):
        assert type(registry.get("scape")) is getattr(lightning_scape, f"{prefix}ScapeStrategy")
        assert type(registry.get("sparseloco")) is getattr(lightning_scape, f"{prefix}SparseLoCoStrategy")
        assert {"scape_notebook", "sparseloco_notebook"} <= set(registry)


def test_a_command_finds_the_public_names_too_and_what_it_has_registered_stays() -> None:
    text = """
import sys
sys.argv[0] = "litgpt-scape"
from lightning.fabric.strategies import STRATEGY_REGISTRY
STRATEGY_REGISTRY.register("scape", dict, sparsity=0.9)
from lightning_scape import ScapeConfig, ops
ScapeConfig()
assert STRATEGY_REGISTRY.get("scape") == {"sparsity": 0.9}
"""
    subprocess.run([sys.executable, "-c", text], check=True)
