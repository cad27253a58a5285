"""How long a Trainer's run is."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_scape.hosts.replaced import callbacks_of


def steps_of_run(trainer: Trainer) -> float | None:
    """``global_step`` at the end of the run, at most; None: not known. Its data must be loaded.

    With manual optimization the module steps its optimizers when it likes. Then only ``max_steps`` bounds them, which
    counts the steps of all.
    """
    bounds = [trainer.max_steps if trainer.max_steps >= 0 else math.inf]
    if trainer.lightning_module.automatic_optimization:
        bounds += _by_epochs(trainer) or [trainer.estimated_stepping_batches]
    steps = min(bounds)
    return steps if 0 <= steps < math.inf else None


def is_last_step(trainer: Trainer) -> bool:
    """Whether the run ends with the step under way, where that is known."""
    automatic: bool = trainer.lightning_module.automatic_optimization
    return automatic and steps_of_run(trainer) == trainer.global_step + 1


def _by_epochs(trainer: Trainer) -> list[float]:
    """Steps if a schedule over epochs accumulates batches, of which Lightning's estimate knows nothing."""
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    schedules = [each for each in callbacks_of(trainer) if isinstance(each, GradientAccumulationScheduler)]
    if not schedules or batches == math.inf or epochs is None or epochs < 0:
        return []
    each_epoch = map(schedules[-1].get_accumulate_grad_batches, range(epochs))
    return [sum(math.ceil(batches / accumulated) for accumulated in each_epoch)]


def ends_epoch(trainer: Trainer) -> bool:
    """Whether this rank's epoch ends with this batch, and the run does not end with its step."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0  # on the ranks that go on, too
    ends_run = steps and 0 <= loop.max_steps <= loop.global_step + 1
    return loop.batch_progress.is_last_batch and not ends_run
