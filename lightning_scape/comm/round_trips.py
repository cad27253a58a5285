"""Messages between two ranks, timed: what each link of a job can do."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from lightning_scape.comm.lost_ranks import explained_loss


def neighbours(ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs in which every rank meets its two neighbours, and none is in two pairs of a round.

    Example: 5 ranks meet in three rounds, ``(0, 1) (2, 3)``, then ``(1, 2) (3, 4)``, then ``(4, 0)``.
    """
    rounds = [[(rank, rank + 1) for rank in range(first, ranks - 1, 2)] for first in (0, 1)]
    return [pairs for pairs in [*rounds, [(ranks - 1, 0)] if ranks > 2 else []] if pairs]


def round_trip(peer: int, first: bool, size: int, repeats: int, device: torch.device) -> float:
    """Median seconds of a message there and back, after one that is not counted. Both ranks call it.

    Args:
        peer: the other rank.
        first: whether this rank begins; the other one does not.
        size: bytes of the message, each way.
        repeats: round trips that are timed.
        device: where messages are.
    """
    message, answer = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        with explained_loss():
            if first:
                dist.send(message, peer)
                dist.recv(answer, peer)
            else:
                dist.recv(answer, peer)
                dist.send(message, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])
