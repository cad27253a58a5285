"""Rows and entries, some at a time: no temporary has the size of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_TOGETHER = 64
"""Rows that are never parted, so that values in groups of as many are not."""


def chunk(tensor: Tensor) -> int:
    """Entries at a time: few enough for a core's cache; on a device, enough to hide the cost of a call."""
    return 1 << 18 if tensor.device.type == "cpu" else 1 << 24


def row_slices(matrix: Tensor, rows: slice | None = None) -> Iterator[slice]:
    """Slices, one at least, that cover the rows of ``matrix [R, columns]``, or some of them."""
    start, stop = (0, matrix.shape[0]) if rows is None else (rows.start, rows.stop)
    step = max(1, chunk(matrix) // (_TOGETHER * max(1, matrix.shape[1]))) * _TOGETHER
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
