"""DiLoCo (arXiv 2311.08105) as a method of lightning_scape: the page docs/add-a-method.md goes through this file.

Every rank takes ``sync_every`` steps of the user's optimizer on its own. Then the mean over ranks of what they have
moved is one gradient for an outer SGD with Nesterov's momentum, and all set out from where that leads::

    delta = mean over ranks of (start - parameters)
    momentum = outer_momentum * momentum + delta
    start = start - outer_lr * (delta + outer_momentum * momentum)
    parameters = start

Importing this file registers the method: ``MethodStrategy(DiLoCoConfig())`` then trains with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_scape.checkpoint.by_parts import SavedByParts
from lightning_scape.checkpoint.parts import Part, of_flats
from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.stop_word import Stoppable, StopWord
from lightning_scape.core.method import Progress, Spelling, Surroundings, register
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.core.words import show_bytes

HELD_BY = "_diloco"
"""Attribute of the user's optimizer, which it neither copies nor pickles."""


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig:
    """Options of DiLoCo. Raises ``ValueError`` where one is outside its rule."""

    sync_every: int = 30
    """H, steps from one exchange to the next."""
    outer_lr: float = 0.7
    """Rate of the outer SGD, as the paper has it."""
    outer_momentum: float = 0.9
    """Its Nesterov momentum, in [0, 1)."""

    def __post_init__(self) -> None:
        if not isinstance(self.sync_every, int) or self.sync_every < 1:
            raise ValueError(f"`sync_every` must be a whole number >= 1, got {self.sync_every!r}. Take 30.")
        if not self.outer_lr > 0:
            raise ValueError(f"`outer_lr` must be > 0, got {self.outer_lr!r}. The paper has 0.7.")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"`outer_momentum` must be in [0, 1), got {self.outer_momentum!r}. The paper has 0.9.")


@register
class DiLoCo(Stoppable, SavedByParts):
    """The user's optimizer stays what the host steps; its hooks count the steps and exchange."""

    name, title, config_class = "diloco", "DiLoCo", DiLoCoConfig

    def __init__(self, optimizer: Optimizer, config: DiLoCoConfig, surroundings: Surroundings) -> None:
        self.given = self.optimizer = optimizer
        self.config = config
        self.parameters = Parameters.of(optimizer.param_groups)
        self.parameters.rename(surroundings.named_parameters)
        self.communicator = self.ranks = Communicator.of_optimizer(surroundings.process_group)
        setup = {"options": [f"{key}={value}" for key, value in asdict(config).items()]}
        setup["parameters"] = list(map(str, self.parameters.describe()))
        check_same_setup(self.ranks, setup, self.parameters.problem([]), self.parameters.device)
        self.start: list[Tensor] = []
        """Every parameter, flat, fp32, as all ranks had it at the last exchange; none before the first step."""
        self.momentum: list[Tensor] = []
        self.steps = self.in_window = self.exchanges = 0
        self._figures: dict[str, float] = {}
        self._stop_word = StopWord(self.ranks)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    @classmethod
    @override
    def attach(cls, optimizer: Optimizer, config: DiLoCoConfig, surroundings: Surroundings) -> Self:
        if (former := cls.of(optimizer)) is not None:  # of an earlier fit
            former.close()
        vars(optimizer)[HELD_BY] = method = cls(optimizer, config, surroundings)
        return method

    @classmethod
    @override
    def of(cls, optimizer: object) -> Self | None:
        return getattr(optimizer, "__dict__", {}).get(HELD_BY)

    @override
    def give_back(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @override
    def close(self) -> None:
        self.give_back()
        self._stop_word.close()
        del vars(self.optimizer)[HELD_BY]

    @override
    def drain(self) -> None:
        return  # nothing is on its way: an exchange ends inside the step

    @torch.no_grad()
    def _before_step(self) -> None:
        self.parameters.flatten()
        if not self.start:
            self.start = [flat.float().clone() for flat in self.parameters.flat]
            self.momentum = [torch.zeros_like(start) for start in self.start]

    def _after_step(self) -> None:
        self.steps += 1
        self.in_window += 1
        if self.in_window >= self.config.sync_every:
            self._exchange()
        self.stop_requested = self._stop_word.ends()

    @torch.no_grad()
    def _exchange(self) -> None:
        self.parameters.flatten()
        config, flats = self.config, self.parameters.flat
        moved = torch.cat([start - flat for start, flat in zip(self.start, flats, strict=True)])
        delta = self.ranks.all_reduce_sum(moved) / self.ranks.world_size
        if not delta.isfinite().all():
            raise FloatingPointError(
                "Parameters must be finite when ranks exchange them, got some that are not, on at least one rank. Go on"
                " from the last checkpoint with a lower learning rate, or clip gradients."
            )
        each = delta.split([start.numel() for start in self.start])
        for flat, start, momentum, mine in zip(flats, self.start, self.momentum, each, strict=True):
            momentum.mul_(config.outer_momentum).add_(mine)
            start.sub_(config.outer_lr * (mine + config.outer_momentum * momentum))
            flat.copy_(start)
        self.in_window, self.exchanges = 0, self.exchanges + 1
        self._figures = {
            "step": self.steps,
            "compression": float(config.sync_every),
            "delta_norm": float(delta.norm()),
            "bytes_total": sum(self.ranks.traffic.take()[0].values()),
            "bytes_dense": self.bytes_per_exchange(),
        }

    @override
    def finish(self) -> None:
        if self.start and self.in_window:
            self._exchange()

    @override
    def progress(self) -> Progress:
        return Progress(self.steps, self.exchanges, self.exchanges)

    @override
    def stats(self) -> dict[str, float]:
        return dict(self._figures)

    @classmethod
    @override
    def summary(cls, methods: Sequence[Self], steps: float | None, spell: Spelling) -> list[str]:
        every, size = methods[0].config.sync_every, sum(method.bytes_per_exchange() for method in methods)
        return [f"DiLoCo: every {every} steps each rank sends {show_bytes(size)}, DDP as much in every step."]

    def bytes_per_exchange(self) -> int:
        ranks = self.ranks.world_size
        return 8 * sum(p.numel() for p in self.parameters.tensors) * (ranks - 1) // ranks

    @override
    def facts(self) -> dict[str, Any]:
        numbers = {"steps": self.steps, "in_window": self.in_window, "exchanges": self.exchanges}
        return {"progress": numbers, "config": asdict(self.config)}

    @override
    def parts(self) -> list[Part]:
        outer = {"start": self.start, "momentum": self.momentum} if self.start else {}
        return [Part(name, "owned", "cut", of_flats(self.parameters, flats)) for name, flats in outer.items()]

    @override
    def take_up(self, facts: Mapping[str, Any], tensors: Mapping[str, list[Tensor]]) -> None:
        self.start, self.momentum = tensors.get("start", []), tensors.get("momentum", [])
        vars(self).update(facts["progress"])
