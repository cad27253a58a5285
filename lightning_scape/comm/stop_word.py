"""One rank was told to stop: all ranks stop after the same step, though no message joins them for a long while.

A rank that is told leaves a word in the job's store. On every rank a thread looks for it, once in ``POLL_SECONDS``, and
answers with the number of the step that its rank is in. Once a rank has answered, it begins no further step before all
have. All stop after the step with the largest number: no rank is past it. ::

    rank 0 in step 28, is told   leaves the word, answers 28   ends 28, waits; 30 it is: goes on, ends 30, stops
    rank 1 in step 30            finds the word, answers 30    ends 30, stops

A rank that waits in its step for another one's message answers all the same, because its thread does. So all stop after
about two looks at the store, plus the steps by which the fastest rank is ahead.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # without a mark for mypy

from lightning_scape.comm.collectives import Communicator, is_distributed, timeout_of
from lightning_scape.core.private_names import default_store

POLL_SECONDS = 0.5
_PATIENCE = 1800.0
"""Seconds that a rank waits for answers, where its process group has no timeout of its own."""
_KEY = "lightning_scape/stop"
_WORD = "word"


class StopWord:
    """A rank's part in this. Constructing is collective.

    Args:
        ranks: those that stop together.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._rank, self._ranks = ranks.rank, ranks.world_size
        self._said = False
        self._lock = threading.Lock()
        self._step = 1
        self._answer: int | None = None
        """The step that this rank has answered with."""
        self._last: int | None = None
        """The step after which all stop, once all have answered."""
        self._known = threading.Event()
        self._over = threading.Event()
        if self._ranks == 1 or not is_distributed():
            return
        # New at every start: a store may outlive its ranks.
        self._name: str = ranks.all_gather_object(uuid.uuid4().hex)[0]
        self._world = weakref.ref(dist.group.WORLD)
        timeout = timeout_of(ranks.process_group)
        self._patience = _PATIENCE if timeout is None else timeout.total_seconds()
        watch = threading.Thread(target=_watch, args=(weakref.ref(self), self._over), name="scape-stop", daemon=True)
        watch.start()
        weakref.finalize(self, _end, self._over, watch)  # also at exit: no thread may be inside torch then

    def say(self) -> None:
        """This rank was told. For a signal's handler: takes no lock, sends nothing."""
        self._said = True

    def ends(self) -> bool:
        """To be called when a step has ended: whether all ranks stop here. Once True it stays so.

        Raises:
            RuntimeError: some rank has not answered in time.
        """
        if self._ranks == 1:
            return self._said
        with self._lock:
            step = self._step
            self._step += 1
            if self._answer is None:
                return False
        if not self._known.wait(self._patience):
            raise RuntimeError(
                f"All ranks must answer when one is told to stop, got no answer of some within {self._patience:.0f} s:"
                " a rank has died, or hangs. Restart all ranks from the newest checkpoint."
            )
        return self._last is not None and step >= self._last

    def look(self) -> bool:
        """Looks at the store once; False where there is nothing more to see, or no store: the process group is gone."""
        store: Any = None
        if is_distributed() and dist.group.WORLD is self._world():
            store = default_store()
        if store is None:
            return False
        part = PrefixStore(f"{_KEY}/{self._name}", store)
        if self._answer is None:
            if self._said:
                part.set(_WORD, "")
            elif not part.check([_WORD]):
                return True
            with self._lock:  # from here on this rank begins no further step
                self._answer = self._step
            part.set(str(self._rank), str(self._answer))
        answers = [str(rank) for rank in range(self._ranks)]
        if not part.check(answers):
            return True
        self._last = max(int(part.get(rank)) for rank in answers)
        return False

    def close(self) -> None:
        """Looks no more. A rank that waits for answers goes on."""
        self._over.set()
        self._known.set()


class Stoppable:
    """A base of what has a :class:`StopWord`, and asks it after each step."""

    _stop_word: StopWord
    stop_requested = False
    """After a step: whether all ranks stop here, for one of them was told to. The same on all ranks; stays True."""

    def request_stop(self) -> None:
        """Says that this rank was told to stop (SIGTERM); may be called by a signal's handler.

        All ranks learn it within some two seconds, or steps where those take longer.
        """
        self._stop_word.say()


def _watch(word: weakref.ref[StopWord], over: threading.Event) -> None:
    while not over.wait(POLL_SECONDS):
        if (there := word()) is None:
            return
        looks = False
        with contextlib.suppress(RuntimeError):  # the store's host has gone
            looks = there.look()
        if not looks:
            there.close()
        del there


def _end(over: threading.Event, watch: threading.Thread) -> None:
    over.set()
    if watch is not threading.current_thread():
        watch.join(2.0)
