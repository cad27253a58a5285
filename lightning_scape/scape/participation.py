"""Which parameters take part in a step. One that has no gradient on any rank is skipped, as in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.scape.state import Scale, ScapeState


class Participants:
    """Finds out who takes part, and counts missed steps.

    Args:
        layout: of the parameters.
        parameters: their number.
        my_rows: the blocks that this rank owns.
    """

    def __init__(self, layout: Layout, parameters: int, my_rows: slice) -> None:
        self._layout, self._parameters, self._my_rows = layout, parameters, my_rows
        self._of_block: Tensor | None = None

    def of(self, state: ScapeState, scale: Tensor, present: Tensor | None) -> Scale:
        """Who takes part in a step with this scale; ``present`` is 1 for parameters with a gradient, None: all."""
        if present is None:
            return Scale(scale, scale, scale, scale)
        if state.missed is None:
            state.missed = torch.zeros(self._parameters, dtype=torch.int32, device=state.step.device)
        parameters = scale * present
        blocks = parameters[self._of_blocks(scale.device)]
        return Scale(scale, parameters, blocks, blocks[self._my_rows])

    def steps(self, state: ScapeState) -> Tensor:
        """int32, the number of this step by the count of each of my rows; 0-dim if no step was ever missed."""
        if state.missed is None:
            return state.step + 1
        return state.step - state.missed[self._of_blocks(state.step.device)[self._my_rows]] + 1

    def count(self, state: ScapeState, scale: Scale) -> None:
        """Counts the step, and who missed it."""
        taken = (scale.whole != 0).to(state.step.dtype)
        state.step += taken
        if state.missed is not None and scale.parameters.dim():
            state.missed += taken - (scale.parameters != 0).to(taken.dtype)

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
