"""The loop that folds for :func:`naive.sweep`, compiled by numba: see :mod:`.kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.core.layout import Region
from lightning_scape.ops.cpu.arrays import like
from lightning_scape.ops.cpu.kernels import fade_part, fold_and_square_part, fold_part
from lightning_scape.ops.cpu.numbers import array_at, jit, overlap
from lightning_scape.ops.naive.rules import SecondMoment


@jit
def fold(table, numbers, state, scale, largest, like_grad, first, last):
    """The first of :func:`naive.sweep`'s operations; ``first .. last`` counts the rows of the table.

    Args:
        table: as :func:`runs` gives it.
        numbers: likewise.
        state: the residual, and the second moment or ``[0, 0]``.
        scale: ``[rows]`` or ``[1]``.
        largest: number of the second moment.
        like_grad: an empty array.
        first: first row.
        last: one past the last row.
    """
    residual, moments = state
    for i in range(len(table)):
        part = overlap(first, last, table[i, 1], table[i, 2])
        factor = residual.dtype.type(scale[table[i, 0] if len(scale) > 1 else 0])
        if part[0] < part[1] and factor != 0:
            _accumulate(table[i], numbers[i], part, residual, moments, factor, largest, like_grad)


@jit
def _accumulate(run, numbers, part, residual, moments, factor, largest, like_grad):
    """Folds the gradient of a part of a run's rows, and adds it to the second moment."""
    length, row, (above, below) = residual.shape[1], run[0], part
    start, stop = above * length, min(below * length, run[4])
    if start >= stop:
        return
    here = residual[row + above : row + below].reshape(-1)[: stop - start]
    if len(moments) == 0:
        if run[3] != 0:
            fold_part(here, array_at(run[3], start, stop - start, like_grad), factor)
        return
    second = moments[row + above : row + below].reshape(-1)[: stop - start]
    if run[3] == 0:
        fade_part(second, numbers[0], largest)
    else:
        grad, scales = array_at(run[3], start, stop - start, like_grad), (factor, second.dtype.type(factor))
        fold_and_square_part(here, second, grad, scales, numbers[0], numbers[1], largest)


def runs(
    region: Region, residual: Tensor, grads: Sequence[Tensor | None] | None, second: SecondMoment | None
) -> Iterator[tuple[torch.dtype, Any, Any, int]]:
    """A region's rows in runs, each of one piece or of none, by dtype of the gradients.

    Yields the dtype; int64 ``[n, 5]``: first row, rows of all before, rows, address of the first entry's gradient
    (0 is none), entries; ``[n, 2]``: the share of the second moment that is kept, and the gradient's weight; and the
    number of rows in all.
    """
    spans, pieces = region.spans, len(region.pieces)
    given = [*(grads or [None] * pieces), None]  # the last: of no piece
    weights = np.array([*([0.0] * pieces if second is None else second.weights), 0.0])
    places = [pieces if span.place is None else span.place for span in spans]
    found = [given[place] for place in places]
    assert all(grad is None or grad.numel() == span.numel for grad, span in zip(found, spans, strict=True))
    ranks = 1 if second is None else second.ranks
    of_moment = like((residual if second is None else second.exp_avg_sq).dtype).dtype
    addresses = [0 if grad is None else grad.data_ptr() for grad in found]
    columns = [[getattr(span, name) for span in spans] for name in ("row", "blocks", "numel")]
    rows = np.array([*columns, addresses], np.int64)
    numbers = np.array([1 - weights, weights / ranks], of_moment).T[np.array(places, np.int64)]
    dtypes = [None if grad is None else grad.dtype for grad in found]
    kinds = [dtype for dtype in dict.fromkeys(dtypes) if dtype is not None] or [residual.dtype]
    for dtype in kinds:
        # Rows without a gradient go with the first.
        here = np.array([each == dtype or (each is None and dtype == kinds[0]) for each in dtypes], bool)
        firsts, counts, numels, starts = rows[:, here]
        table = np.column_stack([firsts, np.cumsum(counts) - counts, counts, starts, numels])
        yield dtype, table, np.ascontiguousarray(numbers[here]), int(counts.sum())
