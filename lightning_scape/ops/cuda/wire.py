"""Triton kernels that pack values into 8 or 4 bits, and read them again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.naive.wire import GROUP, LEAST_SCALE, bits_in, group_bytes

_GROUPS = 32
"""Groups of a program: 2,048 values, 16 for each of 128 threads."""


@triton.jit
def _unit_of(scale):
    """The fp32 whose upper half this is."""
    return (scale << 16).to(tl.float32, bitcast=True)


@triton.jit
def _steps_of(value, unit, LEVELS: tl.constexpr):
    """The nearest multiple of the unit, ties to the even one; 0 where the unit is."""
    quotient = tl.where(unit > 0, tl.div_rn(value, tl.where(unit > 0, unit, 1.0)), 0.0)
    nearest = (quotient + 12582912.0) - 12582912.0  # 1.5 * 2**23: fp32 has no fraction there
    return tl.minimum(tl.maximum(nearest, -LEVELS), LEVELS)


@triton.jit
def _value_of(code, unit, LEVELS: tl.constexpr):
    """What is sent; -0.0 for a zero."""
    return (LEVELS - code).to(tl.float32) * (unit * -1.0)  # -x would be 0 - x, which is not -0.0 where x is 0


@triton.jit
def _give_back(residual, mask, entry, sent, left, inside, MASKED: tl.constexpr, LENGTH: tl.constexpr):
    """Adds what rounding has left to the residual's entries; no other program has these."""
    if MASKED:
        place = entry // sent * LENGTH + tl.load(mask + entry, mask=inside, other=0).to(tl.int64)
    else:
        place = entry
    there = tl.load(residual + place, mask=inside, other=0)
    tl.store(residual + place, there + left.to(there.dtype), mask=inside)


# `sent` changes at every step of a warm-up.
@triton.jit(do_not_specialize=["sent"])
def _quantize_kernel(
    values,
    message,
    residual,
    mask,
    least,
    count,
    groups,
    total,
    sent,
    FEED: tl.constexpr,
    MASKED: tl.constexpr,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program packs ROWS groups. Of 4 bits, even entries are the lower halves of the bytes, odd ones the upper."""
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    PER_BYTE: tl.constexpr = 8 // BITS
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, GROUP // PER_BYTE)
    entry = (group % groups)[:, None] * GROUP + place[None, :] * PER_BYTE
    number = (group // groups)[:, None] * count + entry
    source = values + number
    there = (group < total)[:, None]
    target = message + group * WIDTH

    inside = there & (entry < count)
    low = tl.load(source, mask=inside, other=0.0)
    largest = tl.max(tl.abs(low), axis=1)
    if PER_BYTE == 2:
        inside_high = there & (entry + 1 < count)
        high = tl.load(source + 1, mask=inside_high, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(high), axis=1))
    exact = tl.div_rn(largest, tl.full([ROWS], LEVELS, tl.float32))
    exact = tl.where(exact > tl.load(least), exact, 0.0)
    scale = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    unit = _unit_of(scale)[:, None]

    steps = _steps_of(low, unit, LEVELS)
    left = low - steps * unit
    codes = steps.to(tl.int32) + LEVELS
    if FEED:
        _give_back(residual, mask, number, sent, left, inside, MASKED, LENGTH)
        left = _value_of(codes, unit, LEVELS)
    tl.store(source, left, mask=inside)
    if PER_BYTE == 2:
        steps = _steps_of(high, unit, LEVELS)
        left = high - steps * unit
        code = steps.to(tl.int32) + LEVELS
        if FEED:
            _give_back(residual, mask, number + 1, sent, left, inside_high, MASKED, LENGTH)
            left = _value_of(code, unit, LEVELS)
        tl.store(source + 1, left, mask=inside_high)
        codes = codes | (code << 4)
    tl.store(target[:, None] + place[None, :], codes.to(tl.uint8), mask=there)
    tl.store(target + (WIDTH - 2), (scale & 0xFF).to(tl.uint8), mask=group < total)
    tl.store(target + (WIDTH - 1), (scale >> 8).to(tl.uint8), mask=group < total)


def quantize(values: Tensor, bits: int) -> Tensor:
    """See :func:`naive.quantize`. One launch; values are read and written once."""
    assert values.dtype == torch.float32
    shards, count = values.shape
    message = torch.empty(shards, triton.cdiv(count, GROUP), group_bytes(bits), dtype=torch.uint8, device=values.device)
    left = values.contiguous()
    _launch_quantize(left, message, None, None)
    if left is not values:
        values.copy_(left)
    return message


def pack(residual: Tensor, mask: Tensor | None, values: Tensor, message: Tensor) -> None:
    """Packs values that have left the residual; what their rounding leaves goes back into it. One launch.

    Args:
        residual: ``[S * R, B]``, of S shards; changed in place.
        mask: ``[S * R, q]``, where the values were; or None.
        values: fp32 ``[S * R, q]``; they become what is sent.
        message: uint8 ``[S, G, W]``, written.
    """
    flat = values.view(len(message), values.numel() // len(message))
    _launch_quantize(flat, message, residual, None if mask is None else mask.contiguous())


def _launch_quantize(values: Tensor, message: Tensor, residual: Tensor | None, mask: Tensor | None) -> None:
    """Packs ``values [S, n]`` into ``message [S, G, W]``; what is left stays there, or goes into the residual."""
    (shards, count), (_, groups, width) = values.shape, message.shape
    rows = _GROUPS if residual is None else _GROUPS // 4  # places of entries take registers, too
    launching.launch(
        _quantize_kernel,
        triton.cdiv(shards * groups, rows),
        values,
        message,
        values if residual is None else residual,
        message if mask is None else mask,
        values.new_full((), LEAST_SCALE),
        count,
        groups,
        shards * groups,
        1 if mask is None else mask.shape[1],
        FEED=residual is not None,
        MASKED=mask is not None,
        LENGTH=1 if residual is None else residual.shape[1],
        BITS=bits_in(width),
        GROUP=GROUP,
        WIDTH=width,
        ROWS=rows,
        num_warps=4,
    )


@triton.jit
def _dequantize_kernel(
    message,
    values,
    count,
    groups,
    total,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
    PER_BYTE: tl.constexpr = 8 // BITS
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, GROUP // PER_BYTE)
    entry = (group % groups)[:, None] * GROUP + place[None, :] * PER_BYTE
    target = values + (group // groups)[:, None] * count + entry
    there = (group < total)[:, None]
    source = message + group * WIDTH

    codes = tl.load(source[:, None] + place[None, :], mask=there, other=0).to(tl.int32)
    scale = tl.load(source + (WIDTH - 2), mask=group < total, other=0).to(tl.int32)
    scale = scale | (tl.load(source + (WIDTH - 1), mask=group < total, other=0).to(tl.int32) << 8)
    unit = _unit_of(scale)[:, None]
    tl.store(target, _value_of(codes & (2**BITS - 1), unit, LEVELS), mask=there & (entry < count))
    if PER_BYTE == 2:
        tl.store(target + 1, _value_of(codes >> 4, unit, LEVELS), mask=there & (entry + 1 < count))


def dequantize(message: Tensor, bits: int, count: int, out: Tensor | None = None) -> Tensor:
    """See :func:`naive.dequantize`. One launch."""
    shards, groups, width = message.shape
    values = torch.empty(shards, count, dtype=torch.float32, device=message.device) if out is None else out
    rows = _GROUPS * 4 // bits  # as many bytes: with 8 bits, more of them would not fit into registers
    launching.launch(
        _dequantize_kernel,
        triton.cdiv(shards * groups, rows),
        message.contiguous(),
        values,
        count,
        groups,
        shards * groups,
        BITS=bits,
        GROUP=GROUP,
        WIDTH=width,
        ROWS=rows,
        num_warps=4,
    )
    return values
