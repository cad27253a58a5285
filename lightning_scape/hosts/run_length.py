"""How long a Trainer's run is."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer

from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.epoch_end import check_lengths


def steps_of_run(trainer: Trainer) -> float | None:
    """Steps that an optimizer takes in the whole run, at most; None where nobody knows. Its data must be loaded.

    With manual optimization the module steps its optimizers when it likes; only ``max_steps`` bounds them then, which
    counts the steps of all.
    """
    manual = not trainer.lightning_module.automatic_optimization
    steps = trainer.max_steps if manual else trainer.estimated_stepping_batches
    return steps if 0 <= steps < math.inf else None


def compare_lengths(trainer: Trainer) -> None:
    """Raises on every rank if ranks meet different numbers of batches before the run ends. Collective.

    With manual optimization nobody knows where steps end: nothing is compared.
    """
    if trainer.lightning_module.automatic_optimization:
        batches, left = trainer.num_training_batches, trainer.max_steps - trainer.global_step
        met = min(batches, left * trainer.accumulate_grad_batches) if trainer.max_steps >= 0 else batches
        check_lengths(Communicator(), batches, met)


def ends_epoch(trainer: Trainer, ends_step: bool = True) -> bool:
    """Whether this rank's epoch ends with this batch, and the run does not end with its step."""
    loop = trainer.fit_loop.epoch_loop
    ends_run = ends_step and 0 <= loop.max_steps <= loop.global_step + 1
    return loop.batch_progress.is_last_batch and not ends_run
