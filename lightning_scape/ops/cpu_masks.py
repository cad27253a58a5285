"""Loops that select entries of blocks, compiled by numba: see :mod:`.cpu_kernels`."""

import numpy as np

from lightning_scape.ops.cpu_numbers import jit, widen

_MAX_PASSES = 8
"""Up to so many entries of a block are selected by repeated maximum."""
_MAX_RANKED = 160
"""Up to so many candidates are sorted by counting which are larger; the cost is quadratic, but vectorized."""
_MAX_TRIALS = 12
"""Thresholds tried for a row; any of them gives the same result."""
_EIGHTH = 1 << 20
"""As a difference of keys: a factor between 1.06 and 1.13."""
_MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 but its sign."""


@jit
def _low_bits(length):
    """As many ones as the last position of a block has bits."""
    low = 1
    while low < length:
        low *= 2
    return low - 1


@jit
def _room(length):
    """Memory of a thread that selects: the keys of a row, candidates, and what sorts them."""
    return np.empty((4, max(length, 256) + 1), np.int32)


@jit
def _fill_keys(values, keys, low):
    """The magnitudes of a row and their positions, one integer for each: see :func:`reference.select`."""
    for i in range(len(values)):
        bits = np.float32(widen(values[i])).view(np.int32)
        keys[i] = (bits & (_MAGNITUDE & ~low)) | (low - i)


@jit
def _rank(room, length, low, chosen, guess):
    """Writes the positions of the largest keys, largest first. Keys are used up.

    ``guess`` is what it returned for another row: the smallest key chosen there. It saves time, and changes no result.
    """
    keys, sent = room[0, :length], len(chosen)
    if sent <= _MAX_PASSES:
        for turn in range(sent):
            best = np.int32(-1)
            for i in range(length):
                if keys[i] > best:
                    best = keys[i]
            chosen[turn] = low - (best & low)
            keys[low - (best & low)] = -1
        return guess
    threshold = _threshold(keys, sent, guess)
    candidates, count = room[1], 0
    for i in range(length):
        candidates[count] = keys[i]
        count += keys[i] >= threshold
    if count <= _MAX_RANKED:
        return _sort_by_counting(candidates[:count], room[2, :count], low, chosen, threshold)
    order = _sort_by_digits(room, count, low)
    for turn in range(sent):
        chosen[turn] = low - (order[turn] & low)
    return order[sent - 1]


@jit
def _threshold(keys, sent, guess):
    """A number that at least ``sent`` keys reach, and not many more."""
    if 2 * sent > len(keys):
        return np.int32(0)
    low, high, step, trial = 0, _MAGNITUDE, 2 * _EIGHTH, max(guess - 2 * _EIGHTH, 0)
    for _ in range(_MAX_TRIALS):
        reached, limit = np.int32(0), np.int32(trial)
        for i in range(len(keys)):
            reached = np.int32(reached + (keys[i] >= limit))
        if reached < sent:
            high = trial
            trial = max(trial - step, (low + trial) // 2) if low else max(trial - step, 0)
        else:
            low = trial
            if reached <= sent + sent // 2:
                break
            trial = min(trial + step, (trial + high) // 2)
        step *= 2
    return np.int32(low)


@jit
def _sort_by_counting(candidates, larger, low, chosen, guess):
    """A key goes to the place given by the number of larger ones: no two are equal."""
    for i in range(len(candidates)):
        larger[i] = 0
    for j in range(len(candidates)):
        key = candidates[j]
        for i in range(len(candidates)):
            larger[i] += key > candidates[i]
    for i in range(len(candidates)):
        if larger[i] < len(chosen):
            chosen[larger[i]] = low - (candidates[i] & low)
        if larger[i] == len(chosen) - 1:
            guess = candidates[i]
    return guess


@jit
def _sort_by_digits(room, count, low):
    """Largest first, eight bits at a time. The low bits, positions, are in order from the start."""
    source, target, places, shift = room[1], room[2], room[3], 0
    while (low >> shift) > 0:
        shift += 1
    while shift < 31:
        for digit in range(257):
            places[digit] = 0
        for i in range(count):
            places[256 - ((source[i] >> shift) & 255)] += 1
        for digit in range(256):
            places[digit + 1] += places[digit]
        for i in range(count):
            digit = 255 - ((source[i] >> shift) & 255)
            target[places[digit]] = source[i]
            places[digit] += 1
        source, target = target, source
        shift += 8
    return source


@jit
def select(statistic, chosen, first, last):
    length = statistic.shape[1]
    low, room, guess = _low_bits(length), _room(length), np.int32(0)
    for row in range(first, last):
        _fill_keys(statistic[row], room[0], low)
        guess = _rank(room, length, low, chosen[row], guess)


@jit
def vote(residual, votes, ballots, first, last):
    length, wide = residual.shape[1], residual.shape[1] > 256
    low, room, guess, chosen = _low_bits(length), _room(length), np.int32(0), np.empty(votes, np.int64)
    for row in range(first, last):
        values, ballot = residual[row], ballots[row]
        _fill_keys(values, room[0], low)
        guess = _rank(room, length, low, chosen, guess)
        largest = np.float32(widen(values[chosen[0]])).view(np.int32) & _MAGNITUDE
        exponent = min((largest >> 23) + 1, 254)
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
def elect(residual, ballots, own, votes, chosen, first, last):
    length, wide = residual.shape[1], residual.shape[1] > 256
    low, room, guess, total = _low_bits(length), _room(length), np.int32(0), np.empty(length, np.float32)
    codes = 2 * votes if wide else votes
    for row in range(first, last):
        values = residual[row]
        for i in range(length):
            total[i] = np.float32(widen(values[i]))
        for rank in range(len(ballots)):
            if rank == own:
                continue
            ballot = ballots[rank, row]
            unit = np.int32(np.int32(ballot[codes + votes]) << 23).view(np.float32) / np.float32(127)
            for turn in range(votes):
                position = np.int64(ballot[turn])
                if wide:
                    position = np.int64(ballot[2 * turn]) + 256 * np.int64(ballot[2 * turn + 1])
                total[position] += np.float32(np.int8(ballot[codes + turn])) * unit
        _fill_keys(total, room[0], low)
        guess = _rank(room, length, low, chosen[row], guess)
