"""Triton kernels on residual and masks: ranking, reading a mask, and all of a rank's work on a region in one pass."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.cuda.launch import pointer, widen
from lightning_scape.ops.cuda.wire import pack_values
from lightning_scape.ops.dispatch import Declined
from lightning_scape.ops.naive import Sweep, cut, position_dtype
from lightning_scape.ops.naive.masks import MAGNITUDE_BITS

_SELECT_TILE = 1024
"""Entries of whole rows that a warp holds in registers where it makes a mask; several warps share longer rows."""
_LONGEST_ROW = 4096
"""Longer blocks are left to the definition."""
_SELECTED_BY_TURNS = 32
"""Up to so many entries of a block are selected by the kernel, the largest first; more by the definition."""
_FEW = 4
"""Up to so many entries a block are taken out of the registers by turns. More are taken out of the cache."""
_TILE = 512
"""Entries of whole rows that a program holds in registers: their residual and their gradient. A program is one warp,
whose threads find an entry without a barrier; longer rows are shared by several warps."""
_CELLS = 64
"""Entries of a mask that a program takes out of the cache at a time."""


@triton.jit
def _select_kernel(
    statistic,
    chosen,
    rows,
    sent,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    LOW: tl.constexpr,
    KEPT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (position < LENGTH)[None, :]
    bits = tl.load(statistic + row[:, None] * STRIDE + position[None, :], mask=inside, other=0)
    keys = (bits & KEPT_BITS) | (LOW - position)[None, :]
    keys = tl.where((position < LENGTH)[None, :], keys, -1)
    for turn in range(sent):
        top = tl.max(keys, axis=1)
        tl.store(chosen + row * sent + turn, (LOW - (top & LOW)).to(OUT), mask=row < rows)
        keys = tl.where(keys == top[:, None], -1, keys)  # no two keys of a row are equal


def select(statistic: Tensor, sent: int) -> Tensor:
    """See :func:`naive.select`; bitwise. One read of the statistic, one write of the mask."""
    blocks, length = statistic.shape
    if sent > _SELECTED_BY_TURNS or length > _LONGEST_ROW:
        raise Declined
    low = (1 << (length - 1).bit_length()) - 1
    made_of = {"STRIDE": statistic.stride(0), "LOW": low, "KEPT_BITS": MAGNITUDE_BITS & ~low}
    return _choose(_select_kernel, statistic.view(torch.int32), blocks, sent, length, **made_of)


@triton.jit(do_not_specialize=["sent"])
def _unpack_kernel(
    bits,
    chosen,
    rows,
    sent,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (position < LENGTH)[None, :]
    byte = tl.load(bits + row[:, None] * WIDTH + (position // 8)[None, :], mask=inside, other=0).to(tl.int32)
    bit = (byte >> (position % 8)[None, :]) & 1
    place = tl.cumsum(bit, axis=1) - 1
    taken = inside & (bit != 0) & (place < sent)
    value = tl.broadcast_to(position[None, :], [ROWS, BLOCK])
    tl.store(chosen + row[:, None] * sent + place, value.to(OUT), mask=taken)


def unpack_mask(bits: Tensor, sent: int, length: int) -> Tensor:
    """See :func:`naive.unpack_mask`. One launch."""
    if length > _LONGEST_ROW:
        raise Declined
    return _choose(_unpack_kernel, bits, len(bits), sent, length, WIDTH=bits.shape[1])


def _choose(kernel: Any, source: Tensor, blocks: int, sent: int, length: int, **meta: int) -> Tensor:
    """A mask ``[blocks, sent]`` of blocks of ``length`` entries, from a kernel that takes whole rows of its source."""
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=source.device)
    block = _row_width(length)
    rows = max(1, _SELECT_TILE // block)
    launching.launch(
        kernel,
        triton.cdiv(blocks, rows),
        source,
        chosen,
        blocks,
        sent,
        **meta,
        LENGTH=length,
        ROWS=rows,
        BLOCK=block,
        OUT=tl.uint8 if chosen.dtype == torch.uint8 else tl.uint16,
        num_warps=max(1, block // _SELECT_TILE),
    )
    return chosen


def _row_width(length: int) -> int:
    """Entries that a kernel holds of a row."""
    return max(16, int(triton.next_power_of_2(length)))


# `sent` changes at every step of a warm-up. The kernel must not be compiled again for each value.
@triton.jit(do_not_specialize=["sent"])
def _sweep_kernel(
    residual,
    exp_avg_sq,
    grads,
    numels,
    weights,
    first_rows,
    piece_rows,
    program_pieces,
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
    """One program: up to ROWS rows of one piece."""
    piece, start = tl.load(program_pieces + tl.program_id(0)), tl.load(program_starts + tl.program_id(0))
    first = tl.load(first_rows + piece) + start
    rows = tl.minimum(tl.load(piece_rows + piece) - start, ROWS).to(tl.int32)
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
        left = tl.minimum(tl.load(numels + piece) - start * LENGTH, ROWS * LENGTH).to(tl.int32)
        address = tl.load(grads + piece)
        known = tl.where(address != 0, left, 0)
        source = pointer(address, GRAD) + start * LENGTH
        source = tl.multiple_of(source, ALIGNED)
        if known == ROWS * LENGTH:  # a mask of any length would keep the loads from being 16 bytes wide
            raw = tl.load(source + offset, mask=inside, other=0)
        else:
            raw = tl.load(source + offset, mask=inside & (offset < known), other=0)
        value = widen(raw, GRAD)
        if SECOND:
            _accumulate(exp_avg_sq + first * LENGTH + offset, value, factor, weights + 2 * piece,
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
    residual, values, pieces, second = work.residual, work.values, work.region.pieces, work.second_moment
    if values is None or residual.shape[1] > _LONGEST_ROW:
        raise Declined
    grads = [None if work.grads is None else work.grads[piece.index] for piece in pieces]
    weights = [0.0] * len(pieces) if second is None else second.weights
    usual = next((grad.dtype for grad in grads if grad is not None), torch.float32)
    given = zip(pieces, grads, weights, strict=True)
    for group in launching.grouped(given, lambda each: usual if each[1] is None else each[1].dtype):
        _launch(work, values, group)
    filled = pieces[-1].row + pieces[-1].blocks if pieces else 0
    for rows in work.region.rows:  # those behind the last piece hold pads only
        values[max(filled, rows.start) : rows.stop] = 0
    if work.message is not None:  # a group has values of more rows than a program
        each = max(1, len(residual) // len(work.message))  # a rank of a node may hold no rows
        for rows in work.region.rows:
            part = work.message[rows.start // each : rows.stop // each]
            pack_values(residual[rows], cut(work.mask, rows), values[rows], part)


def _launch(work: Sweep, values: Tensor, group: Sequence[tuple[Any, ...]]) -> None:
    """Launches the kernel on some pieces, with the gradient of the parameter, and the weight, of each."""
    residual, mask, second, device = work.residual, work.mask, work.second_moment, values.device
    pieces, grads, weights = zip(*group, strict=True)
    dtype = next((grad.dtype for grad in grads if grad is not None), torch.float32)
    starts = tuple([0 if grad is None else grad.data_ptr() + piece.start * dtype.itemsize for piece, grad, _ in group])
    block = _row_width(residual.shape[1])
    at_once = max(1, _TILE // block)
    programs, (blocks, *chunks) = launching.chunks(tuple([piece.blocks for piece in pieces]), at_once, device)
    # Gradients of zeros change the second moment, too.
    folds = any(starts) or (second is not None and work.grads is not None)
    moment, shares = residual, residual
    if second is not None:
        of_each = tuple(share for weight in weights for share in (1 - weight, weight / second.ranks))
        moment, shares = second.exp_avg_sq, launching.table(of_each, torch.float32, device)
    launching.launch(
        _sweep_kernel,
        programs,
        residual,
        moment,
        launching.table(starts, torch.int64, device),
        launching.table(tuple([piece.numel for piece in pieces]), torch.int64, device),
        shares,
        launching.table(tuple([piece.row for piece in pieces]), torch.int64, device),
        blocks,
        *chunks,
        work.scale,
        work.scale.dim(),
        values if mask is None else mask,
        values,
        values.shape[1],
        GRAD=launching.DTYPES[dtype],
        FOLD=folds,
        ALIGNED=math.gcd(16, at_once * residual.shape[1] * dtype.itemsize, *starts),
        SECOND=second is not None,
        LARGEST=torch.finfo(torch.float32).max,
        MASKED=mask is not None,
        FEW=values.shape[1] <= _FEW,
        CELLS=_CELLS,
        LENGTH=residual.shape[1],
        ROWS=at_once,
        BLOCK=block,
        num_warps=max(1, block // _TILE),
    )
