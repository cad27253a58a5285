"""SIGTERM: one rank or all are told to end, such as those of a machine that is taken away.

Lightning's handler sends a message to all ranks wherever its rank is, also between messages that others wait for. So
during a fit the handler here only tells the optimizers, which bring the word to all ranks (SCAPE's with the next step's
first message). All ranks learn it in the same step. Then each sets Lightning's own flag, and all goes on as there: the
fit ends after this batch, callbacks save what they save on an exception, the process exits.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_scape.core.method import find_all
from lightning_scape.hosts import requeue
from lightning_scape.hosts.private_names import BROADCAST, SIGTERM_HANDLER, signals


def ends_together(exception: BaseException) -> bool:
    """Whether it ends the fit on all ranks after the same step, so that they go on sending each other messages."""
    return isinstance(exception, SIGTERMException)


class Preemption(requeue.Guest):
    """Notes the signal instead of Lightning's handler, and sets Lightning's flag on all ranks at once.

    Args:
        trainer: the one that gets the signal.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Trainer | None = trainer
        self._noted = False
        self._own = getattr(trainer.fit_loop.epoch_loop, BROADCAST)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is nobody's handler."""
        return {"_trainer": None, "_noted": False, "_own": None}

    def note(self, signum: int, frame: Any) -> None:
        """What Lightning registers as the handler."""
        trainer, first, self._noted = self._trainer, not self._noted, True
        if trainer is None:
            return
        if first and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # those that it started, as Lightning does
        self._tell(trainer)

    def before_batch(self) -> None:
        """Replaces Lightning's broadcast of rank 0's flag before each batch: the steps' messages carry the flag.

        That saves a message for each batch. And a rank that has left a step out comes to the next one, which finds it.
        """
        if self._trainer is not None and not find_all(self._trainer.optimizers):
            self._own()

    def _tell(self, trainer: Trainer) -> None:
        told = find_all(trainer.optimizers)
        for each in told:
            each.request_stop()
        if not told and trainer.training:  # without an optimizer no rank waits for another
            signals(trainer).received_sigterm = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._noted:  # perhaps before the optimizers were there
            self._tell(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        connector = signals(trainer)
        if not connector.received_sigterm and any(each.stop_requested for each in find_all(trainer.optimizers)):
            rank_zero_info(f"SIGTERM on some rank: all ranks end after step {trainer.global_step}.")
            connector.received_sigterm = True

    @override
    def leave(self, trainer: Trainer) -> None:
        vars(signals(trainer)).pop(SIGTERM_HANDLER, None)
        vars(trainer.fit_loop.epoch_loop).pop(BROADCAST, None)


def attach(trainer: Trainer) -> None:
    """Before Lightning registers its handlers for a fit."""
    preemption = Preemption(trainer)
    setattr(signals(trainer), SIGTERM_HANDLER, preemption.note)
    setattr(trainer.fit_loop.epoch_loop, BROADCAST, preemption.before_batch)
    requeue.insert(trainer, preemption)
