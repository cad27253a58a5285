"""SCAPE's messages: what a step sends, and those of the masks.

A step sends four messages, however many parameters or layers there are:

========== ================================ ============================================ ==================
kind       call                             bytes a rank sends                           when
========== ================================ ============================================ ==================
norm       all-reduce, fp32                 2 (N-1)/N * (16 KB or 16 B, + 4 B a tensor)  before the sweep
values     all-to-all, wire dtype           (N-1)/N * k * 0.53 (int4), 1.03, 2 or 4      during the local sweep
parameters all-gather, wire dtype or own    (N-1)/N * k * the same, or itemsize          after the update
mask       all-gather, uint8 or uint16      (N-1)/N * k * 1 or 2; P/8 at most            during the next step
========== ================================ ============================================ ==================

``ScapeConfig.wire_dtype`` says how values travel, and whether changes or values come back. The mask travels on a
process group of its own (on CUDA: communicator and stream), so that it never queues behind, nor holds up, the messages
of the step or of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_scape import ops
from lightning_scape.comm import collectives
from lightning_scape.comm.collectives import Communicator, ProcessGroup, Work, group_beside
from lightning_scape.core.layout import Layout
from lightning_scape.ops.naive.wire import packed_bytes
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.opening import DIGITS, width


def scape_bytes(
    numels: Sequence[int], ranks: int, config: ScapeConfig, sent: int | None = None, back: int = 4
) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind; exactly what the package counts.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: sparsity, wire dtype and rule of clipping are used.
        sent: entries per block, q; None is the number at the end of the warm-up.
        back: bytes of a value that comes back, where nothing is packed.
    """
    block_size, sent = config.quota.block_size, config.quota.sent if sent is None else sent
    blocks = Layout(numels, [0] * len(numels), block_size, ranks).blocks
    mine = blocks // ranks * sent
    buffers = {
        "norm": 2 * 4 * (width(config, ranks) + len(numels) + DIGITS),
        "values": ranks * (packed_bytes(mine) if config.packed else 4 * mine),
        "parameters": ranks * (packed_bytes(mine) if config.packed else back * mine),
        "mask": blocks * ops.mask_bytes(sent, block_size) if sent < block_size else 0,
    }
    return {kind: size * (ranks - 1) // ranks for kind, size in buffers.items()}


def run_bytes(numels: Sequence[int], ranks: int, config: ScapeConfig, steps: int) -> int:
    """Bytes that a rank sends in the first steps of a run, warm-up included."""
    of_step = functools.partial(scape_bytes, numels, ranks, config)
    whole = sum(count * sum(of_step(sent).values()) for sent, count in config.sent_by_step(steps).items())
    # Each sparse step sends the mask of the next one, and the first its own, too.
    return whole + (of_step(config.sent(steps))["mask"] if of_step(config.sent(steps - 1))["mask"] else 0)


class ScapeCommunicator(Communicator):
    """The messages of one optimizer under SCAPE."""

    mask_group: ProcessGroup | None = None
    """The masks' own group."""
    _stream: torch.cuda.Stream | None = None

    @classmethod
    @override
    def of_optimizer(cls, process_group: ProcessGroup | None) -> Self:
        made = super().of_optimizer(process_group)
        made.mask_group = group_beside(process_group, "masks")
        return made

    def side_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """On CUDA a stream of this optimizer's own, beside the one on which it computes; elsewhere there is none."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def gather_mask(self, make: Callable[[], Tensor], full: Tensor) -> Work:
        """Fills ``full [N*R, q]`` with every rank's rows ``[R, q]`` of a mask, in the order of ranks, beside the step.

        Args:
            make: gives this rank's rows. It runs on a thread; on CUDA at once, for there a stream orders the work.
            full: as the mask travels.
        """

        def act() -> None:
            mine = make()
            if self.world_size == 1:
                full.copy_(mine)
            else:
                collectives.all_gather_into(full, mine, self.mask_group)()

        self.traffic.count("mask", full.nbytes, self.world_size)
        if full.is_cuda or self.mask_group is None:
            act()
            return Work(full, stream=self.side_stream(full.device))
        return Work(full, self._beside.thread.submit(torch.no_grad()(act)).result)
