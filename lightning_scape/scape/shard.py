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
        self.packed = config.packed and layout.world_size > 1
        """Whether the values travel in 4 bits."""
        self._rank, self._shards, self._my_rows = rank, layout.world_size, layout.rows_of(rank)
        self._rows = slice(0, layout.blocks if self.region.rows else 0)  # none with one rank

    def fold(self, step: Step) -> None:
        """``residual += scale * gradient``, in a step that ranks its own gradient."""
        residual, region = step.state.residual[self._rows], self.region
        ops.sweep(ops.Sweep(region, residual, step.parts(region), step.scale.blocks, None, None))

    def take(self, step: Step) -> Tensor:
        """Folds and compacts; returns the message for the other ranks, on the parameters' device.

        Its values ``[N*R, q]`` are zero in my rows. With one rank there is nothing to do: ``[0, q]``.

        The rounding error goes back into the residual: what is sent plus what is left is what was there, bit for bit.
        """
        residual, region = step.state.residual[self._rows], self.region
        values = torch.empty(len(residual), step.sent, dtype=torch.float32, device=residual.device)
        shards, count = self._shards, values.numel() // self._shards
        message = ops.new_message(shards, count, residual.device) if self.packed else None
        grads, mask = None if step.folded else step.parts(region), step.mask_of(self._rows)
        ops.sweep(ops.Sweep(region, residual, grads, step.scale.blocks, mask, values, message=message))
        if message is None:
            values[self._my_rows] = 0  # NCCL may look for NaN in its input
            return values
        message[self._rank] = 0
        return message.flatten(0, 1)

    def arrived(self, received: Tensor, mine: Tensor) -> list[Tensor]:
        """Every rank's values for my shard, from the messages of all ranks; ``mine [R, q]`` did not travel."""
        if self.packed:
            received = ops.dequantize(received, mine.numel()).view(self._shards, *mine.shape)
        return [mine if rank == self._rank else each for rank, each in enumerate(received)]


class Shard:
    """The entries that this rank owns: it keeps their moments, and statistics of its own gradient.

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
        self._layout, self._rank = layout, rank
        self._parameters, self._numbers_of = parameters, rows
        self.packed = config.packed and layout.world_size > 1
        """Whether changes of parameters travel, in 4 bits; else their values do."""
        self.keeps_masters = not self.packed and parameters.need_masters
        """Whether the owner keeps masters of parameters that are narrower than its arithmetic. Where changes are
        packed, it keeps what parameters lack, in ``change_error``."""

    # ------------------------------------------------------------------------------------------- this rank's gradient

    def fold(self, step: Step) -> None:
        """``residual += scale * gradient``, and the owner's statistics, in a step that ranks its own gradient."""
        residual, parts, scale = step.state.residual[self.rows], step.parts(self.region), step.scale.mine
        ops.sweep(ops.Sweep(self.region, residual, parts, scale, None, None, self._second_moment(step)))

    def take(self, step: Step) -> Tensor:
        """Folds, keeps statistics and compacts; returns my values for my shard, ``[R, q]``."""
        residual, mask = step.state.residual[self.rows], step.mask_of(self.rows)
        values = torch.empty(len(residual), step.sent, dtype=torch.float32, device=residual.device)
        parts = None if step.folded else step.parts(self.region)
        # Where everything is sent, AdamW's update takes the averaged gradient itself.
        moment = None if parts is None or mask is None else self._second_moment(step)
        ops.sweep(ops.Sweep(self.region, residual, parts, step.scale.mine, mask, values, moment))
        return values

    def _second_moment(self, step: Step) -> ops.SecondMoment | None:
        """AdamW's, which takes in my gradient in a step that does not send everything."""
        moment = step.state.exp_avg_sq
        if moment is None:
            return None
        weights = [1 - float(step.groups[piece.segment.group]["betas"][1]) for piece in self.region.pieces]
        return ops.SecondMoment(moment, weights, self._layout.world_size)

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

    def write_others(self, step: Step, message: Tensor, others: Region) -> None:
        """Applies the other owners' updates, from all ranks' messages; alike on all ranks."""
        if self.packed:
            shards, count = self._layout.world_size, self._layout.shard_blocks * step.sent
            message = ops.dequantize(message.unflatten(0, (shards, -1)), count).view(-1, step.sent)
        self._scatter(step, others, step.mask, message, step.scale.blocks)

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
