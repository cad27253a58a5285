"""All about masks: choice, exchange, and the delay of one step.

Two of SCAPE's five points live here (docs/design.md, 1). *Partitioned mask generation*: each rank makes the mask of one
shard. Ranks take turns: in step t rank (j + t) mod N makes that of shard j, from its own residual there. *Delayed
mask*: it is made in step t-1 from the residual which that step leaves, exchanged during forward and backward of step t,
and used at the end of step t.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Work
from lightning_scape.core.layout import Layout
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.state import ScapeState, Step


class Masks:
    """The mask in use and the one under way."""

    def __init__(self, layout: Layout, comm: ScapeCommunicator, config: ScapeConfig) -> None:
        self.config = config
        self.active: Tensor | None = None
        """``[blocks, q]``, the mask last used, or the next one, once it has come; None after a load."""
        self.pending: Work | None = None
        """The exchange of a mask under way: of its positions, or, where that takes less, of a bit for each entry."""
        self._pending_sent = self._pending_turn = 0
        self._layout, self._comm = layout, comm

    def wait(self) -> float:
        """Waits for the mask under way, if any; returns the seconds the CPU waited."""
        pending, self.pending = self.pending, None  # first: where waiting fails, nobody waits for it again
        if pending is None:
            return 0.0
        began = time.perf_counter()
        arrived = pending.wait()
        waited = time.perf_counter() - began
        turns = self._pending_turn % self._layout.world_size
        if turns:  # they came in the order of their makers
            rows = -turns * self._layout.shard_blocks
            arrived = arrived.view(torch.uint8).roll(rows, 0).view(arrived.dtype)  # torch rolls no 16 bits
        if self._as_bits(self._pending_sent):
            arrived = ops.unpack_mask(arrived, self._pending_sent, self._layout.block_size)
        self.active = arrived
        return waited

    def _as_bits(self, sent: int) -> bool:
        """Whether a mask of so many entries travels as bits. Its positions come out in ascending order."""
        return self._layout.world_size > 1 and ops.as_bits(sent, self._layout.block_size)

    def of(self, step: Step) -> Tensor | None:
        """The mask of a step, made in the one before; None: the step sends everything.

        Two steps make it now, and wait for it. One has folded its own gradient, all of it, for nothing was left to
        rank. The other is the first after a load: its mask comes again from what the step before has left.
        """
        if step.sent == self._layout.block_size:
            self.active = None
        elif step.folded or self.active is None:
            self.launch(step.state, step.state.calls + step.folded)
            step.stats.exchange_wait += self.wait()
        return self.active

    def launch(self, state: ScapeState, turn: int) -> None:
        """Ranks the shard whose turn it is with this rank, and exchanges the coming step's mask, beside what follows.

        On CUDA that is behind all work queued so far. Nobody changes the residual till then. The turn goes by the CPU's
        count of steps, for a GPU learns late which were skipped.
        """
        sent = self.config.sent(state.calls)
        layout, residual, device, bits = self._layout, state.residual, state.step.device, self._as_bits(sent)
        self._pending_sent, self._pending_turn = sent, turn
        rows = layout.rows_of((self._comm.rank - turn) % layout.world_size)

        def mine() -> Tensor:
            chosen = ops.select(residual[rows], sent)
            return ops.pack_mask(chosen, layout.block_size) if bits else chosen

        columns = ops.mask_bytes(sent, layout.block_size) if bits else sent
        dtype = torch.uint8 if bits else ops.position_dtype(layout.block_size)
        stream = self._comm.side_stream(device)
        if stream is not None:  # the residual may be freed, with this optimizer, before it has been read there
            stream.wait_stream(torch.cuda.current_stream(device))
            residual.record_stream(stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            full = torch.empty(layout.blocks, columns, dtype=dtype, device=device)
            self.pending = self._comm.gather_mask(mine, full)
