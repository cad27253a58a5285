"""What travels, in plain PyTorch: the part of :mod:`..naive` for entries of blocks, their messages and their mean.

Symbols of values in 8 or 4 bits: ``S`` shards, ``n`` values of each, ``G = ceil(n / 64)`` groups of each, ``b`` bits of
a value. A group of 64 consecutive values is one row of ``W = 8 b + 2`` bytes: the codes, lowest bits first, then the
scale, lowest byte first. A shard's last group is filled up with zeros.

The scale is the upper half of an fp32, the *unit*: the largest magnitude of the group divided by
``L = 2**(b-1) - 1``, rounded up. The code ``c`` stands for ``(c - L) * unit``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.parts import chunk, column, cut, row_slices

GROUP = 64
"""Values that share a scale: 66 bytes for 64 values in 8 bits, 34 in 4 bits."""
LEAST_SCALE = 1e-30
"""A unit that is not larger becomes 0, and the group sends zeros: there are no subnormal numbers."""
_SCALE_BYTES = 2


def group_bytes(bits: int) -> int:
    """W: bytes of a group of values."""
    return GROUP * bits // 8 + _SCALE_BYTES


def bits_in(width: int) -> int:
    """The reverse of :func:`group_bytes`."""
    return (width - _SCALE_BYTES) * 8 // GROUP


def gather_blocks(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``[R, q]``: the masked entries of ``matrix [R, B]`` (all of it, not copied, for ``mask=None``)."""
    return matrix if mask is None else matrix.gather(1, mask.long())


def scatter_blocks(matrix: Tensor, mask: Tensor | None, values: Tensor) -> None:
    """Overwrites masked entries of ``matrix [R, B]`` with ``values [R, q]``."""
    if mask is None:
        matrix.copy_(values)
    else:
        matrix.scatter_(1, mask.long(), values.to(matrix.dtype))


@operation
def quantize(values: Tensor, bits: int) -> Tensor:
    """Takes values out, rounded for the wire; the rounding error stays behind.

    Example: ``[[3.5, -7, 0.25]]`` in 4 bits has the unit 1. It sends 4, -7 and 0, the codes 11, 0 and 7, and keeps
    ``[[-0.5, 0, 0.25]]``. The message is ``[[[0x0B, 0x77, ..., 0x77, 0x80, 0x3F]]]``: 34 bytes.

    What is sent plus what is left is what was there, bit for bit. Ties are rounded to the even multiple of the unit.

    Args:
        values: fp32 ``[S, n]``, magnitudes below 3.3e38, changed in place.
        bits: 4 or 8.

    Returns:
        uint8 ``[S, G, W]``.
    """
    assert values.dtype == torch.float32
    levels = (1 << (bits - 1)) - 1
    shape = len(values), -(-values.shape[1] // GROUP), group_bytes(bits)
    message = torch.empty(shape, dtype=torch.uint8, device=values.device)
    for places, columns in _groups_and_columns(values):
        part = values[:, columns]
        groups = F.pad(part, (0, -part.shape[1] % GROUP)).view(-1, GROUP)
        scale = to_scale(groups.abs().amax(dim=1, keepdim=True) / levels)
        unit = from_scale(scale)
        steps = torch.where(unit > 0, groups / unit, 0.0).round_().clamp_(-levels, levels).to(torch.int32)
        part.copy_((groups - steps * unit).view(len(part), -1)[:, : part.shape[1]])
        codes = (steps + levels).to(torch.uint8)
        if bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        message[:, places] = torch.cat([codes, scale.view(torch.uint8)], dim=1).view(len(part), -1, group_bytes(bits))
    return message


def _groups_and_columns(values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices that cover the groups of ``values [S, n]``, the same of all shards; and the columns that these are."""
    shards, count = values.shape
    step = max(1, chunk(values) // (GROUP * max(1, shards)))
    for first in range(0, -(-count // GROUP), step):
        yield slice(first, first + step), slice(first * GROUP, min((first + step) * GROUP, count))


@operation
def dequantize(message: Tensor, bits: int, count: int, out: Tensor | None = None) -> Tensor:
    """The values of a message, as they were sent. A zero is -0.0: adding it leaves every number as it is.

    Example: the message of :func:`quantize`'s example, with ``count=3``, is ``[[4, -7, -0.0]]``.

    Args:
        message: uint8 ``[S, G, W]``, from :func:`quantize`.
        bits: 4 or 8.
        count: n.
        out: where to put the result, contiguous; None is new memory.

    Returns:
        fp32 ``[S, n]``, contiguous.
    """
    shards, levels = len(message), (1 << (bits - 1)) - 1
    values = torch.empty(shards, count, dtype=torch.float32, device=message.device) if out is None else out
    for places, columns in _groups_and_columns(values):
        codes, scale = message[:, places].split([GROUP * bits // 8, _SCALE_BYTES], dim=2)
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=3).flatten(2)
        unit = from_scale(scale.clone(memory_format=torch.contiguous_format).view(torch.int16))
        part = values[:, columns]
        part.copy_(((levels - codes.to(torch.int32)) * -unit).view(shards, -1)[:, : part.shape[1]])
    return values


@operation
def quantize_with_error(
    error: Tensor, mask: Tensor | None, theta: Tensor, before: Tensor, scale: Tensor, bits: int
) -> Tensor:
    """:func:`quantize` of :func:`changes`, with error feedback: what rounding left is sent too, what it leaves is kept.

    Args:
        error: ``[R, B]``, fp32 or fp64: what is left of each entry's changes. Its masked entries are changed in place.
            One that is not finite counts as 0: its parameter was not finite, and somebody may have mended that.
        mask: ``[R, q]`` or None.
        theta: ``[R, q]`` of the same dtype. It becomes the change that is sent (:func:`dequantize`).
        before: likewise; ``theta - before`` is the change. It may be ``theta`` itself.
        scale: 0-dim, or one for each row ``[R]``. 0 sends zeros and keeps the error as it is.
        bits: 4 or 8.

    Returns:
        uint8 ``[G, W]``.
    """
    message = torch.empty(-(-theta.numel() // GROUP), group_bytes(bits), dtype=torch.uint8, device=theta.device)
    for rows in row_slices(theta):  # whole groups, but for the last
        new, here, few = theta[rows], error[rows], cut(mask, rows)
        applied, kept = column(cut(scale, rows)) != 0, gather_blocks(here, few)
        kept = torch.where(kept.isfinite(), kept, 0.0)
        due = torch.where(applied, changes(new, before[rows], new.dtype) + kept, 0.0)
        sent = due.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        beyond = None if due.dtype == sent.dtype else due - sent  # of fp64
        packed = quantize(sent.view(1, -1), bits)  # what rounding leaves stays in sent
        left = sent if beyond is None else beyond + sent
        scatter_blocks(here, few, torch.where(applied, left, kept))
        new.copy_(dequantize(packed, bits, new.numel()).view(new.shape))
        first = rows.start * theta.shape[1] // GROUP
        message[first : first + packed.shape[1]] = packed[0]
    return message


def changes(theta: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
    """``theta - before``, both fp32 or fp64, rounded to ``dtype``; -0.0 where both are equal.

    Adding -0.0 leaves every number as it is, 0.0 and infinities too.
    """
    return (theta - before).masked_fill_(theta == before, -0.0).to(dtype)


def to_scale(unit: Tensor) -> Tensor:
    """int16: the upper half of a unit's fp32, rounded up; 0 up to :data:`LEAST_SCALE`."""
    unit = torch.where(unit > LEAST_SCALE, unit, 0.0)
    return ((unit.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)


def from_scale(scale: Tensor) -> Tensor:
    """The reverse of :func:`to_scale`, fp32."""
    return (scale.to(torch.int32) << 16).view(torch.float32)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a message of so many values."""
    return -(-count // GROUP) * group_bytes(bits)


class ValueWire(NamedTuple):
    """Makes room for messages of values and changes ``[R, q]``, and reads them.

    What is left of values stays in the residual, because the sweep packs them; what is left of changes stays with the
    owner.
    """

    bits: int | None
    """8 or 4; None: values travel as they are."""

    def message(self, rows: int, sent: int, shards: int, device: torch.device) -> Tensor | None:
        """Memory for the message of values ``[shards * rows, sent]``; None: they travel as they are.

        uint8 ``[shards, G, W]``: no two shards, one for each receiver, share a group.
        """
        if self.bits is None:
            return None
        shape = shards, -(-rows * sent // GROUP), group_bytes(self.bits)
        return torch.empty(shape, dtype=torch.uint8, device=device)

    def read(
        self, message: Tensor, rows: int, sent: int, shards: int = 1, some: Sequence[slice] | None = None
    ) -> Tensor:
        """The values of a message, fp32 ``[shards * rows, sent]``; or the message itself.

        ``some``: rows that are read, each slice those of whole shards; the others stay undefined. None: all.
        """
        if self.bits is None:
            return message
        values = torch.empty(shards * rows, sent, dtype=torch.float32, device=message.device)
        parts, count = message.view(shards, len(message) // shards, message.shape[1]), rows * sent
        for part in [slice(0, shards * rows)] if some is None else some:
            here = parts[part.start // max(1, rows) : part.stop // max(1, rows)]
            dequantize(here, bits_in(message.shape[1]), count, out=values[part].view(len(here), count))
        return values
