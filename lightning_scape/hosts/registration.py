"""The names by which Lightning knows the strategies: ``Trainer(strategy="scape")``."""

from __future__ import annotations

from typing import Any


def notebook(method: str) -> str:
    """The name under which both hosts know a method's strategy that forks its processes."""
    return f"{method}_notebook"


def register_in(registry: Any, method: str, strategy: Any) -> None:
    """Registers a method's strategy under its names; what has them already stays, as that of ``litgpt-scape``."""
    if method not in registry:
        what = f"lightning_scape's method {method!r}"
        notebooks = f"{what}; processes are forked, for notebooks"
        registry.register(method, strategy, description=what)
        registry.register(notebook(method), strategy, description=notebooks, start_method="fork")
