"""The quantized message of SparseLoCo: one row of bytes per block, all of the same size.

Symbols: ``R`` blocks, ``B`` entries of a block, ``q`` of them are sent, ``b`` bits of a value. A row holds, in order:

========= ============================ ==============================================================================
field     bytes                        content
========= ============================ ==============================================================================
positions ceil(q * ceil(log2 B) / 8)   in the block, largest magnitude first; nothing where q = B
codes     ceil(q * b / 8), or 4 q      of the values; the values themselves (fp32) where they are not quantized
scale     2, or 0                      of the block
========= ============================ ==============================================================================

With B = 256, q = 4, b = 2 that is 4 + 1 + 2 bytes: 14 bits for an entry, everything included.

Three quantizers, by what is sent:

- **two levels** (2 bits, positions sent): ``-high, -low, low, high``. ``low`` is the mean magnitude of the entries
  below the mean of all q, ``high`` that of the others. An entry of less than half its level is not sent: its place
  repeats the block's first position, which no other place can hold.
- **uniform** (4 and 8 bits): ``i * unit`` for whole i from ``-(2**(b-1) - 1)``; the largest magnitude of the block just
  fits. With B = 64 and everything sent, this is the message of :func:`quantize`.
- **ternary** (2 bits, everything sent): ``-unit, 0, unit`` with ``unit`` of 1.25 root mean squares.

Sent plus left equals what was there, *exactly*, bit for bit. Levels have at most 16 significant bits, and an entry is
sent as a level only if its magnitude is at least half of it. So the two are either within a factor of two (their
difference is an fp32 number: Sterbenz), or the level is below the entry and a multiple of its last place's unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_scape.ops.naive.masks import select
from lightning_scape.ops.naive.wire import LEAST_SCALE, from_scale, to_scale

_SCALE_BYTES = 2
_TERNARY_UNIT = 1.25
"""In root mean squares: about the best three levels for a normal distribution (1.22)."""
_RATIO_BITS, _RATIO_UNIT = 5, 8
"""``high = low * (1 + r / 8)`` for r from 0 to 31."""


class Entries(NamedTuple):
    """The entries that a message holds."""

    positions: Tensor | None
    """int64 ``[R, q]``, in the block; None is all of them, in order. A position that comes twice has the value 0 the
    second time."""
    values: Tensor
    """fp32 ``[R, q]``."""

    def add_to(self, blocks: Tensor) -> None:
        """``blocks [R, B] += values``, at their positions."""
        if self.positions is None:
            blocks.add_(self.values)
        else:
            blocks.scatter_add_(1, self.positions, self.values)


@dataclass(frozen=True)
class Wire:
    """Format of a message.

    Args:
        block_size: B.
        sent: q, 1 .. B.
        bits: 2, 4, 8, or None: values are fp32.
    """

    block_size: int
    sent: int
    bits: int | None

    @property
    def dense(self) -> bool:
        """Whether every entry is sent, and no position."""
        return self.sent == self.block_size

    @property
    def position_bits(self) -> int:
        """Bits of one position."""
        return 0 if self.dense else max(1, (self.block_size - 1).bit_length())

    @property
    def row_bytes(self) -> int:
        """Bytes of a block's row."""
        return sum(self._field_bytes)

    @property
    def _field_bytes(self) -> tuple[int, int, int]:
        positions = -(-self.sent * self.position_bits // 8)
        if self.bits is None:
            return positions, 4 * self.sent, 0
        return positions, -(-self.sent * self.bits // 8), _SCALE_BYTES

    @property
    def _two_levels(self) -> bool:
        return self.bits == 2 and not self.dense

    def take(self, blocks: Tensor) -> Tensor:
        """Takes the q largest entries of each block out, as a message; what the message does not say stays behind.

        Example: ``[[3, -5, 0, 1]]`` with q = 2 and bits = None sends 3 and -5 and leaves ``[[0, 0, 0, 1]]``.

        Args:
            blocks: fp32 ``[R, B]``, finite, changed in place.

        Returns:
            uint8 ``[R, row_bytes]``.
        """
        positions = None if self.dense else select(blocks, self.sent).long()
        there = blocks if positions is None else blocks.gather(1, positions)
        fields = []
        if self.bits is None:
            values = there.clone()  # with q = B these are the blocks themselves, about to be changed
            coded = [_bytes(values)]
        else:
            positions, values, coded = self._quantize(positions, there)
        if positions is None:
            blocks.sub_(values)
        else:
            fields.append(pack(positions, self.position_bits))
            blocks.scatter_add_(1, positions, values.neg())
        return torch.cat([*fields, *coded], dim=1)

    def read(self, message: Tensor) -> Entries:
        """The entries of a message, uint8 ``[R, row_bytes]``."""
        places, codes, scale = message.split(self._field_bytes, dim=1)
        positions = None if self.dense else unpack(places, self.position_bits, self.sent)
        if self.bits is None:
            return Entries(positions, _view(codes, torch.float32))
        symbols = unpack(codes, self.bits, self.sent)
        field = _view(scale, torch.int16)
        return Entries(positions, self._values(positions, symbols, field))

    def _quantize(self, positions: Tensor | None, there: Tensor) -> tuple[Tensor | None, Tensor, list[Tensor]]:
        """Positions (repeated where nothing is sent), values as they will be read, and the fields of the codes."""
        assert self.bits is not None
        magnitude = there.abs()
        if self._two_levels:
            assert positions is not None
            field = _two_level_field(magnitude)
            low, high = _two_level_scale(field)
            symbols = 2 * (magnitude * 2 > low + high).long() + (there < 0).long()
            first = positions[:, :1]
            level = torch.where(symbols > 1, high, low)
            positions = torch.where(magnitude * 2 >= level, positions, first)
        else:
            field = self._uniform_field(magnitude)
            unit = from_scale(field)
            levels = (1 << (self.bits - 1)) - 1
            steps = torch.where(unit > 0, there / unit, 0.0).round_().clamp_(-levels, levels)
            symbols = steps.long() + levels
        values = self._values(positions, symbols, field)
        return positions, values, [pack(symbols, self.bits), _bytes(field)]

    def _uniform_field(self, magnitude: Tensor) -> Tensor:
        """int16 ``[R, 1]``: the upper half of the unit's fp32, rounded up."""
        assert self.bits is not None
        if self.bits == 2:
            unit = magnitude.square().mean(dim=1, keepdim=True).sqrt_().mul_(_TERNARY_UNIT)
        else:
            unit = magnitude.amax(dim=1, keepdim=True) / ((1 << (self.bits - 1)) - 1)
        return to_scale(unit)

    def _values(self, positions: Tensor | None, symbols: Tensor, field: Tensor) -> Tensor:
        """fp32 ``[R, q]``: what codes and scales stand for; sender and receiver compute the same."""
        assert self.bits is not None
        if not self._two_levels:
            return (symbols - ((1 << (self.bits - 1)) - 1)) * from_scale(field)
        assert positions is not None
        low, high = _two_level_scale(field)
        values = torch.where(symbols > 1, high, low)
        values = torch.where(symbols % 2 == 1, -values, values)
        repeated = positions[:, 1:] == positions[:, :1]
        values[:, 1:].masked_fill_(repeated, 0.0)
        return values


def _two_level_field(magnitude: Tensor) -> Tensor:
    """int16 ``[R, 1]``: 11 bits for ``low`` (exponent and 3 bits), 5 bits for ``high / low``."""
    mean = magnitude.mean(dim=1, keepdim=True)
    upper = magnitude >= mean
    count = upper.sum(dim=1, keepdim=True)
    high = (magnitude * upper).sum(dim=1, keepdim=True) / count.clamp(min=1)
    low = (magnitude * ~upper).sum(dim=1, keepdim=True) / (upper.shape[1] - count).clamp(min=1)
    low = torch.where(low > 0, low, high)  # all are alike
    low = torch.maximum(low, high / 4)  # the largest ratio there is
    low = torch.where(low > LEAST_SCALE, low, 0.0)
    code = (low.view(torch.int32) + (1 << 19)) >> 20
    rounded = (code << 20).view(torch.float32)
    ratio = torch.where(rounded > 0, (high / rounded - 1) * _RATIO_UNIT, 0.0).round_().clamp_(0, 31)
    return ((code << _RATIO_BITS) | ratio.to(torch.int32)).to(torch.int16)


def _two_level_scale(field: Tensor) -> tuple[Tensor, Tensor]:
    """``low`` and ``high``, fp32 ``[R, 1]`` each."""
    bits = field.to(torch.int32) & 0xFFFF
    low = ((bits >> _RATIO_BITS) << 20).view(torch.float32)
    return low, low * (1 + (bits & 31).float() / _RATIO_UNIT)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _view(field: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes ``[R, n]`` as wider numbers; copied first, for a part of a row may begin anywhere."""
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def pack(symbols: Tensor, bits: int) -> Tensor:
    """Whole numbers of ``bits`` bits each, packed into bytes, lowest bit first; a row is filled up to whole bytes.

    Example: ``[[1, 2, 3]]`` with 2 bits is ``[[0b111001]]``.

    Args:
        symbols: int64 ``[R, n]``, from 0 to ``2**bits - 1``.
        bits: 1 to 16.

    Returns:
        uint8 ``[R, ceil(n * bits / 8)]``.
    """
    if bits in (8, 16):
        return symbols.to(torch.uint8) if bits == 8 else _bytes(symbols.to(torch.int16))
    places = torch.arange(bits, dtype=torch.int64, device=symbols.device)
    flat = ((symbols.unsqueeze(2) >> places) & 1).to(torch.uint8).flatten(1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8))
    weights = (1 << torch.arange(8, dtype=torch.int64, device=symbols.device)).to(torch.uint8)
    return (flat.view(len(flat), -1, 8) * weights).sum(dim=2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The reverse of :func:`pack`: int64 ``[R, count]``."""
    if bits == 8:
        return packed.long()
    if bits == 16:
        return _view(packed, torch.int16).long() & 0xFFFF
    eight = torch.arange(8, device=packed.device, dtype=torch.uint8)
    flat = ((packed.unsqueeze(2) >> eight) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits, dtype=torch.int64, device=packed.device)
    return (flat.view(len(flat), count, bits).long() * weights).sum(dim=2)
