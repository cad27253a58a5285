"""FabricSparseLoCoStrategy: SparseLoCo as a strategy of ``lightning.fabric.Fabric``, over the Trainer's core."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.fabric.utilities.types import _PATH, Optimizable
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint import saver
from lightning_scape.hosts import advice, launching, sparseloco
from lightning_scape.hosts.fabric import FabricScapeStrategy
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.sparseloco import SparseLoCo
from lightning_scape.sparseloco.config import Average, Reduction


class FabricSparseLoCoStrategy(FabricScapeStrategy):
    """``L.Fabric(strategy=FabricSparseLoCoStrategy(sync_every=30))``, or ``L.Fabric(strategy="sparseloco")``.

    ``fabric.setup(model, optimizer)`` (or ``setup_module``, ``setup_optimizers``) makes all ranks' models equal and
    wraps the optimizer, any of torch's, in a :class:`~lightning_scape.SparseLoCo`; optimizer and model stay what they
    are. ``fabric.backward``, ``no_backward_sync``, ``clip_gradients`` (of the rank's own gradient), ``save`` and
    ``load`` work as with DDP. Inside a window every rank has parameters of its own, and rank 0's are what ``save``
    writes for the model. Call ``fabric.strategy.sync()`` at the end of training, or give ``total_steps``; and before
    you set up another optimizer over the same parameters.

    Args:
        sync_every: H, steps from one exchange to the next.
        density: share of the entries that a rank sends in an exchange; 1 sends all.
        bits: of a value on the wire: 2, 4, 8, or None for fp32.
        error_decay: what is left of the error feedback after each window.
        outer_lr: length of the outer step.
        average: what the sum over ranks is divided by: their number (``"all"``), that of the ``"senders"`` of the
            entry, or the ``"geometric"`` mean of both; None chooses.
        reduction: ``"sharded"`` over the owners of the entries, ``"gathered"`` on every rank; None chooses.
        return_density: share of the entries that come back from the owners; None is ``density``.
        block_size: block length, None for the best.
        device: where the starting point and the error feedback live; ``"cpu"`` is host memory.
        overlap_steps: inner steps beside which the exchange runs.
        max_skipped: dropped windows in a row (parameters are not finite) that raise an error.
        check_replicas_every: exchanges between two comparisons of all ranks.
        local_group_size: ranks of a node that hold one replica together, sharded by FSDP2, with one
            gradient; ``"node"`` takes all ranks of a node. SparseLoCo then runs between the nodes.
        reshard_after_forward: with ``local_group_size`` above 1: free gathered parameters between forward and backward.
        total_steps: of the whole run, where you know them: the last step then ends its window.
        accelerator: as in DDPStrategy, as for all that follow.
        parallel_devices: this node's devices.
        cluster_environment: how ranks find each other.
        checkpoint_io: how checkpoints are written.
        precision: the precision.
        process_group_backend: ``"gloo"``, ``"nccl"``; None goes by the device.
        timeout: how long a collective waits for the other ranks; a number counts seconds.
        start_method: how processes are started.
        state_dict_type: ``"full"``, a checkpoint is one file, with every rank's state; ``"sharded"``, a directory into
            which each rank writes its own part, in parallel. Either is loaded, whatever is set here.
        async_save: write sharded checkpoints while training goes on; see :class:`FabricScapeStrategy`.
        wrap: with ``local_group_size`` above 1: class names of the modules that are gathered one at a time; see
            :class:`FabricScapeStrategy`.
        broadcast_buffers: hand rank 0's buffers on before each forward pass with gradients, as DDP does.

    Raises:
        ValueError: an option is outside its rule.
    """

    @launching.refuses_options_of_ddp
    def __init__(
        self,
        sync_every: int = 30,
        density: float = 1 / 64,
        bits: int | None = 2,
        error_decay: float = 0.95,
        outer_lr: float = 1.0,
        *,
        average: Average | None = None,
        reduction: Reduction | None = None,
        return_density: float | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        overlap_steps: int = 0,
        max_skipped: int = 10,
        check_replicas_every: int = 1,
        local_group_size: int | Literal["node"] = 1,
        reshard_after_forward: bool = True,
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
        config = sparseloco.config_of(locals())
        super().__init__(
            total_steps=total_steps,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            state_dict_type=state_dict_type,
            async_save=async_save,
            local_group_size=local_group_size,
            reshard_after_forward=reshard_after_forward,
            wrap=wrap,
            broadcast_buffers=broadcast_buffers,
        )
        self.config = config  # type: ignore[assignment] # in place of SCAPE's, which nothing here reads

    def __repr__(self) -> str:
        """The options that differ from the defaults."""
        return f"<{type(self).__name__}({advice.chosen(self.config)})>"

    @override
    def _forget(self) -> None:
        super()._forget()
        self._wrappers: weakref.WeakSet[SparseLoCo] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that pickle the strategy (spawn, forkserver), before anything is set up."""
        return {name: value for name, value in super().__getstate__().items() if name != "_wrappers"}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        sparseloco.register(strategy_registry, cls)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        named: Iterable[tuple[str, Tensor]] = [
            pair for module in self.known_modules for pair in module.named_parameters()
        ]
        self._nodes.follow_replaced(optimizer)
        given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for former in [loco for loco in self._wrappers if given & set(map(id, loco.parameters.tensors))]:
            former.close()  # replaced in mid-training: after sync(), or the first step finds that ranks differ
            self._wrappers.discard(former)
        group = self._nodes.side_group(self._mask_group, self._timeout)
        loco = sparseloco.wrap(optimizer, self.config, named, group, self._nodes.process_group)  # type: ignore[arg-type]
        self._wrappers.add(loco)
        rank_zero_info(sparseloco.what_holds(loco))
        if self.total_steps is None and loco.communicator.world_size > 1:
            rank_zero_info(
                "The number of steps is not known: call the strategy's sync() after the last one, or the model that you"
                " save may be rank 0's alone (total_steps=N does it at step N)."
            )
        return optimizer

    @override
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        result = DDPStrategy.optimizer_step(self, optimizer, **kwargs)
        for loco in sparseloco.wrappers([optimizer]):
            if loco.progress.steps == self.total_steps:
                loco.sync()
        self._look_at_buffers_in_time()
        return result

    @override
    def _stoppable(self) -> list[ScapeOptimizer | SparseLoCo]:
        return list(self._wrappers)

    def sync(self) -> None:
        """Ends the windows that have begun: all ranks hold the same parameters afterwards. Collective."""
        for loco in sparseloco.alive_everywhere(self._wrappers):
            loco.sync()

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips this rank's own gradient, and returns its norm.

        A norm that is not finite raises nothing, whatever ``error_if_nonfinite`` (True in Fabric's defaults) says: the
        error would be one rank's alone. The window is dropped on all ranks.
        """
        norm = DDPStrategy.clip_gradients_norm(self, module, optimizer, max_norm, norm_type, False)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of the node's gradient

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        DDPStrategy.clip_gradients_value(self, module, optimizer, clip_val)

    # --------------------------------------------------------------------------------------------- checkpoints

    @override
    def _ours(self, value: Any) -> Any:
        if isinstance(value, SparseLoCo):
            return value
        return next(iter(sparseloco.wrappers([value])), None)

    @override
    def _offered_parameters(self, module: Module) -> list[str]:
        # Inside a window nodes differ: of the model only the first one's is saved.
        return super()._offered_parameters(module) if self.global_rank < self._nodes.size else []

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._together.agree()
        for loco in sparseloco.wrappers([optimizer]):
            return sparseloco.state_of(loco)
        return DDPStrategy.get_optimizer_state(self, optimizer)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        state: Module | Optimizer | dict[str, Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(loco := self._ours(value), SparseLoCo):
                loco.restore_parameters()  # a model that was loaded after it: inside a window rank 0's parameters
        return rest
