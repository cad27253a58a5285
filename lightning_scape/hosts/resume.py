"""How a Trainer's job goes on after a restart, with the ranks that are there then.

Lightning's own ``ckpt_path="last"`` takes the file that changed last: it may be damaged, ranks may see different ones,
and one that was saved before the restart is in another version's folder. And ``ckpt_path`` is chosen before ranks can
speak to each other. So the strategy chooses, between the callbacks' set-up and the loading of the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_scape.checkpoint.inspection import resume_path, verify
from lightning_scape.comm.collectives import Communicator
from lightning_scape.hosts import guests, requeue
from lightning_scape.hosts.private_names import checkpoints

Resume = Literal["auto"] | None
_RANKS = "scape_ranks"
"""Key of a checkpoint's number of ranks, if accumulation follows it: each rank counts its own batches."""


class Resumption:
    """A strategy's ``resume`` and ``batches_per_step``.

    Args:
        resume: ``"auto"``: fit from the newest complete checkpoint; None leaves it to ``ckpt_path``.
        batches_per_step: those of all ranks in one optimizer step; None leaves it to ``accumulate_grad_batches``.

    Raises:
        ValueError: an option is outside its rule.
    """

    def __init__(self, resume: Resume, batches_per_step: int | None) -> None:
        if resume not in (None, "auto"):
            raise ValueError(
                f'`resume` must be "auto" or None, got {resume!r}. To load a checkpoint that you know, call'
                " `trainer.fit(..., ckpt_path=...)`."
            )
        if batches_per_step is not None and (type(batches_per_step) is not int or batches_per_step < 1):
            raise ValueError(
                f"`batches_per_step` must be None or a whole number >= 1, got {batches_per_step!r}. Give the number of"
                " batches of all ranks in one optimizer step, or leave it out."
            )
        self.resume = resume
        self._batches_per_step = batches_per_step
        self._window: int | None = None
        self._ranks = 1
        self._trainer: Trainer | None = None

    def prepare(self, trainer: Trainer) -> None:
        """Before a fit: sets the accumulation, and has the newest checkpoint loaded.

        Raises:
            ValueError: the Trainer does not go with the options; on every rank.
        """
        self._trainer = trainer
        if trainer.state.fn != TrainerFn.FITTING:
            _resume_by(trainer, None)
            return
        self._window, self._ranks = None, trainer.world_size
        if self._batches_per_step is not None:
            _check_accumulation(trainer)
            self._window = _window(self._batches_per_step, trainer.world_size)
            trainer.accumulate_grad_batches = self._window
        _resume_by(trainer, None if self.resume is None else _folders(trainer))

    def finish(self) -> None:
        """After a fit: the Trainer is as it was. Before one, and if another process runs it, nothing happens."""
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        vars(checkpoints(trainer)).pop("resume_start", None)
        if self._window is not None:
            trainer.accumulate_grad_batches = 1

    def record(self, checkpoint: dict[str, Any]) -> None:
        """Notes in a checkpoint what its numbers of batches mean."""
        if self._window is not None:
            checkpoint[_RANKS] = self._ranks

    def adapt(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A loaded checkpoint, its batches counted as this number of ranks counts them.

        With half as many ranks each one has twice as many batches in an epoch: the place in the epoch, in samples,
        stays.
        """
        saved = checkpoint.pop(_RANKS, None)
        if saved is None or self._window is None or saved == self._ranks:
            return checkpoint
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for name in ("total", "current"):
            progress[name] = rescaled(progress[name], self._ranks, saved)
        return checkpoint


def rescaled(counts: Mapping[str, int], ranks: int, saved: int) -> dict[str, int]:
    """A rank's counts of batches begun and ended, from ``saved`` ranks. Their differences, which stay, say where it is.

    >>> rescaled({"ready": 8, "started": 8, "processed": 8, "completed": 7}, 1, 2)
    {'ready': 16, 'started': 16, 'processed': 16, 'completed': 15}
    """
    ready = counts["ready"] * saved // ranks
    return {name: max(0, ready - (counts["ready"] - count)) for name, count in counts.items()}


def _check_accumulation(trainer: Trainer) -> None:
    problem = None
    if trainer.accumulate_grad_batches != 1:
        problem = f"accumulate_grad_batches={trainer.accumulate_grad_batches}. Leave that out: it follows"
    elif any(isinstance(callback, GradientAccumulationScheduler) for callback in guests.callbacks_of(trainer)):
        problem = "a GradientAccumulationScheduler. Leave it out, or `batches_per_step`"
    if problem is None and not trainer.lightning_module.automatic_optimization:
        problem = "manual optimization, where only your module knows its steps. Leave `batches_per_step` out"
    if problem is not None:
        raise ValueError(f"`batches_per_step` must alone say what an optimizer step is, got {problem}.")


def _window(batches_per_step: int, ranks: int) -> int:
    """Batches of each rank in a step: as many as asked for, or as near to it as the number of ranks allows."""
    window = max(1, round(batches_per_step / ranks))
    if window * ranks != batches_per_step:
        rank_zero_warn(
            f"`batches_per_step` should be a multiple of the number of ranks, got {batches_per_step} for {ranks}: an"
            f" optimizer step takes {window * ranks} batches now, {window} on each rank. A number that all numbers of"
            " ranks divide, 12 for 1 to 4, keeps it the same."
        )
    return window


def _folders(trainer: Trainer) -> list[str]:
    """Where the Trainer's checkpoints are, this start's and earlier ones."""
    callbacks = [callback for callback in guests.callbacks_of(trainer) if isinstance(callback, ModelCheckpoint)]
    folders = [str(callback.dirpath) for callback in callbacks if callback.dirpath is not None]
    distant = [folder for folder in folders if "://" in folder]
    if len(folders) < len(callbacks) or not callbacks or distant:
        got = "one at " + distant[0] if distant else "one without `dirpath`" if callbacks else "none"
        raise ValueError(
            '`resume="auto"` needs a ModelCheckpoint whose folder is the same at each start and a local or shared'
            f' path, got {got}. Give the Trainer `callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=...)]`:'
            " Lightning's own choice of a folder changes with every start."
        )
    return folders


def _resume_by(trainer: Trainer, folders: list[str] | None) -> None:
    """Puts :func:`_resume_start` into the connector; a partial, so that the Trainer can be copied."""
    start = functools.partial(_resume_start, trainer, folders)
    checkpoints(trainer).resume_start = start


def _resume_start(
    trainer: Trainer, folders: list[str] | None, checkpoint_path: Any = None, weights_only: bool | None = None
) -> None:
    """Replaces the connector's own: has the Trainer load the newest complete checkpoint, or what it was told.

    Lightning has chosen ``checkpoint_path`` before the ranks have met, each by what it sees on its disk. ``folders`` is
    where the Trainer saves; None: only where Lightning finds what it saved at SLURM's signal. Lightning looks at names
    only, also those of files that were cut off.
    """
    mine = None if checkpoint_path is None else str(checkpoint_path)
    everyone = Communicator().all_gather_object((mine, requeue.is_found_by_lightning(trainer, mine)))
    told, by_signal = [path for path, _ in everyone], any(found for _, found in everyone)
    newest = None
    if by_signal or folders is not None:
        places = [*(folders or []), *requeue.saved_by_signal(trainer)]
        newest = resume_path(*places, pattern="*.ckpt", check=functools.partial(verify, weights_only=weights_only))
        if newest is None:
            rank_zero_info(f"No checkpoint in {', '.join(folders or [trainer.default_root_dir])}: training begins.")
    if newest is None and not by_signal and None in told and any(told):
        there, missing = next((rank, path) for rank, path in enumerate(told) if path is not None), told.index(None)
        raise FileNotFoundError(
            f"All ranks must load the checkpoint, or none, got {there[1]!r} on rank {there[0]} and none on rank"
            f" {missing}. Save to a file system that all machines share."
        )
    connector = checkpoints(trainer)
    type(connector).resume_start(connector, newest or (None if by_signal else checkpoint_path), weights_only)
