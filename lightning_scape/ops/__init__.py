"""The arithmetic of a step; one name each, whatever runs it.

Tensors on CUDA go through the Triton kernels of :mod:`.cuda`, those on a CPU through the loops of :mod:`.cpu`,
compiled by numba. Their twins in plain PyTorch, :mod:`.naive`, define what is computed. Where Triton or numba is
missing, these serve, a few rows at a time (:mod:`.naive.chunked`). To compare them, or to rule one out, set the
environment variable ``LIGHTNING_SCAPE_OPS`` to one of :data:`CHOICES`, or use :func:`using`.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor
from typing_extensions import ParamSpec

from lightning_scape.ops.naive import chunked  # noqa: F401  it registers what serves where no faster back end does
from lightning_scape.ops.naive.blocks import Sweep as Sweep
from lightning_scape.ops.naive.masks import as_bits as as_bits
from lightning_scape.ops.naive.masks import mask_bytes as mask_bytes
from lightning_scape.ops.naive.masks import position_dtype as position_dtype
from lightning_scape.ops.naive.params import ParamEntries as ParamEntries
from lightning_scape.ops.naive.rules import Hyper as Hyper
from lightning_scape.ops.naive.rules import RowNumbers as RowNumbers
from lightning_scape.ops.naive.rules import SecondMoment as SecondMoment
from lightning_scape.ops.naive.rules import ShardState as ShardState
from lightning_scape.ops.naive.rules import adams_step as adams_step
from lightning_scape.ops.naive.rules import adamw_step as adamw_step
from lightning_scape.ops.naive.tables import to_device as to_device
from lightning_scape.ops.registry import CHUNKED, CPU, CUDA, OPERATIONS, Backend

if TYPE_CHECKING:  # every operation, as its definition has it
    from lightning_scape.ops.naive import *  # noqa: F403

VARIABLE = "LIGHTNING_SCAPE_OPS"
"""Environment variable: which implementation to use, one of :data:`CHOICES`."""
CHOICES = ("auto", "naive", "cpu", "cuda")
"""``auto``: ``cuda`` for CUDA tensors, else ``cpu``. ``naive``: plain PyTorch. ``cuda`` on CPU tensors: needs Triton's
interpreter. ``cpu`` on CUDA tensors is ``naive``."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_chosen: list[str] = []
"""What :func:`using` asked for, innermost last."""


@contextmanager
def using(choice: str) -> Iterator[None]:
    """Within it, every operation of this process runs by ``choice``, one of :data:`CHOICES`."""
    _chosen.append(_checked(choice, "`choice`"))
    try:
        yield
    finally:
        _chosen.pop()


def _dispatched(twin: Callable[_P, _T]) -> Callable[_P, _T]:
    """The operation, by kernel or by twin, as its first tensor's device says."""
    name = twin.__name__

    @functools.wraps(twin)
    def operation(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        first = _first_tensor((*args, *kwargs.values()))
        result: _T = getattr(_implementation(first is not None and first.is_cuda), name)(*args, **kwargs)
        return result

    return operation


def _implementation(on_cuda: bool) -> Backend:
    choice = _chosen[-1] if _chosen else _checked(os.environ.get(VARIABLE, "auto"), f"${VARIABLE}")
    if choice == "naive":
        return CHUNKED
    if choice == "auto":
        return (_cuda() if on_cuda else _cpu()) or CHUNKED
    found = _cuda() if choice == "cuda" else _cpu()
    if found is None:
        needs, extra = ("Triton", "gpu") if choice == "cuda" else ("numba", "cpu")
        raise ModuleNotFoundError(
            f"The operations {choice!r} need {needs}, got none that works here. Install lightning-scape[{extra}], or"
            " choose 'naive'."
        )
    return found


@functools.cache
def _cuda() -> Backend | None:
    if find_spec("triton") is None:
        warnings.warn(
            "SCAPE's kernels need Triton, got a Python without it: steps on the GPU run in plain PyTorch, in several"
            " times as many passes over memory. Install lightning-scape[gpu].",
            stacklevel=4,
        )
        return None
    import lightning_scape.ops.cuda  # noqa: F401  it registers what it has

    return CUDA


@functools.cache
def _cpu() -> Backend | None:
    problem = None if find_spec("numba") is not None else "a Python without it"
    if problem is None:
        try:
            from lightning_scape.ops.cpu import numbers, sweep
        except Exception as error:  # of several kinds where numba was built for another NumPy
            problem = f"one that compiles nothing ({type(error).__name__}: {error})"
    if problem is not None:
        warnings.warn(
            f"SCAPE's operations on a CPU need numba, got {problem}: steps run in plain PyTorch, and take four to seven"
            " times as long. Install lightning-scape[cpu].",
            stacklevel=4,
        )
        return None
    if not numbers.is_compiled(sweep.fold) and os.environ.get("LOCAL_RANK", "0") == "0":
        print("SCAPE compiles its operations for this CPU, once: some 15 seconds of one core.", file=sys.stderr)
    return CPU


def _first_tensor(values: Iterable[object]) -> Tensor | None:
    """It may lie in lists and tuples."""
    for value in values:
        found = _first_tensor(value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, Tensor):
            return found
    return None


def _checked(choice: str, name: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{name} must be one of {', '.join(CHOICES)}, got {choice!r}. Use 'auto' if unsure.")
    return choice


DISPATCHED = tuple(map(_dispatched, OPERATIONS.values()))
"""Every operation: what it does is said in :mod:`.naive`, its name is one of this module."""
globals().update({operation.__name__: operation for operation in DISPATCHED})
