"""If a gradient is not finite on one rank, makes it so on all, where a module may look at its gradients.

Under DDP gradients are averaged in the backward pass. So a module that leaves a step out because its gradient is NaN
does so on all ranks. Under SCAPE each rank sees its own gradient, and would decide for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_scape.core.local_shards import local
from lightning_scape.core.method import Method, find_all
from lightning_scape.hosts.guests import callbacks_of

_HOOK = "post_backward"
_OF_CALLBACKS = ("on_after_backward", "on_before_optimizer_step")
_OF_MODULES = (*_OF_CALLBACKS, "optimizer_step", "configure_gradient_clipping")
"""Hooks between a backward pass and its step: they may look at gradients."""


class SharedNans:
    """Shares NaNs right after a backward pass, before any hook sees the gradients: one small message.

    Nothing is sent with automatic optimization if neither the module nor a callback has a hook between the backward
    pass and the step: then the step itself is skipped on all ranks.
    """

    def __init__(self) -> None:
        self._held = False

    def attach(self, plugin: Precision, module: LightningModule, optimizers: Callable[[], Iterable[object]]) -> None:
        """Acts from now on in the plugin's own hook, the first after the backward pass."""
        if not may_look(module):
            return
        own = getattr(plugin, _HOOK)

        def post_backward(*args: Any, **kwargs: Any) -> Any:
            if not self._held:
                _share_of(find_all(optimizers()))
            return own(*args, **kwargs)

        setattr(plugin, _HOOK, post_backward)

    def detach(self, plugin: Precision) -> None:
        """The plugin is as it was."""
        vars(plugin).pop(_HOOK, None)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, backward passes add gradients up, and nothing is shared."""
        held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = held


def may_look(module: LightningModule) -> bool:
    """Whether the module, or a callback of its trainer, may look at gradients before a step."""
    if not module.automatic_optimization:
        return True
    owners = [(module, _OF_MODULES), *((callback, _OF_CALLBACKS) for callback in callbacks_of(module.trainer))]
    return any(is_overridden(hook, owner) for owner, hooks in owners for hook in hooks)


@torch.no_grad()
def _share_of(methods: Sequence[Method]) -> None:
    """Makes the first entry of each gradient NaN if some rank has one that is not finite. Collective."""
    all_clipping = [each.clipping for each in methods if each.clipping is not None]
    grads = [local(p.grad) for each in all_clipping for _, p in each.named_parameters if p.grad is not None]
    given = [grad for grad in grads if grad.numel() and grad.layout == torch.strided]  # the step refuses others
    norm = all_clipping[0].after_backward(given) if all_clipping else None
    if norm is None:
        return
    poison = torch.where(torch.isfinite(norm), -0.0, torch.nan)  # x + -0.0 is x, for every x
    if poison.device.type == "cpu" and not bool(poison.isnan()):
        return
    for grad in given:
        grad.data[(0,) * grad.dim()] += poison  # `.data`: not counted as a change by the user
