"""Triton kernels on rows of blocks: which entries are the largest, and how they leave the residual."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.cuda.numbers import clamp, divide, narrow, widen
from lightning_scape.ops.naive import chunked, position_dtype
from lightning_scape.ops.naive import masks as naive_masks
from lightning_scape.ops.naive.rules import SELECTED_BY_TURNS
from lightning_scape.ops.registry import CUDA

_SELECT_TILE = 1024
"""Entries of whole rows that a warp of :func:`select` holds in registers; longer rows are shared by several warps."""
LONGEST_ROW = 4096
"""Longer blocks are selected by the twin."""


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
    BITS_GIVEN: tl.constexpr,
    OUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (position < LENGTH)[None, :]
    raw = tl.load(statistic + row[:, None] * STRIDE + position[None, :], mask=inside, other=0)
    if BITS_GIVEN:
        bits = raw
    else:
        bits = raw.to(tl.float32).to(tl.int32, bitcast=True)
    store_largest(bits, chosen, row, rows, sent, position, LENGTH, LOW, KEPT_BITS, OUT)


@triton.jit
def store_largest(
    bits,
    chosen,
    row,
    rows,
    sent,
    position,
    LENGTH: tl.constexpr,
    LOW: tl.constexpr,
    KEPT_BITS: tl.constexpr,
    OUT: tl.constexpr,
):
    """The positions of the largest magnitudes of each row, by :func:`naive.select`'s keys."""
    keys = (bits & KEPT_BITS) | (LOW - position)[None, :]
    keys = tl.where((position < LENGTH)[None, :], keys, -1)
    for turn in range(sent):
        top = tl.max(keys, axis=1)
        tl.store(chosen + row * sent + turn, (LOW - (top & LOW)).to(OUT), mask=row < rows)
        keys = tl.where(keys == top[:, None], -1, keys)  # no two keys of a row are equal


@CUDA.implements
def select(statistic: Tensor, sent: int) -> Tensor:
    """See :func:`naive.select`; bitwise. One read of the statistic, one write of the mask."""
    blocks, length = statistic.shape
    assert 1 <= sent <= length
    if not is_small(statistic, sent):
        return chunked.select(statistic, sent)
    given = statistic.view(torch.int32) if statistic.dtype == torch.float32 else statistic
    if statistic.dtype == torch.bfloat16:
        given = statistic.to(torch.float32).view(torch.int32)
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=statistic.device)
    shape = selection(given)
    launching.launch(
        _select_kernel,
        triton.cdiv(blocks, shape["ROWS"]),
        given,
        chosen,
        blocks,
        sent,
        BITS_GIVEN=given.dtype == torch.int32,
        **shape,
    )
    return chosen


def is_small(matrix: Tensor, sent: int) -> bool:
    """Whether rows are such that a kernel selects from them; the twin does from others."""
    return sent <= SELECTED_BY_TURNS and matrix.shape[1] <= LONGEST_ROW and matrix.stride(1) == 1


def selection(matrix: Tensor) -> dict[str, Any]:
    """What kernels that select know of their rows when they are compiled."""
    length = matrix.shape[1]
    low = (1 << (length - 1).bit_length()) - 1
    block = max(16, triton.next_power_of_2(length))
    return {
        "STRIDE": matrix.stride(0),
        "LENGTH": length,
        "LOW": low,
        "KEPT_BITS": naive_masks.MAGNITUDE_BITS & ~low,
        "ROWS": max(1, _SELECT_TILE // block),
        "BLOCK": block,
        "OUT": tl.uint8 if position_dtype(length) == torch.uint8 else tl.uint16,
        "num_warps": max(1, block // _SELECT_TILE),
    }


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


@CUDA.implements
def unpack_mask(bits: Tensor, sent: int, length: int) -> Tensor:
    """See :func:`naive.unpack_mask`. One launch."""
    if length > LONGEST_ROW:
        return chunked.unpack_mask(bits, sent, length)
    chosen = torch.empty(len(bits), sent, dtype=position_dtype(length), device=bits.device)
    block = max(16, triton.next_power_of_2(length))
    rows = max(1, _SELECT_TILE // block)
    launching.launch(
        _unpack_kernel,
        triton.cdiv(len(bits), rows),
        bits.contiguous(),
        chosen,
        len(bits),
        sent,
        WIDTH=bits.shape[1],
        LENGTH=length,
        ROWS=rows,
        BLOCK=block,
        OUT=tl.uint8 if chosen.dtype == torch.uint8 else tl.uint16,
        num_warps=max(1, block // _SELECT_TILE),
    )
    return chosen


@CUDA.implements
def propose(residual: Tensor, proposed: int) -> Tensor:
    """See :func:`naive.propose`; bitwise."""
    return naive_masks.proposals_of(residual, select(residual, proposed))


@triton.jit
def _merge_kernel(
    residual,
    proposals,
    chosen,
    rows,
    sent,
    ranks,
    owner,
    PROPOSED: tl.constexpr,
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
    there = row < rows
    inside = there[:, None] & (position < LENGTH)[None, :]
    total = tl.load(residual + row[:, None] * STRIDE + position[None, :], mask=inside, other=0).to(tl.float32)
    BYTES: tl.constexpr = 1 if LENGTH <= 256 else 2
    WIDTH: tl.constexpr = PROPOSED * (BYTES + 1) + 1
    for rank in range(ranks):
        if rank != owner:
            proposal = proposals + (row + tl.cast(rank, tl.int64) * rows) * WIDTH
            exponent = tl.load(proposal + (WIDTH - 1), mask=there, other=0).to(tl.int32)
            unit = divide((exponent << 23).to(tl.float32, bitcast=True), 127.0)
            for turn in range(PROPOSED):
                place = tl.load(proposal + turn * BYTES, mask=there, other=0).to(tl.int32)
                if BYTES == 2:
                    place += tl.load(proposal + (turn * 2 + 1), mask=there, other=0).to(tl.int32) << 8
                code = tl.load(proposal + (PROPOSED * BYTES + turn), mask=there, other=0).to(tl.int8, bitcast=True)
                named = position[None, :] == place[:, None]
                total = tl.where(named, total + (code.to(tl.float32) * unit)[:, None], total)
    bits = total.to(tl.int32, bitcast=True)
    store_largest(bits, chosen, row, rows, sent, position, LENGTH, LOW, KEPT_BITS, OUT)


@CUDA.implements
def merge(residual: Tensor, proposals: Tensor, owner: int, proposed: int, sent: int) -> Tensor:
    """See :func:`naive.merge`; bitwise. One launch, one read of the residual and of each proposal."""
    if not is_small(residual, max(proposed, sent)):
        return chunked.merge(residual, proposals, owner, proposed, sent)
    blocks, length = residual.shape
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=residual.device)
    shape = selection(residual)
    launching.launch(
        _merge_kernel,
        triton.cdiv(blocks, shape["ROWS"]),
        residual,
        proposals.contiguous(),
        chosen,
        blocks,
        sent,
        proposals.shape[0],
        owner,
        PROPOSED=proposed,
        **shape,
    )
    return chosen


@triton.jit
def _compact_kernel(
    residual,
    mask,
    values,
    scale,
    scale_stride,
    count,
    stride,
    sent,
    MASKED: tl.constexpr,
    WIRE: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    entry = first + tl.arange(0, CHUNK)
    inside = entry < count
    row, column = cells(mask, first, inside, sent, MASKED, CHUNK)
    place = residual + row * stride + column
    taken = tl.load(scale + row * scale_stride, mask=inside, other=0) != 0
    there = tl.load(place, mask=taken, other=0)
    raw = narrow(clamp(there, LIMIT), WIRE)
    tl.store(values + entry, raw, mask=inside)
    tl.store(place, there - widen(raw, WIRE).to(there.dtype), mask=taken)


@triton.jit
def cells(mask, first, inside, sent, MASKED: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column, int64, of the CHUNK chosen entries from ``first`` on: one division in 64 bits for all of them."""
    within = (first % sent).to(tl.int32) + tl.arange(0, CHUNK)
    row, column = first // sent + within // sent, (within % sent).to(tl.int64)
    if MASKED:
        column = tl.load(mask + first + tl.arange(0, CHUNK), mask=inside, other=0).to(tl.int64)
    return row, column


@CUDA.implements
def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """See :func:`naive.compact`; bitwise. One pass over the mask: gather, round, keep the rounding error."""
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device=residual.device) if out is None else out
    launching.launch(
        _compact_kernel,
        triton.cdiv(values.numel(), launching.PICK_CHUNK),
        residual,
        launching.raw(values) if mask is None else mask.contiguous(),
        launching.raw(values),
        scale.to(residual.device),
        scale.dim(),
        values.numel(),
        residual.stride(0),
        sent,
        MASKED=mask is not None,
        WIRE=launching.DTYPES[wire_dtype],
        LIMIT=torch.finfo(wire_dtype).max,
        CHUNK=launching.PICK_CHUNK,
        num_warps=4,
    )
    return values
