"""What travels, in plain PyTorch: the part of :mod:`..naive` for entries of blocks, and for their messages.

Symbols of values in 4 bits: ``S`` shards, ``n`` values of each, ``G = ceil(n / 64)`` groups of each. A group of 64
consecutive values is one row of ``W = 34`` bytes: the codes, lowest bits first, then the scale, lowest byte first. A
shard's last group is filled up with zeros.

The scale is the upper half of an fp32, the *unit*: the largest magnitude of the group divided by 7, rounded up. The
code ``c`` stands for ``(c - 7) * unit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.parts import column, cut, row_slices

GROUP = 64
"""Values that share a scale."""
GROUP_BYTES = 34
"""W."""
LEVELS = 7
"""The largest multiple of a unit."""
LEAST_SCALE = 1e-30
"""A unit that is not larger becomes 0, and the group sends zeros: there are no subnormal numbers."""


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
def quantize(values: Tensor) -> Tensor:
    """Takes values out, rounded for the wire; the rounding error stays behind.

    Example: ``[3.5, -7, 0.25]`` has the unit 1. It sends 4, -7 and 0, the codes 11, 0 and 7, and keeps
    ``[-0.5, 0, 0.25]``. The message is ``[[0x0B, 0x77, ..., 0x77, 0x80, 0x3F]]``: 34 bytes.

    What is sent plus what is left is what was there, bit for bit. Ties are rounded to the even multiple of the unit.

    Args:
        values: fp32 ``[n]``, contiguous, magnitudes below 3.3e38, changed in place.

    Returns:
        uint8 ``[G, W]``.
    """
    groups = F.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)
    scale = to_scale(groups.abs().amax(dim=1) / LEVELS)
    unit = from_scale(scale).unsqueeze(1)
    steps = torch.where(unit > 0, groups / unit, 0.0).round_().clamp_(-LEVELS, LEVELS).to(torch.int32)
    values.copy_((groups - steps * unit).view(-1)[: len(values)])
    codes = (steps + LEVELS).to(torch.uint8)
    return torch.cat([codes[:, ::2] | codes[:, 1::2] << 4, scale.view(torch.uint8).view(-1, 2)], dim=1)


@operation
def dequantize(message: Tensor, count: int, out: Tensor | None = None) -> Tensor:
    """The values of a message, as they were sent. A zero is -0.0: adding it leaves every number as it is.

    Example: the message of :func:`quantize`'s example, with ``count=3``, is ``[[4, -7, -0.0]]``.

    Args:
        message: uint8 ``[S, G, W]``, from :func:`quantize` of each shard.
        count: n.
        out: where to put the result, contiguous; None is new memory.

    Returns:
        fp32 ``[S, n]``, contiguous.
    """
    values = torch.empty(len(message), count, device=message.device, dtype=torch.float32) if out is None else out
    for shard, given in zip(values, message, strict=True):
        for groups in row_slices(given):
            codes, scale = given[groups].split([GROUP // 2, 2], dim=1)
            steps = LEVELS - torch.stack([codes & 15, codes >> 4], dim=2).flatten(1).to(torch.int32)
            part = shard[groups.start * GROUP : groups.stop * GROUP]
            part.copy_((steps * -from_scale(scale.clone().view(torch.int16))).view(-1)[: len(part)])
    return values


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
        uint8 ``[G, W]``.
    """
    message = torch.empty(-(-theta.numel() // GROUP), GROUP_BYTES, dtype=torch.uint8, device=theta.device)
    for rows in row_slices(theta):  # whole groups, but for the last
        new, here, few = theta[rows], error[rows], cut(mask, rows)
        applied, kept = column(cut(scale, rows)) != 0, gather_blocks(here, few)
        kept = torch.where(kept.isfinite(), kept, 0.0)
        change = (new - before[rows]).masked_fill_(new == before[rows], -0.0)  # also of infinities
        due = torch.where(applied, change + kept, 0.0)
        sent = due.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        beyond = None if due.dtype == sent.dtype else due - sent  # of fp64
        packed = quantize(sent.view(-1))  # what rounding leaves stays in sent
        left = sent if beyond is None else beyond + sent
        scatter_blocks(here, few, torch.where(applied, left, kept))
        new.copy_(dequantize(packed.unsqueeze(0), new.numel()).view(new.shape))
        first = rows.start * theta.shape[1] // GROUP
        message[first : first + len(packed)] = packed
    return message


def to_scale(unit: Tensor) -> Tensor:
    """int16: the upper half of a unit's fp32, rounded up; 0 up to :data:`LEAST_SCALE`."""
    unit = torch.where(unit > LEAST_SCALE, unit, 0.0)
    return ((unit.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)


def from_scale(scale: Tensor) -> Tensor:
    """The reverse of :func:`to_scale`, fp32."""
    return (scale.to(torch.int32) << 16).view(torch.float32)


def packed_bytes(count: int) -> int:
    """Bytes of a message of so many values."""
    return -(-count // GROUP) * GROUP_BYTES


class ValueWire(NamedTuple):
    """Makes room for messages of values and changes ``[R, q]``, and reads them.

    What is left of values stays in the residual, because the sweep packs them; what is left of changes stays with the
    owner.
    """

    packed: bool
    """False: values travel as they are."""

    def message(self, rows: int, sent: int, shards: int, device: torch.device) -> Tensor | None:
        """Memory for the message of values ``[shards * rows, sent]``; None: they travel as they are.

        uint8 ``[shards, G, W]``: no two shards, one for each receiver, share a group.
        """
        if not self.packed:
            return None
        return torch.empty(shards, -(-rows * sent // GROUP), GROUP_BYTES, dtype=torch.uint8, device=device)

    def read(
        self, message: Tensor, rows: int, sent: int, shards: int = 1, some: Sequence[slice] | None = None
    ) -> Tensor:
        """The values of a message, fp32 ``[shards * rows, sent]``; or the message itself.

        ``some``: rows that are read, each slice those of whole shards; the others stay undefined. None: all.
        """
        if not self.packed:
            return message
        values = torch.empty(shards * rows, sent, dtype=torch.float32, device=message.device)
        parts, count = message.view(shards, len(message) // shards, GROUP_BYTES), rows * sent
        for part in [slice(0, shards * rows)] if some is None else some:
            here = parts[part.start // max(1, rows) : part.stop // max(1, rows)]
            dequantize(here, count, out=values[part].view(len(here), count))
        return values
