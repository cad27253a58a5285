"""What a failed message means, and which rank is the reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # without marks for mypy

from lightning_scape.comm.channel import Channel, asked, missing_words
from lightning_scape.core.private_names import default_store

GRACE_SECONDS = 1.5
"""Seconds after a failure in which other ranks may report it, too. Those that do not are named."""
_NO_ANSWER = "All ranks must answer, got no answer"
_KEY = "lightning_scape/lost_contact"
_OF_THIS_RANK = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors in a message that no peer causes: memory, and whatever the device did before."""


@contextlib.contextmanager
def explained_loss(channel: Channel | None = None) -> Iterator[None]:
    """Says what a failed message means, and who is missing: gloo and NCCL speak of sockets and timeouts.

    Args:
        channel: of the message; it may know what other ranks did. None: there is none.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, _OF_THIS_RANK):
            raise
        raise _explained(error, channel) from error


@contextlib.contextmanager
def explained_messages(channel: Channel | None = None) -> Iterator[None]:
    """The same around code of a user or of torch that sends messages; its other errors stay as they are."""
    try:
        yield
    except RuntimeError as error:
        failed = isinstance(error, dist.DistError) or "gloo" in str(error) or (channel is not None and channel.verdict)
        if isinstance(error, _OF_THIS_RANK) or not failed or _NO_ANSWER in str(error):
            raise
        raise _explained(error, channel) from error


@dataclass
class Watched:
    """What the messages of one optimizer are for. The watch over their channel knows it, and errors say it."""

    channel: Channel | None = None
    """Where the optimizer has one: a process group of its own, on gloo."""
    number: int = 0
    """The optimizer's number, among those over the same ranks."""
    place: str = "the start"
    """What they belong to, such as a step."""

    @contextlib.contextmanager
    def around(self, kind: str, *, begins: bool = True) -> Iterator[None]:
        """Lets the watch know of a message, or (not ``begins``) of the wait for it; says what a failed one means."""
        if self.channel is not None:
            self.channel.enter(f"{self.place} ({kind})", begins=begins)
        try:
            with explained_loss(self.channel):
                yield
        finally:
            if self.channel is not None:
                self.channel.leave()

    @contextlib.contextmanager
    def elsewhere(self, what: str) -> Iterator[None]:
        """Around a message that is not the optimizer's: it fails, too, if another rank reports an error."""
        if self.channel is not None:
            self.channel.elsewhere = what, time.monotonic()
        try:
            with explained_messages(self.channel):
                yield
        finally:
            if self.channel is not None:
                self.channel.elsewhere = None

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Says what the messages inside are for. Ranks that wait for this one learn of an error inside."""
        self.place = f"{place} of optimizer {self.number}"
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException, *, ends: bool = False) -> None:
        """Tells ranks that wait for this one of an error, which has come in place of this rank's next message.

        ``ends``: the training on this rank ends by it.
        """
        if self.channel is not None:
            self.channel.raised(error, ends=ends)


def is_explained(error: BaseException) -> bool:
    """Whether an error is that of a message, explained here."""
    return isinstance(error, RuntimeError) and _NO_ANSWER in str(error)


def forget_losses() -> None:
    """Takes back what this rank has reported: a store may outlive its process group, and even a process (torchrun).

    Does nothing where no process group is up.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # not every store can
        default_store().delete_key(f"{_KEY}/{dist.get_rank()}")


def _explained(error: RuntimeError, channel: Channel | None = None) -> RuntimeError:
    said = "" if channel is None else channel.explain()
    if channel is not None and channel.verdict is not None:  # nobody need be asked
        return RuntimeError(f"{channel.verdict} Restart all ranks from the newest checkpoint.")
    missing = _who_is_missing() + said
    return RuntimeError(
        f"{_NO_ANSWER}: another rank has died, hangs, or raised an error of its own (look at its output first), or the"
        f" network broke. {missing} Training cannot go on without it: restart all ranks from the newest"
        f" checkpoint. The message failed with: {error}"
    )


def _who_is_missing() -> str:
    """A sentence. Every rank whose message failed says so in the store; the sentence names the others."""
    silent = asked(_roll_call, 2 * GRACE_SECONDS)
    if silent is None:
        return "The store where ranks report does not answer: rank 0, which keeps it unless torchrun does, may be lost."
    missing = ", ".join(silent)
    if not missing:
        return "All ranks have reported this: none of them is lost, and the network is the likely reason."
    if len(silent) == 1:
        return f"Rank {missing} has not reported within {GRACE_SECONDS} s."
    return (
        f"Ranks {missing} have not reported within {GRACE_SECONDS} s: one of them or more is lost, and the others may"
        " still be waiting for it."
    )


def _roll_call() -> list[str]:
    store = PrefixStore(_KEY, default_store())
    store.set(str(dist.get_rank()), "")
    return missing_words(store, map(str, range(dist.get_world_size())), GRACE_SECONDS)
