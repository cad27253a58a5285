"""How ranks meet, and what to set if they do not find each other."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from lightning_scape.comm.restarts import init_process_group, uses_agent_store


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


@contextlib.contextmanager
def explained_rendezvous(environment: Any) -> Iterator[None]:
    """Turns the errors of ranks that do not find each other into advice that names what to set.

    Args:
        environment: a cluster environment of Lightning's, asked for its ranks only if something fails.
    """
    try:
        yield
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError among them
        world_size = environment.world_size()
        remedy = _rendezvous_remedy(str(error), world_size)
        if remedy is None:
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise type(error)(
            f"All {world_size} ranks must meet at MASTER_ADDR:MASTER_PORT ({where}) before `timeout` ends, got on rank"
            f" {environment.global_rank()}: {error} {remedy}"
        ) from error


_RANKS_MISSING = (
    *("clients joined", "wait timeout", "onnect timeout"),  # waited in vain
    *("likely closed", "reset by peer", "roken pipe", "onnection closed"),  # rank 0 had, and is gone
)
"""Parts of torch's errors when ranks are missing; which of them a rank sees depends on who gives up first."""


def _rendezvous_remedy(problem: str, world_size: int) -> str | None:
    if "find address for" in problem:
        there = ", ".join(name for _, name in socket.if_nameindex())
        return f"Set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to an interface of this host: {there}."
    if "client socket" in problem:
        return (
            "Check that MASTER_ADDR is the first node's address as the other nodes see it, that rank 0 is started"
            " there, and that its firewall admits MASTER_PORT."
        )
    if any(sign in problem for sign in _RANKS_MISSING):
        return (
            f"Check that `num_nodes` times `devices` is the number of ranks that were started ({world_size} are"
            " expected), each node with a NODE_RANK of its own; that none of them failed before; that"
            " GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names the interface that leads to the other nodes; and that"
            " firewalls admit all ports between the nodes."
        )
    return None
