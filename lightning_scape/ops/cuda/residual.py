"""Triton kernel that does all of a rank's work on the rows of a region in one pass over memory."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.core.layout import Span
from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.cuda.launch import pointer, widen
from lightning_scape.ops.cuda.masks import LONGEST_ROW, row_width
from lightning_scape.ops.cuda.wire import pack
from lightning_scape.ops.dispatch import Declined
from lightning_scape.ops.naive import SecondMoment, Sweep, cut

_FEW = 4
"""Up to so many entries a block are taken out of the registers by turns. More are taken out of the cache."""
_TILE = 512
"""Entries of whole rows that a program holds in registers: their residual and their gradient. A program is one warp,
whose threads find an entry without a barrier; longer rows are shared by several warps."""
_CELLS = 64
"""Entries of a mask that a program takes out of the cache at a time."""


# `sent` changes at every step of a warm-up. The kernel must not be compiled again for each value.
@triton.jit(do_not_specialize=["sent"])
def _sweep_kernel(
    residual,
    exp_avg_sq,
    grads,
    numels,
    weights,
    first_rows,
    span_rows,
    program_spans,
    program_starts,
    scale,
    scale_stride,
    mask,
    values,
    sent,
    GRAD: tl.constexpr,
    FOLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SECOND: tl.constexpr,
    LARGEST: tl.constexpr,
    MASKED: tl.constexpr,
    FEW: tl.constexpr,
    CELLS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: up to ROWS rows of one span, which is a piece or rows that no piece fills."""
    span, start = tl.load(program_spans + tl.program_id(0)), tl.load(program_starts + tl.program_id(0))
    first = tl.load(first_rows + span) + start
    rows = tl.minimum(tl.load(span_rows + span) - start, ROWS).to(tl.int32)
    row, position = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = row < rows
    inside = there[:, None] & (position < LENGTH)[None, :]
    offset = row[:, None] * LENGTH + position[None, :]
    target = residual + first * LENGTH + offset
    tile = tl.load(target, mask=inside, other=0)
    factor = tl.load(scale + (first + row) * scale_stride, mask=there, other=0)
    taken = factor != 0

    if FOLD:
        # Entries of the parameter from the first row on. Without a gradient, the address is 0.
        left = tl.minimum(tl.load(numels + span) - start * LENGTH, ROWS * LENGTH).to(tl.int32)
        address = tl.load(grads + span)
        known = tl.where(address != 0, left, 0)
        source = pointer(address, GRAD) + start * LENGTH
        source = tl.multiple_of(source, ALIGNED)
        if known == ROWS * LENGTH:  # a mask of any length would keep the loads from being 16 bytes wide
            raw = tl.load(source + offset, mask=inside, other=0)
        else:
            raw = tl.load(source + offset, mask=inside & (offset < known), other=0)
        value = widen(raw, GRAD)
        if SECOND:
            _accumulate(exp_avg_sq + first * LENGTH + offset, value, factor, weights + 2 * span,
                        inside & (offset < left) & taken[:, None], LARGEST)  # fmt: skip
        tile = tl.where((offset < known) & taken[:, None], tile + value * factor[:, None], tile)

    if not MASKED:
        tl.store(values + first * LENGTH + offset, tl.where(taken[:, None], tile, 0), mask=inside)
        tl.store(target, tl.where(taken[:, None], 0, tile), mask=inside)
    elif FEW:
        tile = _take_by_turns(tile, mask, values, first, row, position, there, taken, sent)
        tl.store(target, tile, mask=inside)
    else:
        tl.store(target, tile, mask=inside)
        tl.debug_barrier()
        _take_from_memory(residual + first * LENGTH, mask + first * sent, values + first * sent,
                          scale + first * scale_stride, scale_stride, rows, sent,
                          LENGTH, CELLS)  # fmt: skip


@triton.jit
def _accumulate(place, value, factor, weights, mine, LARGEST: tl.constexpr):
    """The second moment, of what the sweep has loaded of the gradient. It rounds as the twin does on a GPU."""
    moment = tl.load(place, mask=mine, other=0)
    scaled = value * factor[:, None]
    moment = tl.load(weights) * moment + tl.load(weights + 1) * (scaled * scaled)
    tl.store(place, tl.where(moment > LARGEST, LARGEST, moment), mask=mine)


@triton.jit
def _take_by_turns(tile, mask, values, first, row, position, there, taken, sent):
    """Writes the masked entries of the tile, and returns the tile with what they leave behind."""
    cells = (first + row) * sent
    for turn in range(sent):
        place = tl.load(mask + cells + turn, mask=there, other=0).to(tl.int32)
        here = position[None, :] == place[:, None]
        tl.store(values + cells + turn, tl.where(taken, _only(tile, here), 0), mask=there)
        tile = tl.where(here & taken[:, None], 0, tile)
    return tile


@triton.jit
def _only(tile, here):
    """The one entry of each row that is ``here``, to the last bit: the largest integer, where the others are least."""
    bits = tl.where(here, tile.to(tl.int32, bitcast=True), -0x80000000)
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _take_from_memory(
    residual,
    mask,
    values,
    scale,
    scale_stride,
    rows,
    sent,
    LENGTH: tl.constexpr,
    CELLS: tl.constexpr,
):
    """Takes the masked entries out of rows that this program has just stored: they are in the cache."""
    for begin in range(0, rows * sent, CELLS):
        cell = begin + tl.arange(0, CELLS)
        inside = cell < rows * sent
        row = cell // sent
        taken = tl.load(scale + row * scale_stride, mask=inside, other=0) != 0
        place = residual + row * LENGTH + tl.load(mask + cell, mask=inside, other=0).to(tl.int32)
        tl.store(values + cell, tl.load(place, mask=taken, other=0), mask=inside)
        tl.store(place, 0.0, mask=taken)


def sweep(work: Sweep) -> None:
    """See :func:`naive.sweep`. One launch for each dtype of the gradients, one pass over residual and gradient."""
    residual, values = work.residual, work.values
    given = [grad for grad in work.grads or () if grad is not None]
    if values is None or residual.shape[1] > LONGEST_ROW or any(grad.device != residual.device for grad in given):
        raise Declined
    assert residual.is_contiguous()
    assert values.is_contiguous()
    for spans in _by_dtype(work):
        _launch(work, values, spans)
    if work.message is not None:  # a group has values of more rows than a program
        each = len(residual) // len(work.message)
        for rows in work.region.rows:
            part = work.message[rows.start // each : rows.stop // each]
            pack(residual[rows], cut(work.mask, rows), values[rows], part)


def _grad_of(work: Sweep, span: Span) -> Tensor | None:
    return None if work.grads is None or span.place is None else work.grads[span.place]


def _by_dtype(work: Sweep) -> list[list[Span]]:
    """The rows of each launch. Those without a gradient go with the first."""
    groups: dict[torch.dtype, list[Span]] = {}
    without = []
    for span in work.region.spans:
        grad = _grad_of(work, span)
        if grad is None:
            without.append(span)
        else:
            groups.setdefault(grad.dtype, []).append(span)
    if not groups:
        return [without]
    first, *others = groups.values()
    return [without + first, *others]


def _launch(work: Sweep, values: Tensor, spans: Sequence[Span]) -> None:
    """Launches the kernel on some rows."""
    residual, mask = work.residual, work.mask
    device, sent = residual.device, values.shape[1]
    given: list[Tensor] = []
    starts = []
    for span in spans:
        grad = _grad_of(work, span)
        if grad is None:
            starts.append(0)
        else:
            given.append(grad.contiguous())
            starts.append(given[-1].data_ptr())
    dtype = given[0].dtype if given else torch.float32
    shape = _shape(residual.shape[1])
    whole = shape["ROWS"] * residual.shape[1] * dtype.itemsize
    programs, (blocks, *chunks) = launching.chunks(tuple([span.blocks for span in spans]), shape["ROWS"], device)
    # Gradients of zeros change the second moment, too.
    folds = bool(given) or (work.second_moment is not None and work.grads is not None)
    moments = work.second_moment if folds else None
    launching.launch(
        _sweep_kernel,
        programs,
        residual,
        residual if moments is None else moments.exp_avg_sq,
        launching.table(tuple(starts), torch.int64, device),
        launching.table(tuple([span.numel for span in spans]), torch.int64, device),
        residual if moments is None else launching.table(_shares(moments, spans), torch.float32, device),
        launching.table(tuple([span.row for span in spans]), torch.int64, device),
        blocks,
        *chunks,
        work.scale.to(device),
        work.scale.dim(),
        values if mask is None else mask.contiguous(),
        values,
        sent,
        GRAD=launching.DTYPES[dtype],
        FOLD=folds,
        ALIGNED=math.gcd(16, whole, *starts),
        SECOND=moments is not None,
        LARGEST=torch.finfo(torch.float32).max,
        MASKED=mask is not None,
        FEW=sent <= _FEW,
        CELLS=_CELLS,
        LENGTH=residual.shape[1],
        **shape,
    )


def _shape(length: int) -> dict[str, int]:
    """Rows of a program, entries of a row that it holds, and warps."""
    block = row_width(length)
    return {"ROWS": max(1, _TILE // block), "BLOCK": block, "num_warps": max(1, block // _TILE)}


def _shares(moments: SecondMoment, spans: Sequence[Span]) -> tuple[float, ...]:
    """By span: what its second moment keeps, and what of the square is added."""
    weights = [0.0 if span.place is None else moments.weights[span.place] for span in spans]
    return tuple(share for weight in weights for share in (1 - weight, weight / moments.ranks))
