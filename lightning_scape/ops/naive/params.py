"""What lies between parameters, each a flat tensor of its own, and rows of blocks: a part of :mod:`..naive`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.core.layout import Piece
from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.masks import cut, row_slices


class ParamEntries(NamedTuple):
    """The masked entries of parameters, which are the rows of a matrix ``[R, q]``."""

    flats: Sequence[Tensor]
    """Every parameter, flat, by index."""
    pieces: Sequence[Piece]
    """Which parameters fill which rows."""
    mask: Tensor | None
    """``[R, q]``, or None: all of them."""
    block_size: int
    """B."""


@operation
def gather_params(entries: ParamEntries, out: Tensor, renew: bool = False) -> None:
    """Copies the masked entries of the parameters into ``out [R, q]``; positions that are pads are left alone.

    Example: ``B = 2``, parameters ``[5, 6, 7]`` and ``[8]``, mask ``[[1], [0], [0]]``: ``out = [[6], [7], [8]]``.

    With ``renew``, ``out`` holds masters of the entries, and only those that do not round to their parameter give way
    to it: somebody else has written the parameter. Example: parameter ``[1, 3]`` in bf16 and masters ``[[1.001, 2]]``
    give ``[[1.001, 3]]``.

    Args:
        entries: which.
        out: ``[R, q]``, contiguous; masters are fp32 or fp64.
        renew: see above.
    """
    for _, flat, places, there in _parts(entries, out):
        parameter = flat[places]
        if renew:
            parameter = torch.where(there.to(parameter.dtype) == parameter, there, parameter.to(there.dtype))
        there.copy_(parameter)


@operation
def scatter_params(
    entries: ParamEntries,
    values: Tensor,
    add: bool,
    scale: Tensor,
    error: Tensor | None = None,
) -> None:
    """The reverse of :func:`gather_params`: writes ``values [R, q]`` to the parameters' masked entries, or adds them.

    Sums are rounded once, to the parameter's dtype. ``scale`` is 0-dim, or one for each row ``[R]``, the same for all
    rows of a piece; where it is 0, nothing is written. ``error [R, B]``, fp32 or fp64, is for what is
    added: it takes up what a parameter that is narrower loses to this rounding.

    Example: adding 0.003 to a parameter ``[1]`` in bf16, whose next number is 1.0078125, adds 0.003 to the error.
    """
    for piece, flat, places, new in _parts(entries, values):
        old, taken = flat[places], cut(scale, piece.row) != 0
        if add:
            wide, given = old.to(torch.promote_types(old.dtype, torch.float32)), new
            new = wide + given
            if error is not None and flat.itemsize < error.itemsize:
                moved = new.to(flat.dtype).to(wide.dtype)
                lost = torch.where(moved == wide, given, given - (moved - wide))
                left = error.view(-1)[piece.of_blocks(entries.block_size)]
                left[places] = torch.where(taken, left[places] + lost, left[places])
        flat[places] = torch.where(taken, new.to(flat.dtype), old)


def _parts(entries: ParamEntries, matrix: Tensor) -> Iterator[tuple[Piece, Tensor, Any, Tensor]]:
    """The pieces, a few rows of ``matrix [R, q]`` at a time.

    Each with its part of the parameter, the places of its masked entries there (int64; or all), and what the matrix
    holds of these. Both leave pads out.
    """
    mask, length = entries.mask, entries.block_size
    for whole in entries.pieces:
        for rows in row_slices(matrix, slice(whole.row, whole.row + whole.blocks)):
            before, blocks = (rows.start - whole.row) * length, rows.stop - rows.start
            numel = min(blocks * length, whole.numel - before)
            piece = Piece(whole.segment, rows.start, blocks, whole.start + before, numel)
            kept = slice(piece.kept(matrix.shape[1], length))
            places: Any = slice(None)
            if mask is not None:
                starts = torch.arange(0, blocks * length, length, dtype=torch.int64, device=mask.device)
                places = (mask[rows].long() + starts.unsqueeze(1)).view(-1)[kept]
            flat = entries.flats[piece.segment.index][piece.of_parameter]
            yield piece, flat, places, matrix[rows].view(-1)[kept]
