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
    for piece in _in_small_pieces(entries, out):
        there, flat = _kept(out, piece, entries.block_size), _flat(entries, piece)
        parameter = flat[_places(entries, piece)]
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
    for piece in _in_small_pieces(entries, values):
        flat, places = _flat(entries, piece), _places(entries, piece)
        old, new = flat[places], _kept(values, piece, entries.block_size)
        taken = cut(scale, piece.row) != 0
        if add:
            wide, given = old.to(torch.promote_types(old.dtype, torch.float32)), new
            new = wide + given
            if error is not None and flat.itemsize < error.itemsize:
                moved = new.to(flat.dtype).to(wide.dtype)
                lost = torch.where(moved == wide, given, given - (moved - wide))
                left = error.view(-1)[piece.of_blocks(entries.block_size)]
                left[places] = torch.where(taken, left[places] + lost, left[places])
        flat[places] = torch.where(taken, new.to(flat.dtype), old)


def _in_small_pieces(entries: ParamEntries, matrix: Tensor) -> Iterator[Piece]:
    """The pieces, a few rows of ``matrix [R, q]`` at a time."""
    for piece in entries.pieces:
        for rows in row_slices(matrix, slice(piece.row, piece.row + piece.blocks)):
            before = (rows.start - piece.row) * entries.block_size
            blocks = rows.stop - rows.start
            numel = min(blocks * entries.block_size, piece.numel - before)
            yield Piece(piece.segment, rows.start, blocks, piece.start + before, numel)


def _flat(entries: ParamEntries, piece: Piece) -> Tensor:
    """The piece's part of its parameter."""
    return entries.flats[piece.segment.index][piece.of_parameter]


def _kept(matrix: Tensor, piece: Piece, block_size: int) -> Tensor:
    """What ``matrix [R, q]`` holds of the piece, flat, without pads."""
    rows = matrix[piece.row : piece.row + piece.blocks]
    return rows.view(-1)[: piece.kept(rows.shape[1], block_size)]


def _places(entries: ParamEntries, piece: Piece) -> Any:
    """Where the piece's masked entries lie in the piece: int64, without pads; or all of them."""
    mask, block_size = entries.mask, entries.block_size
    if mask is None:
        return slice(None)
    end = piece.blocks * block_size
    starts = torch.arange(0, end, block_size, dtype=torch.int64, device=mask.device).unsqueeze(1)
    places = mask[piece.row : piece.row + piece.blocks].long() + starts
    return places.view(-1)[: piece.kept(mask.shape[1], block_size)]
