"""Private names of torch's, each with the reason: no other file of the package uses one.

There is a second such file, hosts/private_names.py, for Lightning's: only the hosts know that.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

BatchNorm = nn.modules.batchnorm._BatchNorm
"""Layers of users' own derive from it, not only torch's three."""
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: names that DDP shall not send. Torch has no public way to ask for them."""
IN_WRAPPER = "_optimizer"
"""Attribute of both of Lightning's wrappers: the optimizer inside. They imitate its class, so nothing else tells."""


def group_timeout(group: Any) -> timedelta | None:
    """How long a process group waits: a group made beside it shall wait as long. None where torch does not say."""
    try:
        timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # if torch moves it, its default has to do
        return None
    return timeout


def groups_of_rank() -> int:
    """How many process groups this rank is in, as torch counts them where it names one."""
    return len(dist.distributed_c10d._world.pg_names)


def profiler_records() -> bool:
    """Whether torch's profiler records: without one, a range would still cost microseconds."""
    recording: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return recording


def version(tensor: Tensor) -> int:
    """How often a tensor was written in place: nothing else shows that somebody has changed a gradient.

    For one that was made in inference mode nobody counts it: 0.
    """
    return 0 if tensor.is_inference() else tensor._version


def share_hooks(new: Optimizer, old: Optimizer) -> None:
    """Has an optimizer run another one's hooks. Shared, not copied: the user's handles still remove them."""
    new._optimizer_step_pre_hooks = old._optimizer_step_pre_hooks
    new._optimizer_step_post_hooks = old._optimizer_step_post_hooks
    new._optimizer_state_dict_pre_hooks = old._optimizer_state_dict_pre_hooks
    new._optimizer_state_dict_post_hooks = old._optimizer_state_dict_post_hooks
    new._optimizer_load_state_dict_pre_hooks = old._optimizer_load_state_dict_pre_hooks
    new._optimizer_load_state_dict_post_hooks = old._optimizer_load_state_dict_post_hooks


def before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What the user's hooks make of a state that is about to be loaded, as in torch's ``load_state_dict``."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def after_load(optimizer: Optimizer) -> None:
    """Calls the user's hooks after a load, likewise."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def host_asks() -> bool:
    """Whether torch's Optimizer, or Lightning moving it to a device, has called the caller's caller."""
    asks = sys._getframe(3).f_globals.get("__name__")
    return asks in ("torch.optim.optimizer", "lightning.fabric.utilities.optimizer")


def step_was_called(optimizer: Optimizer) -> bool:
    """What an LR scheduler asks of its optimizer, to warn if the scheduler steps first."""
    return getattr(optimizer, "_opt_called", False)


def note_step(optimizer: Optimizer, called: bool = True) -> None:
    """Answers the question of :func:`step_was_called`."""
    optimizer._opt_called = called  # type: ignore[attr-defined]


def mark_tracked(step: Any) -> None:
    """Says that ``step`` notes its calls; else a scheduler wraps it (``patch_track_step_called``)."""
    step._wrapped_by_lr_sched = True


def scaler_device(scaler: GradScaler) -> str:
    """The type of the device that a GradScaler is for."""
    device: str = scaler._device
    return device


class AsksGradScaler:
    """An optimizer that refuses a plain GradScaler among several ranks, each of which would decide for itself.

    A scaler asks in its ``step()``, on every rank, whether the optimizer unscales: the one place to see it.
    """

    def ranks_that_skip_together(self) -> int:
        """How many ranks must leave out the same steps."""
        raise NotImplementedError

    @property
    def _step_supports_amp_scaling(self) -> bool:
        asks = sys._getframe(1).f_locals.get("self")
        if isinstance(asks, GradScaler) and asks.is_enabled() and self.ranks_that_skip_together() > 1:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            if not isinstance(asks, ShardedGradScaler):
                raise RuntimeError(
                    "All ranks must skip the same steps, got a GradScaler, by which each rank decides for itself. Use"
                    " torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with the same arguments."
                )
        return False
