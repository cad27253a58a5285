"""All-to-all and all-gather, on gloo by pairs of ranks; and how gloo's threads share a core with those that send.

gloo has a thread that receives, for each process group. Two ranks that send to each other use one connection, and a
lock of it. While a sender holds the lock, the thread that receives can do nothing, and asks again and again until the
lock is free. Where both run on one core, Linux lets a thread that wakes up go first. So the sender loses its core for
some milliseconds to a thread that waits for that very sender. Under ``SCHED_BATCH`` a thread that wakes up waits for
its turn. On a free core it runs at once, as before. docs/design.md, 3.5, says what that brings.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[[], object]
"""Returns when a message has arrived."""


def by_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether gloo carries what lies in host memory, also where ``init_process_group()`` was given no backend."""
    return "cpu:gloo" in dist.get_backend_config(group)


def all_to_all_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """Every all-to-all of this package: part j of ``tensor`` goes to rank j; ``output`` has what arrives."""
    if output.device.type == "cpu" and by_gloo(group):
        ranks = dist.get_world_size(group)
        return _exchange(list(output.chunk(ranks)), list(tensor.chunk(ranks)), group)
    sent: Wait = dist.all_to_all_single(output, tensor, group=group, async_op=True).wait
    return sent


def all_gather_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """Every all-gather of a step: each rank's ``tensor``, in rank order, in ``output``."""
    if output.dtype == torch.uint16:  # neither gloo nor NCCL knows the type
        output, tensor = output.view(torch.uint8), tensor.view(torch.uint8)
    if output.device.type == "cpu" and by_gloo(group):
        ranks = dist.get_world_size(group)
        places = list(output.chunk(ranks))
        wait = _exchange(places, [tensor] * ranks, group)
        places[dist.get_rank(group)].copy_(tensor)
        return wait
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gathered: Wait = call(output, tensor, group=group, async_op=True).wait
    return gathered


def _exchange(received: list[Tensor], sent: list[Tensor], group: dist.ProcessGroup | None) -> Wait:
    """Sends ``sent[j]`` to rank j and receives ``received[j]`` from it, all at once; this rank's own stays here.

    It does what gloo's own all-to-all and all-gather do, at up to twice the speed. Those announce a receive behind
    what they send on the same connection, so two ranks send by turns. Here every receive is announced first.
    """
    rank = dist.get_rank(group)
    others = [(rank + hop) % len(sent) for hop in range(1, len(sent))]
    works = [dist.irecv(received[peer], group=group, group_src=peer) for peer in others]
    works += [dist.isend(sent[peer], group=group, group_dst=peer) for peer in others]
    return lambda: [work.wait() for work in works if work is not None]


_waiting: WeakSet[dist.ProcessGroup] = WeakSet()


def let_senders_finish(group: dist.ProcessGroup | None) -> None:
    """Makes gloo's receiving threads, those of all process groups so far, wait for their turn. They are found by name.

    Threads with another policy than the default keep it. If the system forbids the change, all works as before.
    """
    group = group or dist.group.WORLD
    if group is None or group in _waiting:
        return
    _waiting.add(group)
    for task in Path("/proc/self/task").glob("*"):  # none but on Linux
        with contextlib.suppress(OSError):  # it has ended
            thread = int(task.name)
            receives = (task / "comm").read_text().strip() == "gloo_tcp_loop"
            if receives and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
