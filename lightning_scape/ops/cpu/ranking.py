"""Ranking a block's entries by magnitude, compiled by numba: see :mod:`.kernels`.

An entry's magnitude and position make one integer, its key (see :func:`naive.select`). A few of the largest keys are
found by repeated maximum. More are found with a sorting network, side by side for :data:`LANES` rows: the same
comparisons for all of them, several at a time in a register. Where a small part of a row is ranked, the row is thinned
out first: its entries form ``G`` groups, and the q-th largest of the groups' maxima cannot be larger than the q-th
largest entry. The entries that reach it, some 1.5 q of them, are sorted.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lightning_scape.ops.cpu.numbers import jit, prefetch

MAX_PASSES = 5
"""Up to so many entries of a block are selected by repeated maximum; beyond it by a sorting network."""
LANES = 32
"""Rows that are sorted side by side."""
_AHEAD = 8
"""Rows between the one that is ranked and the one that memory delivers meanwhile."""
MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 but its sign."""


class Networks(NamedTuple):
    """Comparisons of places ``(a, b)``, uint16 ``[n, 2]``: each in turn moves the larger of both keys to a."""

    groups: Any
    """Of the groups' maxima, or of all keys. Empty: by repeated maximum."""
    candidates: Any
    """Of the entries that reach the threshold. Empty: ``groups`` sorts all keys."""
    width: int
    """Groups, or the length of a row."""
    room: int
    """Candidates at most; a row with more is ranked by repeated maximum."""


def networks(length: int, ranked: int) -> Networks:
    """What ranks ``ranked`` of ``length`` entries fastest."""
    none = np.empty((0, 2), np.uint16)
    if ranked <= MAX_PASSES:
        return Networks(none, none, length, length)
    power = 1 << (ranked - 1).bit_length()
    width = power if 5 * ranked <= 4 * power else 2 * power
    if 4 * width > length:
        return Networks(sorting_network(length, min(length, power)), none, length, length)
    return Networks(sorting_network(width, power), sorting_network(2 * power, power), width, 2 * power)


@jit
def make_room(length, ranked):
    """Memory for the ranking of up to :data:`LANES` rows.

    Keys ``[LANES, length]``; keys side by side ``[length + 1, LANES]``; positions found ``[LANES, ranked]``; the low
    bits of each position's key; the maxima of groups.
    """
    low = 1
    while low < length:
        low *= 2
    lows = np.empty(length, np.int32)
    for i in range(length):
        lows[i] = low - 1 - i
    keys, columns = np.empty((LANES, length), np.int32), np.zeros((length + 1, LANES), np.int32)
    return keys, columns, np.empty((LANES, ranked), np.int64), lows, np.empty(length, np.int32)


@jit
def key_of(value, high, low):
    """Of 32 bits at each step: numba would make them 64, of which a register holds half as many."""
    return np.int32((np.float32(value).view(np.int32) & high) | low)


@jit
def rank_rows(values, first, rows, networks, room):
    """Finds the positions of the largest of ``rows`` rows of a matrix, from ``first`` on, the largest first."""
    (keys, columns, found, lows, maxima), (groups, candidates, width, most) = room, networks
    if len(groups) == 0:
        _rank_by_maximum(values, first, (0, rows), keys[0], found, lows)
        return
    high, size = np.int32(MAGNITUDE & ~lows[0]), values.shape[1] * values.itemsize
    for lane in range(rows):
        prefetch(values.ctypes.data + (first + lane + _AHEAD) * size, size)
        row, there = values[first + lane], keys[lane]
        for i in range(len(there)):
            there[i] = key_of(row[i], high, lows[i])
        if len(candidates) == 0:
            for i in range(len(there)):
                columns[i, lane] = there[i]
            continue
        for i in range(width):
            maxima[i] = there[i]
        for start in range(width, len(there), width):  # entry i belongs to group i % width
            part = there[start : start + width]
            for i in range(len(part)):
                maxima[i] = max(maxima[i], part[i])
        for i in range(width):
            columns[i, lane] = maxima[i]
    _sort(columns, groups)
    counts = np.zeros(LANES, np.int64)
    if len(candidates) > 0:
        for lane in range(rows):
            there, threshold, count = keys[lane], columns[found.shape[1] - 1, lane], np.uint64(0)
            for i in range(len(there)):  # without a branch
                columns[count, lane] = there[i]
                count += np.uint64(there[i] >= threshold)
            counts[lane] = count
            for i in range(counts[lane], most):
                columns[i, lane] = -1
        _sort(columns, candidates)
    for lane in range(rows):
        if counts[lane] > most:
            _rank_by_maximum(values, first, (lane, lane + 1), keys[lane], found, lows)
            continue
        for turn in range(found.shape[1]):
            found[lane, turn] = lows[0] - (columns[turn, lane] & lows[0])


@jit
def _rank_by_maximum(values, first, lanes, keys, found, lows):
    """All in one function: for an array given to another, numba counts references, which takes as long as a pass."""
    low, size = lows[0], values.shape[1] * values.itemsize
    high = np.int32(MAGNITUDE & ~low)
    for lane in range(lanes[0], lanes[1]):
        prefetch(values.ctypes.data + (first + lane + _AHEAD) * size, size)
        row, there = values[first + lane], found[lane]
        best = np.int32(-1)
        for i in range(len(keys)):
            key = key_of(row[i], high, lows[i])
            keys[i] = key
            best = max(best, key)
        position = low - (best & low)
        there[0] = position
        for turn in range(1, len(there)):
            keys[position] = -1
            best = np.int32(-1)
            for i in range(len(keys)):
                best = max(best, keys[i])
            position = low - (best & low)
            there[turn] = position


@jit
def _sort(columns, network):
    for c in range(len(network)):
        upper, lower = columns[network[c, 0]], columns[network[c, 1]]
        for lane in range(LANES):
            a, b = upper[lane], lower[lane]
            upper[lane] = max(a, b)
            lower[lane] = min(a, b)


@functools.lru_cache(maxsize=64)
def sorting_network(length: int, sent: int) -> Any:
    """Comparisons that bring the ``sent`` largest of ``length`` numbers to the front, in descending order.

    Pairs of places as in :class:`Networks`. Groups of ``sent`` are sorted by Batcher's merge exchange (Knuth, The Art
    of Computer Programming 3, 5.2.2). The first then meets each of the others in reverse, which leaves it the largest
    of both as a bitonic sequence, and is sorted again by a bitonic merge. Where ``sent`` is no power of two, or more
    than a half, all is sorted.
    """
    if sent & (sent - 1) or 2 * sent > length:
        return np.array(list(_merge_exchange(length)), np.uint16).reshape(-1, 2)
    pairs = [(g + a, g + b) for g in range(0, length, sent) for a, b in _merge_exchange(min(sent, length - g))]
    for group in range(sent, length, sent):
        pairs += [(place, group + sent - 1 - place) for place in range(sent) if group + sent - 1 - place < length]
        gap = sent // 2
        while gap:
            pairs += [(place, place + gap) for place in range(sent) if not place & gap]
            gap //= 2
    return np.array(pairs, np.uint16)


def _merge_exchange(length: int) -> Iterator[tuple[int, int]]:
    """Batcher's network for any length."""
    size = 1
    while size < length:
        gap = size
        while gap:
            for start in range(gap % size, length - gap, 2 * gap):
                for a in range(start, min(start + gap, length - gap)):
                    if a // (2 * size) == (a + gap) // (2 * size):
                        yield a, a + gap
            gap //= 2
        size *= 2
