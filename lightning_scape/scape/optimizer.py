"""ScapeOptimizer: SCAPE (arXiv 2607.01678) on an optimizer of the user's, for loops without a host."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint.shards import State
from lightning_scape.comm.collectives import Communicator, ProcessGroup
from lightning_scape.core import local_shards
from lightning_scape.core.method import Method, unwrapped
from lightning_scape.core.parameters import HYPERPARAMETERS, Parameters
from lightning_scape.core.private_names import entry
from lightning_scape.core.replicas import check_same_setup, settings
from lightning_scape.core.words import show_bytes
from lightning_scape.scape import install, saved
from lightning_scape.scape.adams import AdamS
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.config import ScapeConfig, Update
from lightning_scape.scape.state import StepStats
from lightning_scape.scape.step import Engine


class ScapeOptimizer(torch.optim.Optimizer, Method):
    r"""An optimizer under SCAPE: sharded state, and ranks that exchange ``1 - sparsity`` of the entries per step.

    Every rank holds all parameters and a residual (fp32, P entries): its gradients that are not yet sent. Rank j owns
    one N-th of the entries: it keeps their moments, last steps, and the rounding errors of their changes (with values
    in fp32: fp32 masters of narrow parameters). The step is :meth:`lightning_scape.scape.step.Engine.step`.

    Entries outside the mask are left bitwise as they are. Ranks hold bitwise equal parameters after every step. Works
    under plain ``torchrun`` as well as under Lightning; with one rank nothing is sent. A parameter that has no gradient
    on any rank is skipped, as in torch. Without one on some ranks only, it counts as zeros there.

    The step is put on an optimizer of torch's, :attr:`optimizer`, as LR schedulers put theirs: either object may be
    stepped, and given to schedulers and scalers; groups, hooks and settings are that optimizer's. What SCAPE adds
    (:attr:`stats`, :meth:`clip_grad_norm`) is here. :meth:`from_optimizer` takes your own AdamW; :meth:`of` finds what
    stands for one that a host has set up. Built directly, it makes an AdamS, or what ``config.update`` says.

    Constructing is collective: all ranks of ``process_group`` must do it, with the same parameters and config, and
    parameters must be equal on all ranks at the first step.

    Args:
        params: parameters or parameter groups: dense, float, on one device. Frozen ones (``requires_grad=False``) are
            left out for good. After ``fully_shard`` over the ranks of a node (a 1-D mesh) they are DTensors: SCAPE then
            runs between the nodes, on the rows that this rank holds (docs/design.md, 6).
        lr, betas, eps, weight_decay: of AdamW or AdamS, per group; weight decay is decoupled.
        config: all options of SCAPE.
        process_group: data-parallel ranks; None is the default group (no group: one rank). For DTensors the ranks
            that hold the same rows, one of each node: ``mesh["replicate"].get_group()``; None where there is one node.
        communicator: sends the messages, in place of one over the two groups (simulated ranks, another transport).
        named_parameters: of the module, for error messages and checkpoints.

    Raises:
        TypeError, ValueError: a parameter or an option cannot be kept, or ranks differ; the same on every rank.
        RuntimeError: several ranks were launched, and no process group is up.
    """

    name = "scape"
    title = "SCAPE"
    config_class = ScapeConfig
    shown = ("density", "compression", "grad_norm")
    exchanges_every_step = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        config: ScapeConfig,
        process_group: ProcessGroup | None = None,
        communicator: ScapeCommunicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        config = _with_update(config, "adams")
        kind = AdamS if config.update == "adams" else torch.optim.AdamW
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        ranks = communicator or Communicator(process_group)
        self.optimizer = ranks.raise_on_all_ranks(lambda: kind(params, **options))  # type: ignore[arg-type]
        self._install(config, process_group, communicator, named_parameters)

    def _install(
        self,
        config: ScapeConfig,
        process_group: ProcessGroup | None,
        communicator: ScapeCommunicator | None,
        named_parameters: Iterable[tuple[str, Tensor]],
    ) -> None:
        groups = self.optimizer.param_groups
        parameters = Parameters(groups, named_parameters)
        comm, node = communicator, Communicator.alone()
        if comm is None:
            comm, node = local_shards.communicators(ScapeCommunicator, parameters.tensors, process_group)
        tensors = parameters.tensors
        problem = parameters.problem(groups) or local_shards.problem(parameters.names, tensors, process_group)
        setup = {
            "lightning_scape's version": __version__,
            "config": [f"{name}={value!r}" for name, value in config.as_dict().items()],
            "parameters (group, shape, strides, dtype)": parameters.describe(),
            **settings(groups, HYPERPARAMETERS),
        }
        check_same_setup(local_shards.everyone(comm, node), setup, problem, node.rank)
        self.communicator = comm
        install.install(self.optimizer, Engine(parameters, config, comm, node))

    @classmethod
    @override
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        config: ScapeConfig,
        process_group: ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> Self:
        """Puts a torch ``AdamW`` or ``Adam``, or an :class:`AdamS`, under SCAPE, and returns what stands for it.

        The optimizer stays yours, with its lr, betas, eps and weight decay per group; its step is SCAPE's. The update
        is its own, unless ``config.update`` names one. ``fused`` and ``foreach`` are ways to compute and are dropped.
        Moments that it has by now carry over as in a load. One that is under SCAPE already, as in a second fit, goes on
        with all it has, if parameters, ranks and options are the same.

        Raises:
            TypeError: another kind of optimizer.
            ValueError: a setting that cannot be kept (``amsgrad``, ``maximize``, ``differentiable``, ``capturable``),
                a state on some ranks only, or one that is sharded.
        """
        ranks = Communicator(process_group)
        ranks.raise_on_all_ranks(lambda: install.check_convertible(optimizer))
        config = _with_update(config, "adams" if isinstance(optimizer, AdamS) else "adamw")
        former = install.installed(optimizer)
        brought = install.state_brought(optimizer, ranks)
        alike = len({*ranks.all_gather_object(None if former is None else former.engine.calls)}) == 1
        new = cls.__new__(cls)
        new.optimizer = optimizer
        new._install(config, process_group, None, named_parameters)
        if brought is not None:
            new.load_state_dict(brought)
        if former is not None and former.engine.calls and not (alike and new.engine.go_on_from(former.engine)):
            warnings.warn(
                "An optimizer that is set up again goes on with its moments if its parameters, ranks and options are"
                f" the same, got others for one that has taken {former.engine.calls} steps: it begins anew, with the"
                " learning rate that it has. To go on with all, load a checkpoint.",
                stacklevel=2,
            )
        return new

    @classmethod
    @override
    def of(cls, optimizer: object) -> Self | None:
        """What stands for an optimizer under SCAPE, also for a host's wrapper of it; None: it is not under SCAPE."""
        if isinstance(optimizer, cls):
            return optimizer
        if (here := install.installed(optimizer)) is None:
            return None
        new = cls.__new__(cls)
        new.optimizer, new.communicator = unwrapped(optimizer), here.engine.comm  # type: ignore[assignment]
        return new

    def __getattr__(self, name: str) -> Any:
        """Groups, hooks and all else that is the optimizer's."""
        return getattr(self.__dict__["optimizer"], name)

    @property
    def engine(self) -> Engine:
        """The step and its state. Not for users; tests, benchmarks and simulated ranks look at training through it."""
        here = install.installed(self.optimizer)
        if here is None:
            raise RuntimeError(
                f"The optimizer must be under SCAPE, got a {type(self.optimizer).__name__} that has stepped on its own"
                " since its fit ended. Put it under SCAPE again."
            )
        return here.engine

    # ------------------------------------------------------------------------------------------- the step

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as of :attr:`optimizer`: :meth:`lightning_scape.scape.step.Engine.step` has its phases.

        Args:
            closure: evaluated first, with gradients enabled (forward, backward, clipping).

        Returns:
            What the closure returned, or None.

        Raises:
            FloatingPointError: ``max_skipped`` consecutive steps had a gradient that is not finite.
            RuntimeError: replicas differ (first step, and every ``check_replicas_every``), gradients have changed since
                they were clipped; or ranks are at different steps or settings: nothing of the step is applied then.
        """
        return self.optimizer.step(closure)

    @override
    @entry
    def clip_grad_norm(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Records the factor by which the step scales the gradient so that its norm is at most ``max_norm``.

        The norm is that of the gradient averaged over ranks, which none of them holds: see ``clip_norm``. Gradients
        stay as they are; the factor is applied when the step folds them in. Collective. Call it last before
        :meth:`step`, which refuses gradients that have changed since (RuntimeError).

        Returns:
            The norm before clipping, 0-dim fp32; not finite if any rank's gradient is not, and the step will be
            skipped.

        Raises:
            RuntimeError: ``error_if_nonfinite`` (on CUDA the CPU then waits), and the norm is not finite; on every
                rank. Or gradients have changed since they were clipped.
        """
        return self.engine.clip_grad_norm(self.param_groups, float(max_norm), error_if_nonfinite=error_if_nonfinite)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what was recorded about them. Residuals are kept: they are not yet sent."""
        self.engine.opening.drop()
        self.optimizer.zero_grad(set_to_none)

    @override
    def announce_batch(self, batches: int) -> None:
        self.engine.opening.batch = batches

    @override
    def check_replicas(self) -> None:
        self.engine.check_replicas()

    # ------------------------------------------------------------------------------------------- its end

    def drain(self) -> None:
        """Waits for the mask exchange under way, if any, so that process groups may be torn down.

        On CUDA the CPU also learns now whether the last step was skipped: see :meth:`step`.
        """
        self.engine.settle()

    finish = drain

    @override
    def give_back(self) -> None:
        if (here := install.installed(self.optimizer)) is not None:
            here.retired = True  # not uninstalled: what is saved after a fit would have no state, without a word

    @override
    def close(self) -> None:
        install.uninstall(self.optimizer)

    # ------------------------------------------------------------------------------------------- what it says

    @property
    def config(self) -> ScapeConfig:
        """All options."""
        return self.engine.config

    @property
    @override
    def steps_taken(self) -> int:
        """Calls of :meth:`step` so far, skipped and restored ones included; the warm-up counts them."""
        return self.engine.calls

    @property
    @override
    def stats(self) -> StepStats | None:
        """Figures of the last step, None before the first.

        On CUDA, reading its norm or factor waits for the device. Do not ask at every step.
        """
        return self.engine.stats

    @override
    def summary(self) -> str:
        config, nodes = self.config, self.engine.node.world_size
        sent = sum(self.engine.step_bytes().values())
        where = f" between nodes of {nodes} ranks" if nodes > 1 else ""
        how_much = f"{show_bytes(sent)} per rank{where}" if sent else "which costs nothing with one rank"
        after = f" after a warm-up of {config.warmup_steps:,} steps" if config.warmup_steps else ""
        update = "AdamW's, your lr, betas and eps hold" if config.update == "adamw" else "AdamS's, as in SCAPE's paper"
        return (
            f"SCAPE: sends {100 * (1 - config.sparsity):.3g}% of the entries per step (sparsity={config.sparsity:g}),"
            f" {how_much},{after or ' from the first step on'}. Update: {update}."
        )

    # ------------------------------------------------------------------------------------- checkpoints

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle is one of :attr:`optimizer`, without moments: each rank holds a part of those."""
        return operator.getitem, ((self.optimizer,), 0)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state of all ranks on rank ``to``, where :meth:`state_dict` then returns it. Collective.

        The whole state takes about ``(4 N + 16) P`` bytes of host memory there, residuals of all ranks included (with
        the update of AdamS ``4 P`` more: what AdamW would need to go on from it). Collecting takes little more: all
        ranks' residuals of one parameter at a time.
        """
        install.consolidate(self.engine, to)

    @override
    def own_state(self) -> State:
        """This rank's part of the state, in views. Sends nothing."""
        engine = self.engine
        kept, engine.consolidated = engine.consolidated, {"state": {}}  # the user's hooks see no state: no rank has all
        try:
            shown = self.optimizer.state_dict()
        finally:
            engine.consolidated = kept
        return saved.own_state(engine, shown)

    @classmethod
    @override
    def whole_state(cls, state: State) -> dict[str, Any]:
        return saved.whole_state(state)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The whole state, by parameter, independent of the number of ranks: tensors, numbers and strings only.

        So does that of :attr:`optimizer`.

        Raises:
            RuntimeError: with several ranks, :meth:`consolidate_state_dict` was not called since the last step.
        """
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any] | State) -> None:
        """Takes this rank's part of a whole state, or of a directory's. Call on every rank, with the same state.

        A state of another number of ranks, or of ranks that hold a replica together, is resharded: moments and last
        steps exactly, residuals so that their mean over replicas is kept. One of AdamW, Adam or AdamS gives its
        moments. Each with a warning that says so. This run's options hold, and a warning names those that were others.

        Raises:
            ValueError: parameters or groups differ in number, order or shape. Nothing has been changed then.
            OSError: a directory cannot be read; on every rank.
        """
        parts = isinstance(state_dict, State)
        self.optimizer.load_state_dict({**state_dict, "state": {}, install.PARTS: state_dict} if parts else state_dict)


def _with_update(config: Any, update: Update) -> ScapeConfig:
    """The configuration, with this update if it names none."""
    if not isinstance(config, ScapeConfig):
        raise TypeError(f"`config` must be a ScapeConfig, got {type(config).__name__}. Pass ScapeConfig(sparsity=...).")
    return config if config.update is not None else replace(config, update=update)
