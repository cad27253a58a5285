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
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import ParamSpec

from lightning_scape.ops import naive
from lightning_scape.ops.naive import (
    AdamWStep,
    Hyper,
    RowNumbers,
    SecondMoment,
    ShardState,
    TauStep,
    adams_step,
    adamw_step,
    chunked,
    position_dtype,
    proposal_bytes,
    to_device,
)
from lightning_scape.ops.naive.rules import SELECTED_BY_TURNS

__all__ = [
    "DISPATCHED",
    "AdamWStep",
    "Hyper",
    "RowNumbers",
    "SecondMoment",
    "ShardState",
    "TauStep",
    "accumulate_exp_avg",
    "accumulate_exp_avg_sq",
    "adams_step",
    "adamw_step",
    "changes",
    "checksum",
    "compact",
    "dequantize",
    "fold",
    "gather_blocks",
    "gather_params",
    "mean",
    "merge",
    "position_dtype",
    "proposal_bytes",
    "propose",
    "quantize",
    "quantize_with_error",
    "renew_masters",
    "scatter_blocks",
    "scatter_params",
    "select",
    "sketch",
    "squared_norm",
    "sweep",
    "sweep_selects",
    "to_device",
    "update_adams",
    "update_adamw",
    "using",
]

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
        implementation = _implementation(_is_on_cuda((*args, *kwargs.values())))
        result: _T = getattr(implementation, name)(*args, **kwargs)
        return result

    return operation


def _implementation(on_cuda: bool) -> ModuleType:
    choice = _chosen[-1] if _chosen else _checked(os.environ.get(VARIABLE, "auto"), f"${VARIABLE}")
    if choice == "naive":
        return chunked
    if choice == "auto":
        return (_cuda() if on_cuda else _cpu()) or chunked
    found = _cuda() if choice == "cuda" else _cpu()
    if found is None:
        needs, extra = ("Triton", "gpu") if choice == "cuda" else ("numba", "cpu")
        raise ModuleNotFoundError(
            f"The operations {choice!r} need {needs}, got a Python without it. Install lightning-scape[{extra}], or"
            " choose 'naive'."
        )
    return found


@functools.cache
def _cuda() -> ModuleType | None:
    if find_spec("triton") is None:
        warnings.warn(
            "SCAPE's kernels need Triton, got a Python without it: steps on the GPU run in plain PyTorch, in several"
            " times as many passes over memory. Install lightning-scape[gpu].",
            stacklevel=4,
        )
        return None
    from lightning_scape.ops import cuda

    return cuda


@functools.cache
def _cpu() -> ModuleType | None:
    if find_spec("numba") is None:
        warnings.warn(
            "SCAPE's operations on a CPU need numba, got a Python without it: steps run in plain PyTorch, and take"
            " four to seven times as long. Install lightning-scape[cpu].",
            stacklevel=4,
        )
        return None
    from lightning_scape.ops import cpu

    if not cpu.are_compiled() and os.environ.get("LOCAL_RANK", "0") == "0":
        print("SCAPE compiles its operations for this CPU, once: some 15 seconds of one core.", file=sys.stderr)
    return cpu


def sweep_selects(sent: int, device: torch.device) -> bool:
    """Whether :func:`sweep` selects ``sent`` entries of a block on its way. If not, select them where nobody waits."""
    return device.type != "cuda" or sent <= SELECTED_BY_TURNS


def _is_on_cuda(values: Iterable[object]) -> bool:
    """Whether the first tensor is; it may be a member of a list or a tuple."""
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


squared_norm = _dispatched(naive.squared_norm)
sketch = _dispatched(naive.sketch)
fold = _dispatched(naive.fold)
accumulate_exp_avg = _dispatched(naive.accumulate_exp_avg)
accumulate_exp_avg_sq = _dispatched(naive.accumulate_exp_avg_sq)
propose = _dispatched(naive.propose)
merge = _dispatched(naive.merge)
select = _dispatched(naive.select)
gather_blocks = _dispatched(naive.gather_blocks)
scatter_blocks = _dispatched(naive.scatter_blocks)
compact = _dispatched(naive.compact)
quantize = _dispatched(naive.quantize)
quantize_with_error = _dispatched(naive.quantize_with_error)
dequantize = _dispatched(naive.dequantize)
sweep = _dispatched(naive.sweep)
mean = _dispatched(naive.mean)
update_adams = _dispatched(naive.update_adams)
update_adamw = _dispatched(naive.update_adamw)
changes = _dispatched(naive.changes)
gather_params = _dispatched(naive.gather_params)
renew_masters = _dispatched(naive.renew_masters)
scatter_params = _dispatched(naive.scatter_params)
checksum = _dispatched(naive.checksum)

DISPATCHED = (
    squared_norm,
    sketch,
    fold,
    accumulate_exp_avg,
    accumulate_exp_avg_sq,
    propose,
    merge,
    select,
    gather_blocks,
    scatter_blocks,
    compact,
    quantize,
    quantize_with_error,
    dequantize,
    sweep,
    mean,
    update_adams,
    update_adamw,
    changes,
    gather_params,
    renew_masters,
    scatter_params,
    checksum,
)
"""Every operation that has several implementations."""
