"""Loops that select entries of blocks, compiled by numba: see :mod:`.cpu_kernels`."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_scape.ops.cpu_numbers import jit, widen

MAX_PASSES = 5
"""Up to so many entries of a block are selected by repeated maximum; beyond it by a sorting network."""
LANES = 32
"""Rows that are sorted side by side: the same comparisons for all of them, several at a time in a register."""
_MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 but its sign."""


@jit
def make_room(length, ranked):
    """Memory for the ranking of up to :data:`LANES` rows: keys, keys side by side, positions that were found."""
    low = 1
    while low < length:
        low *= 2
    keys, columns = np.empty(length, np.int32), np.zeros((length, LANES), np.int32)
    return keys, columns, np.empty((LANES, ranked), np.int64), np.int32(low - 1)


@jit
def rank_row(values, lane, network, room):
    """Ranks a row; with a network, it is only made ready for :func:`rank_rows`.

    The magnitudes and their positions make one integer for each entry: see :func:`naive.select`.
    """
    keys, columns, found, low = room
    if len(network) == 0:
        best = np.int32(-1)
        for i in range(len(values)):
            key = _key(values[i], i, low)
            keys[i] = key
            best = max(best, key)
        _find_by_maximum(keys, best, low, found[lane])
    else:
        for i in range(len(values)):
            columns[i, lane] = _key(values[i], i, low)


@jit
def _key(value, position, low):
    """Of 32 bits at each step: numba would make them 64, of which a register holds half as many."""
    kept = np.float32(widen(value)).view(np.int32) & np.int32(_MAGNITUDE & ~low)
    return np.int32(kept | np.int32(low - np.int32(position)))


@jit
def _find_by_maximum(keys, best, low, found):
    """Positions of the largest keys, largest first; ``best`` is the first. Keys are used up."""
    found[0] = low - (best & low)
    for turn in range(1, len(found)):
        keys[found[turn - 1]] = -1
        best = np.int32(-1)
        for i in range(len(keys)):
            best = max(best, keys[i])
        found[turn] = low - (best & low)


@jit
def rank_rows(rows, network, room):
    """After :func:`rank_row` for so many rows: positions of each row's largest, largest first."""
    keys, columns, found, low = room
    if len(network) == 0:
        return
    for c in range(len(network)):
        upper, lower = columns[network[c, 0]], columns[network[c, 1]]
        for lane in range(LANES):
            a, b = upper[lane], lower[lane]
            upper[lane] = max(a, b)
            lower[lane] = min(a, b)
    for row in range(rows):
        for turn in range(found.shape[1]):
            found[row, turn] = low - (columns[turn, row] & low)


@jit
def select(statistic, network, chosen, first, last):
    """See :func:`naive.select`; ``network`` may be empty for :data:`MAX_PASSES` entries and fewer."""
    room = make_room(statistic.shape[1], chosen.shape[1])
    for start in range(first, last, LANES):
        rows = min(LANES, last - start)
        for row in range(rows):
            rank_row(statistic[start + row], row, network, room)
        rank_rows(rows, network, room)
        write_positions(room[2], chosen, start, rows)


@jit
def write_positions(found, chosen, start, rows):
    """The first of the positions found in each row."""
    for row in range(rows):
        for turn in range(chosen.shape[1]):
            chosen[start + row, turn] = found[row, turn]


@jit
def propose(residual, network, votes, ballots, first, last):
    """See :func:`naive.propose`; ``network`` as in :func:`select`."""
    room = make_room(residual.shape[1], votes)
    for start in range(first, last, LANES):
        rows = min(LANES, last - start)
        for row in range(rows):
            rank_row(residual[start + row], row, network, room)
        rank_rows(rows, network, room)
        write_ballots(residual, room[2], votes, ballots, start, rows)


@jit
def write_ballots(residual, found, votes, ballots, start, rows):
    """A ballot of the first ``votes`` positions found in each row."""
    for row in range(rows):
        _write_ballot(residual[start + row], found[row, :votes], ballots[start + row])


@jit
def _write_ballot(values, chosen, ballot):
    """See :func:`naive.propose`."""
    votes, wide = len(chosen), len(values) > 256
    largest = np.float32(widen(values[chosen[0]])).view(np.int32) & _MAGNITUDE
    above = np.int32((largest >> 23) + 1)
    exponent = above if above < 254 else np.int32(254)
    unit = np.float32(127) / np.int32(exponent << 23).view(np.float32)
    codes = 2 * votes if wide else votes
    for turn in range(votes):
        position = chosen[turn]
        if wide:
            ballot[2 * turn], ballot[2 * turn + 1] = position & 255, position >> 8
        else:
            ballot[turn] = position
        ballot[codes + turn] = np.uint8(np.int8(np.rint(np.float32(widen(values[position])) * unit)))
    ballot[codes + votes] = exponent


@jit
def _add_ballot(total, ballot, votes):
    """See :func:`naive.merge`."""
    wide = len(total) > 256
    codes = 2 * votes if wide else votes
    unit = np.int32(np.int32(ballot[codes + votes]) << 23).view(np.float32) / np.float32(127)
    for turn in range(votes):
        position = np.int64(ballot[turn])
        if wide:
            position = np.int64(ballot[2 * turn]) + 256 * np.int64(ballot[2 * turn + 1])
        total[position] += np.float32(np.int8(ballot[codes + turn])) * unit


@jit
def merge(residual, ballots, own, network, votes, chosen, first, last):
    """See :func:`naive.merge`; ``network`` as in :func:`select`."""
    length = residual.shape[1]
    total, room = np.empty(length, np.float32), make_room(length, chosen.shape[1])
    for start in range(first, last, LANES):
        rows = min(LANES, last - start)
        for row in range(rows):
            values = residual[start + row]
            for i in range(length):
                total[i] = np.float32(widen(values[i]))
            for rank in range(len(ballots)):
                if rank != own:
                    _add_ballot(total, ballots[rank, start + row], votes)
            rank_row(total, row, network, room)
        rank_rows(rows, network, room)
        write_positions(room[2], chosen, start, rows)


def network(length: int, sent: int) -> Any:
    """The comparisons that bring the ``sent`` largest of ``length`` to the front; none where maxima are faster."""
    if sent <= MAX_PASSES:
        return np.empty((0, 2), np.uint16)
    return sorting_network(length, min(length, 1 << (sent - 1).bit_length()))


@functools.lru_cache(maxsize=64)
def sorting_network(length: int, sent: int) -> Any:
    """Comparisons that bring the ``sent`` largest of ``length`` numbers to the front, in descending order.

    Pairs of places ``(a, b)``, uint16 ``[n, 2]``: each in turn moves the larger of both numbers to a. Groups of
    ``sent`` are sorted by Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2). The first then
    meets each of the others in reverse, which leaves it the largest of both as a bitonic sequence, and is sorted again
    by a bitonic merge. Where ``sent`` is no power of two, or more than a half, all is sorted.
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
