"""The operations of :mod:`..naive`, a few rows or entries at a time: no temporary has the size of the parameters.

They serve where no faster implementation does. Results are the same, but for the order of a norm's summation.
``mean``, ``changes`` and ``quantize_with_error`` have temporaries of the size of what is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_scape.core.layout import Piece, Region
from lightning_scape.ops import naive
from lightning_scape.ops.naive.blocks import Sweep
from lightning_scape.ops.naive.params import ParamEntries
from lightning_scape.ops.naive.rules import RowNumbers, ShardState, cut
from lightning_scape.ops.naive.wire import GROUP, group_bytes
from lightning_scape.ops.registry import CHUNKED


def _chunk(tensor: Tensor) -> int:
    """Entries at a time: few enough for a core's cache; on a device, enough to hide the cost of a call."""
    return 1 << 18 if tensor.device.type == "cpu" else 1 << 24


def _row_slices(matrix: Tensor, rows: slice | None = None) -> Iterator[slice]:
    """Slices, one at least, that cover the rows of ``matrix [R, columns]``, or some of them."""
    start, stop = (0, matrix.shape[0]) if rows is None else (rows.start, rows.stop)
    step = max(1, _chunk(matrix) // max(1, matrix.shape[1]))
    for first in range(start, stop, step) or [start]:
        yield slice(first, min(first + step, stop))


# ------------------------------------------------------------------------------------------------ gradients


@CHUNKED.implements
def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    return naive.squared_norm([part for grad in grads for part in grad.reshape(-1).split(_chunk(grad))])


@CHUNKED.implements
def fold(residuals: Sequence[Tensor], grads: Sequence[Tensor | None], scale: Tensor) -> None:
    for residual, grad in zip(residuals, grads, strict=True):
        if grad is not None:
            size = _chunk(residual)
            naive.fold(residual.split(size), grad.split(size), scale)


@CHUNKED.implements
def accumulate_exp_avg_sq(
    moments: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[float],
    ranks: int,
    scale: Tensor,
) -> None:
    scales = [scale] * len(moments) if scale.dim() == 0 else scale.unbind()
    for moment, grad, weight, factor in zip(moments, grads, weights, scales, strict=True):
        parts = moment.split(_chunk(moment))
        given = [None] * len(parts) if grad is None else grad.split(_chunk(moment))
        naive.accumulate_exp_avg_sq(parts, given, [weight] * len(parts), ranks, factor)


# ---------------------------------------------------------------------------------------------------- masks


@CHUNKED.implements
def select(statistic: Tensor, sent: int) -> Tensor:
    return torch.cat([naive.select(statistic[rows], sent) for rows in _row_slices(statistic)])


@CHUNKED.implements
def pack_mask(mask: Tensor, length: int) -> Tensor:
    return torch.cat([naive.pack_mask(mask[rows], length) for rows in _row_slices(mask)])


@CHUNKED.implements
def unpack_mask(bits: Tensor, sent: int, length: int) -> Tensor:
    return torch.cat([naive.unpack_mask(bits[rows], sent, length) for rows in _row_slices(bits)])


# --------------------------------------------------------------------------------------------------- blocks


@CHUNKED.implements
def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device=residual.device) if out is None else out
    for rows in _row_slices(values):
        naive.compact(residual[rows], cut(mask, rows), wire_dtype, cut(scale, rows), out=values[rows])
    return values


@CHUNKED.implements
def quantize(values: Tensor, bits: int) -> Tensor:
    shards, count = values.shape
    size = (shards, -(-count // GROUP), group_bytes(bits))
    message = torch.empty(size, dtype=torch.uint8, device=values.device)
    for groups, columns in _group_slices(values):
        message[:, groups] = naive.quantize(values[:, columns], bits)
    return message


@CHUNKED.implements
def pack(residual: Tensor, mask: Tensor | None, values: Tensor, message: Tensor) -> None:
    naive.pack_by(CHUNKED, residual, mask, values, message)


@CHUNKED.implements
def dequantize(message: Tensor, bits: int, count: int, out: Tensor | None = None) -> Tensor:
    values = out
    if values is None:
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


@CHUNKED.implements
def sweep(work: Sweep) -> None:
    pieces, grads, second = work.region.pieces, work.grads, work.second_moment
    length, starts = work.residual.shape[1], [piece.row for piece in pieces]
    for rows in (part for each in work.region.rows for part in _row_slices(work.residual, each)):
        places = range(max(0, bisect_right(starts, rows.start) - 1), bisect_right(starts, rows.stop - 1))
        parts = {place: _cut(pieces[place], rows, length) for place in places}
        inside = {place: piece for place, piece in parts.items() if piece is not None}
        given = (
            None if grads is None else [_part_of(grads[place], pieces[place], part) for place, part in inside.items()]
        )
        within = None if second is None else second._replace(weights=[second.weights[place] for place in inside])
        region = Region((rows,), tuple(inside.values()))
        naive.sweep(work._replace(region=region, grads=given, second_moment=within, message=None))
    if work.message is not None:
        for rows in work.region.rows:
            pack(work.residual[rows], cut(work.mask, rows), work.values[rows], work.message[work.shards_of(rows)])


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


@CHUNKED.implements
def update_adams(shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers) -> Tensor:
    parts = [
        naive.update_adams(shard.of(rows), cut(mask, rows), mean[rows], numbers.of(rows)) for rows in _row_slices(mean)
    ]
    return torch.stack(parts).sum()


@CHUNKED.implements
def update_adamw(
    shard: ShardState, mask: Tensor | None, mean: Tensor, mine: Tensor | None, numbers: RowNumbers, ranks: int
) -> Tensor:
    return torch.stack(
        [
            naive.update_adamw(shard.of(rows), cut(mask, rows), mean[rows], cut(mine, rows), numbers.of(rows), ranks)
            for rows in _row_slices(mean)
        ]
    ).sum()


# ----------------------------------------------------------------------------------------------- parameters


@CHUNKED.implements
def gather_params(entries: ParamEntries, out: Tensor, renew: bool = False) -> None:
    naive.gather_params(_in_small_pieces(entries, out), out, renew)


@CHUNKED.implements
def scatter_params(
    entries: ParamEntries,
    values: Tensor,
    add: bool = False,
    scale: Tensor | None = None,
    error: Tensor | None = None,
) -> None:
    naive.scatter_params(_in_small_pieces(entries, values), values, add, scale, error)


def _in_small_pieces(entries: ParamEntries, values: Tensor) -> ParamEntries:
    """The same entries, in pieces of a few rows."""
    rows = ((piece, slice(piece.row, piece.row + piece.blocks)) for piece in entries.pieces)
    parts = (_cut(piece, some, entries.block_size) for piece, all_ in rows for some in _row_slices(values, all_))
    return entries._replace(pieces=[part for part in parts if part is not None])


@CHUNKED.implements
def checksum(flat: Tensor) -> Tensor:
    parts = flat.split(_chunk(flat))
    firsts = range(0, len(parts) * _chunk(flat), _chunk(flat))
    sums = [naive.column_and_row_sums(part, first) for part, first in zip(parts, firsts, strict=True)]
    columns, rows = zip(*sums, strict=True)
    return naive.checksum_of_sums(torch.stack(columns).sum(0), torch.stack(rows).sum())
