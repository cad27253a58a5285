"""The loop of :func:`naive.sweep`, compiled by numba: see :mod:`.cpu_kernels`.

A few rows at a time come into a core's cache. There they are folded, compacted and ranked, before the next come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.layout import Region
from lightning_scape.ops.cpu_arrays import like, running_sums
from lightning_scape.ops.cpu_kernels import compact, fade_part, fold_part, square_part
from lightning_scape.ops.cpu_masks import write_positions, write_proposals
from lightning_scape.ops.cpu_numbers import array_at, jit, overlap
from lightning_scape.ops.cpu_ranking import LANES, TILE, make_room, rank_rows, take_rows
from lightning_scape.ops.rules import SecondMoment


@jit
def sweep(table, numbers, state, scale, rule, mask, values, ranking, proposals, chosen, like_grad, first, last):
    """See :func:`naive.sweep`; ``first .. last`` counts the rows of the table.

    Args:
        table: as :func:`runs` gives it.
        numbers: likewise.
        state: the residual, and the second moment or ``[0, 0]``.
        scale: ``[rows]`` or ``[1]``.
        rule: the gradient's bound and whether there is one, the largest number of the wire and of the second moment.
        mask: ``[rows, q]``, or ``[0, 0]`` where everything is sent.
        values: ``[rows, q]``.
        ranking: :func:`cpu_ranking.networks`, the entries in a proposal, the entries to rank.
        proposals: ``[rows, W]``, or ``[0, 0]`` for none.
        chosen: ``[rows, q']``, or ``[0, 0]`` for none.
        like_grad: an empty array.
        first: first row.
        last: one past the last row.
    """
    (residual, moments), (bound, clip, limit, largest), (networks, votes, ranked) = state, rule, ranking
    room = make_room(residual.shape[1], ranked)
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 1], table[i, 2])
        while start < stop:
            rows, row = min(LANES, stop - start), table[i, 0] + start
            for above in range(0, rows, TILE):
                below = min(above + TILE, rows)
                factor = residual.dtype.type(scale[row + above if len(scale) > 1 else 0])
                if factor != 0:
                    part = start + above, start + below
                    _accumulate(table[i], numbers[i], part, residual, moments, factor, bound, clip, largest, like_grad)
                compact(residual, mask, values, scale, limit, row + above, row + below)
                if ranked > 0:
                    take_rows(residual, row, (above, below), networks, room)
            if ranked > 0:
                rank_rows(residual, row, rows, networks, room)
            if votes > 0:
                write_proposals(residual, room[2], votes, proposals, row, rows)
            if len(chosen) > 0:
                write_positions(room[2], chosen, row, rows)
            start += rows


@jit
def _accumulate(run, numbers, part, residual, moments, factor, bound, clip, largest, like_grad):
    """Folds the gradient of a part of a run's rows, and adds it to the second moment."""
    length, row, (above, below) = residual.shape[1], run[0], part
    start, stop = above * length, min(below * length, run[4])
    if start >= stop:
        return
    here = residual[row + above : row + below].reshape(-1)[: stop - start]
    if run[3] != 0:
        grad = array_at(run[3], start, stop - start, like_grad)
        fold_part(here, grad, factor, bound, clip)
    if len(moments) > 0:
        second = moments[row + above : row + below].reshape(-1)[: stop - start]
        if run[3] == 0:
            fade_part(second, numbers[0], largest)
        else:
            grad = array_at(run[3], start, stop - start, like_grad)
            square_part(second, grad, second.dtype.type(factor), numbers[0], numbers[1], bound, clip, largest)


def runs(
    region: Region, residual: Tensor, grads: Sequence[Tensor | None] | None, second: SecondMoment | None
) -> Iterator[tuple[torch.dtype, Any, Any, int]]:
    """A region's rows in runs, each of one piece or of none, by dtype of the gradients.

    Yields the dtype; int64 ``[n, 5]``: first row, rows of all before, rows, address of the first entry's gradient
    (0 is none), entries; ``[n, 2]``: the share of the second moment that is kept, and the gradient's weight; and the
    number of rows in all.
    """
    given = list(grads or [None] * len(region.pieces))
    weights = [0.0] * len(given) if second is None else second.weights
    ranks = 1 if second is None else second.ranks
    usual = next((grad.dtype for grad in given if grad is not None), residual.dtype)
    groups: dict[torch.dtype, list[tuple[Any, ...]]] = {}
    for span in region.spans():
        grad, weight = (None, 0.0) if span.place is None else (given[span.place], weights[span.place])
        assert grad is None or grad.numel() == span.numel
        address = 0 if grad is None else grad.data_ptr()
        run = (span.row, span.blocks, address, span.numel, 1 - weight, weight / ranks)
        groups.setdefault(usual if grad is None else grad.dtype, []).append(run)
    of_moment = like((residual if second is None else second.exp_avg_sq).dtype).dtype
    for dtype, rows in groups.items():
        firsts, counts, addresses, entries_of, *numbers = zip(*rows, strict=True)
        before, total = running_sums(counts)
        table = np.array([firsts, before, counts, addresses, entries_of], np.int64).T.copy()
        yield dtype, table, np.array(numbers, of_moment).T.copy(), total
