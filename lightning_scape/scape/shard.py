"""A rank's part of a step: what it sends to the owners of other shards, and what it does as the owner of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Region
from lightning_scape.core.parameters import Parameters
from lightning_scape.ops.naive.masks import cut
from lightning_scape.ops.naive.wire import GROUP
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.state import Scale, ScapeState, Step

TOGETHER = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Entries that are worked on together, by kind of device: what is computed of them takes some 20 bytes of each."""


class Shard:
    """A rank's part: the entries that it owns, whose moments it keeps, and what it sends to the other owners.

    Rows count among all blocks. Where a step sends much, it works on some of them at a time: else the first steps would
    take several times the memory of later ones.
    """

    def __init__(self, layout: Layout, rank: int, config: ScapeConfig, parameters: Parameters) -> None:
        self.rows, self.region = layout.rows_of(rank), layout.local(rank)
        """The shard's rows; and its region, whose rows count from the first of them."""
        self.others = layout.remote(rank)
        """The shards of the other ranks."""
        self._layout, self._rank, self._parameters = layout, rank, parameters
        self._groups = sorted({piece.group for piece in layout.pieces}) or [0]
        """Those with parameters."""
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.packed = config.packed and layout.world_size > 1
        """Whether values and changes of parameters travel, in 4 bits; else values of both."""

    # ------------------------------------------------------------------------------------------- this rank's gradient

    def fold(self, step: Step) -> None:
        """``residual += scale * gradient``, and the owner's statistics, in a step that ranks its own gradient."""
        for rows, region in self._parts_of_others(step):
            self._sweep(step, rows, region)
        self._sweep(step, self.rows, self.region, moment=self._second_moment(step, self.rows, self.region))
        step.folded = True

    def take_others(self, step: Step) -> Tensor:
        """Folds and compacts; returns the message for the other ranks, on the parameters' device.

        Its values ``[N*R, q]`` are zero in my rows. With one rank there is nothing to do: ``[0, q]``.

        The rounding error goes back into the residual: what is sent plus what is left is what was there, bit for bit.
        """
        parts, sent, shards = self._parts_of_others(step), step.sent, self._layout.world_size
        if not self.packed:
            ((rows, region),) = parts
            self._sweep(step, rows, region, values := self._empty(step, rows))
            values[self.rows] = 0  # NCCL may look for NaN in its input
            return values
        message = ops.new_message(shards, self._layout.shard_blocks * sent, step.state.step.device)
        for rows, region in parts:
            self._sweep(step, rows, region, self._empty(step, rows), message=self._cut(message, rows, sent))
        message[self._rank] = 0
        return message.flatten(0, 1)

    def take(self, step: Step) -> Tensor | None:
        """Folds, keeps statistics and compacts; returns my values for my shard, ``[R, q]``. Of many, :meth:`update`."""
        return None if len(self._parts(step)) > 1 else self._take(step, self.rows, self.region)

    def _take(self, step: Step, rows: slice, region: Region) -> Tensor:
        self._sweep(step, rows, region, values := self._empty(step, rows), self._second_moment(step, rows, region))
        return values

    def _empty(self, step: Step, rows: slice) -> Tensor:
        return torch.empty(rows.stop - rows.start, step.sent, dtype=torch.float32, device=step.state.step.device)

    def _second_moment(self, step: Step, rows: slice, region: Region) -> ops.SecondMoment | None:
        """AdamW's, which takes in my gradient, once. Where everything is sent, the averaged gradient comes instead."""
        moment = step.state.exp_avg_sq
        if moment is None or step.folded or step.sent == self._layout.block_size:
            return None
        weights = [1 - float(step.groups[piece.group]["betas"][1]) for piece in region.pieces]
        return ops.SecondMoment(moment[self._here(rows)], weights, self._layout.world_size)

    def _sweep(
        self,
        step: Step,
        rows: slice,
        region: Region,
        values: Tensor | None = None,
        moment: ops.SecondMoment | None = None,
        message: Tensor | None = None,
    ) -> None:
        """Folds what is not yet folded; the masked entries go into ``values``, if given, and into ``message``."""
        residual, grads = step.state.residual[rows], None if step.folded else step.grads
        mask, scale = cut(step.mask, rows), cut(step.scale.blocks, rows)
        ops.sweep(ops.Sweep(region, residual, grads, scale, mask, values, moment, message))

    # ------------------------------------------------------------------------------------------- all ranks' gradient

    def update(self, step: Step, received: Tensor, mine: Tensor | None) -> Tensor:
        """Updates the masked entries from the mean of what was received and of mine, which :meth:`take` has returned.

        Returns the message: new values of the entries, ``[R, q]`` in the dtype in which they travel, or their changes,
        packed.
        """
        state, sent, blocks = step.state, step.sent, self._layout.shard_blocks
        numbers = self._numbers(step)
        if self.packed:
            message = ops.new_message(1, blocks * sent, state.step.device)[0]
        else:
            message = torch.empty(blocks, sent, dtype=self._parameters.wire_dtype, device=state.step.device)
        for rows, region in self._parts(step):
            here, mask = self._here(rows), cut(step.mask, rows)
            own = self._take(step, rows, region) if mine is None else mine[here]
            # In rank order: every implementation gets the same bits.
            mean = ops.mean(self._arrived(received, here, own), state.exp_avg.dtype)
            theta = torch.zeros_like(mean) if state.master is None else ops.gather_blocks(state.master[here], mask)
            # Where somebody else has written a parameter since, its value takes the master's place.
            ops.gather_params(self._entries(region, mask), theta, renew=state.master is not None)
            before = theta.clone() if self.packed else theta
            moments = (cut(each, here) for each in (state.exp_avg, state.exp_avg_sq, state.last_step))
            alone = None if mask is None else own.to(mean.dtype)  # where everything is sent, the mean says all
            shard, ranks = ops.ShardState(theta, *moments), self._layout.world_size
            ops.update_shard(shard, mask, mean, alone, numbers.cut(here), ranks)
            if state.master is not None and mask is not None:
                ops.scatter_blocks(state.master[here], mask, theta)
            if state.change_error is None:
                message[here] = theta
            else:  # with the rounding errors of earlier changes; the new ones stay with us
                error, scale = state.change_error[here], cut(step.scale.blocks, rows)
                message[_groups(here, sent)] = ops.quantize_with_error(error, mask, theta, before, scale)
        # With last_step, or the next tau would not be right: the step, and the parameters that missed it.
        taken = (step.scale.whole != 0).to(state.step.dtype)
        state.step += taken
        if state.missed is not None and step.scale.parameters.dim():
            state.missed += taken - (step.scale.parameters != 0).to(taken.dtype)
        return message

    def _arrived(self, received: Tensor, here: slice, own: Tensor) -> list[Tensor]:
        """Every rank's values for some rows of my shard."""
        if self.packed:
            few = received[:, _groups(here, own.shape[1])].contiguous()
            received = ops.dequantize(few, own.numel()).view(-1, *own.shape)
        else:
            received = received[:, here]
        return [own if rank == self._rank else each for rank, each in enumerate(received)]

    def write(self, step: Step, message: Tensor) -> None:
        """Applies my own updates: what :meth:`update` has returned. Skipped parameters are not written."""
        for rows, region in self._parts(step):
            here = self._here(rows)
            # What narrower parameters lose by rounding stays with us.
            values = message[_groups(here, step.sent)].unsqueeze(0) if self.packed else message[here]
            self._write(step, rows, region, values, cut(step.state.change_error, here))

    def write_others(self, step: Step, message: Tensor) -> None:
        """Applies the other owners' updates, from all ranks' messages; alike on all ranks."""
        if self.packed:
            message = message.unflatten(0, (self._layout.world_size, -1))
        for rows, region in self._parts_of_others(step):
            values = self._cut(message, rows, step.sent) if self.packed else message[rows]
            self._write(step, rows, region, values)

    def _write(self, step: Step, rows: slice, region: Region, values: Tensor, error: Tensor | None = None) -> None:
        if self.packed:
            count = (rows.stop - rows.start) // len(values) * step.sent
            values = ops.dequantize(values, count).view(-1, step.sent)
        entries, scale = self._entries(region, cut(step.mask, rows)), cut(step.scale.blocks, rows)
        ops.scatter_params(entries, values, self.packed, scale, error)

    def _entries(self, region: Region, mask: Tensor | None) -> ops.ParamEntries:
        return ops.ParamEntries(self._parameters.flat, region.pieces, mask, self._layout.block_size)

    # ------------------------------------------------------------------------------------------- what differs by row

    def scale(self, state: ScapeState, scale: Tensor, present: Tensor | None) -> Scale:
        """The scale of all that take part in a step; ``present`` is 1 for parameters with a gradient, None: all.

        One without a gradient on any rank is skipped.
        """
        if present is None:
            return Scale(scale, scale, scale)
        if state.missed is None:
            state.missed = torch.zeros(len(self._parameters.tensors), dtype=torch.int32, device=state.step.device)
        parameters = scale * present
        return Scale(scale, parameters, parameters[self._of_blocks(scale.device)[0]])

    def _numbers(self, step: Step) -> ops.RowNumbers:
        """What an update needs to know of my rows. Read from the groups anew at each step: schedulers change them."""
        device, dtype = step.state.step.device, step.state.exp_avg.dtype
        number = step.state.step + 1
        if step.state.missed is not None:
            number = number - step.state.missed[self._of_blocks(device)[0][self.rows]]
        group = self._of_blocks(device)[1][self.rows] if len(self._groups) > 1 else None
        # A learning rate that is a tensor on CUDA makes the CPU wait for it; a float does not.
        table = [
            [float(value) for value in (each["lr"], *each["betas"], each["eps"], each["weight_decay"])]
            for each in (step.groups[place] for place in self._groups)
        ]
        numbers = torch.tensor(table, dtype=torch.float64, device="cpu").to(device, non_blocking=True)
        lr, beta1, beta2, eps, decay = numbers.unbind(1)
        first, second = (beta[0] if group is None else beta.index_select(0, group) for beta in (beta1, beta2))
        hyper = ops.Hyper.of(dtype, lr, beta1, beta2, eps, decay)
        corrections = (1 - first**number).to(dtype), (1 - second ** number.clamp(min=1)).to(dtype)
        return ops.RowNumbers(number, cut(step.scale.blocks, self.rows), hyper, *corrections, group)

    def _of_blocks(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Parameter, int64 ``[blocks]``, and group, int32, of each block; made when asked for, for few steps need it.

        The fillers at the end take those of the last parameter.
        """
        if device not in self._tables:
            layout, pieces = self._layout, self._layout.pieces
            groups = [self._groups.index(piece.group) for piece in pieces]
            of_each = torch.tensor([[piece.index for piece in pieces], groups], dtype=torch.int64, device="cpu")
            counts = torch.tensor([piece.blocks for piece in pieces], dtype=torch.int64, device="cpu")
            counts[-1:] += layout.blocks - layout.used_blocks
            parameter, group = of_each.repeat_interleave(counts, dim=1)
            self._tables = {device: (ops.to_device(parameter, device), ops.to_device(group.int(), device))}
        return self._tables[device]

    # ------------------------------------------------------------------------------------------- some rows at a time

    def _parts(self, step: Step) -> list[tuple[slice, Region]]:
        """The parts of my shard that are worked on together: rows, and what fills them."""
        return self._cut_up(step, self._rank, step.sent * self._layout.world_size)

    def _parts_of_others(self, step: Step) -> list[tuple[slice, Region]]:
        """All of the others' shards, where that is little; else parts of one after the other."""
        blocks, shards = self._layout.blocks, range(self._layout.world_size)
        if not self.packed or blocks <= _together(step, step.sent):
            return [(slice(0, blocks if self.others.rows else 0), self.others)]  # none with one rank
        return [part for shard in shards if shard != self._rank for part in self._cut_up(step, shard, step.sent)]

    def _cut_up(self, step: Step, shard: int, columns: int) -> list[tuple[slice, Region]]:
        all_rows, each = self._layout.rows_of(shard), _together(step, columns)
        firsts = range(all_rows.start, all_rows.stop, each)
        few = [slice(first, min(first + each, all_rows.stop)) for first in firsts]
        return [(rows, self._layout.region(rows.start, rows.stop)) for rows in few]

    def _here(self, rows: slice) -> slice:
        """Rows of my shard, counted from its first."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)

    def _cut(self, message: Tensor, rows: slice, sent: int) -> Tensor:
        """What a packed message ``[N, G, W]`` has of some rows: all of them, or a part of one shard."""
        each, count = self._layout.shard_blocks, rows.stop - rows.start
        if count > each:
            return message
        shard, first = divmod(rows.start, max(1, each))
        return message[shard : shard + 1, _groups(slice(first, first + count), sent)]


def _together(step: Step, columns: int) -> int:
    """How many rows are worked on together. They fill whole groups of the wire.

    It is a power of two: each step of a warm-up has another q, and the layout keeps the regions it makes.
    """
    return 1 << max(GROUP, TOGETHER[step.state.step.device.type] // columns).bit_length() - 1


def _groups(rows: slice, sent: int) -> slice:
    """The groups of the wire that hold the values of some rows of a shard."""
    return slice(rows.start * sent // GROUP, -(-rows.stop * sent // GROUP))
