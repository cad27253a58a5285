"""``lightning-scape doctor``: what does not work on this machine and, under torchrun, between all ranks."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # without a mark for mypy

from lightning_scape.__about__ import __version__
from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer

SMALL, LARGE = 8, 4_000_000
"""Bytes of the all-reduces that are timed."""
REPEATS = 10
COMPILING = timedelta(minutes=5)
"""How much longer ranks wait for one that compiles its operations for the first time."""
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


class Found(NamedTuple):
    """What a rank has found."""

    versions: str
    """Must be the same on all ranks."""
    lines: list[str]
    """What is so."""
    wrong: list[str]
    """What does not work."""


def run(timeout: float) -> int:
    """Looks, and prints what it has found; returns 1 if something does not work, else 0.

    Args:
        timeout: seconds to wait for other ranks.
    """
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks == 1:
        return tell([look()])
    patience = timedelta(seconds=timeout)
    try:
        store = arrive(rank, ranks, patience)
        everyone = meet(look(), store, rank, ranks, patience + COMPILING)
    except (RuntimeError, OSError) as error:  # torch's own errors are among them
        print(f"WRONG on rank {rank}: {error}", flush=True)
        return 1
    return tell(everyone, silent=rank > 0)


def tell(everyone: Sequence[Found], silent: bool = False) -> int:
    """Prints the first rank's lines and what is wrong on any; returns the exit status, the same on all ranks."""
    wrong = [f"WRONG on rank {rank}: {each}" for rank, found in enumerate(everyone) for each in found.wrong]
    if len({found.versions for found in everyone}) > 1:
        said = "; ".join(f"rank {rank}: {found.versions}" for rank, found in enumerate(everyone))
        wrong.append(f"WRONG: all ranks must have the same versions, got {said}. Install the same everywhere.")
    if not silent:
        print("\n".join([everyone[0].versions, *everyone[0].lines, *(wrong or ["Nothing is wrong."])]), flush=True)
    return 1 if wrong else 0


# ------------------------------------------------------------------------------------------------------ this machine


def look() -> Found:
    """This machine: what is installed, what it trains on, and whether a step runs."""
    known = [f"{name} {version(name)}" for name in ("torch", "lightning", "numpy")]
    versions = ", ".join([f"lightning_scape {__version__}", f"Python {platform.python_version()}", *known])
    device, wrong = torch.device("cpu"), []
    local = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        if local >= (count := torch.cuda.device_count()):
            wrong.append(f"Each rank must have a GPU of its own, got rank {local} of {count} GPUs. Start fewer ranks.")
        else:
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = [f"Trains on {name}.", _threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), device)]
    compiler = "triton" if device.type == "cuda" else "numba"
    if importlib.util.find_spec(compiler) is None:
        extra = "gpu" if device.type == "cuda" else "cpu"
        lines.append(f"{compiler} is missing: a step takes several times as long. Install lightning-scape[{extra}].")
    try:
        first, second = _two_steps(device)
    except Exception as error:  # whatever a compiler or a driver does
        wrong.append(f"Two steps of SCAPE on {device} must run, got {type(error).__name__}: {error}")
    else:
        lines.append(f"Two steps of SCAPE run: {show_seconds(first)} for the first, {show_seconds(second)} then.")
    return Found(versions, lines, wrong)


def _threads(ranks_here: int, device: torch.device) -> str:
    """How the ranks of this machine share its cores."""
    cores, threads = _cores(), torch.get_num_threads()
    said, best = f"{cores} cores, {ranks_here} ranks here, {threads} threads each", max(1, cores // ranks_here)
    slow = threads > best or (threads < best and device.type == "cpu")
    return f"{said}: slow, set OMP_NUM_THREADS={best}." if slow else f"{said}."


def _cores() -> int:
    """Cores that this process may use: by its affinity, and by the limit of its container."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return min(allowed, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or "max": no limit
        return allowed


def _two_steps(device: torch.device) -> tuple[float, float]:
    """Seconds of two steps on this rank alone, the first of which compiles."""
    weight = torch.nn.Parameter(torch.ones(1_000_000, dtype=torch.float32, device=device))
    config = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0, update="adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that numba or Triton is missing is said
        optimizer = ScapeOptimizer([weight], lr=1e-3, config=config, communicator=ScapeCommunicator.alone())
        weight.grad = torch.ones_like(weight)
        seconds = [_seconds(optimizer.step, device) for _ in range(2)]
        optimizer.drain()
    if bool((weight == 1).all()) or not bool(weight.isfinite().all()):
        raise RuntimeError("parameters that did not move, or are not finite.")
    return seconds[0], seconds[1]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# --------------------------------------------------------------------------------------------------------- all ranks


def arrive(rank: int, ranks: int, timeout: timedelta) -> Store:
    """The job's store, once all ranks have come to it.

    Raises:
        RuntimeError: some have not, and which.
    """
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun itself does
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=keeps, timeout=timeout, wait_for_workers=False)
    keys = [f"lightning_scape/doctor/{each}" for each in range(ranks)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"All {ranks} ranks must come within {timeout.total_seconds():g} s, got none of {missing}. Look at their"
            " output, and at the way from their machine to MASTER_ADDR."
        ) from error
    return store


def meet(here: Found, store: Store, rank: int, ranks: int, timeout: timedelta) -> list[Found]:
    """What all ranks have found; the first has a sentence on the messages between them, too. Collective.

    Raises:
        RuntimeError: a message does not arrive; of a rank that cannot be reached, which.
    """
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        beside = dist.new_group(backend="gloo", timeout=timeout)
        dist.monitored_barrier(beside, timeout, wait_all_ranks=True)
        everyone: list[Found] = [here] * ranks
        dist.all_gather_object(everyone, here, beside)
        small, large = (_all_reduce(size, device) for size in (SMALL, LARGE))
    finally:
        dist.destroy_process_group()
    everyone[0].lines.append(_meaning(small, large, ranks))
    return everyone


def _all_reduce(size: int, device: torch.device) -> float:
    """Seconds of an all-reduce, the median of a few."""
    message = torch.zeros(size // 4, dtype=torch.float32, device=device)
    times = sorted(_seconds(lambda: dist.all_reduce(message), device) for _ in range(REPEATS))
    return times[REPEATS // 2]


def _meaning(small: float, large: float, ranks: int) -> str:
    rate = 2 * (ranks - 1) / ranks * LARGE / large
    ddp = 8e8 * (ranks - 1) / ranks / rate
    return (
        f"All {ranks} ranks reach each other. An all-reduce of {SMALL} bytes takes {show_seconds(small)}, one of"
        f" {show_bytes(LARGE)} {show_seconds(large)}: `lightning-scape plan --bandwidth {rate * 8e-6:.0f}mbit` says"
        f" what that means for a model. With 100 million parameters DDP's gradients travel for {show_seconds(ddp)}"
        " in every step."
    )
