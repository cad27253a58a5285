"""Flags of all ranks, counted by the sum of one message: several in each fp32 number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def pack_flags(flags: Sequence[bool], ranks: int) -> Tensor:
    """Flags as fp32 numbers, several in each, that may be summed over ranks: see :func:`count_flags`. On the CPU.

    Example: ``[True, False, True]`` for 2 ranks are the digits 1, 0, 1 in base 3: ``[10.]``, for 1 + 0*3 + 1*9.
    """
    digits = _flags_per_number(ranks)
    padded = torch.zeros(packed_size(len(flags), ranks) * digits, dtype=torch.float64, device="cpu")
    padded[: len(flags)] = torch.tensor(flags, dtype=torch.float64, device="cpu")
    weights = (ranks + 1.0) ** torch.arange(digits, dtype=torch.float64, device="cpu")
    return (padded.view(-1, digits) @ weights).float()


def count_flags(sums: Tensor, count: int, ranks: int) -> Tensor:
    """How many ranks have set each of ``count`` flags, int64: the digits of sums of :func:`pack_flags`.

    Example: ``[13.]`` for 3 flags of 2 ranks gives ``[1, 1, 1]``.
    """
    weights = (ranks + 1) ** torch.arange(_flags_per_number(ranks), dtype=torch.int64, device=sums.device)
    return (sums.long().unsqueeze(1) // weights % (ranks + 1)).view(-1)[:count]


def packed_size(count: int, ranks: int) -> int:
    """Numbers that :func:`pack_flags` makes of ``count`` flags."""
    return -(-count // _flags_per_number(ranks))


def _flags_per_number(ranks: int) -> int:
    """Digits in base ``ranks + 1`` that fp32 holds exactly."""
    return max(1, int(24 / math.log2(ranks + 1)))
