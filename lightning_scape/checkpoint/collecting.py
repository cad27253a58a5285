"""The content of a file whose optimizers' states are still on all ranks, copied so that training may go on."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lightning_scape.checkpoint.parts import OwnParts
from lightning_scape.comm.collectives import Communicator

_Key = TypeVar("_Key")
_Where = tuple[str, int | None]
"""In a file's content: a name, and the place in the list that it has there."""


@dataclass(frozen=True)
class Uncollected:
    """A copy of this rank's part of the content, in host memory."""

    states: dict[_Where, OwnParts]
    """The same places on all ranks."""
    rest: dict[str, Any]
    """Empty on all ranks but rank 0."""

    @classmethod
    def of(cls, content: Mapping[str, Any], ranks: Communicator) -> Uncollected:
        """Collective.

        Args:
            content: rank 0's counts. Optimizers' states are ``OwnParts``, as values or in a list.
            ranks: all of them.

        Raises:
            ValueError: a rank lacks an optimizer that rank 0 saves; on every rank.
            Exception: what cannot be written; on every rank.
        """
        own = of_rank_0(dict(_states(content)), ranks)

        def copied() -> Uncollected:
            states = {where: parts.copied() for where, parts in own.items()}
            return cls(states, _copied(content) if ranks.rank == 0 else {})

        return ranks.raise_on_all_ranks(copied)

    def collected(self, collect: Callable[[OwnParts], Any]) -> dict[str, Any]:
        """The whole content on rank 0. Collective; gives up what it holds.

        Args:
            collect: gives a whole state of its parts.
        """
        for where in [*self.states]:
            _put(self.rest, where, collect(self.states.pop(where)))
        return self.rest


def of_rank_0(own: Mapping[_Key, OwnParts], ranks: Communicator) -> dict[_Key, OwnParts]:
    """Those of this rank that rank 0 saves, too. Collective.

    Raises:
        ValueError: a rank lacks an optimizer that rank 0 saves; on every rank.
    """
    first, *others = ranks.all_gather_object([*own])
    for rank, places in enumerate(others, 1):
        if not set(first) <= set(places):
            raise ValueError(
                f"All ranks must save the same optimizers, got {first} on rank 0 and {places} on rank {rank}. Change a"
                " checkpoint on all ranks alike (`on_save_checkpoint`)."
            )
    return {where: own[where] for where in first}


def _states(content: Mapping[str, Any]) -> Iterator[tuple[_Where, OwnParts]]:
    for name, value in content.items():
        for place, each in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(each, OwnParts):
                yield (name, place), each


def _put(content: dict[str, Any], where: _Where, state: Any) -> None:
    name, place = where
    if place is None:
        content[name] = state
    elif name in content:
        content[name][place] = state


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    """All but the states, as the file will have it: what cannot be written fails now, and tied tensors stay tied."""
    rest = {name: list(value) if isinstance(value, list) else value for name, value in content.items()}
    for where, _ in _states(content):
        _put(rest, where, None)
    file = io.BytesIO()
    torch.save(rest, file)
    file.seek(0)
    copy: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)  # what this process has written
    return copy
