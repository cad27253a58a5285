"""Refuses the step of an optimizer that the method does not know, over parameters that it trains. Knows no host.

Under DDP gradients are averaged in the backward pass, so that any optimizer may step. Here averaging is the optimizer's
part: one that was never given to the strategy (built in mid-training, put beside the others, forgotten at ``setup``)
would take each rank's own gradient, and ranks would train apart without an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_scape.core import method


class Watch:
    """Looks at every step that an optimizer of torch's takes in this process, until :meth:`end`.

    It costs a look at a set for each step.

    Args:
        modules: gives the modules whose parameters the method trains.
        remedy: what the user should do, for the error.
        better: raises an error that says more, if there is one.
    """

    _all: weakref.WeakSet[Watch] = weakref.WeakSet()
    _hook: Any = None

    def __init__(
        self,
        modules: Callable[[], Iterable[nn.Module]],
        remedy: str,
        better: Callable[[Optimizer], object] = lambda optimizer: None,
    ) -> None:
        self._modules, self._remedy, self._better = modules, remedy, better
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers of other parameters."""
        Watch._all.add(self)
        if Watch._hook is None:
            Watch._hook = register_optimizer_step_pre_hook(_look)

    def end(self) -> None:
        """Optimizers are torch's again."""
        Watch._all.discard(self)
        if not Watch._all and Watch._hook is not None:
            Watch._hook.remove()
            Watch._hook = None

    def modules_changed(self) -> None:
        """The method trains more modules now."""
        self._strangers.clear()

    def look(self, optimizer: Optimizer) -> None:
        """Raises ``RuntimeError`` if the optimizer, which no method knows, has gradients of these modules."""
        if optimizer in self._strangers:
            return
        names = {id(p): name for module in self._modules() for name, p in module.named_parameters()}
        overlap = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if not overlap:
            self._strangers.add(optimizer)
        around = _parts_of_a_step()
        for parameter in overlap:
            if parameter.grad is not None and id(parameter) not in around:
                self._better(optimizer)
                raise RuntimeError(
                    "Every optimizer that steps the module's parameters must be the strategy's, got a step of"
                    f" {type(optimizer).__name__} over {names[id(parameter)]!r}, which the strategy was not given: it"
                    f" would take this rank's own gradient, and ranks would train apart. {self._remedy}"
                )


def _look(stepping: Optimizer, *_: Any) -> None:
    # torch's hooks see a host's wrapper once that was copied
    optimizer: Any = method.unwrapped(stepping)
    if method.find(optimizer) is not None:
        return
    for watch in list(Watch._all):
        watch.look(optimizer)


def _parts_of_a_step() -> set[int]:
    """The parameters of wrapped optimizers that are stepping now: other optimizers may step inside of one."""
    return set().union(*(method.named(name).inside_steps() for name in method.names()))
