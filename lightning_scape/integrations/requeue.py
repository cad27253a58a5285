"""SLURM's signal that a job's time is nearly over: all ranks save after the same step, then Lightning requeues the job.

Lightning saves in the signal's handler, wherever its rank is then: in the middle of a step, or a step ahead of others.
But a checkpoint is made by all ranks together, between two steps. So the handler here only notes the signal. After a
step a rank that has had it leaves its number of exchanges in the job's store, and looks whether all ranks have. All
save after exchange ``last + 1``, where ``last`` is the largest number left. No rank has gone past that one: to end it,
a rank needs a message that the last one sent after it had left its number.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # without a mark for mypy
from typing_extensions import override

from lightning_scape.comm.collectives import is_distributed
from lightning_scape.integrations import sparseloco, swap

_KEY = "lightning_scape/requeue"
_STORE_TIMEOUT = timedelta(seconds=30)


class Requeue(Callback):
    """Takes the signal from Lightning's handler, and calls that one when all ranks are ready for it."""

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], Any] | None = None
        self._begun = 0
        """Exchanges before this fit."""
        self._obeyed = 0
        """Signals."""
        self._forget()

    def _forget(self) -> None:
        self._noted: tuple[int, Any] | None = None
        self._store: PrefixStore | None = None
        self._looked = -1
        """At so many exchanges."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        assert isinstance(environment, SLURMEnvironment)
        number = environment.requeue_signal or signal.SIGUSR1
        self._begun, self._handler = _exchanges(trainer), None
        current = signal.getsignal(number)
        if _is_lightnings(current, trainer):  # a user's own handler stays
            self._handler = current  # type: ignore[assignment]
            signal.signal(number, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self._noted = self._noted or (signum, frame)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ended = _exchanges(trainer)
        if self._noted is None or ended == self._looked:
            return
        self._looked = ended
        last = self._last(trainer.global_rank, trainer.world_size, ended)
        if last is None or ended <= last:
            return
        rank_zero_info(f"SLURM's signal {self._noted[0]}: all ranks save after exchange {ended}.")
        assert self._handler is not None
        noted = self._noted
        self._forget()
        self._obeyed += 1
        with _waiting_for_files(trainer):
            self._handler(*noted)

    def _last(self, rank: int, world_size: int, ended: int) -> int | None:
        """The largest number of exchanges at which a rank has left word; None until all have."""
        if world_size == 1 or not is_distributed():
            return ended - 1
        if self._store is None:  # rank 0's, of this start: where the ranks have met
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            root = TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)
            self._store = PrefixStore(f"{_KEY}/{self._begun}/{self._obeyed}", root)
            self._store.set(str(rank), str(ended))
        keys = [str(other) for other in range(world_size)]
        if not self._store.check(keys):  # answered after what this rank has left is there
            return None
        return max(int(self._store.get(key)) for key in keys)


def _is_lightnings(handler: Any, trainer: Trainer) -> bool:
    own = trainer._signal_connector._slurm_sigusr_handler_fn
    return own in getattr(handler, "signal_handlers", ())


def _exchanges(trainer: Trainer) -> int:
    """Those that this rank has ended, each with messages between all ranks."""
    for optimizer in swap.scape_optimizers(trainer.optimizers):
        return 0 if optimizer.engine.state is None else optimizer.engine.state.calls
    return max((loco.progress.exchanges for loco in sparseloco.wrappers(trainer.optimizers)), default=0)


@contextlib.contextmanager
def _waiting_for_files(trainer: Trainer) -> Iterator[None]:
    """Within it ``save_checkpoint`` returns when the checkpoint is there: the job may end right after it."""
    save, wait = trainer.save_checkpoint, trainer.strategy.wait_for_checkpoint  # type: ignore[attr-defined]

    def save_and_wait(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        wait()

    trainer.save_checkpoint = save_and_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer.save_checkpoint


def attach(trainer: Trainer) -> None:
    """Before a fit, under SLURM with ``auto_requeue``: the signal is obeyed between two steps."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by its connector
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Requeue)]
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        callbacks.insert(0, Requeue())  # ModelCheckpoints stay the last


def saved_by_signal(trainer: Trainer) -> str | None:
    """The checkpoint that Lightning saved at the last such signal; None if there is none, or not under SLURM."""
    return trainer._checkpoint_connector._hpc_resume_path if SLURMEnvironment.detect() else None
