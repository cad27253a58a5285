"""How a configuration is written down for the user, and how metrics are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from lightning_scape.core.method import Method, Spelling


def chosen(config: Any) -> str:
    """The first option of a configuration, and those that differ from their defaults, as in a call."""
    first, defaults = fields(config)[0].name, vars(type(config)())
    return ", ".join(
        f"{name}={value!r}" for name, value in vars(config).items() if name == first or value != defaults[name]
    )


def as_call(*names: str) -> Spelling:
    """``ScapeStrategy(sparsity=...)``; of two names ``MethodStrategy(ScapeConfig(sparsity=...))``."""
    before, after = "(".join(names), ")" * len(names)
    return lambda options: f"{before}({', '.join(f'{option}={value}' for option, value in options.items())}{after}"


def with_prefixes(methods: Sequence[Method]) -> Iterator[tuple[str, Method]]:
    """Each with its metrics' prefix: ``scape``, or ``scape-0``, ``scape-1``, ... if there are several optimizers."""
    for index, method in enumerate(methods):
        yield method.name if len(methods) == 1 else f"{method.name}-{index}", method
