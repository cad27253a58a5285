"""Are all ranks at the same step when they exchange, with the parameters that were wrapped?

The first message of an exchange says it, beside the norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.engine.parameters import Parameters

MOST_NAMED = 8
"""Ranks that an error names."""


class Place(NamedTuple):
    """Where a rank stands when it opens an exchange."""

    steps: int
    """Inner steps so far."""
    in_window: int
    """Inner steps since the last exchange began."""
    changed: bool = False
    """Whether the optimizer's parameters are no longer those that were wrapped."""


def changed(parameters: Parameters, param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether parameters were frozen, unfrozen, added or removed. A look at each in every step: nothing is allocated.

    Args:
        parameters: those that were wrapped.
        param_groups: the optimizer's now.
    """
    now = dict.fromkeys(id(p) for group in param_groups for p in group["params"] if p.requires_grad)  # tied ones once
    return list(now) != [id(parameter) for parameter in parameters.tensors]


def opening(square: Tensor, place: Place) -> Tensor:
    """A rank's first message, int32 ``[3]``; written without waiting for the device.

    Args:
        square: ``[1]`` fp32, squared norm of the pseudo-gradient.
        place: of this rank.
    """
    message = torch.empty(3, dtype=torch.int32, device=square.device)
    message[:1] = square.view(torch.int32)
    message[1] = place.steps
    message[2] = ~place.in_window if place.changed else place.in_window
    return message


def squares(openings: Tensor) -> Tensor:
    """``[N]`` fp32: the squared norms, from every rank's first message ``[N, 3]``."""
    return openings[:, 0].contiguous().view(torch.float32)


def places(openings: Tensor) -> list[Place]:
    """Of all ranks. On CUDA it waits for the device."""
    rows = openings[:, 1:].tolist()
    return [Place(steps, in_window if in_window >= 0 else ~in_window, in_window < 0) for steps, in_window in rows]


def idle(everyone: Sequence[Place]) -> bool:
    """Whether no rank has begun a window."""
    return not any(place.in_window for place in everyone)


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
            " wrap the optimizer anew on every rank."
        )
    if len({place.in_window for place in everyone}) == 1:
        return
    kinds = list(dict.fromkeys(everyone))
    named = "; ".join(
        f"{kind.steps} ({kind.in_window} since the last exchange) on"
        f" {_ranks([rank for rank, place in enumerate(everyone) if place == kind])}"
        for kind in kinds
    )
    raise RuntimeError(
        f"All ranks must take the same number of steps, got {named}. A rank has skipped steps, or has fewer batches."
        " Give all ranks as many batches, and skip a step on all ranks or on none: use"
        " torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler in place of torch.amp.GradScaler, and skip no"
        " loss that is not finite on one rank alone (SparseLoCo drops such a window on all ranks)."
    )


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
