"""LR schedulers that keep another one among their attributes, in checkpoints. Knows no host.

torch's ``LRScheduler.state_dict`` would hold that object, and with it the optimizer and the model: the file could be
read only by executing what is in it. So the inner scheduler's state stands for it, and the run that loads it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lightning_scape.core.words import with_plain_numbers

_STATE = "scape_scheduler"
"""Key of the dict that stands for a scheduler inside another one's state."""


def as_data(state: Any) -> Any:
    """A scheduler's state with the states of those that it keeps."""
    if not isinstance(state, Mapping):  # a user's own may give anything
        return state
    inner = {
        name: {_STATE: as_data(each.state_dict())} for name, each in state.items() if isinstance(each, LRScheduler)
    }
    return with_plain_numbers({**state, **inner})


def with_live(scheduler: object, state: Any) -> Any:
    """The state to load into a scheduler: with those that it keeps, after they have taken up their states."""
    if not isinstance(state, Mapping):
        return state
    found = dict(state)
    for name, value in state.items():
        if isinstance(value, dict) and value.keys() == {_STATE}:
            found[name] = inner = getattr(scheduler, name)
            inner.load_state_dict(with_live(inner, value[_STATE]))
    return found


class Restored:
    """Stands for a scheduler while Fabric saves it, or loads a checkpoint into it."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> Any:
        """The scheduler's, as data."""
        return as_data(self.scheduler.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Takes up what :meth:`state_dict` gave."""
        self.scheduler.load_state_dict(with_live(self.scheduler, state))
