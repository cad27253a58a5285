"""The strategy of ``lightning.pytorch.Trainer``: one for all methods.

Launching, environments, samplers and checkpoint files are DDPStrategy's. What differs: the module is not wrapped (no
gradient is reduced in the backward pass), and each optimizer is put under a
:class:`~lightning_scape.core.method.Method`, whose steps exchange what has to be exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint import files
from lightning_scape.comm.collectives import Communicator, leave_groups
from lightning_scape.core.method import Method, find
from lightning_scape.hosts import generators, guests, setup, signals, two_level
from lightning_scape.hosts.checkpoints import ConnectorOfAll, StateDictType
from lightning_scape.hosts.common import Common, StartMethod, check_start_method, register
from lightning_scape.hosts.private_names import NoOptimizer
from lightning_scape.hosts.run_length import steps_of_run
from lightning_scape.hosts.schedulers import with_live


class MethodStrategy(DDPStrategy):
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

    method: ClassVar[str | None] = None
    """Name of the method, if the strategy is for one only."""

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
        start_method: StartMethod = "popen",
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        **options: Any,
    ) -> None:
        saving: Any = {"state_dict_type": state_dict_type, "async_save": async_save, "checkpoint_io": checkpoint_io}
        self._common = Common(self, config, options, timeout=timeout, **saving)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=self._common.timeout,
            start_method=start_method,
        )
        self.config = self._common.config
        self._nodes, self._checkpoints = self._common.nodes, self._common.checkpoints
        self._methods: list[Method] = []
        """Of the fit's optimizers."""
        self._fitting = self._interrupted = False
        self._steps: float | None = None
        """Steps of the run, if known; set when the training starts."""
        self._signals: signals.Signals | None = None
        self._connector = ConnectorOfAll()
        self._saved_rng: Any = None
        self._generators: generators.Generators | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What Lightning copies and pickles of a strategy, without what belongs to this process."""
        return {**vars(self), "_methods": [], "_fitting": False}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register(cls, strategy_registry)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """With ``local_group_size`` above 1: nodes (``"replicate"``) times ranks of a node (``"shard"``)."""
        return self._nodes.mesh

    @property
    def _module(self) -> LightningModule:
        """The user's module; there is one in a fit."""
        assert self.lightning_module is not None
        return self.lightning_module

    # ------------------------------------------------------------------------------------------------- the set-up

    @override
    def _configure_launcher(self) -> None:
        check_start_method(type(self).__name__, self._common.method.name, self._start_method)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._interrupted = False
        if self.lightning_module is not None:
            self._connector.attach(trainer := self.lightning_module.trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                guests.detach(trainer)
                self._signals = signals.Signals(trainer, self._common.new_words(self))
                guests.insert(trainer, self._signals)
                guests.insert_first(trainer, signals.End(self._common.words))

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        self._common.meet(self)

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
            guests.check_sharded(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
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
    def configure_ddp(self) -> None:
        """Makes all ranks equal to rank 0, as DDP's constructor does, and wraps nothing."""
        assert self.model is not None
        setup.start_equal(self.model)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Puts the user's optimizers under the method. Collective; also in mid-training, after a change of theirs."""
        self._fitting = False  # until it is known that all ranks have built the same
        Communicator().raise_on_all_ranks(functools.partial(super().setup_optimizers, trainer))
        setup.check_alike(given := [each for each in self.optimizers if not isinstance(each, NoOptimizer)])
        self._fitting = True
        if not self._common.method.exchanges_every_step:
            setup.check_apart(given)
        before = {id(each.optimizer): each for each in self._methods}
        for gone in [each for each in self._methods if not any(each.optimizer is one for one in given)]:
            gone.finish()
            gone.close()
        named = list(self._module.named_parameters())
        self._methods = [before.get(id(each)) or self._common.attach(each, named) for each in given]

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision):
            plugin.scaler = setup.sharded_scaler(plugin.scaler)
        if not self._common.method.clips:  # each rank clips its own gradient, as the plugin does it
            return
        # Lightning asks the plugin to clip and never the strategy. The plugin's class must keep its name, under which
        # checkpoints hold the scaler's state.
        plugin.clip_gradients = setup.clip_gradients  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------------------------- the training

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if not self._methods:
            return
        # Not in `setup_optimizers`: to know the steps there, Lightning would load the data too early. It would draw
        # other random numbers, and a checkpoint in the middle of an epoch could not set them back.
        self._steps = steps_of_run(self._module.trainer)
        for each in self._methods:
            rank_zero_info(each.summary())

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._module.trainer.training:
            self._begin_batches()
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._begin_batches()  # of a step that takes `dataloader_iter`, and fetches its batches itself
        trainer = self._module.trainer
        for each in self._methods:  # not where the host steps: a module may step an optimizer that it has kept
            each.announce_batch(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        assert self._signals is not None
        self._signals.before_batch(trainer, batch_idx)

    def _begin_batches(self) -> None:
        if self._generators is not None:
            self._generators.begin_batches()
            self._generators = None

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return two_level.without_gradient_sync(self._module) if self._nodes.several else nullcontext()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._nodes.several and not self._module.automatic_optimization:
            two_level.check_gradients_arrived(self._module)
        method = None if isinstance(optimizer, NoOptimizer) else setup.attached(optimizer)
        with self._common.words.explaining():
            result = super().optimizer_step(optimizer, *args, **kwargs)
        # The step counts only afterwards. What is saved at the end of the fit is then the model that it ends with.
        last = self._module.automatic_optimization and self._steps == self._module.global_step + 1
        if method is not None and last:
            method.finish()
        return result

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._make_alike()

    @override
    def on_train_end(self) -> None:
        """Ends what has begun: every rank leaves the fit with the same parameters."""
        for each in self._methods:
            each.finish()
        super().on_train_end()
        self._make_alike()

    def _make_alike(self) -> None:
        if self._fitting:
            self._common.make_alike([self._module], self._methods)

    # ------------------------------------------------------------------------------------------------- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Not super(): its advice on unused parameters is about DDP's reducer, which is not used here.
        self._interrupted = not signals.ends_together(exception)
        if self._interrupted:
            leave_groups(self._signals is not None and self._signals.failed_alone)

    @override
    def teardown(self) -> None:
        # After an exception the user must see it, and other ranks may never send what this one would wait for.
        quiet = suppress(Exception) if self._interrupted else nullcontext()
        with quiet, ExitStack() as parts:  # from the last one to the first, whatever becomes of each
            parts.callback(self._tear_down)
            parts.callback(self._put_back)
            parts.callback(self._checkpoints.saver.finish, raising=not self._interrupted)
            parts.callback(self._end_fit)
            for each in () if self._interrupted else self._methods:
                parts.callback(each.drain)

    def _end_fit(self) -> None:
        """The user's optimizers are torch's again. Sends nothing; a checkpoint may still be saved."""
        self._fitting = False
        for each in self._methods:
            each.give_back()
        self._methods, self._steps = [], None

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

    # ------------------------------------------------------------------------------------------------- checkpoints

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = self._checkpoints.io_of(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoints.check_io(io)
        self._checkpoint_io = io

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._nodes.several  # before, a module on the meta device has no memory

    def before_save(self) -> None:
        """Waits for all ranks to come to a save; raises on all of them if some do not. Collective."""
        self._common.words.before_save()
        self._make_alike()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> Any:  # what `save_checkpoint` takes, by way of hooks
        method = find(optimizer)
        return super().optimizer_state(optimizer) if method is None else method.own_state()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, one file or a directory. Collective; if it fails, it fails on every rank."""

        def write(content: dict[str, Any], path: Any) -> None:
            self.checkpoint_io.save_checkpoint(content, path, storage_options=storage_options)

        self._checkpoints.save(checkpoint, self.broadcast(str(filepath)), storage_options is not None, write)
        if not self._fitting:  # nothing trains meanwhile: the caller expects the file to be there
            self.wait_for_checkpoint()

    def wait_for_checkpoint(self) -> None:
        """Returns when what ``async_save`` has begun to write is there; raises what went wrong, on every rank."""
        self._checkpoints.saver.wait()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        read = functools.partial(super().load_checkpoint, checkpoint_path, weights_only=weights_only)
        checkpoint, self._saved_rng = self._checkpoints.load(checkpoint_path, read, weights_only)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._nodes.several:
            checkpoint = {**checkpoint, "state_dict": two_level.rows(self._module, checkpoint["state_dict"])}
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # As Lightning does: without a state (emptied in `on_load_checkpoint`) an optimizer begins anew.
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            (find(optimizer) or optimizer).load_state_dict(saved)
        # Lightning hands these on to the schedulers next.
        states = checkpoint.get("lr_schedulers", [])
        for place, (config, state) in enumerate(zip(self.lr_scheduler_configs, states, strict=False)):
            states[place] = with_live(config.scheduler, state)
        rng, self._saved_rng = self._saved_rng, None
        self._generators = None if rng is None else generators.attach(self._module.trainer, rng)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        remove = functools.partial(super().remove_checkpoint, files.local_path(filepath) or filepath)
        self._checkpoints.saver.after(remove)
