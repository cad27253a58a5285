"""What all Triton kernels share: launches, tables that tell a program its entries, numbers that round as torch's."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.naive import to_device

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
"""Floats that kernels know."""
PICK_CHUNK = 1024
"""Entries a program takes where they lie scattered."""
_KEPT = 64
"""Tables of a kind."""
_T = TypeVar("_T")


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


def grouped(items: Iterable[_T], key: Callable[[_T], object]) -> list[list[_T]]:
    """Those that one launch can take: items with equal keys, in the order in which keys come first."""
    groups: dict[object, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def per_stream(make: Callable[..., _T]) -> Callable[..., _T]:
    """Keeps the last results of a function whose last argument is a device, for each stream. A decorator.

    A table is read on the stream that filled it, and its memory returns to that stream.
    """
    kept = lru_cache(maxsize=_KEPT)(lambda stream, *args: make(*args))

    def called(*args: Any) -> _T:
        device = args[-1]
        return kept(int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0, *args)

    return called


@per_stream
def chunks(sizes: tuple[int, ...], chunk: int, device: torch.device) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """Programs needed for tensors of these sizes; the sizes, each program's tensor, and its first entry there."""
    numels = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (numels + (chunk - 1)) // chunk
    tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device="cpu"), counts)
    before = counts.cumsum(0) - counts
    starts = (torch.arange(tensors.numel(), dtype=torch.int64, device="cpu") - before[tensors.long()]) * chunk
    return tensors.numel(), (to_device(numels, device), to_device(tensors, device), to_device(starts, device))


@per_stream
def table(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device."""
    return to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


@triton.jit
def widen(raw, DTYPE: tl.constexpr):
    """What lies in memory as DTYPE (bf16 comes as int16), in fp32."""
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True) if DTYPE == tl.bfloat16 else raw


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """The reverse, to the nearest, ties to even."""
    if DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        raw = tl.where(value == value, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        raw = value
    return raw


@triton.jit
def pointer(address, DTYPE: tl.constexpr):
    """An address out of a table, as a pointer."""
    if DTYPE == tl.bfloat16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    return pointer
