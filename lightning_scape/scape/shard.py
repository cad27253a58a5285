"""The owner's part of a step: the update of the masked entries of its own shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.core.parameters import Parameters
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.hyperparameters import RowHyperparameters
from lightning_scape.scape.participation import Participants, Participation
from lightning_scape.scape.state import ScapeState
from lightning_scape.wire.values import ValueWire

MEAN_SQUARE_FLOOR = 1 / 20
"""AdamS: share of the mean square that bounds the denominator, times the mean interval between visits; at most 1."""


class OwnShard:
    """Updates the own shard.

    Args:
        layout: blocks and shards.
        rank: this rank.
        config: the update and its options.
        parameters: of the optimizer.
        participants: count the steps of each parameter.
        param_groups: the optimizer's; read anew at each step, for schedulers change them.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        config: ScapeConfig,
        parameters: Parameters,
        participants: Participants,
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        self._layout, self._config, self._parameters = layout, config, parameters
        self._participants, self.param_groups = participants, param_groups
        self.rows, self._pieces = layout.rows_of(rank), layout.local(rank).pieces
        corrects = config.bias_correction or config.update == "adamw"
        self._hyperparameters = RowHyperparameters(parameters, self._pieces, layout.shard_blocks, corrects)
        travels = config.values_dtype if config.wire_bits is None else torch.uint8
        self.as_changes = layout.world_size > 1 and parameters.travel_as_changes(travels)
        """Whether changes of parameters travel, in place of their values."""
        self.wire = ValueWire(config.wire_bits) if self.as_changes and config.wire_bits is not None else None
        """Packs the changes; None where they travel as they are."""

    def update(
        self, state: ScapeState, mask: Tensor | None, mean: Tensor, part: Participation
    ) -> tuple[Tensor, Tensor]:
        """The update of the masked entries, from the mean gradient ``[R, q]``.

        Returns:
            The new values of the entries, or their changes, ``[R, q]`` in the dtype of their travel (or packed); and
            how many of the entries were visited in the step before too.
        """
        own = None if mask is None else mask[self.rows]
        theta = self._read(state, own, mean)
        before = theta.clone() if self.as_changes else None
        again = self._step(state, theta, own, mean, part)
        self._participants.count(state, part)  # with last_step, or the next tau would not be right
        if state.master is not None and own is not None:
            ops.scatter_blocks(state.master, own, theta)
        if before is None:
            return _of_those(theta.to(self._parameters.wire_dtype), part.of_rows(self.rows)), again
        if self.wire is not None:
            return self._pack(self.wire, state, ops.changes(theta, before, theta.dtype), own, part), again
        return _of_those(ops.changes(theta, before, self._config.values_dtype), part.of_rows(self.rows)), again

    def _pack(
        self, wire: ValueWire, state: ScapeState, changes: Tensor, own: Tensor | None, part: Participation
    ) -> Tensor:
        """The message of the changes and of what earlier ones' rounding has left; what is left now stays with us."""
        if state.change_error is None:
            state.change_error = torch.zeros_like(state.exp_avg)
        return wire.pack_with_error(state.change_error, own, changes, part.of_rows(self.rows))

    def _read(self, state: ScapeState, own: Tensor | None, mean: Tensor) -> Tensor:
        """The masked values of the shard, ``[R, q]``, in the state's dtype.

        Of what somebody else has written since, the parameter's, in place of the master's.
        """
        read = ops.gather_params if state.master is None else ops.renew_masters
        theta = torch.zeros_like(mean) if state.master is None else ops.gather_blocks(state.master, own)
        read(self._parameters.flat, self._pieces, own, theta, self._layout.block_size)
        return theta

    def _step(self, state: ScapeState, theta: Tensor, own: Tensor | None, mean: Tensor, part: Participation) -> Tensor:
        step = self._participants.steps(state, self.rows)
        hyper, corrections = self._hyperparameters.at(step, self.param_groups, theta.dtype, state.exp_avg_sq_since)
        group = self._hyperparameters.group_of_row()
        scale = part.of_rows(self.rows)
        if state.exp_avg_sq is not None:
            shard = ops.ShardState(theta, state.exp_avg, state.exp_avg_sq, state.last_step)
            numbers = ops.RowNumbers(step, scale, hyper, corrections.first, corrections.second, group)
            return ops.update_adamw(shard, own, mean, numbers, self._layout.world_size)
        shard = ops.ShardState(theta, state.exp_avg, state.local_exp_avg_sq, state.last_step)
        first = corrections.first if corrections.corrected else 1.0
        numbers = ops.RowNumbers(step, scale, hyper, first, None, group)
        floor = min(1.0, MEAN_SQUARE_FLOOR * self._layout.block_size / mean.shape[1])
        return ops.update_adams(shard, own, mean, numbers, floor)


def _of_those(message: Tensor, scale: Tensor) -> Tensor:
    """A message ``[R, q]`` of those that take part: the others' rows, which nobody writes, are 0."""
    return torch.where(scale.unsqueeze(1) != 0, message, 0.0) if scale.dim() else message
