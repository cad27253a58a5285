"""Lightning knows the strategies by name, ``Trainer(strategy="scape")``, as soon as both packages are imported.

In either order, and at no cost before: neither Lightning nor torch is imported for it. A class is imported when its
strategy is asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from lightning_scape.core.method import named, names, when_registered

HOST = "lightning"
"""Importing it, or any module in it, imports both registries."""
REGISTRIES = {
    ("lightning.pytorch.strategies", "StrategyRegistry"): (
        {"scape": "ScapeStrategy", "sparseloco": "SparseLoCoStrategy"},
        "lightning_scape.hosts.trainer:MethodStrategy",
    ),
    ("lightning.fabric.strategies", "STRATEGY_REGISTRY"): (
        {"scape": "FabricScapeStrategy", "sparseloco": "FabricSparseLoCoStrategy"},
        "lightning_scape.hosts.fabric:FabricMethodStrategy",
    ),
}
"""Each registry's module and name, the classes of its strategies by method, and the one for any other method."""


def register_with_lightning() -> None:
    """Now, if Lightning is imported; else when it is."""
    if HOST in sys.modules:
        _register_all()
    else:
        sys.meta_path.insert(0, _WhenImported())


def notebook(method: str) -> str:
    """The name under which both hosts know a method's strategy that forks its processes."""
    return f"{method}_notebook"


def register_in(registry: Any, method: str, strategy: Any) -> None:
    """Registers a method's strategy, a class or what makes one, under its names; again is no error."""
    what = f"lightning_scape's method {method!r}"
    registry.register(method, strategy, description=what, override=True)
    notebooks = f"{what}; processes are forked, for notebooks"
    registry.register(notebook(method), strategy, notebooks, override=True, start_method="fork")


def _register_all() -> None:
    for method in names():
        _register(method)
    when_registered(_register)


def _register(method: str) -> None:
    for (module, name), (classes, general) in REGISTRIES.items():
        make = functools.partial(_make, method, classes.get(method), general)
        register_in(getattr(import_module(module), name), method, make)


def _make(method: str, strategy: str | None, general: str, **options: Any) -> Any:
    """One of ours, or the general one with the method's options, by name or at their defaults."""
    if strategy is not None:
        return getattr(sys.modules["lightning_scape"], strategy)(**options)
    module, _, name = general.partition(":")
    return getattr(import_module(module), name)(named(method).config_class(), **options)


class _WhenImported(MetaPathFinder):
    """Lets Lightning's import happen as ever, and registers the strategies at its end: where it fails, at the next."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != HOST:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            # In this one loader, which stays the module's: whoever asks it for the source finds what he knows.
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _register_all()
