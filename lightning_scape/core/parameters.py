"""The parameters of an optimizer: which they are, their dtypes and names, and what must hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_scape.core.local_shards import first_entry, is_sharded, local
from lightning_scape.core.tensors import flatten, flatten_like, is_dense

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""dtypes of parameters that can be trained, and that the wire can carry."""

HYPERPARAMETERS = ("lr", "eps", "weight_decay")
"""Numbers of a parameter group that a step uses, besides its betas."""

_LEAST_EPS = torch.finfo(torch.float32).tiny


@dataclass
class Parameters:
    """The trainable parameters of all groups, each once, in order. Lists run in parallel.

    ``indices`` are their positions among *all* parameters, frozen ones included, as in a torch state dict.
    """

    tensors: list[Tensor]
    """As the user gave them, in their whole shape: plain ones, or DTensors of which a rank holds rows."""
    groups: list[int]
    indices: list[int]
    names: list[str]
    flat: list[Tensor] = field(default_factory=list)
    """Flat views of their memory, from :meth:`flatten`."""

    def __post_init__(self) -> None:
        self._shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._plain = False
        self._trained: list[tuple[int, int]] = []
        # As last seen: a step asks for hundreds of parameters.
        self._places: list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = []

    @classmethod
    def of(cls, param_groups: Sequence[dict[str, Any]]) -> Parameters:
        """Takes those that require grad now; tied ones (the same object twice) count once."""
        found = cls([], [], [], [])
        seen: set[int] = set()
        index = 0
        for number, group in enumerate(param_groups):
            given = group.get("param_names") or []
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found.tensors.append(parameter)
                    found.groups.append(number)
                    found.indices.append(index)
                    found.names.append(given[place] if place < len(given) else f"parameter {index}")
                index += 1
        found._shapes = [_shape(parameter) for parameter in found.local]
        found._trained = _trained(param_groups)
        found._plain = not any(map(is_sharded, found.tensors))
        return found

    @property
    def local(self) -> list[Tensor]:
        """What this rank holds of each, and trains: rows of a DTensor, all of a plain parameter."""
        return self.tensors if self._plain else [local(parameter) for parameter in self.tensors]

    def first_entry(self, place: int) -> int:
        """Where in the flat whole parameter, the one at ``place``, this rank's entries begin."""
        return first_entry(self.tensors[place])

    def raw_gradients(self) -> list[Tensor | None]:
        """This rank's gradients as the backward pass left them; None where there is none."""
        grads = [parameter.grad for parameter in self.tensors]
        return grads if self._plain else [None if grad is None else local(grad) for grad in grads]

    def flatten(self) -> None:
        """Makes the flat views; anew where ``module.to()`` has put a parameter into other memory.

        The views keep the memory alive, so that the same address is the same memory.

        Raises:
            ValueError: a parameter's shape or memory order has changed.
        """
        here = self.local
        places = [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in here]
        if places == self._places:
            return
        shapes = [_shape(parameter) for parameter in here]
        if shapes != self._shapes:
            name, before, found = next(
                given for given in zip(self.names, self._shapes, shapes, strict=True) if given[1] != given[2]
            )
            raise ValueError(
                f"Parameters must keep their shape and memory order, got {name!r} of shape {found[0]} with strides"
                f" {found[1]} instead of {before[0]} with {before[1]}. Change it before building the optimizer."
            )
        self.flat, self._places = [flatten(parameter) for parameter in here], places

    def flat_gradients(self) -> list[Tensor | None]:
        """This rank's gradients flat, in the memory order of their parameters.

        Raises:
            ValueError: a gradient is sparse.
        """
        given = zip(self.raw_gradients(), self.local, strict=True)
        return [None if grad is None else flatten_like(grad, parameter) for grad, parameter in given]

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Checks that the groups train the same parameters as when the optimizer was built.

        Raises:
            ValueError: a parameter was frozen or unfrozen since, or groups have lost or gained some.
        """
        now = _trained(param_groups)
        if now != self._trained:
            more, less = ({*here} - {*there} for here, there in ((now, self._trained), (self._trained, now)))
            raise ValueError(
                "Parameters must be frozen or unfrozen before the optimizer is built, and stay in their groups, got"
                f" {len(more)} that it trains now and did not then, and {len(less)} that it trained then and does not"
                " now. Build a new optimizer after the change (under the Trainer:"
                " `trainer.strategy.setup_optimizers(trainer)`): the residual of a parameter would be lost, or never"
                " come to be."
            )

    def rename(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the names given; a tied parameter keeps its first, one not mentioned the name it has."""
        names: dict[int, str] = {}
        for name, parameter in named_parameters:
            names.setdefault(id(parameter), name)
        self.names[:] = [names.get(id(p), name) for p, name in zip(self.tensors, self.names, strict=True)]

    @property
    def device(self) -> torch.device:
        """Where they are (checked to be one place)."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def _dtypes(self) -> set[torch.dtype]:
        return {parameter.dtype for parameter in self.tensors}

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which values travel whole: the parameters' own; for mixed ones, the narrowest that holds all."""
        return reduce(torch.promote_types, self._dtypes)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of moments and masters: fp32, or fp64 if a parameter is."""
        return torch.promote_types(self.wire_dtype, torch.float32)

    @property
    def need_masters(self) -> bool:
        """Whether some are narrower than the arithmetic, so that small updates would be rounded away."""
        return self._dtypes != {self.state_dtype}

    def describe(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...], str]]:
        """Group, shape, strides and dtype of each: what must be the same on all ranks."""
        return [(group, *_shape(p), str(p.dtype)) for p, group in zip(self.local, self.groups, strict=True)]

    def problem(self, param_groups: Sequence[dict[str, Any]]) -> str | None:
        """The first rule that a parameter or a group breaks, as rule, value and remedy; None if all hold."""
        if (found := problem_of_groups(param_groups)) is not None:
            return found
        if not self.tensors:
            return (
                "At least one parameter must require grad, got none that does. Unfreeze what is to be trained before"
                " building the optimizer."
            )
        for name, parameter in zip(self.names, self.local, strict=True):
            if (found := _problem_of_parameter(name, parameter, self.device)) is not None:
                return found
        here = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, n) for n, p in zip(self.names, self.local, strict=True))
        for (_, end, first), (begin, _, second) in zip(here, here[1:], strict=False):
            if begin < end:
                return (
                    f"Parameters must not share memory, got {first} and {second}, which do: each would undo a part of"
                    " the other's step. Register one parameter in both places, which ties them."
                )
        return None


def _trained(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Identity and group of those that require grad, in order."""
    groups = enumerate(param_groups)
    return [(id(p), number) for number, group in groups for p in group["params"] if p.requires_grad]


def _shape(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(parameter.shape), parameter.stride()


def _problem_of_parameter(name: str, parameter: Tensor, device: torch.device) -> str | None:
    shape = tuple(parameter.shape)
    if parameter.is_meta:
        return (
            f"Parameters must have memory, got {name} of shape {shape} on the meta device. Call `to_empty(device=...)`"
            " on the model, and give its parameters values, before building the optimizer: it makes them anew."
        )
    if parameter.dtype not in DTYPES:
        supported = ", ".join(map(str, DTYPES))
        return (
            f"Parameters must be one of {supported}, got {name} of shape {shape} in {parameter.dtype}, which the wire"
            " cannot carry. Convert it (a complex one: to its real view), or freeze it before building the optimizer."
        )
    if parameter.device != device:
        return (
            f"Parameters must be on one device, got {name} on {parameter.device} and others on {device}. SCAPE shards"
            " the optimizer, not the model: put the whole model on each rank's device."
        )
    if not is_dense(parameter):
        return (
            f"Parameters must fill their memory without overlap or gap, got {name} of shape {shape} with strides"
            f" {parameter.stride()}. Make it contiguous before building the optimizer."
        )
    return None


def problem_of_groups(param_groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The first rule that the groups' options break, None if all hold."""
    for group in param_groups:
        betas = group["betas"]
        for holds, name, rule in (
            (float(group["lr"]) >= 0, "lr", ">= 0"),
            (len(betas) == 2 and all(0 <= float(b) < 1 for b in betas), "betas", "two numbers in [0, 1)"),
            (float(group["eps"]) >= _LEAST_EPS, "eps", f"at least {_LEAST_EPS:g}"),
            (float(group["weight_decay"]) >= 0, "weight_decay", ">= 0"),
            (not group.get("maximize"), "maximize", "False"),
            (not group.get("amsgrad"), "amsgrad", "False"),
        ):
            if not holds:
                return f"`{name}` must be {rule}, got {group[name]!r}. Change it in the parameter group."
    return None
