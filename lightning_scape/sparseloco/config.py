"""SparseLoCoConfig: every option of SparseLoCo, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_scape.core.layout import MAX_BLOCK, Quota, quota_for
from lightning_scape.core.local_shards import check_sharding
from lightning_scape.ops.naive.wire import Wire

Average = Literal["all", "geometric", "senders"]
BITS = (2, 4, 8)
OF_THE_MESH = ("local_group_size", "reshard_after_forward")
"""Options of the strategies alone: they shard the model, and the parameters tell the rest."""
SMALLEST_QUOTA = 4
"""Entries that share a scale, at least, where the block length is chosen."""
DENSE_BLOCK = 256
OPENING_BYTES = 24
"""Of an exchange's first message, to each of the other ranks."""


@dataclass(frozen=True)
class SparseLoCoConfig:
    """Options of SparseLoCo (arXiv 2508.15706); docs/design.md, 7.

    Raises:
        ValueError: an option is outside its rule.
    """

    sync_every: int = 30
    """H: steps of the inner optimizer from one exchange to the next. The authors use 15 to 30, and tried up to 250."""

    density: float = 1 / 64
    """Share of the entries that a rank sends in an exchange, in (0, 1]. 1 sends everything, without positions; a rank
    holds the messages of all ranks at a time."""

    bits: int | None = 2
    """Bits of a value on the wire: 2, 4 or 8, with a scale of 16 bits per block. None sends fp32 values."""

    error_decay: float = 0.95
    """beta, in [0, 1]: what is left of the error feedback after each window. 1 forgets nothing."""

    outer_lr: float = 1.0
    """alpha, > 0: length of the outer step along the averaged pseudo-gradient."""

    average: Average = "geometric"
    """What the sum over N ranks is divided by: ``"all"``, N (the paper's formula), ``"senders"``, the number n of ranks
    that sent the entry (the authors' code), or ``"geometric"``, their geometric mean sqrt(N n). Ranks choose different
    entries, so most of the N say nothing about an entry. Where everything is sent, all three are the mean
    (docs/sparseloco.md)."""

    local_group_size: int | Literal["node"] = 1
    """Ranks of a node that hold one replica together, sharded by FSDP2 (docs/design.md, 6); ``"node"`` takes all ranks
    of a node. SparseLoCo then runs between the nodes. A strategy shards the model; for ``SparseLoCo`` itself the
    parameters say it."""

    reshard_after_forward: bool = True
    """With ``local_group_size`` above 1: free gathered parameters between forward and backward."""

    def __post_init__(self) -> None:
        every = self.sync_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"`sync_every` must be a whole number >= 1, got {every!r}. Pass an int.")
        _check_range("density", self.density, 0 < _number(self.density) <= 1, "in (0, 1]", "0.015625 is the authors'")
        if SMALLEST_QUOTA / self.density > MAX_BLOCK:
            raise ValueError(
                f"`density` must be at least {SMALLEST_QUOTA / MAX_BLOCK:g}, got {self.density!r}. Raise it, or"
                " exchange less often."
            )
        _check_range("error_decay", self.error_decay, 0 <= _number(self.error_decay) <= 1, "in [0, 1]", "0.95 is usual")
        _check_range("outer_lr", self.outer_lr, 0 < _number(self.outer_lr) < math.inf, "> 0", "1 is usual")
        if self.bits is not None and (isinstance(self.bits, bool) or self.bits not in BITS):
            raise ValueError(f"`bits` must be None, 2, 4 or 8, got {self.bits!r}. None sends fp32 values.")
        if self.average not in get_args(Average):
            raise ValueError(
                f'`average` must be "all", "geometric" or "senders", got {self.average!r}. Leave it out if unsure.'
            )
        check_sharding(self.local_group_size, self.reshard_after_forward)

    @property
    def quota(self) -> Quota:
        """Block length B, and entries of a block that a rank sends, q."""
        if self.density == 1:
            return Quota(DENSE_BLOCK, DENSE_BLOCK)
        if self.density * DENSE_BLOCK < SMALLEST_QUOTA:
            return Quota(min(MAX_BLOCK, round(SMALLEST_QUOTA / self.density)), SMALLEST_QUOTA)
        return quota_for(1 - self.density)

    def exchange_bytes(self, numels: Iterable[int], ranks: int) -> int:
        """Bytes that a rank sends in an exchange; exactly what the package counts.

        Args:
            numels: entries of each parameter tensor.
            ranks: N.
        """
        blocks = sum(-(-numel // self.quota.block_size) for numel in numels)
        return (Wire(*self.quota, self.bits).row_bytes * blocks + OPENING_BYTES) * (ranks - 1)


def _number(value: object) -> float:
    """NaN for what is no number: every comparison with it fails."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _check_range(name: str, value: object, holds: bool, rule: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be a number {rule}, got {value!r}; {remedy}.")
