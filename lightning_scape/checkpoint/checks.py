"""The rules that hold for any method's saved facts. Each error gives the rule, the value received and the remedy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, get_args

from lightning_scape.checkpoint.index import is_size
from lightning_scape.checkpoint.parts import OnOtherRanks, Placement
from lightning_scape.core.parameters import Parameters

DAMAGED = "The state is damaged: load another checkpoint."


def collected_before(whole: dict[str, Any] | None, rank: int) -> dict[str, Any]:
    """A whole state that was collected on this rank; raises RuntimeError if none was."""
    if whole is None:
        raise RuntimeError(
            "The state must be collected from all ranks before it is read, got a call of state_dict() on rank"
            f" {rank} without it. Call consolidate_state_dict(to=0) on every rank, then state_dict() on rank 0."
        )
    return whole


def check_mapping(name: str, value: Any) -> None:
    """Raises ValueError if ``value`` is no dict."""
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` of an optimizer state must be a dict, got {type(value).__name__}. {DAMAGED}")


def check_ranks(facts: Mapping[str, Any], ranks: int) -> None:
    """Raises ValueError if a state in a directory is of more ranks than wrote the directory."""
    replicas: Any = facts.get("world_size")
    shards: Any = facts.get("shards")
    if not is_size(replicas) or not is_size(shards) or replicas * shards > ranks:
        raise ValueError(
            f"A state in a directory of {ranks} ranks must be of no more, got `world_size` {said(replicas)} and"
            f" `shards` {said(shards)}. {DAMAGED}"
        )


def check_places(facts: Mapping[str, Any]) -> None:
    """Raises ValueError if the shapes and memory orders of the parameters are impossible."""
    shapes: Any = facts.get("shapes")
    strides: Any = facts.get("strides")
    check_mapping("shapes", shapes)
    check_mapping("strides", strides)
    if not all(is_size(index) for index in shapes) or set(shapes) != set(strides):
        raise ValueError(f"`shapes` and `strides` must be of the same parameters, got others. {DAMAGED}")
    for index, shape in shapes.items():
        steps = strides[index]
        if not is_shape(shape) or not is_shape(steps) or len(shape) != len(steps):
            raise ValueError(f"Parameter {index} must have a shape and a memory order, got others. {DAMAGED}")
        last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if math.prod(shape) and last != math.prod(shape) - 1:
            raise ValueError(f"Parameter {index} must have each of its entries once in memory, got others. {DAMAGED}")


def check_parts(parts: Any) -> None:
    """Raises ValueError if the list of a state's parts is none."""
    kinds = (get_args(Placement), get_args(OnOtherRanks))
    for part in parts if isinstance(parts, list) else [parts]:
        if (
            not isinstance(part, list)
            or len(part) != 3
            or not all(isinstance(each, str) for each in part)
            or not all(each in kind for each, kind in zip(part[1:], kinds, strict=True))
        ):
            raise ValueError(
                f"`parts` of a state must be names, each with one of {list(kinds[0])} and one of {list(kinds[1])}, got"
                f" {type(part).__name__}. {DAMAGED}"
            )


def check_model(facts: Mapping[str, Any], parameters: Parameters) -> None:
    """Raises ValueError unless a state is of these parameters, some of which may have been frozen or unfrozen since."""
    shapes = facts["shapes"]
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        if index in shapes and tuple(saved := shapes[index]) != tuple(parameter.shape):
            raise ValueError(
                f"The state must be of this model, got shape {tuple(saved)} for {name!r}, which has"
                f" {tuple(parameter.shape)}. Build the model, and order its parameters, as they were when it was saved."
            )


def frozen_since(saved: Collection[int], parameters: Parameters) -> list[str]:
    """A warning, where other parameters are trained than those of these numbers, which a state has."""
    new = [name for index, name in zip(parameters.indices, parameters.names, strict=True) if index not in saved]
    gone = set(saved) - set(parameters.indices)
    begin = f" {len(new)} that were frozen begin anew, the first {new[0]!r};" if new else ""
    end = f" {len(gone)} that are frozen now lose their state, the first number {min(gone)};" if gone else ""
    if not new and not gone:
        return []
    return [f"The checkpoint was trained with other parameters frozen:{begin}{end} all else carries over."]


def is_shape(value: Any) -> bool:
    """Whether it is a list of sizes."""
    return isinstance(value, list) and all(map(is_size, value))


def said(value: Any) -> str:
    """A number or a name, or what else there is; a container may be of any size."""
    if isinstance(value, str):
        return repr(value[:100])
    return repr(value) if value is None or isinstance(value, (int, float)) else type(value).__name__
