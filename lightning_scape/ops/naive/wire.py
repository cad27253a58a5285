"""What travels, in plain PyTorch: rows of bytes, each of one block, all of the same size.

Symbols: ``R`` blocks, ``B`` entries of a block, ``q`` of them are sent, ``b`` bits of a value. A row holds, in order:

========= ============================ ==============================================================================
field     bytes                        content
========= ============================ ==============================================================================
positions ceil(q * ceil(log2 B) / 8)   in the block, largest magnitude first; nothing where q = B
codes     ceil(q * b / 8), or 4 q      of the values; the values themselves (fp32) where they are not quantized
scale     2, or 0                      of the block
========= ============================ ==============================================================================

SparseLoCo's message has B = 256, q = 4, b = 2: that is 4 + 1 + 2 bytes, 14 bits for an entry, everything included.
SCAPE's values and changes are *groups*, B = q = 64, b = 4: 34 bytes. They come from each of ``S`` shards, ``n`` values
in ``G = ceil(n / 64)`` groups, the last one filled up with zeros.

Three quantizers, by what is sent:

- **two levels** (2 bits, positions sent): ``-high, -low, low, high``. ``low`` is the mean magnitude of the entries
  below the mean of all q, ``high`` that of the others. An entry of less than half its level is not sent: its place
  repeats the block's first position, which no other place can hold.
- **uniform** (4 and 8 bits): ``i * unit`` for whole i from ``-(2**(b-1) - 1)``; the largest magnitude of the block just
  fits. The unit is the upper half of an fp32, rounded up; the code is ``i + 2**(b-1) - 1``.
- **ternary** (2 bits, everything sent): ``-unit, 0, unit`` with ``unit`` of 1.25 root mean squares.

Sent plus left equals what was there, *exactly*, bit for bit. Levels have at most 16 significant bits, and an entry is
sent as a level only if its magnitude is at least half of it. So the two are either within a factor of two (their
difference is an fp32 number: Sterbenz), or the level is below the entry and a multiple of its last place's unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.masks import column, gather_blocks, position_dtype, row_slices, scatter_blocks, select

GROUP = 64
"""Values of SCAPE that share a scale."""
GROUP_BYTES = 34
"""Of a group."""
LEVELS = 7
"""The largest multiple of a group's unit."""
LEAST_SCALE = 1e-30
"""A unit that is not larger becomes 0, and the block sends zeros: there are no subnormal numbers."""
_TERNARY_UNIT = 1.25
"""In root mean squares: about the best three levels for a normal distribution (1.22)."""
_RATIO_BITS, _RATIO_UNIT = 5, 8
"""``high = low * (1 + r / 8)`` for r from 0 to 31."""


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
    def row_bytes(self) -> int:
        """Bytes of a block's row."""
        return sum(self._field_bytes)

    @property
    def _position_bits(self) -> int:
        return 0 if self.dense else max(1, (self.block_size - 1).bit_length())

    @property
    def _field_bytes(self) -> tuple[int, int, int]:
        positions = -(-self.sent * self._position_bits // 8)
        if self.bits is None:
            return positions, 4 * self.sent, 0
        return positions, -(-self.sent * self.bits // 8), 2

    def take(self, blocks: Tensor) -> Tensor:
        """Takes the q largest entries of each block out, as a message; what the message does not say stays behind.

        Example: ``[[3, -5, 0, 1]]`` with q = 2 and bits = None sends 3 and -5 and leaves ``[[0, 0, 0, 1]]``.

        Args:
            blocks: fp32 ``[R, B]``, finite, changed in place.

        Returns:
            uint8 ``[R, row_bytes]``.
        """
        positions = None if self.dense else select(blocks, self.sent).long()
        values = blocks if positions is None else blocks.gather(1, positions)
        if self.bits is None:
            coded = [_view(values, torch.uint8)]
        else:
            positions, symbols, field = _quantize(self.bits, positions, values)
            coded = [pack(symbols, self.bits), _view(field, torch.uint8)]
            values = _values(self.bits, positions, symbols, field)
        if positions is not None:
            coded.insert(0, pack(positions, self._position_bits))
        message = torch.cat(coded, dim=1)
        add_entries(blocks, positions, values.neg())
        return message

    def read(self, message: Tensor) -> tuple[Tensor | None, Tensor]:
        """The entries that a message, uint8 ``[R, row_bytes]``, holds.

        Returns:
            Positions in the block, int64 ``[R, q]``; None is all of them, in order. And values, fp32 ``[R, q]``. A
            position that comes twice has the value 0 the second time.
        """
        places, codes, scale = message.split(self._field_bytes, dim=1)
        positions = None if self.dense else unpack(places, self._position_bits, self.sent)
        if self.bits is None:
            return positions, _view(codes, torch.float32)
        symbols = unpack(codes, self.bits, self.sent)
        return positions, _values(self.bits, positions, symbols, _view(scale, torch.int16))


def add_entries(blocks: Tensor, positions: Tensor | None, values: Tensor) -> None:
    """``blocks [R, B] += values [R, q]``, at their positions: what :meth:`Wire.read` returns."""
    if positions is None:
        blocks.add_(values)
    else:
        blocks.scatter_add_(1, positions, values)


def _from_scale(scale: Tensor) -> Tensor:
    """The fp32 numbers whose upper halves these are, int16."""
    return (scale.to(torch.int32) << 16).view(torch.float32)


def _levels(bits: int) -> int:
    """The largest multiple of a unit."""
    return (1 << (bits - 1)) - 1


def _quantize(bits: int, positions: Tensor | None, values: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Positions (the first one repeated where nothing is sent), codes, and scales int16 ``[R, 1]``."""
    magnitude, most = values.abs(), _levels(bits)
    if bits == 2 and positions is not None:
        field = _two_level_field(magnitude)
        low, high = _two_level_scale(field)
        symbols = 2 * (magnitude * 2 > low + high).long() + (values < 0).long()
        level = torch.where(symbols > 1, high, low)
        return torch.where(magnitude * 2 >= level, positions, positions[:, :1]), symbols, field
    if bits == 2:
        unit = magnitude.square().mean(dim=1, keepdim=True).sqrt_().mul_(_TERNARY_UNIT)
    else:
        unit = magnitude.amax(dim=1, keepdim=True) / most
    unit = torch.where(unit > LEAST_SCALE, unit, 0.0)
    field = ((unit.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)  # rounded up
    unit = _from_scale(field)
    steps = torch.where(unit > 0, values / unit, 0.0).round_().clamp_(-most, most)
    return positions, steps.long() + most, field


def _values(bits: int, positions: Tensor | None, symbols: Tensor, field: Tensor) -> Tensor:
    """fp32 ``[R, q]``: what codes and scales stand for; sender and receiver compute the same."""
    if bits > 2 or positions is None:
        return (symbols - _levels(bits)) * _from_scale(field)
    low, high = _two_level_scale(field)
    values = torch.where(symbols > 1, high, low)
    values = torch.where(symbols % 2 == 1, -values, values)
    values[:, 1:].masked_fill_(positions[:, 1:] == positions[:, :1], 0.0)
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


def _view(field: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes ``[R, n]`` as wider numbers, or the reverse; copied first, for a part of a row may begin anywhere."""
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
    places = torch.arange(bits, dtype=torch.int32, device=symbols.device)
    flat = ((symbols.int().unsqueeze(2) >> places) & 1).to(torch.uint8).flatten(1)
    flat = F.pad(flat, (0, -flat.shape[1] % 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=symbols.device)
    return (flat.view(len(flat), flat.shape[1] // 8, 8) * weights).sum(dim=2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The reverse of :func:`pack`: int64 ``[R, count]``."""
    eight = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flat = ((packed.unsqueeze(2) >> eight) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits, dtype=torch.int32, device=packed.device)
    return (flat.view(len(flat), count, bits) * weights).sum(dim=2)


# ------------------------------------------------------------------------------------------------------------- masks


def as_bits(sent: int, block_size: int) -> bool:
    """Whether a mask travels as a bit for each entry (:func:`pack_mask`): where that takes less than its positions."""
    return mask_bytes(sent, block_size) < sent * position_dtype(block_size).itemsize


def mask_bytes(sent: int, block_size: int) -> int:
    """Bytes that a row of a mask takes on its way."""
    return min(-(-block_size // 8), sent * position_dtype(block_size).itemsize)


def pack_mask(mask: Tensor, length: int) -> Tensor:
    """A mask ``[R, q]`` of blocks of ``length`` entries as a bit for each entry, the first one lowest.

    Example: ``[[9, 0]]`` with ``length=10`` gives ``[[1, 2]]``.

    Returns:
        uint8 ``[R, ceil(length / 8)]``.
    """
    packed = []
    for rows in row_slices(mask, length):
        marks = torch.zeros(len(mask[rows]), length, dtype=torch.int32, device=mask.device)
        packed.append(pack(marks.scatter_(1, mask[rows].long(), 1), 1))
    return torch.cat(packed)


@operation
def unpack_mask(bits: Tensor, sent: int, length: int) -> Tensor:
    """The reverse of :func:`pack_mask`; positions come in ascending order.

    Example: ``[[1, 2]]`` with ``sent=2`` and ``length=10`` gives ``[[0, 9]]``.

    Args:
        bits: uint8 ``[R, ceil(length / 8)]``, of which q are set in each row.
        sent: q.
        length: B.

    Returns:
        ``[R, q]``, dtype :func:`position_dtype`.
    """
    positions, chosen = torch.arange(length, dtype=torch.int32, device=bits.device), []
    for rows in row_slices(bits, length):
        marks = unpack(bits[rows], 1, length)
        places = torch.where(marks != 0, marks.cumsum(1) - 1, sent)  # all else shares a column behind them
        found = positions.new_empty(len(marks), sent + 1).scatter_(1, places, positions.expand_as(marks))
        chosen.append(found[:, :sent].to(position_dtype(length)))
    return torch.cat(chosen)


# ------------------------------------------------------------------------------------------------------------ groups

_GROUPS = Wire(GROUP, GROUP, 4)


def quantize(values: Tensor) -> Tensor:
    """Takes values out, rounded for the wire; the rounding error stays behind.

    Example: ``[3.5, -7, 0.25]`` has the unit 1. It sends 4, -7 and 0, the codes 11, 0 and 7, and keeps
    ``[-0.5, 0, 0.25]``. The message is ``[[0x0B, 0x77, ..., 0x77, 0x80, 0x3F]]``: 34 bytes.

    What is sent plus what is left is what was there, bit for bit. Ties are rounded to the even multiple of the unit.

    Args:
        values: fp32 ``[n]``, contiguous, magnitudes below 3.3e38, changed in place.

    Returns:
        uint8 ``[G, 34]``.
    """
    groups = F.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)
    message = _GROUPS.take(groups)
    values.copy_(groups.view(-1)[: len(values)])
    return message


@operation
def dequantize(message: Tensor, count: int) -> Tensor:
    """The values of a message, as they were sent. A zero is -0.0: adding it leaves every number as it is.

    Example: the message of :func:`quantize`'s example, with ``count=3``, is ``[[4, -7, -0.0]]``.

    Args:
        message: uint8 ``[S, G, 34]``, from :func:`quantize` of each shard.
        count: n.

    Returns:
        fp32 ``[S, n]``, contiguous.
    """
    shards, groups = message.shape[:2]
    values = _GROUPS.read(message.flatten(0, 1))[1].view(shards, groups * GROUP)[:, :count]
    return torch.where(values == 0, -0.0, values).contiguous()


@operation
def pack_values(residual: Tensor, mask: Tensor | None, values: Tensor, message: Tensor) -> None:
    """Packs values that have left a residual; what rounding leaves goes back into it.

    Args:
        residual: ``[S * R, B]``, of S shards; changed in place.
        mask: ``[S * R, q]``, where the values were; or None.
        values: fp32 ``[S * R, q]``, contiguous; they become what is sent (:func:`dequantize`).
        message: uint8 ``[S, G, 34]``, written.
    """
    left = values.clone()
    for packed, of_shard in zip(message, left.view(len(message), -1), strict=True):
        packed.copy_(quantize(of_shard))
    scatter_blocks(residual, mask, gather_blocks(residual, mask) + left)
    values.copy_(dequantize(message, values.numel() // len(message)).view(values.shape))


@operation
def quantize_with_error(error: Tensor, mask: Tensor | None, theta: Tensor, before: Tensor, scale: Tensor) -> Tensor:
    """:func:`quantize` of changes, with error feedback: what rounding left is sent too, what it leaves is kept.

    Args:
        error: ``[R, B]``, fp32 or fp64: what is left of each entry's changes. Its masked entries are changed in place.
            One that is not finite counts as 0: its parameter was not finite, and somebody may have mended that.
        mask: ``[R, q]`` or None.
        theta: ``[R, q]`` of the same dtype. It becomes the change that is sent (:func:`dequantize`).
        before: likewise; ``theta - before`` is the change. It may be ``theta`` itself.
        scale: 0-dim, or one for each row ``[R]``. 0 sends zeros and keeps the error as it is.

    Returns:
        uint8 ``[G, 34]``.
    """
    applied, kept = column(scale) != 0, gather_blocks(error, mask)
    kept = torch.where(kept.isfinite(), kept, 0.0)
    change = (theta - before).masked_fill_(theta == before, -0.0)  # also of infinities
    due = torch.where(applied, change + kept, -0.0)  # which leaves every number as it is
    sent = due.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    scatter_blocks(error, mask, torch.where(applied, (sent - due).neg(), kept))  # what fp32 rounds of fp64
    message = new_message(1, theta.numel(), theta.device)
    pack_values(error, mask, sent, message)
    theta.copy_(sent)
    return message[0]


def packed_bytes(count: int) -> int:
    """Bytes of a message of so many values."""
    return -(-count // GROUP) * GROUP_BYTES


def new_message(shards: int, count: int, device: torch.device) -> Tensor:
    """Room for ``count`` values of each shard, uint8 ``[S, G, 34]``: no two receivers' share a group."""
    return torch.empty(shards, packed_bytes(count) // GROUP_BYTES, GROUP_BYTES, dtype=torch.uint8, device=device)
