"""The strategy of ``lightning.fabric.Fabric``: one for all methods."""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, MixedPrecision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.types import Optimizable
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint.saver import StateDictType, set_rng_state
from lightning_scape.checkpoint.shards import State
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import find, find_all
from lightning_scape.hosts import two_level
from lightning_scape.hosts.checkpoints import ScapeCheckpointIO
from lightning_scape.hosts.common import (
    Common,
    StartMethod,
    attached,
    make_alike,
    refuse_to_clip_by_value,
    sharded_scaler,
    start_equal,
    start_method_of,
)
from lightning_scape.hosts.private_names import BackwardSyncControl, check_strictly


class FabricMethodStrategy(DDPStrategy):
    """Training by a method, the one that ``config`` is of: ``FabricMethodStrategy(SparseLoCoConfig(sync_every=9))``.

    ``fabric.setup(model, optimizer)`` (or ``setup_module``, ``setup_optimizers``) makes all ranks' models equal and
    puts the optimizer under the method; the model is not wrapped. ``fabric.backward``, ``no_backward_sync``,
    ``clip_gradients``, ``save`` and ``load`` work as with DDP.

    Args:
        config: the method's options.
        total_steps: steps of the whole run, if you know them: after the last one all ranks hold the same parameters.
        checkpoint_io, process_group_backend, timeout, start_method, state_dict_type: as of ``MethodStrategy``.
        async_save: likewise. Call :meth:`wait_for_checkpoint` at the end: what went wrong with the last one is raised
            there; the end of the process waits for it, and only warns.

    Raises:
        TypeError: an option of DDP's that is not needed here, one that does not exist, or ``config`` of no method.
    """

    def __init__(
        self,
        config: Any,
        *,
        total_steps: int | None = None,
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
        self._backward_sync_control = _GradientSync()
        self.total_steps = total_steps

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """With ``local_group_size`` above 1: nodes (``"replicate"``) times ranks of a node (``"shard"``)."""
        return self._common.nodes.mesh

    @override
    def _configure_launcher(self) -> None:
        self.checkpoint_io = self._checkpoint_io or ScapeCheckpointIO()
        super()._configure_launcher()

    @override
    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._common.meet(self)
        # What was set up, by number, as long as the user keeps it: the strategy must not keep a model alive.
        self._set_up: weakref.WeakValueDictionary[int, Module | Optimizer] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()  # all ranks count alike
        atexit.register(self._common.saver.finish)  # Fabric never tears a strategy down
        if isinstance(self.precision, MixedPrecision) and self.precision.scaler is not None:
            self.precision.scaler = sharded_scaler(self.precision.scaler, self.root_device.type)

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        if not (empty_init and self._common.nodes.several):
            return super().module_init_context(empty_init)
        return two_level.on_meta(self.precision.module_init_context())

    @override
    def module_to_device(self, module: Module) -> None:
        if not self._common.nodes.several:  # else a unit at a time is moved, in setup_module
            super().module_to_device(module)

    @override
    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Makes all ranks equal to rank 0, as DDP's constructor does; shards the module over a node's ranks."""
        if self._common.nodes.several:
            self._common.nodes.shard(module, self.root_device, self.precision.precision)
        else:
            start_equal(module)
        self._set_up[next(self._numbers)] = module
        return two_level.ThroughForward(module)  # another than the user's: else Fabric calls marked methods bare

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._common.nodes.follow_replaced(optimizer)
        self._close_those_replaced_by(optimizer)
        modules = [each for each in self._set_up.values() if isinstance(each, Module)]
        self._common.attach(optimizer, [pair for module in modules for pair in module.named_parameters()])
        self._set_up[next(self._numbers)] = optimizer
        return optimizer

    def _close_those_replaced_by(self, optimizer: Optimizer) -> None:
        """For a method that works in hooks of the user's optimizers: those of the same parameters must not go on.

        Who has not called ``sync()`` before is told at the first step that ranks differ.
        """
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for former in [] if self._common.method.exchanges_every_step else find_all(self._set_up.values()):
            if any(parameter in mine for group in former.optimizer.param_groups for parameter in group["params"]):
                former.close()

    @override
    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        method = attached(optimizer)
        self._common.words.end_batch(stepped=True)  # of the step before
        self._common.words.begin_batch()
        with self._common.words.explaining():
            result = super().optimizer_step(optimizer, **kwargs)
        if method.steps_taken == self.total_steps:
            method.finish()
        return result

    def sync(self) -> None:
        """Ends what has begun: all ranks hold the same parameters afterwards. Collective."""
        for method in find_all(self._living()):
            method.finish()
        self._make_alike()

    def _living(self) -> list[Module | Optimizer]:
        """What all ranks still have, in the order of set-up: each frees what is dropped in its own time. Collective."""
        mine = dict(self._set_up.items())  # which holds each while it is read
        everywhere = set.intersection(*map(set, Communicator().all_gather_object([*mine])))
        return [mine[number] for number in sorted(everywhere)]

    def _make_alike(self) -> None:
        living = self._living()
        make_alike([each for each in living if isinstance(each, Module)], find_all(living))

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

        The averaged gradient: with ``error_if_nonfinite`` a norm that is not finite is an error on every rank (on CUDA
        the host waits for it, as under DDP). This rank's own: it raises nothing, for only this rank would raise. The
        window is dropped on all ranks.
        """
        if not self._common.method.exchanges_every_step:
            norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, False)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of the node's gradient
        if float(norm_type) != 2.0:
            raise ValueError(
                f"`norm_type` must be 2 under {self._common.method.title}, got {norm_type!r}: no rank has the averaged"
                " gradient, and only its Euclidean norm can be estimated from sketches. Leave it at 2."
            )
        self.precision.unscale_gradients(optimizer)
        return attached(optimizer).clip_grad_norm(float(max_norm), error_if_nonfinite=error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        if self._common.method.exchanges_every_step:
            refuse_to_clip_by_value(f"clip_val={clip_val}")
        super().clip_gradients_value(module, optimizer, clip_val)

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        return super().get_module_state_dict(two_level.within(module))

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        inner = two_level.within(module)
        super().load_module_state_dict(inner, self._common.nodes.rows(inner, state_dict), strict=strict)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def wait_for_checkpoint(self) -> None:
        """Returns when what ``async_save`` has begun to write is there; raises what went wrong, on every rank."""
        self._common.saver.wait()

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Module | Optimizer | Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes a checkpoint, one file or a directory. Collective; if it fails, it fails on every rank.

        ``filter`` leaves out nothing of the optimizers' states.
        """
        self._common.words.meet(saving=True)
        self._make_alike()

        def dump() -> dict[str, Any]:
            own = {name: method.own_state() for name, each in state.items() if (method := find(each)) is not None}
            others = {name: each for name, each in state.items() if name not in own}
            return self._convert_stateful_objects_in_state(others, filter or {}) | own

        content = Communicator().raise_on_all_ranks(dump)
        write = functools.partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
        self._common.saver.save(self._common.nodes.whole(content), self.broadcast(str(path)), write)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Module | Optimizer | dict[str, Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        ours = any(map(find, state.values() if isinstance(state, dict) else [state]))
        read = functools.partial(super().load_checkpoint, path, weights_only=weights_only)
        content, rng = self._common.saver.load(path, read, weights_only, ours)
        if not state:
            return content
        wanted: dict[str, Any] = state if isinstance(state, dict) else {"": state}
        found = content if isinstance(state, dict) else {"": content}
        check_strictly(wanted.keys(), found.keys(), strict=strict)
        names = [name for name in wanted if name in found]
        for name in sorted(names, key=lambda each: find(wanted[each]) is not None):  # who sets parameters is last
            value, saved = wanted[name], found.pop(name)
            if isinstance(value, Module):
                self.load_module_state_dict(value, saved, strict=strict)
            elif isinstance(value, (Optimizer, Stateful)):
                method = find(value)
                if method is None and isinstance(saved, State):  # before a set-up, which takes up a whole state
                    saved = deepcopy(saved.as_file())
                (method or value).load_state_dict(saved)
            else:
                wanted[name] = saved
        if rng is not None and ours:
            set_rng_state(rng)
        return found

    # ------------------------------------------------------------------------------------------------- the end

    def request_stop(self) -> None:
        """Says that this rank was told to stop (SIGTERM); may be called by a signal's handler.

        All ranks hear it in the same step: see :attr:`stop_requested`.
        """
        self._common.words.stop = True

    @property
    def stop_requested(self) -> bool:
        """After the optimizers' steps: whether all ranks stop here, for one of them was told to. The same on all."""
        return self._common.words.stop_heard


class _GradientSync(BackwardSyncControl):
    """A module that is not sharded sends nothing in its backward pass: there is nothing to hold back."""

    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return two_level.without_gradient_sync(two_level.within(module)) if enabled else nullcontext()
