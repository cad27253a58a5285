"""Process groups beside the job's own, for messages that must not meet the others on their way.

A group holds files and threads until the process ends, or the job's own group does. So there is one of each kind,
for all fits, strategies and optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_scape.comm.collectives import ProcessGroup, is_distributed, new_group_like

T = TypeVar("T")
_made: weakref.WeakKeyDictionary[ProcessGroup, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def once(kind: Hashable, make: Callable[[], T]) -> T | None:
    """The result of ``make``, called once beside each default process group; None where there is no such group.

    Args:
        kind: of the group or groups; the same on all ranks.
        make: makes them. Collective.
    """
    world = dist.group.WORLD if is_distributed() else None
    if world is None:
        return None
    made = _made.setdefault(world, {})
    if kind not in made:
        made[kind] = make()
    found: T = made[kind]
    return found


def side_group(kind: str, timeout: timedelta | None) -> ProcessGroup | None:
    """A group over all ranks, for one kind of messages. The first call is collective.

    Args:
        kind: ``"step"`` travels beside a step, ``"checkpoint"`` and others beside training, by gloo, in host memory.
        timeout: of the group, where this call makes it.
    """
    backend = None if kind == "step" else "gloo"
    return once(kind, lambda: new_group_like(backend=backend, timeout=timeout))
