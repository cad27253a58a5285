"""The names by which Lightning knows the strategies: ``Trainer(strategy="scape")``."""

from __future__ import annotations

from typing import Any


def notebook(method: str) -> str:
    """The name under which both hosts know a method's strategy that forks its processes."""
    return f"{method}_notebook"


def register_in(registry: Any, method: str, strategy: Any) -> None:
    """Registers a method's strategy, a class or what makes one, under its names; again is no error."""
    what = f"lightning_scape's method {method!r}"
    registry.register(method, strategy, description=what, override=True)
    notebooks = f"{what}; processes are forked, for notebooks"
    registry.register(notebook(method), strategy, notebooks, override=True, start_method="fork")
