"""The step of SCAPE (arXiv 2607.01678), as a straight line.

Symbols: ``P`` parameters, ``N`` data-parallel ranks, ``B`` block length, ``q`` entries sent per block, ``R`` blocks of
a shard, ``t`` step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.work import Work
from lightning_scape.core.layout import Layout, Piece
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.ranges import profiler_range
from lightning_scape.core.replicas import check_replicas
from lightning_scape.scape.clipping import GradientClipping, check_max_norm
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.cost import message_bytes
from lightning_scape.scape.first_message import FirstMessage
from lightning_scape.scape.mask import Masks, SparsitySchedule
from lightning_scape.scape.opening import Groups, Opening
from lightning_scape.scape.rows import Participants
from lightning_scape.scape.shard import Outgoing, Shard
from lightning_scape.scape.state import ScapeState, Step
from lightning_scape.scape.stats import StepRecord, StepStats


class Engine:
    """Everything that a step needs, apart from torch's interface of an optimizer.

    :class:`~lightning_scape.ScapeOptimizer` holds one as ``engine``, and gives it the parameter groups at each call.
    Fabric's wrapper shares it by reference. Tests, simulated ranks and benchmarks look at training through it.

    Args:
        parameters: those trained.
        config: all options; ``update`` is not None.
        comm: sends the messages.
        node: messages between the ranks that hold the other rows of the same replica.
    """

    def __init__(
        self,
        parameters: Parameters,
        config: ScapeConfig,
        comm: ScapeCommunicator,
        node: Communicator,
    ) -> None:
        self.config, self.parameters, self.comm, self.node = config, parameters, comm, node
        self.everyone = comm if node.world_size == 1 else Communicator()
        """All ranks whose parts make up a state."""
        numels = [parameter.numel() for parameter in parameters.local]
        self.layout = Layout(numels, parameters.groups, config.quota.block_size, comm.world_size)
        self.state: ScapeState | None = None
        """Made at the first step, or by a load."""
        self.clipping = GradientClipping(config, FirstMessage(comm, node, len(numels)))
        self.opening = Opening(parameters, comm, self.clipping)
        self.participants = Participants(self.layout, len(numels), self.layout.rows_of(comm.rank))
        self.masks = Masks(self.layout, comm, SparsitySchedule.of(config))
        self.outgoing, self.shard = _by_wire(self)
        self.record: StepRecord | None = None
        """Raw figures of the last step."""
        self._stats: StepStats | None = None
        self.consolidated: dict[str, Any] | None = None
        """The whole state as it was collected. Kept here: an attribute set on Fabric's wrapper would be lost."""
        self._clip_seconds = 0.0
        """Seconds spent on measuring the norm before the step."""
        self._masters_stale = False
        self._one_by_one = parameters.share_memory
        """Whether parameters that share memory are written one after the other, in the same order on all ranks: each
        sum is rounded, and a GPU would write two at once."""

    # ------------------------------------------------------------------------------------------- the step

    def step(self, groups: Groups) -> None:
        """Exchanges the masked entries and updates them. Collective.

        ======== ==============================================================================================
        norm     the scale of the step: the clipping factor, or 0 if a gradient is not finite
        wait     the mask that was made in the last step arrives
        mask     the first sparse step makes its own
        sweep    fold and compact, in one pass over memory: other ranks' shards, then, while those values
                 travel, my shard
        exchange all-to-all of the values; the owner averages them in rank order, in fp32
        update   tau steps of AdamW (AdamS) at once on the masked entries of my shard
        write    all-gather of the changes, or values; every rank applies them
        launch   the next mask is made and exchanged beside what follows; the next step waits for it
        ======== ==============================================================================================

        Args:
            groups: the optimizer's parameter groups.

        Raises:
            FloatingPointError: ``max_skipped`` consecutive steps had a gradient that is not finite.
            RuntimeError: replicas differ (first step, and every ``check_replicas_every``), or gradients have changed
                since they were clipped.
        """
        record = self._begin()
        with record.phase("norm"):
            step = self._agree(groups, record)
        with record.phase("wait"):
            record.exchange_wait = self.masks.wait()
        with record.phase("mask"):
            if self.masks.missing(step):  # the step ranks its own gradient, all of it
                self.outgoing.fold(step)
                self.shard.fold(step)
                step.folded = True
                self.masks.make_now(step)
            step.mask = self.masks.of(step)
        with record.phase("sweep"):
            message = self.outgoing.take(step)
        with record.phase("exchange"):
            arriving = self.comm.all_to_all(message)
        with record.phase("sweep"):
            mine = self.shard.take(step)
        with record.phase("exchange"):
            arrived = self.outgoing.arrived(arriving.wait(), mine)
            mean = ops.mean(arrived, step.state.exp_avg.dtype)
            summed = None if step.mask.mine is None else mine  # where everything is sent, the mean says all
            del message, mine, arriving, arrived
        with record.phase("update"):
            message, update = self.shard.update(step, mean, summed)
        with record.phase("write"):
            self._write(step, update, self.comm.all_gather(message))
        with record.phase("launch"):
            self.masks.launch(step)
        self._end(step)

    def _begin(self) -> StepRecord:
        self.consolidated = None
        self.clipping.check_unchanged(self.parameters.raw_gradients())
        self._finish_last_step()
        self.record, self._stats = StepRecord(), None
        self.record.seconds["norm"], self._clip_seconds = self._clip_seconds, 0.0
        return self.record

    def _agree(self, groups: Groups, record: StepRecord) -> Step:
        """Returns the step with its scale. All ranks know it from the first message, which clipping may have sent.

        Allocates buffers at the first step, and brings masters up to date.
        """
        grads = self.opening.gradients(groups, self.calls)
        answer, scale = self.clipping.answer, self.clipping.scale()
        assert answer is not None
        self.parameters.flatten()
        state = self.state = self.state or self.allocate()
        if not self.opening.compared:  # the first step, or the first after a load
            self.check_replicas()
            self.opening.compared = True
        self._refresh_masters(state)
        record.norm, record.scale = answer.norm, scale
        taking_part, sent = self.participants.of(state, scale, answer.present), self.masks.schedule.sent(state.calls)
        return Step(state, groups, grads, record, taking_part, sent)

    def _write(self, step: Step, update: Tensor, arriving: Work) -> None:
        """Applies the owners' updates: my own while the others' travel. Skipped parameters are not written."""
        own, others = self.shard.region, self.outgoing.region
        mask, scale, error = step.mask, step.scale, self.shard.error_of_rounding(step.state)
        if self._one_by_one:
            everyone = self.shard.read(step, arriving.wait(), others.rows)
            before = sum(piece.row < self.shard.rows.start for piece in others.pieces)
            for piece in others.pieces[:before]:
                self._scatter([piece], mask.everyone, everyone, scale.blocks)
            for piece in own.pieces:
                self._scatter([piece], mask.mine, update, scale.mine, error)
            for piece in others.pieces[before:]:
                self._scatter([piece], mask.everyone, everyone, scale.blocks)
            return
        try:  # the moments have gone on, and so must all parameters
            self._scatter(own.pieces, mask.mine, update, scale.mine, error)
        finally:
            everyone = self.shard.read(step, arriving.wait(), others.rows)
            self._scatter(others.pieces, mask.everyone, everyone, scale.blocks)

    def _scatter(
        self, pieces: Sequence[Piece], mask: Tensor | None, values: Tensor, scale: Tensor, error: Tensor | None = None
    ) -> None:
        entries = ops.ParamEntries(self.parameters.flat, pieces, mask, self.layout.block_size)
        ops.scatter_params(entries, values, self.shard.as_changes, scale, error)

    def _end(self, step: Step) -> None:
        state, every = step.state, self.config.check_replicas_every
        state.calls += 1
        self.opening.used()
        step.record.bytes_sent, step.record.message_seconds = self.comm.traffic.take()
        if every and state.calls % every == 0:
            self.check_replicas()
        self.clipping.record_found_inf(step.scale.whole)

    def _finish_last_step(self) -> None:
        """On CUDA the CPU learns now whether the last step was skipped."""
        self.clipping.wait_found_inf()
        if self.clipping.last_skipped:
            self.masks.drop_unproven()

    def check_replicas(self) -> None:
        """Raises on every rank if any rows differ between replicas."""
        self.parameters.flatten()
        flat, names = self.parameters.flat, self.parameters.names
        self.node.raise_on_all_ranks(lambda: check_replicas(self.comm, flat, names, ops.checksum))

    @property
    def calls(self) -> int:
        """Calls of :meth:`step` so far, skipped and restored ones included."""
        return 0 if self.state is None else self.state.calls

    def clip_grad_norm(self, groups: Groups, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """See :meth:`ScapeOptimizer.clip_grad_norm`."""
        began = time.perf_counter()
        with profiler_range("scape::norm"):
            self._finish_last_step()
            check_max_norm(max_norm)
            grads = self.opening.gradients(groups, self.calls, max_norm)
            norm = self.clipping.clip(max_norm, strict=error_if_nonfinite)
            self.opening.measured(grads)
        self._clip_seconds = time.perf_counter() - began
        return norm

    def all_finite(self, groups: Groups) -> bool:
        """See :meth:`ScapeOptimizer.all_finite`."""
        self._finish_last_step()
        self.opening.ask_anew()
        grads = self.opening.gradients(groups, self.calls)
        assert self.clipping.answer is not None
        finite = bool(torch.isfinite(self.clipping.answer.norm))
        self.opening.measured(grads)
        return finite

    def stats(self) -> StepStats | None:
        """See :attr:`ScapeOptimizer.stats`."""
        if self._stats is None and self.record is not None and self.state is not None:
            self.record.skipped_total = self.clipping.skipped_total
            self._stats = self.record.summary(
                self.state.calls, self.state.residual, self.parameters.local, self.layout, self.shard.region.pieces
            )
        return self._stats

    def allocate(self) -> ScapeState:
        """Buffers, all zeros."""
        return ScapeState.allocate(self.layout, self.config, self.parameters.state_dtype, self.parameters.device)

    def state_at_rest(self) -> ScapeState:
        """The state with nothing pending, as a checkpoint holds it."""
        self.masks.wait()
        self._finish_last_step()
        state = self.state or self.allocate()
        if state.master is not None:
            self.parameters.flatten()
            self._refresh_masters(state)
        return state

    def replace_state(self, state: ScapeState, config: ScapeConfig) -> None:
        """Goes on from a loaded state, which may have another wire."""
        self.state, self.config = state, config
        self.outgoing, self.shard = _by_wire(self)
        self.clipping.found_inf = self.record = self._stats = self.consolidated = None
        # Parameters may be loaded before or after. A master that does not round to its parameter is read anew.
        self._masters_stale, self.opening.compared = True, False

    def mark_masters_stale(self) -> None:
        """See :meth:`ScapeOptimizer.mark_masters_stale`."""
        self._masters_stale, self.consolidated = True, None

    def _refresh_masters(self, state: ScapeState) -> None:
        self.shard.refresh(state, stale=self._masters_stale)
        self._masters_stale = False

    def bytes_per_step(self, sent: int | None = None) -> int:
        """See :meth:`ScapeOptimizer.bytes_per_step`."""
        back = None if self.shard.as_changes else self.parameters.wire_dtype.itemsize
        return sum(message_bytes(self.config, self.layout.blocks, self.comm.world_size, back, sent).values())


def _by_wire(engine: Engine) -> tuple[Outgoing, Shard]:
    """The parts of an engine that depend on the wire."""
    layout, rank, config = engine.layout, engine.comm.rank, engine.config
    return Outgoing(layout, rank, config), Shard(layout, rank, config, engine.parameters, engine.participants)
