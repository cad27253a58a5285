"""Before SparseLoCo wraps an optimizer: what must hold, what must be the same on all ranks, who exchanges with whom."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lightning_scape.__about__ import __version__
from lightning_scape.comm.collectives import Communicator, ProcessGroup
from lightning_scape.core import local_shards
from lightning_scape.core.parameters import Parameters
from lightning_scape.sparseloco.config import SparseLoCoConfig


def communicators(parameters: Parameters, process_group: ProcessGroup | None) -> tuple[Communicator, Communicator]:
    """Two: between the ranks that hold the same rows, and between those of a node. Either may join one rank only.

    SparseLoCo works on what a rank holds of every parameter, between the ranks of all nodes that hold the same
    (docs/design.md, 7).

    Args:
        parameters: plain ones, or DTensors.
        process_group: the ranks with the same rows, as the user gave them.
    """
    node = local_shards.node_communicator(parameters.tensors)
    if process_group is None and local_shards.holds_everything(parameters.tensors):
        return Communicator.alone(), node
    return Communicator.of_optimizer(process_group), node


class NotCopied:
    """A base of what holds process groups and messages under way."""

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles, in words that name what is held."""
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled, nor what keeps it (a model, a callback): it holds"
            " process groups and messages under way. Save state_dict() and load it into one that is built anew, or copy"
            " the optimizer inside, which is yours."
        )


def check_optimizer(optimizer: object) -> None:
    """Raises TypeError unless it is one of torch's; a model's parameters are not."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"SparseLoCo must wrap a torch.optim.Optimizer, got {type(optimizer).__name__}. Build one over the"
            " parameters first: SparseLoCo(torch.optim.AdamW(model.parameters(), lr=3e-4))."
        )


def problem(wrapped: bool, parameters: Parameters, process_group: ProcessGroup | None) -> str | None:
    """The first rule that is broken, as rule, value and remedy; None if all hold.

    Args:
        wrapped: whether a SparseLoCo wraps the optimizer already.
        parameters: all that require grad.
        process_group: the ranks with the same parameters, or rows, as the user gave them.
    """
    if wrapped:
        return (
            "An optimizer must be wrapped once, got one that a SparseLoCo wraps already. Use that one, or call its"
            " close() first."
        )
    named = zip(parameters.names, parameters.tensors, strict=True)
    if (wide := next((name for name, each in named if each.dtype == torch.float64), None)) is not None:
        return (
            f"Parameters must be fp32, bf16 or fp16, got {wide} in float64: the starting point is kept in fp32. Convert"
            " it before building the optimizer."
        )
    # The groups' options are the optimizer's own business. A node's size is what the parameters say.
    return parameters.problem([]) or local_shards.problem(parameters.names, parameters.tensors, 1, process_group)


def describe(optimizer: torch.optim.Optimizer, config: SparseLoCoConfig, parameters: Parameters) -> dict[str, Any]:
    """What must be the same on all ranks that hold the same parameters, or the same rows."""
    return {
        "lightning_scape's version": __version__,
        "optimizer": type(optimizer).__name__,
        "options": [f"{name}={value!r}" for name, value in config.as_dict().items()],
        "parameters (group, shape, strides, dtype)": parameters.describe(),
    }
