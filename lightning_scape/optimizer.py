"""ScapeOptimizer: the step of SCAPE (arXiv 2607.01678) over AdamS (arXiv 2505.16363).

Symbols: ``P`` parameters, ``N`` data-parallel ranks, ``B`` block length, ``q`` entries sent per block, ``k = q*P/B``
entries sent per step, ``R`` blocks of a shard, ``t`` step.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_scape import ops
from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint import optimizer_state as checkpoint
from lightning_scape.checkpoint.source import OwnShards, SavedShards
from lightning_scape.comm.collectives import Communicator, PendingMask, ProcessGroup, check_joined, new_mask_group
from lightning_scape.config import ScapeConfig
from lightning_scape.engine.clipping import GradientClipping
from lightning_scape.engine.convert import check_convertible, with_fitting_update
from lightning_scape.engine.hyperparameters import RowHyperparameters
from lightning_scape.engine.mask import DelayedMask, SparsitySchedule
from lightning_scape.engine.parameters import Parameters
from lightning_scape.engine.replicas import check_replicas, check_same_setup
from lightning_scape.engine.state import ScapeState, flatten, flatten_like
from lightning_scape.engine.stats import StepRecord, StepStats
from lightning_scape.layout import Layout, Piece

NOISE_INTERVAL = 8
"""Steps from one sample of the gradient's mean square to the next: each costs a pass over the shard."""
NOISE_WEIGHT = 0.1
"""Of the newest sample: a memory of about 80 steps."""
NOISE_FLOOR = 1 / 20
"""Share of the mean square that bounds the denominator, times the mean interval between visits; at most 1."""


@dataclass
class _Run:
    """All that changes. Fabric runs methods with a wrapper for ``self``: an attribute set there would be lost."""

    state: ScapeState | None = None
    masters_stale: bool = False
    compared: bool = False
    sampled: bool = False
    flats: list[Tensor] = field(default_factory=list)
    clip_seconds: float = 0.0
    record: StepRecord | None = None
    stats: StepStats | None = None
    consolidated: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Active:
    """What a step takes part in: 0-dim, the step's scale, or one number each; 0 is left alone."""

    scale: Tensor
    parameters: Tensor
    """``[parameters]``"""
    rows: Tensor
    """``[blocks]``"""

    def of(self, piece: Piece) -> Tensor:
        return self.parameters[piece.segment.index] if self.parameters.dim() else self.scale

    def of_parameters(self, places: Sequence[int]) -> Tensor:
        if not self.parameters.dim():
            return self.scale
        chosen = ops.to_device(torch.tensor(places, dtype=torch.int64, device="cpu"), self.parameters.device)
        return self.parameters.index_select(0, chosen)

    def of_rows(self, rows: slice) -> Tensor:
        return self.rows[rows] if self.rows.dim() else self.scale


class ScapeOptimizer(torch.optim.Optimizer):
    r"""AdamW or AdamS with sharded state, whose ranks exchange ``1 - sparsity`` of the entries per step.

    Every rank holds all parameters and a residual (fp32, P entries): what it has computed and not yet sent. Rank j owns
    one N-th of the entries, with their moments, clock and, for narrow parameters, fp32 master weights. A step:

    1. **norm**         the scale of the step: clipping factor, or 0 if a gradient is not finite
    2. **wait**         the mask made in the last step has arrived
    3. **fold**         residual += scale * gradient
    4. **compact**      masked entries leave the residual, rounded for the wire
    5. **synchronize**  all-to-all; the owner averages what the ranks sent, in rank order, in fp32. What it sends to
                        nobody, its own shard's, a rank folds and compacts meanwhile
    6. **update**       tau steps of AdamW (AdamS) at once on the masked entries of the shard
    7. **reconstruct**  all-gather of the changes (of the values, where parameters are narrow); every rank applies them
    8. **select**       meanwhile what is left in the residual is ranked: by each owner, its shard's next mask; where
                        ranks vote, by each rank, its votes for the others' shards

    and the exchange of the next mask (of the votes, from which the owners then pick it) begins, which nobody waits for
    before the next step.

    Entries outside the mask are left bitwise as they are. Ranks hold bitwise equal parameters after every step. Works
    under plain ``torchrun`` as well as under Lightning; with one rank nothing is sent. A parameter without a gradient
    on every rank is left alone, as torch leaves it. Without one on some ranks only, it counts as zeros there.

    To keep an AdamW's settings, use :meth:`from_optimizer`. Built directly, it is AdamS unless ``config.update`` says
    ``"adamw"``.

    Constructing is collective: all ranks of ``process_group`` must do it, with the same parameters and config, and
    parameters must be equal on all ranks at the first step.

    Args:
        params: parameters or parameter groups: dense, float, on one device. Frozen ones (``requires_grad=False``) are
            left out for good.
        lr, betas, eps, weight_decay: of AdamW or AdamS, per group; weight decay is decoupled.
        config: all options of SCAPE.
        process_group: data-parallel ranks; None is the default group (no group: one rank).
        mask_group: group for the mask exchange; None makes one.
        communicator: sends the messages, in place of one over the two groups (simulated ranks, another transport).
        total_steps: steps of the run, where known: the default warm-up of the sparsity is no longer than that.

    Raises:
        TypeError, ValueError: a parameter or an option cannot be kept, or ranks differ; the same on every rank.
        RuntimeError: several ranks were launched, and no process group is up.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        config: ScapeConfig,
        process_group: ProcessGroup | None = None,
        mask_group: ProcessGroup | None = None,
        communicator: Communicator | None = None,
        total_steps: float | None = None,
    ) -> None:
        self._closed = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._closed = True
        if not isinstance(config, ScapeConfig):
            raise TypeError(
                f"`config` must be a ScapeConfig, got {type(config).__name__}. Pass ScapeConfig(sparsity=...)."
            )
        self.config = config if config.update is not None else replace(config, update="adams")
        self._parameters = Parameters.of(self.param_groups)
        if communicator is None:
            check_joined()
        self._communicator = communicator or Communicator(process_group, mask_group or new_mask_group(process_group))
        problem = self._parameters.problem(self.param_groups)
        check_same_setup(self._communicator, self._describe(), problem, self._parameters.device)
        self._strides = [parameter.stride() for parameter in self._parameters.tensors]
        self._known = {id(parameter) for parameter in self._parameters.tensors}
        self._layout = Layout(
            [parameter.numel() for parameter in self._parameters.tensors],
            self._parameters.groups,
            config.quota.block_size,
            self._communicator.world_size,
        )
        remote = self._layout.remote(self._communicator.rank)
        self._shard_pieces = list(self._layout.local(self._communicator.rank).pieces)
        self._pieces_beside = list(remote.pieces)
        self._own, self._beside = self._layout.rows_of(self._communicator.rank), remote.rows
        self._masks = DelayedMask(SparsitySchedule.of(config, total_steps), config.mask_interval)
        self._clipping = GradientClipping(config, self._communicator)
        corrects = config.bias_correction or self.config.update == "adamw"
        self._hyperparameters = RowHyperparameters(
            self._parameters, self._shard_pieces, self._layout.shard_blocks, corrects
        )
        self._parameter_of_block: Tensor | None = None
        several = self._communicator.world_size > 1
        self._as_changes = several and self._parameters.travel_as_changes(config.values_dtype)
        self._run = _Run()

    @classmethod
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        config: ScapeConfig,
        process_group: ProcessGroup | None = None,
        *,
        mask_group: ProcessGroup | None = None,
        total_steps: float | None = None,
    ) -> ScapeOptimizer:
        """Takes over the parameters and settings of a torch ``AdamW`` or ``Adam``, or an :class:`AdamS`.

        lr, betas, eps and weight decay are kept per group, and the group dicts are shared by reference, so that whoever
        holds them (an LR scheduler) goes on steering. The update is the optimizer's own, unless ``config.update`` names
        one. ``fused`` and ``foreach`` are ways to compute and are dropped. An ``AdamS(bias_correction=True)`` keeps its
        bias correction.

        Raises:
            TypeError: another kind of optimizer.
            ValueError: a setting that cannot be kept (``amsgrad``, ``maximize``, ``differentiable``, ``capturable``),
                or an optimizer that has already stepped.
        """
        check_convertible(optimizer)
        groups = [dict(group) for group in optimizer.param_groups]
        new = cls(
            groups,
            config=with_fitting_update(config, optimizer),
            process_group=process_group,
            mask_group=mask_group,
            total_steps=total_steps,
        )
        for shared, own in zip(optimizer.param_groups, new.param_groups, strict=True):
            for name, value in own.items():
                shared.setdefault(name, value)
        new.param_groups = optimizer.param_groups
        new.defaults = optimizer.defaults
        return new

    # ------------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; see the class for its phases.

        Args:
            closure: evaluated first, with gradients enabled (forward, backward, clipping).

        Returns:
            What the closure returned, or None.

        Raises:
            FloatingPointError: ``max_skipped`` steps in a row had a gradient that is not finite.
            RuntimeError: replicas differ (first step, and every ``check_replicas_every``), or gradients have changed
                since they were clipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state, record = self._begin()
        grads = self._gradients()

        with record.phase("norm"):
            scale = self._clipping.scale(grads, self._parameters.device)
            active = self._active(state, scale)
        with record.phase("wait"):
            record.exchange_wait = self._masks.arrive()
        # A step whose mask nobody could make before (the first sparse one) ranks all of its own gradient.
        whole = self._masks.due(state.calls)
        with record.phase("fold"):
            self._fold_beside(state, grads, scale)
            if whole:
                self._fold_own(state, grads, active)
        with record.phase("select"):
            mask, waited = self._masks.take(state.calls, self._start_mask)
            record.exchange_wait += waited
        with record.phase("compact"):
            chosen = None if mask is None else mask.to(state.residual.device)
            values = self._compact_beside(state, chosen, active)
        with record.phase("synchronize"):
            arriving = self._communicator.exchange(values)
        with arriving:  # while the values travel: what goes to no other rank
            with record.phase("fold"):
                if not whole:
                    self._fold_own(state, grads, active)
            with record.phase("compact"):
                own = self._compact_own(state, chosen, active)
                record.sent_energy = ops.squared_norm([own, *(values[rows] for rows in self._beside)])
        settled = self._communicator.moment(self._parameters.device)  # the residual does not change any more
        with record.phase("synchronize"):
            total = self._mean(arriving.wait(), own, state.exp_avg.dtype)
            del values, own, arriving
        with record.phase("update"):
            updated = self._update(state, mask, total, active, record)
            del total
        with self._reconstruct(mask, updated, record), record.phase("select"):  # while the others' shards travel
            self._masks.prepare(state.calls, functools.partial(self._start_mask, settled=settled))
        with record.phase("select"):
            self._masks.depart()

        self._end(state, scale)
        return loss

    def _begin(self) -> tuple[ScapeState, StepRecord]:
        """Gradients are those clipped, buffers exist, masters are current, the last step's verdict is in."""
        run = self._run
        self._clipping.check_unchanged([parameter.grad for parameter in self._parameters.tensors])
        self._settle()
        run.flats = self._flatten()
        state = run.state = run.state or self._allocate()
        if not run.compared:  # the first step, or the first after a load
            check_replicas(self._communicator, run.flats, self._parameters.names)
            run.compared = True
        self._refresh_masters(state)
        run.record, run.stats, run.consolidated = StepRecord(clip_seconds=run.clip_seconds), None, None
        run.clip_seconds = 0.0
        return state, run.record

    def _settle(self) -> None:
        """Takes note of what became of the last step."""
        run = self._run
        self._clipping.settle()
        if self._clipping.last_skipped:
            self._masks.forget_unproven()
            if run.state is not None and run.sampled:  # which changed nothing
                run.state.local_samples -= 1
        run.sampled = False

    def _flatten(self) -> list[Tensor]:
        """The parameters, flat; anew at each step, for `module.to()` puts a parameter into other memory."""
        for parameter, name, stride in zip(
            self._parameters.tensors, self._parameters.names, self._strides, strict=True
        ):
            if parameter.stride() != stride:
                raise ValueError(
                    f"Parameters must keep their memory order, got {name!r} with strides {parameter.stride()} instead"
                    f" of {stride}. Change the memory format before building the optimizer."
                )
        return [flatten(parameter) for parameter in self._parameters.tensors]

    def _refresh_masters(self, state: ScapeState) -> None:
        run = self._run
        if self._parameters.need_masters and (state.master is None or run.masters_stale):
            state.refresh_master(run.flats, self._layout, self._communicator.rank)
        run.masters_stale = False

    def _gradients(self) -> list[Tensor | None]:
        """Flat gradients in parameter order; None (unused on this rank) counts as zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad != (id(parameter) in self._known):
                    change = "frozen then" if parameter.requires_grad else "trained then, and is frozen now"
                    raise ValueError(
                        "Parameters must be frozen or unfrozen before the optimizer is built, got one of shape"
                        f" {tuple(parameter.shape)} that was {change}. Build a new optimizer after the change: what is"
                        " not yet sent of a parameter would be lost, or never come to be."
                    )
        return [
            None if parameter.grad is None else flatten_like(parameter.grad, parameter)
            for parameter in self._parameters.tensors
        ]

    def _fold_beside(self, state: ScapeState, grads: Sequence[Tensor | None], scale: Tensor) -> None:
        """Adds to the residual what lies in the other ranks' shards."""
        residuals = self._views(state.residual.view(-1), self._pieces_beside)
        ops.fold(residuals, _parts(grads, self._pieces_beside), scale, self._clipping.clip_value)

    def _active(self, state: ScapeState, scale: Tensor) -> _Active:
        """The step's scale, which is 0 for parameters that no rank has a gradient of."""
        present = self._clipping.present
        if present is None and state.missed is None:
            return _Active(scale, scale, scale)
        parameters = scale if present is None else scale * present
        device = self._parameters.device
        if state.missed is None:
            state.missed = torch.zeros(len(self._parameters.tensors), dtype=torch.int32, device=device)
        if self._parameter_of_block is None or self._parameter_of_block.device != device:
            self._parameter_of_block = ops.to_device(_parameter_of_block(self._layout), device)
        rows = scale if present is None else parameters[self._parameter_of_block]
        return _Active(scale, parameters, rows)

    def _fold_own(self, state: ScapeState, grads: Sequence[Tensor | None], active: _Active) -> None:
        """Adds to the residual what lies in this rank's shard; its owner also keeps statistics of it."""
        clip_value, parts = self._clipping.clip_value, _parts(grads, self._shard_pieces)
        views = functools.partial(self._views, pieces=self._shard_pieces)
        residual = state.shard_of_residual(self._layout, self._communicator.rank)
        ops.fold(views(residual.view(-1)), parts, active.scale, clip_value)
        self._measure(state, parts, active)
        if state.local_exp_avg is None or state.local_exp_avg_sum is None:
            return
        moments, totals = views(state.local_exp_avg.view(-1)), views(state.local_exp_avg_sum.view(-1))
        for piece, momentum, evidence, part in zip(self._shard_pieces, moments, totals, parts, strict=True):
            grad = torch.zeros_like(momentum) if part is None else part
            beta1 = float(self.param_groups[piece.segment.group]["betas"][0])
            ops.accumulate_exp_avg(momentum, evidence, grad, beta1, active.of(piece), clip_value)

    def _measure(self, state: ScapeState, parts: Sequence[Tensor | None], active: _Active) -> None:
        """The owner adds its own gradient to the mean squares that it keeps of its shard."""
        clip_value, ranks = self._clipping.clip_value, self._communicator.world_size
        # Where everything is sent, the update takes the averaged gradient itself.
        if state.exp_avg_sq is not None and not self._masks.sends_all(state.calls):
            moments = self._views(state.exp_avg_sq.view(-1), self._shard_pieces)
            weights = [1 - float(self.param_groups[piece.segment.group]["betas"][1]) for piece in self._shard_pieces]
            scales = active.of_parameters([piece.segment.index for piece in self._shard_pieces])
            ops.accumulate_exp_avg_sq(moments, parts, weights, ranks, scales, clip_value)
        if state.local_exp_avg_sq is not None and (state.calls % NOISE_INTERVAL == 0 or not state.local_samples):
            state.local_samples += 1
            self._run.sampled = True
            weight = max(NOISE_WEIGHT, 1 / state.local_samples)
            views = self._views(state.local_exp_avg_sq.view(-1), self._shard_pieces)
            for piece, noise, part in zip(self._shard_pieces, views, parts, strict=True):
                ops.measure_noise(noise, part, weight, ranks, active.of(piece), clip_value)

    def _compact_beside(self, state: ScapeState, mask: Tensor | None, active: _Active) -> Tensor:
        """What the other ranks are sent, ``[N*R, q]``, with zeros for this rank's shard; ``[0, q]`` for N = 1."""
        blocks = self._layout.blocks if self._beside else 0
        sent = self._layout.block_size if mask is None else mask.shape[1]
        values = torch.empty(blocks, sent, dtype=self.config.values_dtype, device=state.residual.device)
        for rows in self._beside:
            part = _rows_of(mask, rows)
            ops.compact(state.residual[rows], part, self.config.values_dtype, active.of_rows(rows), out=values[rows])
        values[self._own] = 0  # NCCL may look for NaN in what it is given
        return values.to(self._parameters.device)

    def _compact_own(self, state: ScapeState, mask: Tensor | None, active: _Active) -> Tensor:
        """What this rank contributes to its own shard, ``[R, q]``."""
        residual = state.shard_of_residual(self._layout, self._communicator.rank)
        own, scale = self._own_rows(mask), active.of_rows(self._own)
        values = ops.compact(residual, own, self.config.values_dtype, scale)
        if state.local_exp_avg_sum is not None:
            seen = ops.gather_blocks(state.local_exp_avg_sum, own)
            taken = scale.to(seen.device) != 0
            ops.scatter_blocks(
                state.local_exp_avg_sum, own, torch.where(taken.unsqueeze(1) if taken.dim() else taken, 0.0, seen)
            )
        return values.to(self._parameters.device)

    def _mean(self, received: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
        """A, ``[R, q]``: the mean over ranks of what they have for this shard, summed in rank order."""
        contributions: list[Tensor] = list(received)
        contributions[self._communicator.rank] = own
        total = contributions[0].to(dtype, copy=True)
        for contribution in contributions[1:]:
            total += contribution
        return total.div_(self._communicator.world_size)

    def _update(
        self, state: ScapeState, mask: Tensor | None, total: Tensor, active: _Active, record: StepRecord
    ) -> Tensor:
        """The masked values of this shard after the step, or their changes, ``[R, q]`` in the dtype of their travel."""
        own = self._own_rows(mask)
        record.sent = total.shape[1]
        if state.master is not None:
            theta = ops.gather_blocks(state.master, own)
        else:
            theta = torch.zeros_like(total)
            ops.gather_params(self._run.flats, self._shard_pieces, own, theta, self._layout.block_size)
        before = theta.clone() if self._as_changes else None
        record.again = self._step_of_shard(state, theta, own, total, active)
        self._count_step(state, active)  # with the clocks, or the next tau would not be right
        if state.master is not None and own is not None:
            ops.scatter_blocks(state.master, own, theta)
        if before is None:
            return theta.to(self._parameters.wire_dtype)
        same = theta == before
        # The one number whose addition leaves every other as it is, 0.0 and infinities too.
        return theta.sub_(before).masked_fill_(same, -0.0).to(self.config.values_dtype)

    def _step_of_shard(
        self, state: ScapeState, theta: Tensor, mask: Tensor | None, total: Tensor, active: _Active
    ) -> Tensor:
        """The update of ``theta [R, q]`` and of the shard's state; returns what :func:`ops.update_adams` does."""
        step, scale = state.step + 1, active.of_rows(self._own)
        if state.missed is not None:
            assert self._parameter_of_block is not None
            step = state.steps_of(self._parameter_of_block[self._own]) + 1
        hyper, corrections = self._hyperparameters.at(step, self.param_groups, theta.dtype, state.exp_avg_sq_since)
        implicit, group = self.config.catch_up == "implicit", self._hyperparameters.group_of_row()
        first: Tensor | float = corrections.first
        if state.exp_avg_sq is None:
            floor = min(1.0, NOISE_FLOOR * self._layout.block_size / total.shape[1])
            first = first if corrections.corrected else 1.0
            shard = ops.ShardState(theta, state.exp_avg, state.local_exp_avg_sq, state.last_step)
            numbers = ops.RowNumbers(step, scale, hyper, first, group=group)
            return ops.update_adams(shard, mask, total, numbers, floor, implicit)
        shard = ops.ShardState(theta, state.exp_avg, state.exp_avg_sq, state.last_step)
        numbers = ops.RowNumbers(step, scale, hyper, first, corrections.second, group)
        return ops.update_adamw(shard, mask, total, numbers, self._communicator.world_size, implicit)

    def _count_step(self, state: ScapeState, active: _Active) -> None:
        taken = (active.scale != 0).to(state.step.dtype)
        state.step += taken
        if state.missed is not None and active.parameters.dim():
            state.missed += taken - (active.parameters != 0).to(taken.dtype)

    @contextlib.contextmanager
    def _reconstruct(self, mask: Tensor | None, updated: Tensor, record: StepRecord) -> Iterator[None]:
        """Applies what the owners have made of their shards, its own ``[R, q]``; what is inside runs while they travel.

        After an error inside, too: momentum and clocks have gone on, and so must the parameters.
        """
        flats, block_size, add = self._run.flats, self._layout.block_size, self._as_changes
        with record.phase("reconstruct"):
            arriving = self._communicator.gather_parameters(updated)
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        with record.phase("reconstruct"):
            with arriving:
                ops.scatter_params(flats, self._shard_pieces, self._own_rows(mask), updated, block_size, add)
            ops.scatter_params(flats, self._pieces_beside, mask, arriving.wait(), block_size, add)
        if failure is not None:
            raise failure

    def _end(self, state: ScapeState, scale: Tensor) -> None:
        record, config = self._run.record, self.config
        assert record is not None
        state.calls += 1
        record.norm, record.scale = self._clipping.norm, scale
        record.bytes_sent, record.message_seconds = self._communicator.take_count()
        if config.check_replicas_every and state.calls % config.check_replicas_every == 0:
            check_replicas(self._communicator, self._run.flats, self._parameters.names)
        self._clipping.judge(scale)

    # ------------------------------------------------------------------------------------- mask making

    def _start_mask(self, sent: int, settled: torch.cuda.Event | None = None) -> PendingMask:
        """Begins to make the next mask: each owner picks for its shard, from its own evidence and the others' votes.

        On CUDA it waits for ``settled``, the moment from which on the residual does not change; by default, now.
        """
        state, rank, device = self._run.state, self._communicator.rank, self._parameters.device
        assert state is not None
        statistic = (
            state.local_exp_avg_sum
            if state.local_exp_avg_sum is not None
            else state.shard_of_residual(self._layout, rank)
        )
        votes = self.config.votes
        if state.residual.is_cuda:  # it may be freed, with this optimizer, before the side stream has read it
            for read in (state.residual, statistic):
                read.record_stream(self._communicator.side_stream(device))

        def pick(ballots: Tensor | None) -> Tensor:
            if ballots is None:
                return ops.select(statistic, sent).to(device)
            return ops.merge(statistic, ballots.to(statistic.device), rank, votes, sent).to(device)

        with self._communicator.beside_compute(device, settled):
            shape, dtype = (self._layout.blocks, sent), ops.position_dtype(self._layout.block_size)
            make_room = functools.partial(torch.empty, shape, dtype=dtype, device=device)
            alone = not votes or self._communicator.world_size == 1
            ballots = None if alone else self._cast_ballots(state.residual, votes).to(device)
            return self._communicator.start_mask(make_room, pick, ballots)

    def _cast_ballots(self, residual: Tensor, votes: int) -> Tensor:
        """``[N*R, W]``: this rank's votes for the other ranks' shards; zeros for its own, where its residual counts."""
        before, after = ops.propose(residual[: self._own.start], votes), ops.propose(residual[self._own.stop :], votes)
        return torch.cat([before, before.new_zeros(self._layout.shard_blocks, before.shape[1]), after])

    def _own_rows(self, mask: Tensor | None) -> Tensor | None:
        return _rows_of(mask, self._own)

    # ---------------------------------------------------------------------------------------- gradients

    def clip_grad_norm(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Records the factor by which the step scales the gradient so that its norm is at most ``max_norm``.

        The norm is that of the gradient averaged over ranks, which none of them holds: see ``clip_norm``. Gradients
        stay as they are; the factor is applied when the step folds them in. Collective. Call it last before
        :meth:`step`, which refuses gradients that have changed since (RuntimeError).

        Returns:
            The norm before clipping, 0-dim fp32; not finite if any rank's gradient is not, and the step will be
            skipped.

        Raises:
            RuntimeError: ``error_if_nonfinite``, and the norm is not finite; on every rank. On CUDA the next step (or
                checkpoint) raises it, after this one was skipped: to know it now, the host would have to wait.
        """
        began = time.perf_counter()
        with torch.no_grad(), record_function("scape::norm"):
            grads, device = self._gradients(), self._parameters.device
            norm = self._clipping.record_norm(grads, float(max_norm), device, strict=error_if_nonfinite)
            self._clipping.remember([parameter.grad for parameter in self._parameters.tensors])
        self._run.clip_seconds = time.perf_counter() - began
        return norm

    def clip_grad_value(self, clip_value: float) -> None:
        """Records that the step clamps every rank's gradient to ``[-clip_value, clip_value]`` before folding it in."""
        self._clipping.record_value(float(clip_value))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and what was recorded about them. Residuals are kept: they are not yet sent."""
        super().zero_grad(set_to_none)
        self._clipping.forget()

    # --------------------------------------------------------------------------------- life of the state

    def drain(self) -> None:
        """Waits for the mask exchange under way, if any, so that process groups may be torn down."""
        self._masks.arrive()

    def mark_masters_stale(self) -> None:
        """Tells that parameters were overwritten from outside: the next step reads the fp32 masters of changed ones."""
        self._run.masters_stale, self._run.consolidated = True, None

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Gives parameters names, for error messages and checkpoints; tied ones keep their first."""
        self._parameters.rename(named_parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while constructing: shards are cut once.

        Raises:
            ValueError: the optimizer is built already.
        """
        if self._closed:
            raise ValueError(
                "Parameter groups must be given when the optimizer is built, got another one afterwards: residuals and"
                " shards are laid out over all parameters at once. Build a new ScapeOptimizer over all groups."
            )
        super().add_param_group(param_group)

    @property
    def schedule(self) -> SparsitySchedule:
        """How many entries of a block are sent at which step."""
        return self._masks.schedule

    @property
    def steps_taken(self) -> int:
        """Calls of :meth:`step` so far, skipped and restored ones included; the schedule counts them."""
        return 0 if self._run.state is None else self._run.state.calls

    def expect_steps(self, total_steps: float | None) -> None:
        """Fits the default warm-up into a run of so many steps; None is not known.

        For hosts that learn it after they have built the optimizer. Once a step was taken or loaded it does nothing.
        """
        if not self.steps_taken:
            self._masks.schedule = SparsitySchedule.of(self.config, total_steps)

    def bytes_per_step(self, sent: int | None = None) -> int:
        """Bytes that this rank sends in a step, the norm's message (clipping) not counted.

        Args:
            sent: entries per block, q; None is the number at the end of the warm-up.
        """
        quota, ranks = self.config.quota, self._communicator.world_size
        sent = quota.sent if sent is None else sent
        back = self.config.values_dtype if self._as_changes else self._parameters.wire_dtype
        width = self.config.values_dtype.itemsize + back.itemsize
        per_block = sent * width
        if sent < quota.block_size:
            position = ops.position_dtype(quota.block_size).itemsize
            votes = self.config.votes
            per_block += sent * position + (votes * (position + 1) + 1 if votes else 0)
        return self._layout.blocks * per_block * (ranks - 1) // ranks

    @property
    def communicator(self) -> Communicator:
        """Sends this optimizer's messages."""
        return self._communicator

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step, None before the first.

        Made when asked for (then kept until the next step): reads the whole residual once, and on CUDA waits for the
        device. Ask every so many steps.
        """
        run = self._run
        if run.stats is None and run.record is not None and run.state is not None:
            run.record.skipped_total = self._clipping.skipped_total
            run.stats = run.record.summary(
                run.state.calls, run.state.residual, self._parameters.tensors, self._layout, self._shard_pieces
            )
        return run.stats

    # ------------------------------------------------------------------------------------- checkpoints

    def __getstate__(self) -> dict[str, Any]:
        """Refuses copies and pickles, of which torch would keep half."""
        raise TypeError(
            "A ScapeOptimizer must not be copied or pickled, got an attempt to: it holds process groups and messages"
            " under way. Save state_dict() and load it into one that is built anew."
        )

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state of all ranks on rank ``to``, where :meth:`state_dict` then returns it. Collective.

        The whole state takes about ``(4 N + 16) P`` bytes of host memory there, residuals of all ranks included. To
        collect it takes little more: all ranks' residuals of one parameter at a time.
        """
        run = self._run
        run.consolidated = checkpoint.consolidate(self._snapshot(self._current_state()), self._communicator, to)

    def sharded_state_dict(self) -> OwnShards:
        """This rank's part of the state, as :func:`lightning_scape.checkpoint.dcp.write_directory` takes it; views.

        Nothing is sent, and no rank ever holds the whole state.
        """
        groups = super().state_dict()["param_groups"]
        return checkpoint.own_shards(self._snapshot(self._current_state()), self._communicator, groups)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, by parameter, independent of the number of ranks: tensors, numbers and strings only.

        Raises:
            RuntimeError: with several ranks, :meth:`consolidate_state_dict` was not called since the last step.
        """
        run = self._run
        if self._communicator.world_size == 1:
            self.consolidate_state_dict()
        if run.consolidated is None:
            raise RuntimeError(
                "The state must be collected from all ranks before it is read, got a call of state_dict() on rank"
                f" {self._communicator.rank} without it. Call consolidate_state_dict(to=0) on every rank, then"
                " state_dict() on rank 0."
            )
        # Groups as they are now: a scheduler may have moved on since.
        return {**run.consolidated, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any] | SavedShards) -> None:
        """Takes this rank's part of a whole state, or of a sharded one. Call on every rank, with the same state.

        A state of another number of ranks is resharded: momentum, clocks and masters exactly, residuals so that their
        mean over ranks is kept. One of another block length or sparsity drops the masks. One of AdamW, Adam or AdamS
        gives its first moments. Each with a warning that says so.

        Raises:
            ValueError: parameters or groups differ in number, order or shape, or the format is newer than this
                package. Nothing has been changed then.
            OSError: a sharded state cannot be read; on every rank.
        """
        self.drain()
        state = self._allocate()
        snapshot, rank = self._snapshot(state), self._communicator.rank
        # All ranks load the same whole state, and raise the same errors. Each reads its own part of a directory.
        ranks = self._communicator if isinstance(state_dict, SavedShards) else Communicator.alone()
        loaded = ranks.together(lambda: checkpoint.load(snapshot, state_dict, rank, self.param_groups))
        loaded.take_up(snapshot)
        for group, saved in zip(self.param_groups, loaded.param_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        self._run.state = state
        self._run.sampled = False
        self._clipping.drop_verdict()
        self._run.record = self._run.stats = self._run.consolidated = None
        # Parameters may be loaded before or after: masters that do not round to them give way.
        self._run.masters_stale, self._run.compared = True, False

    def _describe(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        plain = self.config.as_dict()
        if self.config.residual_device is not None:  # each rank has its own index
            plain["residual_device"] = torch.device(self.config.residual_device).type
        names = ("lr", "betas", "eps", "weight_decay", "bias_correction")
        return {
            "lightning_scape's version": __version__,
            "config": [f"{name}={value!r}" for name, value in plain.items()],
            "parameters (group, shape, strides, dtype)": self._parameters.describe(),
            # As numbers: a tensor's text names its device, and leaves out digits.
            "parameter groups": [
                {name: _plain(group.get(name, False)) for name in names} for group in self.param_groups
            ],
        }

    def _current_state(self) -> ScapeState:
        """The state with nothing pending: what a checkpoint holds."""
        run = self._run
        self.drain()
        self._settle()
        state = run.state or self._allocate()
        if state.master is not None:
            run.flats = self._flatten()
            self._refresh_masters(state)
        return state

    def _snapshot(self, state: ScapeState) -> checkpoint.Snapshot:
        return checkpoint.Snapshot(state, self._layout, self.config, self._parameters, self._masks, self._clipping)

    def _allocate(self) -> ScapeState:
        return ScapeState.allocate(self._layout, self.config, self._parameters.state_dtype, self._parameters.device)

    def _views(self, flat: Tensor, pieces: Iterable[Piece]) -> list[Tensor]:
        """The entries of each piece in a flat buffer of blocks, pads left out."""
        return [flat[piece.of_blocks(self._layout.block_size)] for piece in pieces]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, (int, float, Tensor)) else str(value)


def _parameter_of_block(layout: Layout) -> Tensor:
    """int64 ``[blocks]``: the place of each block's parameter; fillers take the last one's."""
    counts = [segment.blocks for segment in layout.segments]
    if not counts:
        return torch.zeros(layout.blocks, dtype=torch.int64, device="cpu")
    counts[-1] += layout.blocks - sum(counts)
    places = torch.tensor([segment.index for segment in layout.segments], device="cpu")
    return torch.repeat_interleave(places, torch.tensor(counts, device="cpu"))


def _rows_of(mask: Tensor | None, rows: slice) -> Tensor | None:
    """Some rows of a mask; None, which stands for all entries, stays None."""
    return None if mask is None else mask[rows]


def _parts(grads: Sequence[Tensor | None], pieces: Sequence[Piece]) -> list[Tensor | None]:
    """The gradient of each piece; None where its parameter has none."""
    found = [(grads[piece.segment.index], piece) for piece in pieces]
    return [None if grad is None else grad[piece.of_parameter] for grad, piece in found]
