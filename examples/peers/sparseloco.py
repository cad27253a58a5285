"""The package's own SparseLoCo, over simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from simulated_ranks import LocalCommunicator, Turns
from torch import nn

from lightning_scape import SparseLoCo, SparseLoCoConfig

from .base import PartingRanks


class SparseLoCoRanks(PartingRanks):
    """N of them, with messages that are copies in memory; AdamW inside."""

    def __init__(self, model: nn.Module, world_size: int, settings: dict[str, Any], **options: Any) -> None:
        config = SparseLoCoConfig(**options)
        super().__init__(model, world_size, lambda own: torch.optim.AdamW(own, **settings), config.sync_every)
        self.turns = Turns(world_size)

        def wrap(rank: int) -> SparseLoCo:
            communicator = LocalCommunicator(self.turns.meeting, rank, world_size)
            return SparseLoCo(self.optimizers[rank], **options, communicator=communicator)

        self.wrappers = self.turns.each(wrap)

    def inner_steps(self) -> None:
        self.turns.each(lambda rank: self.optimizers[rank].step())

    def exchange(self) -> float:
        """It has happened, in the hook of the optimizers' step; or the run ends inside a window."""
        self.turns.each(lambda rank: self.wrappers[rank].sync())
        stats = self.wrappers[0].stats
        assert stats is not None
        return stats.bytes_total

    def state_dict(self) -> dict[str, Any]:
        self.turns.each(lambda rank: self.wrappers[rank].consolidate_state_dict())
        return {"steps": self.steps, "wrappers": self.wrappers[0].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        self.turns.each(lambda rank: self.wrappers[rank].load_state_dict(state_dict["wrappers"]))
