"""States of SparseLoCo in format 1, until version 0.2.0 and some days after it: read like those of today.

Lists by parameter hold flat tensors; ``L`` ranks of a node hold a replica together, a node's ranks side by side::

    "sparseloco": {"format": 1, ..., "numels": [...], "shards": L,
                   "start": [blocks, B], "owner_error": [blocks, B] or [0, B],      # lists of L where L > 1
                   "ranks": [{"parameters": [...], "error": [...], "launched": [...] or None,
                              "state": ..., "param_groups": ...}, ...]}

A directory held ``start`` and ``owner_error`` (``start.{shard}`` and so on), and each rank's dict packed, ``rank.{n}``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint.checks import DAMAGED, is_shape, said
from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.checkpoint.index import is_size
from lightning_scape.checkpoint.inner import joined
from lightning_scape.checkpoint.parts import parameter_of
from lightning_scape.checkpoint.source import SavedShards
from lightning_scape.core.layout import Layout
from lightning_scape.core.local_shards import node_rows
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import piece_views

KEY = "sparseloco"
"""Key of the facts in SparseLoCo's states."""
IN_A_PART = {"parameters", "error", "launched", "state", "param_groups"}
"""What each rank has saved."""
_OWNED = ("start", "owner_error")
_EACH_RANK = ("error", "parameters", "launched")


def is_older(content: Mapping[str, Any]) -> bool:
    """Whether a state, whole or the facts of one in a directory, is of format 1."""
    facts = content.get(KEY)
    return isinstance(facts, Mapping) and facts.get("format") == 1


def check(facts: Mapping[str, Any]) -> None:
    """Raises ValueError if the facts of a state in a directory are impossible."""
    numels: Any = facts.get("numels")
    shapes: Any = facts.get("shapes", [] if facts.get("shards", 1) == 1 else None)
    numbers: Any = facts.get("indices", numels)
    if not is_shape(numels) or not is_shape(numbers) or len(numbers) != len(numels):
        raise ValueError(f"`numels` and `indices` must be whole numbers for the same parameters, got others. {DAMAGED}")
    if not isinstance(shapes, list) or not all(map(is_shape, shapes)) or len(shapes) not in (0, len(numels)):
        raise ValueError(f"`shapes` must be those of all parameters, got others. {DAMAGED}")
    if not is_size(facts.get("block_size")):
        raise ValueError(f"`block_size` must be a whole number, got {said(facts.get('block_size'))}. {DAMAGED}")


def keys(common: Mapping[str, Any]) -> Iterator[tuple[str, None]]:
    """The keys of what each rank has packed."""
    facts = common[KEY]
    yield from ((f"rank.{number}", None) for number in range(facts["world_size"] * facts.get("shards", 1)))


def whole_of(saved: SavedShards) -> dict[str, Any]:
    """A directory as one file of the same format, in host memory."""
    facts = saved.common[KEY]
    shards: int = facts.get("shards", 1)
    ranks = [saved.unpacked(key) for key, _ in keys(saved.common)]
    whole = {**facts, "ranks": ranks}
    for name in _OWNED:
        each = [_blocks(saved, name, shard) for shard in range(shards)]
        whole[name] = each[0] if shards == 1 else each
    first = ranks[0]
    if shards > 1:
        numbers = facts.get("indices", range(len(facts["shapes"])))  # without frozen parameters they are these
        shapes = {index: shape for index, shape in zip(numbers, facts["shapes"], strict=True) if shape}
        first = joined(ranks[:shards], shapes)
    return {"state": first["state"], "param_groups": first["param_groups"], KEY: whole}


def _blocks(saved: Mapping[str, Any] | SavedShards, name: str, shard: int) -> Tensor:
    """``[blocks, B]`` of one of the ranks that hold a replica; no rows where nothing is saved."""
    if not isinstance(saved, SavedShards):
        facts = saved[KEY]
        found: Tensor = facts[name] if facts.get("shards", 1) == 1 else facts[name][shard]
        return found
    facts = saved.common[KEY]
    key = f"{saved.key}.{name}" if facts.get("shards", 1) == 1 else f"{saved.key}.{name}.{shard}"
    if saved.directory.find(key) is None:
        return torch.empty(0, facts["block_size"], dtype=torch.float32, device="cpu")
    return saved.directory.tensor(key)


class OlderState:
    """A :class:`~lightning_scape.checkpoint.source.Source` over a state of format 1, by the keys of today.

    Args:
        saved: the state, whole or in a directory.
        parameters: of the optimizer that takes it up.
    """

    def __init__(self, saved: Mapping[str, Any] | SavedShards, parameters: Parameters) -> None:
        self._saved, self._parameters = saved, parameters
        facts: Mapping[str, Any] = (saved.common if isinstance(saved, SavedShards) else saved)[KEY]
        self._shards: int = facts.get("shards", 1)
        numels = [parameter.numel() for parameter in parameters.tensors]
        if facts["numels"] != numels:
            raise ValueError(
                f"The state must be of this model, got parameters of {facts['numels']} entries, and the optimizer has"
                f" {numels}. Build the model, and freeze its parameters, as they were when it was saved."
            )
        shapes = facts.get("shapes", [list(parameter.shape) for parameter in parameters.tensors])
        shapes = dict(zip(parameters.indices, shapes, strict=True))
        self.facts: dict[str, Any] = {**facts, "format": 2, "shapes": shapes}
        self._place_of = {index: place for place, index in enumerate(parameters.indices)}
        parts = [["start", "owned", "cut"], *([name, "each_rank", "mean"] for name in _EACH_RANK)]
        if facts.get("reduction") != "gathered":
            parts.append(["owner_error", "owned", "cut"])
        if not facts["progress"].get("under_way"):
            parts.remove(["launched", "each_rank", "mean"])
        self.facts["parts"] = [*parts, ["inner", "each_rank", "take"]]
        self.common: dict[str, Any] = {KEY: self.facts}

    @property
    def entries(self) -> dict[int, Collection[str]]:
        """Names of the tensors that ranks own, by parameter."""
        owned = [name for name, placement, _ in self.facts["parts"] if placement == "owned"]
        return dict.fromkeys(self.facts["shapes"], owned)

    def find(self, key: str) -> Tensor:
        """A parameter's tensor, flat."""
        kind, first, last = key.split(".")
        index = parameter_of(key)
        assert index is not None
        flats = self._owned(last) if kind == "state" else self._of_replica(int(first))[kind]
        return flats[self._place_of[index]]

    tensor = find

    def read(self, targets: Mapping[str, Chunk]) -> None:
        """Fills the chunks' tensors, in place; converts dtypes."""
        for key, chunk in targets.items():
            chunk.tensor.copy_(self.find(key)[chunk.offset : chunk.offset + len(chunk.tensor)])

    def unpacked(self, key: str) -> dict[str, Any]:
        """A rank's inner optimizer."""
        part = self._part(int(key.split(".")[1]))
        return {name: part[name] for name in ("state", "param_groups")}

    @functools.cache  # noqa: B019 - it is let go with the state, when that is loaded
    def _owned(self, name: str) -> list[Tensor]:
        """By parameter, flat, of whole parameters."""
        each = []
        for shard in range(self._shards):
            numels = [_numel(parameter, self._shards, shard) for parameter in self._parameters.tensors]
            layout = Layout(numels, self._parameters.groups, self.facts["block_size"], self.facts["world_size"])
            each.append(_by_parameter(_blocks(self._saved, name, shard), layout, len(numels)))
        return [torch.cat(parts) for parts in zip(*each, strict=True)]

    @functools.lru_cache(maxsize=1)  # noqa: B019 - likewise
    def _of_replica(self, replica: int) -> dict[str, list[Tensor]]:
        """Its lists, of whole parameters."""
        parts = [self._part(replica * self._shards + shard) for shard in range(self._shards)]
        names = [name for name in _EACH_RANK if parts[0][name] is not None]
        return {name: [torch.cat(rows) for rows in zip(*(part[name] for part in parts), strict=True)] for name in names}

    def _part(self, number: int) -> dict[str, Any]:
        if isinstance(self._saved, SavedShards):
            return self._saved.unpacked(f"rank.{number}")
        found: dict[str, Any] = self._saved[KEY]["ranks"][number]
        return found


def _numel(parameter: Tensor, shards: int, shard: int) -> int:
    """Entries that one of ``shards`` ranks of a node holds."""
    if shards == 1:
        return parameter.numel()
    return len(node_rows(parameter.shape[0], shards, shard)) * (parameter.numel() // max(1, parameter.shape[0]))


def _by_parameter(blocks: Tensor, layout: Layout, count: int) -> Sequence[Tensor]:
    """Each parameter's entries, flat; one without entries has no block."""
    parts = [blocks.new_empty(0)] * count
    pieces = layout.everything().pieces
    for piece, part in zip(pieces, piece_views(blocks, pieces), strict=True):
        parts[piece.segment.index] = part
    return parts
