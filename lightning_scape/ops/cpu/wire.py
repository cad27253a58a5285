"""Loops that pack values into 8 or 4 bits and read them, compiled by numba: see :mod:`.wire`."""

import numpy as np

from lightning_scape.ops.cpu.numbers import clamp, jit, prefetch_line
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
def take(residual, mask, values, message, scale, limit, count, bits, first, last):
    """See :func:`naive.compact` and :func:`naive.pack`, whose arguments these are; the range is of groups.

    While a group is packed, memory delivers the entries of the next.
    """
    sent, per_shard, levels = values.shape[1], -(-count // GROUP), np.int32((1 << (bits - 1)) - 1)
    codes, group, whole = np.empty(GROUP, np.int32), np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    places, following = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    flat, out = residual.reshape(-1), values.reshape(-1)
    if first < last:
        _ask_for(residual, mask, sent, count, per_shard, first, following)
    for number in range(first, last):
        places[:] = following
        if number + 1 < last:
            _ask_for(residual, mask, sent, count, per_shard, number + 1, following)
        start, there = _group_of(number, count, per_shard)
        group[there:] = 0
        for i in range(there):
            taken = scale[(start + i) // sent if len(scale) > 1 else 0] != 0
            whole[i] = flat[places[i]]
            group[i] = clamp(whole[i], limit) if taken else np.float32(0)
            whole[i] -= group[i]
        code = _take_steps(group, codes, levels)
        for i in range(there):
            flat[places[i]] = whole[i] + group[i]
        _put_values(codes, code, levels, out[start : start + there])
        _write(codes, code, bits, message[number])


@jit
def _group_of(number, count, per_shard):
    """A group's first value, among those of all shards, and how many it has."""
    begin = number % per_shard * GROUP
    return number // per_shard * count + begin, min(GROUP, count - begin)


@jit
def _ask_for(residual, mask, sent, count, per_shard, number, places):
    """Where a group's entries lie; and asks memory for them."""
    start, there = _group_of(number, count, per_shard)
    row, column, length = start // sent, start % sent, residual.shape[1]
    address = residual.ctypes.data
    for i in range(there):
        place = row * length + (np.int64(mask[row, column]) if len(mask) > 0 else column)
        prefetch_line(address + 4 * place)
        places[i] = place
        column += 1
        if column == sent:
            row, column = row + 1, 0


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
