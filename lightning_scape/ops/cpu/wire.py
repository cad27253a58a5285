"""Loops that pack values into 8 or 4 bits and read them, compiled by numba: see :mod:`.wire`."""

import numpy as np

from lightning_scape.ops.cpu.numbers import clamp, jit
from lightning_scape.ops.cpu.ranking import MAGNITUDE
from lightning_scape.ops.cpu.update import find_tile
from lightning_scape.ops.naive.wire import GROUP, LEAST_SCALE

_LEAST_SCALE = np.float32(LEAST_SCALE)
_TILE = 8 * GROUP
"""Values that are read before they are packed: their cache misses overlap."""


@jit
def quantize(values, message, count, bits, first, last):
    """See :func:`naive.quantize`; ``values [S * n]``, ``message [S * G, W]``, ``count`` is n. The range is of rows."""
    per_shard, levels = -(-count // GROUP), np.int32((1 << (bits - 1)) - 1)
    codes, padded = np.empty(GROUP, np.int32), np.empty(GROUP, np.float32)
    for row in range(first, last):
        start = row // per_shard * count + row % per_shard * GROUP
        there = min(GROUP, count - row % per_shard * GROUP)
        group = values[start : start + there]
        if there == GROUP:
            scale = _take_steps(group, codes, levels)
        else:
            for i in range(GROUP):
                padded[i] = group[i] if i < there else 0
            scale = _take_steps(padded, codes, levels)
            for i in range(there):
                group[i] = padded[i]
        _write(codes, scale, bits, message[row])


@jit
def pack(values, residual, mask, message, count, bits, packed, first, last):
    """See :func:`naive.pack`; arguments as in :func:`quantize`, and ``packed [S * G]``: groups that are left alone."""
    per_shard, codes, padded = -(-count // GROUP), np.empty(GROUP, np.int32), np.empty(GROUP, np.float32)
    for row in range(first, last):
        if packed[row] == 0:
            start = row // per_shard * count + row % per_shard * GROUP
            there = min(GROUP, count - row % per_shard * GROUP)
            _pack_group(values, residual, mask, message, row, start, there, bits, codes, padded)


@jit
def pack_ready(values, residual, mask, packing, begin, end):
    """Packs the groups that begin and end in values ``begin .. end``; returns where the next group begins.

    ``packing``: message and groups packed, as in :func:`pack`; its count and bits; room for a group's codes and values.
    """
    message, packed, count, bits, codes, padded = packing
    per_shard = -(-count // GROUP)
    while begin < end:
        shard = begin // count
        group = -(-(begin - shard * count) // GROUP)
        if group == per_shard:
            begin = (shard + 1) * count
            continue
        begin = shard * count + group * GROUP
        stop = min(begin + GROUP, (shard + 1) * count)
        if stop > end:
            break
        row = shard * per_shard + group
        _pack_group(values, residual, mask, message, row, begin, stop - begin, bits, codes, padded)
        packed[row] = 1
        begin = stop
    return begin


@jit
def _pack_group(values, residual, mask, message, row, start, there, bits, codes, padded):
    """One group: its row of the message. Rounding errors go back into the residual; values become what is sent."""
    levels, part = np.int32((1 << (bits - 1)) - 1), values[start : start + there]
    if there == GROUP:
        scale = _take_steps(part, codes, levels)
    else:
        for i in range(GROUP):
            padded[i] = part[i] if i < there else 0
        scale = _take_steps(padded, codes, levels)
        for i in range(there):
            part[i] = padded[i]
    _give_back(part, residual, mask, start)
    _put_values(codes, scale, levels, part)
    _write(codes, scale, bits, message[row])


@jit
def _give_back(errors, residual, mask, start):
    """Adds rounding errors to the entries that they come from: those chosen, from the ``start``-th on."""
    if len(mask) == 0:
        there = residual.reshape(-1)[start:]
        for i in range(len(errors)):
            there[i] += errors[i]
        return
    sent, done = mask.shape[1], 0
    at, column = start // sent, start % sent
    while done < len(errors):
        count = min(sent - column, len(errors) - done)
        row, chosen, given = residual[at], mask[at, column:], errors[done:]
        for i in range(count):
            row[chosen[i]] += given[i]
        at, column, done = at + 1, 0, done + count


@jit
def quantize_with_error(error, mask, theta, before, message, bits, first, last):
    """See :func:`naive.quantize_with_error`; ``error [R, B]``, ``theta [R * q]``. The range is of groups."""
    sent, count, levels = mask.shape[1], len(theta), np.int32((1 << (bits - 1)) - 1)
    codes, due, all_places = np.empty(GROUP, np.int32), np.empty(_TILE, np.float32), np.empty(_TILE, np.uint64)
    there, chosen, sink = error.reshape(-1), mask.reshape(-1), np.empty(1)
    for begin in range(first * GROUP, min(last * GROUP, count), _TILE):
        size = min(_TILE, min(last * GROUP, count) - begin)
        places = all_places[:size]
        find_tile(error.ctypes.data, there[:0], chosen, 0, sent, error.shape[1], begin, places, sink)
        new, old = theta[begin : begin + size], before[begin : begin + size]
        due[size:] = 0
        for j in range(size):
            kept = there[places[j]]
            kept = kept if abs(kept) < np.inf else np.float32(0)
            due[j] = kept if new[j] == old[j] else (new[j] - old[j]) + kept
        for group in range(-(-size // GROUP)):
            part = slice(group * GROUP, (group + 1) * GROUP)
            scale = _take_steps(due[part], codes, levels)
            _put_values(codes, scale, levels, new[part])
            _write(codes, scale, bits, message[begin // GROUP + group])
        for j in range(size):
            there[places[j]] = due[j]


@jit
def _take_steps(group, codes, levels):
    """Codes of a group, whose rounding errors stay behind; returns the scale.

    The bits of single values are looked at: a view of the group's would take as long as all the rest.
    """
    largest = np.int32(0)
    for i in range(GROUP):
        magnitude = np.int32(np.float32(group[i]).view(np.int32) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    exact = np.float32(np.int32(largest).view(np.float32) / np.float32(levels))
    if not exact > _LEAST_SCALE:
        codes[:] = levels
        return np.int32(0)
    scale = np.int32((exact.view(np.int32) + 0xFFFF) >> 16)
    unit, most = np.int32(scale << 16).view(np.float32), np.float32(levels)
    for i in range(GROUP):
        step = np.int32(clamp(np.rint(group[i] / unit), most))
        group[i] -= np.float32(step) * unit
        codes[i] = step + levels
    return scale


@jit
def _put_values(codes, scale, levels, values):
    """The values of a group as they are sent; -0.0 for a zero."""
    negative = -np.int32(scale << 16).view(np.float32)
    for i in range(len(values)):
        values[i] = np.float32(levels - codes[i]) * negative


@jit
def _write(codes, scale, bits, row):
    """A row of the message. The codes are used up."""
    if bits == 4:
        for i in range(GROUP // 2):
            codes[i] = codes[2 * i] | codes[2 * i + 1] << 4
    for i in range(len(row) - 2):
        row[i] = codes[i]
    row[len(row) - 2], row[len(row) - 1] = scale & 255, scale >> 8


@jit
def dequantize(message, values, count, bits, first, last):
    """See :func:`naive.dequantize`; arguments as in :func:`quantize`."""
    per_shard, levels = -(-count // GROUP), np.int32((1 << (bits - 1)) - 1)
    padded = np.empty(GROUP, np.float32)
    for row in range(first, last):
        start = row // per_shard * count + row % per_shard * GROUP
        there = min(GROUP, count - row % per_shard * GROUP)
        group = values[start : start + there]
        if there == GROUP:
            _read(message[row], bits, levels, group)
        else:
            _read(message[row], bits, levels, padded)
            for i in range(there):
                group[i] = padded[i]


@jit
def _read(row, bits, levels, group):
    """The values of a row."""
    scale = np.int32(row[len(row) - 2]) | np.int32(row[len(row) - 1]) << 8
    negative = -np.int32(scale << 16).view(np.float32)
    if bits == 4:
        for i in range(GROUP // 2):
            code = np.int32(row[i])
            group[2 * i] = np.float32(levels - (code & 15)) * negative
            group[2 * i + 1] = np.float32(levels - (code >> 4)) * negative
    else:
        for i in range(GROUP):
            group[i] = np.float32(levels - np.int32(row[i])) * negative
