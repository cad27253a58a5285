"""Lightning knows the strategies by name, ``Trainer(strategy="scape")``, as soon as both packages are imported.

The order of imports does not matter, and neither Lightning nor torch is imported for it. A class is imported when its
strategy is asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from lightning_scape.core.method import named, names, when_registered

HOST = "lightning"
"""Importing it, or any module in it, imports both registries."""
REGISTRIES = {
    ("lightning.pytorch.strategies", "StrategyRegistry"): "lightning_scape.hosts.trainer:MethodStrategy",
    ("lightning.fabric.strategies", "STRATEGY_REGISTRY"): "lightning_scape.hosts.fabric:FabricMethodStrategy",
}
"""Each registry's module and name, and the strategy of any method."""
_faces: dict[str, tuple[str, ...]] = {}


def register_with_lightning(faces: Mapping[str, tuple[str, ...]]) -> None:
    """Registers now if Lightning is imported, else when it is.

    Args:
        faces: by method, names of the strategies for that method alone: one for each of :data:`REGISTRIES`.
    """
    _faces.update(faces)
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
    faces = _faces.get(method, (None,) * len(REGISTRIES))
    for ((module, name), general), face in zip(REGISTRIES.items(), faces, strict=True):
        make = functools.partial(_make, method, face, general)
        register_in(getattr(import_module(module), name), method, make)


def _make(method: str, face: str | None, general: str, **options: Any) -> Any:
    """The method's own strategy, or the general one with the method's options, by name or at their defaults."""
    if face is not None:
        return getattr(sys.modules["lightning_scape"], face)(**options)
    module, _, name = general.partition(":")
    return getattr(import_module(module), name)(named(method).config_class(), **options)


class _WhenImported(MetaPathFinder):
    """Lets Lightning's import happen as ever, and registers the strategies at the end of one that succeeds."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != HOST:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            # In this one loader, which stays the module's: so it still gives the module's source.
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _register_all()
