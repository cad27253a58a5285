"""Ranks that run out of batches before the others: found by a flag in the norm's message, before anyone waits.

A strategy that knows it says with each step whether its rank has no more batches in this epoch. If that is so on some
ranks only, all ranks raise in that step: the next message would not be answered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape.comm.collectives import Communicator

_LISTED = 16
"""Ranks whose lengths an error lists."""


class EpochEnd:
    """Compares the ends of the ranks' epochs.

    Args:
        communicator: the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._batches: int | None = None
        self.reached = False
        """Whether this rank has no more batches after this step: its flag."""

    def announce(self, batches: int, reached: bool) -> None:
        """Says how many batches of the epoch this rank has had at this step, and whether that is all."""
        self._batches, self.reached = batches, reached

    def compare(self, count: Tensor) -> None:
        """Takes how many ranks have set the flag, 0-dim; raises if some have and others have not.

        All ranks raise here, before the step's next message. So on CUDA the CPU waits for the device in announced
        steps; in others it does not look.
        """
        batches, self._batches = self._batches, None
        reached, self.reached = self.reached, False
        if batches is None and count.device.type == "cuda":
            return
        if 0 < int(count) < self._communicator.world_size:
            lengths = self._communicator.all_gather_object(f"{'' if reached else 'more than '}{batches or 0}")
            raise ValueError(uneven(lengths))


def compare_ends(communicator: Communicator, batches: int, reached: bool) -> None:
    """Raises on every rank if some ranks are at their last batch and others are not. Collective; one message.

    For batches without a step, whose norm's message would carry it.

    Args:
        communicator: the ranks, over a group that works in host memory.
        batches: of this epoch so far.
        reached: whether this is this rank's last batch.
    """
    end = EpochEnd(communicator)
    end.announce(batches, reached)
    end.compare(communicator.all_reduce_sum(torch.tensor(int(reached), dtype=torch.int64, device="cpu")))


def check_lengths(communicator: Communicator, length: float, needed: float) -> None:
    """Raises on every rank if ranks take different numbers of batches in an epoch. Collective.

    Args:
        communicator: the ranks.
        length: batches of this rank in an epoch; infinity: not known.
        needed: how many of them it takes before the run ends.
    """
    everyone = communicator.all_gather_object((length, needed))
    if len({needed for _, needed in everyone}) > 1:
        raise ValueError(uneven([str(length) for length, _ in everyone]))


def uneven(lengths: Sequence[str]) -> str:
    """The error's text, from every rank's number of batches."""
    listed = [f"{length} on rank {rank}" for rank, length in enumerate(lengths[:_LISTED])]
    more = [f"... ({len(lengths)} ranks)"] if len(lengths) > _LISTED else []
    return (
        f"All ranks must have as many training batches in an epoch, got {', '.join([*listed, *more])}: the ranks with"
        " more would wait for those with fewer. Leave it to Lightning to divide the data (`use_distributed_sampler`),"
        " drop the surplus (`drop_last=True`, or `limit_train_batches` at the smallest number), or repeat batches."
    )
