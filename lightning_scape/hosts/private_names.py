"""Private names of Lightning's, each with the reason. No other file uses one, but for what a strategy inherits.

Those of torch's, which layers below the hosts need, stand in core/private_names.py.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

BackwardSyncControl = _BackwardSyncControl
"""Fabric asks it to hold gradients back; without one, Fabric warns in each accumulation."""
WrappingIO = _WrappingCheckpointIO
"""Such a plugin keeps another one inside; ours goes there if it was given none."""
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


def logged_step(trainer: Trainer) -> int:
    """The loggers' step axis for what is logged after a batch; the Trainer's own callbacks read it, too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def skips_backward(trainer: Trainer) -> bool:
    """Whether StochasticWeightAveraging has told the loops to run forward passes alone, to the end of the epoch."""
    return trainer.fit_loop._skip_backward
