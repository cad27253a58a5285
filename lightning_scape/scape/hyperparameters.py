"""Hyperparameters of parameter groups, as the tensors that a shard's rows are updated with, and which row has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Piece
from lightning_scape.core.parameters import Parameters


class Corrections(NamedTuple):
    """What divides the moments for their start at zero: 0-dim, or ``[R]`` where rows differ."""

    first: Tensor
    """``1 - beta1**t``, or 1."""
    second: Tensor
    """``1 - beta2**t``."""
    corrected: bool
    """Whether the first is not 1 everywhere."""


class RowHyperparameters:
    """Reads lr, betas, eps and weight decay off the groups, anew at each step: schedulers change them.

    Args:
        parameters: what the pieces are pieces of.
        pieces: what fills the shard's rows.
        rows: R, rows of the shard; those behind the last piece are fillers.
        bias_correction: for all groups; a group's own ``bias_correction`` (AdamS) adds to it.
    """

    def __init__(self, parameters: Parameters, pieces: Sequence[Piece], rows: int, bias_correction: bool) -> None:
        self._parameters = parameters
        self._pieces = pieces
        self._rows = rows
        self._bias_correction = bias_correction
        self._groups = list(dict.fromkeys(piece.segment.group for piece in pieces)) or [0]
        """Those with rows in this shard."""
        self._of_row: Tensor | None = None

    def at(
        self, step: Tensor, param_groups: Sequence[dict[str, Any]], dtype: torch.dtype, second_since: int = 0
    ) -> tuple[ops.Hyper, Corrections]:
        """Hyperparameters of the groups in this shard, and what divides the moments of its rows.

        Args:
            step: int32, the step of each row ``[R]``, or 0-dim.
            param_groups: the optimizer's.
            dtype: of the state.
            second_since: the step at whose end the second moment was zero.

        Returns:
            Hyperparameters, 0-dim where there is one group, else ``[G]``, for :meth:`group_of_row` to say which is
            whose; corrections, 0-dim where they are the same for all rows, else ``[R]``.
        """
        table = [self._numbers(param_groups[group]) for group in self._groups]
        columns = torch.tensor(table, dtype=torch.float64, device="cpu").to(self._parameters.device, non_blocking=True)
        lr, beta1, beta2, eps, decay, biased = columns.unbind(1)
        group = self.group_of_row()

        def by_row(column: Tensor) -> Tensor:
            return column[0] if group is None else column.index_select(0, group)

        first = torch.where(by_row(biased) != 0, 1 - by_row(beta1) ** step, 1.0)
        second = 1 - by_row(beta2) ** (step - second_since).clamp(min=1)
        hyper = ops.Hyper.of(dtype, lr, beta1, beta2, eps, decay)
        if group is None:
            hyper = ops.Hyper(*(numbers[0] for numbers in hyper))
        return hyper, Corrections(first.to(dtype), second.to(dtype), any(numbers[-1] for numbers in table))

    def group_of_row(self) -> Tensor | None:
        """int32 ``[R]``: the group of each row, counted among those in this shard; None where there is one."""
        device = self._parameters.device
        if len(self._groups) > 1 and (self._of_row is None or self._of_row.device != device):
            self._of_row = ops.to_device(self._spread(), device)
        return self._of_row

    def _numbers(self, group: dict[str, Any]) -> list[float]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        biased = self._bias_correction or bool(group.get("bias_correction"))
        # A learning rate that is a tensor on CUDA makes the CPU wait for it; a float does not.
        return [float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]), float(biased)]

    def _spread(self) -> Tensor:
        """:meth:`group_of_row`; fillers take the last piece's group."""
        counts = [piece.blocks for piece in self._pieces]
        counts[-1] += self._rows - sum(counts)
        numbers = [self._groups.index(piece.segment.group) for piece in self._pieces]
        of_piece = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        return torch.repeat_interleave(of_piece, torch.tensor(counts, dtype=torch.int64, device="cpu"))
