"""Rows of blocks in plain PyTorch; masks; and what lies between rows and parameters, each a flat tensor of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.core.layout import Piece
from lightning_scape.ops.dispatch import operation

MAGNITUDE_BITS = 0x7FFFFFFF
"""All bits of an fp32 but its sign; as an integer, these order finite magnitudes (and rank inf, NaN above them)."""


def chunk(tensor: Tensor) -> int:
    """Entries at a time: few enough for a core's cache; on a device, enough to hide the cost of a call."""
    return 1 << 18 if tensor.device.type == "cpu" else 1 << 24


def row_slices(matrix: Tensor, columns: int, rows: slice | None = None) -> Iterator[slice]:
    """Slices, one at least, that cover the rows of ``matrix``, or some of them; each row takes so many entries."""
    start, stop = (0, len(matrix)) if rows is None else (rows.start, rows.stop)
    step = max(1, chunk(matrix) // max(1, columns))
    for first in range(start, stop, step) or [start]:
        yield slice(first, min(first + step, stop))


def cut(values: Any, rows: slice | int) -> Any:
    """Some rows of a tensor, or one; what is 0-dim, or no tensor, is the same for all."""
    return values[rows] if isinstance(values, Tensor) and values.dim() else values


def column(values: Tensor, index: Tensor | slice = slice(None)) -> Tensor:
    """Numbers of rows, ``[R]``, as a column ``[R, 1]``; a 0-dim tensor, the same for all rows, stays as it is."""
    return values[index].unsqueeze(1) if values.dim() else values


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """A table that was made on the CPU, for which the CPU does not wait: the copy is out of pinned memory on CUDA."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


# --------------------------------------------------------------------------------------------------------- masks


def position_dtype(block_size: int) -> torch.dtype:
    """``torch.uint8`` for positions in blocks of up to 256 entries, ``torch.uint16`` above (to 65,536)."""
    return torch.uint8 if block_size <= 256 else torch.uint16


@operation
def select(statistic: Tensor, sent: int) -> Tensor:
    """Positions of the ``sent`` largest magnitudes of each block, largest first (docs/design.md, 3.1).

    Magnitude and position make one integer key: the bits of ``|x|``, whose lowest bits (as many as a position needs)
    give way to the position. So magnitudes that agree in all but those bits count as equal (for B = 200: to one part
    in 2**15), equal ones go to the lowest position first, and every implementation chooses the same entries. Pads hold
    0 and stand last in their block, hence are chosen only when no entry is left, and after all entries.

    Example: ``[[3, -5, 0, 0], [0, 0, 0, 0]]`` with ``sent=2`` gives ``[[1, 0], [0, 1]]``.

    Args:
        statistic: fp32 ``[R, B]``; its sign does not count.
        sent: q, 1 .. B.

    Returns:
        ``[R, q]``, dtype :func:`position_dtype`.
    """
    length = statistic.shape[1]
    assert 1 <= sent <= length
    low = (1 << (length - 1).bit_length()) - 1
    places = low - torch.arange(length, dtype=torch.int32, device=statistic.device)
    chosen = []
    for rows in row_slices(statistic, length):
        keys = statistic[rows].view(torch.int32) & (MAGNITUDE_BITS & ~low) | places
        chosen.append((low - (keys.topk(sent, dim=1).values & low)).to(position_dtype(length)))
    return torch.cat(chosen)


def gather_blocks(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``[R, q]``: the masked entries of ``matrix [R, B]`` (all of it, not copied, for ``mask=None``)."""
    return matrix if mask is None else matrix.gather(1, mask.long())


def scatter_blocks(matrix: Tensor, mask: Tensor | None, values: Tensor) -> None:
    """Overwrites masked entries of ``matrix [R, B]`` with ``values [R, q]``."""
    if mask is None:
        matrix.copy_(values)
    else:
        matrix.scatter_(1, mask.long(), values.to(matrix.dtype))


# ---------------------------------------------------------------------------------------------------- parameters


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
    for _, flat, places, there in _by_piece(entries, out):
        parameter = flat[places]
        if renew:
            parameter = torch.where(there.to(parameter.dtype) == parameter, there, parameter.to(there.dtype))
        there.copy_(parameter)


@operation
def scatter_params(
    entries: ParamEntries, values: Tensor, add: bool, scale: Tensor, error: Tensor | None = None
) -> None:
    """The reverse of :func:`gather_params`: writes ``values [R, q]`` to the parameters' masked entries, or adds them.

    Sums are rounded once, to the parameter's dtype. ``scale`` is 0-dim, or one for each row ``[R]``, the same for all
    rows of a piece; where it is 0, nothing is written. ``error [R, B]``, fp32 or fp64, is for what is
    added: it takes up what a parameter that is narrower loses to this rounding.

    Example: adding 0.003 to a parameter ``[1]`` in bf16, whose next number is 1.0078125, adds 0.003 to the error.
    """
    for piece, flat, places, new in _by_piece(entries, values):
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


def _by_piece(entries: ParamEntries, matrix: Tensor) -> Iterator[tuple[Piece, Tensor, Any, Tensor]]:
    """The pieces, each with its part of the parameter, where its masked entries are there, and what the matrix has.

    Places are int64, or all; they, and the values in ``matrix [R, q]``, leave pads out.
    """
    mask, length = entries.mask, entries.block_size
    for piece in entries.pieces:
        rows, kept = slice(piece.row, piece.row + piece.blocks), slice(piece.kept(matrix.shape[1], length))
        places: Any = slice(None)
        if mask is not None:
            starts = torch.arange(0, piece.blocks * length, length, dtype=torch.int64, device=mask.device)
            places = (mask[rows].long() + starts.unsqueeze(1)).view(-1)[kept]
        flat = entries.flats[piece.index][piece.of_parameter]
        yield piece, flat, places, matrix[rows].view(-1)[kept]
