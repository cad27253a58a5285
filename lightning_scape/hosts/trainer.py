"""The strategy of ``lightning.pytorch.Trainer``: one for all methods.

Launching, environments, samplers and checkpoint files are DDPStrategy's. What differs: the module is not wrapped (no
gradient is reduced in the backward pass), and each optimizer is put under a
:class:`~lightning_scape.core.method.Method`, whose steps exchange what has to be exchanged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.comm.collectives import leave_groups
from lightning_scape.core.method import find, find_all
from lightning_scape.hosts import ending, guests, last_window, setup, signals, two_level
from lightning_scape.hosts.checkpoints import TrainerCheckpoints
from lightning_scape.hosts.common import StateDictType
from lightning_scape.hosts.private_names import NoOptimizer
from lightning_scape.hosts.run_length import steps_of_run

_OF_WHOLE_PARAMETERS = (ModelPruning, StochasticWeightAveraging, WeightAveraging)


def _check_callbacks(trainer: Trainer) -> None:
    """Raises ``ValueError`` for callbacks that a sharded module cannot have."""
    callbacks = guests.callbacks_of(trainer)
    if found := [type(each).__name__ for each in callbacks if isinstance(each, _OF_WHOLE_PARAMETERS)]:
        raise ValueError(
            f"With `local_group_size` callbacks must work on sharded parameters, got {', '.join(found)}, which needs"
            " whole ones. Leave it out, or leave out `local_group_size`."
        )


class MethodStrategy(TrainerCheckpoints):
    """Training by a method, the one that ``config`` is of: ``MethodStrategy(SparseLoCoConfig(sync_every=30))``.

    For every method: in training each rank has buffers of its own (BatchNorm's statistics, and what else a module
    updates from its own batch); all take rank 0's before a validation, a save and the end. Saving a checkpoint is
    collective: if one rank alone fails, callbacks that save on exceptions save nothing.

    Args:
        config: the method's options.
        accelerator: as in DDPStrategy, as for all that follow.
        parallel_devices: this node's devices.
        cluster_environment: how ranks find each other.
        checkpoint_io: how checkpoints are written.
        precision_plugin: the precision.
        process_group_backend: ``"gloo"``, ``"nccl"``; None goes by the device.
        timeout: how long a collective waits for the other ranks; a number counts seconds.
        start_method: how processes are started; a notebook needs `"fork"`.
        state_dict_type: ``"full"``, a checkpoint is one file; ``"sharded"``, a directory into which each rank writes
            its own part, in parallel. Either is loaded, whatever is set here.
        async_save: write checkpoints while training goes on, from a copy; a full one is collected meanwhile, too. What
            goes wrong is raised at the next save or at the end of the fit.
        options: of the method, by name, in place of ``config`` (a strategy of one method).

    Raises:
        ValueError: an option is outside its rule, or is given differently in ``config`` and by name.
        TypeError: an option of DDP's that is not needed here, or one that does not exist.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            config,
            options,
            state_dict_type=state_dict_type,
            async_save=async_save,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._interrupted = False
        self._signals: signals.Signals | None = None

    @override
    def __repr__(self) -> str:
        """The options that differ from the defaults, and a remedy if the Trainer is not of the package we extend."""
        # pytorch_lightning's Trainer rejects us by printing us; this is the only word we get in.
        foreign = "pytorch_lightning" in sys.modules
        remedy = " for lightning.pytorch.Trainer; use `from lightning.pytorch import Trainer`" if foreign else ""
        return super().__repr__()[:-1] + f"{remedy}>"

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._interrupted = False
        if self.lightning_module is not None:
            self._connector.attach(trainer := self.lightning_module.trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                guests.detach(trainer)
                self._signals = signals.Signals(trainer, self._new_words())
                guests.insert(trainer, self._signals)
                last_window.attach(trainer, self._words)

    @override
    def setup(self, trainer: Trainer) -> None:
        if not self._nodes.several:
            super().setup(trainer)
            return
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            _check_callbacks(trainer)
        if fitting and self.layer_sync:
            self.model = self.layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        # For evaluation too: the model may not fit on one rank.
        self._nodes.shard(self.model, self.root_device, self.precision_plugin.precision)
        self.model = two_level.ThroughForward(self.model)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def tensor_init_context(  # type: ignore[override]
        self, empty_init: bool | None = None
    ) -> AbstractContextManager[None]:
        if empty_init and self._nodes.several:
            return two_level.on_meta(self.precision_plugin.tensor_init_context())
        return super().tensor_init_context(empty_init)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        if self._nodes.several:
            return two_level.without_gradient_sync(self._module)
        return nullcontext()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, methods = self._module.trainer, self._attached
        if not methods:
            return
        # Not in `setup_optimizers`: to know the steps there, Lightning would load the data too early. It would draw
        # other random numbers, and a checkpoint in the middle of an epoch could not set them back.
        self._steps = steps_of_run(trainer)
        for each in methods:
            rank_zero_info(each.summary())

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        for each in self._attached:  # not where the host steps: a module may step an optimizer that it has kept
            each.announce_batch(self._module.trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        assert self._signals is not None
        last_window.end_before_statistics(self._module.trainer, batch_idx)
        self._signals.before_batch(self._module.trainer)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        method = find(optimizer)
        if self._nodes.several and not self._module.automatic_optimization:
            two_level.check_gradients_arrived(self._module)
        if not isinstance(optimizer, NoOptimizer):
            setup.check_attached(optimizer)
        with self._words.explaining():
            result = super().optimizer_step(optimizer, *args, **kwargs)
        if method is None:
            return result
        # The step counts only afterwards. What is saved at the end of the fit is then the model that it ends with.
        if self._module.automatic_optimization and self._steps == self._module.global_step + 1:
            method.finish()
        return result

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision):
            plugin.scaler = setup.sharded_scaler(plugin.scaler)
        if not self._method.clips:  # each rank clips its own gradient, as the plugin does it
            return
        # Lightning asks the plugin to clip and never the strategy. The plugin's class must keep its name, under which
        # checkpoints hold the scaler's state.
        plugin.clip_gradients = setup.clip_gradients  # type: ignore[method-assign]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._nodes.several:
            checkpoint = {**checkpoint, "state_dict": two_level.rows(self._module, checkpoint["state_dict"])}
        super().load_model_state_dict(checkpoint, strict=strict)
        for each in find_all(self.optimizers):
            each.weights_loaded()

    # ------------------------------------------------------------------------------------------------- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Not super(): its advice on unused parameters is about DDP's reducer, which is not used here.
        self._interrupted = not signals.ends_together(exception)
        if self._interrupted:
            leave_groups(self._signals is not None and self._signals.failed_alone)

    @override
    def teardown(self) -> None:
        # After an exception other ranks may never send what this one would wait for.
        waits = () if self._interrupted else (self._drain,)
        saved = functools.partial(self._saver.finish, raising=not self._interrupted)
        parts = (*waits, self._end_attachment, saved, self._put_back, self._tear_down)
        ending.run_all(parts, self._interrupted)

    def _drain(self) -> None:
        for each in self._attached:
            each.drain()

    def _put_back(self) -> None:
        """Puts the Trainer's own parts back."""
        if self._signals is not None:
            guests.detach(self._module.trainer)
            self._signals = None
        vars(self.precision_plugin).pop("clip_gradients", None)

    def _tear_down(self) -> None:
        if not self._nodes.several:
            super().teardown()
            return
        # Not super(): it moves the module to the CPU, and a sharded one stays where its mesh is.
        self.model = self.lightning_module
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()
