"""Triton kernel that reads whole gradients: their sketch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops import naive
from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.cuda.launch import pointer, widen
from lightning_scape.ops.naive import to_device

_SKETCH_ROWS, _SKETCH_COLUMNS = 8, 256
"""Entries of a chunk that a program of :func:`sketch` reads at a time; the fastest of 18 shapes tried on an H200."""
_SKETCH_PROGRAMS = 256
"""Partial sketches, added up in the end."""
_SKETCH_WARPS = 8


@triton.jit
def _sketch_kernel(
    grads,
    numels,
    chunk_tensors,
    chunk_starts,
    plan,
    signs,
    partials,
    chunks,
    LENGTH: tl.constexpr,
    GRAD: tl.constexpr,
    BUCKETS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program sums one range of buckets, over every n-th chunk. No other program writes there."""
    bucket = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)  # added up over rows in the end: no warp waits for another
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        tensor, start = tl.load(chunk_tensors + chunk), tl.load(chunk_starts + chunk)
        left = tl.load(numels + tensor) - start
        source = pointer(tl.load(grads + tensor), GRAD) + start
        numel = tl.minimum(left, LENGTH).to(tl.int32)
        width, rotation = tl.load(plan + 4 * chunk), tl.load(plan + 4 * chunk + 1)
        offset, sign = tl.load(plan + 4 * chunk + 2), tl.load(plan + 4 * chunk + 3)
        column = bucket - rotation
        column = tl.where(column < 0, column + BUCKETS, column)
        counts = (column < width) & (bucket < BUCKETS)
        lowest = tl.program_id(1) * COLUMNS - rotation
        lowest = tl.where(lowest < 0, lowest + BUCKETS, lowest)
        nearest = tl.where(lowest + COLUMNS > BUCKETS, 0, lowest)  # of my columns; behind the last entry lies none
        for first in range(0, numel - nearest, ROWS * width):
            entry = first + row * width + column[None, :]
            inside = counts[None, :] & (entry < numel)
            value = widen(tl.load(source + entry, mask=inside, other=0), GRAD)
            drawn = tl.load(signs + offset + entry, mask=inside, other=0).to(tl.float32)
            sums += value * (drawn * sign.to(tl.float32))
    tl.store(partials + tl.program_id(0) * BUCKETS + bucket, tl.sum(sums, axis=0), mask=bucket < BUCKETS)


def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    """See :func:`naive.sketch`. Each bucket is summed by one program in a fixed order: no atomic additions."""
    buckets, length = max(widths), signs.numel() // 2
    sums = torch.zeros(buckets, dtype=torch.float32, device=signs.device)
    given = [(index, grad) for index, grad in enumerate(grads) if grad is not None and grad.numel()]
    for group in launching.grouped(given, lambda each: each[1].dtype):
        indices, own = zip(*group, strict=True)
        sizes = tuple([grad.numel() for grad in own])
        count, chunks = launching.chunks(sizes, length, signs.device)
        programs = min(count, _SKETCH_PROGRAMS)
        partials = torch.empty(programs, buckets, dtype=torch.float32, device=signs.device)
        launching.launch(
            _sketch_kernel,
            (programs, triton.cdiv(buckets, _SKETCH_COLUMNS)),
            launching.table(tuple([grad.data_ptr() for grad in own]), torch.int64, signs.device),
            *chunks,
            sketch_plan(indices, sizes, length, tuple(widths), signs.device),
            signs,
            partials,
            count,
            LENGTH=length,
            GRAD=launching.DTYPES[own[0].dtype],
            BUCKETS=buckets,
            ROWS=_SKETCH_ROWS,
            COLUMNS=_SKETCH_COLUMNS,
            num_warps=_SKETCH_WARPS,
        )
        sums += partials.sum(0)
    return sums


@launching.per_stream
def sketch_plan(
    indices: tuple[int, ...], sizes: tuple[int, ...], length: int, widths: tuple[int, ...], device: torch.device
) -> Tensor:
    """Width, rotation, offset and sign of each chunk, as :func:`naive.sketch` draws them: int32 ``[chunks, 4]``."""
    rows = [
        naive.draw(index, number, length, widths)
        for index, size in zip(indices, sizes, strict=True)
        for number in range(-(-size // length))
    ]
    return to_device(torch.tensor(rows, dtype=torch.int32, device="cpu"), device)
