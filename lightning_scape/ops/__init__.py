"""The arithmetic of a step; one name each, whatever runs it.

Tensors on CUDA go through the Triton kernels of :mod:`.kernels`, those on a CPU through the loops of :mod:`.cpu`,
compiled by numba. Their twins in plain PyTorch, :mod:`.reference`, define what is computed, and serve where Triton or
numba is missing. To compare them, or to rule one out, set the environment variable ``LIGHTNING_SCAPE_OPS`` to one of
:data:`CHOICES`, or use :func:`using`.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

from torch import Tensor
from typing_extensions import ParamSpec

from lightning_scape.ops import reference
from lightning_scape.ops.reference import AdamWStep, Hyper, TauStep, position_dtype, to_device

__all__ = [
    "DISPATCHED",
    "AdamWStep",
    "Hyper",
    "TauStep",
    "accumulate_first_moment",
    "accumulate_second_moment",
    "adamw_step",
    "checksum",
    "compact",
    "elect",
    "fold",
    "gather",
    "measure_noise",
    "position_dtype",
    "put",
    "scatter",
    "select",
    "sketch",
    "squared_norm",
    "take",
    "tau_step",
    "to_device",
    "update",
    "update_adamw",
    "using",
    "vote",
]

VARIABLE = "LIGHTNING_SCAPE_OPS"
"""Environment variable: which implementation to use, one of :data:`CHOICES`."""
CHOICES = ("auto", "reference", "cpu", "kernels")
"""``auto``: ``kernels`` for CUDA tensors, else ``cpu``. ``kernels`` on CPU tensors: needs Triton's interpreter. ``cpu``
on CUDA tensors is the reference."""

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
        implementation = _implementation(_is_on_cuda((*args, *kwargs.values())))
        result: _T = getattr(implementation, name)(*args, **kwargs)
        return result

    return operation


def _implementation(on_cuda: bool) -> ModuleType:
    choice = _chosen[-1] if _chosen else _checked(os.environ.get(VARIABLE, "auto"), f"${VARIABLE}")
    if choice == "reference":
        return reference
    if choice == "auto":
        return (_kernels() if on_cuda else _cpu()) or reference
    found = _kernels() if choice == "kernels" else _cpu()
    if found is None:
        needs, extra = ("Triton", "gpu") if choice == "kernels" else ("numba", "cpu")
        raise ModuleNotFoundError(
            f"The operations {choice!r} need {needs}, got a Python without it. Install lightning-scape[{extra}], or"
            " choose 'reference'."
        )
    return found


@functools.cache
def _kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        warnings.warn(
            "SCAPE's kernels need Triton, got a Python without it: steps on the GPU run in plain PyTorch, in several"
            " times as many passes over memory. Install lightning-scape[gpu].",
            stacklevel=4,
        )
        return None
    from lightning_scape.ops import cuda as kernels

    return kernels


@functools.cache
def _cpu() -> ModuleType | None:
    if find_spec("numba") is None:
        warnings.warn(
            "SCAPE's operations on a CPU need numba, got a Python without it: steps run in plain PyTorch, and take two"
            " to four times as long. Install lightning-scape[cpu].",
            stacklevel=4,
        )
        return None
    from lightning_scape.ops import cpu

    return cpu


def _is_on_cuda(values: Iterable[object]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            return value.is_cuda
        if isinstance(value, (list, tuple)):
            for member in value:
                if isinstance(member, Tensor):
                    return member.is_cuda
    return False


def _checked(choice: str, name: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{name} must be one of {', '.join(CHOICES)}, got {choice!r}. Use 'auto' if unsure.")
    return choice


squared_norm = _dispatched(reference.squared_norm)
sketch = _dispatched(reference.sketch)
fold = _dispatched(reference.fold)
accumulate_first_moment = _dispatched(reference.accumulate_first_moment)
accumulate_second_moment = _dispatched(reference.accumulate_second_moment)
measure_noise = _dispatched(reference.measure_noise)
vote = _dispatched(reference.vote)
elect = _dispatched(reference.elect)
select = _dispatched(reference.select)
take = _dispatched(reference.take)
put = _dispatched(reference.put)
compact = _dispatched(reference.compact)
tau_step = _dispatched(reference.tau_step)
adamw_step = _dispatched(reference.adamw_step)
update = _dispatched(reference.update)
update_adamw = _dispatched(reference.update_adamw)
gather = _dispatched(reference.gather)
scatter = _dispatched(reference.scatter)
checksum = _dispatched(reference.checksum)

DISPATCHED = (
    squared_norm,
    sketch,
    fold,
    accumulate_first_moment,
    accumulate_second_moment,
    measure_noise,
    vote,
    elect,
    select,
    take,
    put,
    compact,
    tau_step,
    adamw_step,
    update,
    update_adamw,
    gather,
    scatter,
    checksum,
)
"""Every operation that has several implementations."""
