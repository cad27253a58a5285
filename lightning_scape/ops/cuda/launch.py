"""Launches of Triton kernels, and the tables on the device that tell a program which entries are its own."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.naive import to_device

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
"""Floats that kernels know. Others are left to the definition: a model of size is trained in neither fp16 nor fp64."""
STREAM_CHUNK = 4096
"""Entries a program takes where memory is read end to end: 16 for each of 256 threads."""
PICK_CHUNK = 1024
"""Likewise where entries lie scattered."""
CACHED_TABLES = 64


def launch(kernel: Any, programs: int | tuple[int, int], *args: Any, **meta: Any) -> None:
    """Starts a kernel on the current stream of its tensors' device, and waits for nothing.

    A number with a fraction must come in a tensor: compiled kernels get it as fp32, whatever they compute in, and
    Triton's interpreter as it is.
    """
    assert not any(isinstance(arg, float) for arg in args)
    grid = (programs,) if isinstance(programs, int) else programs
    if not all(grid):
        return
    with torch.cuda.device_of(next(arg for arg in args if isinstance(arg, Tensor))):
        kernel[grid](*args, **meta, enable_fp_fusion=False)


def aligned(tensor: Tensor) -> bool:
    """Whether 16 bytes can be read at once from its start."""
    return tensor.data_ptr() % 16 == 0


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that hold anything, by dtype and alignment."""
    groups: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.contiguous().view(-1)
            groups.setdefault((flat.dtype, aligned(flat)), []).append(flat)
    return list(groups.values())


def addresses(flats: Sequence[Tensor]) -> Tensor:
    """Where each tensor lies; the last tables are kept."""
    return table(tuple([flat.data_ptr() for flat in flats]), flats[0].device)


def chunks(sizes: tuple[int, ...], chunk: int, device: torch.device) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """Programs needed for tensors of these sizes; the sizes, each program's tensor, and its first entry there."""
    return cached_chunks(sizes, chunk, device, stream_of(device))


def table(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers on the device."""
    return cached_table(numbers, device, dtype, stream_of(device))


# The stream is part of the key: a table is read on the stream that filled it, and its memory returns to that stream.


@lru_cache(maxsize=CACHED_TABLES)
def cached_chunks(
    sizes: tuple[int, ...], chunk: int, device: torch.device, stream: int
) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """See :func:`chunks`."""
    numels = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (numels + (chunk - 1)) // chunk
    tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device="cpu"), counts)
    before = counts.cumsum(0) - counts
    starts = (torch.arange(tensors.numel(), dtype=torch.int64, device="cpu") - before[tensors.long()]) * chunk
    return tensors.numel(), (to_device(numels, device), to_device(tensors, device), to_device(starts, device))


@lru_cache(maxsize=2 * CACHED_TABLES)
def cached_table(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype, stream: int) -> Tensor:
    """See :func:`table`."""
    return to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


def stream_of(device: torch.device) -> int:
    """The current stream of a device; 0 where it has none."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
