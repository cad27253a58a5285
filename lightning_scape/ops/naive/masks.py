"""Masks and proposals for them in plain PyTorch: the part of :mod:`..naive` that chooses entries of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape.ops.registry import operation

MAGNITUDE_BITS = 0x7FFFFFFF
"""All bits of an fp32 but its sign; as an integer, these order finite magnitudes (and rank inf, NaN above them)."""


def position_dtype(block_size: int) -> torch.dtype:
    """``torch.uint8`` for positions in blocks of up to 256 entries, ``torch.uint16`` above (to 65,536)."""
    return torch.uint8 if block_size <= 256 else torch.uint16


def proposal_bytes(proposed: int, block_size: int) -> int:
    """Bytes of a row of :func:`propose`."""
    return proposed * (position_dtype(block_size).itemsize + 1) + 1 if proposed else 0


def proposed_in(width: int, block_size: int) -> int:
    """The reverse of :func:`proposal_bytes`."""
    return (width - 1) // (position_dtype(block_size).itemsize + 1)


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
    bits = statistic.float().view(torch.int32) & (MAGNITUDE_BITS & ~low)
    keys = bits | (low - torch.arange(length, dtype=torch.int32, device=bits.device))
    return (low - (keys.topk(sent, dim=1).values & low)).to(position_dtype(length))


def as_bits(sent: int, block_size: int) -> bool:
    """Whether a mask travels as a bit for each entry (:func:`pack_mask`): where that takes less than its positions."""
    return mask_bytes(sent, block_size) < sent * position_dtype(block_size).itemsize


def mask_bytes(sent: int, block_size: int) -> int:
    """Bytes that a row of a mask takes on its way."""
    return min(-(-block_size // 8), sent * position_dtype(block_size).itemsize)


@operation
def pack_mask(mask: Tensor, length: int) -> Tensor:
    """A mask ``[R, q]`` of blocks of ``length`` entries as a bit for each entry, the first one lowest.

    Example: ``[[9, 0]]`` with ``length=10`` gives ``[[1, 2]]``.

    Returns:
        uint8 ``[R, ceil(length / 8)]``.
    """
    marks = torch.zeros(len(mask), -(-length // 8) * 8, dtype=torch.uint8, device=mask.device)
    marks.scatter_(1, mask.long(), 1)
    ones = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (marks.view(len(mask), marks.shape[1] // 8, 8) * ones).sum(2, dtype=torch.uint8)


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
    marks = (bits.unsqueeze(2) >> eight & 1).flatten(1)[:, :length] != 0
    keys = torch.where(marks, length - torch.arange(length, dtype=torch.int32, device=bits.device), 0)
    return (length - keys.topk(sent, dim=1).values).to(position_dtype(length))


@operation
def propose(residual: Tensor, proposed: int) -> Tensor:
    """A rank's proposals: the ``proposed`` largest magnitudes of each block, as one row of bytes (docs/design.md, 3).

    A row holds the positions (:func:`position_dtype`), then the values as int8 in units of ``s / 127``, then the byte
    ``log2(s) + 127``; ``s`` is the smallest power of two above the row's largest magnitude.

    Example: ``[[3, -5, 0, 0]]`` with ``proposed=2`` gives ``[[1, 0, -79, 48, 130]]`` (as int8 where signed): -5 and 3
    in units of 8/127.

    Args:
        residual: ``[R, B]`` float, finite.
        proposed: V, 1 .. B.

    Returns:
        uint8 ``[R, V * (1 or 2) + V + 1]``.
    """
    return proposals_of(residual, select(residual, proposed))


def proposals_of(residual: Tensor, chosen: Tensor) -> Tensor:
    """:func:`propose`, for the positions ``chosen [R, V]``, largest magnitude first."""
    values = residual.gather(1, chosen.long()).float()
    exponent = ((values[:, :1].abs().view(torch.int32) >> 23) + 1).clamp(max=254)
    ratio = values * (127 / (exponent << 23).view(torch.float32))  # inf, or NaN, where a row holds next to nothing
    # By way of int32: of what int8 does not hold, a GPU makes another number than a CPU.
    codes = torch.where(ratio.abs() < 256, ratio, 0.0).round().to(torch.int32).to(torch.int8)
    return torch.cat([chosen.view(torch.uint8), codes.view(torch.uint8), exponent.to(torch.uint8)], dim=1)


@operation
def merge(residual: Tensor, proposals: Tensor, owner: int, proposed: int, sent: int) -> Tensor:
    """The next mask of a shard, from its owner's residual and what the other ranks' proposals add to it.

    Args:
        residual: ``[R, B]``, the owner's.
        proposals: ``[N, R, W]``, from :func:`propose`; that of the owner is not read.
        owner: the rank whose shard it is.
        proposed: V.
        sent: q.

    Returns:
        ``[R, q]``, as :func:`select` gives it for the sum.
    """
    total = residual.to(torch.float32, copy=True)
    for rank, proposal in enumerate(proposals):
        if rank != owner:
            total.scatter_add_(1, *_read_proposal(proposal, proposed, residual.shape[1]))
    return select(total, sent)


def _read_proposal(proposal: Tensor, proposed: int, length: int) -> tuple[Tensor, Tensor]:
    """Positions (int64) and values (fp32) of a :func:`propose`, ``[R, V]`` each."""
    width = proposal.shape[1] - proposed - 1
    there = proposal[:, :width].clone(memory_format=torch.contiguous_format)  # a row may begin anywhere
    positions = there.view(position_dtype(length)).long()
    codes = proposal[:, width:-1].contiguous().view(torch.int8).float()
    unit = (proposal[:, -1:].to(torch.int32) << 23).view(torch.float32) / 127
    return positions, codes * unit
