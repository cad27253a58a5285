"""One optimizer's saved state: facts, and tensors by key. A whole state and a directory are read alike.

========================== ==========================================================================================
key                        tensor
========================== ==========================================================================================
``state.{i}.{name}``       of parameter ``i``; its names are the values of :data:`SAVED_AS`
``residual.{rank}.{i}``    the part of parameter ``i`` that a rank has not yet sent
``mask``                   ``[blocks, q]``
``mask.{shard}``           likewise, where several ranks hold a replica: for the rows of each of them
========================== ==========================================================================================

``i`` counts all parameters of the groups. A parameter's tensor is read flat, in the parameter's memory order. Each rank
reads only the part that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_scape.checkpoint.dcp import Chunk, Directory
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import flatten_like
from lightning_scape.scape.state import SHARD_TENSORS

_OLDER_NAMES = {"local_exp_avg_sum": "evidence", "local_exp_avg_sq": "noise"}
SAVED_AS = {name: _OLDER_NAMES.get(name, name) for name in SHARD_TENSORS}
"""The shard's tensors and the names they are saved by."""


class Source(Protocol):
    """A saved state."""

    @property
    def common(self) -> Mapping[str, Any]:
        """Facts: all but the tensors; ``param_groups`` is one of them."""

    @property
    def entries(self) -> Mapping[int, Collection[str]]:
        """Names of the tensors of each parameter."""

    def find(self, key: str) -> Any:
        """The tensor of a key, in its own shape; on ``meta`` if its values are still on disk. None if there is none.

        A damaged state may give anything.
        """

    def read(self, targets: Mapping[str, Chunk]) -> None:
        """Fills the chunks' tensors, in place; converts dtypes."""

    def tensor(self, key: str) -> Tensor:
        """One whole tensor, flat; the mask in its own shape."""


def held(source: Source) -> set[str]:
    """Names of the tensors that any parameter has; unknown names are left out."""
    return set().union(*source.entries.values()) & set(SAVED_AS.values())


def has_second(facts: Mapping[str, Any]) -> bool:
    """Whether the run that wrote the state kept second moments, by its facts: the update of AdamS does not."""
    return bool(facts["config"].get("update", "adams") == "adamw")


def state_key(index: int, name: str) -> str:
    """The key of a parameter's tensor."""
    return f"state.{index}.{name}"


def residual_key(rank: int, index: int) -> str:
    """The key of a rank's residual of a parameter."""
    return f"residual.{rank}.{index}"


def mask_key(shard: int, shards: int) -> str:
    """The key of the mask of one of ``shards`` ranks that hold a replica together."""
    return "mask" if shards == 1 else f"mask.{shard}"


def parameter_of(key: str) -> int | None:
    """The number of the parameter that a key's tensor belongs to; None for a mask."""
    kind, *path = key.split(".")
    return None if kind == "mask" else int(path[0] if kind == "state" else path[1])


def slot(whole: Mapping[str, Any], key: str) -> tuple[Any, Any]:
    """The dict inside a whole state that holds a key's tensor, and the name it has there."""
    kind, *path = key.split(".")
    if kind == "state":
        return whole["state"][int(path[0])], path[1]
    if kind == "residual":
        return whole["scape"]["residuals"][int(path[0])], int(path[1])
    return (whole["scape"].get("masks", {}), int(path[0])) if path else (whole["scape"], kind)


class WholeState:
    """A :class:`Source` over a state dict: SCAPE's whole state, or one of AdamW, Adam or AdamS (without facts).

    Args:
        saved: the state; :func:`~lightning_scape.checkpoint.checks.check_whole` has passed it.
        parameters: they give the memory order.
    """

    def __init__(self, saved: Mapping[str, Any], parameters: Parameters) -> None:
        self._saved = saved
        self._parameters = dict(zip(parameters.indices, parameters.tensors, strict=True))
        tensors = ("residuals", "mask", "masks")
        facts = {name: value for name, value in saved.get("scape", {}).items() if name not in tensors}
        self.common: dict[str, Any] = {**facts, "param_groups": saved["param_groups"]}
        self.entries: Mapping[int, Collection[str]] = saved["state"]
        if "scape" in saved and not has_second(facts):  # what is there is for AdamW
            self.entries = {index: set(entry) - {"exp_avg_sq"} for index, entry in saved["state"].items()}

    def find(self, key: str) -> Any:
        """See :class:`Source`."""
        holder, name = slot(self._saved, key)
        return holder.get(name)

    def read(self, targets: Mapping[str, Chunk]) -> None:
        """See :class:`Source`."""
        for key, chunk in targets.items():
            chunk.tensor.copy_(self.tensor(key)[chunk.offset : chunk.offset + len(chunk.tensor)])

    def tensor(self, key: str) -> Tensor:
        """See :class:`Source`."""
        found: Tensor = self.find(key)
        index = parameter_of(key)
        return found if index is None else flatten_like(found, self._parameters[index])


@dataclass(frozen=True)
class SavedShards:
    """A :class:`Source` over a directory, which may hold several optimizers' states. Nothing is read until asked for.

    Its facts also have ``shapes``, ``strides`` and ``tensors`` (the names) of the parameters, and ``mask_shape``; where
    several ranks hold a replica, ``mask_shapes``.
    """

    directory: Directory
    key: str
    """The prefix of its keys in the directory."""
    common: dict[str, Any]

    @property
    def entries(self) -> dict[int, list[str]]:
        """See :class:`Source`."""
        return dict.fromkeys(self.common["shapes"], self.common["tensors"])

    def find(self, key: str) -> Tensor | None:
        """See :class:`Source`."""
        index = parameter_of(key)
        shape = self._mask_shapes().get(key) if index is None else self.common["shapes"][index]
        if shape is None:
            return None
        if 0 in shape:  # not stored
            return torch.empty(shape, dtype=self._dtype_beside(key), device="meta")
        found = self.directory.find(f"{self.key}.{key}")
        return found.view(shape) if found is not None and found.numel() == math.prod(shape) else found

    def read(self, targets: Mapping[str, Chunk]) -> None:
        """See :class:`Source`."""
        self.directory.read({f"{self.key}.{key}": chunk for key, chunk in targets.items()})

    def tensor(self, key: str) -> Tensor:
        """See :class:`Source`."""
        found = self.find(key)
        if found is not None and not found.numel():
            return torch.empty(found.shape if parameter_of(key) is None else 0, dtype=found.dtype, device="cpu")
        return self.directory.tensor(f"{self.key}.{key}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of the state, one tensor after another."""
        yield from ((key, self.tensor(key)) for key, _ in self._all())

    def check_sizes(self) -> None:
        """Checks that the directory holds all that the facts speak of, in the sizes that they give.

        Raises:
            ValueError: it does not.
        """
        held = self.directory.shapes(f"{self.key}.")
        for key, shape in self._all():
            found, size = held.get(f"{self.key}.{key}"), math.prod(shape)
            if size and (found is None or math.prod(found) != size):
                raise ValueError(f"{self.key}.{key} must have shape {tuple(shape)}, got {found or 'nothing'}")

    def _all(self) -> Iterator[tuple[str, list[int]]]:
        """The keys of all tensors, and their shapes."""
        shapes = self.common["shapes"]
        for name in self.common["tensors"]:
            yield from ((state_key(index, name), shape) for index, shape in shapes.items())
        for rank in range(self.common["world_size"]):
            yield from ((residual_key(rank, index), shape) for index, shape in shapes.items())
        yield from ((key, shape) for key, shape in self._mask_shapes().items())

    def _mask_shapes(self) -> dict[str, list[int]]:
        shapes: list[list[int] | None] = self.common.get("mask_shapes") or [self.common.get("mask_shape")]
        return {mask_key(shard, len(shapes)): shape for shard, shape in enumerate(shapes) if shape is not None}

    def _dtype_beside(self, key: str) -> torch.dtype:
        """The dtype of a tensor without entries: that of another parameter's tensor of the same name."""
        if parameter_of(key) is None:
            return torch.uint8
        kind, first, last = key.split(".")
        for index in self.common["shapes"]:
            other = state_key(index, last) if kind == "state" else residual_key(int(first), index)
            found = self.directory.find(f"{self.key}.{other}")
            if found is not None:
                return found.dtype
        return torch.int32 if last == "last_step" else torch.float32


@dataclass(frozen=True)
class OwnShards:
    """This rank's part of one optimizer's state, on its way into a directory. Views of the live state."""

    tensors: dict[str, Chunk]
    common: dict[str, Any]
    """Facts, as :class:`SavedShards` has them; the same on all ranks."""
