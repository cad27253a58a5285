"""The package's own SparseLoCo, over simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from simulated_ranks import LocalCommunicator, Turns
from torch import nn

from lightning_scape import SparseLoCo

from .base import PartingRanks

OPENING_BYTES = 40
"""Of the first message of an exchange, to each other rank: a norm, two counts, a number, three digests of 8 bytes."""


class SparseLoCoRanks(PartingRanks):
    """N of them, with messages that are copies in memory; AdamW inside."""

    def __init__(self, model: nn.Module, world_size: int, settings: dict[str, Any], **options: Any) -> None:
        # Exchanges run in the hooks of the optimizers' steps: after each step it is asked whether one has ended.
        super().__init__(model, world_size, lambda own: torch.optim.AdamW(own, **settings), every=1)
        self.turns, self._ended = Turns(world_size), 0

        def wrap(rank: int) -> SparseLoCo:
            communicator = LocalCommunicator(self.turns.meeting, rank, world_size)
            return SparseLoCo(self.optimizers[rank], **options, communicator=communicator)

        self.wrappers = self.turns.each(wrap)

    def inner_steps(self) -> None:
        self.turns.each(lambda rank: self.optimizers[rank].step())

    def exchange(self) -> float:
        """Bytes of the exchanges that have ended in this step: none in most steps, two at the end of a run at most."""
        progress = self.wrappers[0].progress
        before, self._ended = self._ended, progress.exchanges - progress.under_way
        opening = OPENING_BYTES * (len(self.wrappers) - 1)
        return (self._ended - before) * (self.wrappers[0].bytes_per_exchange() + opening)

    def end(self) -> None:
        """Ends the exchange that runs, and the window that has begun."""
        self.turns.each(lambda rank: self.wrappers[rank].sync())
        self._sent += self.exchange()

    def state_dict(self) -> dict[str, Any]:
        self.turns.each(lambda rank: self.wrappers[rank].consolidate_state_dict())
        return {"steps": self.steps, "wrappers": self.wrappers[0].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        self.turns.each(lambda rank: self.wrappers[rank].load_state_dict(state_dict["wrappers"]))
        progress = self.wrappers[0].progress
        self._ended = progress.exchanges - progress.under_way
