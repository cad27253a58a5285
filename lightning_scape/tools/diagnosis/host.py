"""This host: its devices, its cores, and whether a step of SCAPE runs on them."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from lightning_scape import ops
from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.tools.diagnosis.findings import Finding

TOPIC = "This host"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def check_host(device: torch.device, ranks_here: int, environ: Mapping[str, str]) -> list[Finding]:
    """All findings about this host.

    Args:
        device: what this rank would train on.
        ranks_here: ranks that this host runs.
        environ: the environment's variables.
    """
    found = check_devices(device, ranks_here)
    found += check_threads(cores(), ranks_here, torch.get_num_threads(), device, environ)
    return [*found, *check_choice(environ), check_step(device)]


def check_devices(device: torch.device, ranks_here: int) -> list[Finding]:
    """GPUs, if there are any, and whether each rank has its own."""
    if device.type != "cuda":
        if NVIDIA_DRIVER.exists():
            why = "was built without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) finds none"
            text = f"This host has an NVIDIA driver, but torch {torch.__version__} {why}: training runs on the CPU."
            remedy = "Install a build of torch for CUDA, and look at CUDA_VISIBLE_DEVICES."
            return [Finding(TOPIC, "slow", text, remedy)]
        return [Finding(TOPIC, "ok", "no GPU: training runs on the CPU")]
    count = torch.cuda.device_count()
    known = [torch.cuda.get_device_properties(index) for index in range(count)]
    names = ", ".join(f"{each.name} ({show_bytes(each.total_memory)})" for each in known)
    found = [Finding(TOPIC, "ok", f"{count} GPU{'s' if count > 1 else ''}: {names}; CUDA {torch.version.cuda}")]
    if ranks_here > count:
        text = f"Each rank must have a GPU of its own, got {ranks_here} ranks for {count} here: NCCL refuses that."
        found.append(Finding(TOPIC, "broken", text, f"Start at most {count} processes here (--nproc_per_node)."))
    return found


def cores() -> int:
    """Cores that this process may use: by its affinity, and by the limit of its container."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return min(allowed, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or "max": no limit
        return allowed


def check_threads(
    available: int, ranks_here: int, threads: int, device: torch.device, environ: Mapping[str, str]
) -> list[Finding]:
    """Whether the ranks of this host share its cores well.

    Args:
        available: cores that may be used.
        ranks_here: ranks of this host.
        threads: of torch, in each of them.
        device: what they train on.
        environ: the environment's variables.
    """
    set_to = f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in environ else "no OMP_NUM_THREADS"
    text = f"{_plural(available, 'core')}, {_plural(ranks_here, 'rank')}, {_plural(threads, 'thread')} each ({set_to})"
    best = max(1, available // ranks_here)
    if ranks_here > available:
        return [
            Finding(TOPIC, "slow", f"{text}: ranks wait for each other's turn.", f"Start at most {available} here.")
        ]
    if threads > best:
        why = "threads of all ranks fight over the cores."
        return [Finding(TOPIC, "slow", f"{text}: {why}", f"Set OMP_NUM_THREADS={best}.")]
    if device.type == "cpu" and 2 * threads <= best:
        why = f"only {threads * ranks_here} of them compute (torchrun sets 1 thread where nothing is set)."
        return [Finding(TOPIC, "slow", f"{text}: {why}", f"Set OMP_NUM_THREADS={best}.")]
    return [Finding(TOPIC, "ok", text)]


def check_choice(environ: Mapping[str, str]) -> list[Finding]:
    """Whether somebody has ruled out the fast operations."""
    choice = environ.get(ops.VARIABLE, "auto")
    if choice not in ops.CHOICES:
        text = f"{ops.VARIABLE} must be one of {', '.join(ops.CHOICES)}, got {choice!r}."
        return [Finding(TOPIC, "broken", text, "Unset it.")]
    if choice == "naive":
        text = f"{ops.VARIABLE}=naive makes a step run in plain PyTorch, several times as long."
        return [Finding(TOPIC, "slow", text, "Unset it.")]
    return []


def check_step(device: torch.device, parameters: int = 100_000) -> Finding:
    """Whether a step of SCAPE runs here: compiled operations and all, on this rank alone.

    Args:
        device: where.
        parameters: of the step.
    """
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that numba or Triton is missing is a finding of its own
            size = _take_steps(device, parameters)
    except Exception as error:  # whatever a compiler or a driver does
        text = f"A step of SCAPE on {device} fails: {type(error).__name__}: {error}"
        remedy = f"{ops.VARIABLE}=naive does without numba and Triton; if that works, install them again."
        return Finding(TOPIC, "broken", text, remedy)
    seconds = show_seconds(time.perf_counter() - began)
    return Finding(
        TOPIC, "ok", f"two steps of SCAPE 99% with {size:,} parameters run on {device} (first use: {seconds})"
    )


def _take_steps(device: torch.device, parameters: int) -> int:
    weight = torch.nn.Parameter(torch.ones(parameters, dtype=torch.float32, device=device))
    config = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0, update="adamw")
    optimizer = ScapeOptimizer([weight], lr=1e-3, config=config, communicator=ScapeCommunicator.alone())
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    optimizer.drain()
    if not bool(torch.isfinite(weight.detach()).all()) or bool((weight.detach() == 1).all()):
        raise RuntimeError("the parameters must have moved and be finite, got some that have not or are not")
    return weight.numel()


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
