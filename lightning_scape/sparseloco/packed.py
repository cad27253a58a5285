"""A rank's own part of a state, as the bytes that ``torch.save`` makes of it: a tensor among those of a directory.

SparseLoCo saves every rank's parameters and inner optimizer state this way. What unpacks them for a load unpacks them
for ``lightning-scape verify``, too.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.source import SavedShards

KEY = "sparseloco"
"""Of the facts of SparseLoCo's states."""
_NAMES = {"parameters", "error", "launched", "state", "param_groups"}


def pack(part: Mapping[str, Any]) -> Tensor:
    """uint8, flat, in host memory."""
    file = io.BytesIO()
    torch.save(dict(part), file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpack(packed: Tensor, name: str) -> dict[str, Any]:
    """The reverse of :func:`pack`; ``name`` is for errors.

    Raises:
        CheckpointError: the bytes are damaged, are no rank's part, or hold what only executing code would load.
    """
    part = files.load_stream(io.BytesIO(packed.numpy().tobytes()), name)
    if not isinstance(part, dict) or not set(part) >= _NAMES:
        raise files.CheckpointError(
            f"{name!r} must hold a rank's {', '.join(sorted(_NAMES))}, got"
            f" {sorted(map(str, part)) if isinstance(part, dict) else type(part).__name__}. Load another checkpoint."
        )
    return part


def part_key(rank: int) -> str:
    """The key of a rank's part."""
    return f"rank.{rank}"


def parts(shards: SavedShards) -> Iterator[dict[str, Any]]:
    """Every rank's part of a state in a directory, one after another; none where the state has no such parts."""
    facts = shards.common.get(KEY)
    for rank in range(facts["world_size"] * facts.get("shards", 1) if facts is not None else 0):
        yield read_part(shards, rank)


def read_part(shards: SavedShards, rank: int) -> dict[str, Any]:
    """A rank's part of a state in a directory."""
    key = f"{shards.key}.{part_key(rank)}"
    return unpack(shards.directory.tensor(key), f"{shards.directory.path}, {key}")
