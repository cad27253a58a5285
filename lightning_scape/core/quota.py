"""How many of how many consecutive entries travel in a step."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import NamedTuple

MAX_BYTE_BLOCK = 256
"""Longest block whose positions fit one byte on the wire."""
MAX_BLOCK = 65536
"""Longest block whose positions fit two bytes on the wire."""


class Quota(NamedTuple):
    """``sent`` of every ``block_size`` consecutive entries travel each step."""

    block_size: int
    sent: int

    @property
    def density(self) -> float:
        """Share of the entries that is sent, ``q / B``."""
        return self.sent / self.block_size


def check_sharding(size: object, reshard_after_forward: object) -> None:
    """Raises ``ValueError`` if the first is no number of ranks, or the second no bool."""
    if size != "node" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f'`local_group_size` must be a whole number >= 1 or "node", got {size!r}. Use "node" for all ranks of a'
            " node, 1 to train without sharding."
        )
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"`reshard_after_forward` must be True or False, got {reshard_after_forward!r}. Leave it out if unsure."
        )


@functools.lru_cache(maxsize=64)  # each step asks
def quota_for(sparsity: float) -> Quota:
    """Block length and quota for a sparsity.

    The largest B <= 256 for which ``rho * B`` is whole; where there is none, the B <= 256 that comes closest to the
    density; below a density of 1/256 the block is ``1 / rho`` entries long and sends one.

    >>> quota_for(0.99)
    Quota(block_size=200, sent=2)
    >>> quota_for(0.9)
    Quota(block_size=250, sent=25)
    >>> quota_for(0.999)
    Quota(block_size=1000, sent=1)
    """
    density = density_of(sparsity)
    if density * MAX_BYTE_BLOCK < 1:
        return Quota(min(MAX_BLOCK, round(1 / density)), 1)
    lengths = range(MAX_BYTE_BLOCK, 0, -1)
    best = min(
        (length for length in lengths if round(density * length) >= 1),
        key=lambda length: (abs(Fraction(round(density * length), length) - density), -length),
    )
    return Quota(best, round(density * best))


def density_of(sparsity: float) -> Fraction:
    """``1 - sparsity``, by the decimal the user wrote: 0.99 is not 99/100 in binary."""
    return 1 - Fraction(repr(float(sparsity)))
