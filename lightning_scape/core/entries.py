"""A wrapper of what a user's loop calls: from compiled code, in inference mode, or with gradients enabled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def entry(function: Callable[P, T]) -> Callable[P, T]:
    """Runs the function without gradients, outside inference mode, and never compiled.

    Nobody could change tensors of inference mode later; torch.compile would fail in messages and in numba.
    """
    kept: list[Callable[P, T]] = []

    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not kept:  # not at the definition: this imports the compiler, as building an optimizer does
            kept.append(torch.compiler.disable(inside))
        return kept[0](*args, **kwargs)

    return run
