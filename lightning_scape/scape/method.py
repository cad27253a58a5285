"""SCAPE as a :class:`~lightning_scape.core.method.Method`: a ScapeOptimizer stands in for the user's dense one."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_scape.checkpoint.shards import OwnState, SavedState
from lightning_scape.comm.collectives import all_reduce_bytes
from lightning_scape.core.method import Clipping, Method, Progress, Surroundings
from lightning_scape.core.words import show_bytes
from lightning_scape.scape import saved, stand_in
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.convert import has_state
from lightning_scape.scape.cost import norm_bytes
from lightning_scape.scape.optimizer import ScapeOptimizer

_trained: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The user's optimizers that an earlier fit has trained."""


_UPDATES = {"adamw": "AdamW's, your lr, betas and eps hold", "adams": "AdamS's, as in SCAPE's paper"}


class ScapeClipping(Clipping):
    """Clips the averaged gradient, whose norm a sketch estimates.

    Args:
        optimizer: the one whose gradient it clips.
    """

    def __init__(self, optimizer: ScapeOptimizer) -> None:
        self._optimizer = optimizer

    @override
    def norm(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        return self._optimizer.clip_grad_norm(max_norm, error_if_nonfinite=error_if_nonfinite)


class ScapeMethod(Method):
    """The host steps a :class:`ScapeOptimizer` over the same parameter groups, in the user's optimizer's place."""

    name = "scape"
    title = "SCAPE"
    config_class = ScapeConfig
    shown = ("density", "compression", "grad_norm")
    exchanges_every_step = clips = True
    optimizer: ScapeOptimizer

    def __init__(self, given: Optimizer, optimizer: ScapeOptimizer) -> None:
        self.given, self.optimizer, self.communicator = given, optimizer, optimizer.communicator
        self.clipping = ScapeClipping(optimizer)

    @classmethod
    @override
    def attach(cls, optimizer: Optimizer, config: ScapeConfig, surroundings: Surroundings) -> Self:
        if (former := stand_in.standing_for(optimizer)) is not None:  # set up a second time
            former.drain()
            cls(optimizer, former).give_back()
        begins_anew = optimizer in _trained and not has_state(optimizer)
        scape = ScapeOptimizer.from_optimizer(
            optimizer,
            config,
            surroundings.process_group,
            named_parameters=surroundings.named_parameters,
        )
        stand_in.put_in_place(optimizer, scape)
        if begins_anew:
            warnings.warn(
                "An optimizer that was trained before begins anew, got a second fit or set-up of the same"
                f" {type(optimizer).__name__}: its learning rate goes on, its moments do not (with DDP they would). To"
                " go on with all, load a checkpoint of the first.",
                stacklevel=2,
            )
        return cls(optimizer, scape)

    @classmethod
    @override
    def of(cls, optimizer: object) -> Self | None:
        scape = stand_in.standing_for(optimizer) or optimizer
        return cls(optimizer, scape) if isinstance(scape, ScapeOptimizer) else None  # type: ignore[arg-type]

    @override
    def finish(self) -> None:
        self.drain()

    @override
    def drain(self) -> None:
        self.optimizer.drain()

    @override
    def give_back(self) -> None:
        stand_in.give_back(self.given)
        if self.optimizer.steps_taken:
            _trained.add(self.given)

    @override
    def announce_batch(self, batches: int) -> None:
        self.optimizer.announce_batch(batches)

    @override
    def weights_loaded(self) -> None:
        self.optimizer.mark_masters_stale()

    @override
    def check_replicas(self) -> None:
        self.optimizer.engine.check_replicas()

    @override
    def progress(self) -> Progress:
        steps = self.optimizer.steps_taken
        return Progress(steps, steps, steps)

    @override
    def stats(self) -> dict[str, float]:
        stats = self.optimizer.stats
        return {} if stats is None else stats.as_dict("")

    @override
    def summary(self) -> str:
        config, schedule, nodes = self.optimizer.config, self.optimizer.schedule, self.optimizer.engine.node.world_size
        sent = self.optimizer.bytes_per_step()
        where = f" between nodes of {nodes} ranks" if nodes > 1 else ""
        how_much = f"{show_bytes(sent)} per rank{where}" if sent else "which costs nothing with one rank"
        after = f" after a warm-up of {schedule.warmup_steps:,} steps" if schedule.warmup_steps else ""
        return (
            f"SCAPE: sends {100 * (1 - config.sparsity):.3g}% of the entries per step (sparsity={config.sparsity:g}),"
            f" {how_much},{after or ' from the first step on'}. Update: {_UPDATES[str(config.update)]}."
        )

    @override
    def bytes_of_steps(self, first: int, last: int) -> int:
        optimizer = self.optimizer
        counts = optimizer.schedule.sent_by_step(last, first)
        tensors, ranks = len(optimizer.engine.parameters.local), self.communicator.world_size
        norm = norm_bytes(optimizer.config, tensors, ranks)
        return sum(count * (optimizer.bytes_per_step(sent) + norm) for sent, count in counts.items())

    @property
    @override
    def dense_bytes(self) -> int:
        return all_reduce_bytes(self.optimizer.engine.parameters.local, self.communicator.world_size)

    @override
    def own_state(self) -> OwnState:
        return self.optimizer.own_state()

    @classmethod
    @override
    def whole_state(cls, state: SavedState) -> dict[str, Any]:
        return saved.whole_state(state)

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)
