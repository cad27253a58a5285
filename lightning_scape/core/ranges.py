"""Names of phases in a profiler."""

from __future__ import annotations

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
