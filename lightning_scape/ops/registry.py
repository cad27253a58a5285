"""Who computes what: the operations by name, as each back end registers them.

The definitions are registered by ``@operation``, in :mod:`.naive`. A back end registers what it does faster, under the
same name, and leaves the rest to the one that it falls back on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import ParamSpec

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Backend:
    """Operations as attributes: its own, and of all others those of another back end."""

    def __init__(self, name: str, otherwise: Backend | None = None) -> None:
        self.name, self._otherwise = name, otherwise

    def implements(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Registers an operation under the function's name. A decorator."""
        setattr(self, function.__name__, function)
        return function

    def __getattr__(self, name: str) -> Any:
        if self._otherwise is None:
            raise AttributeError(f"`{name}` must be an operation that lightning_scape.ops.naive defines.")
        return getattr(self._otherwise, name)

    def __repr__(self) -> str:
        return f"<operations by {self.name}>"


NAIVE = Backend("naive")
"""The definitions."""
CHUNKED = Backend("chunked", NAIVE)
"""The definitions, a few rows at a time."""
CPU = Backend("cpu", CHUNKED)
CUDA = Backend("cuda", CHUNKED)

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""The definition of every operation, by name."""


def operation(definition: Callable[_P, _T]) -> Callable[_P, _T]:
    """Registers an operation, by its definition in plain PyTorch. A decorator."""
    OPERATIONS[definition.__name__] = definition
    return NAIVE.implements(definition)
