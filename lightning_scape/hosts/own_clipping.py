"""Finds out that a rank changes its gradients itself, as torch's ``clip_grad_norm_`` does. Knows no host.

Under DDP gradients are averaged by then, here they are each rank's own: clipping them changes the training. A
gradient's version counts its changes in place. It is noted after the backward pass, and compared after the step. Only
the first steps are watched: after them the backward pass is as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_scape.core.local_shards import local
from lightning_scape.core.method import Method
from lightning_scape.core.private_names import version as version_of

STEPS = 100
"""After these, the watch ends."""
_watches: weakref.WeakKeyDictionary[Any, weakref.finalize[..., Any]] = weakref.WeakKeyDictionary()
"""By the optimizer that the host steps; each ends once."""


def watch_gradients(method: Method, clip: str, say: Callable[[str], object]) -> None:
    """Says once, in the first steps, if gradients change between backward pass and step.

    Args:
        method: the one whose gradients are watched; not one with a GradScaler, which changes them as well.
        clip: the call that clips the averaged gradient, for the user.
        say: takes a sentence.
    """
    assert method.clipping is not None
    optimizer, parameters = method.optimizer, method.clipping.named_parameters
    written: dict[int, tuple[int, int]] = {}
    # By memory: FSDP2 writes a unit's gradients one after the other into one memory, which may share a version.
    latest: dict[int, int] = {}
    left = STEPS

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            memory, version = written[id(parameter)] = _memory(parameter.grad)
            latest[memory] = version

    def has_changed(parameter: Tensor) -> bool:
        if parameter.grad is None or id(parameter) not in written:
            return False
        (memory, version), (now, version_now) = written[id(parameter)], _memory(parameter.grad)
        return memory != now or version_now not in (version, latest[memory])

    def compare(*_: Any) -> None:
        nonlocal left
        left -= 1
        changed = [name for name, parameter in parameters if has_changed(parameter)]
        written.clear()
        latest.clear()
        if changed:
            say(
                "Gradients should stay as the backward pass leaves them until the step, got another one for"
                f" {changed[0]!r}. Under {method.title} a rank has only its own gradient, not the average that it has"
                " under DDP: torch's clip_grad_norm_ and clip_grad_value_ clip each rank's by itself, which is another"
                f" training. Clip by {clip}. (A change that is the same factor on all ranks does no harm.)"
            )
        if changed or left == 0:
            end()

    handles = [each.register_post_accumulate_grad_hook(note) for _, each in parameters]
    handles.append(optimizer.register_step_post_hook(compare))
    _watches[optimizer] = end = weakref.finalize(optimizer, lambda: [handle.remove() for handle in handles])


def end_watch(method: Method) -> None:
    """Ends it, if it has begun: the fit is over, or goes on without the optimizer."""
    if method.optimizer in _watches:
        _watches.pop(method.optimizer)()


def _memory(grad: Tensor) -> tuple[int, int]:
    """Where the gradient lies, and how often that memory was written."""
    own = local(grad)
    return own.untyped_storage().data_ptr() if own.layout == torch.strided else id(grad), version_of(own)
