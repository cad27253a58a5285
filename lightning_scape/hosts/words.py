"""One word of all ranks before each batch: who was told to stop or to save, whose epoch ends, who is in a save.

A signal may reach one rank or all, between any two messages. So its handler only notes it, and the next word, 20 bytes
on a gloo group of its own, brings it to all ranks: they hear it after the same batch, with gloo and with NCCL alike.
Words are under way while ranks train. Where all ranks must wait for one, because batches are short and the way is long,
they say fewer: one when the one before has come. Ranks that say different things where all must say the same raise,
each of them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_scape.comm.collectives import ProcessGroup

_MOST_BATCHES = 32
"""From one word to the next, where it is long on its way."""
_NO_TIMEOUT = timedelta(0)
"""In torch's ``wait``: the group's own."""


class Word(NamedTuple):
    """How many ranks say it."""

    stop: int
    save: int
    last: int
    saving: int
    waits: int
    """In vain, for an earlier word: it had not arrived."""


class Words:
    """A rank's part in this.

    Args:
        group: of words alone, on gloo; None: there is one rank.
        lag: batches after which a word is heard, so that nothing waits for it.
    """

    def __init__(self, group: ProcessGroup | None, lag: int) -> None:
        self._group, self.lag = group, lag
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self._under_way: deque[tuple[Any, Tensor, int]] = deque()
        """Each with the batch in which it was said."""
        self._batch, self._next, self._every = 0, 1, 1
        """The present batch, that of the next word, and batches from one to the next; the same on all ranks."""
        self._waits = False
        self.stop = self.save = False
        """What this rank was told; a signal's handler sets it."""
        self.stop_heard = self.save_heard = False
        """What some rank was told, as all have heard."""

    def say(self, *, last: bool = False, saving: bool = False) -> None:
        """Says a word; all ranks say as many. ``last``: this rank's epoch ends. ``saving``: it is in a save."""
        facts = [self.stop, self.save, last, saving, self._waits]
        word, self._waits = torch.tensor(facts, dtype=torch.int32, device="cpu"), False
        work = None if self._group is None else dist.all_reduce(word, group=self._group, async_op=True)
        self._under_way.append((work, word, self._batch))
        self._next = self._batch + self._every

    def fewest(self, count: int) -> int:
        """The smallest number that a rank has. Collective; no message that is under way on other groups meets it."""
        told = torch.tensor(count, dtype=torch.int64, device="cpu")
        if self._group is not None:
            dist.all_reduce(told, dist.ReduceOp.MIN, group=self._group)
        return int(told)

    def begin_batch(self, last: bool = False) -> None:
        """Says a word, if one is due; an epoch's last batch always has one."""
        self._batch += 1
        if last or self._batch >= self._next:
            self.say(last=last)

    def end_batch(self, stepped: bool) -> None:
        """Hears the words that are old enough, on all ranks the same.

        Args:
            stepped: a step has ended the batch. Under SCAPE ranks have waited for one another in it, and so for words.
        """
        lag = self.lag if stepped and self.lag <= 2 else max(self.lag, 2, self._every)
        old = [work for work, _, said in self._under_way if work is None or said <= self._batch - lag + 1]
        self._waits |= any(work is not None and not work.is_completed() for work in old)
        self.hear(len(self._under_way) - len(old))

    def hear(self, keep: int = 0, timeout: timedelta = _NO_TIMEOUT) -> None:
        """Hears words until so many are under way; waits at most so long for each.

        Raises:
            ValueError: some ranks have no more batches, and others have; on every rank.
            RuntimeError: some ranks save, and others do not; on every rank.
        """
        while len(self._under_way) > keep:
            work, word, _ = self._under_way.popleft()
            if work is not None:
                work.wait(timeout)
            heard = Word(*word.tolist())
            self.stop_heard |= heard.stop > 0
            self.save_heard |= heard.save > 0
            if heard.waits == self.ranks:  # a rank that is slower than others makes these wait, and not itself
                self._every = min(self._every + 1, _MOST_BATCHES)
            self._check(heard)

    def meet(self, *, last: bool = False, saving: bool = False, timeout: timedelta = _NO_TIMEOUT) -> None:
        """Says a word, as :meth:`say`, and waits for it: then all ranks are here. Collective."""
        self.say(last=last, saving=saving)
        self.hear(timeout=timeout)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Around messages of a step: raises what words that have arrived by then say is wrong, else they fail in vain.

        The word of the batch itself is left alone as to its end: in a last batch all ranks step once more.
        """
        self._look()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):  # else it says more than a word
                self._look()
            raise

    def _look(self) -> None:
        for place, (work, word, _) in enumerate(self._under_way):
            if not _has_arrived(work):
                return
            heard = Word(*word.tolist())
            self._check(heard._replace(last=0) if place == len(self._under_way) - 1 else heard)

    def all_failed(self, timeout: timedelta) -> bool:
        """After an error of this rank, which others hear of: whether all meet one in time, after as many words."""
        with contextlib.suppress(RuntimeError, ValueError):
            for _ in range(2):  # a rank that comes in vain once has gone, and its first word is still there
                self.meet(saving=True, timeout=timeout)
            return True
        return False

    def _check(self, heard: Word) -> None:
        if 0 < heard.saving < self.ranks:
            raise RuntimeError(
                f"All ranks must save together, got {heard.saving} of {self.ranks} ranks in a save (or ended by an"
                " error of their own: look at their output). Save on all ranks or on none: every rank has a part of"
                " the optimizer's state, so don't ask `is_global_zero` before `save_checkpoint`."
            )
        if 0 < heard.last < self.ranks:
            raise ValueError(
                f"All ranks must have as many training batches in an epoch, got {heard.last} of {self.ranks} ranks that"
                " have no more, while others have. Leave it to Lightning to divide the data"
                " (`use_distributed_sampler`), drop the surplus (`drop_last=True`, or `limit_train_batches` at the"
                " smallest number), or repeat batches. Set `trainer.should_stop` on all ranks or on none."
            )


def _has_arrived(work: Any) -> bool:
    if work is None:
        return True
    with contextlib.suppress(RuntimeError):  # it has failed: somebody is gone
        return bool(work.is_completed() and work.wait())
    return False
