"""Are all ranks at the same step of the same optimizer when they exchange, with the same settings?

The first message of an exchange says it, beside the norm.
"""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import OnItsWay

MOST_NAMED = 8
"""Ranks that an error names."""
_WRITTEN = 6
"""Where the digests of :func:`written` begin in a first message."""
_ALWAYS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Settings that count also where a constructor hides them behind ``**kwargs``."""


class Place(NamedTuple):
    """Where a rank stands when it opens an exchange."""

    steps: int
    """Inner steps so far."""
    in_window: int
    """Inner steps since the last exchange began."""
    changed: bool = False
    """Whether the optimizer's parameters are no longer those that were wrapped."""
    number: int = 0
    """The wrapper's number, among those over the same ranks."""
    digest: int = 0
    """Digest of the optimizer's settings, 64 bits."""


def changed(parameters: Parameters, param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether parameters were frozen, unfrozen, added or removed. Looks at each of them, in every step.

    Args:
        parameters: those that were wrapped.
        param_groups: the optimizer's now.
    """
    now = dict.fromkeys(id(p) for group in param_groups for p in group["params"] if p.requires_grad)  # tied ones once
    return list(now) != [id(parameter) for parameter in parameters.tensors]


def opening(square: Tensor, place: Place, written: Tensor) -> Tensor:
    """A rank's first message, int32 ``[10]``; written without waiting for the device.

    Args:
        square: ``[1]`` fp32, squared norm of the pseudo-gradient.
        place: of this rank.
        written: int64 ``[2]``, digests of what others than the optimizer have written.
    """
    in_window = ~place.in_window if place.changed else place.in_window
    words = [0, place.steps, in_window, place.number, *struct.unpack("=ii", struct.pack("=q", place.digest))]
    message = torch.tensor(words, dtype=torch.int32, device="cpu").to(square.device, non_blocking=True)
    message[:1] = square.view(torch.int32)
    return torch.cat([message, written.view(torch.int32)])


def squares(openings: Tensor) -> Tensor:
    """``[N]`` fp32: the squared norms, from every rank's first message."""
    return openings[:, 0].contiguous().view(torch.float32)


def places(openings: Tensor) -> list[Place]:
    """The places of all ranks. On CUDA it waits for the device."""
    found = []
    for steps, in_window, number, *digest in openings[:, 1:_WRITTEN].tolist():
        (whole,) = struct.unpack("=q", struct.pack("=ii", *digest))
        found.append(Place(steps, in_window if in_window >= 0 else ~in_window, in_window < 0, number, whole))
    return found


def apart(openings: Tensor) -> Tensor:
    """0-dim bool, on the device: whether ranks differ in what must be the same. False if any has changed parameters."""
    facts = openings[:, 2:_WRITTEN]
    return (facts != facts[:1]).any() & (facts[:, 0] >= 0).all()


def written(openings: Tensor) -> Tensor:
    """int64 ``[N, 2]``: every rank's digests of what others than its optimizer have written."""
    return openings[:, _WRITTEN:].contiguous().view(torch.int64)


def check(everyone: Sequence[Place]) -> None:
    """Compares the places of all ranks.

    Raises:
        RuntimeError: they differ; the same on every rank.
        ValueError: some rank's parameters have changed; on every rank.
    """
    if elsewhere := [rank for rank, place in enumerate(everyone) if place.changed]:
        raise ValueError(
            "Parameters must be frozen, unfrozen and added before SparseLoCo wraps the optimizer, got others now on"
            f" {_ranks(elsewhere)}. All ranks have ended the window with those that were wrapped: call close(), and"
            " wrap the optimizer anew on every rank; the Trainer's `trainer.strategy.setup_optimizers(trainer)` and"
            " Fabric's `setup_optimizers` do both."
        )
    if len({place.number for place in everyone}) > 1:
        named = _by_kind([f"SparseLoCo number {place.number}" for place in everyone])
        raise RuntimeError(
            f"All ranks must exchange for the same optimizer, got {named} (counted as they were built). Step the"
            " optimizers in the same order on every rank, and build them in the same order. Nothing was exchanged."
        )
    if len({place.in_window for place in everyone}) == 1:
        return
    named = _by_kind([f"{place.steps} ({place.in_window} since the last exchange)" for place in everyone])
    raise RuntimeError(
        f"All ranks must take the same number of steps, got {named}. A rank has skipped steps, or has fewer batches."
        " Give all ranks as many batches, and skip a step on all ranks or on none: use"
        " torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler in place of torch.amp.GradScaler, and skip no"
        " loss that is not finite on one rank alone (SparseLoCo drops such a window on all ranks)."
    )


@dataclass(frozen=True)
class Settings:
    """Settings of the inner optimizer's groups, as plain numbers: lr, betas, and what else its constructor takes."""

    values: list[tuple[str, Any]]
    """Each with its name."""
    problem: str | None
    """A rule that one breaks, as rule, value and remedy."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, groups: Collection[int]) -> Settings:
        """The settings as they are now. What an optimizer computes itself and keeps in its groups is no setting.

        Args:
            optimizer: the inner one.
            groups: numbers of those that were wrapped; others are ignored.
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


class Opened:
    """The first messages of an exchange, on their way to the CPU.

    Args:
        openings: every rank's, ``[N, 10]``.
        apart: :func:`apart`, over all rows of a replica.
        settings: of this rank's optimizer, when it wrote its own.
    """

    def __init__(self, openings: Tensor, apart: Tensor, settings: Settings) -> None:
        self._openings, self._apart, self._settings = OnItsWay(openings), OnItsWay(apart), settings

    @property
    def idle(self) -> bool:
        """Whether no rank has begun a window. On CUDA it waits for the device, like the next."""
        return not any(place.in_window for place in places(self._openings.read()))

    @property
    def apart(self) -> bool:
        """Whether ranks differ in what must be the same."""
        return bool(self._apart.read())

    def judge(self, ranks: Communicator) -> None:
        """:func:`check`, and the same of the optimizers' settings. Where those differ, a message says which.

        Args:
            ranks: those of the exchange, with nothing on its way.

        Raises:
            RuntimeError, ValueError: as :func:`check`; settings differ, or cannot be trained with. On every rank.
        """
        everyone = places(self._openings.read())
        check(everyone)
        if len({place.digest for place in everyone}) > 1:
            named = _by_kind(self._settings.different(ranks.all_gather_object(self._settings.values)))
            raise ValueError(
                f"The inner optimizers must have the same settings on all ranks, got {named}. Let a scheduler go by a"
                " number that is the same everywhere (log it with `sync_dist=True`), and change settings on every rank."
            )
        if self.apart and not any(place.changed for place in everyone):
            raise RuntimeError(
                "All ranks must be at the same step with the same settings, got a difference on other ranks of this"
                " node: their errors name it."
            )
        if self._settings.problem is not None:
            raise ValueError(self._settings.problem)


def _by_kind(said: Sequence[str]) -> str:
    """What ranks say, each once, with the ranks that say it."""
    kinds = dict.fromkeys(said)
    return "; ".join(f"{kind} on {_ranks([rank for rank, own in enumerate(said) if own == kind])}" for kind in kinds)


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


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
