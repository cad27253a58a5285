"""Private names of torch's, each with the reason: no other file of the package uses one.

There is a second such file, hosts/private_names.py, for Lightning's: only the hosts know that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

P = ParamSpec("P")
T = TypeVar("T")
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: names that DDP shall not send. Torch has no public way to ask for them."""
UNSCALES_ITSELF = "_step_supports_amp_scaling"
"""Attribute of an optimizer: whether a GradScaler leaves unscaling to its step."""
STEPPED = "_opt_called"
"""Attribute of an optimizer: whether it has stepped. An LR scheduler that steps before its optimizer warns."""
TRACKED = "_wrapped_by_lr_sched"
"""Attribute of a ``step`` that notes its calls: a scheduler wraps any other (``patch_track_step_called``)."""
_DEPTH = 12
"""Frames between an optimizer's step and the scaler that calls it, at most: wrappers of torch's and ours."""
IN_WRAPPER = "_optimizer"
"""Attribute of both of Lightning's wrappers: the optimizer inside. They imitate its class, so nothing else tells."""


def entry(function: Callable[P, T]) -> Callable[P, T]:
    """Runs what a user's loop calls without gradients, outside inference mode, and never compiled.

    Nobody could change tensors of inference mode later; torch.compile would fail in messages and in numba. The public
    ``torch.compiler.disable`` imports the compiler at once.
    """
    run: Callable[P, T] = _disable_dynamo(torch.inference_mode(False)(torch.no_grad()(function)))
    return run


def group_timeout(group: Any) -> timedelta | None:
    """How long a process group waits: a group made beside it shall wait as long. None where torch does not say."""
    try:
        timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # if torch moves it, its default has to do
        return None
    return timeout


def broadcast_coalesced(group: Any, tensors: list[Tensor], message_bytes: int) -> None:
    """Overwrites tensors with those of the group's first rank: DDP's constructor calls it, and torch has no other."""
    torch.distributed._broadcast_coalesced(group, tensors, message_bytes, 0)  # type: ignore[attr-defined]


def profiler_records() -> bool:
    """Whether torch's profiler records: without one, a range would still cost microseconds."""
    recording: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return recording


def version(tensor: Tensor) -> int:
    """How often a tensor was written in place: nothing else shows that somebody has changed a gradient.

    For one that was made in inference mode nobody counts it: 0.
    """
    return 0 if tensor.is_inference() else tensor._version


def norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each, fp32, summed in that or in fp64: what torch's ``clip_grad_norm_`` computes at once."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2, dtype)).float()


def refuse_plain_scaler() -> None:
    """Raises ``RuntimeError`` in a step that a plain GradScaler takes: each rank's decides for itself whether to.

    It gives no sign of itself to an optimizer that does not unscale, so this looks at who has called the step.
    """
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        # Up to Python 3.12 what is read of a frame lives until it ends: a loop that trains would hold old tensors.
        asks = frame.f_locals.get("self") if "step" in frame.f_code.co_name else None
        if isinstance(asks, GradScaler) and not isinstance(asks, ShardedGradScaler) and asks.is_enabled():
            raise RuntimeError(
                "All ranks must skip the same steps, got a GradScaler, by which each rank decides for itself. Use"
                " torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with the same arguments."
            )
        if frame.f_back is None:
            return
        frame = frame.f_back
