"""The background thread for messages, and the clean end of a process that has one.

A process aborts if the interpreter ends while a thread is inside torch, even only to free memory after a message.
So the end waits: for the threads here, and for gloo's own.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ClassVar

import torch
import torch.distributed as dist

from lightning_scape.comm import under_way
from lightning_scape.comm.under_way import LEAVE_SECONDS


class Job(Future[None]):
    """A call on the background thread; waited for like a message."""

    def wait(self) -> None:
        """Waits until it has returned; raises its error."""
        self.result()


_Jobs = SimpleQueue[tuple[Job, Callable[[], None]] | None]


class Worker:
    """Runs calls on a background thread, one after the other.

    All ranks must send a group's messages in the same order. So each group has one worker, whichever optimizers share
    it, and it keeps the order of the main threads' calls. The thread is a daemon, so that a process whose peer is gone
    can end.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Worker]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._group = weakref.ref(group)
        self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name="scape-mask", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False  # with the group, the thread goes too
        # After a process group's own end was registered, hence before it.
        atexit.register(_leave, weakref.ref(self._thread), self._jobs, weakref.ref(group))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Worker:
        """The group's worker."""
        worker = cls._of.get(group)
        if worker is None:
            worker = cls._of[group] = cls(group)
        return worker

    def do(self, act: Callable[[], None]) -> Job:
        """Hands over ``act``; when the process is ending and the thread has left (a step at exit), does it here."""
        job = Job()
        if (group := self._group()) is not None:
            under_way.note(group, job)
        if self._thread.is_alive():
            self._jobs.put((job, act))
        else:
            carry_out(job, act)
        return job


def _leave(thread: weakref.ref[threading.Thread], jobs: _Jobs, group: weakref.ref[dist.ProcessGroup]) -> None:
    """Waits until the worker's thread has done its calls and ended, ``LEAVE_SECONDS`` at most.

    A message that is still not answered then is given up, with its group.
    """
    running = thread()
    if running is None:
        return
    jobs.put(None)
    running.join(LEAVE_SECONDS)
    unanswered = group()
    if running.is_alive() and unanswered is not None:
        with contextlib.suppress(Exception):
            unanswered.abort()
        running.join(1.0)


@torch.no_grad()  # which is a thread's own
def _work_off(jobs: _Jobs) -> None:
    while (given := jobs.get()) is not None:
        carry_out(*given)
        del given  # its tensors must not live until the next call


def carry_out(job: Job, act: Callable[[], None]) -> None:
    """Calls ``act``, and ends the job with its result or error."""
    try:
        act()
        job.set_result(None)
    except BaseException as error:
        job.set_exception(error)


_ends_groups = threading.Event()


def end_groups_at_exit() -> None:
    """Notes that this process has a group over gloo, whose threads its end has to wait for."""
    _ends_groups.set()


def _end_groups() -> None:
    """Joins gloo's own threads: they free the last messages, and would abort a process that ends meanwhile.

    That is what ``destroy_process_group`` does, if neither the script has called it nor Lightning, which does so for
    NCCL alone: 4 of 40 runs of plain DDP over gloo were aborted (torch 2.13). For ``LEAVE_SECONDS`` at most: the wait
    for an interrupted message would last until its timeout.
    """
    if _ends_groups.is_set() and dist.is_initialized():
        ending = threading.Thread(target=_destroy_all, daemon=True)
        ending.start()
        ending.join(LEAVE_SECONDS)


def _destroy_all() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


atexit.register(_end_groups)  # at import: after what others have registered since, who may still send something
