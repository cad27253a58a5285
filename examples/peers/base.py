"""Simulated ranks for other methods: those whose replicas are equal after each step, and those whose ranks part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from simulated_ranks import Ranks
from torch import Tensor, nn

Gradients = list[Tensor]
"""One tensor a parameter."""


class EqualRanks(Ranks):
    """Every rank's gradient is compressed, and all take the same step: replicas need only one memory.

    Args:
        model: its parameters are every rank's.
        world_size: N.
        optimizer: takes what :meth:`combine` returns for the gradient.
    """

    def __init__(self, model: nn.Module, world_size: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, world_size)
        self.optimizer = optimizer
        self.gradients: list[Gradients] = []
        self._sent = 0.0

    def backward(
        self, batches: Sequence[Any], loss: Callable[[Any], Tensor], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        """Rank after rank."""
        self.gradients = [
            [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]
            for found in (self.gradient_of(loss(batch)) for batch in batches)
        ]

    def step(self, lr: float, max_norm: float) -> None:
        """One step of all ranks; each clips its own gradient."""
        for gradient in self.gradients:
            norm = torch.stack([each.norm() for each in gradient]).norm()
            for each in gradient:
                each.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        combined, self._sent = self.combine(self.gradients)
        for parameter, gradient in zip(self.parameters, combined, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()

    def combine(self, gradients: list[Gradients]) -> tuple[Gradients, float]:
        """What the optimizer takes for the gradient, and the bytes that a rank sends for it."""
        raise NotImplementedError

    def bytes_sent(self) -> float:
        """By a rank in the last step."""
        return self._sent

    def kept(self) -> dict[str, Any]:
        """Tensors that the method keeps between steps, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's and the method's own."""
        return {"optimizer": self.optimizer.state_dict(), "kept": self.kept()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        copy_into(self.kept(), state_dict["kept"])


class PartingRanks(Ranks):
    """Every rank steps on its own; all meet every ``every`` steps.

    The model's parameters point to the memory of the rank whose turn it is, and to rank 0's between steps.

    Args:
        model: has the initial parameters.
        world_size: N.
        make: the inner optimizer of a rank, over its parameters.
        every: H.
    """

    def __init__(
        self, model: nn.Module, world_size: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], every: int
    ) -> None:
        super().__init__(model, world_size)
        self.every, self.steps, self._sent = every, 0, 0.0
        self.replicas = [[nn.Parameter(p.detach().clone()) for p in self.parameters] for _ in range(world_size)]
        self.optimizers = [make(replica) for replica in self.replicas]
        self._show(0)

    def _show(self, rank: int) -> None:
        for parameter, replica in zip(self.parameters, self.replicas[rank], strict=True):
            parameter.data = replica.data

    def backward(
        self, batches: Sequence[Any], loss: Callable[[Any], Tensor], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        """Rank after rank, each with its own parameters."""
        for rank, batch in enumerate(batches):
            self._show(rank)
            for replica, gradient in zip(self.replicas[rank], self.gradient_of(loss(batch)), strict=True):
                replica.grad = gradient
        self._show(0)

    def step(self, lr: float, max_norm: float) -> None:
        """One step of every rank, clipped by its own norm; then the exchange, if it is time."""
        for replica, optimizer in zip(self.replicas, self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(replica, max_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.inner_steps()
        self.steps += 1
        self._sent = self.exchange() if self.steps % self.every == 0 else 0.0

    def inner_steps(self) -> None:
        """One step of every rank's optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def exchange(self) -> float:
        """Makes the ranks equal; returns the bytes that a rank sends for it."""
        raise NotImplementedError

    def end(self) -> None:
        if self.steps % self.every:
            self._sent = self.exchange()

    def bytes_sent(self) -> float:
        """By a rank in the last step."""
        return self._sent

    def kept(self) -> dict[str, Any]:
        """Tensors that the method keeps between exchanges, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Parameters and inner states of all ranks, and the method's own."""
        return {
            "steps": self.steps,
            "replicas": [[p.detach() for p in replica] for replica in self.replicas],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "kept": self.kept(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.steps = state_dict["steps"]
        with torch.no_grad():
            for replica, saved in zip(self.replicas, state_dict["replicas"], strict=True):
                copy_into(dict(enumerate(replica)), dict(enumerate(saved)))
        for optimizer, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        copy_into(self.kept(), state_dict["kept"])


def mean_of(ranks: list[Gradients]) -> Gradients:
    """Over ranks."""
    return [torch.stack(parts).mean(dim=0) for parts in zip(*ranks, strict=True)]


def all_reduce_bytes(entries: float, world_size: int, width: float = 4) -> float:
    """A rank sends so many in a ring all-reduce of so many entries."""
    return 2 * entries * width * (world_size - 1) / world_size


def copy_into(places: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Copies tensors, or lists of them, by name."""
    for name, place in places.items():
        if isinstance(place, Tensor):
            place.detach().copy_(saved[name])
        else:
            copy_into(dict(enumerate(place)), dict(enumerate(saved[name])))
