"""The content of a file whose optimizers' states are still on all ranks: as values, or in a list."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from lightning_scape.checkpoint.parts import OwnParts
from lightning_scape.comm.collectives import Communicator

_Key = TypeVar("_Key")
Where = tuple[str, int | None]
"""In a file's content: a name, and the place in the list that it has there."""


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


def states_in(content: Mapping[str, Any]) -> Iterator[tuple[Where, OwnParts]]:
    """This rank's, with their places."""
    for name, value in content.items():
        for place, each in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(each, OwnParts):
                yield (name, place), each


def put(content: dict[str, Any], where: Where, state: Any) -> None:
    """Puts a state into its place, if the content has it: that of other ranks is empty."""
    name, place = where
    if place is None:
        content[name] = state
    elif name in content:
        content[name][place] = state


def copied(content: Mapping[str, Any]) -> dict[str, Any]:
    """All but the states, as the file will have it: what cannot be written fails now, and tied tensors stay tied."""
    rest = {name: list(value) if isinstance(value, list) else value for name, value in content.items()}
    for where, _ in states_in(content):
        put(rest, where, None)
    file = io.BytesIO()
    torch.save(rest, file)
    file.seek(0)
    copy: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)  # what this process has written
    return copy
