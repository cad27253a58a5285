"""When a resumed fit takes up the saved random number generators: each draw counts once, as in a run without a stop.

Lightning sets up data loaders anew, and a loader draws a number when it does: in the middle of an epoch it has drawn
that before the save. Before the next epoch it may be set up twice. A validation that was due right after the save is
left out: its loaders draw as they would have done, its steps do not. After an epoch's last batch its loaders may draw
where none was due.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_scape.checkpoint.saver import rng_state, set_rng_state


class Generators(Callback):
    """The Trainer's first callback, for others may draw: while a fit takes up a checkpoint, until its first batch.

    Sets the generators where a fit begins, and again where draws have been made that must not count.

    Args:
        saved: their states.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved
        self._at_first_batch: Mapping[str, Any] | None = None
        """Their states when the first batch is there, if what was drawn before it must not count."""
        self._at_once = False
        set_rng_state(saved)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        self._at_once = _draws_at_once(trainer.train_dataloader)
        if not loop.restarted_mid_epoch:
            return
        if loop.epoch_loop.batch_progress.is_last_batch:
            if self._at_once and not _validation_was_due(trainer):
                self._at_first_batch = rng_state()  # the next epoch's loader is set up
            return
        if self._at_once:
            set_rng_state(self._saved)
        if not (self._at_once and loop.epoch_loop.restarted_on_train_batch_end):
            self._at_first_batch = self._saved

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        set_up_again = trainer.current_epoch > 0 and not loop.is_resuming and not loop.epoch_loop.restarting
        if self._at_once and set_up_again:
            set_rng_state(self._saved)

    def begin_batches(self) -> None:
        """When the first batch is there: sets the generators for the last time, if need be."""
        if self._at_first_batch is not None:
            set_rng_state(self._at_first_batch)
        self._at_once, self._at_first_batch = False, None


def _draws_at_once(loader: Any) -> bool:
    """Whether the loader draws when it is set up, and not with its first batch, as a generator function does."""
    return isinstance(loader, DataLoader) and not inspect.isgeneratorfunction(type(loader).__iter__)


def _validation_was_due(trainer: Trainer) -> bool:
    """After the batch at which an epoch ended, and before Lightning counts the next epoch's batches."""
    done, every, interval = trainer.fit_loop.epoch_loop, trainer.check_val_every_n_epoch, trainer.val_check_batch
    if not trainer.enable_validation or interval is None or (every is not None and trainer.current_epoch % every):
        return False
    batches = (done.total_batch_idx if every is None else done.batch_idx) + 1
    return interval == math.inf or batches % interval == 0
