"""A process group for each start of a job: what torchrun's restarts need.

Under torchrun, ranks meet at a store that its agent keeps. The store outlives the ranks, and with torch 2.13 its keys
carry no mark of the restart: new ranks read the addresses that dead ranks left there, and wait for them in vain
(https://github.com/pytorch/pytorch/issues/135712). ``TORCHELASTIC_RESTART_COUNT`` is no such mark, because each agent
counts for itself: one that joins later starts at 0.

So rank 0 draws a name for every start, and each process group gets the part of the store with that name. Ranks learn it
by a handshake that old keys cannot disturb::

    rank r    hello/r = nonce          a new nonce in every process
    rank 0    name/nonce = name        answers each nonce that it sees, until all ranks have greeted by the name
    rank r    here/name/r              read only under this start's name
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # without a mark for mypy
from torch.distributed.distributed_c10d import default_pg_timeout

_KEY = "lightning_scape/start"
_POLL_SECONDS = 0.01


def start_process_group(environment: Any, backend: str, timeout: timedelta | None, device: torch.device) -> None:
    """Starts the process group where torchrun's agent keeps the store; elsewhere the host does it by itself.

    Args:
        environment: a cluster environment of Lightning's.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: how long ranks wait for each other.
        device: of this rank.
    """
    mine = (environment.global_rank(), environment.world_size())
    if uses_agent_store() and mine == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
        init_process_group(backend, timeout=timeout, device_id=device if device.type != "cpu" else None)


def init_process_group(
    backend: str | None = None, *, timeout: timedelta | None = None, device_id: torch.device | None = None
) -> None:
    """``torch.distributed.init_process_group`` that also works after a restart by torchrun (``--max-restarts``).

    For scripts without Lightning; the strategies do it by themselves. Reads torchrun's environment variables. Without
    torchrun it calls torch's own, by ``env://``. Collective; returns at once if there is a process group already.

    Args:
        backend: ``"gloo"``, ``"nccl"``; None is torch's choice.
        timeout: how long ranks wait for each other, here and in every message; None is torch's, 30 minutes.
        device_id: this rank's device, as torch takes it.

    Raises:
        RuntimeError: ranks are missing when ``timeout`` ends; on every rank.
    """
    if dist.is_initialized():
        return
    options: dict[str, Any] = {"timeout": timeout, "device_id": device_id}
    if not uses_agent_store():
        dist.init_process_group(backend, **options)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    waits = timeout or default_pg_timeout
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world_size, is_master=False, timeout=waits)
    part = PrefixStore(f"{_KEY}/{agree_on_name(store, rank, world_size, waits)}", store)
    dist.init_process_group(backend, store=part, rank=rank, world_size=world_size, **options)


def uses_agent_store() -> bool:
    """Whether torchrun's agent keeps the store at which ranks meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_name(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this start of the job, new and the same on all ranks. Collective.

    Args:
        store: one that all ranks reach; what earlier starts left in it does no harm.
        rank: of this process.
        world_size: number of ranks.
        timeout: how long to wait for the others.

    Raises:
        RuntimeError: ranks are missing when ``timeout`` ends.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank:
        return _ask_for_name(store, rank, world_size, deadline)
    name = uuid.uuid4().hex
    waiting = {other: "" for other in range(1, world_size)}
    while waiting:
        for other, answered in list(waiting.items()):
            hello = f"{_KEY}/hello/{other}"
            if store.check([f"{_KEY}/here/{name}/{other}"]):
                del waiting[other]
            elif store.check([hello]) and (nonce := store.get(hello).decode()) != answered:
                store.set(f"{_KEY}/name/{nonce}", name)
                waiting[other] = nonce
        if waiting:
            if time.monotonic() > deadline:
                raise _missing(f"{world_size - len(waiting)}/{world_size} clients joined", world_size)
            time.sleep(_POLL_SECONDS)
    return name


def _ask_for_name(store: Store, rank: int, world_size: int, deadline: float) -> str:
    nonce = uuid.uuid4().hex
    store.set(f"{_KEY}/hello/{rank}", nonce)
    try:  # not by asking again and again: there may be a thousand of us
        store.wait([f"{_KEY}/name/{nonce}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except dist.DistStoreError as error:
        raise _missing("no answer from rank 0", world_size) from error
    name: str = store.get(f"{_KEY}/name/{nonce}").decode()
    store.set(f"{_KEY}/here/{name}/{rank}", "")
    return name


def _missing(found: str, world_size: int) -> RuntimeError:
    return RuntimeError(
        f"All {world_size} ranks must meet at torchrun's store before `timeout` ends, got {found} there. If the nodes"
        " name different MASTER_ADDR, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: it then makes a new store"
        " at each restart."
    )
