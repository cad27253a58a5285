"""What is under way on each process group, whoever has begun it.

An optimizer may go while its message travels: it is replaced in mid-training, dropped, or an error ends the fit. Half a
message that is left behind would be taken for a part of the next one on the same group; a thread that still sends it
would meet the next sender. So the group keeps what is under way on it, and all that come to the group later (an
optimizer built over it, the end of a fit, the end of the process) :func:`settle` it first. All ranks have begun the
same messages, so this waits for nobody's next step.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import torch.distributed as dist

LEAVE_SECONDS = 10.0
"""Seconds that the end of the process waits for messages, or for a thread that sends them."""


class Message(Protocol):
    """A message under way, or a call on a background thread that sends some."""

    def wait(self) -> Any:
        """Returns when it has ended; raises its error, each time."""

    def done(self) -> bool:
        """Whether nobody needs to wait any more."""


_of: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()
_ends = threading.Event()


def note(group: dist.ProcessGroup | None, message: Message) -> None:
    """Keeps a message that was begun on a group, with its memory, until it is done. None is the default group."""
    if (group := group or dist.group.WORLD) is None:
        return
    _of[group] = [other for other in _of.get(group, []) if not other.done()] + [message]
    if not _ends.is_set():
        _ends.set()
        atexit.register(_settle_at_exit)  # at the first message: so before its process group is destroyed at exit


def settle(*groups: dist.ProcessGroup | None) -> None:
    """Waits for all that is under way on the groups; without one, on every group. None is the default group.

    An error is left to the message's owner, who raises it on waiting. A broken group fails with the next message.
    """
    for group in [group or dist.group.WORLD for group in groups] if groups else list(_of):
        if group is None:
            continue
        _wait(_of.get(group, []))
        _of.pop(group, None)  # only now: an interruption leaves it as it was


def _wait(messages: Iterable[Message]) -> None:
    for message in messages:
        with contextlib.suppress(Exception):
            message.wait()


def _settle_at_exit() -> None:
    """For ``LEAVE_SECONDS`` at most: other ranks may be gone. Threads are waited for where they are ended."""
    messages = [message for each in _of.values() for message in each if not isinstance(message, Future)]
    if all(message.done() for message in messages):
        return
    settling = threading.Thread(target=_wait, args=(messages,), daemon=True)
    settling.start()
    settling.join(LEAVE_SECONDS)
