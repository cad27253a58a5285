"""A rank's part of a step: what it sends to the owners of other shards, and what it does as the owner of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Region
from lightning_scape.core.parameters import Parameters
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.rows import Rows
from lightning_scape.scape.state import ScapeState, Step


class Shard:
    """A rank's part: the entries that it owns, whose moments it keeps, and what it sends to the other owners.

    Args:
        layout: blocks and shards.
        rank: this rank.
        config: its wire is used.
        parameters: of the optimizer.
        rows: know the parameter and the group of each block.
    """

    def __init__(self, layout: Layout, rank: int, config: ScapeConfig, parameters: Parameters, rows: Rows) -> None:
        self.rows, self.region = layout.rows_of(rank), layout.local(rank)
        """The shard's rows among all blocks; and its region, whose rows count from the first of them."""
        self.others = layout.remote(rank)
        """The shards of the other ranks; rows count from block 0."""
        self._all_rows = slice(0, layout.blocks if self.others.rows else 0)  # none with one rank
        self._layout, self._rank = layout, rank
        self._parameters, self._numbers_of = parameters, rows
        self.packed = config.packed and layout.world_size > 1
        """Whether values and changes of parameters travel, in 4 bits; else values of both."""
        self.keeps_masters = not self.packed and parameters.need_masters
        """Whether the owner keeps masters of parameters that are narrower than its arithmetic. Where changes are
        packed, it keeps what parameters lack, in ``change_error``."""

    # ------------------------------------------------------------------------------------------- this rank's gradient

    def fold(self, step: Step) -> None:
        """``residual += scale * gradient``, and the owner's statistics, in a step that ranks its own gradient."""
        self._sweep_others(step)
        self._sweep(step)

    def take_others(self, step: Step) -> Tensor:
        """Folds and compacts; returns the message for the other ranks, on the parameters' device.

        Its values ``[N*R, q]`` are zero in my rows. With one rank there is nothing to do: ``[0, q]``.

        The rounding error goes back into the residual: what is sent plus what is left is what was there, bit for bit.
        """
        values, shards = self._empty(step, self._all_rows), self._layout.world_size
        if not self.packed:
            self._sweep_others(step, values)
            values[self.rows] = 0  # NCCL may look for NaN in its input
            return values
        message = ops.new_message(shards, values.numel() // shards, values.device)
        self._sweep_others(step, values, message)
        message[self._rank] = 0
        return message.flatten(0, 1)

    def take(self, step: Step) -> Tensor:
        """Folds, keeps statistics and compacts; returns my values for my shard, ``[R, q]``."""
        values = self._empty(step, self.rows)
        self._sweep(step, values)
        return values

    def arrived(self, received: Tensor, mine: Tensor) -> list[Tensor]:
        """Every rank's values for my shard, from the messages of all ranks; ``mine [R, q]`` did not travel."""
        if self.packed:
            received = ops.dequantize(received, mine.numel()).view(self._layout.world_size, *mine.shape)
        return [mine if rank == self._rank else each for rank, each in enumerate(received)]

    def _empty(self, step: Step, rows: slice) -> Tensor:
        residual = step.state.residual
        return torch.empty(len(residual[rows]), step.sent, dtype=torch.float32, device=residual.device)

    def _sweep_others(self, step: Step, values: Tensor | None = None, message: Tensor | None = None) -> None:
        """Folds what is not yet folded; the masked entries go into ``values``, if given, and into ``message``."""
        residual, mask = step.state.residual[self._all_rows], None if values is None else step.mask_of(self._all_rows)
        parts, scale = step.parts(self.others), step.scale.blocks
        ops.sweep(ops.Sweep(self.others, residual, parts, scale, mask, values, message=message))

    def _sweep(self, step: Step, values: Tensor | None = None) -> None:
        """As :meth:`_sweep_others`, of my shard. AdamW's second moment takes in what is folded."""
        residual, mask = step.state.residual[self.rows], None if values is None else step.mask_of(self.rows)
        parts, moment = step.parts(self.region), step.state.exp_avg_sq
        if moment is None or parts is None or (values is not None and mask is None):
            known = None  # where everything is sent, the update takes the averaged gradient itself
        else:
            weights = [1 - float(step.groups[piece.segment.group]["betas"][1]) for piece in self.region.pieces]
            known = ops.SecondMoment(moment, weights, self._layout.world_size)
        ops.sweep(ops.Sweep(self.region, residual, parts, step.scale.mine, mask, values, known))

    # ------------------------------------------------------------------------------------------- all ranks' gradient

    def update(self, step: Step, mean: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the masked entries from the mean gradient ``[R, q]`` and my own sum.

        Returns:
            The message: new values of the entries, or their changes, ``[R, q]`` in the dtype in which they travel (or
            packed); and what all ranks will read from it, ``[R, q]``.
        """
        state, mask, scale = step.state, step.mask_of(self.rows), step.scale.mine
        theta = torch.zeros_like(mean) if state.master is None else ops.gather_blocks(state.master, mask)
        # Where somebody else has written a parameter since, its value takes the master's place.
        entries = ops.ParamEntries(self._parameters.flat, self.region.pieces, mask, self._layout.block_size)
        ops.gather_params(entries, theta, renew=state.master is not None)
        before = theta.clone() if self.packed else None
        numbers = self._numbers_of.numbers(state, step.scale, step.groups)
        shard = ops.ShardState(theta, state.exp_avg, state.exp_avg_sq, state.last_step)
        own = None if mask is None else mine.to(mean.dtype)  # where everything is sent, the mean says all
        ops.update_shard(shard, mask, mean, own, numbers, self._layout.world_size)
        self._numbers_of.count(state, step.scale)  # with last_step, or the next tau would not be right
        if state.master is not None and mask is not None:
            ops.scatter_blocks(state.master, mask, theta)
        if before is None:
            message = theta.to(self._parameters.wire_dtype)
            return message, message
        # With the rounding errors of earlier changes; the new ones stay with us.
        if state.change_error is None:
            state.change_error = torch.zeros_like(state.exp_avg)
        return ops.quantize_with_error(state.change_error, mask, theta, before, scale), theta.float()

    def write(self, step: Step, update: Tensor) -> None:
        """Applies my own updates: what :meth:`update` has returned. Skipped parameters are not written."""
        # What narrower parameters lose by rounding stays with us where changes are packed.
        error = step.state.change_error if self.packed else None
        self._scatter(step, self.region, step.mask_of(self.rows), update, step.scale.mine, error)

    def write_others(self, step: Step, message: Tensor) -> None:
        """Applies the other owners' updates, from all ranks' messages; alike on all ranks."""
        if self.packed:
            shards, count = self._layout.world_size, self._layout.shard_blocks * step.sent
            message = ops.dequantize(message.unflatten(0, (shards, -1)), count).view(-1, step.sent)
        self._scatter(step, self.others, step.mask, message, step.scale.blocks)

    def _scatter(
        self,
        step: Step,
        region: Region,
        mask: Tensor | None,
        values: Tensor,
        scale: Tensor,
        error: Tensor | None = None,
    ) -> None:
        entries = ops.ParamEntries(self._parameters.flat, region.pieces, mask, self._layout.block_size)
        ops.scatter_params(entries, values, self.packed, scale, error)

    def adopt(self, state: ScapeState) -> None:
        """Makes of what another wire has kept what this one keeps: a master is what the parameter holds and lacks.

        A new master is 0. One that does not round to its parameter gives way to it when its entry is updated.
        """
        foreign = state.change_error if self.keeps_masters else state.master
        if foreign is None:
            if self.keeps_masters and state.master is None:
                state.master = torch.zeros_like(state.exp_avg)
            return
        held = torch.zeros_like(foreign)
        entries = ops.ParamEntries(self._parameters.flat, self.region.pieces, None, self._layout.block_size)
        ops.gather_params(entries, held)
        if self.keeps_masters:
            state.master, state.change_error = held.add_(foreign), None
        else:
            ops.gather_params(entries, foreign, renew=True)
            state.change_error, state.master = foreign.sub_(held), None
