"""SCAPE as a :class:`~lightning_scape.core.method.Method`: a ScapeOptimizer stands in for the user's dense one."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_scape.checkpoint.source import OwnShards, SavedShards
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import Method, Progress, Spelling, Surroundings
from lightning_scape.scape import advice, stand_in
from lightning_scape.scape.config import REMOVED_OPTIONS, ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.scape.optimizer_state import merge_shards
from lightning_scape.scape.payoff import PayoffCheck, still_dense
from lightning_scape.scape.plan import ScapeCost

_trained: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The user's optimizers that an earlier fit has trained."""


class ScapeMethod(Method):
    """The host steps a :class:`ScapeOptimizer` over the same parameter groups, in the user's optimizer's place."""

    name = "scape"
    title = "SCAPE"
    config_class = ScapeConfig
    shown = ("compression", "grad_norm")
    removed = {name: option.sentence for name, option in REMOVED_OPTIONS.items()}
    told = frozenset({"sparsity", "sparsity_warmup_steps", "dense_steps", "update"})
    exchanges_every_step = clips = compares_ends = True
    step_cost = ScapeCost()
    optimizer: ScapeOptimizer

    def __init__(self, given: Optimizer, optimizer: ScapeOptimizer) -> None:
        self.given, self.optimizer = given, optimizer
        self._payoff = PayoffCheck()

    @classmethod
    @override
    def attach(cls, optimizer: Optimizer, config: ScapeConfig, surroundings: Surroundings) -> Self:
        if (former := stand_in.standing_for(optimizer)) is not None:  # set up a second time
            former.drain()
            stand_in.give_back(optimizer)
        scape = ScapeOptimizer.from_optimizer(
            optimizer,
            config,
            surroundings.process_group,
            mask_group=surroundings.side_group,
            total_steps=surroundings.total_steps,
            named_parameters=surroundings.named_parameters,
        )
        stand_in.put_in_place(optimizer, scape)
        if optimizer in _trained:
            warnings.warn(
                "An optimizer that was trained before begins anew, got a second fit of the same"
                f" {type(optimizer).__name__}: its learning rate goes on, its moments do not (with DDP they would). To"
                " go on with all, load a checkpoint of the first fit.",
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

    @property
    @override
    def communicator(self) -> Communicator:
        return self.optimizer.communicator

    @property
    @override
    def named_parameters(self) -> list[tuple[str, Tensor]]:
        parameters = self.optimizer.engine.parameters
        return list(zip(parameters.names, parameters.tensors, strict=True))

    @override
    def expect_steps(self, total_steps: float | None) -> None:
        self.optimizer.expect_steps(total_steps)

    @override
    def announce_batch(self, batches: int, last: bool | None) -> None:
        self.optimizer.announce_batch(batches, last)

    @override
    def after_step(self, device: torch.device) -> str | None:
        return self._payoff.look(self.optimizer, device)

    @override
    def clip_norm(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        return self.optimizer.clip_grad_norm(max_norm, error_if_nonfinite=error_if_nonfinite)

    @override
    def clip_value(self, bound: float) -> None:
        self.optimizer.clip_grad_value(bound)

    @override
    def norm_after_backward(self, grads: Sequence[Tensor]) -> Tensor | None:
        engine = self.optimizer.engine
        return None if engine.ranks == 1 else engine.norm_after_backward(self.optimizer.param_groups, grads)

    @override
    def weights_loaded(self) -> None:
        self.optimizer.mark_masters_stale()

    @override
    def request_stop(self) -> None:
        self.optimizer.request_stop()

    @property
    @override
    def stop_requested(self) -> bool:
        return self.optimizer.stop_requested

    @override
    def progress(self) -> Progress:
        steps = self.optimizer.steps_taken
        return Progress(steps, steps, steps)

    @override
    def stats(self) -> dict[str, float]:
        stats = self.optimizer.stats
        return {} if stats is None else stats.as_dict("")

    @override
    def bar(self) -> dict[str, float]:
        """The density, as long as the warm-up lasts."""
        schedule, steps = self.optimizer.schedule, self.optimizer.steps_taken
        if not steps or not still_dense(self.optimizer):
            return {}
        return {"density": schedule.sent(steps - 1) / schedule.quota.block_size}

    @classmethod
    @override
    def summary(cls, methods: Sequence[Self], steps: float | None, spell: Spelling) -> list[str]:
        return [advice.summary([method.optimizer for method in methods], steps, spell)]

    @override
    def warning(self, steps: float | None) -> str | None:
        return advice.too_short(self.optimizer, steps)

    @override
    def consolidate_state_dict(self, to: int = 0) -> None:
        self.optimizer.consolidate_state_dict(to)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    @override
    def sharded_state_dict(self) -> OwnShards:
        return self.optimizer.sharded_state_dict()

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    @classmethod
    @override
    def whole_state(cls, saved: SavedShards) -> dict[str, Any]:
        return merge_shards(saved)
