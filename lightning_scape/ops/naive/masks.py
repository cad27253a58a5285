"""Rows of blocks in plain PyTorch, some at a time, for no temporary has the size of the parameters; and masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_scape.ops.dispatch import operation

_TOGETHER = 64
"""Rows that are never parted, so that values in groups of as many are not."""
MAGNITUDE_BITS = 0x7FFFFFFF
"""All bits of an fp32 but its sign; as an integer, these order finite magnitudes (and rank inf, NaN above them)."""


def chunk(tensor: Tensor) -> int:
    """Entries at a time: few enough for a core's cache; on a device, enough to hide the cost of a call."""
    return 1 << 18 if tensor.device.type == "cpu" else 1 << 24


def row_slices(matrix: Tensor, rows: slice | None = None) -> Iterator[slice]:
    """Slices, one at least, that cover the rows of ``matrix [R, columns]``, or some of them."""
    start, stop = (0, matrix.shape[0]) if rows is None else (rows.start, rows.stop)
    step = max(1, chunk(matrix) // (_TOGETHER * max(1, matrix.shape[1]))) * _TOGETHER
    for first in range(start, stop, step) or [start]:
        yield slice(first, min(first + step, stop))


def cut(values: Any, rows: slice | int) -> Any:
    """Some rows of a tensor, or one; what is 0-dim, or no tensor, is the same for all."""
    return values[rows] if isinstance(values, Tensor) and values.dim() else values


def column(values: Tensor, index: Tensor | slice = slice(None)) -> Tensor:
    """Numbers of rows, ``[R]``, as a column ``[R, 1]``; a 0-dim tensor, the same for all rows, stays as it is."""
    return values[index].unsqueeze(1) if values.dim() else values


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """A table that was made on the CPU, for which the CPU does not wait: the copy is out of pinned memory on CUDA."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


# --------------------------------------------------------------------------------------------------------- masks


def position_dtype(block_size: int) -> torch.dtype:
    """``torch.uint8`` for positions in blocks of up to 256 entries, ``torch.uint16`` above (to 65,536)."""
    return torch.uint8 if block_size <= 256 else torch.uint16


@operation
def select(statistic: Tensor, sent: int) -> Tensor:
    """Positions of the ``sent`` largest magnitudes of each block, largest first (docs/design.md, 3.1).

    Magnitude and position make one integer key: the bits of ``|x|``, whose lowest bits (as many as a position needs)
    give way to the position. So magnitudes that agree in all but those bits count as equal (for B = 200: to one part
    in 2**15), equal ones go to the lowest position first, and every implementation chooses the same entries. Pads hold
    0 and stand last in their block, hence are chosen only when no entry is left, and after all entries.

    Example: ``[[3, -5, 0, 0], [0, 0, 0, 0]]`` with ``sent=2`` gives ``[[1, 0], [0, 1]]``.

    Args:
        statistic: ``[R, B]`` float; its sign does not count.
        sent: q, 1 .. B.

    Returns:
        ``[R, q]``, dtype :func:`position_dtype`.
    """
    length = statistic.shape[1]
    assert 1 <= sent <= length
    low = (1 << (length - 1).bit_length()) - 1
    places = low - torch.arange(length, dtype=torch.int32, device=statistic.device)
    chosen = []
    for rows in row_slices(statistic):
        keys = statistic[rows].float().view(torch.int32) & (MAGNITUDE_BITS & ~low) | places
        chosen.append((low - (keys.topk(sent, dim=1).values & low)).to(position_dtype(length)))
    return torch.cat(chosen)


def gather_blocks(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``[R, q]``: the masked entries of ``matrix [R, B]`` (all of it, not copied, for ``mask=None``)."""
    return matrix if mask is None else matrix.gather(1, mask.long())


def scatter_blocks(matrix: Tensor, mask: Tensor | None, values: Tensor) -> None:
    """Overwrites masked entries of ``matrix [R, B]`` with ``values [R, q]``."""
    if mask is None:
        matrix.copy_(values)
    else:
        matrix.scatter_(1, mask.long(), values.to(matrix.dtype))


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
    width, ones = -(-length // 8), 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    packed = []
    for rows in row_slices(mask):
        marks = torch.zeros(len(mask[rows]), 8 * width, dtype=torch.uint8, device=mask.device)
        marks.scatter_(1, mask[rows].long(), 1)
        packed.append((marks.view(-1, width, 8) * ones).sum(2, dtype=torch.uint8))
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
    eight = torch.arange(8, dtype=torch.uint8, device=bits.device)
    places = length - torch.arange(length, dtype=torch.int32, device=bits.device)
    chosen = []
    for rows in row_slices(bits):
        marks = (bits[rows].unsqueeze(2) >> eight & 1).flatten(1)[:, :length] != 0
        keys = torch.where(marks, places, 0)
        chosen.append((length - keys.topk(sent, dim=1).values).to(position_dtype(length)))
    return torch.cat(chosen)
