"""The state of the optimizer inside a method that wraps one: every rank has its own, and saves it packed.

Where the ranks of a node hold a replica together (``fully_shard``), each has the rows of its DTensors. They are put
together to whole parameters and cut again: any mesh loads what any other saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.checkpoint.packed import pack
from lightning_scape.checkpoint.parts import Part, Place, Source
from lightning_scape.checkpoint.plain import with_plain_numbers
from lightning_scape.core import local_shards

INNER = "inner"
"""Name of the part."""


def inner_part(optimizer: torch.optim.Optimizer) -> Part:
    """This rank's optimizer as a part of a state: its rows in place of DTensors."""
    saved = optimizer.state_dict()
    state = {index: _plain(entry) for index, entry in saved["state"].items()}
    beside = {name: with_plain_numbers(value) for name, value in saved.items() if name != "state"}
    packed = pack({"state": state, **beside})  # and what hooks of the user's have added
    return Part(INNER, "each_rank", "take", {None: Chunk.whole(packed)})


def _plain(entry: Any) -> Any:
    if not isinstance(entry, Mapping):  # what an optimizer keeps beside the parameters' states, such as a count
        return entry
    return {name: local_shards.local(value) if isinstance(value, Tensor) else value for name, value in entry.items()}


# ------------------------------------------------------------------------------------------------ loading


def inner_for(source: Source, place: Place) -> dict[str, Any]:
    """The state dict that a rank takes: with its rows, or with whole parameters where the mesh was another one.

    On another number of ranks it is that of rank r modulo their number.
    """
    replica = place.replica % source.facts["world_size"]
    if source.facts["shards"] != place.shards:
        return inner_of(source, replica)
    return _of_rank(source, place._replace(replica=replica))


def inner_of(source: Source, replica: int) -> dict[str, Any]:
    """The state dict of a whole replica, from those of the ranks that hold it together."""
    shards = source.facts["shards"]
    each = [_of_rank(source, Place(replica, shard, shards)) for shard in range(shards)]
    shapes = {index: shape for index, shape in source.facts["shapes"].items() if shape}
    return each[0] if shards == 1 else joined(each, shapes)


def _of_rank(source: Source, place: Place) -> dict[str, Any]:
    return source.unpacked(Part(INNER, "each_rank", "take").key(None, place))


def joined(parts: Sequence[Mapping[str, Any]], shapes: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The state dict of a whole replica, from those of the ranks of a node, in order.

    Args:
        parts: one of each rank.
        shapes: of the whole parameters that have rows, by number.
    """
    found: dict[str, Any] = {**parts[0], "state": {}}
    for index, first in parts[0]["state"].items():
        if not isinstance(first, Mapping):
            found["state"][index] = first
            continue
        whole = shapes.get(index, ())
        rows = [local_shards.node_rows(size, len(parts), rank) for size in whole[:1] for rank in range(len(parts))]
        found["state"][index] = {
            name: _join(value, [part["state"][index][name] for part in parts], rows) for name, value in first.items()
        }
    return found


def _join(first: Any, values: Sequence[Any], rows: Sequence[range]) -> Any:
    """Rows put together; what is no tensor of rows (a step) is the same on all ranks."""
    held = [len(value) if isinstance(value, Tensor) and value.dim() else None for value in values]
    return torch.cat(list(values)) if rows and held == [len(each) for each in rows] else first


def placed(inner: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An inner state dict as the optimizer takes it: tensors of a sharded parameter become DTensors like it.

    Args:
        inner: with whole tensors, or with this rank's rows of them.
        optimizer: the inner optimizer.
    """
    given = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    if not any(isinstance(p, DTensor) for p in given.values()):
        return dict(inner)
    state = {
        index: {name: _place(value, given.get(index)) for name, value in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for index, entry in inner["state"].items()
    }
    return {**inner, "state": state}


def _place(value: Any, parameter: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or not value.dim():
        return value
    here = local_shards.local(parameter)
    if value.shape == parameter.shape:
        first = local_shards.first_row(parameter)
        value = value[first : first + len(here)]
    elif value.shape != here.shape:
        return value
    return DTensor.from_local(
        value.to(here.device, copy=True),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
