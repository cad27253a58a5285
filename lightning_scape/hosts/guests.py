"""Callbacks that a Trainer has for a fit alone."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelPruning, StochasticWeightAveraging, WeightAveraging

_GUESTS = "_lightning_scape_guests"
"""Attribute of a Trainer: its fit's guests. The user may give it another list of callbacks meanwhile."""


class Guest(Callback):
    """A callback that the Trainer has for a fit alone."""

    def leave(self, trainer: Trainer) -> None:
        """Puts back what it has replaced in the Trainer."""


def insert(trainer: Trainer, guest: Guest) -> None:
    """Inserts a callback into the Trainer: after those that act on a batch, and before those that save."""
    callbacks = callbacks_of(trainer)
    first = next((index for index, other in enumerate(callbacks) if isinstance(other, Checkpoint)), None)
    callbacks.insert(len(callbacks) if first is None else first, guest)
    vars(trainer).setdefault(_GUESTS, []).append(guest)


def insert_first(trainer: Trainer, guest: Guest) -> None:
    """Inserts one before all other callbacks, which may draw random numbers, or write averages into the module."""
    callbacks_of(trainer).insert(0, guest)


def check_sharded(trainer: Trainer) -> None:
    """Raises ``ValueError`` for callbacks that a sharded module cannot have."""
    kinds = (ModelPruning, StochasticWeightAveraging, WeightAveraging)
    if found := [type(each).__name__ for each in callbacks_of(trainer) if isinstance(each, kinds)]:
        raise ValueError(
            f"With `local_group_size` callbacks must work on sharded parameters, got {', '.join(found)}, which needs"
            " whole ones. Leave it out, or leave out `local_group_size`."
        )


def detach(trainer: Trainer) -> None:
    """After a fit: the Trainer is as it was, without any :class:`Guest`."""
    callbacks = callbacks_of(trainer)
    callbacks[:] = [each for each in callbacks if not isinstance(each, Guest)]
    for guest in vars(trainer).pop(_GUESTS, []):
        guest.leave(trainer)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's own list."""
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by its connector
    return found
