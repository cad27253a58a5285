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

``wire_dtype="int4"`` takes 0.53 bytes for a value, ``"int8"`` 1.03; parameters come back as changes in as many bits.
From ``"bf16"`` and ``"fp32"`` those wider than that do; others, and those with masters, come back as values. ``V`` is
``ScapeConfig.proposed``; where it is 0 there is no fifth message. Mask and proposals travel on a process group of their
own (on CUDA: communicator and stream), so that they never queue behind, nor hold up, the messages of the step or of the
model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_scape.comm import pairs, under_way
from lightning_scape.comm.collectives import Communicator, ProcessGroup
from lightning_scape.comm.lost_ranks import explained_loss
from lightning_scape.comm.work import Work
from lightning_scape.comm.worker import Worker

KINDS = ("norm", "values", "parameters", "mask", "votes")
"""Of messages, as they are counted."""


@dataclass
class ScapeCommunicator(Communicator):
    """The messages of one optimizer under SCAPE."""

    mask_group: ProcessGroup | None = None
    """For those of the masks: from :func:`lightning_scape.comm.collectives.new_group_like`."""

    @classmethod
    def with_masks(cls, process_group: ProcessGroup | None, mask_group: ProcessGroup | None) -> Self:
        """As :meth:`of_optimizer`, with a group for the masks. Collective."""
        under_way.settle(mask_group)  # of those who sent on it before
        made = cls.of_optimizer(process_group)
        made.mask_group = mask_group
        return made

    def gather_mask(self, mine: Tensor) -> Work:
        """``[N*R, q]`` arrive: every rank's rows ``[R, q]`` of the next mask. Behind what the group's thread sends."""
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

    def in_background(self, elect: Callable[[], None], full: Tensor, proposals: Tensor) -> Work:
        """Runs ``elect`` on the mask group's own thread; on CUDA at once, for there a stream orders the messages.

        Args:
            elect: calls :meth:`exchange_proposals` with the proposals, then :meth:`gather_elected` into ``full``.
            full: ``[N*R, q]``, the next mask; what is waited for.
            proposals: ``[N*R, W]``, this rank's for all shards.
        """
        self.traffic.count("mask", full.nbytes, self.world_size)
        self.traffic.count("votes", proposals.nbytes, self.world_size)
        if proposals.device.type == "cuda":
            elect()
            return Work(full, stream=self.side_stream.stream)
        assert self.mask_group is not None
        return Work(full, handle=Worker.of(self.mask_group).do(elect), waiting=contextlib.nullcontext)

    def exchange_proposals(self, proposals: Tensor) -> Tensor:
        """``[N, R, W]``: every rank's proposals for this rank's shard, of ``[N*R, W]``. Waits."""
        received = torch.empty_like(proposals)
        with explained_loss():
            pairs.all_to_all_into(received, proposals, self.mask_group)
        return received.view(self.world_size, -1, proposals.shape[1])

    def gather_elected(self, full: Tensor, mine: Tensor) -> None:
        """Fills ``full [N*R, q]`` with every rank's rows ``[R, q]``. Waits."""
        with explained_loss():
            pairs.all_gather_into(full, mine, self.mask_group)
