"""What differs from row to row: hyperparameters by group, steps by parameter; and which parameters take part."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.scape.state import Groups, Scale, ScapeState


class Rows:
    """Knows which parameter, and which group, each block is of.

    Args:
        layout: of the parameters.
        parameters: their number.
        rank: whose shard is updated.
    """

    def __init__(self, layout: Layout, parameters: int, rank: int) -> None:
        self._parameters, self._mine = parameters, layout.rows_of(rank)
        self._groups = sorted({segment.group for segment in layout.segments}) or [0]
        """Those with parameters."""
        self._layout = layout
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def scale(self, state: ScapeState, scale: Tensor, present: Tensor | None) -> Scale:
        """The scale of all that take part in a step; ``present`` is 1 for parameters with a gradient, None: all.

        One without a gradient on any rank is skipped.
        """
        if present is None:
            return Scale(scale, scale, scale, scale)
        if state.missed is None:
            state.missed = torch.zeros(self._parameters, dtype=torch.int32, device=state.step.device)
        parameters = scale * present
        blocks = parameters[self._of_blocks(scale.device)[0]]
        return Scale(scale, parameters, blocks, blocks[self._mine])

    def numbers(self, state: ScapeState, scale: Scale, groups: Groups) -> ops.RowNumbers:
        """What an update needs to know of my rows. Read from the groups anew at each step: schedulers change them."""
        device, dtype = state.step.device, state.exp_avg.dtype
        step = state.step + 1
        if state.missed is not None:
            step = step - state.missed[self._of_blocks(device)[0][self._mine]]
        group = self._of_blocks(device)[1][self._mine] if len(self._groups) > 1 else None
        table = torch.tensor([_numbers(groups, place) for place in self._groups], dtype=torch.float64, device="cpu")
        lr, beta1, beta2, eps, decay = table.to(device, non_blocking=True).unbind(1)
        first, second = (beta[0] if group is None else beta.index_select(0, group) for beta in (beta1, beta2))
        hyper = ops.Hyper.of(dtype, lr, beta1, beta2, eps, decay)
        if group is None:
            hyper = ops.Hyper(*(numbers[0] for numbers in hyper))
        corrections = (1 - first**step).to(dtype), (1 - second ** step.clamp(min=1)).to(dtype)
        return ops.RowNumbers(step, scale.mine, hyper, *corrections, group)

    def count(self, state: ScapeState, scale: Scale) -> None:
        """Counts the step, and the parameters that missed it."""
        taken = (scale.whole != 0).to(state.step.dtype)
        state.step += taken
        if state.missed is not None and scale.parameters.dim():
            state.missed += taken - (scale.parameters != 0).to(taken.dtype)

    def _of_blocks(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Parameter, int64 ``[blocks]``, and group, int32, of each block; made when asked for, for few steps need it.

        The fillers at the end take those of the last parameter.
        """
        if device not in self._tables:
            layout, segments = self._layout, self._layout.segments
            groups = [self._groups.index(segment.group) for segment in segments]
            of_each = torch.tensor([[segment.index for segment in segments], groups], dtype=torch.int64, device="cpu")
            counts = torch.tensor([segment.blocks for segment in segments], dtype=torch.int64, device="cpu")
            counts[-1:] += layout.blocks - layout.used_blocks
            parameter, group = of_each.repeat_interleave(counts, dim=1)
            self._tables = {device: (ops.to_device(parameter, device), ops.to_device(group.int(), device))}
        return self._tables[device]


def _numbers(groups: Groups, place: int) -> list[float]:
    """lr, betas, eps and weight decay of a group."""
    group = groups[place]
    # A learning rate that is a tensor on CUDA makes the CPU wait for it; a float does not.
    return [float(number) for number in (group["lr"], *group["betas"], group["eps"], group["weight_decay"])]
