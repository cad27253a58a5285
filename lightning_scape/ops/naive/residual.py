"""What a rank does with its residual, in plain PyTorch: the whole sweep, and how entries leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_scape.core.layout import Region
from lightning_scape.core.tensors import piece_views
from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.gradients import accumulate_exp_avg_sq, fold
from lightning_scape.ops.naive.masks import gather_blocks, scatter_blocks
from lightning_scape.ops.naive.parts import column, cut, row_slices
from lightning_scape.ops.naive.wire import quantize_with_error


def compact(residual: Tensor, mask: Tensor | None, scale: Tensor) -> Tensor:
    """Takes the masked entries out of the residual ``[R, B]``, and returns them: fp32 ``[R, q]``.

    Example: ``[[1, 5]]`` with mask ``[[0]]`` sends ``[[1]]`` and keeps ``[[0, 5]]``.

    What fp32 rounds of fp64 stays behind. ``scale`` is 0-dim, or one for each row ``[R]``; 0 sends zeros and leaves the
    residual as it is.
    """
    there = gather_blocks(residual, mask)
    sent = torch.where(column(scale.to(residual.device)) != 0, there.float(), 0.0)
    scatter_blocks(residual, mask, there - sent)
    return sent


class SecondMoment(NamedTuple):
    """What a sweep adds the owner's own gradient to."""

    exp_avg_sq: Tensor
    """``[rows, B]``, changed in place."""
    weights: Sequence[float]
    """Of this gradient, for each piece: ``1 - beta2`` for AdamW."""
    ranks: int
    """N."""


class Sweep(NamedTuple):
    """What :func:`sweep` works on. Every tensor ``[rows, ...]`` counts the same rows."""

    region: Region
    """Which rows, and which parameters fill them."""
    residual: Tensor
    """``[rows, B]``, contiguous, changed in place."""
    grads: Sequence[Tensor | None] | None
    """Flat gradient of each piece, any float dtype; None is a gradient of zeros. None for all: they have been folded
    before."""
    scale: Tensor
    """0-dim, or one for each row, the same for all rows of a piece. 0 folds and sends nothing: values are 0, the rest
    stays as it is."""
    mask: Tensor | None
    """``[rows, q]`` positions, or None: everything is sent."""
    values: Tensor | None
    """fp32 ``[rows, q]``, written. None: gradients are folded, and nothing is sent."""
    second_moment: SecondMoment | None = None
    """The owner's, or None."""
    message: Tensor | None = None
    """uint8 ``[S, G, W]``, written: the values travel in 4 bits. The rows are those of S shards, of which the
    region has some as a whole; the message of the others stays as it is."""

    def shards_of(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """The shards of the message that have these rows: number, and rows."""
        assert self.message is not None
        each = len(self.residual) // len(self.message)
        for start in range(rows.start, rows.stop, max(1, each)):
            yield start // each, slice(start, start + each)


@operation
def sweep(work: Sweep) -> None:
    """What a rank does with its gradient in the rows of a region, in one pass over memory (docs/design.md, 3.4).

    In this order, and equal to these operations one after the other:

    1. **fold**      ``residual += scale * grad`` (:func:`fold`), and the owner's second moment
       (:func:`accumulate_exp_avg_sq`);
    2. **compact**   the masked entries leave the residual (:func:`compact`), into ``values``. Where a message in 4
       bits is asked for, that is :func:`quantize_with_error` of each shard, for entries that have not changed: the
       residual is what was not sent yet, and what rounding leaves goes back into it.

    Rows outside the region are left alone.
    """
    residual, scale, values = work.residual, work.scale, work.values
    for place, (piece, grad) in enumerate(zip(work.region.pieces, work.grads or (), strict=work.grads is not None)):
        (here,), factor = piece_views(residual, [piece]), cut(scale, piece.row)
        if grad is not None:
            fold(here, grad, factor)
        if work.second_moment is not None:
            moments, weights, ranks = work.second_moment
            (moment,) = piece_views(moments, [piece])
            accumulate_exp_avg_sq(moment, grad, weights[place], ranks, factor)
    if values is None:
        return
    for rows in work.region.rows:
        if work.message is None:
            for few in row_slices(residual, rows):
                values[few] = compact(residual[few], cut(work.mask, few), cut(scale, few))
            continue
        for shard, few in work.shards_of(rows):
            here = values[few].zero_()
            work.message[shard] = quantize_with_error(residual[few], cut(work.mask, few), here, here, cut(scale, few))


def mean(contributions: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The mean over ranks, summed in ``dtype`` (fp32 or fp64) in the order of the list: a new tensor of their shape."""
    total = contributions[0].to(dtype, copy=True)
    for contribution in contributions[1:]:
        total.add_(contribution)
    return total.div_(len(contributions))
