"""The inner optimizer's settings: lr, betas and what else its constructor takes. They must be the same on all ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_ALWAYS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Also where a constructor hides them behind ``**kwargs``."""


@dataclass(frozen=True)
class Settings:
    """Those of an optimizer's groups, as plain numbers."""

    values: list[tuple[str, Any]]
    """Each with its name."""
    problem: str | None
    """A rule that one breaks, as rule, value and remedy."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, groups: Collection[int]) -> Settings:
        """As they are now. What an optimizer works out for itself and keeps in its groups is no setting.

        Args:
            optimizer: whose.
            groups: numbers of those that were wrapped; others are none of our business.
        """
        names = [*dict.fromkeys([*inspect.signature(type(optimizer).__init__).parameters, *_ALWAYS])]
        values, problem = [], None
        for number, group in enumerate(optimizer.param_groups):
            if number not in groups:
                continue
            known = {name: _plain(group[name]) for name in names if name in group and name != "params"}
            values += [(f"{name} of group {number}", value) for name, value in known.items() if value is not None]
            problem = problem or _problem(number, known)
        return cls(values, problem)

    @property
    def digest(self) -> int:
        """64 bits of a hash."""
        return int.from_bytes(blake2b(repr(self.values).encode(), digest_size=8).digest(), "little", signed=True)

    @staticmethod
    def different(everyone: Sequence[Sequence[tuple[str, Any]]]) -> list[str]:
        """What each rank has of the first setting that differs."""
        for name in dict.fromkeys(name for values in everyone for name, _ in values):
            said = [f"{name} = {dict(values).get(name)!r}" for values in everyone]
            if len(set(said)) > 1:
                return said
        return [repr(values) for values in everyone]  # their order


def _plain(value: Any) -> Any:
    """A number, or numbers; None for what is none, or would have to be fetched from a device."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    return float(value) if isinstance(value, (int, float)) else None


def _problem(number: int, known: Mapping[str, Any]) -> str | None:
    lr, betas = known.get("lr"), known.get("betas")
    if lr is not None and not (math.isfinite(lr) and lr >= 0):
        return f"The learning rate must be finite and >= 0, got {lr} in group {number}. Look at what sets it."
    if isinstance(betas, tuple) and any(beta is not None and not 0 <= beta < 1 for beta in betas):
        return f"`betas` must be in [0, 1), got {betas} in group {number}. Look at what sets them."
    return None
