"""SCAPE's step on the user's own optimizer, as torch's schedulers put theirs there.

Groups, hooks, schedulers and wrappers go on as they were, for the object is the same. Torch's hooks carry the state,
not methods of the object: Lightning's wrapper calls those of the class.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_scape.checkpoint.shards import collect, not_collected
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.local_shards import local
from lightning_scape.core.private_names import STEPPED, TRACKED, UNSCALES_ITSELF, refuse_plain_scaler
from lightning_scape.core.words import with_plain_numbers
from lightning_scape.scape import saved
from lightning_scape.scape.adams import AdamS
from lightning_scape.scape.step import Engine

_HERE = "_lightning_scape"
"""Attribute of the user's optimizer, which it neither copies nor pickles."""
ELSEWHERE = "lightning_scape"
"""The one key of ``optimizer.state``: torch's ``get_optimizer_state_dict`` takes a step where the dict is empty."""
_NOTE: dict[Any, Any] = {ELSEWHERE: {"note": "Each rank holds a part of the state: see `optimizer.state_dict()`."}}
PARTS = "lightning_scape_parts"
"""Key of a ``State`` in what an optimizer loads."""
_ACCEPTED = (torch.optim.AdamW, torch.optim.Adam, AdamS)
_NOT_KEPT = {
    "amsgrad": "the maximum of a second moment that is estimated would only grow",
    "maximize": "negate the loss instead",
    "differentiable": "the step changes parameters in place, outside autograd",
    "capturable": "the step exchanges messages and cannot be captured in a CUDA graph",
}


def check_convertible(optimizer: Optimizer) -> None:
    """Raises unless the optimizer is an AdamW, Adam or AdamS with the step of that class and settings that can be kept.

    A state that is sharded cannot.
    """
    kind = type(optimizer)
    # torch wraps `step` once per class (profiling), and a scheduler once per object: compare what is inside.
    steps = {inspect.unwrap(accepted.step) for accepted in _ACCEPTED}
    if inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step)) not in steps:
        raise TypeError(
            "The optimizer must be torch.optim.AdamW, torch.optim.Adam or lightning_scape.AdamS, with the step of that"
            f" class, got {kind.__module__}.{kind.__qualname__} with a `step` of its own: SCAPE's would take its place."
            " Use one of these, or SparseLoCo, which keeps any optimizer."
        )
    for group in optimizer.param_groups:
        for name, why in _NOT_KEPT.items():
            if group.get(name):
                raise ValueError(
                    f"`{name}` must be False, got {group[name]!r}: {why}. Build {kind.__name__} without it."
                )
        of_l2 = isinstance(optimizer, torch.optim.Adam) and not group.get("decoupled_weight_decay")
        if of_l2 and group["weight_decay"]:
            raise ValueError(
                f"`weight_decay` of Adam must be 0, got {group['weight_decay']}: there it is an L2 term in the"
                " gradient, and SCAPE decays weights decoupled. Use torch.optim.AdamW, or set it to 0."
            )
    if any(local(value) is not value for entry in optimizer.state.values() for value in entry.values()):
        raise ValueError(
            "An optimizer over sharded parameters must not have stepped yet, got one with state. Build the"
            " ScapeOptimizer first, then load the checkpoint into it."
        )


def state_brought(optimizer: Optimizer, ranks: Communicator) -> dict[str, Any] | None:
    """What an optimizer has learnt before SCAPE takes its place, all ranks' or none's; None: nothing. Collective."""
    # A mere look at an entry of torch's `state` makes an empty one.
    have = ranks.all_gather_object(any(value for key, value in optimizer.state.items() if key != ELSEWHERE))
    if all(have):
        return ranks.raise_on_all_ranks(optimizer.state_dict)
    if any(have):
        raise ValueError(
            f"The optimizer must have a state on all ranks or on none, got one on rank {have.index(True)} and none on"
            f" rank {have.index(False)}. Load the same state on every rank."
        )
    return None


@dataclass
class Installed:
    """What an optimizer under SCAPE holds."""

    engine: Engine
    unscales: bool | None
    """Whether the optimizer said that it unscales gradients itself, as a fused one does."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    retired: bool = False
    """Whether the next step is the optimizer's own; until then the state may be saved, or another fit take it."""
    loading: saved.Loaded | None = None
    """What was read, until torch has taken the groups."""


def installed(optimizer: object) -> Installed | None:
    """What was installed on an optimizer, also asked of a host's wrapper; None: it takes steps of its own."""
    found = getattr(optimizer, _HERE, None)
    return found if isinstance(found, Installed) else None


def install(optimizer: Optimizer, engine: Engine) -> None:
    """From now on ``optimizer.step`` is the engine's, and so is the state that it saves and loads."""
    uninstall(optimizer)
    here, this = Installed(engine, vars(optimizer).get(UNSCALES_ITSELF)), weakref.ref(optimizer)
    own_step: Callable[..., Any] = type(optimizer).step

    @wraps(own_step)
    def step(*args: Any, **kwargs: Any) -> Any:  # stays after `uninstall`: schedulers may have been built on it
        optimizer = this()
        assert optimizer is not None
        setattr(optimizer, STEPPED, True)
        now = installed(optimizer)
        if now is not None and now.retired:
            uninstall(optimizer)
            now = None
        return (own_step if now is None else _step)(optimizer, *args, **kwargs)

    setattr(step, TRACKED, True)
    optimizer.step = step  # type: ignore[method-assign]
    optimizer.state.clear()
    optimizer.state.update(_NOTE)
    vars(optimizer).update({_HERE: here, UNSCALES_ITSELF: False})  # else a GradScaler leaves gradients scaled
    here.hooks = [
        # First, so that the user's hooks see all of it.
        optimizer.register_state_dict_post_hook(lambda _, state: _saved(here, state), prepend=True),
        optimizer.register_load_state_dict_pre_hook(lambda _, state: _load(here, state)),
        optimizer.register_load_state_dict_post_hook(lambda _: _take_up(here), prepend=True),
    ]


def uninstall(optimizer: Optimizer) -> None:
    """The optimizer takes steps of its own from now on, without moments."""
    here = installed(optimizer)
    if here is None:
        return
    for hook in here.hooks:
        hook.remove()
    vars(optimizer).pop(_HERE)
    vars(optimizer)[UNSCALES_ITSELF] = here.unscales
    optimizer.state.pop(ELSEWHERE, None)  # type: ignore[call-overload]


@Optimizer.profile_hook_step  # the profiler's range, the user's hooks and the global ones
def _step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    here = installed(optimizer)
    assert here is not None
    if here.engine.comm.world_size > 1:
        refuse_plain_scaler()
    here.engine.step(optimizer.param_groups)
    return loss


def _saved(here: Installed, state: dict[str, Any]) -> dict[str, Any]:
    """The whole state, in place of what torch has found; groups as they are now, for a scheduler may have moved on."""
    engine, comm = here.engine, here.engine.comm
    if engine.consolidated is None and comm.world_size == engine.node.world_size == 1:
        consolidate(engine)
    if engine.consolidated is None:
        raise not_collected(comm.rank, "`ScapeOptimizer.of(optimizer).consolidate_state_dict(to=0)`")
    return {**state, **engine.consolidated, "param_groups": with_plain_numbers(state["param_groups"])}


def consolidate(engine: Engine, to: int = 0) -> None:
    """Collects the state of all ranks on one, for the next ``state_dict()`` there. Collective."""
    engine.consolidated = None
    own = saved.own_state(engine, {"param_groups": []})
    # The residual's device is not the parameters' after a fit: Lightning takes those to the CPU.
    device = engine.state.step.device if engine.state else engine.parameters.device
    engine.consolidated = collect(own, engine.everyone, device, to)


def _load(here: Installed, given: Any) -> dict[str, Any]:
    """Reads this rank's part into fresh buffers. Torch compares and takes the groups. Collective."""
    engine, parts = here.engine, given
    engine.masks.wait()
    if isinstance(given, dict) and PARTS in given:
        parts = given.pop(PARTS)
        parts.update({name: value for name, value in given.items() if name != "state"})  # as user's hooks left it
    here.loading = loaded = engine.everyone.raise_on_all_ranks(lambda: saved.load(engine, parts))
    return {"state": _NOTE, "param_groups": loaded.param_groups}


def _take_up(here: Installed) -> None:
    loaded, here.loading = here.loading, None
    assert loaded is not None
    for note in loaded.notes:
        warnings.warn(note, stacklevel=4)  # whoever calls load_state_dict
    here.engine.replace_state(loaded.state)
