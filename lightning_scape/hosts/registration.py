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

HOST = "lightning"
"""Importing it, or any module in it, imports both registries."""
NOTEBOOK = "scape_notebook"
"""The name under which both hosts know the strategy that forks its processes."""
REGISTRIES = {
    ("lightning.pytorch.strategies", "StrategyRegistry"): ("ScapeStrategy", "SparseLoCoStrategy"),
    ("lightning.fabric.strategies", "STRATEGY_REGISTRY"): ("FabricScapeStrategy", "FabricSparseLoCoStrategy"),
}
"""Each registry's module and name, and the names of the classes for it."""


def register_with_lightning() -> None:
    """Now, if Lightning is imported; else when it is."""
    if HOST in sys.modules:
        _register_all()
    else:
        sys.meta_path.insert(0, _WhenImported())


def register_scape(registry: Any, strategy: Any) -> None:
    """Registers a host's SCAPE strategy, a class or what makes one, under its names; again is no error."""
    what = "SCAPE: sparse data-parallel training"
    registry.register("scape", strategy, description=what, override=True)
    notebooks = f"{what}; processes are forked, for notebooks"
    registry.register(NOTEBOOK, strategy, notebooks, override=True, start_method="fork")


def register_sparseloco(registry: Any, strategy: Any) -> None:
    """The same of SparseLoCo."""
    registry.register("sparseloco", strategy, description="SparseLoCo: local steps, sparse exchanges", override=True)


def _register_all() -> None:
    for (module, name), (scape, sparseloco) in REGISTRIES.items():
        registry = getattr(import_module(module), name)
        register_scape(registry, functools.partial(_make, scape))
        register_sparseloco(registry, functools.partial(_make, sparseloco))


def _make(strategy: str, **options: Any) -> Any:
    return getattr(sys.modules["lightning_scape"], strategy)(**options)


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
