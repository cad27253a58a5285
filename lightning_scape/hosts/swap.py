"""What the strategies of Lightning Trainer and Lightning Fabric share; knows neither.

The user's optimizer is dense (AdamW, Adam, AdamS). A strategy swaps it for a :class:`ScapeOptimizer` over the same
parameter groups, and points schedulers and others at the new one. After that it passes on its host's requests: clip,
drain, scale. All of that is here, so that a strategy only holds its host's hooks.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_scape.comm.collectives import Communicator, ProcessGroup, broadcast_tensors, world_size
from lightning_scape.core.parameters import problem_of_lazy
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.hosts import stand_in
from lightning_scape.hosts.schedulers import retarget_schedulers
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer

CONFIG_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ScapeConfig)}
"""Every option's name and default, in the order of :class:`ScapeConfig`."""
_trained: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The user's optimizers that an earlier fit has trained."""


def expect_steps(optimizers: Iterable[object], steps: float | None) -> None:
    """Fits each optimizer's warm-up into a run of ``steps`` steps, where the options leave its length open.

    For hosts that learn this after they have built the optimizers. Call it before the first step. An optimizer that
    goes on from a checkpoint keeps the warm-up that it began with.

    Args:
        optimizers: those of the host.
        steps: of the whole run; None is not known.
    """
    for optimizer in scape_optimizers(optimizers):
        optimizer.expect_steps(steps)


def resolve_config(config: ScapeConfig | None, options: Mapping[str, Any]) -> ScapeConfig:
    """One configuration from a strategy's two ways of giving it.

    Args:
        config: a whole configuration, or None.
        options: every field of :class:`ScapeConfig` by name. One that holds its default counts as not given.

    Raises:
        ValueError: an option is outside its rule, or contradicts ``config``.
        TypeError: ``config`` is not a :class:`ScapeConfig`.
    """
    if config is None:
        return ScapeConfig(**options)
    if not isinstance(config, ScapeConfig):
        raise TypeError(
            f"`config` must be a ScapeConfig or None, got {config!r}. Write `config=ScapeConfig(sparsity=0.99)`, or"
            " pass the options themselves: `ScapeStrategy(sparsity=0.99)`."
        )
    given = {name: value for name, value in options.items() if value != CONFIG_DEFAULTS[name]}
    # By way of a ScapeConfig: "cpu" and torch.device("cpu") are the same option.
    merged = replace(config, **given)
    clashes = [
        f"{name}={value!r} (config: {getattr(config, name)!r})"
        for name, value in given.items()
        if getattr(merged, name) != getattr(config, name)
    ]
    if clashes:
        raise ValueError(
            f"An option may be given by name or in `config`, not differently in both; got {', '.join(clashes)}. Drop"
            " one of the two, or use `dataclasses.replace(config, ...)`."
        )
    return config


def build_alike(build: Callable[[], None], optimizers: Callable[[], Iterable[object]]) -> None:
    """Builds the user's optimizers, and sees to it that all ranks have the same kinds of them. Collective.

    Args:
        build: runs the user's code.
        optimizers: gives what that has built.

    Raises:
        Exception: what ``build`` has raised on any rank; on every rank.
        ValueError: ranks have other optimizers; on every rank.
    """
    ranks = Communicator(None, None)
    ranks.raise_on_all_ranks(build)
    names = [type(unwrap_optimizer(each)).__name__ for each in optimizers()]
    # Lightning's Trainer has a stand-in where the user has built none.
    first, *others = ranks.all_gather_object([name for name in names if name != "_MockOptimizer"])
    for rank, kinds in enumerate(others, 1):
        if kinds != first:
            raise ValueError(
                f"All ranks must build the same optimizers, got {', '.join(kinds) or 'none'} on rank {rank} and"
                f" {', '.join(first) or 'none'} on rank 0. Return the same from `configure_optimizers` on every rank."
            )


def swap_optimizers(
    optimizers: Sequence[Optimizer],
    schedulers: Iterable[object],
    config: ScapeConfig,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] = (),
    process_group: ProcessGroup | None = None,
    mask_group: ProcessGroup | None = None,
    total_steps: float | None = None,
) -> list[ScapeOptimizer]:
    """A :class:`ScapeOptimizer` in place of each dense optimizer, with the schedulers pointed at it.

    Collective: every rank calls it, in the same order of optimizers.

    Args:
        optimizers: what the user built: AdamW, Adam or AdamS, not wrapped.
        schedulers: the learning rate schedulers that act on them, at any depth of nesting.
        config: the options of SCAPE.
        named_parameters: the module's, for error messages and checkpoints.
        process_group: the ranks that share the gradients; None is all of them.
        mask_group: a second group over the same ranks, for the mask exchange alone.
        total_steps: of the whole run, by which the warm-up goes; None is not known (see :func:`expect_steps`).

    Raises:
        TypeError, ValueError: an optimizer that SCAPE cannot stand in for (see :meth:`ScapeOptimizer.from_optimizer`).
    """
    named = list(named_parameters)
    options: dict[str, Any] = {"mask_group": mask_group, "total_steps": total_steps, "named_parameters": named}
    for dense in optimizers:
        if (former := stand_in.standing_for(dense)) is not None:  # set up a second time
            former.drain()
            stand_in.give_back(dense)
    swaps = [(dense, ScapeOptimizer.from_optimizer(dense, config, process_group, **options)) for dense in optimizers]
    for dense, scape in swaps:
        stand_in.put_in_place(dense, scape)
        if dense in _trained:
            warnings.warn(
                "An optimizer that was trained before begins anew, got a second fit of the same"
                f" {type(dense).__name__}: its learning rate goes on, its moments do not (with DDP they would). To go"
                " on with all, load a checkpoint of the first fit.",
                stacklevel=2,
            )
    retarget_schedulers(schedulers, swaps)
    return [scape for _, scape in swaps]


def give_back(dense: Optimizer, scape: ScapeOptimizer) -> None:
    """After a fit: the user's optimizer is torch's again, and its groups are what training left."""
    stand_in.give_back(dense)
    if scape.steps_taken:
        _trained.add(dense)


def unwrap_optimizer(optimizer: object) -> object:
    """The optimizer that steps: the one inside a host's wrappers, or in a swapped one's place."""
    while "_optimizer" in getattr(optimizer, "__dict__", {}):
        optimizer = optimizer.__dict__["_optimizer"]
    return stand_in.standing_for(optimizer) or optimizer


def scape_optimizers(optimizers: Iterable[object]) -> list[ScapeOptimizer]:
    """Those of the optimizers that are ours, unwrapped, in order."""
    return [inner for inner in map(unwrap_optimizer, optimizers) if isinstance(inner, ScapeOptimizer)]


def scape_optimizer(optimizer: object) -> ScapeOptimizer:
    """The optimizer unwrapped.

    Raises:
        TypeError: it is not one of ours.
    """
    inner = unwrap_optimizer(optimizer)
    if not isinstance(inner, ScapeOptimizer):
        raise TypeError(
            f"Clipping under SCAPE needs a ScapeOptimizer, got {type(inner).__name__}. Give AdamW, Adam or AdamS to the"
            " strategy (Trainer: `configure_optimizers`; Fabric: `fabric.setup`) and clip the optimizer it gives back."
        )
    return inner


def clip_gradients(optimizer: object, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
    """Clip the averaged gradient of the coming step; the gradients themselves are left alone.

    No rank has the averaged gradient, so only the factor is settled here (one small message) and it acts where the
    gradient enters the residual, in ``step()``. Has the signature of a precision plugin's ``clip_gradients`` and takes
    its place.

    Args:
        optimizer: a :class:`ScapeOptimizer`, wrapped or not.
        clip_val: the bound; 0 or less means no clipping, as everywhere in Lightning.
        gradient_clip_algorithm: ``"norm"`` (of the whole averaged gradient) or ``"value"`` (of each entry of each
            rank's gradient, before they are averaged).

    Raises:
        ValueError: an algorithm that SCAPE does not know.
        TypeError: the optimizer is not a :class:`ScapeOptimizer`.
    """
    if clip_val <= 0:
        return
    inner = scape_optimizer(optimizer)
    algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
    if algorithm == "norm":
        inner.clip_grad_norm(clip_val)
    elif algorithm == "value":
        inner.clip_grad_value(clip_val)
    else:
        raise ValueError(f'`gradient_clip_algorithm` must be "norm" or "value", got {algorithm!r}. Use one of the two.')


def sharded_scaler(scaler: GradScaler | None, process_group: ProcessGroup | None = None) -> GradScaler | None:
    """A scaler by which all ranks skip a step if one of them met an inf, in place of one that decides alone.

    With a plain GradScaler the rank that met the inf would leave out the step's collectives, and the others would wait
    for it. The scale and how it grows are those of ``scaler``. With one rank, or without a scaler, nothing changes.
    """
    if scaler is None or not scaler.is_enabled():
        return scaler
    if world_size(process_group) == 1:
        return scaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if isinstance(scaler, ShardedGradScaler):
        return scaler
    sharded = ShardedGradScaler(device=getattr(scaler, "_device", "cuda"), process_group=process_group)
    sharded.load_state_dict(scaler.state_dict())
    return sharded


def mark_masters_stale(optimizers: Iterable[object]) -> None:
    """Say that parameters were overwritten from outside, so that no master copy of them is used again."""
    for optimizer in scape_optimizers(optimizers):
        optimizer.mark_masters_stale()


def start_equal(module: nn.Module) -> None:
    """Gives all ranks the parameters and buffers of rank 0, as DDP's constructor does. Collective.

    Raises:
        ValueError: one has no shape yet, or ranks have built different modules; on every rank.
    """
    ranks = Communicator(None, None)
    state = ranks.raise_on_all_ranks(lambda: module_state(module))
    if ranks.world_size > 1:
        setup = {"parameters and buffers": [(tuple(each.shape), str(each.dtype)) for each in state]}
        device = state[0].device if state else torch.device("cpu")
        check_same_setup(ranks, setup, None, device)
    broadcast_tensors(state)


def module_state(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers: what must be equal on all ranks before the first step.

    Raises:
        ValueError: one has no shape yet.
    """
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(problem_of_lazy(name))
    return [*module.parameters(), *module.buffers()]
