"""SparseLoCo as a :class:`~lightning_scape.core.method.Method`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_scape.checkpoint.parts import OwnParts
from lightning_scape.core.method import Advice, Method, Progress, Spelling, Surroundings
from lightning_scape.core.words import show_bytes, show_times
from lightning_scape.planning.cost_model import all_reduce_bytes
from lightning_scape.sparseloco.checkpoint import FORM
from lightning_scape.sparseloco.config import OF_THE_MESH, SparseLoCoConfig
from lightning_scape.sparseloco.cost import SparseLoCoCost
from lightning_scape.sparseloco.wrapper import SparseLoCo

_LET_GO = "_lightning_scape_let_go"
"""Attribute of the user's optimizer, which it neither copies nor pickles: what has wrapped it in a fit."""


class SparseLoCoAdvice(Advice):
    """Warns if a run has no whole window.

    Args:
        loco: the one that it judges.
    """

    def __init__(self, loco: SparseLoCo) -> None:
        self._loco = loco

    @override
    def at_start(self, steps: float | None) -> str | None:
        every = self._loco.config.sync_every
        if steps is None or steps >= every:
            return None
        return (
            f"This run has {steps:.0f} steps, fewer than sync_every={every}: ranks exchange once, at its end. Lower"
            " `sync_every`, or train longer."
        )


class SparseLoCoMethod(Method):
    """The user's optimizer stays what the host steps; a :class:`SparseLoCo` around it exchanges in its hooks."""

    name = "sparseloco"
    title = "SparseLoCo"
    config_class = SparseLoCoConfig
    form = FORM
    shown = ("compression", "delta_norm")
    told = None
    step_cost = SparseLoCoCost()

    def __init__(self, loco: SparseLoCo) -> None:
        self.loco = loco
        self.given = self.optimizer = loco.optimizer
        self.communicator, self.advice = loco.communicator, SparseLoCoAdvice(loco)

    @classmethod
    @override
    def attach(cls, optimizer: Optimizer, config: SparseLoCoConfig, surroundings: Surroundings) -> Self:
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        if getattr(optimizer, "communicator", None) is not None or "ZeroRedundancyOptimizer" in kinds:
            raise TypeError(
                "SparseLoCo must wrap an optimizer that works on one rank, got a"
                f" {type(optimizer).__name__}, which exchanges gradients itself. Use AdamW, or any other optimizer of"
                " torch's."
            )
        if (former := SparseLoCo.of(optimizer)) is not None:  # of an earlier fit
            former.close()
            vars(former.optimizer).pop(_LET_GO, None)
        options = {name: value for name, value in vars(config).items() if name not in OF_THE_MESH}
        ranks, side = surroundings.process_group, surroundings.side_group
        named = surroundings.named_parameters
        return cls(SparseLoCo(optimizer, **options, process_group=ranks, exchange_group=side, named_parameters=named))

    @classmethod
    @override
    def of(cls, optimizer: object) -> Self | None:
        loco = optimizer if isinstance(optimizer, SparseLoCo) else SparseLoCo.of(optimizer)
        return None if loco is None else cls(loco)

    @override
    def finish(self) -> None:
        self.loco.sync()

    @override
    def drain(self) -> None:
        self.loco.drain()

    @override
    def give_back(self) -> None:
        for hook in self.loco._hooks:
            hook.remove()
        vars(self.given)[_LET_GO] = self.loco  # its hooks have kept it alive

    @override
    def close(self) -> None:
        self.loco.close()

    @classmethod
    @override
    def inside_steps(cls) -> set[int]:
        stepping = [loco for each in SparseLoCo._of.values() if (loco := each()) is not None and loco._stepping]
        return {id(p) for loco in stepping for group in loco.optimizer.param_groups for p in group["params"]}

    @override
    def request_stop(self) -> None:
        self.loco.request_stop()

    @property
    @override
    def stop_requested(self) -> bool:
        return self.loco.stop_requested

    @override
    def progress(self) -> Progress:
        now = self.loco.progress
        return Progress(now.steps, now.exchanges, now.exchanges - now.under_way)

    @override
    def stats(self) -> dict[str, float]:
        return {} if self.loco.stats is None else self.loco.stats.as_dict("")

    @classmethod
    @override
    def summary(cls, methods: Sequence[Self], steps: float | None, spell: Spelling) -> list[str]:
        return [summary(method.loco) for method in methods]

    @override
    def sharded_state_dict(self) -> OwnParts:
        return self.loco.sharded_state_dict()

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        self.loco.load_state_dict(state_dict)


def summary(loco: SparseLoCo) -> str:
    """One line for the user: how often ranks exchange, and how much."""
    config, ranks = loco.config, loco.communicator.world_size
    dense = all_reduce_bytes(loco.parameters.local, ranks)
    nodes = f" between nodes of {loco.node.world_size} ranks" if loco.node.world_size > 1 else ""
    sent = loco.bytes_per_exchange()
    how = f"{config.quota.density:.3g} of the entries" + ("" if config.bits is None else f" in {config.bits} bits")
    if not sent:
        alone = "one rank" if not nodes else f"one node of {loco.node.world_size} ranks"
        return f"SparseLoCo: {alone}, nothing is sent; a window ends every {config.sync_every} steps."
    return (
        f"SparseLoCo: {config.sync_every} local steps, then an exchange of {how}, {show_bytes(sent)} per rank{nodes}"
        f" ({show_times(dense / sent)}x fewer bytes than an all-reduce of the gradient,"
        f" {show_times(dense / sent * config.sync_every)}x fewer over a window)."
    )
