"""The step of SCAPE (arXiv 2607.01678), as a straight line.

Symbols: ``P`` parameters, ``N`` data-parallel ranks, ``B`` block length, ``q`` entries sent per block, ``R`` blocks of
a shard, ``t`` step.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator, all_reduce_bytes
from lightning_scape.core.layout import Layout
from lightning_scape.core.local_shards import everyone
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.private_names import entry
from lightning_scape.core.replicas import apart, check_replicas
from lightning_scape.scape.communicator import ScapeCommunicator, scape_bytes
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.mask import Masks
from lightning_scape.scape.opening import Opening, width
from lightning_scape.scape.shard import Shard
from lightning_scape.scape.state import Groups, ScapeState, Step, StepStats, Verdict


class Engine:
    """Everything that a step needs, apart from torch's interface of an optimizer.

    :class:`~lightning_scape.ScapeOptimizer` holds one as ``engine``, and gives it the parameter groups at each call.
    Fabric's wrapper shares it by reference. Tests, simulated ranks and benchmarks look at training through it.
    """

    def __init__(
        self, parameters: Parameters, config: ScapeConfig, comm: ScapeCommunicator, node: Communicator
    ) -> None:
        self.config, self.parameters, self.comm, self.node = config, parameters, comm, node
        """``node``: the ranks that hold the other rows of the same replica."""
        self.everyone = everyone(comm, node)
        """All ranks whose parts make up a state."""
        numels = [parameter.numel() for parameter in parameters.local]
        self.layout = Layout(numels, parameters.groups, config.quota.block_size, comm.world_size)
        self.state: ScapeState | None = None
        """Made at the first step, or by a load."""
        self.opening = Opening(parameters, comm, node, width(config, comm.world_size))
        self.masks = Masks(self.layout, comm, config)
        self.shard = Shard(self.layout, comm.rank, config, parameters)
        self.stats: StepStats | None = None
        """Figures of the last step."""
        self._next_stats = StepStats(bytes_dense=all_reduce_bytes(parameters.local, comm.world_size))
        self._verdict: Verdict | None = None
        """The last step's, until the CPU hears it."""
        self.consolidated: dict[str, Any] | None = None
        """The whole state as it was collected. Kept here: an attribute set on Fabric's wrapper would be lost."""

    # ------------------------------------------------------------------------------------------- the step

    @entry
    def step(self, groups: Groups) -> None:
        """Exchanges the masked entries and updates them. Collective; raises what :meth:`ScapeOptimizer.step` says."""
        stats = self._begin()  # the mask that was made in the last step arrives
        with stats.phase("norm"):  # one scale for all ranks: the clipping factor; 0 if a gradient is not finite
            step = self._agree(groups, stats)
        with stats.phase("mask"):
            if step.sent < self.layout.block_size and not step.state.sparse:  # nothing is left of earlier steps:
                self.shard.fold(step)  # it ranks its own gradient, all of it
            step.mask = self.masks.of(step)
        with stats.phase("sweep"):  # gradients go into the residual, and the masked entries leave it
            message = self.shard.take_others(step)
        with stats.phase("exchange"):  # all-to-all: to the owners of the entries
            arriving = self.comm.all_to_all(message)
        with stats.phase("sweep"):  # while they travel
            mine = self.shard.take(step)
        with stats.phase("exchange"):
            received = arriving.wait()
            del message, arriving
        with stats.phase("update"):  # tau steps of AdamW (AdamS) at once on the masked entries of my shard
            message = self.shard.update(step, received, mine)
            del received, mine
        with stats.phase("write"):  # all-gather of the changes, or values; every rank applies them
            arriving = self.comm.all_gather(message)
            self.shard.write(step, message)  # mine, while they travel
            self.shard.write_others(step, arriving.wait())
        step.state.calls += 1
        with stats.phase("launch"):  # the next mask is made and exchanged beside what follows
            if step.mask is not None:  # else nothing is left to rank
                self.masks.launch(step.state, step.state.calls)
        self._end(step)

    def _begin(self) -> StepStats:
        self.consolidated = None
        self.opening.check_measured()
        self.settle()
        stats = self._next_stats
        self._next_stats = StepStats(bytes_dense=stats.bytes_dense)
        return stats

    def _agree(self, groups: Groups, stats: StepStats) -> Step:
        """Returns the step with its scale. All ranks know it from the first message, which clipping may have sent.

        Allocates buffers at the first step.
        """
        grads, answer = self.opening.gradients(groups, self.calls)
        scale = self.opening.scale(answer)
        told = torch.stack([scale, answer.together.to(scale.dtype)]).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event() if scale.is_cuda else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(scale.device))
        self.parameters.flatten()
        state = self.state = self.state or self.allocate()
        if not self.opening.compared:  # the first step, or the first after a load
            self.check_replicas()
            self.opening.compared = True
        sent = self.masks.config.sent(state.calls)
        stats.norm, stats.scale, stats.density = answer.norm, scale, sent / self.layout.block_size
        scales = self.shard.scale(state, scale, answer.present)
        return Step(state, groups, grads, stats, scales, sent, (told, arrived, answer.facts))

    def _end(self, step: Step) -> None:
        state, stats, every = step.state, step.stats, self.config.check_replicas_every
        stats.step, stats.skipped_total = state.calls, state.skipped_total
        self.stats, self._verdict = stats, step.verdict
        self.opening.forget()
        stats.bytes_sent, stats.message_seconds = self.comm.traffic.take()
        if every and state.calls % every == 0:
            self.check_replicas()
        if not step.scale.whole.is_cuda:  # else the CPU would wait: it learns with the next step
            self._hear_verdict()

    def settle(self) -> None:
        """The mask under way arrives; on CUDA the CPU learns whether the last step was skipped.

        No message of a step begins before: two communicators of NCCL that are busy at once may wait for each other.
        """
        stats = self._next_stats
        with stats.phase("wait"):
            stats.exchange_wait += self.masks.wait()
        self._hear_verdict()

    def _hear_verdict(self) -> None:
        """Counts the last step as taken or skipped; raises on all ranks if too many were, or if ranks were apart."""
        verdict, state, stats, self._verdict = self._verdict, self.state, self.stats, None
        if verdict is None or state is None or stats is None:
            return
        told, arrived, facts = verdict
        if arrived is not None:
            arrived.synchronize()
        taken, together = told.tolist()  # in host memory
        if not together:
            raise apart(self.comm, self.node, facts)
        if taken:
            state.skipped_in_row, state.sparse = 0, stats.density < 1
            return
        state.skipped_in_row += 1
        state.skipped_total += 1
        stats.skipped_total = state.skipped_total
        in_row, most = state.skipped_in_row, self.config.max_skipped
        if in_row >= most:
            raise FloatingPointError(
                f"The gradient norm must be finite, got NaN or inf in {in_row} steps in a row (max_skipped={most});"
                " parameters and residuals are as before the first of them. Lower the learning rate, clip gradients, or"
                " look for a bad batch; raise `max_skipped` to wait longer."
            )
        if self.comm.rank == self.node.rank == 0:
            warnings.warn(
                f"The gradient norm was not finite on at least one rank: step skipped on all ranks, nothing lost"
                f" ({in_row} in a row, {state.skipped_total} in total; an error at {most} in a row).",
                stacklevel=4,
            )

    def check_replicas(self) -> None:
        """Raises on every rank if any rows differ between replicas."""
        self.parameters.flatten()
        self.node.raise_on_all_ranks(lambda: check_replicas(self.comm, self.parameters, ops.checksum))

    @property
    def calls(self) -> int:
        """Calls of :meth:`step` so far, skipped and restored ones included."""
        return 0 if self.state is None else self.state.calls

    def clip_grad_norm(self, groups: Groups, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """See :meth:`ScapeOptimizer.clip_grad_norm`."""
        with self._next_stats.phase("norm"):
            self.settle()
            return self.opening.clip(groups, self.calls, max_norm, error_if_nonfinite)

    def allocate(self) -> ScapeState:
        """Buffers, all zeros. Where changes travel packed, the owner keeps what parameters lack; else masters."""
        packed, parameters = self.shard.packed, self.parameters
        needed = {
            "exp_avg_sq": self.config.update == "adamw",
            "change_error": packed,
            "master": not packed and {p.dtype for p in parameters.tensors} != {parameters.state_dtype},
        }
        others = [name for name, need in needed.items() if need]
        return ScapeState.allocate(self.layout, parameters.state_dtype, parameters.device, *others)

    def state_at_rest(self) -> ScapeState:
        """The state with nothing pending, as a checkpoint holds it."""
        self.settle()
        return self.state or self.allocate()

    def replace_state(self, state: ScapeState) -> None:
        """Goes on from a loaded state."""
        self.state, self.masks.active, self._verdict = state, None, None
        self.stats = self.consolidated = None
        self.opening.compared = False

    def go_on_from(self, former: Engine) -> bool:
        """Takes over the state of an engine that stood in this one's place; False: it was made for something else."""
        mine, before, state = self.parameters, former.parameters, former.state
        same = (
            self.config == former.config
            and (mine.groups, mine.indices) == (before.groups, before.indices)
            and all(map(operator.is_, mine.tensors, before.tensors))
            and (self.comm.world_size, self.comm.rank) == (former.comm.world_size, former.comm.rank)
        )
        if state is None or not same or state.step.device != mine.device:
            return False
        former._hear_verdict()
        self.replace_state(state)
        return True

    def step_bytes(self) -> dict[str, int]:
        """Bytes that this rank sends in a step after the warm-up, by kind."""
        numels = [parameter.numel() for parameter in self.parameters.local]
        return scape_bytes(numels, self.comm.world_size, self.config, back=self.parameters.wire_dtype.itemsize)
