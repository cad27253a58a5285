"""What differs from row to row: hyperparameters by group, steps by parameter; and which parameters take part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Piece
from lightning_scape.core.parameters import Parameters
from lightning_scape.scape.state import Scale, ScapeState


class ByRow:
    """A number for each row, on the device where it is asked for.

    Args:
        numbers: one for each piece, in order.
        blocks: rows of each piece.
        rows: all rows; those behind the last piece are fillers, and take its number (0 without pieces).
        dtype: of the tensor.
    """

    def __init__(self, numbers: Sequence[int], blocks: Sequence[int], rows: int, dtype: torch.dtype) -> None:
        self._numbers = [*numbers, numbers[-1] if numbers else 0]
        self._counts = [*blocks, rows - sum(blocks)]
        self._dtype = dtype
        self._table: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """``[rows]``; made when it is first asked for, for few steps need it."""
        if self._table is None or self._table.device != device:
            numbers = torch.tensor(self._numbers, dtype=self._dtype, device="cpu")
            counts = torch.tensor(self._counts, dtype=torch.int64, device="cpu")
            self._table = ops.to_device(torch.repeat_interleave(numbers, counts), device)
        return self._table


class Participants:
    """Finds out which parameters take part, and counts missed steps. One without a gradient on any rank is skipped.

    Args:
        layout: of the parameters.
        parameters: their number.
        my_rows: the blocks that this rank owns.
    """

    def __init__(self, layout: Layout, parameters: int, my_rows: slice) -> None:
        self._parameters, self._my_rows = parameters, my_rows
        segments = layout.segments
        self._of_block = ByRow(
            [each.index for each in segments], [each.blocks for each in segments], layout.blocks, torch.int64
        )
        """The place of each block's parameter."""

    def of(self, state: ScapeState, scale: Tensor, present: Tensor | None) -> Scale:
        """The scale of all that take part in a step; ``present`` is 1 for parameters with a gradient, None: all."""
        if present is None:
            return Scale(scale, scale, scale, scale)
        if state.missed is None:
            state.missed = torch.zeros(self._parameters, dtype=torch.int32, device=state.step.device)
        parameters = scale * present
        blocks = parameters[self._of_block.on(scale.device)]
        return Scale(scale, parameters, blocks, blocks[self._my_rows])

    def steps(self, state: ScapeState) -> Tensor:
        """int32 ``[R]``, this step's number in the count of each row's parameter; 0-dim if no step was ever missed."""
        if state.missed is None:
            return state.step + 1
        return state.step - state.missed[self._of_block.on(state.step.device)[self._my_rows]] + 1

    def count(self, state: ScapeState, scale: Scale) -> None:
        """Counts the step, and the parameters that missed it."""
        taken = (scale.whole != 0).to(state.step.dtype)
        state.step += taken
        if state.missed is not None and scale.parameters.dim():
            state.missed += taken - (scale.parameters != 0).to(taken.dtype)


class Corrections(NamedTuple):
    """Divisors that correct the moments for their start at zero: 0-dim, or ``[R]`` where rows differ."""

    first: Tensor
    """``1 - beta1**t``."""
    second: Tensor
    """``1 - beta2**t``."""


class RowHyperparameters:
    """Reads lr, betas, eps and weight decay from the groups, anew at each step: schedulers change them.

    Args:
        parameters: those of the pieces.
        pieces: what fills the shard's rows.
        rows: R, rows of the shard.
    """

    def __init__(self, parameters: Parameters, pieces: Sequence[Piece], rows: int) -> None:
        self._parameters = parameters
        self._groups = list(dict.fromkeys(piece.segment.group for piece in pieces)) or [0]
        """Those with rows in this shard."""
        numbers = [self._groups.index(piece.segment.group) for piece in pieces]
        self._of_row = ByRow(numbers, [piece.blocks for piece in pieces], rows, torch.int32)

    def at(
        self, step: Tensor, param_groups: Sequence[dict[str, Any]], dtype: torch.dtype
    ) -> tuple[ops.Hyper, Corrections]:
        """Hyperparameters of the groups in this shard, and what divides the moments of its rows.

        Args:
            step: int32, the step of each row ``[R]``, or 0-dim.
            param_groups: the optimizer's.
            dtype: of the state.

        Returns:
            Hyperparameters, 0-dim where there is one group, else ``[G]``, for :meth:`group_of_row` to say which is
            whose; corrections, 0-dim where they are the same for all rows, else ``[R]``.
        """
        table = [self._numbers(param_groups[group]) for group in self._groups]
        columns = torch.tensor(table, dtype=torch.float64, device="cpu").to(self._parameters.device, non_blocking=True)
        lr, beta1, beta2, eps, decay = columns.unbind(1)
        group = self.group_of_row()

        def by_row(column: Tensor) -> Tensor:
            return column[0] if group is None else column.index_select(0, group)

        first = 1 - by_row(beta1) ** step
        second = 1 - by_row(beta2) ** step.clamp(min=1)
        hyper = ops.Hyper.of(dtype, lr, beta1, beta2, eps, decay)
        if group is None:
            hyper = ops.Hyper(*(numbers[0] for numbers in hyper))
        return hyper, Corrections(first.to(dtype), second.to(dtype))

    def group_of_row(self) -> Tensor | None:
        """int32 ``[R]``: the group of each row, counted among those in this shard; None where there is one."""
        return self._of_row.on(self._parameters.device) if len(self._groups) > 1 else None

    def _numbers(self, group: dict[str, Any]) -> list[float]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        # A learning rate that is a tensor on CUDA makes the CPU wait for it; a float does not.
        return [float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"])]
