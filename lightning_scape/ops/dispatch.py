"""Who computes an operation: its definition in plain PyTorch, or a back end that does it faster.

A back end is a module, :mod:`.cpu` or :mod:`.cuda`. A function there with an operation's name and signature computes
it; what a back end has not, and what its function declines (:class:`Declined`), the definition computes. Definitions
call one another as operations.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import ParamSpec

VARIABLE = "LIGHTNING_SCAPE_OPS"
"""Environment variable: which implementation to use, one of :data:`CHOICES`."""
CHOICES = ("auto", "naive", "cpu", "cuda")
"""``auto``: ``cuda`` for CUDA tensors, else ``cpu``. ``naive``: definitions. ``cuda`` on CPU tensors: needs Triton's
interpreter. ``cpu`` on CUDA tensors is ``naive``."""
OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Every operation, by name."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_chosen: list[str] = []
"""What :func:`using` asked for, innermost last."""
_FLOATS = {torch.float32, torch.bfloat16}
"""What back ends compute with. No model of size is trained in fp16 or fp64, and each dtype is compiled anew."""
_NEEDS = {
    "cpu": ("numba", "cpu", "steps on a CPU run in plain PyTorch, and take four to seven times as long"),
    "cuda": ("triton", "gpu", "steps on a GPU run in plain PyTorch, in several times as many passes over memory"),
}
"""Of each back end: its compiler, the extra that brings it, and what happens without it."""


class Declined(Exception):  # noqa: N818
    """Raised by a back end's function, before it changes anything, for arguments that it is not made for."""


@contextmanager
def using(choice: str) -> Iterator[None]:
    """Within it, every operation of this process runs by ``choice``, one of :data:`CHOICES`."""
    _chosen.append(choice)
    try:
        yield
    finally:
        _chosen.pop()


def operation(definition: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes an operation of its definition. A decorator."""
    name = definition.__name__

    @functools.wraps(definition)
    def dispatched(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        backend = _backend([*_tensors((*args, *kwargs.values()))])
        twin: Callable[_P, _T] = getattr(backend, name, definition)
        try:
            return twin(*args, **kwargs)
        except Declined:
            return definition(*args, **kwargs)

    OPERATIONS[name] = dispatched
    return dispatched


def _backend(tensors: list[Tensor]) -> ModuleType | None:
    """The back end for these tensors; None: the definition, also where they are not contiguous."""
    choice = _chosen[-1] if _chosen else os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(
            f"${VARIABLE} (or `using`) must be one of {', '.join(CHOICES)}, got {choice!r}. Use 'auto' if unsure."
        )
    if choice == "naive":
        return None
    name = ("cuda" if tensors[0].is_cuda else "cpu") if choice == "auto" else choice
    # Asked of every gradient: the usual dtype first.
    readable = all(
        (each.dtype in _FLOATS or not each.is_floating_point()) and each.is_contiguous() and not each.is_neg()
        for each in tensors
    )
    return _module(name) if readable and (name == "cuda" or tensors[0].is_cpu) else None


@functools.cache
def _module(name: str) -> ModuleType | None:
    """A back end; None, with a warning, where it does not work."""
    needed, extra, consequence = _NEEDS[name]
    try:
        return importlib.import_module(f"lightning_scape.ops.{name}")
    except Exception as error:  # of several kinds where numba was built for another NumPy
        warnings.warn(
            f"SCAPE's operations need {needed}, got none that works ({type(error).__name__}: {error}): {consequence}."
            f" Install lightning-scape[{extra}].",
            stacklevel=5,
        )
        return None


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """They may lie in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
