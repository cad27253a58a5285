"""Triton kernels that pack values into 4 bits, and read them again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.naive.wire import GROUP, GROUP_BYTES, LEAST_SCALE, new_message

_GROUPS = 32
"""Groups of a program: 2,048 values, 16 for each of 128 threads. The 7 in the kernels is naive.wire.LEVELS."""


@triton.jit
def _unit_of(scale):
    """The fp32 whose upper half this is."""
    return (scale << 16).to(tl.float32, bitcast=True)


@triton.jit
def _steps_of(value, unit):
    """The nearest multiple of the unit, ties to the even one; 0 where the unit is."""
    quotient = tl.where(unit > 0, tl.div_rn(value, tl.where(unit > 0, unit, 1.0)), 0.0)
    nearest = (quotient + 12582912.0) - 12582912.0  # 1.5 * 2**23: fp32 has no fraction there
    return tl.minimum(tl.maximum(nearest, -7), 7)


@triton.jit
def _value_of(code, unit):
    """What is sent; -0.0 for a zero."""
    return (7 - code).to(tl.float32) * (unit * -1.0)  # -x would be 0 - x, which is not -0.0 where x is 0


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
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program packs ROWS groups. Even entries are the lower halves of the bytes, odd ones the upper."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, GROUP // 2)
    entry = (group % groups)[:, None] * GROUP + place[None, :] * 2
    number = (group // groups)[:, None] * count + entry
    source = values + number
    there = (group < total)[:, None]
    target = message + group * WIDTH

    inside, inside_high = there & (entry < count), there & (entry + 1 < count)
    low, high = tl.load(source, mask=inside, other=0.0), tl.load(source + 1, mask=inside_high, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    exact = tl.div_rn(largest, tl.full([ROWS], 7.0, tl.float32))
    exact = tl.where(exact > tl.load(least), exact, 0.0)
    scale = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    unit = _unit_of(scale)[:, None]

    even = _pack(source, low, unit, residual, mask, number, sent, inside, FEED, MASKED, LENGTH)
    odd = _pack(source + 1, high, unit, residual, mask, number + 1, sent, inside_high, FEED, MASKED, LENGTH)
    codes = even | (odd << 4)
    tl.store(target[:, None] + place[None, :], codes.to(tl.uint8), mask=there)
    tl.store(target + (WIDTH - 2), (scale & 0xFF).to(tl.uint8), mask=group < total)
    tl.store(target + (WIDTH - 1), (scale >> 8).to(tl.uint8), mask=group < total)


@triton.jit
def _pack(
    source, value, unit, residual, mask, number, sent, inside,
    FEED: tl.constexpr, MASKED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Codes of every second entry of the groups; what is left of these is stored, or goes into the residual."""
    steps = _steps_of(value, unit)
    left = value - steps * unit
    codes = steps.to(tl.int32) + 7
    if FEED:
        _give_back(residual, mask, number, sent, left, inside, MASKED, LENGTH)
        left = _value_of(codes, unit)
    tl.store(source, left, mask=inside)
    return codes


def quantize(values: Tensor) -> Tensor:
    """See :func:`naive.quantize`. One launch; values are read and written once."""
    assert values.dtype == torch.float32
    assert values.is_contiguous()
    message = new_message(1, len(values), values.device)
    _launch_quantize(values.unsqueeze(0), message, None, None)
    return message[0]


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
    (shards, count), groups = values.shape, message.shape[1]
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
        GROUP=GROUP,
        WIDTH=GROUP_BYTES,
        ROWS=rows,
        num_warps=4,
    )


@triton.jit
def _dequantize_kernel(
    message, values, count, groups, total, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, GROUP // 2)
    entry = (group % groups)[:, None] * GROUP + place[None, :] * 2
    target = values + (group // groups)[:, None] * count + entry
    there = (group < total)[:, None]
    source = message + group * WIDTH

    codes = tl.load(source[:, None] + place[None, :], mask=there, other=0).to(tl.int32)
    scale = tl.load(source + (WIDTH - 2), mask=group < total, other=0).to(tl.int32)
    scale = scale | (tl.load(source + (WIDTH - 1), mask=group < total, other=0).to(tl.int32) << 8)
    unit = _unit_of(scale)[:, None]
    tl.store(target, _value_of(codes & 15, unit), mask=there & (entry < count))
    tl.store(target + 1, _value_of(codes >> 4, unit), mask=there & (entry + 1 < count))


def dequantize(message: Tensor, count: int) -> Tensor:
    """See :func:`naive.dequantize`. One launch."""
    shards, groups = message.shape[:2]
    values = torch.empty(shards, count, dtype=torch.float32, device=message.device)
    launching.launch(
        _dequantize_kernel,
        triton.cdiv(shards * groups, _GROUPS),
        message.contiguous(),
        values,
        count,
        groups,
        shards * groups,
        GROUP=GROUP,
        WIDTH=GROUP_BYTES,
        ROWS=_GROUPS,
        num_warps=4,
    )
    return values
