"""The operations on a CPU, compiled by numba: each the twin of the function of that name in :mod:`..naive`.

Each reads and writes its tensors once, in one loop per core, and makes no temporary of their size
(``quantize_with_error`` does where all is sent, or rows differ in their scale). What is bitwise equal to the twin and
what only rounds:

========================================== ============================================================================
select, propose, merge, compact            bitwise
quantize, dequantize, quantize_with_error  bitwise
gather_params, scatter_params, fold        bitwise
accumulate_exp_avg, accumulate_exp_avg_sq  bitwise
sweep, mean, changes                       bitwise
gather_blocks, scatter_blocks              bitwise
renew_masters                              bitwise
update_adams, update_adamw                 moments and last steps bitwise for entries visited in the step before, else
                                           within rounding: ``exp``, and torch's ``sqrt``, which is not correctly
                                           rounded
squared_norm, sketch                       another order of summation, the same at every run and number of threads
checksum                                   the twin: not part of every step
========================================== ============================================================================

The loops are compiled when they are first called for a dtype, and kept on disk (``__pycache__`` of this package, or the
user's cache folder). They release Python's lock, and share their range among ``torch.get_num_threads()`` threads. A
tensor that is not on the CPU, or not contiguous, goes to the twin, a few rows at a time (:mod:`.chunked`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.core.layout import Region
from lightning_scape.ops import naive
from lightning_scape.ops.cpu import kernels as cpu_kernels
from lightning_scape.ops.cpu import masks as cpu_masks
from lightning_scape.ops.cpu import numbers as cpu_numbers
from lightning_scape.ops.cpu import ranking as cpu_ranking
from lightning_scape.ops.cpu import sweep as cpu_sweep
from lightning_scape.ops.cpu import wire as cpu_wire
from lightning_scape.ops.cpu.arrays import (
    GRAIN,
    array,
    bound_of,
    by_dtypes,
    in_parallel,
    like,
    or_empty,
    pairs_table,
    rows_of_a_thread,
    running_sums,
    scalar,
    sketch_plan,
    where_it_fits,
    wire_limit,
)
from lightning_scape.ops.cpu.shard import (
    changes,
    gather_blocks,
    gather_params,
    mean,
    renew_masters,
    scatter_blocks,
    scatter_params,
    update_adams,
    update_adamw,
)
from lightning_scape.ops.naive import (
    AdamWStep,
    Hyper,
    RowNumbers,
    SecondMoment,
    ShardState,
    TauStep,
    adams_step,
    adamw_step,
    chunked,
    position_dtype,
    to_device,
)
from lightning_scape.ops.naive.chunked import checksum
from lightning_scape.ops.naive.wire import GROUP, feed_error_back, group_bytes

__all__ = [
    "AdamWStep",
    "Hyper",
    "RowNumbers",
    "SecondMoment",
    "ShardState",
    "TauStep",
    "accumulate_exp_avg",
    "accumulate_exp_avg_sq",
    "adams_step",
    "adamw_step",
    "changes",
    "checksum",
    "compact",
    "dequantize",
    "fold",
    "gather_blocks",
    "gather_params",
    "mean",
    "merge",
    "position_dtype",
    "propose",
    "quantize",
    "quantize_with_error",
    "renew_masters",
    "scatter_blocks",
    "scatter_params",
    "select",
    "sketch",
    "squared_norm",
    "sweep",
    "to_device",
    "update_adams",
    "update_adamw",
]


def are_compiled() -> bool:
    """Whether the loops were compiled before, and lie on disk."""
    return cpu_numbers.is_compiled(cpu_sweep.sweep)


_NORM_CHUNK = 1 << 15
"""Entries of :func:`squared_norm` that are summed in the gradient's precision."""
_LONGEST_SORTED = 4096
"""Longer blocks are sorted by the twin, where many of their entries are sent."""
_SKETCH_PART = 16
"""Chunks of :func:`sketch` that are summed into one partial sketch, by one thread."""


# ------------------------------------------------------------------------------------------------------ gradients


@where_it_fits
def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """See :func:`naive.squared_norm`. Chunks are summed in fp32 (fp64), their sums in fp64."""
    total = 0.0
    for (dtype,), group in by_dtypes([(grad,) for grad in grads if grad.numel()]):
        sizes = [grad.numel() for (grad,) in group]
        starts, chunks = running_sums([-(-size // _NORM_CHUNK) for size in sizes])
        table = np.array([(g.data_ptr(), s, n) for (g,), s, n in zip(group, starts, sizes, strict=True)], np.int64)
        partials = np.empty(chunks, np.float64)
        loop = functools.partial(cpu_kernels.squares, table, partials, _NORM_CHUNK, like(dtype))
        in_parallel(loop, chunks, GRAIN // _NORM_CHUNK)
        total += float(partials.sum())
    return torch.tensor(total, dtype=torch.float32, device="cpu")


@where_it_fits
def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    """See :func:`naive.sketch`."""
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
        loop = functools.partial(cpu_kernels.sketch, table, array(signs), sums, _SKETCH_PART, like(dtype))
        in_parallel(loop, parts, 1)
        total += sums.sum(0)
    return torch.from_numpy(total)


@where_it_fits
def fold(residuals: Sequence[Tensor], grads: Sequence[Tensor | None], scale: Tensor, clip_value: float | None) -> None:
    """See :func:`naive.fold`."""
    factor = float(scale)
    if factor == 0.0:
        return
    pairs = [(r, g) for r, g in zip(residuals, grads, strict=True) if g is not None and g.numel()]
    for (dtype, of_grad), group in by_dtypes(pairs):
        table, count = pairs_table(group)
        bound, clip = bound_of(clip_value, of_grad)
        loop = functools.partial(
            cpu_kernels.fold, table, scalar(dtype, factor), bound, clip, like(dtype), like(of_grad)
        )
        in_parallel(loop, count, GRAIN)


@where_it_fits
def accumulate_exp_avg(
    exp_avg: Tensor, exp_avg_sum: Tensor, grad: Tensor, beta1: float, scale: Tensor, clip_value: float | None
) -> None:
    """See :func:`naive.accumulate_exp_avg`."""
    factor = float(scale)
    if factor == 0.0:
        return
    bound, clip = bound_of(clip_value, grad.dtype)
    numbers = (scalar(exp_avg.dtype, beta1), scalar(exp_avg.dtype, 1 - beta1) * scalar(exp_avg.dtype, factor))
    arrays = (array(tensor) for tensor in (exp_avg, exp_avg_sum, grad))
    loop = functools.partial(cpu_kernels.accumulate_exp_avg, *arrays, *numbers, bound, clip)
    in_parallel(loop, exp_avg.numel(), GRAIN)


@where_it_fits
def accumulate_exp_avg_sq(
    moments: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[float],
    ranks: int,
    scale: Tensor,
    clip_value: float | None,
) -> None:
    """See :func:`naive.accumulate_exp_avg_sq`."""
    scales = scale.tolist() if scale.dim() else [float(scale)] * len(moments)
    given = zip(moments, grads, weights, scales, strict=True)
    rows = [(moment, grad, weight, own) for moment, grad, weight, own in given if own != 0.0]
    pairs = [(moment, moment if grad is None else grad) for moment, grad, *_ in rows]
    for (dtype, of_grad), group in by_dtypes(pairs):
        here = [
            row for row, pair in zip(rows, pairs, strict=True) if (pair[0].dtype, pair[1].dtype) == (dtype, of_grad)
        ]
        table, count = pairs_table(group)
        table[[grad is None for _, grad, *_ in here], 1] = 0
        by_piece = [(own, 1 - weight, weight / ranks) for *_, weight, own in here]
        numbers = np.array(by_piece, like(dtype).dtype).T.copy()
        rule = (*bound_of(clip_value, of_grad), scalar(dtype, torch.finfo(dtype).max))
        loop = functools.partial(cpu_kernels.accumulate_squares, table, *numbers, *rule, like(dtype), like(of_grad))
        in_parallel(loop, count, GRAIN)


# ---------------------------------------------------------------------------------------------------------- masks


@where_it_fits
def select(statistic: Tensor, sent: int) -> Tensor:
    """See :func:`naive.select`."""
    blocks, length = statistic.shape
    assert 1 <= sent <= length
    if length > _LONGEST_SORTED and sent > cpu_ranking.MAX_PASSES:
        return chunked.select(statistic, sent)
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device="cpu")
    loop = functools.partial(cpu_masks.select, array(statistic), cpu_ranking.networks(length, sent), array(chosen))
    in_parallel(loop, blocks, rows_of_a_thread(length))
    return chosen


@where_it_fits
def propose(residual: Tensor, votes: int) -> Tensor:
    """See :func:`naive.propose`."""
    blocks, length = residual.shape
    if length > _LONGEST_SORTED and votes > cpu_ranking.MAX_PASSES:
        return chunked.propose(residual, votes)
    width = votes * position_dtype(length).itemsize + votes + 1
    proposals = torch.empty(blocks, width, dtype=torch.uint8, device="cpu")
    loop = functools.partial(
        cpu_masks.propose, array(residual), cpu_ranking.networks(length, votes), votes, array(proposals)
    )
    in_parallel(loop, blocks, rows_of_a_thread(length))
    return proposals


@where_it_fits
def merge(residual: Tensor, proposals: Tensor, own: int, votes: int, sent: int) -> Tensor:
    """See :func:`naive.merge`."""
    blocks, length = residual.shape
    if length > _LONGEST_SORTED and sent > cpu_ranking.MAX_PASSES:
        return chunked.merge(residual, proposals, own, votes, sent)
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device="cpu")
    networks = cpu_ranking.networks(length, sent)
    loop = functools.partial(cpu_masks.merge, array(residual), array(proposals), own, networks, votes, array(chosen))
    in_parallel(loop, blocks, rows_of_a_thread(length))
    return chosen


# ------------------------------------------------------------------------------------------------ blocks and shards


@where_it_fits
def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """See :func:`naive.compact`."""
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device="cpu") if out is None else out
    limit, places = wire_limit(residual, wire_dtype), or_empty(mask, position_dtype(length))
    loop = functools.partial(
        cpu_kernels.compact, array(residual), places, array(values), array(scale.reshape(-1)), limit
    )
    in_parallel(loop, blocks, rows_of_a_thread(sent))
    return values


@where_it_fits
def quantize(values: Tensor, bits: int) -> Tensor:
    """See :func:`naive.quantize`."""
    assert values.dtype == torch.float32
    shards, count = values.shape
    size = (shards, -(-count // GROUP), group_bytes(bits))
    message = torch.empty(size, dtype=torch.uint8, device="cpu")
    rows = message.flatten(0, 1)
    loop = functools.partial(cpu_wire.quantize, array(values.view(-1)), array(rows), count, bits)
    in_parallel(loop, len(rows), rows_of_a_thread(GROUP))
    return message


@where_it_fits
def quantize_with_error(error: Tensor, mask: Tensor | None, values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """See :func:`naive.quantize_with_error`."""
    if mask is None or error.dtype != torch.float32 or scale.numel() != 1 or float(scale) == 0.0:
        return feed_error_back(quantize, error, mask, values, scale, bits)
    message = torch.empty(-(-values.numel() // GROUP), group_bytes(bits), dtype=torch.uint8, device="cpu")
    matrices = array(error), array(mask), array(values.view(-1)), array(message)
    loop = functools.partial(cpu_wire.quantize_with_error, *matrices, bits)
    in_parallel(loop, len(message), rows_of_a_thread(GROUP))
    return message


@where_it_fits
def dequantize(message: Tensor, bits: int, count: int) -> Tensor:
    """See :func:`naive.dequantize`."""
    assert message.shape[1:] == (-(-count // GROUP), group_bytes(bits))
    values, rows = torch.empty(len(message), count, dtype=torch.float32, device="cpu"), message.flatten(0, 1)
    loop = functools.partial(cpu_wire.dequantize, array(rows), array(values.view(-1)), count, bits)
    in_parallel(loop, len(rows), rows_of_a_thread(GROUP))
    return values


@where_it_fits
def sweep(
    region: Region,
    residual: Tensor,
    grads: Sequence[Tensor | None] | None,
    scale: Tensor,
    mask: Tensor | None,
    values: Tensor,
    *,
    clip_value: float | None = None,
    second_moment: SecondMoment | None = None,
    proposals: Tensor | None = None,
    next_mask: Tensor | None = None,
) -> None:
    """See :func:`naive.sweep`."""
    length = residual.shape[1]
    votes = 0 if proposals is None else naive.votes_in(proposals.shape[1], length)
    ranked = max(votes, 0 if next_mask is None else next_mask.shape[1])
    second = None if grads is None or second_moment is None else second_moment
    moments = None if second is None else second.exp_avg_sq
    if length > _LONGEST_SORTED and ranked > cpu_ranking.MAX_PASSES:
        options: dict[str, Any] = {"clip_value": clip_value, "second_moment": second_moment}
        chunked.sweep(region, residual, grads, scale, mask, values, **options, proposals=proposals, next_mask=next_mask)
        return
    positions, networks = position_dtype(length), cpu_ranking.networks(length, ranked)
    of_moment = residual.dtype if moments is None else moments.dtype
    limit, largest = wire_limit(residual, values.dtype), scalar(of_moment, torch.finfo(of_moment).max)
    for of_grad, table, numbers, count in cpu_sweep.runs(region, residual, grads, second):
        loop = functools.partial(
            cpu_sweep.sweep,
            table,
            numbers,
            (array(residual), or_empty(moments, of_moment)),
            array(scale.reshape(-1)),
            (*bound_of(clip_value, of_grad), limit, largest),
            or_empty(mask, positions),
            array(values),
            (networks, votes, ranked),
            or_empty(proposals, torch.uint8),
            or_empty(next_mask, positions),
            like(of_grad),
        )
        in_parallel(loop, count, rows_of_a_thread(length))
