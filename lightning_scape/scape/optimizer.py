"""ScapeOptimizer: torch's interface of the step of SCAPE (arXiv 2607.01678)."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint.shards import OwnState, SavedState, collect
from lightning_scape.comm.collectives import Communicator, ProcessGroup, check_joined
from lightning_scape.core import local_shards
from lightning_scape.core.entries import entry
from lightning_scape.core.numbers import with_plain_numbers
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.private_names import IN_WRAPPER, AsksGradScaler, after_load, share_hooks
from lightning_scape.core.replicas import check_same_setup_everywhere
from lightning_scape.scape import saved
from lightning_scape.scape.adams import AdamS
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.config import ScapeConfig, Update
from lightning_scape.scape.convert import check_convertible, state_brought
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.state_elsewhere import StateElsewhere
from lightning_scape.scape.stats import StepStats
from lightning_scape.scape.step import Engine


class ScapeOptimizer(AsksGradScaler, torch.optim.Optimizer):
    r"""AdamW or AdamS with sharded state, whose ranks exchange ``1 - sparsity`` of the entries per step.

    Every rank holds all parameters and a residual (fp32, P entries): its gradients that are not yet sent. Rank j owns
    one N-th of the entries: it keeps their moments, last steps, and the rounding errors of their changes (with values
    in bf16 or fp32: fp32 masters of narrow parameters). The step is :meth:`lightning_scape.scape.step.Engine.step`.

    Entries outside the mask are left bitwise as they are. Ranks hold bitwise equal parameters after every step. Works
    under plain ``torchrun`` as well as under Lightning; with one rank nothing is sent. A parameter that has no gradient
    on any rank is skipped, as in torch. Without one on some ranks only, it counts as zeros there.

    To keep an AdamW's settings, use :meth:`from_optimizer`. Built directly, it is AdamS or what ``config.update`` says.

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
        self._closed = False
        self._dense: torch.optim.Optimizer | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._closed = True
        config = _with_update(config, "adams")
        parameters = Parameters.of(self.param_groups)
        parameters.rename(named_parameters)
        if communicator is None:
            check_joined()
        given = [parameter for group in self.param_groups for parameter in group["params"]]  # frozen ones included
        if process_group is None and local_shards.holds_everything(given):
            communicator = communicator or ScapeCommunicator.alone()
        comm = communicator or ScapeCommunicator.of_optimizer(process_group)
        node = local_shards.node_communicator(given)
        problem = parameters.problem(self.param_groups) or local_shards.problem(
            parameters.names, parameters.tensors, config.local_group_size, process_group
        )
        setup = _describe(config, parameters, self.param_groups)
        check_same_setup_everywhere(comm, node, setup, problem, parameters.device_of_first_messages)
        self.engine = Engine(parameters, config, comm, node)
        """The step and its state. Not for users; tests, benchmarks and simulated ranks look at training through it."""

    @classmethod
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        config: ScapeConfig,
        process_group: ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> ScapeOptimizer:
        """Takes over the parameters and settings of a torch ``AdamW`` or ``Adam``, or an :class:`AdamS`.

        lr, betas, eps and weight decay are kept per group, and the group dicts are shared by reference, so that whoever
        holds them (an LR scheduler) goes on steering; hooks are shared, too. The update is the optimizer's own, unless
        ``config.update`` names one. ``fused`` and ``foreach`` are ways to compute and are dropped. If the
        optimizer has stepped or was given a state,
        its moments carry over as in :meth:`load_state_dict`.

        Raises:
            TypeError: another kind of optimizer.
            ValueError: a setting that cannot be kept (``amsgrad``, ``maximize``, ``differentiable``, ``capturable``),
                a state on some ranks only, or one that is sharded.
        """
        ranks = Communicator(process_group)
        ranks.raise_on_all_ranks(lambda: check_convertible(optimizer))
        brought = state_brought(optimizer, ranks)
        new = cls(
            [dict(group) for group in optimizer.param_groups],
            config=_with_update(config, "adams" if isinstance(optimizer, AdamS) else "adamw"),
            process_group=process_group,
            named_parameters=named_parameters,
        )
        for shared, group in zip(optimizer.param_groups, new.param_groups, strict=True):
            for name, value in group.items():
                shared.setdefault(name, value)
        new.param_groups = optimizer.param_groups
        new.defaults = optimizer.defaults
        share_hooks(new, optimizer)
        new._dense = optimizer
        if brought is not None:
            new.load_state_dict(brought)
        return new

    # ------------------------------------------------------------------------------------------- the step

    @entry
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: :meth:`lightning_scape.scape.step.Engine.step` has its phases.

        Args:
            closure: evaluated first, with gradients enabled (forward, backward, clipping).

        Returns:
            What the closure returned, or None.

        Raises:
            FloatingPointError: ``max_skipped`` consecutive steps had a gradient that is not finite.
            RuntimeError: replicas differ (first step, and every ``check_replicas_every``), gradients have changed since
                they were clipped; or ranks are at different steps or settings: nothing of the step is applied then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.step(self.param_groups)
        return loss

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

    @entry
    def all_finite(self) -> bool:
        """Whether the gradients of all ranks are finite. All get the same answer, so all step or none does. Collective.

        ::

            loss.backward()
            if optimizer.all_finite():  # not: all(p.grad.isfinite().all() for p in ...), which each rank answers alone
                optimizer.step()

        Costs no message of its own: the step uses what was measured here. On CUDA the CPU waits. Ask it after the
        backward pass, in place of ``clip_grad_norm`` or after it. A step that is taken without asking is skipped on all
        ranks if a gradient is not finite.
        """
        return self.engine.all_finite(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what was recorded about them. Residuals are kept: they are not yet sent."""
        with self.engine.opening.dropping():
            super().zero_grad(set_to_none)

    def ranks_that_skip_together(self) -> int:
        """All ranks of the group."""
        return self.engine.comm.world_size

    # --------------------------------------------------------------------------------- life of the state

    def drain(self) -> None:
        """Waits for the mask exchange under way, if any, so that process groups may be torn down."""
        self.engine.masks.wait()

    def mark_masters_stale(self) -> None:
        """Says that parameters were overwritten from outside, so that the next checkpoint holds new masters of them.

        Not needed for training: when the owner updates an entry whose master does not round to the parameter, it takes
        the parameter instead.
        """
        self.engine.mark_masters_stale()

    @property
    def state(self) -> Any:
        """Empty, unlike torch's. ``clear()`` on all ranks begins anew; a read or change is an error."""
        return StateElsewhere(self._begin_anew)

    @state.setter
    def state(self, given: Any) -> None:
        if self._closed:
            self.state.refuse()

    def _begin_anew(self) -> None:
        self.drain()
        self.engine.replace_state(self.engine.allocate(), self.config)
        self.engine.masks.restore(None)

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Gives parameters names, for error messages and checkpoints; tied ones keep their first."""
        self.engine.parameters.rename(named_parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while constructing: shards are cut once.

        Raises:
            ValueError: the optimizer is built already.
        """
        if self._closed:
            raise ValueError(
                "Parameter groups must be given when the optimizer is built, got another one afterwards: residuals and"
                " shards are laid out over all parameters at once. Build the optimizer anew over all groups (under the"
                " Trainer: give them in configure_optimizers, and call `trainer.strategy.setup_optimizers(trainer)`)."
            )
        super().add_param_group(param_group)

    @property
    def config(self) -> ScapeConfig:
        """All options. Where no wire was chosen, it is the loaded checkpoint's."""
        return self.engine.config

    @property
    def schedule(self) -> SparsitySchedule:
        """How many entries of a block are sent at which step."""
        return self.engine.masks.schedule

    @property
    def steps_taken(self) -> int:
        """Calls of :meth:`step` so far, skipped and restored ones included; the schedule counts them."""
        return self.engine.calls

    def announce_batch(self, batches: int) -> None:
        """Says, before a step, how many batches of the epoch this rank has had: :meth:`step` compares it at no cost."""
        self.engine.opening.batch = batches

    def bytes_per_step(self, sent: int | None = None) -> int:
        """Bytes that this rank sends in a step, the norm's message (clipping) not counted.

        Args:
            sent: entries per block, q; None is the number at the end of the warm-up.
        """
        return self.engine.bytes_per_step(sent)

    @property
    def communicator(self) -> ScapeCommunicator:
        """Sends this optimizer's messages."""
        return self.engine.comm

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step, None before the first.

        On CUDA, reading its norm or factor waits for the device. Do not ask at every step.
        """
        return self.engine.stats

    # ------------------------------------------------------------------------------------- checkpoints

    @property
    def dense(self) -> torch.optim.Optimizer:
        """The optimizer that it replaces: what :meth:`from_optimizer` was given, or one over the same groups."""
        if self._dense is None:
            groups = [dict(group) for group in self.param_groups]
            self._dense = torch.optim.AdamW(groups) if self.config.update == "adamw" else AdamS(groups)
        return self._dense

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle of it is one of :attr:`dense`, also in a copy of a model that keeps it.

        The moments lie on all ranks, and are not part of it: a warning says so.
        """
        mine: ScapeOptimizer = self.__dict__.get(IN_WRAPPER, self)  # inside Fabric's wrapper, which imitates the class
        if mine.steps_taken:
            warnings.warn(
                f"A copy or pickle of a ScapeOptimizer is the {type(mine.dense).__name__} that it stands in for, with"
                " the same parameter groups and without moments: each rank holds a part of those. To go on from them,"
                " save and load a checkpoint.",
                stacklevel=3,
            )
        return operator.getitem, ((mine.dense,), 0)  # a file with it needs nothing of this package

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state of all ranks on rank ``to``, where :meth:`state_dict` then returns it. Collective.

        The whole state takes about ``(4 N + 16) P`` bytes of host memory there, residuals of all ranks included (with
        the update of AdamS ``4 P`` more: what AdamW would need to go on from it). Collecting takes little more: all
        ranks' residuals of one parameter at a time.
        """
        engine = self.engine
        engine.consolidated = None
        own = saved.own_state(engine, engine.state_at_rest(), {"param_groups": []})
        # The residual's device is not the parameters' after a fit: Lightning takes those to the CPU.
        device = engine.state.step.device if engine.state else engine.parameters.device
        whole = collect(own, engine.everyone, device, to)
        if whole is not None:
            engine.consolidated = saved.whole_state(whole)

    def own_state(self) -> OwnState:
        """This rank's part of the state, in views. Sends nothing."""
        return saved.own_state(self.engine, self.engine.state_at_rest(), self._shown())

    def _shown(self) -> dict[str, Any]:
        """Parameter groups, and what the user's hooks add to a state dict. Hooks see no state: no rank has all."""

        def hide(_: Any, found: dict[str, Any]) -> None:
            found["state"] = self.state

        with self.register_state_dict_post_hook(hide, prepend=True):
            found = super().state_dict()
        return {name: with_plain_numbers(each) for name, each in found.items() if name not in ("state", "scape")}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, by parameter, independent of the number of ranks: tensors, numbers and strings only.

        Raises:
            RuntimeError: with several ranks, :meth:`consolidate_state_dict` was not called since the last step.
        """
        if self.engine.comm.world_size == self.engine.node.world_size == 1:
            self.consolidate_state_dict()
        whole = self.engine.consolidated
        if whole is None:
            raise RuntimeError(
                "The state must be collected from all ranks before it is read, got a call of state_dict() on rank"
                f" {self.engine.comm.rank} without it. Call consolidate_state_dict(to=0) on every rank, then"
                " state_dict() on rank 0."
            )

        def complete(_: Any, found: dict[str, Any]) -> None:
            # Groups as they are now: a scheduler may have moved on since.
            found.update({**whole, "param_groups": with_plain_numbers(found["param_groups"])})

        with self.register_state_dict_post_hook(complete, prepend=True):  # so that the user's hooks see all of it
            found: dict[str, Any] = super().state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any] | SavedState) -> None:
        """Takes this rank's part of a whole state, or of a directory's. Call on every rank, with the same state.

        A state of another number of ranks, or of ranks that hold a replica together, is resharded: moments, last steps
        and masters exactly, residuals so that their mean over replicas is kept. One of another block length or sparsity
        drops the masks. One of AdamW, Adam or AdamS gives its moments. Each with a warning that says so.

        Raises:
            ValueError: parameters or groups differ in number, order or shape, or the format is newer than this
                package. Nothing has been changed then.
            OSError: a directory cannot be read; on every rank.
        """
        self.drain()
        engine = self.engine
        state = engine.allocate()

        def load() -> saved.Loaded:
            return saved.load(engine, state, state_dict, self, self.param_groups)

        loaded = engine.everyone.raise_on_all_ranks(load)
        loaded.take_up(engine)
        for group, theirs in zip(self.param_groups, loaded.param_groups, strict=True):
            group.update(deepcopy({name: value for name, value in theirs.items() if name != "params"}))  # as torch does
        engine.replace_state(state, loaded.config)
        after_load(self)


def _with_update(config: Any, update: Update) -> ScapeConfig:
    """The configuration, with this update if it names none."""
    if not isinstance(config, ScapeConfig):
        raise TypeError(f"`config` must be a ScapeConfig, got {type(config).__name__}. Pass ScapeConfig(sparsity=...).")
    return config if config.update is not None else replace(config, update=update)


def _describe(config: ScapeConfig, parameters: Parameters, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What must be the same on all ranks."""
    plain = config.as_dict()
    names = ("lr", "betas", "eps", "weight_decay")
    return {
        "lightning_scape's version": __version__,
        "config": [f"{name}={value!r}" for name, value in plain.items()],
        "parameters (group, shape, strides, dtype)": parameters.describe(),
        # As numbers: a tensor's text names its device, and leaves out digits.
        "parameter groups": [{name: _plain(group.get(name, False)) for name in names} for group in groups],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, (int, float, Tensor)) else str(value)
