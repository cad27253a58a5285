"""SparseLoCoConfig: every option of SparseLoCo, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_scape.core.quota import Quota, check_local_group_size, quota_for
from lightning_scape.wire.blocks import Wire

Average = Literal["all", "geometric", "senders"]
Reduction = Literal["sharded", "gathered"]
BITS = (2, 4, 8)
MAX_BLOCK = 65_536
OF_THE_MESH = ("local_group_size", "reshard_after_forward")
"""Options of the strategies alone: they shard the model, and the parameters tell the rest."""
SMALLEST_QUOTA = 4
"""Entries that share a scale, at least, where the block length is chosen."""
DENSE_BLOCK = 256
GATHERED_UP_TO = 4
"""Ranks. `gathered` sends N/2 times the bytes of `sharded`; on 4 it trains better than exchanging twice as often."""


@dataclass(frozen=True)
class SparseLoCoConfig:
    """Options of SparseLoCo (arXiv 2508.15706); docs/design.md, 7.

    Raises:
        ValueError: an option is outside its rule.
    """

    sync_every: int = 30
    """H: steps of the inner optimizer from one exchange to the next. The authors use 15 to 30, and tried up to 250."""

    density: float = 1 / 64
    """Share of the entries that a rank sends in an exchange, in (0, 1]. 1 sends everything, without positions."""

    bits: int | None = 2
    """Bits of a value on the wire: 2, 4 or 8, with a scale of 16 bits per block. None sends fp32 values."""

    error_decay: float = 0.95
    """beta, in [0, 1]: what is left of the error feedback after each window. 1 forgets nothing."""

    outer_lr: float = 1.0
    """alpha, > 0: length of the outer step along the averaged pseudo-gradient."""

    average: Average | None = None
    """What the sum over N ranks is divided by: ``"all"``, N (the paper's formula), ``"senders"``, the number n of ranks
    that sent the entry (the authors' code), or ``"geometric"``, their geometric mean sqrt(N n). Ranks choose different
    entries, so most of the N say nothing about an entry. Where all ranks send it, all three are the mean. None is
    ``"geometric"`` where messages are gathered, and ``"all"`` where the reduction is sharded, or everything is sent
    (docs/results.md)."""

    reduction: Reduction | None = None
    """How what the ranks send is averaged. ``"sharded"``: by the owners of the entries, who send their selection back;
    a rank sends ``2 k (N-1)/N`` entries. ``"gathered"``: by every rank, which gets all messages (the authors' way);
    a rank sends ``k (N-1)``, and nothing waits at an owner. None is gathered on up to 4 ranks, where it trains better
    for the same bytes (docs/results.md). It is sharded on more, and, on more than two ranks, where everything
    is sent."""

    max_skipped: int = 10
    """A window in which some rank's parameters become inf or NaN is dropped on all ranks. So many in a row raise an
    error."""

    check_replicas_every: int = 1
    """Exchanges between two comparisons of all ranks' starting points, bit for bit; 0 compares only at the first step.
    A comparison reads the parameters once and sends 16 bytes for each tensor; the CPU waits for it."""

    local_group_size: int | Literal["node"] = 1
    """Ranks of a node that hold one replica together, sharded by FSDP2 (docs/design.md, 7); ``"node"`` takes all ranks
    of a node. SparseLoCo then runs between the nodes. A strategy shards the model; for ``SparseLoCo`` itself the
    parameters say it."""

    reshard_after_forward: bool = True
    """With ``local_group_size`` above 1: free gathered parameters between forward and backward."""

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("max_skipped", 1), ("check_replicas_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` must be a whole number >= {least}, got {value!r}. Pass an int.")
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
        if self.average is not None and self.average not in get_args(Average):
            raise ValueError(
                f'`average` must be None, "all", "geometric" or "senders", got {self.average!r}. None is the best'
                " known."
            )
        if self.reduction is not None and self.reduction not in get_args(Reduction):
            raise ValueError(
                f'`reduction` must be None, "sharded" or "gathered", got {self.reduction!r}. None chooses by the number'
                " of ranks."
            )
        check_local_group_size(self.local_group_size)
        if not isinstance(self.reshard_after_forward, bool):
            raise ValueError(
                f"`reshard_after_forward` must be True or False, got {self.reshard_after_forward!r}. Pass a bool; True"
                " if unsure."
            )

    @property
    def quota(self) -> Quota:
        """Block length B, and entries of a block that a rank sends, q."""
        if self.density == 1:
            return Quota(DENSE_BLOCK, DENSE_BLOCK)
        if self.density * DENSE_BLOCK < SMALLEST_QUOTA:
            return Quota(min(MAX_BLOCK, round(SMALLEST_QUOTA / self.density)), SMALLEST_QUOTA)
        return quota_for(1 - self.density)

    def gathers(self, ranks: int) -> bool:
        """Whether every rank gets all messages."""
        if self.reduction is not None:
            return self.reduction == "gathered"
        return ranks == 2 or (ranks <= GATHERED_UP_TO and self.density < 1)

    def averages(self, ranks: int) -> Average:
        """What the sum over ranks is divided by, with the default filled in."""
        if self.average is not None:
            return self.average
        return "geometric" if self.gathers(ranks) and self.quota.sent < self.quota.block_size else "all"

    def message_bytes(self, blocks: int, ranks: int) -> tuple[int, int]:
        """Bytes that a rank sends in an exchange: to the owners, and to all ranks.

        Args:
            blocks: of all parameters.
            ranks: N.
        """
        message = Wire(*self.quota, self.bits).row_bytes * blocks
        return (0, message * (ranks - 1)) if self.gathers(ranks) else (message * (ranks - 1) // ranks,) * 2

    def as_dict(self) -> dict[str, Any]:
        """All options as plain numbers, strings and None (what a checkpoint may hold)."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _number(value: object) -> float:
    """NaN for what is no number: every comparison with it fails."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _check_range(name: str, value: object, holds: bool, rule: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be a number {rule}, got {value!r}; {remedy}.")
