"""What the strategies of Lightning Trainer and Lightning Fabric share; knows neither.

The user's optimizer is dense (AdamW, Adam, AdamS). A strategy swaps it for a :class:`ScapeOptimizer` over the same
parameter groups, points everything that held the old one at the new one, and from then on only passes on what its host
asks for: clip, drain, scale. All of that is here, so that a strategy is left with its host's hooks.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_scape.collectives import ProcessGroup, is_distributed, new_mask_group, world_size
from lightning_scape.config import ScapeConfig
from lightning_scape.mask import SparsitySchedule
from lightning_scape.optimizer import ScapeOptimizer
from lightning_scape.planner import dense_would_be_faster, show_bytes
from lightning_scape.stats import StepStats

CONFIG_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ScapeConfig)}
"""Every option's name and default, in the order of :class:`ScapeConfig`."""


class PayoffCheck:
    """Looks at a few early steps of a run and says once if, by their own figures, dense training would be faster.

    On the CPU only: elsewhere the host's seconds are those of queueing the work. Steps that send more than the options
    say (dense ones, the warm-up) are not judged, nor are the first ones after them, for buffers and caches are new to
    them. With several optimizers, the one that steps first is judged.

    Args:
        first: steps at the final density before the first that counts.
        steps: how many count.
    """

    def __init__(self, first: int = 10, steps: int = 5) -> None:
        self.first, self.steps = first, steps
        self._sparse_steps = 0
        self._seen: list[StepStats] = []
        self._judged: weakref.ref[ScapeOptimizer] | None = None

    def look(self, optimizer: ScapeOptimizer, device: torch.device) -> str | None:
        """Call after each step of an optimizer; returns a sentence with the figures, at most once."""
        if optimizer.config.dense or device.type != "cpu" or len(self._seen) == self.steps:
            return None
        if self._judged is None:
            self._judged = weakref.ref(optimizer)
        if self._judged() is not optimizer or _still_dense(optimizer):
            return None
        self._sparse_steps += 1
        after = self._sparse_steps - self.first
        if after > 0 and (stats := optimizer.stats) is not None:
            self._seen.append(stats)
        judged = len(self._seen) == self.steps
        # What travels beside other work hides how fast the link is.
        optimizer.communicator.at_once = after >= 0 and not judged
        return dense_would_be_faster(self._seen) if judged else None


FEW_UPDATES = 50
"""Of an entry: with so few in the whole run SCAPE ends well behind dense training (``examples/QUALITY.md``)."""
SHORTEST_RUN = 100
"""Steps: a shorter one tries out whether things work."""


def too_short(optimizer: ScapeOptimizer, steps: float | None) -> str | None:
    """What to tell who trains for ``steps`` steps in which entries are updated too rarely to learn; None otherwise.

    Args:
        optimizer: its schedule is that of this run.
        steps: of the whole run; None is not known.
    """
    if steps is None or not SHORTEST_RUN <= steps < math.inf:
        return None
    config, updates = optimizer.config, optimizer.schedule.updates(int(steps))
    if updates >= FEW_UPDATES:
        return None
    ways = ["train longer", f"lower `sparsity` (now {config.sparsity:g})"]
    by_default = SparsitySchedule.of(replace(config, sparsity_warmup_steps=None), steps)
    if by_default.updates(int(steps)) > updates:
        given, longer = optimizer.schedule.warmup_steps, by_default.warmup_steps
        ways.insert(0, f"leave `sparsity_warmup_steps` at its default (here {longer:,} instead of {given:,})")
    advice = ", ".join([*ways[:-1], f"or {ways[-1]}"])
    return (
        f"Entries should be updated at least {FEW_UPDATES} times for SCAPE to train as well as dense training, got"
        f" about {updates:.0f} times in the {steps:,.0f} steps of this run. Measured without a warm-up: validation loss"
        f" 21% higher after 10 updates, 4 to 7% after 30, 1 to 2% after 100. {advice[0].upper()}{advice[1:]}."
    )


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


def densities(optimizers: Iterable[object]) -> dict[str, float]:
    """Share of the entries that the last step sent, of each optimizer whose warm-up lasts: for a progress bar.

    The host knows it: nothing waits for a device. Named as :class:`~lightning_scape.ScapeMonitor` names it.
    """
    ours = scape_optimizers(optimizers)
    return {
        f"{metric_prefix(index, len(ours))}/density": optimizer.schedule.sent(optimizer.steps_taken - 1)
        / optimizer.schedule.quota.block_size
        for index, optimizer in enumerate(ours)
        if optimizer.steps_taken and _still_dense(optimizer)
    }


def metric_prefix(index: int, optimizers: int) -> str:
    """Of the metrics of one of so many optimizers: ``scape``, or ``scape-0``, ``scape-1``, ..."""
    return "scape" if optimizers == 1 else f"scape-{index}"


def _still_dense(optimizer: ScapeOptimizer) -> bool:
    """Whether the last step was one of the dense steps or of the warm-up."""
    schedule = optimizer.schedule
    return not optimizer.config.dense and optimizer.steps_taken <= schedule.dense_steps + schedule.warmup_steps


Spelling = Callable[[Mapping[str, str]], str]
"""Writes options down as a user of the host would: those of a call, or flags."""


def as_call(name: str) -> Spelling:
    """``ScapeStrategy(sparsity=...)``."""
    return lambda options: f"{name}({', '.join(f'{option}={value}' for option, value in options.items())})"


def what_holds(optimizers: Sequence[ScapeOptimizer], steps: float | None, spell: Spelling) -> str:
    """One line for the start of a run: how much is sent, after which warm-up, by which update, and how to change it.

    Args:
        optimizers: those of the run, built from the same options.
        steps: of the whole run; None is not known.
        spell: how the user writes options.
    """
    config, schedule = optimizers[0].config, optimizers[0].schedule
    size = sum(optimizer.bytes_per_step() for optimizer in optimizers)
    sent = f"{show_bytes(size)} per rank and step" if size else "0 bytes with one rank"
    updates = sorted({str(optimizer.config.update) for optimizer in optimizers}, reverse=True)
    change = {
        "sparsity": "...",
        "sparsity_warmup_steps": "0" if schedule.warmup_steps else "1000",
        "update": '"adams"' if updates == ["adamw"] else '"adamw"',
    }
    if config.dense:
        change.pop("sparsity_warmup_steps")
        how_much = f"every entry at every step (sparsity=0), {sent}"
    else:
        share = f"{100 * (1 - config.sparsity):.3g}% of the entries per step (sparsity={config.sparsity:g})"
        how_much = f"{share}, {sent}, {_beginning(schedule, steps)}"
    update = "; ".join(_UPDATES[name] for name in updates)
    return f"SCAPE: sends {how_much}. Update: {update}. To change: {spell(change)}."


_UPDATES = {
    "adamw": "AdamW's, your lr, betas and eps hold",
    "adams": "AdamS's, as in SCAPE's paper",
}


def _beginning(schedule: SparsitySchedule, steps: float | None) -> str:
    parts = [f"{schedule.dense_steps:,} dense steps"] if schedule.dense_steps else []
    parts += [f"a warm-up of {schedule.warmup_steps:,} steps"] if schedule.warmup_steps else []
    if not parts:
        return "from the first step on"
    whole = steps is not None and schedule.dense_steps + schedule.warmup_steps >= steps
    return f"after {' and '.join(parts)}{' (the whole run)' if whole else ''}"


class MaskGroup:
    """A second group over all ranks, for mask exchanges: one per process group, not one per fit; none is ever freed.

    Args:
        backend: of the group; None is the default group's.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self._group: ProcessGroup | None = None
        self._made_beside: weakref.ref[ProcessGroup] | None = None

    def get(self, timeout: timedelta | None) -> ProcessGroup | None:
        """The group, made at the first call (collective) and when the default process group is another one."""
        world = torch.distributed.group.WORLD if is_distributed() else None
        if world is None:
            return None
        if self._made_beside is None or self._made_beside() is not world:
            self._group = new_mask_group(backend=self._backend, timeout=timeout)
            # Weak: whoever holds the default group keeps its threads alive beyond its destruction at exit.
            self._made_beside = weakref.ref(world)
        return self._group


@contextlib.contextmanager
def explained_rendezvous(environment: Any) -> Iterator[None]:
    """Turns the errors of ranks that do not find each other into advice that names what to set.

    Args:
        environment: a cluster environment of Lightning's, asked for its ranks only if something fails.
    """
    try:
        yield
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError among them
        world_size = environment.world_size()
        remedy = _rendezvous_remedy(str(error), world_size)
        if remedy is None:
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise type(error)(
            f"All {world_size} ranks must meet at MASTER_ADDR:MASTER_PORT ({where}) before `timeout` ends, got on rank"
            f" {environment.global_rank()}: {error} {remedy}"
        ) from error


_RANKS_MISSING = (
    *("clients joined", "wait timeout", "onnect timeout"),  # waited in vain
    *("likely closed", "reset by peer", "roken pipe", "onnection closed"),  # rank 0 had, and is gone
)
"""In what torch says where ranks are missing; which of it a rank gets to see is a matter of who gives up first."""


def _rendezvous_remedy(problem: str, world_size: int) -> str | None:
    if "find address for" in problem:
        there = ", ".join(name for _, name in socket.if_nameindex())
        return f"Set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to an interface of this host: {there}."
    if "client socket" in problem:
        return (
            "Check that MASTER_ADDR is the first node's address as the other nodes see it, that rank 0 is started"
            " there, and that its firewall admits MASTER_PORT."
        )
    if any(sign in problem for sign in _RANKS_MISSING):
        return (
            f"Check that `num_nodes` times `devices` is the number of ranks that were started ({world_size} are"
            " expected), each node with a NODE_RANK of its own; that none of them failed before; that"
            " GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names the interface that leads to the other nodes; and that"
            " firewalls admit all ports between the nodes."
        )
    return None


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
    # By way of a ScapeConfig: "float32" and torch.float32 are the same option.
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
    swaps = [
        (
            dense,
            ScapeOptimizer.from_optimizer(dense, config, process_group, mask_group=mask_group, total_steps=total_steps),
        )
        for dense in optimizers
    ]
    named_parameters = list(named_parameters)
    for dense, scape in swaps:
        scape.name_parameters(named_parameters)
        _carry_over(dense, scape)
    retarget_schedulers(schedulers, swaps)
    return [scape for _, scape in swaps]


def retarget_schedulers(schedulers: Iterable[object], swaps: Sequence[tuple[Optimizer, Optimizer]]) -> None:
    """Make each scheduler that drives an ``old`` optimizer drive the ``new`` one of its pair.

    Follows schedulers inside schedulers (SequentialLR, ChainedScheduler, a warm-up wrapper of the user's own). Sharing
    the parameter groups would not be enough: a scheduler also watches whether its optimizer steps.
    """
    new_for = {id(old): new for old, new in swaps}
    seen: set[int] = set()
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        if (new := new_for.get(id(_optimizer_of(scheduler)))) is not None:
            scheduler.optimizer = new  # type: ignore[attr-defined]
        for value in getattr(scheduler, "__dict__", {}).values():
            members = value if isinstance(value, (list, tuple)) else (value,)
            waiting += [member for member in members if _optimizer_of(member) is not None]


def _optimizer_of(scheduler: object) -> object | None:
    return scheduler.__dict__.get("optimizer") if hasattr(scheduler, "__dict__") else None


def _carry_over(dense: Optimizer, scape: ScapeOptimizer) -> None:
    """Let the new optimizer go on where the old one stood with the user's hooks and with its scheduler."""
    # Shared, not copied: the handles the user holds go on removing their hooks.
    scape._optimizer_step_pre_hooks = dense._optimizer_step_pre_hooks
    scape._optimizer_step_post_hooks = dense._optimizer_step_post_hooks
    if not hasattr(dense.step, "_wrapped_by_lr_sched"):
        return
    # A scheduler warns of a missing optimizer step unless step() is marked and notes its calls, which the constructor
    # of the scheduler arranged on the old optimizer (torch/optim/lr_scheduler.py, patch_track_step_called).
    scape._opt_called = getattr(dense, "_opt_called", False)  # type: ignore[attr-defined]
    step, owner = type(scape).step, weakref.ref(scape)

    @wraps(step)
    def tracked_step(*args: Any, **kwargs: Any) -> Any:
        optimizer = owner()
        assert optimizer is not None
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    tracked_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    scape.step = tracked_step  # type: ignore[method-assign]


def unwrap_optimizer(optimizer: object) -> object:
    """The optimizer inside Lightning's or Fabric's wrappers, which imitate its class and so pass ``isinstance``."""
    while "_optimizer" in getattr(optimizer, "__dict__", {}):
        optimizer = optimizer.__dict__["_optimizer"]
    return optimizer


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


StateDictType = Literal["full", "sharded"]


def check_saving(state_dict_type: str, async_save: bool, checkpoint_io: object | None) -> None:
    """Raises ValueError unless a strategy's options on checkpoints go together."""
    if state_dict_type not in ("full", "sharded"):
        raise ValueError(
            f'`state_dict_type` must be "full" (one file) or "sharded" (a directory), got {state_dict_type!r}.'
        )
    if async_save and state_dict_type == "full":
        raise ValueError(
            '`async_save` must come with state_dict_type="sharded", got "full". To write one file in the background,'
            " give `plugins=[AsyncCheckpointIO()]` to the Trainer."
        )
    if state_dict_type == "sharded" and checkpoint_io is not None:
        raise ValueError(
            f'`checkpoint_io` must be None with state_dict_type="sharded", got {type(checkpoint_io).__name__}: a'
            " directory is written by torch.distributed.checkpoint. To save in the background, set `async_save=True`."
        )


def is_directory(path: str | PathLike[str]) -> bool:
    """Whether a checkpoint is one that was saved with ``state_dict_type="sharded"``."""
    return "://" not in str(path) and Path(path).is_dir()


def drain(optimizers: Iterable[object]) -> None:
    """Wait until nothing that the optimizers started is under way any more."""
    for optimizer in scape_optimizers(optimizers):
        optimizer.drain()


def mark_masters_stale(optimizers: Iterable[object]) -> None:
    """Say that parameters were overwritten from outside, so that no master copy of them is used again."""
    for optimizer in scape_optimizers(optimizers):
        optimizer.mark_masters_stale()


def module_state(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers: what must be equal on all ranks before the first step."""
    return [*module.parameters(), *module.buffers()]


def has_local_batch_norm(module: nn.Module) -> bool:
    """Whether some BatchNorm keeps statistics that each rank computes from its own data alone."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return any(
        isinstance(layer, batch_norm) and not isinstance(layer, nn.SyncBatchNorm) and layer.track_running_stats
        for layer in module.modules()
    )
