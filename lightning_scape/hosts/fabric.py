"""FabricScapeStrategy: SCAPE as a strategy of ``lightning.fabric.Fabric``, over the same core as the Trainer's."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, MixedPrecision, Precision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.fabric.utilities.types import Optimizable
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint import saver
from lightning_scape.checkpoint.saver import Saver
from lightning_scape.comm.collectives import is_distributed
from lightning_scape.comm.lost_ranks import explained_messages
from lightning_scape.comm.side_group import SideGroup
from lightning_scape.hosts import advice, launching, rendezvous, swap, two_level
from lightning_scape.hosts.buffers import Buffers
from lightning_scape.hosts.fabric_checkpoints import FabricCheckpoints
from lightning_scape.hosts.outsiders import Watch
from lightning_scape.hosts.own_clipping import watch_gradients
from lightning_scape.scape.config import (
    ClipNorm,
    MaskStatistic,
    ScapeConfig,
    SecondMoment,
    Update,
    WireDtype,
    refuses_removed,
)
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.sparseloco import SparseLoCo


class FabricScapeStrategy(FabricCheckpoints):
    """``L.Fabric(strategy=FabricScapeStrategy(sparsity=0.99))``, or ``L.Fabric(strategy="scape")`` for the defaults.

    ``fabric.setup(model, optimizer)`` (or ``setup_module``, ``setup_optimizers``) makes all ranks' models equal
    and swaps AdamW, Adam or AdamS for a :class:`~lightning_scape.ScapeOptimizer`; the model is not wrapped. Build LR
    schedulers on the optimizer that ``setup`` returns, or on the one that it was given, whose ``step`` is now the new
    one's. ``fabric.backward``, ``no_backward_sync``, ``clip_gradients`` (which returns the norm of the averaged
    gradient, and leaves ``p.grad`` as it is), ``save`` and ``load`` work as with DDP.

    Args:
        sparsity: share of the entries that is not sent in a step, in [0, 1). 0 is dense training, sharded.
        config: all options at once, instead of one by one; an option given both ways must be the same.
        update: ``"adamw"`` or ``"adams"``; None fits the optimizer given. See :class:`~lightning_scape.ScapeConfig`, as
            for all options down to ``block_size``.
        dense_steps: number of first steps that send everything.
        sparsity_warmup_steps: steps over which the density falls from 1 to ``1 - sparsity``; 0 is none. None is 4,950
            at 99% and 1,424 at 90%; with the update of AdamS 1,000, or ``total_steps`` where that is less.
        mask_statistic: what ranks the entries.
        mask_votes: entries per block that every rank proposes; None chooses.
        second_moment: what an entry is divided by that was not visited in the step before.
        wire_dtype: how values travel to their owner, and the changes of wider parameters back.
        bias_correction: divide the first moments by ``1 - beta1**t``.
        clip_norm: how ``clip_gradients(max_norm=...)`` measures the averaged gradient.
        local_group_size: ranks of a node that hold one replica together, sharded by FSDP2; ``"node"`` takes all ranks
            of a node. SCAPE then runs between the nodes.
        reshard_after_forward: with ``local_group_size`` above 1: free gathered parameters between forward and backward.
        residual_device: where the residual lives.
        max_skipped: consecutive skipped steps (a gradient is not finite) that raise an error.
        check_replicas_every: steps between two comparisons of all ranks' parameters; 0: the first step only.
        block_size: block length, None for the best.
        total_steps: of the whole run, where you know them: AdamS's default warm-up is no longer than that.
        accelerator: as in DDPStrategy, as for all that follow.
        parallel_devices: this node's devices.
        cluster_environment: how ranks find each other.
        checkpoint_io: how checkpoints are written.
        precision: the precision.
        process_group_backend: ``"gloo"``, ``"nccl"``; None goes by the device.
        timeout: how long a collective waits for the other ranks; a number counts seconds.
        start_method: how processes are started; a notebook needs `"fork"`.
        state_dict_type: ``"full"``, a checkpoint is one file; ``"sharded"``, a directory into which each rank writes
            its own part, in parallel. Either is loaded, whatever is set here.
        async_save: write sharded checkpoints while training goes on. Call :meth:`wait_for_checkpoint` at the end: what
            went wrong with the last one is raised there; the end of the process waits for it, and only warns.
        wrap: with ``local_group_size`` above 1: class names of the modules that are gathered one at a time. Empty takes
            the members of the model's outermost ModuleLists. Modules to which you have applied ``fully_shard`` over
            ``strategy.device_mesh["shard"]`` stay as they are.
        broadcast_buffers: hand rank 0's buffers on before each forward pass with gradients, as DDP does.

    Raises:
        ValueError: an option is outside its rule, or is given differently in ``config`` and by name.
        TypeError: an option of DDP's that is not needed here, or one of earlier versions.
    """

    @launching.refuses_options_of_ddp
    @refuses_removed
    def __init__(
        self,
        sparsity: float = 0.99,
        *,
        config: ScapeConfig | None = None,
        update: Update | None = None,
        dense_steps: int = 0,
        sparsity_warmup_steps: int | None = None,
        mask_statistic: MaskStatistic = "residual",
        mask_votes: int | None = None,
        second_moment: SecondMoment = "measured",
        wire_dtype: WireDtype = "bf16",
        bias_correction: bool = False,
        clip_norm: ClipNorm = "sketch",
        local_group_size: int | Literal["node"] = 1,
        reshard_after_forward: bool = True,
        residual_device: torch.device | str | None = None,
        max_skipped: int = 10,
        check_replicas_every: int = 0,
        block_size: int | None = None,
        total_steps: int | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        state_dict_type: saver.StateDictType = "full",
        async_save: bool = False,
        wrap: Sequence[str] = (),
        broadcast_buffers: bool = False,
    ) -> None:
        given = locals()
        if total_steps is not None and (not isinstance(total_steps, int) or total_steps < 1):
            raise ValueError(
                f"`total_steps` must be None or a whole number >= 1, got {total_steps!r}. Leave it out where you do not"
                " know it."
            )
        saver.check_saving(state_dict_type, async_save, checkpoint_io)
        self.config = swap.resolve_config(config, {name: given[name] for name in swap.CONFIG_DEFAULTS})
        super().__init__(
            nodes=two_level.Nodes(self.config, wrap),
            state_dict_type=state_dict_type,
            async_save=async_save,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=launching.as_timeout(timeout),
            start_method=start_method,
        )
        self._backward_sync_control = _GradientSync()
        self.total_steps = total_steps
        self._mask_group = SideGroup()
        self._buffers = Buffers(broadcast_buffers)
        self._forget()

    def _forget(self) -> None:
        # Weak: a model that the user drops must not be kept alive by the strategy.
        self._scape_optimizers: weakref.WeakSet[ScapeOptimizer] = weakref.WeakSet()
        self._told: weakref.WeakSet[ScapeOptimizer] = weakref.WeakSet()
        self.known_modules: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        """Modules that were set up, in order."""
        self._watch: Watch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that pickle the strategy (spawn, forkserver), before anything is set up."""
        left_out = ("_scape_optimizers", "_told", "known_modules", "_watch")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        launching.register(strategy_registry, cls)

    @override
    def _configure_launcher(self) -> None:
        launching.check_start_method(type(self).__name__, self._start_method)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        launching.check_ranks(self.num_processes * self.num_nodes)
        super().setup_environment()

    @override
    def _setup_distributed(self) -> None:
        starting = not is_distributed()
        with rendezvous.explained_rendezvous(self.cluster_environment):
            self._set_world_ranks()
            backend = self._get_process_group_backend()
            rendezvous.start_process_group(self.cluster_environment, backend, self._timeout, self.root_device)
            super()._setup_distributed()
        if starting:
            atexit.register(_destroy_dist_connection)  # see ScapeStrategy
        atexit.register(_finish, weakref.ref(self._saver))  # Fabric never tears a strategy down
        self._nodes.set_up(self.num_processes, self.root_device, self._timeout)  # collective, as the next
        if not self._nodes.several:
            self._mask_group.get(self._timeout)
        if isinstance(self.precision, MixedPrecision):
            self.precision.scaler = swap.sharded_scaler(self.precision.scaler)
        if self._nodes.several:  # a sharded module sends messages in forward and backward
            two_level.explain_forward(self.precision)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """With ``local_group_size`` above 1: nodes (``"replicate"``) times ranks of a node (``"shard"``)."""
        return self._nodes.mesh

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        if not (empty_init and self._nodes.several):
            return super().module_init_context(empty_init)
        return two_level.on_meta(self.precision.module_init_context())

    @override
    def module_to_device(self, module: Module) -> None:
        if not self._nodes.several:  # else a unit at a time is moved, in setup_module
            super().module_to_device(module)

    @override
    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Makes all ranks equal to rank 0, as DDP's constructor does; shards the module over a node's ranks."""
        if self._nodes.several:
            self._nodes.shard(module, self.root_device, two_level.compute_dtype(self.precision.precision))
        else:
            swap.start_equal(module)
        if module not in self.known_modules:
            self._buffers.hand_on_before_forward(module)
        self.known_modules[module] = None
        if self.world_size > 1:
            known = self.known_modules
            remedy = "Give it to fabric.setup, or to fabric.setup_optimizers, and step it."
            self._watch = self._watch or Watch(lambda: list(known), remedy)
            self._watch.modules_changed()
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        named = [pair for module in self.known_modules for pair in module.named_parameters()]
        self._nodes.follow_replaced(optimizer)
        (scape,) = swap.swap_optimizers(
            [optimizer],
            [],
            self._nodes.config,
            named_parameters=named,
            process_group=self._nodes.process_group,
            mask_group=self._nodes.side_group(self._mask_group, self._timeout),
            total_steps=self.total_steps,
        )
        if self.world_size > 1 and getattr(self.precision, "scaler", None) is None:
            watch_gradients(scape, "`fabric.clip_gradients(model, optimizer, max_norm=...)`", rank_zero_warn)
        self._scape_optimizers.add(scape)
        return scape

    @override
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        # Not before the first step: a checkpoint that is loaded brings its own warm-up along.
        if untold := self._scape_optimizers - self._told:
            self._told |= untold
            rank_zero_info(advice.what_holds(list(untold), self.total_steps, self._spelling()))
        result = super().optimizer_step(optimizer, **kwargs)
        self._look_at_buffers_in_time()
        return result

    def _look_at_buffers_in_time(self) -> None:
        if self._buffers.count_step():
            self._look_at_buffers("steps")

    @override
    def _look_at_buffers(self, occasion: str) -> None:
        if warning := self._buffers.compare(list(self.known_modules), type(self).__name__, occasion):
            rank_zero_warn(warning)

    # Fabric refuses `loss.backward()` where this is overridden: so it finds its own.
    @override
    @wraps(DDPStrategy.backward)
    def backward(  # type: ignore[override] # for the decorator
        self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any
    ) -> None:
        with explained_messages():
            super().backward(tensor, module, *args, **kwargs)

    def _spelling(self) -> advice.Spelling:
        """How the user writes the options."""
        return advice.as_call(type(self).__name__)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Records the clipping factor of the coming step, and returns the norm of the averaged gradient.

        ``p.grad`` stays as it is.

        With ``error_if_nonfinite`` a norm that is not finite is an error on every rank: at once on the CPU; on CUDA by
        the next step or checkpoint, after this step was skipped, so that the host does not wait for the device.
        """
        if float(norm_type) != 2.0:
            raise ValueError(
                f"`norm_type` must be 2 under SCAPE, got {norm_type!r}: no rank holds the averaged gradient, and only"
                " its Euclidean norm can be estimated from sketches. Leave it at 2."
            )
        self.precision.unscale_gradients(optimizer)
        return swap.scape_optimizer(optimizer).clip_grad_norm(float(max_norm), error_if_nonfinite=error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self.precision.unscale_gradients(optimizer)
        swap.scape_optimizer(optimizer).clip_grad_value(float(clip_val))

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(module, state_dict, strict=strict)
        swap.mark_masters_stale(self._scape_optimizers)

    # ------------------------------------------------------------------------------------------------- the end

    def request_stop(self) -> None:
        """Says that this rank was told to stop (SIGTERM); may be called by a signal's handler.

        All ranks learn it in the same step: see :attr:`stop_requested`.
        """
        for optimizer in self._stoppable():
            optimizer.request_stop()

    @property
    def stop_requested(self) -> bool:
        """After the optimizers' steps: whether all ranks stop here, for one of them was told to. The same on all."""
        return any(optimizer.stop_requested for optimizer in self._stoppable())

    def _stoppable(self) -> list[ScapeOptimizer | SparseLoCo]:
        return list(self._scape_optimizers)


def _finish(saver: weakref.ref[Saver]) -> None:
    if (there := saver()) is not None:
        there.finish(raising=False)


class _GradientSync(_BackwardSyncControl):
    """A module that is not sharded sends nothing in its backward pass: there is nothing to hold back."""

    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        if enabled and two_level.is_sharded(module):
            return two_level.without_gradient_sync(module)
        return nullcontext()
