"""How gloo's threads share a core with the threads that send.

gloo has a thread that receives. Two ranks that send to each other use one connection, and a lock of it. While a sender
holds the lock, the thread that receives can do nothing, and asks again and again until the lock is free. Where both run
on one core, Linux lets a thread that wakes up go first. So the sender lost its core for some milliseconds to a thread
that waited for that very sender. Under ``SCHED_BATCH`` a thread that wakes up waits for its turn. On a free core it
runs at once, as before.

torch 2.7 gives these threads no name, by which they are found: nothing changes there.

Measured with 2 ranks of one core each, pythia-14m, 99%: a step took 42 ms, and now 31 ms (docs/design.md, 3.5).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NAME = "gloo_tcp_loop"
"""Of the threads that receive, one for each process group."""
_TASKS = Path("/proc/self/task")


def receivers() -> list[int]:
    """Numbers of the threads of this process that receive for gloo. Empty where the system does not say (not Linux)."""
    found = []
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if (task / "comm").read_text().strip() == NAME:
                    found.append(int(task.name))
    return found


def let_senders_finish() -> None:
    """Has gloo's receiving threads wait for their turn, of all process groups that there are.

    Threads with a policy other than the default keep it. Where the system forbids the change, all works as before.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in receivers():
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
