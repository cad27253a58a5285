"""Modules that have moved: their old names still import, with a warning that says the new one."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

PACKAGE = "lightning_scape"
MOVED = {
    "adams": "scape.adams",
    "arguments": "tools.arguments",
    "checkpoint.foreign": "scape.foreign",
    "checkpoint.optimizer_state": "scape.optimizer_state",
    "checkpoint.snapshot": "scape.snapshot",
    "cli": "tools.cli",
    "config": "scape.config",
    "console": "tools.console",
    "diagnosis": "tools.diagnosis",
    "doctor": "tools.doctor",
    "engine": "scape",
    "engine.block_wire": "wire.blocks",
    "engine.epoch_end": "core.epoch_end",
    "engine.hyperparameters": "scape.rows",
    "engine.local_shards": "core.local_shards",
    "engine.parameters": "core.parameters",
    "engine.participation": "scape.rows",
    "engine.replicas": "core.replicas",
    "engine.value_wire": "wire.values",
    "integrations": "hosts",
    "integrations.swap": "hosts.setup",
    "integrations.advice": "scape.advice",
    "integrations.fabric": "strategies",
    "integrations.sparseloco_fabric": "strategies",
    "integrations.sparseloco_monitor": "strategies",
    "integrations.sparseloco_trainer": "strategies",
    "integrations.trainer": "strategies",
    "layout": "core.layout",
    "litgpt_cli": "tools.litgpt_cli",
    "litgpt_data": "hosts.litgpt_data",
    "optimizer": "scape.optimizer",
    "ops.chunked": "ops.naive.chunked",
    "ops.rules": "ops.naive.rules",
    "plan": "tools.plan",
    "registration": "hosts.registration",
    "sparseloco.packed": "checkpoint.packed",
    "sparseloco.wire": "wire.blocks",
    "tool": "tools.commands",
}
"""Old name below the package to the new one, of a module or of all in a folder; the longest that fits counts."""


def new_name(old: str) -> str | None:
    """The full name that ``lightning_scape.<old>`` has today; None if it did not move."""
    below = old.removeprefix(f"{PACKAGE}.")
    fits = [name for name in MOVED if below == name or below.startswith(f"{name}.")]
    if below == old or not fits:
        return None
    longest = max(fits, key=len)
    return f"{PACKAGE}.{MOVED[longest]}{below.removeprefix(longest)}"


def import_old_names() -> None:
    """From here on. Asked first: a folder of today would give its modules under an old folder's name a second time."""
    sys.meta_path.insert(0, _Moved())


class _Moved(MetaPathFinder, Loader):
    """Gives the module of today under its old name: the same object, so that its classes are the same."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return ModuleSpec(fullname, self, is_package=hasattr(importlib.import_module(new), "__path__"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_name(spec.name)
        assert new is not None
        warnings.warn(f"`{spec.name}` is now `{new}`: import it from there.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._own_spec = module.__spec__  # the import system puts the old name's in its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m <old name>``."""
        new = new_name(fullname)
        spec = None if new is None else importlib.util.find_spec(new)
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)
