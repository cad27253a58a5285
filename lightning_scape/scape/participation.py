"""Which parameters take part in a step. One without a gradient on every rank is left alone, as torch leaves it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.scape.state import ScapeState


@dataclass(frozen=True)
class Participation:
    """The step's scale: 0-dim where all parameters take part, else one number each. 0 is left alone."""

    scale: Tensor
    """0-dim: the clipping factor, 0 for a step that is skipped."""
    parameters: Tensor
    """``[parameters]``, or 0-dim."""
    blocks: Tensor
    """``[blocks]``, or 0-dim."""

    def of_rows(self, rows: slice) -> Tensor:
        """Of some blocks."""
        return self.blocks[rows] if self.blocks.dim() else self.scale


class Participants:
    """Finds out who takes part, and counts missed steps.

    Args:
        layout: of the parameters.
        parameters: their number.
    """

    def __init__(self, layout: Layout, parameters: int) -> None:
        self._layout, self._parameters = layout, parameters
        self._of_block: Tensor | None = None

    def of(self, state: ScapeState, scale: Tensor, present: Tensor | None) -> Participation:
        """Who takes part in a step with this scale; ``present`` is 1 for parameters with a gradient, None: all."""
        if present is None:
            return Participation(scale, scale, scale)
        if state.missed is None:
            state.missed = torch.zeros(self._parameters, dtype=torch.int32, device=state.step.device)
        parameters = scale * present
        return Participation(scale, parameters, parameters[self._of_blocks(scale.device)])

    def steps(self, state: ScapeState, rows: slice) -> Tensor:
        """int32, the number of this step by each row's own count; 0-dim if no step was ever missed."""
        return (state.step if state.missed is None else state.steps_of(self._of_blocks(state.step.device)[rows])) + 1

    def count(self, state: ScapeState, participation: Participation) -> None:
        """Counts the step, and who missed it."""
        taken = (participation.scale != 0).to(state.step.dtype)
        state.step += taken
        if state.missed is not None and participation.parameters.dim():
            state.missed += taken - (participation.parameters != 0).to(taken.dtype)

    def _of_blocks(self, device: torch.device) -> Tensor:
        """int64 ``[blocks]``: the place of each block's parameter; fillers take the last one's."""
        if self._of_block is None or self._of_block.device != device:
            self._of_block = ops.to_device(_parameter_of_block(self._layout), device)
        return self._of_block


def _parameter_of_block(layout: Layout) -> Tensor:
    counts = [segment.blocks for segment in layout.segments]
    if not counts:
        return torch.zeros(layout.blocks, dtype=torch.int64, device="cpu")
    counts[-1] += layout.blocks - sum(counts)
    places = torch.tensor([segment.index for segment in layout.segments], dtype=torch.int64, device="cpu")
    return torch.repeat_interleave(places, torch.tensor(counts, dtype=torch.int64, device="cpu"))


# ------------------------------------------------------------------------------------- flags, summed over ranks


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
