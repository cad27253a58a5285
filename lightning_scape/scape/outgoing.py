"""What a rank sends to the owners of the other shards: its gradient of their entries, folded, compacted and packed."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Region
from lightning_scape.core.tensors import piece_views
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.state import Step
from lightning_scape.wire.values import ValueWire


class Outgoing:
    """The shards of all other ranks, as this rank works on them.

    Args:
        layout: blocks and shards.
        rank: this rank.
        config: the wire dtype is used.
    """

    def __init__(self, layout: Layout, rank: int, config: ScapeConfig) -> None:
        self.region = layout.remote(rank)
        """Rows of all blocks."""
        self.wire = ValueWire(config.wire_bits if layout.world_size > 1 else None)
        """Packs the values, while they are swept."""
        self._rank, self._shards = rank, layout.world_size
        self._dtype, self._my_rows = config.values_dtype, layout.rows_of(rank)
        self._blocks = layout.blocks if self.region.rows else 0  # none with one rank

    def fold(self, step: Step) -> None:
        """``residual += scale * gradient``, in a step that ranks its own gradient."""
        fold(step, self.region, step.state.residual)

    def take(self, step: Step) -> Tensor:
        """Folds, compacts and proposes; returns the message for the other ranks, beside the parameters.

        Its values ``[N*R, q]`` are zero in my rows. With one rank there is nothing to do: ``[0, q]``.

        The rounding error goes back into the residual: what is sent plus what is left is what was there, bit for bit.
        """
        residual = step.state.residual[: self._blocks]
        values = torch.empty(self._blocks, step.sent, dtype=self._dtype, device=residual.device)
        message = self.wire.message(self._blocks // self._shards, step.sent, self._shards, residual.device)
        ops.sweep(
            ops.Sweep(
                self.region,
                residual,
                None if step.folded else step.parts(self.region),
                step.scale.blocks,
                step.mask.swept,
                values,
                clip_value=step.clip_value,
                proposals=None if step.ranking is None else step.ranking.proposals,
                message=message,
            )
        )
        if self.region.rows:
            step.record.sent_energy.append(ops.squared_norm([values[rows] for rows in self.region.rows]))
        if message is None:
            values[self._my_rows] = 0  # NCCL may look for NaN in its input
            return values.to(step.state.step.device)
        message[self._rank] = 0
        return message.flatten(0, 1).to(step.state.step.device)

    def arrived(self, received: Tensor, mine: Tensor) -> list[Tensor]:
        """Every rank's values for my shard, from the messages of all ranks; ``mine [R, q]`` did not travel."""
        ranks = enumerate(received)
        return [mine if rank == self._rank else self.wire.read(each, *mine.shape) for rank, each in ranks]


def fold(step: Step, region: Region, residual: Tensor) -> None:
    """``residual += scale * gradient`` for the pieces of a region, whose rows ``residual`` has."""
    ops.fold(piece_views(residual, region.pieces), step.parts(region), step.scale.whole, step.clip_value)
