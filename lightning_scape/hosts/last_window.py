"""Ends an open window before callbacks write into the module at the end of a fit, such as an average of all steps.

Callbacks hear of the end before the strategy does. In an open window the average would count as learned, and the
exchange would send only its largest entries.

Before that, and wherever the steps pause, ranks wait for each other. A rank that alone has left the loop over batches
(``trainer.should_stop``) would next be in a message of Lightning's, which ranks in a step never answer.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_scape.core.method import find_all
from lightning_scape.hosts import requeue
from lightning_scape.hosts.private_names import skips_backward


class LastWindow(requeue.Guest):
    """The Trainer's first callback in a fit."""

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            meet(trainer, "the validation")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        meet(trainer, "the end of an epoch")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        meet(trainer, "the end of the training")
        end_windows(trainer)


def meet(trainer: Trainer, place: str) -> None:
    """Waits for all ranks, in a fit. If others wait for a step of this rank, all raise. Collective."""
    if methods := find_all(trainer.optimizers):
        methods[0].communicator.meet(f"{place} after step {methods[0].progress().steps}")


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


def attach(trainer: Trainer) -> None:
    """Before a fit."""
    requeue.callbacks_of(trainer).insert(0, LastWindow())
