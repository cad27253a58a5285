"""SCAPE as a :class:`~lightning_scape.core.method.Method`: its step is put on the user's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_scape.checkpoint.shards import State
from lightning_scape.comm.collectives import ProcessGroup, all_reduce_bytes
from lightning_scape.core.method import Method
from lightning_scape.core.words import show_bytes
from lightning_scape.scape import install, saved
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer

_UPDATES = {"adamw": "AdamW's, your lr, betas and eps hold", "adams": "AdamS's, as in SCAPE's paper"}


class ScapeMethod(Method):
    """The host steps the user's optimizer, whose step is SCAPE's."""

    name = "scape"
    title = "SCAPE"
    config_class = ScapeConfig
    shown = ("density", "compression", "grad_norm")
    exchanges_every_step = clips = True

    def __init__(self, scape: ScapeOptimizer) -> None:
        self.scape, self.optimizer, self.communicator = scape, scape.optimizer, scape.communicator

    @classmethod
    @override
    def attach(
        cls,
        optimizer: Optimizer,
        config: ScapeConfig,
        named_parameters: Sequence[tuple[str, Tensor]] = (),
        process_group: ProcessGroup | None = None,
    ) -> Self:
        return cls(ScapeOptimizer.from_optimizer(optimizer, config, process_group, named_parameters=named_parameters))

    @classmethod
    @override
    def of(cls, optimizer: object) -> Self | None:
        scape = ScapeOptimizer.of(optimizer)
        return None if scape is None else cls(scape)

    @override
    def finish(self) -> None:
        self.drain()

    @override
    def drain(self) -> None:
        self.scape.drain()

    @override
    def give_back(self) -> None:
        install.retire(self.optimizer)

    @override
    def close(self) -> None:
        install.uninstall(self.optimizer)

    @override
    def announce_batch(self, batches: int) -> None:
        self.scape.engine.opening.batch = batches

    @override
    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        return self.scape.clip_grad_norm(max_norm, error_if_nonfinite=error_if_nonfinite)

    @override
    def check_replicas(self) -> None:
        self.scape.engine.check_replicas()

    @property
    @override
    def steps(self) -> int:
        return self.scape.steps_taken

    @override
    def figures(self) -> dict[str, float]:
        stats = self.scape.stats
        return {} if stats is None else stats.as_dict("")

    @override
    def summary(self) -> str:
        config, schedule, nodes = self.scape.config, self.scape.schedule, self.scape.engine.node.world_size
        sent = sum(self.scape.engine.step_bytes().values())
        where = f" between nodes of {nodes} ranks" if nodes > 1 else ""
        how_much = f"{show_bytes(sent)} per rank{where}" if sent else "which costs nothing with one rank"
        after = f" after a warm-up of {schedule.warmup_steps:,} steps" if schedule.warmup_steps else ""
        return (
            f"SCAPE: sends {100 * (1 - config.sparsity):.3g}% of the entries per step (sparsity={config.sparsity:g}),"
            f" {how_much},{after or ' from the first step on'}. Update: {_UPDATES[str(config.update)]}."
        )

    @property
    @override
    def dense_bytes(self) -> int:
        return all_reduce_bytes(self.scape.engine.parameters.local, self.communicator.world_size)

    @override
    def own_state(self) -> State:
        return self.scape.own_state()

    @classmethod
    @override
    def whole_state(cls, state: State) -> dict[str, Any]:
        return saved.whole_state(state)

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        self.scape.load_state_dict(state_dict)
