"""SIGTERM and SLURM's signal under the Trainer: all ranks end, or save, after the same batch.

Lightning's handlers send messages and save wherever their rank is, also between messages that others wait for. Here
they only note the signal, and the batch's word brings it to all ranks. Then all goes on as with Lightning: by its flag
the fit ends after this batch, callbacks save what they save on an exception; or its own handler saves and requeues.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_scape.checkpoint.saver import Saver
from lightning_scape.core.method import find_all
from lightning_scape.hosts.private_names import (
    BROADCAST,
    REQUEUE_HANDLER,
    SIGTERM_HANDLER,
    accumulates,
    insert,
    replace,
    signals,
    validation_batches,
)
from lightning_scape.hosts.words import Words

FAILING_TIME = timedelta(seconds=3)
"""How long a rank that has met an error waits for all others to meet one, too."""


class Signals(Callback):
    """Notes signals in place of Lightning's handlers, and does what those do when all ranks have heard of them.

    Args:
        trainer: the one that gets the signals; its handlers are not registered yet.
        words: say what was noted.
        saver: of the checkpoints.
        replaced: takes it out of the Trainer.
    """

    def __init__(self, trainer: Trainer, words: Words, saver: Saver, replaced: ExitStack) -> None:
        self._words, self._saver, self._replaced = words, saver, replaced
        self._launcher, self._requeue = trainer.strategy.launcher, getattr(signals(trainer), REQUEUE_HANDLER)
        self._signum, self._has_saved = 0, False
        self._to_hear = 0
        """Batches of the validation after which all ranks hear words."""
        replace(replaced, signals(trainer), SIGTERM_HANDLER, self._note_stop)
        replace(replaced, signals(trainer), REQUEUE_HANDLER, self._note_save)
        replace(replaced, trainer.fit_loop.epoch_loop, BROADCAST, lambda *_: None)  # of rank 0's flag: the word says it
        insert(replaced, trainer, self)
        insert(replaced, trainer, End(words), first=True)

    def _note_stop(self, signum: int, frame: Any) -> None:
        if self._launcher is not None and not self._words.stop:
            self._launcher.kill(signum)  # the ranks that it started, as Lightning does
        self._words.stop = True

    def _note_save(self, signum: int, frame: Any) -> None:
        self._signum, self._words.save = signum, not self._has_saved

    # ------------------------------------------------------------------------------------------- batches

    def before_batch(self, trainer: Trainer) -> None:
        """Says the word, once the batch is there. An epoch's end in which others do not step is heard at once."""
        self._words.begin_batch(last=_ends_epoch(trainer))
        progress = trainer.fit_loop.epoch_loop.batch_progress
        for method in find_all(trainer.optimizers):  # not in the step: a module may step an optimizer that it has kept
            method.announce_batch(progress.current.ready)
        if progress.is_last_batch and progress.current.ready % trainer.accumulate_grad_batches:
            self._words.hear()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._words.hear()
        else:
            self._words.end_batch(stepped=not accumulates(trainer))
        self._obey(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._words.meet(last=True)  # the fit may end here, for some or for all
        self._obey(trainer, save=False)

    def _obey(self, trainer: Trainer, save: bool = True) -> None:
        if save and self._words.save_heard and not self._has_saved and not accumulates(trainer):
            self._has_saved, self._words.save = True, False
            rank_zero_info(f"SLURM's signal: all ranks save after step {trainer.global_step}.")
            with ExitStack() as now:
                replace(now, self._saver, "asynchronous", False)  # the job may end right after it
                self._requeue(self._signum, None)
        if self._words.stop_heard and not trainer.received_sigterm:
            rank_zero_info(f"SIGTERM on some rank: all ranks end after step {trainer.global_step}.")
            signals(trainer).received_sigterm = True

    # ------------------------------------------------------------------------------------------- a validation

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._words.meet()
            self._obey(trainer)
            # None after a rank's last batch: that leads to the end of a validation, and to messages there.
            self._to_hear = self._words.fewest(validation_batches(trainer)) - 1

    @override
    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """SIGTERM ends a validation, too, on all ranks after the same batch."""
        if not trainer.sanity_checking and self._to_hear > 0:
            self._to_hear -= 1
            self._words.begin_batch()
            self._words.end_batch(stepped=False)
            self._obey(trainer, save=False)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._words.meet()
            self._obey(trainer)

    # ------------------------------------------------------------------------------------------- an error

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Callbacks save on an error if all ranks come to it, for all save together; else they save nothing."""
        if isinstance(exception, SIGTERMException):  # all ranks end after the same batch
            return
        if self._words.all_failed(FAILING_TIME):
            return
        saving = [each for each in trainer.checkpoint_callbacks if getattr(each, "save_on_exception", True)]
        for callback in saving:
            replace(self._replaced, callback, "on_exception", lambda *_: None)
        if saving:
            warnings.warn(
                f"All ranks must save together, got {type(exception).__name__} on rank {trainer.global_rank} and not on"
                " all of them in the same batch: no checkpoint is saved on this exception. The last one stands.",
                stacklevel=2,
            )


class End(Callback):
    """The Trainer's first callback: ends an open window before others write an average of all steps into the module.

    In an open window the average would count as learned, and the exchange would send only its largest entries.

    Args:
        words: of all ranks. They say one at the end: a rank that saves alone then waits for it.
    """

    def __init__(self, words: Words) -> None:
        self._words = words

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._words.meet(last=True)
        for method in find_all(trainer.optimizers):
            method.finish()


def is_last_step(trainer: Trainer) -> bool:
    """Whether the run ends with the step under way, where that is known: a module may step when it likes by hand."""
    if not trainer.lightning_module.automatic_optimization:
        return False
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    last_batch: bool = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return trainer.global_step + 1 == trainer.max_steps or (last_epoch and last_batch)


def _ends_epoch(trainer: Trainer) -> bool:
    """Whether this rank's epoch ends with this batch, and the run does not end with its step."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0  # on the ranks that go on, too
    ends_run = steps and 0 <= loop.max_steps <= loop.global_step + len(trainer.optimizers)
    return loop.batch_progress.is_last_batch and not ends_run
