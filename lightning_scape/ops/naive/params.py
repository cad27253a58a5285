"""What lies between parameters, each a flat tensor of its own, and rows of blocks: a part of :mod:`..naive`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape.core.layout import Piece
from lightning_scape.ops.registry import operation


@operation
def gather_params(
    flats: Sequence[Tensor],
    pieces: Sequence[Piece],
    mask: Tensor | None,
    out: Tensor,
    block_size: int,
    renew: bool = False,
) -> None:
    """Copies the masked entries of the parameters into ``out [R, q]``; positions that are pads are left alone.

    Example: ``B = 2``, parameters ``[5, 6, 7]`` and ``[8]``, mask ``[[1], [0], [0]]``: ``out = [[6], [7], [8]]``.

    With ``renew``, ``out`` holds masters of the entries, and only those that do not round to their parameter give way
    to it: somebody else has written the parameter. Example: parameter ``[1, 3]`` in bf16 and masters ``[[1.001, 2]]``
    give ``[[1.001, 3]]``.

    Args:
        flats: every parameter, flat, by index.
        pieces: which parameters fill which rows of ``mask`` and ``out``.
        mask: ``[R, q]`` or None.
        out: ``[R, q]``, contiguous; masters are fp32 or fp64.
        block_size: B.
        renew: see above.
    """
    for piece in pieces:
        there, parameter = _kept(out, piece, block_size), _masked(flats, piece, mask, block_size)
        if renew:
            parameter = torch.where(there.to(parameter.dtype) == parameter, there, parameter.to(there.dtype))
        there.copy_(parameter)


@operation
def scatter_params(
    flats: Sequence[Tensor],
    pieces: Sequence[Piece],
    mask: Tensor | None,
    values: Tensor,
    block_size: int,
    add: bool = False,
    scale: Tensor | None = None,
) -> None:
    """The reverse of :func:`gather_params`: writes ``values [R, q]`` to the parameters' masked entries, or adds them.

    Values are rounded to the parameter's dtype first. ``scale`` is 0-dim, or one for each row ``[R]``, the same for all
    rows of a piece; where it is 0, nothing is written. None writes all.
    """
    for piece in pieces:
        flat = flats[piece.segment.index][piece.of_parameter]
        new = _kept(values, piece, block_size).to(flat.dtype)
        places = slice(None) if mask is None else _places(mask, piece, block_size)
        new = flat[places] + new if add else new
        if scale is not None:
            new = torch.where((scale[piece.row] if scale.dim() else scale) != 0, new, flat[places])
        flat[places] = new


def _masked(flats: Sequence[Tensor], piece: Piece, mask: Tensor | None, block_size: int) -> Tensor:
    """The piece's masked entries in its parameter."""
    flat = flats[piece.segment.index][piece.of_parameter]
    return flat if mask is None else flat[_places(mask, piece, block_size)]


def _kept(matrix: Tensor, piece: Piece, block_size: int) -> Tensor:
    """What ``matrix [R, q]`` holds of the piece, flat, without pads."""
    rows = matrix[piece.row : piece.row + piece.blocks]
    return rows.view(-1)[: piece.kept(rows.shape[1], block_size)]


def _places(mask: Tensor, piece: Piece, block_size: int) -> Tensor:
    """Where the piece's masked entries lie in the piece: int64, without pads."""
    end = piece.blocks * block_size
    starts = torch.arange(0, end, block_size, dtype=torch.int64, device=mask.device).unsqueeze(1)
    places = mask[piece.row : piece.row + piece.blocks].long() + starts
    return places.view(-1)[: piece.kept(mask.shape[1], block_size)]
