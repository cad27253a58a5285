"""Triton kernels on rows of blocks: which entries are the largest, and where they lie."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.dispatch import Declined
from lightning_scape.ops.naive import masks as naive_masks
from lightning_scape.ops.naive import position_dtype

_SELECT_TILE = 1024
"""Entries of whole rows that a warp of :func:`select` holds in registers; longer rows are shared by several warps."""
LONGEST_ROW = 4096
"""Longer blocks are selected by the twin."""
_SELECTED_BY_TURNS = 32
"""Up to so many entries of a block are selected by the kernel, the largest first; more by the twin."""


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
    assert 1 <= sent <= length
    if sent > _SELECTED_BY_TURNS or length > LONGEST_ROW or statistic.dtype != torch.float32:
        raise Declined
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=statistic.device)
    low, block = (1 << (length - 1).bit_length()) - 1, row_width(length)
    rows = max(1, _SELECT_TILE // block)
    launching.launch(
        _select_kernel,
        triton.cdiv(blocks, rows),
        statistic.view(torch.int32),
        chosen,
        blocks,
        sent,
        STRIDE=statistic.stride(0),
        LENGTH=length,
        LOW=low,
        KEPT_BITS=naive_masks.MAGNITUDE_BITS & ~low,
        ROWS=rows,
        BLOCK=block,
        OUT=tl.uint8 if chosen.dtype == torch.uint8 else tl.uint16,
        num_warps=max(1, block // _SELECT_TILE),
    )
    return chosen


def row_width(length: int) -> int:
    """Entries that a kernel holds of a row."""
    return max(16, int(triton.next_power_of_2(length)))


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
    if length > LONGEST_ROW:
        raise Declined
    chosen = torch.empty(len(bits), sent, dtype=position_dtype(length), device=bits.device)
    block = row_width(length)
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


@triton.jit
def cells(mask, first, inside, sent, MASKED: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column, int64, of the CHUNK chosen entries from ``first`` on: one division in 64 bits for all of them."""
    within = (first % sent).to(tl.int32) + tl.arange(0, CHUNK)
    row, column = first // sent + within // sent, (within % sent).to(tl.int64)
    if MASKED:
        column = tl.load(mask + first + tl.arange(0, CHUNK), mask=inside, other=0).to(tl.int64)
    return row, column
