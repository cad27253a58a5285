"""Private names of Lightning's, each with the reason. No other file uses one, but for what a strategy inherits.

Those of torch's, which layers below the hosts need, stand in core/private_names.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher as FabricsLauncher
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as TrainersLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

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


class Launching:
    """In front of a launcher that forks or spawns the ranks and then waits for the result of its first one.

    If the first rank ended without a result and without an error (by SystemExit, as at SIGTERM), the launcher would
    wait for ever. Here such a rank ends with an error.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``function`` on all ranks."""
        return super().launch(functools.partial(with_exit_code, function), *args, **kwargs)  # type: ignore[misc]


def with_exit_code(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a rank runs: the first one never ends by SystemExit with the code 0."""
    try:
        return function(*args, **kwargs)
    except SystemExit as end:
        if not end.code and os.environ["LOCAL_RANK"] == "0":
            end.code = 143 if isinstance(end, SIGTERMException) else 1  # 143: what a shell says of SIGTERM
        raise


class LaunchingTrainers(Launching, TrainersLauncher):
    """The Trainer's launcher."""


class LaunchingFabrics(Launching, FabricsLauncher):
    """Fabric's launcher."""
