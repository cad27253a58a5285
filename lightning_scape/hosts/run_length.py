"""Where a Trainer's run and its epochs end."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer


def is_last_step(trainer: Trainer) -> bool:
    """Whether the run ends with the step under way, where that is known: a module may step when it likes by hand."""
    if not trainer.lightning_module.automatic_optimization:
        return False
    last_epoch = trainer.num_training_batches < math.inf and trainer.current_epoch + 1 == trainer.max_epochs
    last_batch: bool = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return trainer.global_step + 1 == trainer.max_steps or (last_epoch and last_batch)


def ends_epoch(trainer: Trainer) -> bool:
    """Whether this rank's epoch ends with this batch, and the run does not end with its step."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0  # on the ranks that go on, too
    ends_run = steps and 0 <= loop.max_steps <= loop.global_step + 1
    return loop.batch_progress.is_last_batch and not ends_run
