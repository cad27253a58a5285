"""One rank's work on a part of the blocks in a step: fold, compact, rank. One pass over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Piece
from lightning_scape.core.tensors import piece_views
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.mask import Ranking
from lightning_scape.scape.participation import Participation
from lightning_scape.scape.state import ScapeState
from lightning_scape.wire.values import ValueWire

SAMPLE_INTERVAL = 8
"""AdamS: steps from one sample of the gradient's mean square to the next."""
SAMPLE_WEIGHT = 0.1
"""AdamS: of the newest sample, a memory of about 80 steps."""

Grads = Sequence[Tensor | None]
"""The flat gradient of every parameter; None where it has none."""


class RemoteRegion:
    """The shards of all other ranks: their owners are sent what leaves the residual here.

    Args:
        layout: blocks and shards.
        rank: this rank.
        config: the wire dtype is used.
    """

    def __init__(self, layout: Layout, rank: int, config: ScapeConfig) -> None:
        self._config, self._region, self._own = config, layout.remote(rank), layout.rows_of(rank)
        self._blocks = layout.blocks if self._region.rows else 0  # none with one rank
        self.rows = self._region.rows
        """Of all blocks."""
        self.pieces = self._region.pieces
        self.wire = ValueWire(config.wire_bits) if config.wire_bits is not None and layout.world_size > 1 else None
        """Packs the values; None where they travel as they are."""
        self._shards = layout.world_size

    def pack(self, state: ScapeState, mask: Tensor | None, values: Tensor, device: torch.device) -> Tensor:
        """The message of the values that have left the residual, on ``device``; ``values`` may be changed in place.

        The rounding error goes back into the residual: what is sent plus what is left is what was there, bit for bit.
        """
        if self.wire is None:
            return values.to(device)
        message = self.wire.pack(values, self._shards)  # what rounding leaves stays in values
        part = None if mask is None else mask[: self._blocks]
        ops.scatter_blocks(state.residual[: self._blocks], part, values, add=True)
        return message.to(device)

    def sent(self, message: Tensor, sent: int) -> list[Tensor]:
        """The values of a message as their owners will read them, ``[*, sent]`` each."""
        if self.wire is not None:
            message = self.wire.read(message, self._blocks // self._shards, sent, self._shards)
        return [message[rows] for rows in self.rows]

    def fold(self, state: ScapeState, grads: Grads, part: Participation, clip_value: float | None) -> None:
        """``residual += scale * gradient``."""
        pieces = self._region.pieces
        ops.fold(piece_views(state.residual, pieces), _parts(grads, pieces), part.scale, clip_value)

    def sweep(
        self,
        state: ScapeState,
        grads: Grads | None,
        mask: Tensor | None,
        part: Participation,
        ranking: Ranking | None,
        clip_value: float | None,
    ) -> Tensor:
        """Folds, compacts and proposes; returns the values for the other ranks, ``[N*R, q]``, zero in the own rows.

        ``grads`` is None where they have been folded before. With one rank there is nothing to do: ``[0, q]``.
        """
        residual, length = state.residual[: self._blocks], state.residual.shape[1]
        sent = length if mask is None else mask.shape[1]
        values = torch.empty(self._blocks, sent, dtype=self._config.values_dtype, device=residual.device)
        ops.sweep(
            self._region,
            residual,
            None if grads is None else _parts(grads, self._region.pieces),
            part.blocks,
            None if mask is None else mask[: self._blocks],
            values,
            clip_value=clip_value,
            proposals=None if ranking is None else ranking.proposals,
        )
        values[self._own] = 0  # NCCL may look for NaN in its input
        return values


class LocalRegion:
    """This rank's own shard: its owner also keeps statistics of its own gradient there.

    Args:
        layout: blocks and shards.
        rank: this rank.
        config: wire dtype and statistics.
        param_groups: the optimizer's, whose betas may change.
    """

    def __init__(
        self, layout: Layout, rank: int, config: ScapeConfig, param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._config, self.param_groups, self._ranks = config, param_groups, layout.world_size
        self._region, self.rows = layout.local(rank), layout.rows_of(rank)
        self.pieces = self._region.pieces

    def fold(self, state: ScapeState, grads: Grads, part: Participation, clip_value: float | None) -> None:
        """``residual += scale * gradient``, and the owner's statistics, for a step that is going to be sparse."""
        parts, pieces = _parts(grads, self._region.pieces), self._region.pieces
        ops.fold(piece_views(state.residual[self.rows], pieces), parts, part.scale, clip_value)
        moment = self._second_moment(state, sparse=True)
        if moment is not None:
            by_row = part.of_rows(self.rows)
            scale = by_row
            if by_row.dim():
                first_rows = torch.tensor([piece.row for piece in pieces], dtype=torch.int64, device="cpu")
                scale = by_row.index_select(0, ops.to_device(first_rows, by_row.device))
            ops.accumulate_exp_avg_sq(
                piece_views(moment.exp_avg_sq, pieces), parts, moment.weights, moment.ranks, scale, clip_value
            )
        self._accumulate_first_moment(state, parts, part, clip_value)

    def sweep(
        self,
        state: ScapeState,
        grads: Grads | None,
        mask: Tensor | None,
        part: Participation,
        ranking: Ranking | None,
        clip_value: float | None,
    ) -> Tensor:
        """Folds, keeps statistics, compacts and ranks; returns this rank's values for its own shard, ``[R, q]``.

        ``grads`` is None where they have been folded before.
        """
        residual, scale = state.residual[self.rows], part.of_rows(self.rows)
        own = None if mask is None else mask[self.rows]
        sent = residual.shape[1] if own is None else own.shape[1]
        values = torch.empty(len(residual), sent, dtype=self._config.values_dtype, device=residual.device)
        parts = None if grads is None else _parts(grads, self._region.pieces)
        ops.sweep(
            self._region,
            residual,
            parts,
            scale,
            own,
            values,
            clip_value=clip_value,
            second_moment=None if grads is None else self._second_moment(state, sparse=mask is not None),
            next_mask=None if ranking is None else ranking.own,
        )
        if parts is not None:
            self._accumulate_first_moment(state, parts, part, clip_value)
        self._clear_sum(state, own, scale)
        return values

    def _second_moment(self, state: ScapeState, *, sparse: bool) -> ops.SecondMoment | None:
        """The mean square that the own gradient goes into in this step, if any."""
        pieces = self._region.pieces
        # Where everything is sent, AdamW's update takes the averaged gradient itself.
        if state.exp_avg_sq is not None and sparse:
            weights = [1 - float(self.param_groups[piece.segment.group]["betas"][1]) for piece in pieces]
            return ops.SecondMoment(state.exp_avg_sq, weights, self._ranks)
        if state.local_exp_avg_sq is not None and (state.calls % SAMPLE_INTERVAL == 0 or not state.local_samples):
            state.local_samples += 1
            state.sampled = True
            weight = max(SAMPLE_WEIGHT, 1 / state.local_samples)
            return ops.SecondMoment(state.local_exp_avg_sq, [weight] * len(pieces), self._ranks)
        return None

    def _accumulate_first_moment(
        self, state: ScapeState, parts: Grads, part: Participation, clip_value: float | None
    ) -> None:
        """With ``mask_statistic="first_moment"``: one step of the own first moment, and its sum."""
        if state.local_exp_avg is None or state.local_exp_avg_sum is None:
            return
        pieces, by_row = self._region.pieces, part.of_rows(self.rows)
        moments, sums = piece_views(state.local_exp_avg, pieces), piece_views(state.local_exp_avg_sum, pieces)
        for piece, moment, total, given in zip(pieces, moments, sums, parts, strict=True):
            grad = torch.zeros_like(moment) if given is None else given
            beta1 = float(self.param_groups[piece.segment.group]["betas"][0])
            scale = by_row[piece.row] if by_row.dim() else by_row
            ops.accumulate_exp_avg(moment, total, grad, beta1, scale, clip_value)

    def _clear_sum(self, state: ScapeState, own: Tensor | None, scale: Tensor) -> None:
        """The sum of first moments begins anew where an entry is sent."""
        if state.local_exp_avg_sum is None:
            return
        seen = ops.gather_blocks(state.local_exp_avg_sum, own)
        taken = scale.to(seen.device) != 0
        cleared = torch.where(taken.unsqueeze(1) if taken.dim() else taken, 0.0, seen)
        ops.scatter_blocks(state.local_exp_avg_sum, own, cleared)


def _parts(grads: Grads, pieces: Sequence[Piece]) -> list[Tensor | None]:
    """The gradient of each piece; of a whole parameter, as it is: a slice would take longer than small ones' work."""
    parts: list[Tensor | None] = []
    for piece in pieces:
        grad = grads[piece.segment.index]
        if grad is not None and piece.numel < piece.segment.numel:
            grad = grad[piece.of_parameter]
        parts.append(grad)
    return parts
