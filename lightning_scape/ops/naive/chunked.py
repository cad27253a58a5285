"""The operations of :mod:`..naive`, a few rows or entries at a time: no temporary has the size of the parameters.

They serve where no faster implementation does. Results are the same, but for the order of a norm's summation.
``mean``, ``changes`` and ``quantize_with_error`` have temporaries of the size of what is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_scape.core.layout import Piece, Region
from lightning_scape.ops import naive
from lightning_scape.ops.naive import (
    AdamWStep,
    Hyper,
    RowNumbers,
    SecondMoment,
    ShardState,
    TauStep,
    adams_step,
    adamw_step,
    changes,
    gather_blocks,
    mean,
    position_dtype,
    quantize_with_error,
    scatter_blocks,
    sketch,
    to_device,
)
from lightning_scape.ops.naive.wire import GROUP, group_bytes

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


def _chunk(tensor: Tensor) -> int:
    """Entries at a time: few enough for a core's cache; on a device, enough to hide the cost of a call."""
    return 1 << 18 if tensor.device.type == "cpu" else 1 << 24


def _row_slices(matrix: Tensor, rows: slice | None = None) -> Iterator[slice]:
    """Slices that cover the rows of ``matrix [R, columns]``, or some of them."""
    start, stop = (0, matrix.shape[0]) if rows is None else (rows.start, rows.stop)
    step = max(1, _chunk(matrix) // max(1, matrix.shape[1]))
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


# ------------------------------------------------------------------------------------------------ gradients


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """See :func:`naive.squared_norm`."""
    return naive.squared_norm([part for grad in grads for part in grad.reshape(-1).split(_chunk(grad))])


def fold(residuals: Sequence[Tensor], grads: Sequence[Tensor | None], scale: Tensor, clip_value: float | None) -> None:
    """See :func:`naive.fold`."""
    for residual, grad in zip(residuals, grads, strict=True):
        if grad is not None:
            size = _chunk(residual)
            naive.fold(residual.split(size), grad.split(size), scale, clip_value)


def accumulate_exp_avg(
    exp_avg: Tensor, exp_avg_sum: Tensor, grad: Tensor, beta1: float, scale: Tensor, clip_value: float | None
) -> None:
    """See :func:`naive.accumulate_exp_avg`."""
    parts = (tensor.split(_chunk(exp_avg)) for tensor in (exp_avg, exp_avg_sum, grad))
    for first, total, part in zip(*parts, strict=True):
        naive.accumulate_exp_avg(first, total, part, beta1, scale, clip_value)


def accumulate_exp_avg_sq(
    moments: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[float],
    ranks: int,
    scale: Tensor,
    clip_value: float | None,
) -> None:
    """See :func:`naive.accumulate_exp_avg_sq`."""
    scales = [scale] * len(moments) if scale.dim() == 0 else scale.unbind()
    for moment, grad, weight, own in zip(moments, grads, weights, scales, strict=True):
        parts = moment.split(_chunk(moment))
        given = [None] * len(parts) if grad is None else grad.split(_chunk(moment))
        naive.accumulate_exp_avg_sq(parts, given, [weight] * len(parts), ranks, own, clip_value)


# ---------------------------------------------------------------------------------------------------- masks


def select(statistic: Tensor, sent: int) -> Tensor:
    """See :func:`naive.select`."""
    blocks, length = statistic.shape
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=statistic.device)
    for rows in _row_slices(statistic):
        chosen[rows] = naive.select(statistic[rows], sent)
    return chosen


def propose(residual: Tensor, votes: int) -> Tensor:
    """See :func:`naive.propose`."""
    blocks, length = residual.shape
    proposals = torch.empty(blocks, naive.proposal_bytes(votes, length), dtype=torch.uint8, device=residual.device)
    for rows in _row_slices(residual):
        proposals[rows] = naive.propose(residual[rows], votes)
    return proposals


def merge(residual: Tensor, proposals: Tensor, own: int, votes: int, sent: int) -> Tensor:
    """See :func:`naive.merge`."""
    blocks, length = residual.shape
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=residual.device)
    for rows in _row_slices(residual):
        chosen[rows] = naive.merge(residual[rows], proposals[:, rows], own, votes, sent)
    return chosen


# --------------------------------------------------------------------------------------------------- blocks


def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """See :func:`naive.compact`."""
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device=residual.device) if out is None else out
    for rows in _row_slices(values):
        part = None if mask is None else mask[rows]
        naive.compact(residual[rows], part, wire_dtype, scale[rows] if scale.dim() else scale, out=values[rows])
    return values


def quantize(values: Tensor, bits: int) -> Tensor:
    """See :func:`naive.quantize`."""
    shards, count = values.shape
    size = (shards, -(-count // GROUP), group_bytes(bits))
    message = torch.empty(size, dtype=torch.uint8, device=values.device)
    for groups, columns in _group_slices(values):
        message[:, groups] = naive.quantize(values[:, columns], bits)
    return message


def dequantize(message: Tensor, bits: int, count: int) -> Tensor:
    """See :func:`naive.dequantize`."""
    values = torch.empty(len(message), count, dtype=torch.float32, device=message.device)
    for groups, columns in _group_slices(values):
        part = values[:, columns]
        part.copy_(naive.dequantize(message[:, groups], bits, part.shape[1]))
    return values


def _group_slices(values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices that cover the groups of ``values [S, n]``, the same of all shards; and the columns that these are."""
    shards, count = values.shape
    step = max(1, _chunk(values) // (GROUP * max(1, shards)))
    for first in range(0, -(-count // GROUP), step):
        yield slice(first, first + step), slice(first * GROUP, min((first + step) * GROUP, count))


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
    length, starts = residual.shape[1], [piece.row for piece in region.pieces]
    for rows in (part for each in region.rows for part in _row_slices(residual, each)):
        places = range(max(0, bisect_right(starts, rows.start) - 1), bisect_right(starts, rows.stop - 1))
        cut = {place: _cut(region.pieces[place], rows, length) for place in places}
        inside = {place: piece for place, piece in cut.items() if piece is not None}
        given: list[Tensor | None] | None = None
        if grads is not None:
            given = [_part_of(grads[place], region.pieces[place], piece) for place, piece in inside.items()]
        second = second_moment
        if second is not None:
            second = second._replace(weights=[second.weights[place] for place in inside])
        naive.sweep(
            Region((rows,), tuple(inside.values())),
            residual,
            given,
            scale,
            mask,
            values,
            clip_value=clip_value,
            second_moment=second,
            proposals=proposals,
            next_mask=next_mask,
        )


def _cut(piece: Piece, rows: slice, length: int) -> Piece | None:
    """The part of a piece that lies in ``rows``."""
    first, stop = max(piece.row, rows.start), min(piece.row + piece.blocks, rows.stop)
    if first >= stop:
        return None
    before = (first - piece.row) * length
    numel = min((stop - first) * length, piece.numel - before)
    return replace(piece, row=first, blocks=stop - first, start=piece.start + before, numel=numel)


def _part_of(grad: Tensor | None, whole: Piece, part: Piece) -> Tensor | None:
    """The gradient of a part, from that of the whole piece."""
    return None if grad is None else grad[part.start - whole.start :][: part.numel]


# -------------------------------------------------------------------------------------------------- updates


def update_adams(
    shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, floor: float = 1.0
) -> Tensor:
    """See :func:`naive.update_adams`."""
    again = torch.zeros((), dtype=torch.int64, device=mean.device)
    for rows in _row_slices(mean):
        given = _rows_of(shard, mask, mean, numbers, rows)
        again += naive.update_adams(*given, floor)
    return again


def update_adamw(shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, ranks: int) -> Tensor:
    """See :func:`naive.update_adamw`."""
    again = torch.zeros((), dtype=torch.int64, device=mean.device)
    for rows in _row_slices(mean):
        given = _rows_of(shard, mask, mean, numbers, rows)
        again += naive.update_adamw(*given, ranks)
    return again


def _rows_of(
    shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, rows: slice
) -> tuple[ShardState, Tensor | None, Tensor, RowNumbers]:
    """What an update of some rows needs."""
    state = ShardState(*(None if matrix is None else matrix[rows] for matrix in shard))  # type: ignore[arg-type]
    step, scale, hyper, *rest = numbers  # the hyperparameters are by group, or the same for all
    own = RowNumbers(_of_rows(step, rows), _of_rows(scale, rows), hyper, *(_of_rows(value, rows) for value in rest))
    return state, None if mask is None else mask[rows], mean[rows], own


def _of_rows(value: Any, rows: slice) -> Any:
    """Numbers ``[R]`` of some rows; all else is the same for all."""
    return value[rows] if isinstance(value, Tensor) and value.dim() else value


# ----------------------------------------------------------------------------------------------- parameters


def gather_params(
    flats: Sequence[Tensor], pieces: Sequence[Piece], mask: Tensor | None, out: Tensor, block_size: int
) -> None:
    """See :func:`naive.gather_params`."""
    naive.gather_params(flats, list(_small(pieces, out, block_size)), mask, out, block_size)


def renew_masters(
    flats: Sequence[Tensor], pieces: Sequence[Piece], mask: Tensor | None, masters: Tensor, block_size: int
) -> None:
    """See :func:`naive.renew_masters`."""
    naive.renew_masters(flats, list(_small(pieces, masters, block_size)), mask, masters, block_size)


def scatter_params(
    flats: Sequence[Tensor],
    pieces: Sequence[Piece],
    mask: Tensor | None,
    values: Tensor,
    block_size: int,
    add: bool = False,
    scale: Tensor | None = None,
) -> None:
    """See :func:`naive.scatter_params`."""
    naive.scatter_params(flats, list(_small(pieces, values, block_size)), mask, values, block_size, add, scale)


def _small(pieces: Sequence[Piece], values: Tensor, block_size: int) -> Iterator[Piece]:
    """The same pieces, in parts of a few rows."""
    for piece in pieces:
        for rows in _row_slices(values, slice(piece.row, piece.row + piece.blocks)):
            part = _cut(piece, rows, block_size)
            assert part is not None
            yield part


def checksum(flat: Tensor) -> Tensor:
    """See :func:`naive.checksum`."""
    parts = flat.split(_chunk(flat))
    firsts = range(0, len(parts) * _chunk(flat), _chunk(flat))
    sums = [naive.column_and_row_sums(part, first) for part, first in zip(parts, firsts, strict=True)]
    columns, rows = zip(*sums, strict=True)
    return naive.checksum_of_sums(torch.stack(columns).sum(0), torch.stack(rows).sum())
