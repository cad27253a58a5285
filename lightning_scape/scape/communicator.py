"""SCAPE's messages: what a step sends, and those of the masks.

A step sends five messages, however many parameters or layers there are:

========== ================================ ============================================ ==================
kind       call                             bytes a rank sends                           when
========== ================================ ============================================ ==================
norm       all-reduce, fp32                 2 (N-1)/N * 16 KB (sketch), or some 24 B     before the sweep
values     all-to-all, wire dtype           (N-1)/N * k * 0.53 (int4), 1.03, 2 or 4      during the local sweep
parameters all-gather, wire dtype or own    (N-1)/N * k * the same, or itemsize          after the update
mask       all-gather, uint8 or uint16      (N-1)/N * k * 1 or 2; P/8 at most            during the next step
proposals  all-to-all, uint8                (N-1)/N * (P/B) * (V * (2 or 3) + 1)         during the next step
========== ================================ ============================================ ==================

``ScapeConfig.wire_dtype`` says how values travel, and whether changes or values come back. ``V`` is
``ScapeConfig.proposed``; if it is 0, there is no fifth message. Mask and proposals travel on a process group of their
own (on CUDA: communicator and stream), so that they never queue behind, nor hold up, the messages of the step or of
the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_scape import ops
from lightning_scape.comm import pairs, under_way
from lightning_scape.comm.collectives import Communicator, ProcessGroup
from lightning_scape.comm.lost_ranks import explained_loss
from lightning_scape.comm.work import Work
from lightning_scape.comm.worker import Worker

KINDS = ("norm", "values", "parameters", "mask", "votes")
"""Kinds of messages, by which their bytes are counted."""


class Election(NamedTuple):
    """What owners make the next mask from, with the proposals of all ranks."""

    residual: Tensor
    """fp32 ``[R, B]``: this rank's residual of its shard."""
    proposals: Tensor
    """uint8 ``[N*R, W]``: this rank's proposals for all shards."""
    proposed: int
    """Entries that a rank proposes for a block."""
    sent: int
    """q of the next step."""
    full: Tensor
    """``[N*R, q]``, or bits, uint8 ``[N*R, B/8]``: filled with the mask of all ranks, as it travels."""
    block_size: int | None
    """B where the mask travels as bits, else None."""


@dataclass
class ScapeCommunicator(Communicator):
    """The messages of one optimizer under SCAPE."""

    mask_group: ProcessGroup | None = None
    """The masks' own group, from :func:`lightning_scape.comm.collectives.new_group_like`."""

    @classmethod
    def with_masks(cls, process_group: ProcessGroup | None, mask_group: ProcessGroup | None) -> Self:
        """As :meth:`of_optimizer`, with a group for the masks. Collective."""
        under_way.settle(mask_group)  # what others began on it before
        made = cls.of_optimizer(process_group)
        made.mask_group = mask_group
        return made

    def gather_mask(self, mine: Tensor) -> Work:
        """``[N*R, q]`` arrive: every rank's rows ``[R, q]`` of the next mask, after what the group's thread sends."""
        if self.world_size == 1:
            return Work(mine, stream=self.side_stream.stream)
        full = mine.new_empty((self.world_size * mine.shape[0], mine.shape[1]))
        self.traffic.count("mask", full.nbytes, self.world_size)
        worker = None if mine.is_cuda else Worker.existing(self.mask_group)  # a thread has a stream of its own
        with explained_loss():
            if worker is None:
                handle = pairs.all_gather_into(full, mine, self.mask_group, async_op=True)
            else:
                handle = worker.do(lambda: pairs.all_gather_into(full, mine, self.mask_group))
        work = Work(full, mine, handle, stream=self.side_stream.stream)
        under_way.note(self.mask_group, work)
        return work

    def elect(self, election: Election) -> Work:
        """Begins an election on the mask group's own thread; the work's result is the mask."""
        self.traffic.count("mask", election.full.nbytes, self.world_size)
        self.traffic.count("votes", election.proposals.nbytes, self.world_size)
        return self.beside(functools.partial(self._elect, election), election.full)

    def beside(self, act: Callable[[], None], result: Tensor) -> Work:
        """Calls ``act`` beside the step: on a thread; on CUDA at once, for there a stream orders the messages."""
        if result.device.type == "cuda":
            act()
            return Work(result, stream=self.side_stream.stream)
        assert self.mask_group is not None
        return Work(result, handle=Worker.of(self.mask_group).do(act), waiting=contextlib.nullcontext)

    def _elect(self, election: Election) -> None:
        residual, proposals, proposed, sent, full, block_size = election
        received = self.exchange_proposals(proposals).to(residual.device)
        mine = ops.merge(residual, received, self.rank, proposed, sent).to(full.device)
        self.gather_elected(full, mine if block_size is None else ops.pack_mask(mine, block_size))

    def exchange_proposals(self, proposals: Tensor) -> Tensor:
        """``[N, R, W]``: every rank's proposals for this rank's shard, from those of each, ``[N*R, W]``. Waits."""
        received = torch.empty_like(proposals)
        with explained_loss():
            pairs.all_to_all_into(received, proposals, self.mask_group)
        return received.view(self.world_size, -1, proposals.shape[1])

    def gather_elected(self, full: Tensor, mine: Tensor) -> None:
        """Fills ``full [N*R, q]`` with every rank's rows ``[R, q]``. Waits."""
        with explained_loss():
            pairs.all_gather_into(full, mine, self.mask_group)
