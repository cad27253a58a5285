"""A rank's part of a step: what it sends to the owners of other shards, and what it does as the owner of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Region
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import piece_views
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.rows import Participants, RowHyperparameters
from lightning_scape.scape.state import ScapeState, Step
from lightning_scape.wire.values import ValueWire


class Outgoing:
    """The shards of all other ranks: what this rank sends to their owners, folded, compacted and packed.

    Args:
        layout: blocks and shards.
        rank: this rank.
        config: the wire dtype is used.
    """

    def __init__(self, layout: Layout, rank: int, config: ScapeConfig) -> None:
        self.region = layout.remote(rank)
        """The shards of the other ranks; rows count from block 0."""
        self.wire = ValueWire(config.wire_bits if layout.world_size > 1 else None)
        """Packs the values, while they are swept."""
        self._rank, self._shards = rank, layout.world_size
        self._dtype, self._my_rows = config.values_dtype, layout.rows_of(rank)
        self._blocks = layout.blocks if self.region.rows else 0  # none with one rank

    def fold(self, step: Step) -> None:
        """``residual += scale * gradient``, in a step that ranks its own gradient."""
        _fold(step, self.region, step.state.residual)

    def take(self, step: Step) -> Tensor:
        """Folds and compacts; returns the message for the other ranks, on the parameters' device.

        Its values ``[N*R, q]`` are zero in my rows. With one rank there is nothing to do: ``[0, q]``.

        The rounding error goes back into the residual: what is sent plus what is left is what was there, bit for bit.
        """
        residual = step.state.residual[: self._blocks]
        mask = step.mask.everyone
        values = torch.empty(self._blocks, step.sent, dtype=self._dtype, device=residual.device)
        message = self.wire.message(self._blocks // self._shards, step.sent, self._shards, residual.device)
        ops.sweep(
            ops.Sweep(
                self.region,
                residual,
                None if step.folded else step.parts(self.region),
                step.scale.blocks,
                None if mask is None else mask[: self._blocks],
                values,
                message=message,
            )
        )
        if message is None:
            values[self._my_rows] = 0  # NCCL may look for NaN in its input
            return values
        message[self._rank] = 0
        return message.flatten(0, 1)

    def arrived(self, received: Tensor, mine: Tensor) -> list[Tensor]:
        """Every rank's values for my shard, from the messages of all ranks; ``mine [R, q]`` did not travel."""
        ranks = enumerate(received)
        return [mine if rank == self._rank else self.wire.read(each, *mine.shape) for rank, each in ranks]


class Shard:
    """The entries that this rank owns: it keeps their moments, and statistics of its own gradient.

    Args:
        layout: blocks and shards.
        rank: this rank.
        config: its statistics, update and wire are used.
        parameters: of the optimizer.
        participants: count the steps of each parameter.
    """

    def __init__(
        self, layout: Layout, rank: int, config: ScapeConfig, parameters: Parameters, participants: Participants
    ) -> None:
        self.rows, self.region = layout.rows_of(rank), layout.local(rank)
        """The shard's rows among all blocks; and its region, whose rows count from the first of them."""
        self._layout, self._rank, self._config = layout, rank, config
        self._parameters, self._participants = parameters, participants
        self._hyperparameters = RowHyperparameters(parameters, self.region.pieces, layout.shard_blocks)
        self.wire = ValueWire(config.wire_bits if layout.world_size > 1 else None)
        """Packs the changes."""
        whole = self.wire.bits is None
        self._change_dtype = config.values_dtype if layout.world_size > 1 else parameters.wire_dtype
        self.as_changes = not whole or parameters.travel_as_changes(self._change_dtype)
        """Whether changes of parameters travel, in place of their values."""
        self.keeps_masters = whole and parameters.need_masters
        """Whether the owner keeps masters of parameters that are narrower than its arithmetic. Where changes are
        packed, it keeps what parameters lack, in ``change_error``."""

    # ------------------------------------------------------------------------------------------- this rank's gradient

    def fold(self, step: Step) -> None:
        """``residual += scale * gradient``, and the owner's statistics, in a step that ranks its own gradient."""
        pieces, parts, state = self.region.pieces, step.parts(self.region), step.state
        _fold(step, self.region, state.residual[self.rows])
        moment = self._second_moment(step)
        if moment is not None:
            scale = step.scale.mine
            if scale.dim():
                first_rows = torch.tensor([piece.row for piece in pieces], dtype=torch.int64, device="cpu")
                scale = scale.index_select(0, ops.to_device(first_rows, scale.device))
            squares = piece_views(moment.exp_avg_sq, pieces)
            ops.accumulate_exp_avg_sq(squares, parts, moment.weights, moment.ranks, scale)

    def take(self, step: Step) -> Tensor:
        """Folds, keeps statistics and compacts; returns my values for my shard, ``[R, q]``."""
        residual = step.state.residual[self.rows]
        values = torch.empty(len(residual), step.sent, dtype=self._config.own_dtype, device=residual.device)
        parts = None if step.folded else step.parts(self.region)
        # Where everything is sent, AdamW's update takes the averaged gradient itself.
        moment = None if parts is None or step.mask.mine is None else self._second_moment(step)
        ops.sweep(
            ops.Sweep(
                self.region,
                residual,
                parts,
                step.scale.mine,
                step.mask.mine,
                values,
                second_moment=moment,
            )
        )
        return values.to(self._config.values_dtype)

    def _second_moment(self, step: Step) -> ops.SecondMoment | None:
        """AdamW's, which takes in my gradient in a step that does not send everything."""
        moment = step.state.exp_avg_sq
        if moment is None:
            return None
        weights = [1 - float(step.groups[piece.segment.group]["betas"][1]) for piece in self.region.pieces]
        return ops.SecondMoment(moment, weights, self._layout.world_size)

    # ------------------------------------------------------------------------------------------- all ranks' gradient

    def update(self, step: Step, mean: Tensor, mine: Tensor | None) -> tuple[Tensor, Tensor]:
        """Updates the masked entries from the mean gradient ``[R, q]`` and my own sum (None without a mask).

        Returns:
            The message: new values of the entries, or their changes, ``[R, q]`` in the dtype in which they travel (or
            packed); and what all ranks will read from it, ``[R, q]``.
        """
        state, mask = step.state, step.mask.mine
        theta = torch.zeros_like(mean) if state.master is None else ops.gather_blocks(state.master, mask)
        # Where somebody else has written a parameter since, its value takes the master's place.
        renew, flats, pieces = state.master is not None, self._parameters.flat, self.region.pieces
        ops.gather_params(ops.ParamEntries(flats, pieces, mask, self._layout.block_size), theta, renew)
        before = theta.clone() if self.as_changes else None
        step.record.sent, step.record.again = step.sent, self._update(step, theta, mean, mine)
        self._participants.count(state, step.scale)  # with last_step, or the next tau would not be right
        if state.master is not None and mask is not None:
            ops.scatter_blocks(state.master, mask, theta)
        if before is None:
            message = theta.to(self._parameters.wire_dtype)
        elif self.wire.bits is None:
            message = ops.changes(theta, before, self._change_dtype)
        else:  # with the rounding errors of earlier changes; the new ones stay with us
            if state.change_error is None:
                state.change_error = torch.zeros_like(state.exp_avg)
            bits = self._config.change_bits(step.sent)
            assert bits is not None
            message = ops.quantize_with_error(state.change_error, mask, theta, before, step.scale.mine, bits)
            return message, theta.float()
        takes_part = step.scale.mine  # the rows of others are not written: 0
        message = torch.where(takes_part.unsqueeze(1) != 0, message, 0.0) if takes_part.dim() else message
        return message, message

    def refresh(self, state: ScapeState, *, stale: bool) -> None:
        """Brings up to date what the owner keeps beside the parameters, before a step or a save.

        Args:
            state: of this rank.
            stale: parameters may have been overwritten since masters were read: those of changed ones are read anew.
        """
        flats, layout = self._parameters.flat, self._layout
        if self.keeps_masters and (state.master is None or stale):
            state.refresh_master(flats, layout, self._rank)
        elif not self.keeps_masters and state.master is not None:  # left by another wire, or by one rank
            state.split_master(flats, layout, self._rank)

    def error_of_rounding(self, state: ScapeState) -> Tensor | None:
        """The tensor that takes up what narrower parameters lose by rounding; None where changes are not packed."""
        return None if self.wire.bits is None else state.change_error

    def read(self, step: Step, message: Tensor, some: Sequence[slice]) -> Tensor:
        """Updated values or changes ``[N*R, q]`` from all ranks' messages, in ``some`` rows; alike on all ranks."""
        return self.wire.read(message, self._layout.shard_blocks, step.sent, self._layout.world_size, some)

    def _update(self, step: Step, theta: Tensor, mean: Tensor, mine: Tensor | None) -> Tensor:
        """Updates ``theta [R, q]``; returns how many of the entries were updated in the step before, too."""
        state, mask, scale = step.state, step.mask.mine, step.scale.mine
        number = self._participants.steps(state)
        hyper, corrections = self._hyperparameters.at(number, step.groups, theta.dtype)
        numbers = ops.RowNumbers(number, scale, hyper, *corrections, self._hyperparameters.group_of_row())
        shard = ops.ShardState(theta, state.exp_avg, state.exp_avg_sq, state.last_step)
        if state.exp_avg_sq is None:
            return ops.update_adams(shard, mask, mean, numbers)
        mine = None if mine is None else mine.to(mean.dtype)
        return ops.update_adamw(shard, mask, mean, mine, numbers, self._layout.world_size)


def _fold(step: Step, region: Region, residual: Tensor) -> None:
    """``residual += scale * gradient`` for the pieces of a region, whose rows ``residual`` has."""
    ops.fold(piece_views(residual, region.pieces), step.parts(region), step.scale.whole)
