"""What a rank keeps from one exchange to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout

DEVICE_CHUNK, HOST_CHUNK = 1 << 24, 1 << 20
"""Entries worked on at a time: no temporary has the size of the parameters."""


@dataclass
class Progress:
    """Where training stands."""

    steps: int = 0
    """Inner steps so far."""
    in_window: int = 0
    """Inner steps since the last exchange began."""
    exchanges: int = 0
    """Exchanges that have begun."""


class Written(NamedTuple):
    """What others than the optimizer have written in a window (:mod:`.writes`): flat parameters, by place."""

    first: Mapping[int, Tensor] = {}
    """As they were written after an exchange, before the first step of the window."""
    last: Mapping[int, Tensor] = {}
    """As they were written last, between other steps of the window."""

    def digests(self, device: torch.device) -> Tensor:
        """int64 ``[2]``, on the device, of both; 0 where nothing was written."""
        found = torch.zeros(2, dtype=torch.int64, device=device)
        for kind, flats in enumerate(self):
            for place, flat in flats.items():
                found[kind] += (ops.checksum(flat).sum() + 1) * (2 * place + 1)
        return found


@dataclass
class LocoState:
    """Buffers of one rank, fp32. ``blocks`` counts all blocks, ``R`` those of a shard, ``B`` is the block length."""

    start: Tensor
    """``[blocks, B]``: the parameters at the last exchange, equal on all ranks; wider than narrow parameters."""
    error: Tensor
    """``[blocks, B]``: e, what this rank has computed and not yet sent."""
    owner_error: Tensor
    """``[R, B]``: what the owner of this shard has averaged and not yet sent back; ``[0, B]`` where nobody owns."""

    @classmethod
    def allocate(cls, layout: Layout, device: torch.device, owns: bool = True) -> LocoState:
        """All zeros. ``owns``: whether ranks own shards (messages are not gathered)."""

        def zeros(rows: int) -> Tensor:
            return torch.zeros(rows, layout.block_size, dtype=torch.float32, device=device)

        return cls(zeros(layout.blocks), zeros(layout.blocks), zeros(layout.shard_blocks if owns else 0))

    def moved(self, spans: Spans, flats: Sequence[Tensor]) -> list[int]:
        """Places of the parameters, flat, that are not at the starting point. On CUDA it waits for the device."""
        found = torch.zeros(len(flats), dtype=torch.bool, device=spans.device)
        for index, place, theta in spans.entries_of(dict(enumerate(flats))):
            found[index] |= (self.start.view(-1)[place].to(theta.dtype) != theta).any()
        places: list[int] = found.nonzero().view(-1).tolist()
        return places

    def set_out_from(self, spans: Spans, flats: Mapping[int, Tensor], holds: Tensor) -> None:
        """Moves the starting point to some parameters if ``holds`` (0-dim bool, on the device).

        Where it rounds to their value it stays, because it is wider than narrow parameters.
        """
        for _, place, value in spans.entries_of(flats):
            start = self.start.view(-1)[place]
            start.copy_(torch.where(holds & (start.to(value.dtype) != value), value.float(), start))

    def take_up(self, spans: Spans, written: Written, digests: Tensor) -> None:
        """Moves the starting point to what all ranks have written alike.

        Args:
            spans: of the parameters.
            written: what this rank has.
            digests: every rank's, ``[N, 2]``.
        """
        for flats, alike in zip(written, (digests == digests[:1]).all(dim=0), strict=True):
            self.set_out_from(spans, flats, alike)


class Spans:
    """Walks over the parameters in parts, each as flat entries of the blocks and of its parameter.

    Args:
        layout: blocks and shards.
        device: the parameters', where the arithmetic runs.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._chunk = HOST_CHUNK if device.type == "cpu" else DEVICE_CHUNK
        self._pieces = layout.everything().pieces

    def entries(self, flats: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Places in the blocks (flat), and the entries of the parameter ``flats[i]`` that belong there; pads left out.

        Args:
            flats: every parameter, flat.
        """
        return ((entries, part) for _, entries, part in self.entries_of(dict(enumerate(flats))))

    def entries_of(self, flats: Mapping[int, Tensor]) -> Iterator[tuple[int, slice, Tensor]]:
        """The same of some parameters, each with its place among them.

        Args:
            flats: by place.
        """
        for piece in self._pieces:
            if (place := piece.segment.index) in flats:
                first, flat = piece.of_blocks(self.layout.block_size).start, flats[place]
                for begin in range(0, len(flat), self._chunk):
                    part = flat[begin : begin + self._chunk]
                    yield place, slice(first + begin, first + begin + len(part)), part

    def rows(self, count: int) -> Iterator[slice]:
        """Slices that cover ``count`` blocks."""
        step = max(1, self._chunk // self.layout.block_size)
        for begin in range(0, count, step):
            yield slice(begin, min(begin + step, count))
