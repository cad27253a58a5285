"""The parameters of an optimizer: which they are, their dtypes and names, and what must hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_scape.core.local_shards import first_row, local

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""dtypes of parameters that can be trained, and that the wire can carry."""

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
"""Numbers of a parameter group that a step uses."""

_LEAST_EPS = torch.finfo(torch.float32).tiny


class Parameters:
    """The trainable parameters of all groups, each once, in order. Lists run in parallel.

    Args:
        param_groups: those that require grad now are taken; tied ones (the same object twice) count once.
        named_parameters: of the module. A tied one has its first name, one that is not among them its optimizer's.
    """

    def __init__(
        self, param_groups: Sequence[Mapping[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] = ()
    ) -> None:
        self.tensors: list[Tensor] = []
        """As the user gave them, in their whole shape: plain ones, or DTensors of which a rank holds rows."""
        self.groups: list[int] = []
        self.indices: list[int] = []
        """Their positions among *all* parameters, frozen ones included, as in a torch state dict."""
        self.names: list[str] = []
        names = {id(parameter): name for name, parameter in reversed([*named_parameters])}
        index, seen = 0, set[int]()
        for number, group in enumerate(param_groups):
            given = group.get("param_names") or []
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.tensors.append(parameter)
                    self.groups.append(number)
                    self.indices.append(index)
                    own = given[place] if place < len(given) else f"parameter {index}"
                    self.names.append(names.get(id(parameter), own))
                index += 1
        self.flat: list[Tensor] = []
        """Flat views of their memory, from :meth:`flatten`."""
        self._shapes, self._trained = [_shape(parameter) for parameter in self.local], _trained(param_groups)
        # As last seen: a step asks for hundreds of parameters.
        self._places: list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = []

    @property
    def local(self) -> list[Tensor]:
        """What this rank holds of each, and trains: rows of a DTensor, all of a plain parameter."""
        return [local(parameter) for parameter in self.tensors]

    def first_entry(self, place: int) -> int:
        """Where in the flat whole parameter, the one at ``place``, this rank's entries begin."""
        whole = self.tensors[place]
        return first_row(whole) * whole.shape[1:].numel()

    def raw_gradients(self) -> list[Tensor | None]:
        """This rank's gradients as the backward pass left them; None where there is none."""
        return [None if parameter.grad is None else local(parameter.grad) for parameter in self.tensors]

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
        self.flat = [parameter.detach().as_strided((parameter.numel(),), (1,)) for parameter in here]
        self._places = places

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

    @property
    def device(self) -> torch.device:
        """Where they are (checked to be one place)."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which values travel whole: the parameters' own; for mixed ones, the narrowest that holds all."""
        return reduce(torch.promote_types, {parameter.dtype for parameter in self.tensors})

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of moments and masters: fp32, or fp64 if a parameter is."""
        return torch.promote_types(self.wire_dtype, torch.float32)

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
            shape = tuple(parameter.shape)
            if parameter.dtype not in DTYPES:
                supported = ", ".join(map(str, DTYPES))
                return (
                    f"Parameters must be one of {supported}, got {name} of shape {shape} in {parameter.dtype}, which"
                    " the wire cannot carry. Convert it (a complex one: to its real view), or freeze it before building"
                    " the optimizer."
                )
            if parameter.device != self.device:
                return (
                    f"Parameters must be on one device, got {name} on {parameter.device} and others on {self.device}."
                    " SCAPE shards the optimizer, not the model: put the whole model on each rank's device."
                )
            # torch keeps the strides of what is dense
            if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
                return (
                    f"Parameters must fill their memory without overlap or gap, got {name} of shape {shape} with"
                    f" strides {parameter.stride()}. Make it contiguous before building the optimizer."
                )
        return None


def flatten_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The entries of a gradient (or of a saved tensor) in the memory order of its parameter; a view if strides agree.

    Raises:
        ValueError: the gradient is sparse.
    """
    if gradient.layout != torch.strided:
        raise ValueError(
            f"Gradients must be dense, got {gradient.layout} for a parameter of shape {tuple(parameter.shape)}. Build"
            " the embedding with `sparse=False`: SCAPE picks the entries to send itself."
        )
    if gradient.stride() != parameter.stride():
        ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
        gradient = ordered.copy_(gradient)
    elif gradient.is_contiguous() and not gradient.requires_grad:  # as nearly always, and in fewer calls
        return gradient if gradient.dim() == 1 else gradient.view(-1)
    return gradient.detach().as_strided((gradient.numel(),), (1,))


def _trained(param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Identity and group of those that require grad, in order."""
    groups = enumerate(param_groups)
    return [(id(p), number) for number, group in groups for p in group["params"] if p.requires_grad]


def _shape(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(parameter.shape), parameter.stride()


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
