"""What a rank does with its residual, in plain PyTorch: the whole sweep, and how entries leave."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape.core.layout import Piece, Region
from lightning_scape.ops.naive.gradients import accumulate_exp_avg_sq, fold, within
from lightning_scape.ops.naive.masks import propose, select, votes_in
from lightning_scape.ops.naive.rules import SecondMoment, column
from lightning_scape.ops.naive.wire import gather_blocks, scatter_blocks
from lightning_scape.ops.registry import operation


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
    """All of a rank's work on the rows of a region, in one pass over memory (docs/design.md, 3).

    In this order, and equal to these operations one after the other:

    1. **fold**      ``residual += scale * grad`` (:func:`fold`), and the owner's second moment
       (:func:`accumulate_exp_avg_sq`);
    2. **compact**   the masked entries leave the residual (:func:`compact`), into ``values``;
    3. **propose**   what is left is ranked, for the other ranks (:func:`propose`, into ``proposals``) or for the next
       mask (:func:`select`, into ``next_mask``).

    Every tensor ``[rows, ...]`` counts the same rows; those outside the region are left alone.

    Args:
        region: which rows, and which parameters fill them.
        residual: ``[rows, B]``, contiguous, changed in place.
        grads: flat gradient of each piece, any float dtype; None is a gradient of zeros. None for all: they have been
            folded before.
        scale: 0-dim, or one for each row, the same for all rows of a piece. 0 folds and sends nothing: values are 0,
            the rest stays as it is. What is left is ranked all the same.
        mask: ``[rows, q]`` positions, or None: everything is sent.
        values: ``[rows, q]`` of the wire's dtype, written.
        clip_value: first clamps the gradient to ``[-v, v]``.
        second_moment: the owner's, or None.
        proposals: uint8 ``[rows, W]``, written: what :func:`propose` returns, as many entries as fit its width.
        next_mask: ``[rows, q']``, written: what :func:`select` returns.
    """
    length, pieces = residual.shape[1], region.pieces
    if grads is not None:
        scales = [scale if scale.dim() == 0 else scale[piece.row] for piece in pieces]
        for piece, grad, own in zip(pieces, grads, scales, strict=True):
            fold([_entries(residual, piece)], [grad], own, clip_value)
        if second_moment is not None:
            moments, weights, ranks = second_moment
            for piece, grad, weight, own in zip(pieces, grads, weights, scales, strict=True):
                accumulate_exp_avg_sq([_entries(moments, piece)], [grad], [weight], ranks, own, clip_value)
    for rows in region.rows:
        part = None if mask is None else mask[rows]
        compact(residual[rows], part, values.dtype, scale[rows] if scale.dim() else scale, out=values[rows])
        if proposals is not None:
            proposals[rows] = propose(residual[rows], votes_in(proposals.shape[1], length))
        if next_mask is not None:
            next_mask[rows] = select(residual[rows], next_mask.shape[1])


def _entries(blocks: Tensor, piece: Piece) -> Tensor:
    """The piece's entries in ``blocks [rows, B]``, flat, without pads."""
    return blocks.view(-1)[piece.of_blocks(blocks.shape[1])]
