"""Ends an open window before callbacks write into the module at the end of a fit, such as an average of all steps.

Callbacks hear of the end before the strategy does. In an open window the average would count as learned, and the
exchange would send only its largest entries.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_scape.core.method import find_all
from lightning_scape.hosts import guests
from lightning_scape.hosts.private_names import skips_backward
from lightning_scape.hosts.words import Words


class LastWindow(guests.Guest):
    """The Trainer's first callback in a fit.

    Args:
        words: of all ranks. They say one at the end: a rank that saves alone then waits for it.
    """

    def __init__(self, words: Words) -> None:
        self._words = words

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._words.say()
        self._words.hear()
        end_windows(trainer)


def end_windows(trainer: Trainer) -> None:
    """Makes all ranks hold the same parameters, what was written last included. Collective."""
    for method in find_all(trainer.optimizers):
        method.finish()


def end_before_statistics(trainer: Trainer, batch_idx: int) -> None:
    """Calls :func:`end_windows` before the epoch in which StochasticWeightAveraging no longer steps.

    By then each rank's own average is in place, and BatchNorm's statistics are measured with it.
    """
    if batch_idx == 0 and skips_backward(trainer):
        end_windows(trainer)


def attach(trainer: Trainer, words: Words) -> None:
    """Before a fit."""
    guests.callbacks_of(trainer).insert(0, LastWindow(words))
