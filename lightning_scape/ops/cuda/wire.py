"""Triton kernels that pack values into 4 bits, and read them again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.ops.cuda import launch as launching
from lightning_scape.ops.naive.wire import GROUP, GROUP_BYTES, LEAST_SCALE

_READ, _PACKED = 32, 8
"""Groups of a program: 2,048 values, 16 for each of 128 threads; fewer where places of entries take registers, too.
The 7 in the kernels is naive.wire.LEVELS."""


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


# `sent` changes at every step of a warm-up.
@triton.jit(do_not_specialize=["sent"])
def _pack_kernel(
    values,
    message,
    residual,
    mask,
    least,
    count,
    groups,
    total,
    sent,
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

    even = _pack(source, low, unit, residual, mask, number, sent, inside, MASKED, LENGTH)
    odd = _pack(source + 1, high, unit, residual, mask, number + 1, sent, inside_high, MASKED, LENGTH)
    codes = even | (odd << 4)
    tl.store(target[:, None] + place[None, :], codes.to(tl.uint8), mask=there)
    tl.store(target + (WIDTH - 2), (scale & 0xFF).to(tl.uint8), mask=group < total)
    tl.store(target + (WIDTH - 1), (scale >> 8).to(tl.uint8), mask=group < total)


@triton.jit
def _pack(
    source, value, unit, residual, mask, number, sent, inside,
    MASKED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Codes of every second entry of the groups; what is left of these goes back: no other program has these."""
    steps = _steps_of(value, unit)
    left = value - steps * unit
    codes = steps.to(tl.int32) + 7
    place = number
    if MASKED:
        place = number // sent * LENGTH + tl.load(mask + number, mask=inside, other=0).to(tl.int64)
    there = tl.load(residual + place, mask=inside, other=0)
    tl.store(residual + place, there + left, mask=inside)
    tl.store(source, _value_of(codes, unit), mask=inside)
    return codes


def pack_values(residual: Tensor, mask: Tensor | None, values: Tensor, message: Tensor) -> None:
    """See :func:`naive.pack_values`. One launch."""
    shards, groups = message.shape[:2]
    launching.launch(
        _pack_kernel,
        triton.cdiv(shards * groups, _PACKED),
        values,
        message,
        residual,
        message if mask is None else mask,
        values.new_full((), LEAST_SCALE),
        values.numel() // shards,
        groups,
        shards * groups,
        values.shape[1],
        MASKED=mask is not None,
        LENGTH=residual.shape[1],
        GROUP=GROUP,
        WIDTH=GROUP_BYTES,
        ROWS=_PACKED,
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
        triton.cdiv(shards * groups, _READ),
        message,
        values,
        count,
        groups,
        shards * groups,
        GROUP=GROUP,
        WIDTH=GROUP_BYTES,
        ROWS=_READ,
        num_warps=4,
    )
    return values
