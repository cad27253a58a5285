"""What a fit puts into a Trainer, and in place of what is the Trainer's or the user's: a stack takes it out again."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives an object another attribute until the stack is closed."""
    own = vars(owner)
    stack.callback(partial(setattr, owner, name, own[name]) if name in own else partial(own.pop, name, None))
    setattr(owner, name, value)


def insert(stack: ExitStack, trainer: Trainer, guest: Callback, first: bool = False) -> None:
    """Inserts a callback until the stack is closed: after those that act on a batch, and before those that save.

    With ``first`` before all others, which may draw random numbers, or write averages into the module. The list is a
    new one: Lightning goes through the old one, as where LearningRateFinder loads a checkpoint.
    """
    callbacks = list(callbacks_of(trainer))
    places = [index for index, other in enumerate(callbacks) if first or isinstance(other, Checkpoint)]
    callbacks.insert(min(places, default=len(callbacks)), guest)
    trainer.callbacks = callbacks  # type: ignore[attr-defined]
    stack.callback(_remove, trainer, guest)


def _remove(trainer: Trainer, guest: Callback) -> None:
    callbacks = callbacks_of(trainer)  # the user may have given it another list meanwhile
    callbacks[:] = [each for each in callbacks if each is not guest]


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's own list."""
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by its connector
    return found
