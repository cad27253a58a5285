"""Which entries are sent: how many at which step, and the delay of one step between making a mask and using it.

Two of SCAPE's five points live here (docs/design.md, 1). *Partitioned mask generation*: each rank makes the mask of its
own shard. *Delayed mask*: it is made in step t-1 from what that step left in the residual, exchanged during forward and
backward of step t, and used at the end of step t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lightning_scape.comm.collectives import PendingMask
from lightning_scape.config import Quota, ScapeConfig


@dataclass(frozen=True)
class SparsitySchedule:
    """Entries sent per block at each step: dense steps, then a geometric decay of the density, then the quota."""

    quota: Quota
    dense_steps: int
    warmup_steps: int

    @classmethod
    def of(cls, config: ScapeConfig, total_steps: float | None = None) -> SparsitySchedule:
        """The schedule that a configuration asks for, in a run of ``total_steps`` steps (None: not known)."""
        return cls(config.quota, config.dense_steps, config.warmup_within(total_steps))

    def sent(self, step: int) -> int:
        """Q of a step, counted from 0; q = B means that everything is sent, and needs no mask.

        In the warm-up the density is ``rho**(i / (warmup_steps + 1))`` at its i-th step (i = 1, 2, ...).
        """
        into_warmup = step - self.dense_steps + 1
        if into_warmup <= 0:
            return self.quota.block_size
        if into_warmup > self.warmup_steps:
            return self.quota.sent
        density: float = self.quota.density ** (into_warmup / (self.warmup_steps + 1))
        return min(self.quota.block_size, max(self.quota.sent, round(density * self.quota.block_size)))

    def updates(self, steps: int) -> float:
        """How often an entry is updated in the first ``steps`` steps, on average."""
        settled = self.dense_steps + self.warmup_steps
        begun = sum(self.sent(step) for step in range(min(steps, settled)))
        return (begun + max(0, steps - settled) * self.quota.sent) / self.quota.block_size


StartMask = Callable[[int], PendingMask]
"""Given q, begins to make the mask; it is exchanged when told to depart."""


class DelayedMask:
    """The mask in use and the one under way. Owns the delay; knows nothing of how masks are picked or sent.

    Args:
        schedule: q at each step.
        interval: steps for which one mask is used (``mask_interval``).
    """

    def __init__(self, schedule: SparsitySchedule, interval: int) -> None:
        self.schedule = schedule
        self.interval = interval
        self.active: Tensor | None = None
        """``[blocks, q]``, the mask last used (or loaded, to be used next)."""
        self.uses = 0
        """Steps that have used the active mask."""
        self.unproven = False
        """Whether the active mask was made within a step, rather than before it, and that step may yet be skipped."""
        self._pending: PendingMask | None = None

    def sends_all(self, step: int) -> bool:
        """Whether a step sends everything."""
        return self.schedule.sent(step) == self.schedule.quota.block_size

    def due(self, step: int) -> bool:
        """Whether this step must make its mask itself, for there is none of its density; after the arrival.

        So it is with the first sparse step, the first after dense ones, and where a mask was lost or dropped.
        """
        if self.sends_all(step):
            return False
        return self.active is None or self.active.shape[1] != self.schedule.sent(step)

    def take(self, step: int, start: StartMask) -> tuple[Tensor | None, float]:
        """The mask of this step, and the seconds the host waited for it; None when the step sends everything.

        It is the one prepared in the step before. Where that one is :meth:`due`, it is made now, from this step's own
        statistics, and waited for; then all of the gradient must have been folded.
        """
        sent = self.schedule.sent(step)
        waited = self.arrive()
        self.unproven = False
        if self.sends_all(step):
            self.active, self.uses = None, 0
            return None, waited
        if self.due(step):
            self._pending = start(sent)
            self._pending.depart()
            waited += self.arrive()
            self.unproven = True
        self.uses += 1
        return self.active, waited

    def prepare(self, step: int, start: StartMask) -> None:
        """Makes the mask of ``step + 1`` from what ``step`` has left in the residual, unless none is due.

        None is due when the next step sends everything, when the active mask serves ``interval`` steps and has not yet,
        or when this step sent everything: then nothing is left in the residual to rank, and the next step makes its
        mask from its own gradient.
        """
        sent = self.schedule.sent(step + 1)
        if self.active is None or self.sends_all(step + 1):
            return
        if self.uses >= self.interval or self.active.shape[1] != sent:
            self._pending = start(sent)

    def depart(self) -> None:
        """At the end of a step: sets the exchange of the mask it has made off."""
        if self._pending is not None:
            self._pending.depart()

    def restore(self, mask: Tensor | None, uses: int) -> None:
        """Takes up a mask that was saved, to be used next; None leaves it to the next step to make one."""
        self.active, self.uses, self.unproven = mask, uses, False

    def forget_unproven(self) -> None:
        """After a skipped step: drops the mask that it made for itself, and its successor; both rank nothing."""
        if self.unproven:
            self.arrive()
            self.restore(None, 0)

    def arrive(self) -> float:
        """Waits for the mask under way, if any; returns the seconds the host waited.

        One that has not departed is dropped: an error has ended its step, and no other rank may be sending either.
        """
        pending, self._pending = self._pending, None  # first: where waiting fails, nobody waits for it again
        if pending is None or pending.arriving is None:
            return 0.0
        self.active, waited = pending.wait()
        self.uses = 0
        return waited
