"""Parameters <-> blocks <-> shards, and how much of a block travels. Integers only: no tensor is touched here.

Every parameter is cut into blocks of ``B`` consecutive entries (in memory order), its last block filled up with pads.
The blocks of all parameters, in order, form one row of blocks; some empty ones at the end make their count a multiple
of ``N``, so that each rank owns the same number of consecutive blocks: its shard.

Example, ``B = 4``, ``N = 2``, parameters of 6 and 9 entries (``.`` is a pad)::

    parameter 0     parameter 1           filler
    abcd ef..       ghij klmn o...        ....
    block 0    1       2    3    4           5
    `---- shard of rank 0 ----' `--- shard of rank 1 ---'
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

MAX_BYTE_BLOCK = 256
"""Longest block whose positions fit one byte on the wire."""
MAX_BLOCK = 65536
"""Longest block whose positions fit two bytes on the wire."""


class Quota(NamedTuple):
    """``sent`` of every ``block_size`` consecutive entries travel each step."""

    block_size: int
    sent: int

    @property
    def density(self) -> float:
        """Share of the entries that is sent, ``q / B``."""
        return self.sent / self.block_size


@dataclass(frozen=True)
class Piece:
    """Consecutive whole blocks of one parameter: all of them, or those inside a shard."""

    index: int
    """Position of the parameter in the list it came from."""
    group: int
    """Index of its optimizer parameter group."""
    row: int
    """First block, counted from the start of the tensor the piece is used with (all blocks, or one shard)."""
    blocks: int
    start: int
    """First entry, counted from the start of the parameter."""
    numel: int
    """Entries of the parameter inside the piece; pads not counted."""

    @property
    def of_parameter(self) -> slice:
        """Its entries in the flat parameter."""
        return slice(self.start, self.start + self.numel)

    def of_blocks(self, block_size: int) -> slice:
        """Its entries in the flat tensor of blocks that ``row`` counts in; pads left out."""
        return slice(self.row * block_size, self.row * block_size + self.numel)

    def kept(self, sent: int, block_size: int) -> int:
        """How many of the ``blocks * sent`` chosen positions are entries of the parameter.

        Pads stand at the end of the parameter's last block and are chosen last (:func:`ops.select`), so these are the
        *first* ``kept`` of the piece's positions. Nothing has to be looked up in the mask.
        """
        tail = self.numel - (self.blocks - 1) * block_size
        return (self.blocks - 1) * sent + min(sent, tail)


@dataclass(frozen=True)
class Region:
    """Blocks that are worked on together, as rows of the tensors at hand."""

    rows: tuple[slice, ...]
    """In order; those that no piece fills come last, and hold pads only."""
    pieces: tuple[Piece, ...]
    """What fills the rows, in order."""


class Layout:
    """Blocks of ``block_size`` entries over all parameters, cut into ``world_size`` equal shards.

    Args:
        numels: entries of each parameter, in optimizer order; empty parameters take no block.
        groups: parameter group of each parameter.
        block_size: B.
        world_size: N.
    """

    def __init__(self, numels: Sequence[int], groups: Sequence[int], block_size: int, world_size: int) -> None:
        self.block_size = block_size
        self.world_size = world_size
        pieces, block = list[Piece](), 0
        for index, (numel, group) in enumerate(zip(numels, groups, strict=True)):
            if numel:
                pieces.append(Piece(index, group, block, -(-numel // block_size), 0, numel))
                block += pieces[-1].blocks
        self.pieces = tuple(pieces)
        """Every parameter, whole; rows count from block 0."""
        self.used_blocks = block
        """Blocks that hold parameters."""
        self.shard_blocks = -(-block // world_size)
        """Blocks of one shard, the same on every rank."""
        self.blocks = self.shard_blocks * world_size
        """All blocks, the fillers at the end included."""
        self._regions: dict[tuple[int, int], Region] = {}

    def rows_of(self, rank: int) -> slice:
        """The blocks of a rank's shard."""
        return slice(rank * self.shard_blocks, (rank + 1) * self.shard_blocks)

    def local(self, rank: int) -> Region:
        """The shard of ``rank``; rows count from the shard's first block."""
        mine = self.rows_of(rank)
        return self.region(mine.start, mine.stop)

    def region(self, first: int, stop: int) -> Region:
        """The blocks from ``first`` to before ``stop``; rows count from the first of them."""
        if (first, stop) not in self._regions:
            self._regions[first, stop] = Region((slice(0, stop - first),), tuple(self._cut(first, stop, first)))
        return self._regions[first, stop]

    def remote(self, rank: int) -> Region:
        """The shards of all other ranks; rows count from block 0."""
        mine = self.rows_of(rank)
        around = (slice(0, mine.start), slice(mine.stop, self.blocks))
        rows = tuple(each for each in around if each.start < each.stop)
        return Region(rows, tuple(piece for each in rows for piece in self._cut(each.start, each.stop, 0)))

    def _cut(self, first: int, stop: int, origin: int) -> Iterator[Piece]:
        """What lies in the blocks from ``first`` to before ``stop``; rows count from block ``origin``."""
        for whole in self.pieces:
            low, high = max(first, whole.row), min(stop, whole.row + whole.blocks)
            if low < high:
                start = (low - whole.row) * self.block_size
                end = min((high - whole.row) * self.block_size, whole.numel)
                yield Piece(whole.index, whole.group, low - origin, high - low, start, end - start)


@functools.lru_cache(maxsize=64)  # each step asks
def quota_for(sparsity: float) -> Quota:
    """Block length and quota for a sparsity.

    The largest B <= 256 for which ``rho * B`` is whole; where there is none, the B <= 256 that comes closest to the
    density; below a density of 1/256 the block is ``1 / rho`` entries long and sends one.

    >>> quota_for(0.99)
    Quota(block_size=200, sent=2)
    >>> quota_for(0.9)
    Quota(block_size=250, sent=25)
    >>> quota_for(0.999)
    Quota(block_size=1000, sent=1)
    """
    density = density_of(sparsity)
    if density * MAX_BYTE_BLOCK < 1:
        return Quota(min(MAX_BLOCK, round(1 / density)), 1)
    lengths = range(MAX_BYTE_BLOCK, 0, -1)  # of equally close ones the first
    best = min(lengths, key=lambda length: abs(Fraction(round(density * length), length) - density))
    return Quota(best, round(density * best))


def density_of(sparsity: float) -> Fraction:
    """``1 - sparsity``, by the decimal the user wrote: 0.99 is not 99/100 in binary."""
    return 1 - Fraction(repr(float(sparsity)))
