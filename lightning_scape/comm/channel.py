"""The process group of a step's messages, and a watch over it: a wait that cannot end becomes an error.

Messages are paired by their order: the k-th of one rank meets the k-th of another. So a channel counts its messages and
knows what each is for. A rank that waits for long writes both into the job's store. If another rank waits in its k-th
message for something else, or has raised an error in place of that message, no answer can come: the watch closes the
channel's connections, and every rank's message fails at once, with an error that says where each rank is.

A run without long waits puts nothing into the store.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # without marks for mypy

from lightning_scape.core.private_names import default_store
from lightning_scape.core.words import show_error

T = TypeVar("T")
LOOK_SECONDS = 0.5
"""Seconds between two looks of the watch."""
WAITING_SECONDS = 2.0
"""How long a rank waits before it says so in the store."""
QUIET_SECONDS = 5.0
"""How long a rank sends nothing before it says so."""
ANSWER_SECONDS = 3.0
"""How long a rank waits for an answer of the store after a message has failed."""
POLL_SECONDS = 0.02
"""Seconds between two looks of a rank that waits for others' keys in the store."""
_NOBODY_SENDS = 0x5CA9E
"""A tag that no message has."""


class At(NamedTuple):
    """Where a rank is."""

    message: int
    """Messages begun."""
    what: str
    waiting: bool

    def __str__(self) -> str:
        return f"{'waits in' if self.waiting else 'has sent nothing since'} {self.what}"


class Channel:
    """A group of its own beside a process group, on which only one kind of optimizer's steps send messages.

    Make it by :meth:`beside`. Only for gloo: NCCL queues messages on the device, where no rank waits in them.

    Args:
        group: the messages' own.
        token: the same on all ranks, and of no other channel: a store may outlive its ranks.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[Any, Channel]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup, token: str) -> None:
        self.group = group
        self.rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._store = PrefixStore(f"lightning_scape/{token}", default_store())
        self._at = self._seen = At(0, "the beginning", False)
        self._since = time.monotonic()
        self._told: At | None = None
        self._error: str | None = None
        self._told_error: str | None = None
        self.length = 0
        """Numbers in every all-reduce. All have the same, for gloo aborts the process where two differ in length."""
        self.sketched = 0
        """How many of these the sketches sent so far need."""
        self.elsewhere: tuple[str, float] | None = None
        """A message of somebody else's, on the job's own group, that this rank is in, and since when."""
        self.verdict: str | None = None
        """Why no message can be answered any more."""
        _Watch.over(self)

    @classmethod
    def beside(cls, process_group: dist.ProcessGroup, make: Callable[[], dist.ProcessGroup | None]) -> Channel:
        """The one beside a process group. If there is none yet, ``make`` gives a group over its ranks. Collective."""
        channel = cls._of.get(process_group)
        if channel is None:
            group = make()
            assert group is not None
            token = [secrets.token_hex(8)]
            dist.broadcast_object_list(token, group=group, group_src=0)
            channel = cls._of[process_group] = cls(group, token[0])
        return channel

    # ------------------------------------------------------------------------------------------- what this rank does

    def enter(self, what: str, *, begins: bool) -> None:
        """This rank is inside a message from now on: a new one, or one that it has begun before."""
        self._error = None  # this rank goes on after all
        self._at = At(self._at.message + begins, what, True)

    def leave(self) -> None:
        """This rank is no longer inside the message."""
        self._at = self._at._replace(waiting=False)

    def raised(self, error: BaseException, *, ends: bool) -> None:
        """Tells ranks that wait for this one's next message that an error has come in its place; by the watch, soon.

        ``ends``: nothing follows from this rank, so it also tells ranks that wait in a message of somebody else's.
        """
        self._error = f"{self._at.message}|{self.rank}|{'ends' if ends else ''}|{show_error(error)[:330]}"

    # ------------------------------------------------------------------------------------------- what the watch does

    def look(self) -> None:
        """Called by the watch's thread now and then. The main thread never asks the store, which may not answer."""
        if self._error is not self._told_error:
            self._told_error = self._error
            if self._told_error is None:
                self._store.delete_key("error")
            else:
                self._store.set("error", self._told_error)
        self._look_elsewhere()
        at = self._at
        if at is not self._seen:
            self._seen, self._since = at, time.monotonic()
            if self._told is not None:
                self._told = None
                self._store.set(f"rank {self.rank}", "")
            return
        quiet = time.monotonic() - self._since
        if self.verdict is not None or quiet < (WAITING_SECONDS if at.waiting else QUIET_SECONDS):
            return
        if self._told is None:
            self._told = at
            self._store.set(f"rank {self.rank}", str(at))
        if at.waiting and (verdict := self._judge(at)) and at is self._at:
            self._end(verdict, self.group)

    def _look_elsewhere(self) -> None:
        """Messages of others have no numbers here. Only an error that another rank has told can end such a wait."""
        if (now := self.elsewhere) is None or self.verdict is not None:
            return
        what, since = now
        if time.monotonic() - since < WAITING_SECONDS:
            return
        if (verdict := self._failure(what, self._at.message, elsewhere=True)) and now is self.elsewhere:
            self._end(verdict, dist.group.WORLD)

    def _end(self, verdict: str, group: dist.ProcessGroup | None) -> None:
        self.verdict = verdict
        self._store.set("verdict", verdict)
        _cut(group)

    def explain(self) -> str:
        """After a message has failed: finds the :attr:`verdict`; where there is none, says what others did last."""
        return asked(self._explain, ANSWER_SECONDS) or ""

    def _explain(self) -> str:
        self._store.set(f"rank {self.rank}", str(self._at._replace(waiting=True)))
        self.verdict = self.verdict or self._judge(self._at)
        if self.verdict is None and (others := self._others()):
            return f" {others} If a rank left out a step that others take, take it on all ranks or on none."
        return ""

    def _judge(self, at: At) -> str | None:
        """Whether the message that this rank waits in cannot be answered, and why."""
        if self._store.check(["verdict"]):  # of another rank, which came second
            return self._store.get("verdict").decode()
        mine = f"{self.rank}|{at.what}"
        first = self._store.compare_set(f"message {at.message}", "", mine).decode()
        rank, what = first.split("|", 1)
        if what != at.what:
            others = f" {self._others()}" if self._ranks > 2 else ""
            return (
                f"All ranks must take the same steps, got rank {rank} waiting in {what}, rank {self.rank} in {at.what}."
                f"{others} A step that one rank left out is the likely reason (fewer batches, a GradScaler, a look at"
                " its own gradients, an error that was caught), a stop of one rank alone (`trainer.should_stop`),"
                " optimizers that step in another order, or a `state_dict()` that only some ranks call: all must, as in"
                " a save. Take a step on all ranks or on none: `optimizer.all_finite()` asks all of them."
            )
        return self._failure(at.what, at.message - 1)

    def _failure(self, what: str, begun: int, *, elsewhere: bool = False) -> str | None:
        """The error that another rank raised in place of the message this one waits for, if it has begun no more."""
        if not self._store.check(["error"]):
            return None
        message, rank, ends, error = self._store.get("error").decode().split("|", 3)
        if int(message) > begun or int(rank) == self.rank or (elsewhere and not ends):
            return None
        return f"All ranks must answer, got an error on rank {rank} in place of its message ({what}): {error}"

    def _others(self) -> str:
        """What the other ranks have said, as sentences."""
        said: list[str] = []
        for rank in range(self._ranks):
            key = f"rank {rank}"
            if rank != self.rank and len(said) < 8 and self._store.check([key]) and (word := self._store.get(key)):
                said.append(f"Rank {rank} {word.decode()}.")
        return " ".join(said)


def _cut(group: dist.ProcessGroup | None) -> None:
    """Closes this rank's connections, so that all messages of a gloo group fail, here and on the other ranks.

    That is what gloo does where a receive is not answered in time. Nothing else interrupts a wait.
    """
    with contextlib.suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        other = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        receive = dist.irecv(nothing, group=group, group_src=other, tag=_NOBODY_SENDS)
        assert receive is not None
        receive.wait(timedelta(seconds=0.01))


def asked(ask: Callable[[], T], seconds: float) -> T | None:
    """The result of ``ask``, if it comes in time: a store may not answer at all. None, too, if it fails."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # its host is gone, or the process group was destroyed
            found.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else None


def missing_words(store: Any, keys: Iterable[str], seconds: float) -> list[str]:
    """Waits until all keys are in a store, at most so many seconds; returns those that are missing."""
    deadline, missing = time.monotonic() + seconds, list(keys)
    while (missing := [key for key in missing if not store.check([key])]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return missing


class _Watch:
    """One thread of the process looks after all channels."""

    _channels: ClassVar[weakref.WeakSet[Channel]] = weakref.WeakSet()
    _thread: ClassVar[threading.Thread | None] = None
    _end: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def over(cls, channel: Channel) -> None:
        """Looks after one more."""
        cls._channels.add(channel)
        if cls._thread is None or not cls._thread.is_alive():  # a forked process has none
            cls._end = threading.Event()
            cls._thread = threading.Thread(target=cls._run, args=(cls._end,), name="scape-watch", daemon=True)
            cls._thread.start()
            atexit.register(cls._stop, cls._thread, cls._end)

    @classmethod
    def _run(cls, end: threading.Event) -> None:
        while not end.wait(LOOK_SECONDS):
            for channel in list(cls._channels):
                with contextlib.suppress(Exception):  # the store may be gone: then so is the job
                    channel.look()

    @staticmethod
    def _stop(thread: threading.Thread, end: threading.Event) -> None:
        """Before the process ends: a thread inside torch would abort it."""
        end.set()
        thread.join(2.0)
