"""A process group beside the default one, for messages that must not meet the others on their way."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch

from lightning_scape.comm.collectives import ProcessGroup, is_distributed, new_group_like


class SideGroup:
    """A further group over all ranks, one per default process group and not one per fit. It is never freed.

    Args:
        backend: of the group; None is the default group's.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self._group: ProcessGroup | None = None
        self._made_beside: weakref.ref[ProcessGroup] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For who copies or pickles a strategy: a copy makes a group of its own."""
        return {**self.__dict__, "_group": None, "_made_beside": None}

    def get(self, timeout: timedelta | None) -> ProcessGroup | None:
        """The group, made at the first call (collective) and when the default process group is another one."""
        world = torch.distributed.group.WORLD if is_distributed() else None
        if world is None:
            return None
        if self._made_beside is None or self._made_beside() is not world:
            self._group = new_group_like(backend=self._backend, timeout=timeout)
            # Weak: whoever holds the default group keeps its threads alive beyond its destruction at exit.
            self._made_beside = weakref.ref(world)
        return self._group
