"""Names of phases in a profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.cuda import nvtx
from torch.profiler import record_function

from lightning_scape.core.private_names import profiler_records


@contextmanager
def profiler_range(label: str) -> Iterator[None]:
    """A range of torch's profiler, while one records; and, where CUDA is in use, an NVTX range for Nsight.

    Without a profiler torch's range costs several microseconds, and hands Python's lock to another thread.
    """
    with (
        record_function(label) if profiler_records() else nullcontext(),
        nvtx.range(label) if torch.cuda.is_initialized() else nullcontext(),
    ):
        yield


@contextmanager
def timed_range(label: str, seconds: dict[str, float]) -> Iterator[None]:
    """A range ``method::phase``; the CPU's seconds inside are added to those of the phase."""
    began = time.perf_counter()
    with profiler_range(label):
        yield
    seconds[label.partition("::")[2]] += time.perf_counter() - began
