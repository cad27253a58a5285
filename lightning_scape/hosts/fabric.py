"""The strategy of ``lightning.fabric.Fabric``: one for all methods."""

from __future__ import annotations

import atexit
import weakref
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, MixedPrecision, Precision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.fabric.utilities.types import Optimizable
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint.saver import Saver
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import Method, find_all
from lightning_scape.hosts import setup, two_level
from lightning_scape.hosts.checkpoints import FabricCheckpoints
from lightning_scape.hosts.common import StateDictType
from lightning_scape.hosts.private_names import BackwardSyncControl


class FabricMethodStrategy(FabricCheckpoints):
    """Training by a method, the one that ``config`` is of: ``FabricMethodStrategy(SparseLoCoConfig(sync_every=9))``.

    ``fabric.setup(model, optimizer)`` (or ``setup_module``, ``setup_optimizers``) makes all ranks' models equal and
    puts the optimizer under the method; the model is not wrapped. ``fabric.backward``, ``no_backward_sync``,
    ``clip_gradients``, ``save`` and ``load`` work as with DDP.

    Args:
        config: the method's options.
        total_steps: steps of the whole run, if you know them.
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
        async_save: write checkpoints while training goes on, from a copy; a full one is collected meanwhile, too. Call
            :meth:`wait_for_checkpoint` at the end: what went wrong with the last one is raised there; the end of the
            process waits for it, and only warns.
        options: of the method, by name, in place of ``config`` (a strategy of one method).

    Raises:
        ValueError: an option is outside its rule, or is given differently in ``config`` and by name.
        TypeError: an option of DDP's that is not needed here, or one that does not exist.
    """

    how_to_end: ClassVar[str] = (
        "call the strategy's sync() after the last one, or the model that you save may be rank 0's alone (total_steps=N"
        " does it at step N)."
    )
    """What a user must do if ranks differ between exchanges and the number of steps is not known."""

    def __init__(
        self,
        config: Any = None,
        *,
        total_steps: int | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        **options: Any,
    ) -> None:
        if total_steps is not None and (not isinstance(total_steps, int) or total_steps < 1):
            raise ValueError(
                f"`total_steps` must be None or a whole number >= 1, got {total_steps!r}. Leave it out where you do not"
                " know it."
            )
        super().__init__(
            config,
            options,
            state_dict_type=state_dict_type,
            async_save=async_save,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.hold_back_by(_GradientSync())
        self.total_steps = total_steps
        self.known = Known()
        """What was set up with this strategy."""

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        self._new_words()
        atexit.register(_finish, weakref.ref(self._saver))  # Fabric never tears a strategy down
        if isinstance(self.precision, MixedPrecision):
            self.precision.scaler = setup.sharded_scaler(self.precision.scaler)

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
            self._nodes.shard(module, self.root_device, self.precision.precision)
        else:
            setup.start_equal(module)
        self.known.modules[module] = None
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        _check_optimizer(optimizer)
        self._nodes.follow_replaced(optimizer)
        self.known.close_those_replaced_by(optimizer)
        named = [pair for module in self.known.modules for pair in module.named_parameters()]
        self._put_under_method(optimizer, named)
        self.known.add_optimizer(optimizer)
        return optimizer

    @override
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        # Not before the first step: a loaded checkpoint brings its own warm-up.
        if untold := self.known.untold():
            self._tell(untold)
        setup.check_attached(optimizer)
        self._words.end_batch(stepped=True)  # of the step before
        self._words.begin_batch()
        with self._words.explaining():
            result = super().optimizer_step(optimizer, **kwargs)
        for method in find_all([optimizer]):
            if method.steps == self.total_steps:
                method.finish()
        return result

    def _tell(self, methods: list[Method]) -> None:
        for each in methods:
            rank_zero_info(each.summary())
        if (
            self.total_steps is None
            and not self._method.exchanges_every_step
            and self.world_size > self._nodes.config.local_group_size
        ):
            rank_zero_info(f"The number of steps is not known: {self.how_to_end}")

    def sync(self) -> None:
        """Ends what has begun: all ranks hold the same parameters afterwards. Collective."""
        for method in self.known.methods_of_all_ranks():
            method.finish()
        self._make_alike()

    @override
    def trained(self) -> tuple[list[Module], list[Method]]:
        return list(self.known.modules), self.known.methods()

    @override
    def teardown(self) -> None:
        """Ends what has begun, and lets modules and optimizers go: another strategy may train them then. Collective.

        Fabric never calls it.
        """
        self.sync()
        self.wait_for_checkpoint()
        self.known.let_go()
        self.known = Known()
        super().teardown()

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips the averaged gradient in the coming step (``p.grad`` stays), or this rank's own. Returns its norm.

        The averaged gradient: with ``error_if_nonfinite`` a norm that is not finite is an error on every rank, on the
        CPU at once, on CUDA in the next step or checkpoint, so that the host does not wait; this step is skipped. This
        rank's own: it raises nothing, for only this rank would raise. The window is dropped on all ranks.
        """
        if not self._method.clips:
            norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, False)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of the node's gradient
        if float(norm_type) != 2.0:
            raise ValueError(
                f"`norm_type` must be 2 under {self._method.title}, got {norm_type!r}: no rank holds the averaged"
                " gradient, and only its Euclidean norm can be estimated from sketches. Leave it at 2."
            )
        self.precision.unscale_gradients(optimizer)
        return setup.clipping(optimizer).clip_grad_norm(float(max_norm), error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        if not self._method.clips:
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        setup.refuse_to_clip_by_value(f"clip_val={clip_val}")

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if self._nodes.several:
            state_dict = two_level.rows(module, state_dict)
        super().load_module_state_dict(module, state_dict, strict=strict)
        for method in self.known.methods():
            method.weights_loaded()

    # ------------------------------------------------------------------------------------------------- the end

    def request_stop(self) -> None:
        """Says that this rank was told to stop (SIGTERM); may be called by a signal's handler.

        All ranks hear it in the same step: see :attr:`stop_requested`.
        """
        self._words.stop = True

    @property
    def stop_requested(self) -> bool:
        """After the optimizers' steps: whether all ranks stop here, for one of them was told to. The same on all."""
        return self._words.stop_heard


class Known:
    """What was set up with a strategy, as long as the user keeps it: the strategy must not keep a model alive."""

    def __init__(self) -> None:
        self.modules: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        """In the order in which they were set up."""
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers under the method, as the user steps them, with their numbers; all ranks count alike."""
        self._count = 0
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[Known], tuple[()]]:
        """For launchers that pickle the strategy (spawn, forkserver), before anything is set up."""
        return Known, ()

    def let_go(self) -> None:
        """Optimizers are torch's again."""
        for method in self.methods():
            method.close()

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer that the user steps."""
        self._numbers[optimizer] = self._count
        self._count += 1

    def close_those_replaced_by(self, optimizer: Optimizer) -> None:
        """For a method that works in hooks of the user's optimizers: those of the same parameters must not go on.

        Call ``sync()`` before, or the first step finds that ranks differ.
        """
        given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for former in self.methods():
            held = {id(parameter) for group in former.optimizer.param_groups for parameter in group["params"]}
            if not former.exchanges_every_step and given & held:
                former.close()
                del self._numbers[former.optimizer]

    def methods(self) -> list[Method]:
        """The methods of the optimizers that are alive."""
        return find_all(self._numbers)

    def methods_of_all_ranks(self) -> list[Method]:
        """Those that live on all ranks, in the order of building: each rank frees dropped ones in its own time."""
        by_number = {number: optimizer for optimizer, number in self._numbers.items()}
        everywhere = set.intersection(*map(set, Communicator().all_gather_object([*by_number])))
        return find_all(by_number[number] for number in sorted(everywhere))

    def untold(self) -> list[Method]:
        """Those that were not given by an earlier call."""
        if len(self._told) >= len(self._numbers):
            return []
        untold = set(self._numbers) - set(self._told)
        self._told |= untold
        return find_all(untold)


def _check_optimizer(given: object) -> None:
    if not isinstance(given, Optimizer):
        raise TypeError(
            f"Fabric must set up optimizers of torch's, got {type(given).__name__}. Leave it out; give a scheduler by"
            " its name: `fabric.setup(model, optimizer, scheduler=scheduler)`."
        )


def _finish(saver: weakref.ref[Saver]) -> None:
    if (there := saver()) is not None:
        there.finish(raising=False)


class _GradientSync(BackwardSyncControl):
    """A module that is not sharded sends nothing in its backward pass: there is nothing to hold back."""

    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        if enabled and two_level.is_sharded(module):
            return two_level.without_gradient_sync(module)
        return nullcontext()
