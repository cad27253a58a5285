"""The step of SCAPE (arXiv 2607.01678), as a straight line.

Symbols: ``P`` parameters, ``N`` data-parallel ranks, ``B`` block length, ``q`` entries sent per block, ``R`` blocks of
a shard, ``t`` step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator, Work
from lightning_scape.core.layout import Layout
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.ranges import profiler_range
from lightning_scape.core.replicas import check_replicas
from lightning_scape.scape.clipping import GradientClipping
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.cost import message_bytes
from lightning_scape.scape.first_message import BACKWARD, Standing, describe, problem_of, settings
from lightning_scape.scape.mask import Masks, SparsitySchedule
from lightning_scape.scape.participation import Participants, Participation
from lightning_scape.scape.region import LocalRegion, RemoteRegion
from lightning_scape.scape.shard import OwnShard
from lightning_scape.scape.state import ScapeState
from lightning_scape.scape.stats import StepRecord, StepStats


class Engine:
    """Everything that a step needs, apart from torch's interface of an optimizer.

    :class:`~lightning_scape.ScapeOptimizer` holds one as ``engine``. Fabric's wrapper shares it by reference. Tests,
    simulated ranks and benchmarks look at training through it.

    Args:
        param_groups: of the optimizer, read anew at each step.
        parameters: those trained.
        config: all options; ``update`` is given.
        comm: sends the messages.
        total_steps: steps of the run, where known.
        shards: messages between the ranks that hold the other rows of the same replica; None: there are none.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        parameters: Parameters,
        config: ScapeConfig,
        comm: Communicator,
        total_steps: float | None = None,
        shards: Communicator | None = None,
    ) -> None:
        self.config, self.parameters, self.comm = config, parameters, comm
        self.shards = shards or Communicator.alone()
        numels = [parameter.numel() for parameter in parameters.local]
        self.layout = Layout(numels, parameters.groups, config.quota.block_size, comm.world_size)
        self.state: ScapeState | None = None
        """Made at the first step, or by a load."""
        self.clipping = GradientClipping(config, comm, self.shards)
        self.clipping.first_message.expect(len(numels))
        self.participants = Participants(self.layout, len(numels))
        schedule = SparsitySchedule.of(config, total_steps)
        self.masks = Masks(config, self.layout, comm, schedule)
        self.remote = RemoteRegion(self.layout, comm.rank, config)
        self.local = LocalRegion(self.layout, comm.rank, config, param_groups)
        self.shard = OwnShard(self.layout, comm.rank, config, parameters, self.participants, param_groups)
        self.record: StepRecord | None = None
        """Of the last step."""
        self._stats: StepStats | None = None
        self._clip_seconds = 0.0
        self._masters_stale = False
        self._compared = False
        self.batch: int | None = None
        """Batches of the epoch so far, where the host says it."""
        self.left_out = 0
        """Gradients that were dropped before a step used them."""
        self._used = True
        """Whether all ranks have used the gradients that there are, or none was there."""
        self._cleared: list[int | None] = []
        """:meth:`_versions` after gradients were cleared."""

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self.parameters.device

    def follow(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Reads hyperparameters off these groups from now on; they hold the same parameters."""
        self.local.param_groups = self.shard.param_groups = param_groups

    # ------------------------------------------------------------------------------------------- the step

    def step(self) -> None:
        """Exchanges the masked entries and updates them. Collective.

        ======== ==============================================================================================
        norm     the scale of the step: the clipping factor, or 0 if a gradient is not finite
        wait     the mask that was made in the last step arrives
        mask     the first sparse step makes its own
        sweep    fold, compact and rank, in one pass over memory: other ranks' shards, then, while those values
                 travel, the own shard
        exchange all-to-all of the values; the owner averages them in rank order, in fp32
        update   tau steps of AdamW (AdamS) at once on the masked entries of the own shard
        write    all-gather of the changes, or values; every rank applies them
        launch   the exchange of the next mask begins; the next step waits for it
        ======== ==============================================================================================

        Raises:
            FloatingPointError: ``max_skipped`` consecutive steps had a gradient that is not finite.
            RuntimeError: replicas differ (first step, and every ``check_replicas_every``), or gradients have changed
                since they were clipped.
        """
        record, clip_value = self._begin(), self.clipping.clip_value
        with record.phase("norm"):
            grads, scale = self._agree()
            state = self._ready()
            part = self.participants.of(state, scale, self.clipping.present)
        with record.phase("wait"):
            record.exchange_wait = self.masks.wait()
        with record.phase("mask"):
            missing = self.masks.missing(state.calls)
            if missing:  # the step ranks its own gradient, all of it
                self.remote.fold(state, grads, part, clip_value)
                self.local.fold(state, grads, part, clip_value)
            unfolded = None if missing else grads
            mask, waited = self.masks.current(state.calls, state)
            record.exchange_wait += waited
            ranking = self.masks.ranking(state.calls, state)
            there = None if mask is None else mask.to(state.residual.device)
        with record.phase("sweep"):
            values = self.remote.sweep(state, unfolded, there, part, ranking, clip_value)
            message = self.remote.pack(state, there, values, self.device)
            del values
        with record.phase("exchange"):
            arriving = self.comm.all_to_all(message)
        with arriving, record.phase("sweep"):
            own = self.local.sweep(state, unfolded, there, part, ranking, clip_value).to(self.device)
            record.sent_energy = ops.squared_norm([own, *self.remote.sent(message, own.shape[1])])
        with record.phase("exchange"):
            mean = self._mean(arriving.wait(), own, state.exp_avg.dtype)
            del message, own, arriving
        with record.phase("update"):
            updated, record.again = self.shard.update(state, mask, mean, part)
            record.sent = mean.shape[1]
        with record.phase("write"):
            self._write(mask, updated, part, self.comm.all_gather(updated))
        with record.phase("launch"):
            self.masks.launch(state)
        self._end(state, scale)

    def _begin(self) -> StepRecord:
        self.comm.place = f"step {self.calls + 1} of optimizer {self.comm.number}"
        self.clipping.check_unchanged(self.parameters.raw_gradients())
        self._finish_last_step()
        self.record, self._stats = StepRecord(clip_seconds=self._clip_seconds), None
        self._clip_seconds = 0.0
        return self.record

    def _agree(self) -> tuple[list[Tensor | None], Tensor]:
        """Flat gradients and the step's scale. Its message, the first, is sent unless clipping has sent it."""
        grads, error = self._gradients()
        with self._raising(error):
            return grads, self.clipping.scale(grads, self.device, self._standing(error))

    def _ready(self) -> ScapeState:
        """Allocates buffers at the first step, and brings masters up to date."""
        self.parameters.flatten()
        state = self.state = self.state or self.allocate()
        if not self._compared:  # the first step, or the first after a load
            self._check_replicas()
            self._compared = True
        self._refresh_masters(state)
        return state

    def _gradients(self) -> tuple[list[Tensor | None], Exception | None]:
        """Flat gradients; or what is wrong with them, or with the groups, which the first message tells all ranks."""
        try:
            if (problem := problem_of(self.shard.param_groups)) is not None:
                raise ValueError(problem)
            return self.parameters.gradients(self.shard.param_groups), None
        except Exception as error:
            return [None for _ in self.parameters.tensors], error

    @contextlib.contextmanager
    def _raising(self, error: Exception | None) -> Iterator[None]:
        """Around the first message: this rank's error is raised when all know of it, in place of what they are told."""
        if error is not None and (self.comm.world_size == 1 or self.device.type == "cuda"):
            raise error
        try:
            yield
        except RuntimeError as told:
            raise (error or told) from told.__cause__
        if error is not None:
            raise error

    def _standing(self, error: Exception | None) -> Standing:
        """What must be the same on all ranks in this step."""
        groups = self.shard.param_groups
        return Standing(
            self.comm.number,
            self.calls,
            self.left_out,
            self.batch,
            self._compared,
            settings(groups),
            problem=describe(error),
        )

    @property
    def calls(self) -> int:
        """Calls of :meth:`step` so far, skipped and restored ones included."""
        return 0 if self.state is None else self.state.calls

    def _finish_last_step(self) -> None:
        """On CUDA the host learns now whether the last step was skipped."""
        self.clipping.wait_found_inf()
        if self.clipping.last_skipped:
            self.masks.drop_unproven()
            if self.state is not None and self.state.sampled:  # the sample changed nothing
                self.state.local_samples -= 1
        if self.state is not None:
            self.state.sampled = False

    def _mean(self, received: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
        """A, ``[R, q]``: the mean over ranks of the values for this shard, summed in rank order."""
        wire = self.remote.wire
        contributions = list(received) if wire is None else [wire.read(each, *own.shape) for each in received]
        contributions[self.comm.rank] = own
        return ops.mean(contributions, dtype)

    def _write(self, mask: Tensor | None, updated: Tensor, part: Participation, arriving: Work) -> None:
        """Applies the owners' updates: the own ones while the others travel. What takes no part is not written."""
        flat, block_size, add = self.parameters.flat, self.layout.block_size, self.shard.as_changes
        try:  # the moments have gone on, and so must all parameters
            rows = self.local.rows
            own, here = None if mask is None else mask[rows], self._read_back(mask, updated, 1)
            ops.scatter_params(flat, self.local.pieces, own, here, block_size, add, part.of_rows(rows))
        finally:
            everyone = self._read_back(mask, arriving.wait(), self.comm.world_size)
            ops.scatter_params(flat, self.remote.pieces, mask, everyone, block_size, add, part.blocks)

    def _read_back(self, mask: Tensor | None, message: Tensor, shards: int) -> Tensor:
        """Updated values or changes, ``[shards * R, q]``; every rank reads the same."""
        if self.shard.wire is None:
            return message
        sent = self.layout.block_size if mask is None else mask.shape[1]
        return self.shard.wire.read(message, self.layout.shard_blocks, sent, shards)

    def _end(self, state: ScapeState, scale: Tensor) -> None:
        record, every = self.record, self.config.check_replicas_every
        assert record is not None
        state.calls += 1
        self._used = True
        record.norm, record.scale = self.clipping.norm, scale
        record.bytes_sent, record.message_seconds = self.comm.take_count()
        if every and state.calls % every == 0:
            self._check_replicas()
        self.clipping.record_found_inf(scale)

    def _check_replicas(self) -> None:
        """Raises on every rank where any rows differ between replicas."""
        flat, names = self.parameters.flat, self.parameters.names
        self.shards.raise_on_all_ranks(lambda: check_replicas(self.comm, flat, names, ops.checksum))

    # ------------------------------------------------------------------------------------------- around the step

    def clip_grad_norm(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """See :meth:`ScapeOptimizer.clip_grad_norm`."""
        began = time.perf_counter()
        with self.comm.telling_errors(), torch.no_grad(), profiler_range("scape::norm"):
            self.comm.place = f"step {self.calls + 1} of optimizer {self.comm.number}"
            self._finish_last_step()
            grads, error = self._gradients()
            with self._raising(error):
                norm = self.clipping.record_norm(
                    grads, max_norm, self.device, self._standing(error), strict=error_if_nonfinite
                )
            self._measured()
        self._clip_seconds = time.perf_counter() - began
        return norm

    def all_finite(self) -> bool:
        """See :meth:`ScapeOptimizer.all_finite`."""
        with self.comm.telling_errors(), torch.no_grad():
            self.comm.place = f"step {self.calls + 1} of optimizer {self.comm.number}"
            self._finish_last_step()
            grads, error = self._gradients()
            with self._raising(error):
                finite = self.clipping.all_finite(grads, self.device, self._standing(error))
            self._measured()
        return finite

    @property
    def ranks(self) -> int:
        """All that train together."""
        return self.comm.world_size * self.shards.world_size

    def norm_after_backward(self, grads: Sequence[Tensor]) -> Tensor:
        """Of these gradients: not finite if any rank's is not. Its message is told from the first one of a step."""
        self.comm.place = f"a backward pass after step {self.calls} of optimizer {self.comm.number}"
        measured = ops.squared_norm(grads).view(1) if grads else torch.zeros(1, dtype=torch.float32, device=self.device)
        standing = self._standing(None)._replace(optimizer=BACKWARD)
        with self.comm.telling_errors():
            answer = self.clipping.first_message.exchange(measured, [], standing)
            return self.clipping.first_message.over_shards(answer.measured.sum().sqrt(), answer)[0]

    def _measured(self) -> None:
        self.clipping.remember(self.parameters.raw_gradients())
        self._used = True  # by all ranks, also those without gradients; what follows is decided by the same norm

    def drop_gradients(self) -> None:
        """Before gradients are cleared: notes whether a step has used them, and forgets what was recorded of them."""
        changed = self._versions() != self._cleared
        if not self._used and changed and any(p.grad is not None for p in self.parameters.tensors):
            self.left_out += 1
        self._used = False
        self.clipping.forget()

    def gradients_cleared(self) -> None:
        """After that."""
        self._cleared = self._versions()

    def _versions(self) -> list[int | None]:
        """How often each gradient was written."""
        return [None if parameter.grad is None else parameter.grad._version for parameter in self.parameters.tensors]

    def stats(self) -> StepStats | None:
        """See :attr:`ScapeOptimizer.stats`."""
        if self._stats is None and self.record is not None and self.state is not None:
            self.record.skipped_total = self.clipping.skipped_total
            self._stats = self.record.summary(
                self.state.calls, self.state.residual, self.parameters.local, self.layout, self.local.pieces
            )
        return self._stats

    def allocate(self) -> ScapeState:
        """Buffers, all zeros."""
        return ScapeState.allocate(self.layout, self.config, self.parameters.state_dtype, self.device)

    def settled_state(self) -> ScapeState:
        """The state with nothing pending, as a checkpoint holds it."""
        self.masks.wait()
        self._finish_last_step()
        state = self.state or self.allocate()
        if state.master is not None:
            self.parameters.flatten()
            self._refresh_masters(state)
        return state

    def replace_state(self, state: ScapeState) -> None:
        """Goes on from a state that was loaded."""
        self.state, state.sampled = state, False
        self.clipping.drop_found_inf()
        self.record = self._stats = None
        # Parameters may be loaded before or after: masters that do not round to them give way, in the next save too.
        self._masters_stale, self._compared = True, False

    def mark_masters_stale(self) -> None:
        """Parameters were overwritten from outside: the next step, or save, reads the masters of changed ones anew.

        Without it, each entry's master is read anew when the entry is updated.
        """
        self._masters_stale = True

    def _refresh_masters(self, state: ScapeState) -> None:
        if self.parameters.need_masters and (state.master is None or self._masters_stale):
            state.refresh_master(self.parameters.flat, self.layout, self.comm.rank)
        self._masters_stale = False

    def bytes_per_step(self, sent: int | None = None) -> int:
        """See :meth:`ScapeOptimizer.bytes_per_step`."""
        back = None if self.shard.as_changes else self.parameters.wire_dtype.itemsize
        return sum(message_bytes(self.config, self.layout.blocks, self.comm.world_size, back, sent).values())
