"""SLURM's signal that a job's time is nearly over: all ranks save after the same step, then Lightning requeues the job.

Lightning saves in the signal's handler, wherever its rank is: in the middle of a step, or a step ahead of others. But
all ranks make a checkpoint together, between two steps. So the handler here only notes the signal. After a
batch a rank with the signal writes the number of exchanges that it has begun into the job's store, and looks whether
all ranks have written theirs. All save once ``last + 1`` exchanges have ended, where ``last`` is the largest number. No
rank is past that: to end one more, it needs a message from the rank that wrote last, sent after the writing.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # without a mark for mypy
from typing_extensions import override

from lightning_scape.core.method import find_all
from lightning_scape.core.private_names import default_store
from lightning_scape.hosts.private_names import REQUEUE_HANDLER, signals

_KEY = "lightning_scape/requeue"
_FITS = itertools.count()
"""Counts this process's fits. All ranks count alike, and no fit meets what an earlier one left in the store."""
_PATIENCE = 20
"""Exchanges after which a rank says whose number is missing."""


class Exchanges(NamedTuple):
    """Exchanges of all optimizers; each has messages between all ranks."""

    begun: int
    ended: int

    @classmethod
    def of(cls, trainer: Trainer) -> Exchanges:
        """The exchanges so far."""
        progress = [method.progress() for method in find_all(trainer.optimizers)]
        return cls(sum(each.begun for each in progress), sum(each.ended for each in progress))


class Guest(Callback):
    """A callback that the Trainer has for a fit alone."""

    def leave(self, trainer: Trainer) -> None:
        """Puts back what it has replaced in the Trainer."""


_GUESTS = "_lightning_scape_guests"
"""Attribute of a Trainer: its fit's guests. The user may give it another list of callbacks meanwhile."""


class Requeue(Guest):
    """Notes the signal instead of Lightning's handler, which it calls when all ranks are ready.

    Args:
        trainer: the one that gets the signal.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._own = getattr(signals(trainer), REQUEUE_HANDLER)
        self._fit, self._obeyed = next(_FITS), 0
        self._forget()

    def _forget(self) -> None:
        self._noted: tuple[int, Any] | None = None
        self._store: PrefixStore | None = None
        self._looked, self._looks = -1, 0

    def note(self, signum: int, frame: Any) -> None:
        """What Lightning registers as the handler."""
        self._noted = self._noted or (signum, frame)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._noted is None:
            return
        exchanges = Exchanges.of(trainer)
        if exchanges.ended == self._looked:
            return
        if torch.cuda.is_initialized():  # else the host would count exchanges that it has only queued
            torch.cuda.synchronize()
        self._looked = exchanges.ended
        last = self._last(exchanges, trainer)
        if last is None or exchanges.ended <= last:
            return
        rank_zero_info(f"SLURM's signal {self._noted[0]}: all ranks save after step {trainer.global_step}.")
        noted = self._noted
        self._forget()
        self._obeyed += 1
        with _waiting_for_files(trainer):
            self._own(*noted)

    @override
    def leave(self, trainer: Trainer) -> None:
        vars(signals(trainer)).pop(REQUEUE_HANDLER, None)

    def _last(self, exchanges: Exchanges, trainer: Trainer) -> int | None:
        """The largest number of begun exchanges that a rank has written; None until all have written theirs."""
        if self._store is None:
            self._store = PrefixStore(f"{_KEY}/{self._fit}/{self._obeyed}", default_store())
            self._store.set(str(trainer.global_rank), str(exchanges.begun))
        ranks = [str(rank) for rank in range(trainer.world_size)]
        if not self._store.check(ranks):  # answered after this rank's number is there
            self._looks += 1
            if self._looks == _PATIENCE:
                store = self._store
                missing = [rank for rank in ranks if not store.check([rank])]
                warnings.warn(
                    f"All ranks must get SLURM's signal, got no word of it from rank {', '.join(missing)}: nothing is"
                    ' saved until they have had it. Write `--signal=SIGUSR1@300`, without "B:".',
                    stacklevel=2,
                )
            return None
        return max(int(self._store.get(rank)) for rank in ranks)


@contextlib.contextmanager
def _waiting_for_files(trainer: Trainer) -> Iterator[None]:
    """Within it ``save_checkpoint`` returns when the checkpoint is there: the job may end right after it."""
    save, before = trainer.save_checkpoint, vars(trainer).get("save_checkpoint")

    def save_and_wait(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        strategy: Any = trainer.strategy
        strategy.wait_for_checkpoint()
        if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
            strategy.checkpoint_io.teardown()  # it waits; the next save starts it again
        trainer.strategy.barrier()

    trainer.save_checkpoint = save_and_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        vars(trainer).pop("save_checkpoint")
        if before is not None:
            trainer.save_checkpoint = before  # type: ignore[method-assign]


def attach(trainer: Trainer) -> None:
    """Before Lightning registers its handlers for a fit; nothing happens without SLURM and its ``auto_requeue``."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return
    requeue = Requeue(trainer)
    setattr(signals(trainer), REQUEUE_HANDLER, requeue.note)
    insert(trainer, requeue)


def insert(trainer: Trainer, guest: Guest) -> None:
    """Inserts a callback into the Trainer: after those that act on a batch, and before those that save."""
    callbacks = callbacks_of(trainer)
    first = next((index for index, other in enumerate(callbacks) if isinstance(other, Checkpoint)), None)
    callbacks.insert(len(callbacks) if first is None else first, guest)
    vars(trainer).setdefault(_GUESTS, []).append(guest)


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


def saved_by_signal(trainer: Trainer) -> list[str]:
    """Checkpoints that Lightning has saved at such signals, in the folder where it looks: only under SLURM."""
    folder = Path(trainer.default_root_dir)
    if not SLURMEnvironment.detect() or not folder.is_dir():
        return []
    return [str(path) for path in folder.glob("hpc_ckpt_*.ckpt")]


def is_found_by_lightning(trainer: Trainer, path: Any) -> bool:
    """Whether it may be the one that Lightning loads if it is told nothing: that with the highest number.

    The file need not be there: Lightning also counts names of files that were cut off.
    """

    def number(saved: str | Path) -> int:
        return int("0" + re.sub(r"\D", "", Path(saved).stem))

    given = Path(path or "")
    there = SLURMEnvironment.detect() and given.parent == Path(trainer.default_root_dir)
    found = [*map(number, saved_by_signal(trainer)), 0]
    return there and given.name.startswith("hpc_ckpt_") and number(given) >= max(found)
