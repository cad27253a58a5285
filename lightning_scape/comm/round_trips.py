"""Messages between two ranks, there and back: what each link of a job can do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_scape.comm.lost_ranks import explained_loss


def neighbours(ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs in which every rank meets its two neighbours, and none is in two pairs of a round.

    Example: 5 ranks meet in three rounds, ``(0, 1) (2, 3)``, then ``(1, 2) (3, 4)``, then ``(4, 0)``.
    """
    rounds = [[(rank, rank + 1) for rank in range(first, ranks - 1, 2)] for first in (0, 1)]
    return [pairs for pairs in [*rounds, [(ranks - 1, 0)] if ranks > 2 else []] if pairs]


def round_trip(peer: int, first: bool, size: int, device: torch.device) -> Callable[[], None]:
    """A message there and back, to be called on both ranks as often as wanted.

    Args:
        peer: the other rank.
        first: whether this rank begins; the other one does not.
        size: bytes of the message, each way.
        device: where messages are.
    """
    message, answer = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def there_and_back() -> None:
        with explained_loss():
            if first:
                dist.send(message, peer)
            dist.recv(answer, peer)
            if not first:
                dist.send(message, peer)

    return there_and_back
