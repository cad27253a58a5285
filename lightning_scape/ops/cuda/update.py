"""Triton kernels that update a shard and write its values back to the parameters."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops import naive
from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.cuda.launch import narrow, pointer, widen
from lightning_scape.ops.dispatch import Declined
from lightning_scape.ops.naive import ParamEntries, RowNumbers, ShardState

_UPDATE_CHUNK = 512
"""Entries a program updates. Of more, not all of what an update computes with would fit into registers."""


@triton.jit
def _cells(mask, first, inside, sent, MASKED: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column, int64, of the CHUNK chosen entries from ``first`` on: one division in 64 bits for all of them."""
    within = (first % sent).to(tl.int32) + tl.arange(0, CHUNK)
    row, column = first // sent + within // sent, (within % sent).to(tl.int64)
    if MASKED:
        column = tl.load(mask + first + tl.arange(0, CHUNK), mask=inside, other=0).to(tl.int64)
    return row, column


@triton.jit
def _decay(whole, log_keep, tau, steps):
    """``(1 - lr*wd)**tau``."""
    shrunk = tl.exp(steps * log_keep)  # |whole|**tau
    shrunk = tl.where((whole < 0) & (tau % 2 == 1), -shrunk, shrunk)
    return tl.where(tau == 1, whole, shrunk)


@triton.jit
def _update_kernel(
    theta,
    exp_avg,
    last_step,
    mask,
    total,
    own,
    numbers,
    by_row,
    second,
    limit,
    count,
    length,
    row_stride,
    sent,
    ranks,
    MASKED: tl.constexpr,
    LONGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``numbers`` and ``by_row`` have the columns of :meth:`RowNumbers.matrices`."""
    first = tl.program_id(0).to(tl.int64) * CHUNK
    entry = first + tl.arange(0, CHUNK)
    row, column = _cells(mask, first, entry < count, sent, MASKED, CHUNK)
    here = by_row + row * row_stride
    inside = (entry < count) & (tl.load(here + 2, mask=entry < count, other=0) != 0)
    if tl.sum(inside.to(tl.int32), axis=0) > 0:
        hyper = numbers + tl.load(here, mask=inside, other=0).to(tl.int32) * 7
        place = row * length + column
        of_momentum, of_last_step, of_second = exp_avg + place, last_step + place, second + place

        now = tl.load(here + 1, mask=inside, other=1).to(tl.int32)
        tau = now - tl.load(of_last_step, mask=inside, other=0)
        tau = tl.maximum(tau, 1)  # after a load, a pad's last step may be later than this one
        m = tl.load(of_momentum, mask=inside, other=0)
        a = tl.load(total + entry, mask=inside, other=0)
        old = tl.load(theta + entry, mask=inside, other=0)
        b2 = tl.load(hyper + 2, mask=inside, other=0)
        one_minus_b2 = tl.load(hyper + 3, mask=inside, other=0)
        whole = tl.load(hyper + 5, mask=inside, other=1)
        steps = tau.to(m.dtype)

        one_minus_b1 = tl.load(hyper + 1, mask=inside, other=1)
        one_minus_bt = tl.div_rn(steps * one_minus_b1, (steps - 1) * one_minus_b1 + 1)
        new = (1 - one_minus_bt) * m + one_minus_bt * tl.div_rn(a, steps)
        divisor = tl.load(here + 3, mask=inside, other=1).to(m.dtype)
        moved, common = tl.div_rn(steps * new, divisor), tl.div_rn(new, divisor)
        bounded = moved * (1 / LONGEST)
        common = tl.where(tau == 1, 0, tl.maximum(common * common, bounded * bounded))
        divisor2 = tl.load(here + 4, mask=inside, other=1).to(m.dtype)
        v2 = tl.load(of_second, mask=inside, other=0)
        largest = tl.load(limit)
        squared = tl.minimum(a * a, largest)
        if MASKED:
            mine = tl.load(own + entry, mask=inside, other=0)
            shared = tl.where(tau == 1, squared, tl.maximum(tl.minimum(mine * a, largest), -largest))
            shared -= tl.div_rn(tl.minimum(mine * mine, largest), steps * 0 + ranks)
            v2 += tl.div_rn(one_minus_b2, tl.maximum(steps, one_minus_b2 * steps * steps)) * shared
            v2 = tl.maximum(v2, tl.where(tau == 1, one_minus_b2 * squared, 0))
            seen = tl.minimum(tl.div_rn(v2, divisor2) * ranks * steps * steps, largest)
            v2 += one_minus_b2 * tl.where(tau == 1, 0, tl.maximum(squared - seen, 0))
        else:
            v2 = b2 * v2 + one_minus_b2 * tl.div_rn(squared, steps)
        v2 = tl.minimum(v2, largest)
        tl.store(of_second, v2, mask=inside)
        v = tl.maximum(tl.div_rn(v2, divisor2), common)
        shrunk = _decay(whole, tl.load(hyper + 6, mask=inside, other=0), tau, steps)
        denominator = tl.sqrt_rn(v) + tl.load(hyper + 4, mask=inside, other=1)
        change = tl.div_rn(tl.load(hyper, mask=inside, other=0) * moved, denominator)
        tl.store(theta + entry, old * shrunk - change, mask=inside)
        tl.store(of_momentum, new, mask=inside)
        tl.store(of_last_step, now, mask=inside)


def update_shard(
    shard: ShardState, mask: Tensor | None, mean: Tensor, mine: Tensor | None, numbers: RowNumbers, ranks: int
) -> None:
    """See :func:`naive.update_shard`. One launch; what it reads of the moments and the last steps it writes back."""
    theta, exp_avg, second, last_step = shard
    if second is None:  # AdamS
        raise Declined
    hyper, by_row = numbers.matrices()
    launching.launch(
        _update_kernel,
        triton.cdiv(theta.numel(), _UPDATE_CHUNK),
        theta,
        exp_avg,
        last_step,
        theta if mask is None else mask,
        mean,
        mean if mine is None else mine,
        hyper,
        by_row,
        second,
        theta.new_full((), torch.finfo(theta.dtype).max),
        theta.numel(),
        exp_avg.stride(0),
        5 if len(by_row) > 1 else 0,
        theta.shape[1],
        ranks,
        MASKED=mask is not None,
        LONGEST=naive.LONGEST_MOVE,
        CHUNK=_UPDATE_CHUNK,
        num_warps=4,
    )


@triton.jit
def _exchange_kernel(
    addresses,
    first_rows,
    kept,
    chunk_pieces,
    chunk_starts,
    mask,
    values,
    scale,
    scale_stride,
    error,
    sent,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    PARAMETER: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    piece = tl.load(chunk_pieces + program)
    first = tl.load(chunk_starts + program)
    entry = first + tl.arange(0, CHUNK)
    first_row, count = tl.load(first_rows + piece), tl.load(kept + piece)
    if ADD:
        count = tl.where(tl.load(scale + first_row * scale_stride) != 0, count, 0)
    inside = entry < count
    before = first_row * sent
    place = before + entry
    row, column = _cells(mask + before, first, inside, sent, MASKED, CHUNK)
    parameter = pointer(tl.load(addresses + piece), PARAMETER) + row * BLOCK_SIZE + column
    old = widen(tl.load(parameter, mask=inside, other=0), PARAMETER)
    if ADD:
        given = tl.load(values + place, mask=inside, other=0)
        tl.store(parameter, narrow(old + given, PARAMETER), mask=inside)
        if KEEP:
            new = widen(narrow(old + given, PARAMETER), PARAMETER)
            lost = tl.where(new == old, given, given - (new - old))
            left = error + (first_row + row) * BLOCK_SIZE + column
            tl.store(left, tl.load(left, mask=inside, other=0) + lost, mask=inside)
    else:
        tl.store(values + place, old, mask=inside)


def gather_params(entries: ParamEntries, out: Tensor, renew: bool = False) -> None:
    """See :func:`naive.gather_params`, which renews masters. One launch per dtype of the parameters."""
    if renew:
        raise Declined
    _exchange(entries, out)


def scatter_params(
    entries: ParamEntries, values: Tensor, add: bool, scale: Tensor, error: Tensor | None = None
) -> None:
    """See :func:`naive.scatter_params`, which writes what is not added. One launch per dtype of the parameters."""
    if not add:
        raise Declined
    _exchange(entries, values, scale, error)


def _exchange(entries: ParamEntries, values: Tensor, scale: Tensor | None = None, error: Tensor | None = None) -> None:
    """Gathers without a scale, else adds."""
    flats, pieces, mask, block_size = entries
    sent = values.shape[1]
    for group in launching.grouped(pieces, lambda piece: flats[piece.index].dtype):
        dtype = flats[group[0].index].dtype
        programs, chunks = launching.chunks(
            tuple([piece.kept(sent, block_size) for piece in group]), launching.PICK_CHUNK, values.device
        )
        # Where each piece begins: a view of it would take ten times as long.
        starts = tuple([flats[each.index].data_ptr() + each.start * dtype.itemsize for each in group])
        launching.launch(
            _exchange_kernel,
            programs,
            launching.table(starts, torch.int64, values.device),
            launching.table(tuple([piece.row for piece in group]), torch.int64, values.device),
            *chunks,
            values if mask is None else mask,
            values,
            values if scale is None else scale,
            0 if scale is None else scale.dim(),
            values if error is None else error,
            sent,
            BLOCK_SIZE=block_size,
            MASKED=mask is not None,
            PARAMETER=launching.DTYPES[dtype],
            ADD=scale is not None,
            KEEP=error is not None and dtype.itemsize < error.itemsize,
            CHUNK=launching.PICK_CHUNK,
            num_warps=4,
        )
