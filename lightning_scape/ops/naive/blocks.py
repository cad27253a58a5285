"""What a rank does with its residual, in plain PyTorch: the whole sweep, and how entries leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_scape.core.layout import Region
from lightning_scape.core.tensors import piece_views
from lightning_scape.ops.naive.gradients import accumulate_exp_avg_sq, fold, within
from lightning_scape.ops.naive.rules import SecondMoment, column, cut
from lightning_scape.ops.naive.wire import bits_in, gather_blocks, scatter_blocks
from lightning_scape.ops.registry import NAIVE, Backend, operation


@operation
def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """Takes the masked entries out of the residual, rounded for the wire; the rounding error stays behind.

    Example: ``[[1.00390625, 5]]`` with mask ``[[0]]`` sends ``[[1]]`` as bf16 and keeps ``[[0.00390625, 5]]``.

    Sent plus what is left equals what was there, exactly: the difference of a number and its rounding is itself a
    number of the wider format. Magnitudes beyond the wire dtype's largest are sent as that, the rest stays.

    Args:
        residual: ``[R, B]``, changed in place.
        mask: ``[R, q]`` or None.
        wire_dtype: dtype of the values sent.
        scale: 0-dim, or one for each row ``[R]``. 0 sends zeros and leaves the residual as it is.
        out: where to put the result, contiguous; None is new memory.

    Returns:
        ``[R, q]`` of ``wire_dtype``.
    """
    applied = column(scale.to(residual.device)) != 0
    limit = within(torch.finfo(wire_dtype).max, residual.dtype)
    there = gather_blocks(residual, mask)
    rounded = torch.where(applied, there.clamp(-limit, limit).to(wire_dtype), 0.0)
    scatter_blocks(residual, mask, there - rounded)
    return rounded if out is None else out.copy_(rounded)


@operation
def pack(residual: Tensor, mask: Tensor | None, values: Tensor, message: Tensor) -> None:
    """Packs values that have left the residual (:func:`quantize`); what their rounding leaves goes back into it.

    Args:
        residual: ``[S * R, B]``, of S shards; changed in place.
        mask: ``[S * R, q]``, where the values were; or None.
        values: fp32 ``[S * R, q]``, contiguous; they become what is sent (:func:`dequantize`).
        message: uint8 ``[S, G, W]``, written: a group is of one shard's values.
    """
    pack_by(NAIVE, residual, mask, values, message)


def pack_by(backend: Backend, residual: Tensor, mask: Tensor | None, values: Tensor, message: Tensor) -> None:
    """:func:`pack`, by a back end's own :func:`quantize` and :func:`dequantize`."""
    flat, bits = values.view(len(message), values.numel() // len(message)), bits_in(message.shape[2])
    message.copy_(backend.quantize(flat, bits))  # what rounding leaves stays in the values
    scatter_blocks(residual, mask, values, add=True)
    backend.dequantize(message, bits, flat.shape[1], flat)


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
    values: Tensor
    """``[rows, q]`` of the wire's dtype, written."""
    second_moment: SecondMoment | None = None
    """The owner's, or None."""
    message: Tensor | None = None
    """uint8 ``[S, G, W]``, written: what :func:`pack` makes of the fp32 ``values``, which become what it sends. The
    rows are those of S shards, of which the region has some as a whole; the message of the others stays as it is."""

    def shards_of(self, rows: slice) -> slice:
        """The shards of the message that have these rows."""
        assert self.message is not None
        each = len(self.residual) // len(self.message)
        return slice(rows.start // each, rows.stop // each)


@operation
def sweep(work: Sweep) -> None:
    """What a rank does with its gradient in the rows of a region, in one pass over memory (docs/design.md, 3.4).

    In this order, and equal to these operations one after the other:

    1. **fold**      ``residual += scale * grad`` (:func:`fold`), and the owner's second moment
       (:func:`accumulate_exp_avg_sq`);
    2. **compact**   the masked entries leave the residual (:func:`compact`), into ``values``;
    3. **pack**      where a message in 8 or 4 bits is asked for, the values are packed, and their rounding errors go
       back into the residual (:func:`pack`).

    Rows outside the region are left alone.
    """
    residual, scale, values = work.residual, work.scale, work.values
    if work.grads is not None:
        for place, (piece, grad) in enumerate(zip(work.region.pieces, work.grads, strict=True)):
            factor = cut(scale, piece.row)
            fold(piece_views(residual, [piece]), [grad], factor)
            if work.second_moment is not None:
                moments, weights, ranks = work.second_moment
                one = piece_views(moments, [piece]), [grad], [weights[place]]
                accumulate_exp_avg_sq(*one, ranks, factor)
    for rows in work.region.rows:
        compact(residual[rows], cut(work.mask, rows), values.dtype, cut(scale, rows), out=values[rows])
        if work.message is not None:
            pack(residual[rows], cut(work.mask, rows), values[rows], work.message[work.shards_of(rows)])
