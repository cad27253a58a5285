"""The mask's whole way: how many entries at which step, ranking, proposals, exchange, merge, and the delay of one step.

Two of SCAPE's five points live here (docs/design.md, 1). *Partitioned mask generation*: each rank makes the mask of its
own shard. *Delayed mask*: it is made in step t-1 from the residual which that step leaves, exchanged during forward and
backward of step t, and used at the end of step t.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator, Work
from lightning_scape.core.layout import Layout
from lightning_scape.core.quota import Quota
from lightning_scape.scape.config import ScapeConfig, WarmupShape
from lightning_scape.scape.state import ScapeState


@dataclass(frozen=True)
class SparsitySchedule:
    """Entries sent per block at each step: dense steps, then a warm-up in which the density falls, then the quota."""

    quota: Quota
    dense_steps: int
    warmup_steps: int
    shape: WarmupShape = "geometric"

    @classmethod
    def of(cls, config: ScapeConfig, total_steps: float | None = None) -> SparsitySchedule:
        """The schedule that a configuration asks for, in a run of ``total_steps`` steps (None: not known)."""
        return cls(config.quota, config.dense_steps, config.warmup_within(total_steps), config.warmup_shape)

    def sent(self, step: int) -> int:
        """Q of a step, counted from 0; q = B means that everything is sent, and needs no mask.

        At the i-th of T steps of the warm-up (i = 1, 2, ...) the density is ``rho**(i / (T + 1))``, or, where the waits
        grow evenly, ``1 / (1 + (1 / rho - 1) i / (T + 1))`` (docs/design.md, 3.3).
        """
        into_warmup = step - self.dense_steps + 1
        if into_warmup <= 0:
            return self.quota.block_size
        if into_warmup > self.warmup_steps:
            return self.quota.sent
        share = into_warmup / (self.warmup_steps + 1)
        if self.shape == "waits":
            density = 1 / (1 + (1 / self.quota.density - 1) * share)
        else:
            density = self.quota.density**share
        return min(self.quota.block_size, max(self.quota.sent, round(density * self.quota.block_size)))

    def updates(self, steps: int) -> float:
        """How often an entry is updated in the first ``steps`` steps, on average."""
        settled = self.dense_steps + self.warmup_steps
        begun = sum(self.sent(step) for step in range(min(steps, settled)))
        return (begun + max(0, steps - settled) * self.quota.sent) / self.quota.block_size


@dataclass
class Ranking:
    """What the sweeps of a step write for the next mask."""

    sent: int
    """q of the next mask."""
    proposals: Tensor | None = None
    """uint8 ``[N*R, W]`` for the other ranks' shards, this rank's own rows zero; None: no proposals."""
    own: Tensor | None = None
    """``[R, q]``: the own part of the next mask. None: it is made at the launch."""


class Masks:
    """The mask in use and the one under way.

    Args:
        config: which statistic, how many proposals, how long a mask is used.
        layout: blocks and shards.
        comm: sends proposals and masks.
        schedule: q at each step.
    """

    def __init__(self, config: ScapeConfig, layout: Layout, comm: Communicator, schedule: SparsitySchedule) -> None:
        self.schedule = schedule
        self.interval = config.mask_interval
        self.active: Tensor | None = None
        """``[blocks, q]``, the mask last used (or loaded, to be used next)."""
        self.uses = 0
        """Steps that have used the active mask."""
        self.unproven = False
        """Whether the active mask was made in the step that uses it. If that step is skipped, the mask is dropped."""
        self._config, self._layout, self._comm = config, layout, comm
        self._ranking: Ranking | None = None
        self.pending: Work | None = None
        """The exchange of a mask under way."""

    # ------------------------------------------------------------------------------------------- the mask of a step

    def sends_all(self, step: int) -> bool:
        """Whether a step sends everything."""
        return self.schedule.sent(step) == self.schedule.quota.block_size

    def wait(self) -> float:
        """Waits for the mask under way, if any; returns the seconds the host waited."""
        pending, self.pending = self.pending, None  # first: where waiting fails, nobody waits for it again
        if pending is None:
            return 0.0
        began = time.perf_counter()
        self.active = pending.wait()
        self.uses = 0
        return time.perf_counter() - began

    def missing(self, step: int) -> bool:
        """Whether this step must make its own mask, for there is none of its density.

        So it is with the first sparse step, the first after dense ones, and where a mask was lost or dropped.
        """
        if self.sends_all(step):
            return False
        return self.active is None or self.active.shape[1] != self.schedule.sent(step)

    def current(self, step: int, state: ScapeState) -> tuple[Tensor | None, float]:
        """The mask of this step, and the seconds the host waited for it; None when the step sends everything.

        Where it is :meth:`missing`, it is made now. All of the step's gradient must have been folded then.
        """
        waited, self.unproven = 0.0, False
        if self.sends_all(step):
            self.active, self.uses = None, 0
            return None, waited
        if self.missing(step):
            self._ranking = self._new_ranking(self.schedule.sent(step), state)
            self._rank(self._ranking, state)
            self.launch(state)
            waited = self.wait()
            self.unproven = True
        self.uses += 1
        return self.active, waited

    def _rank(self, ranking: Ranking, state: ScapeState) -> None:
        """Ranks the residual as it is."""
        if ranking.proposals is not None:
            for rows in self._layout.remote(self._comm.rank).rows:
                ranking.proposals[rows] = ops.propose(state.residual[rows], self._config.votes)
        if ranking.own is not None:
            ranking.own.copy_(ops.select(state.residual[self._layout.rows_of(self._comm.rank)], ranking.sent))

    # ------------------------------------------------------------------------------------------- the next mask

    def ranking(self, step: int, state: ScapeState) -> Ranking | None:
        """Memory for the next mask's ranking, which the sweeps of ``step`` fill; None if no mask is due.

        None is due when the next step sends everything, when the active mask serves ``interval`` steps and has not yet,
        or when this step sends everything: then nothing is left in the residual to rank, and the next step makes its
        mask from its own gradient.
        """
        sent = self.schedule.sent(step + 1)
        served = self.active is not None and (self.uses >= self.interval or self.active.shape[1] != sent)
        self._ranking = self._new_ranking(sent, state) if served and not self.sends_all(step + 1) else None
        return self._ranking

    def _new_ranking(self, sent: int, state: ScapeState) -> Ranking:
        layout, ranking, home = self._layout, Ranking(sent), state.residual.device
        if self._config.votes and layout.world_size > 1:
            width = ops.proposal_bytes(self._config.votes, layout.block_size)
            ranking.proposals = torch.empty(layout.blocks, width, dtype=torch.uint8, device=home)
            ranking.proposals[layout.rows_of(self._comm.rank)] = 0
        elif state.local_exp_avg_sum is None and ops.sweep_selects(sent, home):
            positions = ops.position_dtype(layout.block_size)
            ranking.own = torch.empty(layout.shard_blocks, sent, dtype=positions, device=home)
        return ranking

    def launch(self, state: ScapeState) -> None:
        """Launches the exchange of the mask that was ranked, if any; on CUDA behind all work queued so far."""
        ranking, self._ranking = self._ranking, None
        if ranking is None:
            return
        device = state.step.device
        if state.residual.is_cuda:  # it may be freed, with this optimizer, before the side stream has read it
            for read in (state.residual, state.local_exp_avg_sum, ranking.proposals, ranking.own):
                if read is not None:
                    read.record_stream(self._comm.side_stream(device))
        shape, positions = (self._layout.blocks, ranking.sent), ops.position_dtype(self._layout.block_size)
        full = functools.partial(torch.empty, shape, dtype=positions, device=device)
        own_part = functools.partial(self._own_part, ranking, state)
        self.pending = self._comm.exchange_mask(full, own_part, device, ranking.proposals)

    def _own_part(self, ranking: Ranking, state: ScapeState, received: Tensor | None) -> Tensor:
        """This rank's part of the next mask, ``[R, q]``, from its own statistic and the other ranks' proposals."""
        device = state.step.device
        if ranking.own is not None:
            return ranking.own.to(device)
        statistic = state.residual[self._layout.rows_of(self._comm.rank)]
        if state.local_exp_avg_sum is not None:
            statistic = state.local_exp_avg_sum
        if received is None:
            return ops.select(statistic, ranking.sent).to(device)
        received = received.to(statistic.device)
        return ops.merge(statistic, received, self._comm.rank, self._config.votes, ranking.sent).to(device)

    # ------------------------------------------------------------------------------------------- loads and skips

    def restore(self, mask: Tensor | None, uses: int) -> None:
        """Takes up a mask that was saved, to be used next; None leaves it to the next step to make one."""
        self.active, self.uses, self.unproven = mask, uses, False

    def drop_unproven(self) -> None:
        """After a skipped step: drops the mask made in that step, and the next one; their residual had no gradient."""
        if self.unproven:
            self.wait()
            self.restore(None, 0)
