"""Around what a user's loop calls, from wherever it does: compiled code, inference mode, with gradients enabled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def entry(function: Callable[P, T]) -> Callable[P, T]:
    """Runs it without gradients, outside inference mode, whose tensors nobody may change later, and as it is written.

    torch.compile would follow it into messages and numba, where it fails.
    """
    kept: list[Callable[P, T]] = []

    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not kept:  # not where it is defined: this imports the compiler, as building an optimizer does
            kept.append(torch.compiler.disable(inside))
        return kept[0](*args, **kwargs)

    return run
