"""Import paths of version 0.2.0: they give the modules of today, with a warning that says the new name."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from lightning_scape.moved import MOVED, new_name

OLD = [
    "lightning_scape.config",
    "lightning_scape.optimizer",
    "lightning_scape.engine.mask",
    "lightning_scape.engine.participation",
    "lightning_scape.engine.replicas",
    "lightning_scape.integrations.trainer",
    "lightning_scape.checkpoint.optimizer_state",
    "lightning_scape.plan",
    "lightning_scape.sparseloco.wire",
]


@pytest.mark.parametrize("old", OLD)
def test_an_old_path_gives_the_module_of_today(old: str) -> None:
    for name in [name for name in sys.modules if name in OLD]:
        del sys.modules[name]
    new = new_name(old)
    assert new is not None
    with pytest.warns(DeprecationWarning, match=f"`{old}` is now `{new}`"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__spec__.name == module.__name__ == new


def test_every_new_name_is_there() -> None:
    for old in MOVED:
        assert importlib.util.find_spec(new_name(f"lightning_scape.{old}")) is not None, old
    assert new_name("lightning_scape.config_of_mine") is None
    assert new_name("lightning_scape.scape.config") is None


@pytest.mark.few(0)
def test_an_old_command_runs() -> None:
    command = [sys.executable, "-m", "lightning_scape.tool", "plan", "--help"]
    assert "usage: lightning-scape plan" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
