"""The first message of a step: the norm, and whether all ranks are at the same step with the same settings.

One all-reduce. Besides the measured norm it carries a digest of what must be the same on all ranks (:class:`Standing`),
and flags: which parameters have a gradient on this rank.

A digest is three whole numbers ``x``, small enough that fp32 adds up those of ``N`` ranks exactly. Where all are equal,
``sum(x) = N x`` on every rank. If they differ, that holds on a rank only by chance, once in ``2**60`` steps (N = 16).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.parameters import HYPERPARAMETERS

DIGITS = 3
"""Numbers of a digest."""


class Standing(NamedTuple):
    """Where a rank is, and with which settings: what must be the same on all ranks."""

    optimizer: int
    """Its number, among the optimizers over the same ranks."""
    step: int
    """Calls of ``step()`` before this one."""
    left_out: int = 0
    """Gradients that ``zero_grad()`` has dropped, and no step has used."""
    batch: int | None = None
    """The batch of the epoch, where the Trainer has said it."""
    compared: bool = True
    """Whether its parameters were compared with the other ranks' since they were loaded."""
    groups: tuple[tuple[float, ...], ...] = ()
    """The numbers of every parameter group, by :data:`~.parameters.HYPERPARAMETERS`."""
    max_norm: float | None = None
    """The norm by which it clips; None: it does not clip."""
    problem: str | None = None
    """An error that this rank must raise instead of taking the step."""

    def digest(self, ranks: int) -> Tensor:
        """fp32 ``[DIGITS]``, on the CPU."""
        bits = 24 - (ranks - 1).bit_length()
        number = int.from_bytes(blake2b(repr(self).encode(), digest_size=3 * DIGITS).digest(), "little")
        digits = [(number >> 24 * place) % (1 << bits) for place in range(DIGITS)]
        return torch.tensor(digits, dtype=torch.float32, device="cpu")

    @property
    def where(self) -> str:
        """The step, in words."""
        batch = "" if self.batch is None else f" at batch {self.batch}"
        left_out = f" after {self.left_out} gradients that no step used" if self.left_out else ""
        return f"step {self.step + 1} of optimizer {self.optimizer}{batch}{left_out}"


def settings(param_groups: Sequence[dict[str, Any]]) -> tuple[tuple[float, ...], ...]:
    """The numbers of every group. A tensor on CUDA makes the CPU wait for it, a float does not."""
    return tuple(
        (*map(float, group["betas"]), *(float(group.get(name) or 0.0) for name in HYPERPARAMETERS))
        for group in param_groups
    )


class Answer(NamedTuple):
    """What all ranks know after the first message."""

    norm: Tensor
    """0-dim fp32, of the averaged gradient, as it was measured."""
    present: Tensor | None
    """fp32 ``[parameters]``: 1 for those with a gradient on some rank, else 0. None: the CPU knows that all have."""
    together: Tensor
    """0-dim bool: whether all ranks are at the same step."""
    standing: Standing
    """This rank's."""


class FirstMessage:
    """Sends the first message of a step, and compares what the ranks say.

    Args:
        communicator: the ranks whose gradients are averaged.
        node: the ranks that hold the other rows of the same gradient.
        parameters: their number; each has a flag.
        width: numbers of what is measured, at most. The message has room for them in every step: whether ranks clip
            may differ by mistake, and messages of two lengths would not meet.
    """

    def __init__(self, communicator: Communicator, node: Communicator, parameters: int, width: int) -> None:
        self.communicator, self.node, self._width = communicator, node, width
        communicator.make_room(width + parameters + DIGITS)

    def exchange(self, measured: Tensor, flags: Sequence[bool], standing: Standing) -> Answer:
        """Sends the message, and returns what all ranks know then. Collective.

        Args:
            measured: fp32, of this rank's gradients, to be summed: a sketch, or the squared norm ``[1]``.
            flags: which parameters have a gradient on this rank.
            standing: of this rank.

        Raises:
            RuntimeError: ranks are at different steps, or with different settings; on every rank, naming them. On CUDA
                the step changes nothing, and :meth:`apart` tells later.
        """
        ranks, device, error = self.communicator.world_size, measured.device, None
        digest, sketched = standing.digest(ranks), len(measured) > 1
        own = torch.tensor(flags, dtype=torch.float32, device="cpu")
        carried = ops.to_device(torch.cat([own, digest]), device)
        room = measured.new_zeros(self._width - len(measured))
        sums = self.communicator.all_reduce_sum(torch.cat([measured, room, carried]))
        measured, having, digests = sums.split([self._width, len(flags), DIGITS])
        present = (having != 0).float()
        all_have = all(flags) if ranks == 1 else device.type == "cpu" and bool(present.all())
        mean = measured / ranks
        norm = torch.linalg.vector_norm(mean) if sketched else mean.sum().sqrt()
        together = (digests == ops.to_device(digest, device) * ranks).all()
        if device.type == "cpu" and not together:
            error = self.apart(standing)
        if self.node.world_size > 1:  # the norm of all rows; and what the ranks of some rows know, all learn
            everyone = self.node.all_gather_stacked(torch.stack([norm, together.to(norm.dtype)]))
            norm, together = torch.linalg.vector_norm(everyone[:, 0]), everyone[:, 1].all()
        if device.type == "cpu" and not together:
            self.node.raise_together(error)
        return Answer(norm, None if all_have else present, together, standing)

    def apart(self, standing: Standing) -> RuntimeError:
        """What is wrong, from every rank's standing. Collective: all know that they differ."""
        everyone: list[Standing] = self.communicator.all_gather_object(standing)
        for rank, other in enumerate(everyone):
            if other.problem is not None:
                return RuntimeError(f"All ranks must be able to step, got an error on rank {rank}: {other.problem}")
        return RuntimeError(_difference(everyone))


def _difference(everyone: Sequence[Standing]) -> str:
    """The error's text where standings differ, naming the first thing that does."""
    first = everyone[0]
    found = [
        (place, rank)
        for rank, other in enumerate(everyone)
        for place, (a, b) in enumerate(zip(first, other, strict=True))
        if a != b
    ]
    if not found:
        return (
            "All ranks must take the same steps, got ranks apart among those that hold other rows of the parameters:"
            " their errors say what differs. Mend that."
        )
    place, rank = min(found)
    other = everyone[rank]
    if Standing._fields[place] == "groups":
        return _unequal_groups(first.groups, other.groups, rank)
    if Standing._fields[place] == "max_norm":
        return (
            f"All ranks must clip by the same norm or not at all, got max_norm={first.max_norm} on rank 0 and"
            f" max_norm={other.max_norm} on rank {rank}. Nothing of this step was applied. Don't decide by a rank's own"
            " gradients: clip_grad_norm() goes by their mean over all ranks, and changes nothing where it is small."
        )
    return (
        f"All ranks must take the same steps, got {first.where} on rank 0 and {other.where} on rank {rank}. Nothing"
        " of this step was applied. A rank has left out a step that others take (a plain GradScaler, a look at its own"
        " gradients, an error that was caught), or steps its optimizers in another order. Take a step on all ranks or"
        " on none: `optimizer.all_finite()` asks all of them. Restart all ranks from the newest checkpoint."
    )


def _unequal_groups(reference: tuple[tuple[float, ...], ...], other: tuple[tuple[float, ...], ...], rank: int) -> str:
    names = ("beta1", "beta2", *HYPERPARAMETERS)
    group = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), 0)
    pairs = zip(names, reference[group], other[group], strict=True)
    name, mine, theirs = next(pair for pair in pairs if pair[1] != pair[2])
    return (
        f"Parameter groups must have the same numbers on all ranks, got {name} = {mine!r} on rank 0 and {theirs!r} on"
        f" rank {rank} (group {group}). Nothing of this step was applied. Each owner would train its entries at a rate"
        " of its own. Set them alike on every rank: a scheduler that goes by a loss must get the mean over all ranks"
        " (`self.log(..., sync_dist=True)`), a callback must not run on one rank alone."
    )
