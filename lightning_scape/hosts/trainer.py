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
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint import files
from lightning_scape.checkpoint.saver import StateDictType
from lightning_scape.comm.collectives import Communicator, leave_groups
from lightning_scape.core.method import Method, find, unwrapped
from lightning_scape.hosts import signals, two_level
from lightning_scape.hosts.checkpoints import ScapeCheckpointIO, act_together
from lightning_scape.hosts.common import (
    Common,
    StartMethod,
    attached,
    clip_gradients,
    make_alike,
    sharded_scaler,
    start_equal,
    start_method_of,
)
from lightning_scape.hosts.generators import Generators
from lightning_scape.hosts.private_names import NoOptimizer, insert, replace


class MethodStrategy(DDPStrategy):
    """Training by a method, the one that ``config`` is of: ``MethodStrategy(SparseLoCoConfig(sync_every=30))``.

    For every method: in training each rank has buffers of its own (BatchNorm's statistics, and what else a module
    updates from its own batch); all take rank 0's before a validation, a save and the end. Saving a checkpoint is
    collective: if one rank alone fails, callbacks that save on exceptions save nothing.

    Args:
        config: the method's options.
        checkpoint_io: how checkpoints are written.
        process_group_backend: ``"gloo"``, ``"nccl"``; None goes by the device.
        timeout: how long a collective waits for the other ranks; a number counts seconds.
        start_method: how processes are started; None is ``"fork"`` in a notebook, else ``"popen"``.
        state_dict_type: ``"full"``, a checkpoint is one file; ``"sharded"``, a directory into which each rank writes
            its own part, in parallel. Either is loaded, whatever is set here.
        async_save: write checkpoints while training goes on, from a copy; a full one is collected meanwhile, too. What
            goes wrong is raised at the next save or at the end of the fit.

    Raises:
        TypeError: an option of DDP's that is not needed here, one that does not exist, or ``config`` of no method.
    """

    def __init__(
        self,
        config: Any,
        *,
        checkpoint_io: CheckpointIO | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        start_method: StartMethod | None = None,
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
    ) -> None:
        self._common = Common(config, state_dict_type, async_save, timeout)
        super().__init__(
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=self._common.timeout,
            start_method=start_method_of(start_method),
        )
        self.config = self._common.config
        self._methods: list[Method] = []
        """Of the fit's optimizers."""
        self._fitting = self._interrupted = False
        self._replaced = ExitStack()
        """Puts back what is replaced in the Trainer, its callbacks and its precision plugin."""
        self._signals: signals.Signals | None = None
        self._saved_rng: Any = None
        self._generators: Generators | None = None

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """With ``local_group_size`` above 1: nodes (``"replicate"``) times ranks of a node (``"shard"``)."""
        return self._common.nodes.mesh

    @property
    def _module(self) -> LightningModule:
        """The user's module; there is one in a fit."""
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def _configure_launcher(self) -> None:
        self.checkpoint_io = self._checkpoint_io or ScapeCheckpointIO()
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._common.meet(self)
        self._interrupted = False
        trainer = self._module.trainer
        self._replaced.close()
        act_together(self._replaced, trainer, self._before_save)
        if trainer.state.fn == TrainerFn.FITTING:
            self._signals = signals.Signals(trainer, self._common.words, self._common.saver, self._replaced)

    @override
    def tensor_init_context(  # type: ignore[override]
        self, empty_init: bool | None = None
    ) -> AbstractContextManager[None]:
        if empty_init and self._common.nodes.several:
            return two_level.on_meta(self.precision_plugin.tensor_init_context())
        return super().tensor_init_context(empty_init)

    @override
    def model_to_device(self) -> None:
        if not self._common.nodes.several:
            super().model_to_device()
            return
        # For evaluation too: the model may not fit on one rank.
        self._common.nodes.shard(self._module, self.root_device, self.precision_plugin.precision)
        self.model = two_level.ThroughForward(self._module)

    @override
    def configure_ddp(self) -> None:
        """Makes all ranks equal to rank 0, as DDP's constructor does, and wraps nothing."""
        if not self._common.nodes.several:
            start_equal(self._module)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Puts the user's optimizers under the method. Collective; also in mid-training, after a change of theirs."""
        self._fitting = False  # until it is known that all ranks have built the same
        Communicator().raise_on_all_ranks(functools.partial(super().setup_optimizers, trainer))
        given: list[Any] = [unwrapped(each) for each in self.optimizers if not isinstance(each, NoOptimizer)]
        self._methods = self._common.attach_all(given, self._module, self._methods)
        self._fitting = True

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            own, shared = plugin.scaler, sharded_scaler(plugin.scaler, self.root_device.type)
            replace(self._replaced, plugin, "scaler", shared)
            self._replaced.callback(lambda: own.load_state_dict(shared.state_dict()))
        if self._common.method.exchanges_every_step:  # Lightning asks the plugin, never the strategy
            replace(self._replaced, plugin, "clip_gradients", clip_gradients)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._generators is not None and self._module.trainer.training:
            self._generators.begin_batches()
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self._signals is not None
        self._signals.before_batch(self._module.trainer)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return two_level.without_gradient_sync(self._module)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._common.nodes.several and not self._module.automatic_optimization:
            two_level.check_gradients_arrived(self._module)
        method = None if isinstance(optimizer, NoOptimizer) else attached(optimizer)
        with self._common.words.explaining():
            result = super().optimizer_step(optimizer, *args, **kwargs)
        # The step counts only afterwards. What is saved at the end of the fit is then the model that it ends with.
        if method is not None and signals.is_last_step(self._module.trainer):
            self._common.words.hear()  # ranks with more batches do not meet what follows
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
            make_alike([self._module], self._methods)

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Not super(): its advice on unused parameters is about DDP's reducer, which is not used here.
        self._interrupted = not isinstance(exception, SIGTERMException)
        if self._interrupted:
            leave_groups()

    @override
    def teardown(self) -> None:
        # After an exception the user must see it, and other ranks may never send what this one would wait for.
        quiet = suppress(Exception) if self._interrupted else nullcontext()
        with quiet, ExitStack() as parts:  # from the last one to the first, whatever becomes of each
            parts.callback(self._tear_down_nodes if self._common.nodes.several else super().teardown)
            parts.callback(self._replaced.close)
            parts.callback(self._common.saver.finish if self._interrupted else self._common.saver.wait)
            for each in self._methods:  # the user's optimizers are torch's again; they may still be saved
                parts.callback(each.give_back)
            self._fitting, self._methods, self._signals = False, [], None

    def _tear_down_nodes(self) -> None:
        # Not super(): it moves the module to the CPU, and a sharded one stays where its mesh is.
        self.model = self.lightning_module
        if self._start_method != "popen" and self.model is not None:  # who has forked this process gets a state dict
            self.model.register_state_dict_post_hook(two_level.gather)  # type: ignore[no-untyped-call]
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._common.nodes.several  # before, a module on the meta device has no memory

    def _before_save(self) -> None:
        """Waits for all ranks to come to a save; raises on all of them if some do not. Collective."""
        self._common.words.meet(saving=True)
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
        write = functools.partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
        self._common.saver.save(self._common.nodes.whole(checkpoint), self.broadcast(str(filepath)), write)
        if not self._fitting:  # nothing trains meanwhile: the caller expects the file to be there
            self.wait_for_checkpoint()

    def wait_for_checkpoint(self) -> None:
        """Returns when what ``async_save`` has begun to write is there; raises what went wrong, on every rank."""
        self._common.saver.wait()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        read = functools.partial(super().load_checkpoint, checkpoint_path, weights_only=weights_only)
        checkpoint, self._saved_rng = self._common.saver.load(checkpoint_path, read, weights_only)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = self._common.nodes.rows(self._module, checkpoint["state_dict"])
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # As Lightning does: without a state (emptied in `on_load_checkpoint`) an optimizer begins anew.
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            (find(optimizer) or optimizer).load_state_dict(saved)
        if self._saved_rng is not None:
            self._generators, self._saved_rng = Generators(self._saved_rng), None
            insert(self._replaced, self._module.trainer, self._generators, first=True)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        remove = functools.partial(super().remove_checkpoint, files.local_path(filepath) or filepath)
        self._common.saver.after(remove)
