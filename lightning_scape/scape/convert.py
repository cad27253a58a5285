"""Which optimizers ScapeOptimizer can take over, and what is said of those it cannot."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.local_shards import is_sharded
from lightning_scape.scape.adams import AdamS
from lightning_scape.scape.install import ELSEWHERE

_ACCEPTED = (torch.optim.AdamW, torch.optim.Adam, AdamS)
_NOT_KEPT = {
    "amsgrad": "the maximum of a second moment that is estimated would only grow",
    "maximize": "negate the loss instead",
    "differentiable": "the step changes parameters in place, outside autograd",
    "capturable": "the step exchanges messages and cannot be captured in a CUDA graph",
}


def check_convertible(optimizer: torch.optim.Optimizer) -> None:
    """Raises unless the optimizer is an AdamW, Adam or AdamS with settings that can be kept.

    Raises:
        TypeError: another kind of optimizer, or one with a step of its own.
        ValueError: a setting that cannot be kept, or a state that is sharded.
    """
    kind = type(optimizer)
    # torch wraps `step` once per class (profiling), and a scheduler once per object: compare what is inside.
    steps = {inspect.unwrap(accepted.step) for accepted in _ACCEPTED}
    if inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step)) not in steps:
        raise TypeError(
            "The optimizer must be torch.optim.AdamW, torch.optim.Adam or lightning_scape.AdamS, with the step of that"
            f" class, got {kind.__module__}.{kind.__qualname__} with a `step` of its own: SCAPE's would take its place."
            " Use one of these, or SparseLoCo, which keeps any optimizer."
        )
    for group in optimizer.param_groups:
        for name, why in _NOT_KEPT.items():
            if group.get(name):
                raise ValueError(
                    f"`{name}` must be False, got {group[name]!r}: {why}. Build {kind.__name__} without it."
                )
        of_l2 = isinstance(optimizer, torch.optim.Adam) and not group.get("decoupled_weight_decay")
        if of_l2 and group["weight_decay"]:
            raise ValueError(
                f"`weight_decay` of Adam must be 0, got {group['weight_decay']}: there it is an L2 term in the"
                " gradient, and SCAPE decays weights decoupled. Use torch.optim.AdamW, or set it to 0."
            )
    if any(is_sharded(value) for entry in optimizer.state.values() for value in entry.values()):
        raise ValueError(
            "An optimizer over sharded parameters must not have stepped yet, got one with state. Build the"
            " ScapeOptimizer first, then load the checkpoint into it."
        )


def state_brought(optimizer: torch.optim.Optimizer, ranks: Communicator) -> dict[str, Any] | None:
    """What an optimizer has learnt before SCAPE takes its place; None: nothing yet. Collective.

    Raises:
        ValueError: some ranks' optimizers have stepped, or were given a state, and others' have not; on every rank.
    """
    # A mere look at an entry of torch's `state` makes an empty one.
    have = ranks.all_gather_object(any(value for key, value in optimizer.state.items() if key != ELSEWHERE))
    if all(have):
        return ranks.raise_on_all_ranks(optimizer.state_dict)
    if any(have):
        raise ValueError(
            f"The optimizer must have a state on all ranks or on none, got one on rank {have.index(True)} and none on"
            f" rank {have.index(False)}. Load the same state on every rank."
        )
    return None
