"""SparseLoCoStrategy: SparseLoCo as a strategy of ``lightning.pytorch.Trainer``.

Launching, equal starts, random numbers and checkpoint files are :class:`ScapeStrategy`'s. What differs: the user's
optimizer stays, and a :class:`~lightning_scape.SparseLoCo` around it exchanges in a hook of its ``step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint import saver
from lightning_scape.hosts import advice, launching, sparseloco, swap
from lightning_scape.hosts.dump import restore_schedulers
from lightning_scape.hosts.resume import Resume
from lightning_scape.hosts.run_length import compare_lengths, steps_of_run
from lightning_scape.hosts.trainer import ScapeStrategy
from lightning_scape.hosts.unwrapped import Attached, UnwrappedStrategy
from lightning_scape.sparseloco.config import Average, Reduction


class SparseLoCoStrategy(ScapeStrategy):
    """Data-parallel training whose ranks exchange every ``sync_every`` steps, sparsely (SparseLoCo, arXiv 2508.15706).

    ``Trainer(strategy=SparseLoCoStrategy(sync_every=30))``, or ``Trainer(strategy="sparseloco")`` for the defaults. Any
    torch optimizer serves; it is not replaced. Schedulers, gradient accumulation, every precision, callbacks and
    checkpoints work as they do with DDP.

    What differs from DDP: inside a window every rank has parameters of its own. ``gradient_clip_val`` bounds the norm
    of each rank's own gradient. Validation and a checkpoint's ``state_dict`` inside a window are of rank 0's parameters
    (each rank validates with its own); a resumed run takes up every rank's, bit for bit. At the end of a fit the window
    that has begun is ended early, so that all ranks hold the same model; callbacks that put averaged weights in place
    then (EMA, SWA) come before that, so let such a fit end with a window. With ``precision="16-mixed"`` all ranks skip
    a step together, for which they exchange a number in every step. Buffers are not sent: see :class:`ScapeStrategy`.

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
        accelerator: as in DDPStrategy, as for all that follow.
        parallel_devices: this node's devices.
        cluster_environment: how ranks find each other.
        checkpoint_io: how checkpoints are written.
        precision_plugin: the precision.
        process_group_backend: ``"gloo"``, ``"nccl"``; None goes by the device.
        timeout: how long a collective waits for the other ranks; a number counts seconds.
        start_method: how processes are started.
        state_dict_type: ``"full"``, a checkpoint is one file, with every rank's state; ``"sharded"``, a directory into
            which each rank writes its own part, in parallel. Either is loaded, whatever is set here.
        async_save: write sharded checkpoints while training goes on.
        wrap: with ``local_group_size`` above 1: class names of the modules that are gathered one at a time; see
            :class:`ScapeStrategy`.
        resume: ``"auto"``: fit goes on from the newest complete checkpoint; see :class:`ScapeStrategy`.
        batches_per_step: of all ranks, in one optimizer step of all; see :class:`ScapeStrategy`.
        broadcast_buffers: hand rank 0's buffers on before each training step, as DDP does: a message in every step.

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
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        state_dict_type: saver.StateDictType = "full",
        async_save: bool = False,
        wrap: Sequence[str] = (),
        resume: Resume = None,
        batches_per_step: int | None = None,
        broadcast_buffers: bool = False,
    ) -> None:
        config = sparseloco.config_of(locals())
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            state_dict_type=state_dict_type,
            async_save=async_save,
            local_group_size=local_group_size,
            reshard_after_forward=reshard_after_forward,
            wrap=wrap,
            resume=resume,
            batches_per_step=batches_per_step,
            broadcast_buffers=broadcast_buffers,
        )
        self.config = config  # type: ignore[assignment] # in place of SCAPE's, which nothing here reads

    def __repr__(self) -> str:
        """The options that differ from the defaults."""
        return f"<{type(self).__name__}({advice.chosen(self.config)})>"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        sparseloco.register(strategy_registry, cls)

    @override
    def _attach(self, optimizer: Optimizer) -> Attached:
        assert self.lightning_module is not None
        named, nodes = self.lightning_module.named_parameters(), self._nodes
        group = nodes.side_group(self._mask_group, self._timeout)
        loco = sparseloco.wrap(optimizer, self.config, named, group, nodes.process_group)  # type: ignore[arg-type]
        return Attached(optimizer, optimizer, loco)

    @override
    def _detach(self, attached: Attached) -> None:
        attached.method.sync()  # inside a window ranks differ
        attached.method.close()

    @override
    def _give_back(self, attached: Attached) -> None:
        sparseloco.let_go(attached.method)

    @override
    def on_train_start(self) -> None:
        UnwrappedStrategy.on_train_start(self)
        assert self.lightning_module is not None
        wrappers, trainer = sparseloco.wrappers(self.optimizers), self.lightning_module.trainer
        if wrappers:
            compare_lengths(trainer)
        for loco in wrappers:
            rank_zero_info(sparseloco.what_holds(loco))
        self._steps = steps = steps_of_run(trainer) if wrappers else None
        if wrappers and steps is not None and steps < wrappers[0].config.sync_every:
            rank_zero_warn(
                f"This run has {steps:.0f} steps, fewer than sync_every={wrappers[0].config.sync_every}: ranks exchange"
                " once, at its end. Lower `sync_every`, or train longer."
            )

    @property
    @override
    def _steps_compare_ends(self) -> bool:
        return False  # a step sends nothing

    @override
    def on_train_end(self) -> None:
        """Ends the window that has begun: every rank leaves the fit with the same parameters."""
        for each in self._attached:
            each.method.sync()
        super().on_train_end()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = UnwrappedStrategy.optimizer_step(self, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        # The step counts only afterwards. What is saved at the end of the fit is then the model that it ends with.
        if self.lightning_module.automatic_optimization and self._steps == self.lightning_module.global_step + 1:
            for loco in sparseloco.wrappers([optimizer]):
                loco.sync()
        return result

    @override
    def setup_precision_plugin(self) -> None:
        UnwrappedStrategy.setup_precision_plugin(self)  # each rank clips its own gradient, as the plugin does it
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.scaler = swap.sharded_scaler(self.precision_plugin.scaler)

    # --------------------------------------------------------------------------------------------- checkpoints

    @override
    def _offered_parameters(self) -> list[str]:
        # Inside a window nodes differ: of the model only the first one's is saved.
        return super()._offered_parameters() if self.global_rank < self._nodes.size else []

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._dump.agree()
        for loco in sparseloco.wrappers([optimizer]):
            if self._state_dict_type == "sharded":
                return loco.sharded_state_dict()  # type: ignore[return-value] # taken by save_checkpoint
            return sparseloco.state_of(loco)
        return UnwrappedStrategy.optimizer_state(self, optimizer)

    @override
    def _take_up(self, checkpoint: Mapping[str, Any]) -> None:
        # As Lightning does: without a state (emptied in `on_load_checkpoint`) an optimizer begins anew.
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            for loco in sparseloco.wrappers([optimizer]):
                loco.load_state_dict(saved)
        restore_schedulers(checkpoint, [config.scheduler for config in self.lr_scheduler_configs])
