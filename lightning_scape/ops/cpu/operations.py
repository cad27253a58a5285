"""Gradients, masks, blocks and messages on a CPU: tensors and threads for the loops of this folder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.ops.cpu import kernels, masks, ranking, wire
from lightning_scape.ops.cpu import sweep as sweeping
from lightning_scape.ops.cpu.arrays import (
    GRAIN,
    array,
    by_dtypes,
    implements,
    in_parallel,
    like,
    or_empty,
    rows_of_a_thread,
    sketch_plan,
    wire_limit,
)
from lightning_scape.ops.naive import chunked
from lightning_scape.ops.naive.blocks import Sweep
from lightning_scape.ops.naive.masks import position_dtype
from lightning_scape.ops.naive.rules import cut
from lightning_scape.ops.naive.wire import GROUP, bits_in, feed_error_back, group_bytes
from lightning_scape.ops.registry import CPU

_NORM_CHUNK = 1 << 15
"""Entries of :func:`squared_norm` that are summed in the gradient's precision."""
_LONGEST_SORTED = 4096
"""Longer blocks are sorted by the twin, where many of their entries are sent."""
_SKETCH_PART = 16
"""Chunks of :func:`sketch` that are summed into one partial sketch, by one thread."""


# ------------------------------------------------------------------------------------------------------ gradients


@implements
def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """See :func:`naive.squared_norm`. Chunks are summed in fp32, their sums in fp64."""
    total = 0.0
    for (dtype,), group in by_dtypes([(grad,) for grad in grads if grad.numel()]):
        sizes = [grad.numel() for (grad,) in group]
        *starts, chunks = accumulate([-(-size // _NORM_CHUNK) for size in sizes], initial=0)
        table = np.array([(g.data_ptr(), s, n) for (g,), s, n in zip(group, starts, sizes, strict=True)], np.int64)
        partials = np.empty(chunks, np.float64)
        loop = functools.partial(kernels.squares, table, partials, _NORM_CHUNK, like(dtype))
        in_parallel(loop, chunks, GRAIN // _NORM_CHUNK)
        total += float(partials.sum())
    return torch.tensor(total, dtype=torch.float32, device="cpu")


@implements
def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    buckets, length = max(widths), signs.numel() // 2
    total = np.zeros(buckets, np.float32)
    numbered = [(grad, index) for index, grad in enumerate(grads) if grad is not None and grad.numel()]
    for dtype in dict.fromkeys(grad.dtype for grad, _ in numbered):
        group = [(grad, index) for grad, index in numbered if grad.dtype == dtype]
        sizes = tuple(grad.numel() for grad, _ in group)
        plan = sketch_plan(tuple(index for _, index in group), sizes, length, tuple(widths))
        table, addresses = plan.copy(), np.array([grad.data_ptr() for grad, _ in group], np.int64)
        table[:, 0] = addresses[plan[:, 6]] + plan[:, 0] * dtype.itemsize
        parts = -(-len(table) // _SKETCH_PART)
        sums = np.zeros((parts, buckets), np.float32)
        loop = functools.partial(kernels.sketch, table, array(signs), sums, _SKETCH_PART, like(dtype))
        in_parallel(loop, parts, 1)
        total += sums.sum(0)
    return torch.from_numpy(total)


# ---------------------------------------------------------------------------------------------------------- masks


@implements
def select(statistic: Tensor, sent: int) -> Tensor:
    blocks, length = statistic.shape
    assert 1 <= sent <= length
    if statistic.dtype != torch.float32 or (length > _LONGEST_SORTED and sent > ranking.MAX_PASSES):
        return chunked.select(statistic, sent)
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device="cpu")
    loop = functools.partial(masks.select, array(statistic), ranking.networks(length, sent), array(chosen))
    in_parallel(loop, blocks, rows_of_a_thread(length))
    return chosen


@implements
def pack_mask(mask: Tensor, length: int) -> Tensor:
    bits = torch.empty(len(mask), -(-length // 8), dtype=torch.uint8, device="cpu")
    in_parallel(functools.partial(masks.pack_mask, array(mask), array(bits)), len(bits), rows_of_a_thread(length))
    return bits


@implements
def unpack_mask(bits: Tensor, sent: int, length: int) -> Tensor:
    chosen = torch.empty(len(bits), sent, dtype=position_dtype(length), device="cpu")
    loop = functools.partial(masks.unpack_mask, array(bits), array(chosen), *_bits_of_bytes(chosen.dtype))
    in_parallel(loop, len(bits), rows_of_a_thread(length))
    return chosen


@functools.cache
def _bits_of_bytes(dtype: torch.dtype) -> tuple[Any, Any]:
    """Of each byte: which bits it has, the lowest first, and how many."""
    found = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
    table = np.array([[*bits, *[0] * (8 - len(bits))] for bits in found], like(dtype).dtype)
    return table, np.array([len(bits) for bits in found], np.uint64)


# ------------------------------------------------------------------------------------------------ blocks and shards


@implements
def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device="cpu") if out is None else out
    limit, places = wire_limit(residual, wire_dtype), or_empty(mask, position_dtype(length))
    loop = functools.partial(kernels.compact, array(residual), places, array(values), array(scale.reshape(-1)), limit)
    in_parallel(loop, blocks, rows_of_a_thread(sent))
    return values


@implements
def quantize(values: Tensor, bits: int) -> Tensor:
    assert values.dtype == torch.float32
    shards, count = values.shape
    size = (shards, -(-count // GROUP), group_bytes(bits))
    message = torch.empty(size, dtype=torch.uint8, device="cpu")
    rows = message.flatten(0, 1)
    loop = functools.partial(wire.quantize, array(values.view(-1)), array(rows), count, bits)
    in_parallel(loop, len(rows), rows_of_a_thread(GROUP))
    return message


@implements
def quantize_with_error(
    error: Tensor, mask: Tensor | None, theta: Tensor, before: Tensor, scale: Tensor, bits: int
) -> Tensor:
    if mask is None or error.dtype != torch.float32 or scale.numel() != 1 or float(scale) == 0.0:
        return feed_error_back(CPU, error, mask, theta, before, scale, bits)
    message = torch.empty(-(-theta.numel() // GROUP), group_bytes(bits), dtype=torch.uint8, device="cpu")
    matrices = array(error), array(mask), array(theta.view(-1)), array(before.view(-1)), array(message)
    loop = functools.partial(wire.quantize_with_error, *matrices, bits)
    in_parallel(loop, len(message), rows_of_a_thread(GROUP))
    return message


@implements
def dequantize(message: Tensor, bits: int, count: int, out: Tensor | None = None) -> Tensor:
    assert message.shape[1:] == (-(-count // GROUP), group_bytes(bits))
    values = torch.empty(len(message), count, dtype=torch.float32, device="cpu") if out is None else out
    rows = message.flatten(0, 1)
    loop = functools.partial(wire.dequantize, array(rows), array(values.view(-1)), count, bits)
    in_parallel(loop, len(rows), rows_of_a_thread(GROUP))
    return values


@implements
def sweep(work: Sweep) -> None:
    """See :func:`naive.sweep`. Two passes: one over memory, which folds, and one over the masked entries."""
    residual, values, length = work.residual, work.values, work.residual.shape[1]
    if residual.dtype != torch.float32:
        chunked.sweep(work)
        return
    if work.grads is not None:
        second = work.second_moment
        moments = or_empty(None if second is None else second.exp_avg_sq, residual.dtype)
        largest = np.float32(torch.finfo(torch.float32).max)
        for of_grad, table, numbers, count in sweeping.runs(work.region, residual, work.grads, second):
            state, scale = (array(residual), moments), array(work.scale.reshape(-1))
            loop = functools.partial(sweeping.fold, table, numbers, state, scale, largest, like(of_grad))
            in_parallel(loop, count, rows_of_a_thread(length))
    for rows in work.region.rows:
        there, mask, scale = residual[rows], cut(work.mask, rows), cut(work.scale, rows)
        if work.message is None:
            compact(there, mask, values.dtype, scale, values[rows])
        else:
            _take(there, mask, values[rows], scale, work.message[work.shards_of(rows)])


def _take(residual: Tensor, mask: Tensor | None, values: Tensor, scale: Tensor, message: Tensor) -> None:
    """:func:`compact` and :func:`pack` in one loop."""
    (shards, _, width), places = message.shape, or_empty(mask, position_dtype(residual.shape[1]))
    tensors = array(residual), places, array(values), array(message.view(-1, width)), array(scale.reshape(-1))
    rule = wire_limit(residual, values.dtype), values.numel() // max(1, shards), bits_in(width)
    in_parallel(functools.partial(wire.take, *tensors, *rule), message.numel() // width, rows_of_a_thread(GROUP))
