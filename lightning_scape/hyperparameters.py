"""Hyperparameters of parameter groups, as the tensors that a shard's rows are updated with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.layout import Piece
from lightning_scape.parameters import Parameters


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

    def at(
        self, step: Tensor, param_groups: Sequence[dict[str, Any]], dtype: torch.dtype
    ) -> tuple[ops.Hyper, Tensor | float]:
        """Hyperparameters and the divisor of first moments (``1 - beta1**step``, or 1) for each row.

        0-dim where all rows have the same, else ``[R, 1]``.
        """
        groups = [piece.segment.group for piece in self._pieces]
        distinct = list(dict.fromkeys(groups)) or [0]
        table = [self._numbers(param_groups[group]) for group in distinct]
        columns = torch.tensor(table, dtype=torch.float64).to(self._parameters.device, non_blocking=True)
        if len(distinct) == 1:
            *values, biased = columns[0].unbind()
        else:
            of_row = self._spread([distinct.index(group) for group in groups])
            *values, biased = columns.index_select(0, of_row).split(1, dim=1)
        hyper = ops.Hyper.of(dtype, *values)
        if not any(numbers[-1] for numbers in table):
            return hyper, 1.0
        return hyper, torch.where(biased != 0, 1 - values[1] ** step, 1.0).to(dtype)

    def _numbers(self, group: dict[str, Any]) -> list[float]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        biased = self._bias_correction or bool(group.get("bias_correction"))
        # A learning rate that is a tensor on CUDA makes the host wait for it; a float does not.
        return [float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]), float(biased)]

    def _spread(self, of_piece: Sequence[int]) -> Tensor:
        """``[R]`` int64: a number per piece, repeated for its rows; fillers take the last piece's."""
        counts = [piece.blocks for piece in self._pieces]
        counts[-1] += self._rows - sum(counts)
        spread = torch.repeat_interleave(torch.tensor(of_piece, device="cpu"), torch.tensor(counts, device="cpu"))
        return spread.to(self._parameters.device, non_blocking=True)
