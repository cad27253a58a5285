"""Nodes of several ranks: which rows of a replica a rank holds, in what is saved and in what is loaded.

Inside a node ``torch.distributed.fsdp.fully_shard`` gives each of ``L`` ranks rows of every parameter (DTensors).
SparseLoCo works on these rows, between the ranks of all nodes that hold the same (docs/design.md, 7). A checkpoint
holds every rank's rows. Here they are put together to whole parameters, and cut again: any mesh loads what
any other saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_scape.comm.collectives import Communicator, ProcessGroup, new_group_like, world_size
from lightning_scape.core import local_shards
from lightning_scape.core.layout import Layout
from lightning_scape.core.parameters import Parameters

Part = Mapping[str, Any]
"""A rank's part of a state: see :mod:`lightning_scape.sparseloco.checkpoint`."""
_LISTS = ("parameters", "error", "launched")


def communicators(
    parameters: Parameters, process_group: ProcessGroup | None, overlaps: bool, exchange_group: ProcessGroup | None
) -> tuple[Communicator, Communicator]:
    """Those of the ranks that hold the same rows, and of the ranks of a node; each alone where there is nobody else.

    Collective.

    Args:
        parameters: plain ones, or DTensors.
        process_group: the ranks with the same rows, as the user gave them.
        overlaps: whether exchanges run beside inner steps. They run in a thread of its own: nothing else may be sent on
            the same groups, neither of these nor of FSDP2.
        exchange_group: a group over the same ranks as ``process_group``, for that.
    """
    tensors = parameters.tensors
    shards = local_shards.shard_communicator(tensors)
    if shards.world_size > 1 and overlaps:
        shards = Communicator(new_group_like(shards.process_group), None)
    if process_group is None and local_shards.holds_everything(tensors):
        return Communicator.alone(), shards
    own = (exchange_group or new_group_like(process_group)) if overlaps and world_size(process_group) > 1 else None
    return Communicator.of_optimizer(process_group, own_group=own), shards


# ------------------------------------------------------------------------------------------------ saving


def plain_state(inner: Mapping[str, Any]) -> dict[str, Any]:
    """An inner optimizer's state dict with this rank's rows in place of DTensors."""
    state = {index: _plain(entry) for index, entry in inner["state"].items()}
    return {"state": state, "param_groups": inner["param_groups"]}


def _plain(entry: Any) -> Any:
    if not isinstance(entry, Mapping):  # what an optimizer keeps beside the parameters' states, such as a count
        return entry
    return {name: local_shards.local(value) if isinstance(value, Tensor) else value for name, value in entry.items()}


# ------------------------------------------------------------------------------------------------ loading


def layout_of(parameters: Parameters, block_size: int, replicas: int, shards: int, shard: int) -> Layout:
    """The blocks of one of ``shards`` ranks of a node, in a run of ``replicas`` nodes."""
    numels = [_numel(parameter, shards, shard) for parameter in parameters.tensors]
    return Layout(numels, parameters.groups, block_size, replicas)


def _numel(parameter: Tensor, shards: int, shard: int) -> int:
    if shards == 1:
        return parameter.numel()
    rows = local_shards.node_rows(parameter.shape[0], shards, shard)
    return len(rows) * (parameter.numel() // max(1, parameter.shape[0]))


def joined(parts: Sequence[Part], shapes: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The part of a whole replica, from those of the ranks of a node, in order; ``shapes`` are :func:`shapes_of`."""
    if len(parts) == 1:
        return dict(parts[0])
    found: dict[str, Any] = {"param_groups": parts[0]["param_groups"], "state": {}}
    for name in _LISTS:
        lists = [part[name] for part in parts]
        found[name] = None if lists[0] is None else [torch.cat(rows) for rows in zip(*lists, strict=True)]
    for index, first in parts[0]["state"].items():
        if not isinstance(first, Mapping):
            found["state"][index] = first
            continue
        rows = (
            [local_shards.node_rows(shapes[index][0], len(parts), s) for s in range(len(parts))]
            if index in shapes
            else []
        )
        found["state"][index] = {
            name: _join(value, [part["state"][index][name] for part in parts], rows) for name, value in first.items()
        }
    return found


def _join(first: Any, values: Sequence[Any], rows: Sequence[range]) -> Any:
    """Rows put together; what is no tensor of rows (a step) is the same on all ranks."""
    held = [len(value) if isinstance(value, Tensor) and value.dim() else None for value in values]
    return torch.cat(list(values)) if rows and held == [len(each) for each in rows] else first


def shapes_of(parameters: Parameters) -> dict[int, torch.Size]:
    """Of the parameters that have rows, by their number among all of the optimizer's."""
    return {index: p.shape for index, p in zip(parameters.indices, parameters.tensors, strict=True) if p.dim()}


def own_rows(flats: Sequence[Tensor], parameters: Parameters) -> list[Tensor]:
    """Of whole parameters, flat, the entries that this rank holds."""
    found = []
    for place, (flat, here) in enumerate(zip(flats, parameters.local, strict=True)):
        first = parameters.first_entry(place)
        found.append(flat[first : first + here.numel()])
    return found


def cut(part: Part, parameters: Parameters) -> dict[str, Any]:
    """Of a whole replica's part, this rank's rows; the inner state stays whole (see :func:`placed`)."""
    lists = {name: None if part[name] is None else own_rows(part[name], parameters) for name in _LISTS}
    return {**part, **lists}


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
