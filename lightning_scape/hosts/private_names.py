"""Private names of Lightning's, each with the reason, and how a fit puts something in their place until it ends.

No other file uses one, but for what a strategy inherits. Those of torch, which layers below the hosts need, stand in
core/private_names.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.optimizer import _MockOptimizer

BackwardSyncControl = _BackwardSyncControl
"""Fabric asks it to hold gradients back; without one, Fabric warns in each accumulation."""
NoOptimizer = _MockOptimizer
"""What the Trainer steps where ``configure_optimizers`` returns None."""
materialize = _materialize_distributed_module
"""Gives a module on the meta device memory and first values, as for Lightning's ModelParallelStrategy."""
check_strictly = _validate_keys_for_strict_loading
"""Raises for names that are asked for and not in a checkpoint, as Fabric does."""

SIGTERM_HANDLER = "_sigterm_notifier_fn"
"""Attribute of :func:`signals`: sends a message to all ranks from inside the handler."""
REQUEUE_HANDLER = "_slurm_sigusr_handler_fn"
"""Attribute of :func:`signals`: saves from inside the handler."""
BROADCAST = "_broadcast_sigterm_tensor"
"""Attribute of the epoch's loop: sends a message before each batch."""


def signals(trainer: Trainer) -> Any:
    """Holds the handlers that the Trainer registers for a fit, and whether SIGTERM has come."""
    return trainer._signal_connector


def checkpoints(trainer: Trainer) -> Any:
    """Makes the checkpoints (``dump_checkpoint``) and loads one at the start of a fit (``resume_start``)."""
    return trainer._checkpoint_connector


def accumulates(trainer: Trainer) -> bool:
    """Whether the present batch ends without a step, with automatic optimization."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def validation_batches(trainer: Trainer) -> int:
    """Of the validation under way, on this rank; 0: it is not known."""
    fetcher = trainer.fit_loop.epoch_loop.val_loop._data_fetcher
    return (fetcher.length if fetcher is not None else None) or 0


def logged_step(trainer: Trainer) -> int:
    """The loggers' step axis for what is logged after a batch; the Trainer's own callbacks read it, too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives an object another attribute until the stack is closed."""
    own = vars(owner)
    stack.callback(partial(setattr, owner, name, own[name]) if name in own else partial(own.pop, name, None))
    setattr(owner, name, value)


def insert(stack: ExitStack, trainer: Any, guest: Callback, first: bool = False) -> None:
    """Inserts a callback until the stack is closed: after those that act on a batch, and before those that save.

    With ``first`` before all others, which may draw random numbers, or write averages into the module. The list is a
    new one: Lightning goes through the old one, as where LearningRateFinder loads a checkpoint.
    """
    callbacks = list(trainer.callbacks)
    places = [index for index, other in enumerate(callbacks) if first or isinstance(other, Checkpoint)]
    callbacks.insert(min(places, default=len(callbacks)), guest)
    trainer.callbacks = callbacks

    def remove() -> None:
        trainer.callbacks = [each for each in trainer.callbacks if each is not guest]

    stack.callback(remove)
