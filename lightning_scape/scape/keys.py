"""The names of what is saved of a state of SCAPE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.checkpoint.parts import Part, Place, Source
from lightning_scape.scape.state import SHARD_TENSORS

_Held = Mapping[int | None, Chunk]


def owned(name: str, held: _Held = MappingProxyType({})) -> Part:
    """A tensor of the shard."""
    return Part(name, "owned", "cut", held)


def residual(held: _Held = MappingProxyType({})) -> Part:
    """What a rank has not yet sent."""
    return Part("residual", "each_rank", "mean", held)


def mask(held: _Held = MappingProxyType({})) -> Part:
    """The mask of the coming step."""
    return Part("mask", "owned", "drop", held)


def state_key(index: int | None, name: str) -> str:
    """The key of a parameter's tensor in the shards."""
    return owned(name).key(index, Place())


def residual_key(rank: int, index: int) -> str:
    """The key of a rank's residual of a parameter."""
    return residual().key(index, Place(rank))


def held(source: Source) -> set[str]:
    """Names of the tensors that any parameter has; unknown names are left out."""
    return set().union(*source.entries.values()) & set(SHARD_TENSORS)


def has_second(facts: Mapping[str, Any]) -> bool:
    """Whether the run that wrote the state kept second moments, by its facts: the update of AdamS does not."""
    return bool(facts["config"].get("update") == "adamw")
