"""What checkpoints send between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_scape.comm.collectives import Communicator


@dataclass
class Moved:
    """Bytes of checkpoints that went from rank to rank, as this rank has seen them."""

    sent: int = 0
    received: int = 0

    def count(self, length: int, ranks: Communicator, to: int) -> None:
        """Counts ``length`` bytes from each of the others to rank ``to``."""
        if ranks.rank == to:
            self.received += length * (ranks.world_size - 1)
        else:
            self.sent += length

    def count_objects(self, sent: Iterable[object], received: Iterable[object], others: int) -> None:
        """Counts objects that were sent to each of so many other ranks, or came from each of them, one by one."""
        if not others:
            return
        self.sent += others * sum(len(pickle.dumps(each)) for each in sent)
        self.received += others * sum(len(pickle.dumps(each)) for each in received)
