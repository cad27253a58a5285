"""Fresh memory that is never zero by chance: code that forgets to write some of it meets NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

_EMPTY = {"empty": torch, "empty_like": torch, "empty_strided": torch, "new_empty": torch.Tensor}
# Which functions obey `with torch.device(...)` is looked up once and kept: let it find the originals.
_device_constructors()


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill what ``torch.empty`` and its like return with NaN (integers: their largest value, booleans: True).

    Left alone are tensors without memory (meta), subclasses, and code that is being compiled.
    """
    originals = {name: getattr(owner, name) for name, owner in _EMPTY.items()}
    for name, owner in _EMPTY.items():
        setattr(owner, name, _poisoning(originals[name]))
    try:
        yield
    finally:
        for name, owner in _EMPTY.items():
            setattr(owner, name, originals[name])


def _poisoning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and type(tensor) is torch.Tensor and not tensor.is_meta:
            _poison(tensor)
        return tensor

    poisoned.__name__ = poisoned.__qualname__ = original.__name__
    return poisoned


def _poison(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
