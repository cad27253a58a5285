"""The first message of an exchange: are all ranks at the same step of the same optimizer, with the same settings?"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.core.replicas import by_rank, difference

_ALWAYS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Settings that count also where a constructor hides them behind ``**kwargs``."""

Facts = dict[str, Any]
"""What must be the same on all ranks, by its name."""


class Opening(NamedTuple):
    """What a rank says; it travels as numbers of 8 bytes."""

    square: float
    """Squared norm of the pseudo-gradient."""
    steps: float
    """Inner steps so far."""
    in_window: float
    """Inner steps since the last exchange."""
    written: float
    """Whether others than the optimizer have written into parameters."""
    facts: float
    """Their digest."""


def facts_of(number: int, optimizer: torch.optim.Optimizer, groups: Collection[int]) -> Facts:
    """The wrapper's number, and the settings. What an optimizer computes itself and keeps in its groups is none.

    Args:
        number: among those over the same ranks, counted as they were built.
        optimizer: the inner one.
        groups: numbers of the parameter groups that were wrapped; others are ignored.
    """
    names = [*dict.fromkeys([*inspect.signature(type(optimizer).__init__).parameters, *_ALWAYS])]
    facts: Facts = {"number of the SparseLoCo": number}
    for place in sorted({*groups}):
        group = optimizer.param_groups[place]
        known = {name: _plain(group[name]) for name in names if name in group and name != "params"}
        facts |= {f"{name} of group {place}": value for name, value in known.items() if value is not None}
    return facts


def _plain(value: Any) -> Any:
    """A number, or numbers; None for what is none, or would have to be fetched from a device."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    return float(value) if isinstance(value, (int, float)) else None


def digest(facts: Facts) -> int:
    """48 bits of a hash: as many as a double holds exactly."""
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=6).digest(), "little")


def check_steps(everyone: Sequence[Opening]) -> None:
    """Raises RuntimeError where ranks have taken different numbers of steps; the same on every rank."""
    if len({rank.in_window for rank in everyone}) > 1:
        texts = (f"{rank.steps:.0f} ({rank.in_window:.0f} since the last exchange)" for rank in everyone)
        said = by_rank(dict(enumerate(texts)))
        raise RuntimeError(
            f"All ranks must take the same number of steps, got {said}. A rank has skipped steps, or has fewer"
            " batches. Give all ranks as many batches, and skip a step on all ranks or on none: use"
            " torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler in place of torch.amp.GradScaler, and skip"
            " no loss that is not finite on one rank alone (SparseLoCo drops such a window on all ranks)."
        )


def different(everyone: Sequence[Facts]) -> ValueError:
    """An error that names the first of all ranks' facts that differs."""
    found = difference(dict(enumerate(everyone)))
    return ValueError(
        f"All ranks must exchange for the same optimizer with the same settings, got {found}. Build and step optimizers"
        " in the same order on every rank. Let a scheduler go by a number that is the same everywhere (log it with"
        " `sync_dist=True`), and change settings on every rank. Nothing was exchanged."
    )
