"""The user's optimizer after the swap: it passes its calls on to the ScapeOptimizer in its place. Knows no host.

A module may keep the optimizer that it returned, a Fabric script the one that it gave away. Under DDP either may be
stepped, for gradients are averaged before. Here its own step would take this rank's gradient, and ranks would train
apart without an error. So its methods are passed on, on the object alone: its class and its copies stay torch's.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from lightning_scape.core.private_names import mark_tracked, note_step, step_was_called
from lightning_scape.scape.optimizer import ScapeOptimizer

_PASSED_ON = ("zero_grad", "state_dict", "load_state_dict", "consolidate_state_dict", "add_param_group")
_HERE = "_scape_stand_in"
"""Attribute of the user's optimizer: the ScapeOptimizer in its place; and what the object had as a ``step`` of its own
(a scheduler puts one there), None: its class's."""


def put_in_place(dense: Optimizer, scape: ScapeOptimizer) -> None:
    """From now on ``dense`` passes its calls on to ``scape``, which lives as long as ``dense``."""
    _carry_over(dense, scape)

    @wraps(scape.step)
    def step(*args: Any, **kwargs: Any) -> Any:
        return scape.step(*args, **kwargs)

    own = vars(dense)
    own[_HERE] = scape, own.get("step")
    # A scheduler that is built on the old optimizer finds its step marked, and asks whether it was called: our step
    # notes that, too.
    own["step"] = step
    own.update({name: getattr(scape, name) for name in (*_PASSED_ON, "state")})


def standing_for(optimizer: object) -> ScapeOptimizer | None:
    """The ScapeOptimizer in place of a swapped optimizer; None: it was not swapped."""
    found: tuple[ScapeOptimizer, Any] | None = getattr(optimizer, "__dict__", {}).get(_HERE)
    return None if found is None else found[0]


def give_back(dense: Optimizer) -> None:
    """Makes a swapped optimizer torch's again; does nothing to another."""
    own = vars(dense)
    if _HERE not in own:
        return
    _, own_step = own.pop(_HERE)
    for name in ("step", *_PASSED_ON):
        own.pop(name, None)
    dense.state = defaultdict(dict)
    if own_step is not None:
        own["step"] = own_step


def _carry_over(dense: Optimizer, scape: ScapeOptimizer) -> None:
    """Lets the new optimizer go on with the schedulers where the old one stood."""
    # A scheduler warns of a missing optimizer step unless step() is marked and notes its calls, which the constructor
    # of the scheduler arranges on its optimizer (torch/optim/lr_scheduler.py, patch_track_step_called). Whichever of
    # the two a scheduler holds, before or after the swap, it finds both.
    note_step(scape, step_was_called(dense))
    step: Callable[..., Any] = type(scape).step
    owner, former = weakref.ref(scape), weakref.ref(dense)

    @wraps(step)
    def tracked_step(*args: Any, **kwargs: Any) -> Any:
        optimizer = owner()
        assert optimizer is not None
        for each in (optimizer, former()):
            if each is not None:
                note_step(each)
        return step(optimizer, *args, **kwargs)

    mark_tracked(tracked_step)
    scape.step = tracked_step  # type: ignore[method-assign]
