"""Parts: what a state is made of, what each rank holds of it, and what another number of ranks makes of it.

A state is facts, the same on all ranks, and tensors by key. A whole state and a directory have the same ones:

========================== ==========================================================================================
key                        tensor
========================== ==========================================================================================
``state.{i}.{part}``       of parameter ``i``, flat: the ranks own an N-th of it each
``{part}.{rank}.{i}``      of parameter ``i``, flat: every rank has values of its own
``{part}.{rank}``          likewise, of no parameter: a dict, in a directory as bytes (:mod:`.packed`)
``{part}``                 ``[blocks, ...]``: rows of blocks, which the ranks own
``{part}.{shard}``         likewise, where several ranks hold a replica: of the rows of each of them
========================== ==========================================================================================

``i`` counts all parameters of the groups, as in torch. A parameter's tensor is flat, in the parameter's memory order,
and is the whole parameter's also where several ranks hold a replica together (FSDP2 inside a node): then a "rank" of
the second line is a replica, and one of the third counts all ranks, a replica's side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.comm.collectives import Communicator, in_messages
from lightning_scape.core.layout import Layout, Piece
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import bytes_of

Placement = Literal["owned", "each_rank"]
OnOtherRanks = Literal["cut", "mean", "take", "drop"]


class Place(NamedTuple):
    """A rank's place among those that hold a state."""

    replica: int = 0
    shard: int = 0
    """Among the ranks that hold the replica together."""
    shards: int = 1

    @property
    def number(self) -> int:
        """Among all ranks."""
        return self.replica * self.shards + self.shard


@dataclass(frozen=True)
class Part:
    """One kind of tensors in a state."""

    name: str
    placement: Placement
    """``"owned"``: the ranks hold an N-th of it each. ``"each_rank"``: each has values of its own."""
    on_other_ranks: OnOtherRanks
    """What another number of ranks makes of it. ``"cut"``: the same values, cut anew. ``"mean"``: each rank starts from
    the mean over those that saved. ``"take"``: rank r takes that of rank r modulo their number; it is a dict, not
    tensors by parameter. ``"drop"``: rows of blocks, which other blocks cannot use."""
    held: Mapping[int | None, Chunk] = field(default_factory=dict)
    """What this rank holds, by parameter; None stands for what is of no parameter. When saved: views of the live state.
    When loaded: what is filled."""

    @property
    def by_parameter(self) -> bool:
        """Whether it has a tensor for every parameter."""
        return self.on_other_ranks in ("cut", "mean")

    def key(self, index: int | None, place: Place) -> str:
        """The key of a parameter's tensor that a rank saves."""
        if self.on_other_ranks == "cut":
            return f"state.{index}.{self.name}"
        if self.on_other_ranks == "mean":
            return f"{self.name}.{place.replica}.{index}"
        if self.on_other_ranks == "take":
            return f"{self.name}.{place.number}"
        return self.name if place.shards == 1 else f"{self.name}.{place.shard}"


def parameter_of(key: str) -> int | None:
    """The number of the parameter that a key's tensor belongs to; None if it is of no parameter."""
    kind, *path = key.split(".")
    return None if len(path) < 2 else int(path[0] if kind == "state" else path[1])


# ------------------------------------------------------------------------------------- what a rank holds, as chunks


def of_blocks(parameters: Parameters, layout: Layout, blocks: Tensor, pieces: Iterable[Piece]) -> dict[Any, Chunk]:
    """Each piece's entries in a tensor of blocks, as a chunk of its whole parameter, by the parameter's number.

    Args:
        parameters: those of the layout.
        layout: it gives the block length.
        blocks: ``[rows, B]``: all blocks, or the shard's.
        pieces: they count the same rows.
    """
    flat = blocks.view(-1)
    found = {
        index: Chunk(flat[:0], 0, 0)
        for index, parameter in zip(parameters.indices, parameters.tensors, strict=True)
        if not parameter.numel()
    }
    for piece in pieces:
        place = piece.segment.index
        first, whole = parameters.first_entry(place), parameters.tensors[place].numel()
        entries = flat[piece.of_blocks(layout.block_size)]
        found[parameters.indices[place]] = Chunk(entries, first + piece.start, whole)
    return found


def of_flats(parameters: Parameters, flats: Sequence[Tensor]) -> dict[Any, Chunk]:
    """A flat tensor for every parameter, as chunks: of sharded parameters a rank holds some entries."""
    return {
        index: Chunk(flat, parameters.first_entry(place), whole.numel())
        for place, (index, flat, whole) in enumerate(zip(parameters.indices, flats, parameters.tensors, strict=True))
    }


# ------------------------------------------------------------------------------------------------ saving


@dataclass(frozen=True)
class OwnParts:
    """What this rank holds of one optimizer's state: views of the live state."""

    common: Mapping[str, Any]
    """Facts; the same on all ranks."""
    parts: Sequence[Part]
    """The same on all ranks, but for what is held."""
    parameters: Parameters
    ranks: Communicator
    """Those that hold the same rows."""
    node: Communicator = field(default_factory=Communicator.alone)
    """Those that hold a replica together."""

    @property
    def everyone(self) -> Communicator:
        """All ranks that hold a part of the state."""
        return self.ranks if self.node.world_size == 1 else Communicator()

    @property
    def place(self) -> Place:
        """This rank's."""
        return Place(self.ranks.rank, self.node.rank, self.node.world_size)

    @cached_property
    def tensors(self) -> dict[str, Chunk]:
        """By key: what this rank writes into a directory."""
        return {part.key(index, self.place): chunk for part in self.parts for index, chunk in part.held.items()}

    def copied(self) -> OwnParts:
        """The same in host memory of its own: training goes on meanwhile."""
        parts = [replace(part, held={i: chunk.copied() for i, chunk in part.held.items()}) for part in self.parts]
        return replace(self, common=deepcopy(self.common), parts=parts)

    def collect(self, to: int, background: Communicator | None = None) -> Iterator[tuple[str, Tensor]]:
        """All whole tensors on rank ``to``, in host memory; none elsewhere. Use each before the next. Collective.

        A part that the ranks own arrives at once; of one that each rank has, some parameters at a time: rank ``to``
        holds no more than one such message of all ranks.

        Args:
            to: among all ranks.
            background: all ranks, on a group of its own that works in host memory: the messages are small, so that
                those of the training are not held up.
        """
        everyone, device, at_once = self.everyone, self._device, _LARGE
        if background is not None:
            everyone, device = background, torch.device("cpu")
            at_once = max(1, _SMALL // max(1, everyone.world_size - 1))
        groups = list(self._groups())
        mine = [[_Piece.of(part.key(index, self.place), chunk) for index, chunk in held] for part, held in groups]
        told: list[list[list[_Piece]]] = everyone.all_gather_object(mine)
        for number, (_, held) in enumerate(groups):
            pieces = [each[number] for each in told]  # by rank
            sizes = [sum(piece.nbytes for piece in each) for each in pieces]
            parts: list[Tensor] | None = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(pieces)
            if any(sizes):  # no message for nothing
                mine_here = _as_bytes([chunk for _, chunk in held], max(sizes))
                parts = everyone.gather(mine_here, to, device, at_once)
            if parts is not None and everyone.rank == to:
                yield from _joined(pieces, parts)

    def _groups(self) -> Iterator[tuple[Part, list[tuple[int | None, Chunk]]]]:
        """What travels in one message."""
        for part in self.parts:
            if part.on_other_ranks != "mean":
                yield part, list(part.held.items())
                continue
            numels = (parameter.numel() for parameter in self.parameters.tensors)
            for together in in_messages(zip(self.parameters.indices, numels, strict=True), _AT_ONCE):
                yield part, [(index, part.held[index]) for index in together if index in part.held]

    @property
    def _device(self) -> torch.device:
        """By way of which tensors travel: not the parameters', which Lightning takes to the CPU when a fit ends."""
        held = (chunk.tensor.device for part in self.parts for chunk in part.held.values())
        return next((device for device in held if device.type != "cpu"), self.parameters.device)


_LARGE, _SMALL = 1 << 22, 1 << 18
"""Bytes on their way at a time: of each rank where all wait for them; of all ranks where they train meanwhile."""
_AT_ONCE = 1 << 24
"""Entries of one message of a part that each rank has, but for a parameter that has more."""


class _Piece(NamedTuple):
    """A chunk as the other ranks know it."""

    key: str
    offset: int
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, key: str, chunk: Chunk) -> _Piece:
        return cls(key, chunk.offset, tuple(chunk.tensor.shape), tuple(chunk.size), chunk.tensor.dtype)

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def _as_bytes(chunks: Sequence[Chunk], length: int) -> Tensor:
    """uint8 ``[length]``: the chunks' entries one after another, then zeros; gloo knows no uint16."""
    each = [bytes_of(chunk.tensor) for chunk in chunks]
    pad = length - sum(map(len, each))
    if not pad and len(each) == 1:
        return each[0]
    device = each[0].device if each else None
    return torch.cat([*each, torch.zeros(pad, dtype=torch.uint8, device=device)])


def _joined(pieces: Sequence[Sequence[_Piece]], parts: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by key, from the bytes of every rank."""
    wholes: dict[str, Tensor] = {}
    for each, part in zip(pieces, parts, strict=True):
        ends = list(itertools.accumulate(piece.nbytes for piece in each))
        for piece, end in zip(each, ends, strict=True):
            if piece.key not in wholes:
                wholes[piece.key] = torch.empty(piece.whole, dtype=piece.dtype, device="cpu")
            rows = wholes[piece.key][piece.offset : piece.offset + piece.shape[0]]
            rows.view(-1).view(torch.uint8).copy_(part[end - piece.nbytes : end])
    yield from wholes.items()


# ------------------------------------------------------------------------------------------------ loading


class Source(Protocol):
    """A saved state."""

    @property
    def common(self) -> Mapping[str, Any]:
        """Facts: all but the tensors."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Those of the method: ``world_size`` is one of them."""

    @property
    def entries(self) -> Mapping[int, Collection[str]]:
        """Names of the tensors of each parameter that the ranks own."""

    def find(self, key: str) -> Any:
        """The tensor of a key, in its own shape; on ``meta`` if its values are still on disk. None if there is none.

        A damaged state may give anything.
        """

    def read(self, targets: Mapping[str, Chunk]) -> None:
        """Fills the chunks' tensors, in place; converts dtypes."""

    def tensor(self, key: str) -> Tensor:
        """One whole tensor: flat, where it is a parameter's."""

    def unpacked(self, key: str) -> dict[str, Any]:
        """The dict that a rank has saved beside its tensors."""


def fill(source: Source, part: Part, ranks: int, place: Place) -> None:
    """Fills what this rank holds of a part from a saved state.

    Args:
        source: the state.
        part: of tensors by parameter, in memory that is fresh; dtypes are converted. Of parameters that the state does
            not have, for they were frozen, it stays as it is.
        ranks: of the run that goes on (replicas, where several ranks hold one).
        place: this rank's.
    """
    assert part.by_parameter
    before: int = source.facts["world_size"]
    known = source.entries
    part = replace(part, held={index: chunk for index, chunk in part.held.items() if index in known})
    if part.on_other_ranks == "cut" or before == ranks:
        source.read({part.key(index, place): chunk for index, chunk in part.held.items()})
        return
    each = {index: chunk._replace(tensor=torch.empty_like(chunk.tensor)) for index, chunk in part.held.items()}
    for chunk in part.held.values():
        chunk.tensor.zero_()
    for other in range(before):
        source.read({part.key(index, Place(other)): chunk for index, chunk in each.items()})
        for index, chunk in part.held.items():
            chunk.tensor.add_(each[index].tensor)
    for chunk in part.held.values():
        chunk.tensor.div_(before)


def read_flats(source: Source, part: Part, parameters: Parameters, ranks: int, place: Place) -> list[Tensor]:
    """This rank's entries of a part: one flat fp32 tensor for each parameter, on its device.

    Args:
        source: the state.
        part: of tensors by parameter.
        parameters: that take it up.
        ranks: as in :func:`fill`, as the next.
        place: this rank's.
    """
    flats = [torch.zeros(p.numel(), dtype=torch.float32, device=p.device) for p in parameters.local]
    fill(source, replace(part, held=of_flats(parameters, flats)), ranks, place)
    return flats
