"""The loops of an owner's update and of its way into the parameters, compiled by numba: see :mod:`.kernels`.

What they touch lies far apart. So the places of some hundred entries are computed first, and their cache lines are
asked for (:func:`_prefetch_places`): the core waits for many at once. Where most cache lines have a masked entry, the
lines are first read in order (:func:`_read_lines`), which the processor foresees.
"""

import math

import numpy as np

from lightning_scape.ops.cpu.numbers import (
    CACHE_LINE,
    array_at,
    clamp,
    jit,
    larger,
    narrow,
    overlap,
    prefetch_line,
    widen,
)

_TILE = 512
"""Entries that an update reads before it computes: their cache misses overlap."""
_TABLE = 256
"""Waits, in steps, whose powers are computed once."""
GATHER, RENEW, WRITE, ADD = range(4)
"""Ways of :func:`exchange`: values take the parameters', where they do not round to them; or parameters take theirs."""
_LR, _BETA1, _ONE_MINUS_BETA1, _BETA2, _ONE_MINUS_BETA2, _EPS, _KEEP, _LOG_KEEP = range(8)
"""Columns of ``numbers``, in the order of :class:`naive.Hyper`."""


# ------------------------------------------------------------------------------------------------------- parameters


@jit
def exchange(table, mask, values, way, length, like_flat, first, last):
    """See :func:`naive.gather_params` and :func:`naive.scatter_params`.

    ``table [n, 4]``: address of the piece's first entry, chosen entries of all before, chosen entries, first row.
    ``way``: what is done. A sum is rounded once.
    """
    sent, chosen, rows, places = mask.shape[1], mask.reshape(-1), values.reshape(-1), np.empty(_TILE, np.uint64)
    sink = np.empty(1)
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 1], table[i, 2])
        flat, before = array_at(table[i, 0], 0, 0, like_flat), table[i, 3] * sent
        for begin in range(start, stop, _TILE):
            count = min(_TILE, stop - begin)
            find_tile(table[i, 0], like_flat, chosen, before, sent, length, begin, places[:count], sink)
            tile = rows[before + begin : before + begin + count]
            if way == GATHER:
                for j in range(count):
                    tile[j] = narrow(widen(flat[places[j]]), values)
            elif way == RENEW:
                for j in range(count):
                    there = widen(flat[places[j]])
                    if widen(narrow(widen(tile[j]), like_flat)) != there:
                        tile[j] = narrow(there, values)
            elif way == WRITE:
                for j in range(count):
                    flat[places[j]] = narrow(widen(tile[j]), like_flat)
            else:
                for j in range(count):
                    flat[places[j]] = narrow(widen(flat[places[j]]) + widen(tile[j]), like_flat)


@jit
def add(table, mask, values, error, length, like_flat, first, last):
    """:func:`exchange` by ``ADD``; what rounding loses of it goes into ``error [R, B]``."""
    sent, chosen, rows, places = mask.shape[1], mask.reshape(-1), values.reshape(-1), np.empty(_TILE, np.uint64)
    sink = np.empty(1)
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 1], table[i, 2])
        flat, before = array_at(table[i, 0], 0, 0, like_flat), table[i, 3] * sent
        errors = error[table[i, 3] :].reshape(-1)
        for begin in range(start, stop, _TILE):
            count = min(_TILE, stop - begin)
            find_tile(table[i, 0], like_flat, chosen, before, sent, length, begin, places[:count], sink)
            tile = rows[before + begin : before + begin + count]
            for j in range(count):
                place, given = places[j], widen(tile[j])
                old = flat[place]
                new = narrow(widen(old) + given, like_flat)
                flat[place] = new
                errors[place] += given if new == old else given - (widen(new) - widen(old))


@jit
def find_tile(address, like_entry, chosen, before, sent, length, begin, places, sink):
    """:func:`_find`, and the entries are on their way from memory; ``address`` is that of the first row's first."""
    if _in_most_lines(sent, length, like_entry):
        lines = _whole_rows(address, begin, len(places), sent, length, like_entry)
        _read_lines(lines, lines, lines, sink)
        _find(chosen, before, sent, length, begin, places)
    else:
        _find(chosen, before, sent, length, begin, places)
        _prefetch_places(address, like_entry.itemsize, places)


@jit
def _find(chosen, before, sent, length, begin, places):
    """Places of chosen entries, counted from the first of the rows that come after ``before`` chosen entries.

    Places come before the entries are read: then the core waits for many entries of memory at once, twice as fast.
    """
    row, column, done = begin // sent, begin % sent, 0
    while done < len(places):
        count = min(sent - column, len(places) - done)
        there, out, start = chosen[before + begin + done :], places[done:], np.uint64(row * length)
        for j in range(count):
            out[j] = start + np.uint64(there[j])
        row, column, done = row + 1, 0, done + count


@jit
def _prefetch_places(address, size, places):
    """Asks for the entries at these places, of so many bytes each."""
    for j in range(len(places)):
        prefetch_line(address + np.int64(places[j]) * size)


@jit
def _in_most_lines(sent, length, like_entry):
    """Whether a cache line has a masked entry on average."""
    return sent * CACHE_LINE >= length * like_entry.itemsize


@jit
def _whole_rows(address, begin, count, sent, length, like_flat):
    """The rows of ``count`` chosen entries, but the last of them: behind its last chosen entry the piece may end."""
    first, last = begin // sent, (begin + count - 1) // sent
    return array_at(address, first * length, (last - first) * length, like_flat)


@jit
def _read_lines(a, b, c, sink):
    """Reads each cache line of three arrays of one length, in order and by turns.

    Memory delivers lines that it foresees twice as fast as those at random places, and more from three streams than
    from one. ``sink`` keeps the compiler from leaving the reading out.
    """
    step, total = CACHE_LINE // max(a.itemsize, b.itemsize, c.itemsize), 0.0
    for i in range(0, len(a), step):
        total += np.float64(a[i]) + np.float64(b[i]) + np.float64(c[i])
    sink[0] = total


@jit
def _number(values, row):
    """Of a row, or the one of all rows."""
    return values[row if len(values) > 1 else 0]


@jit
def _alike(by_row, row, stop):
    """The first row behind ``row``, up to ``stop``, that is updated with other numbers."""
    group, step, scale, correction, correction2 = by_row
    if max(len(group), len(step), len(scale), len(correction), len(correction2)) == 1:
        return stop
    end = row + 1
    while (
        end < stop
        and _number(group, end) == _number(group, row)
        and _number(step, end) == _number(step, row)
        and (_number(scale, end) == 0) == (_number(scale, row) == 0)
        and _number(correction, end) == _number(correction, row)
        and _number(correction2, end) == _number(correction2, row)
    ):
        end += 1
    return end


@jit
def _tile_rows(sent):
    return max(1, _TILE // sent)


@jit
def _read(last_step, exp_avg, second, row, stop, places, steps, m, n, sink):
    """Last steps and moments at these places, which lie in rows ``row .. stop``."""
    dates, firsts, others = last_step[row:stop].reshape(-1), exp_avg[row:stop].reshape(-1), second[row:stop].reshape(-1)
    if _in_most_lines(len(places), len(dates), exp_avg):
        _read_lines(dates, firsts, others, sink)
    else:
        _prefetch_places(last_step.ctypes.data, last_step.itemsize, places)
        _prefetch_places(exp_avg.ctypes.data, exp_avg.itemsize, places)
        _prefetch_places(second.ctypes.data, second.itemsize, places)
    dates, firsts, others = last_step.reshape(-1), exp_avg.reshape(-1), second.reshape(-1)
    for j in range(len(places)):
        place = places[j]
        steps[j], m[j], n[j] = dates[place], firsts[place], others[place]


@jit
def _waits(now, steps, tau):
    """The steps since each entry's last update, raised to 1. Returns how many were exactly 1 before."""
    again = 0
    for j in range(len(tau)):
        wait = np.int32(now - steps[j])
        again += wait == 1
        tau[j] = max(wait, 1)
    return again


@jit
def _write(matrix, places, values):
    """Writes the entries at these places."""
    flat = matrix.reshape(-1)
    for j in range(len(places)):
        flat[places[j]] = values[j]


@jit
def _write_steps(last_step, places, now):
    """The step of the last update."""
    flat = last_step.reshape(-1)
    for j in range(len(places)):
        flat[places[j]] = now


@jit
def _find_rows(mask, sent, length, row, places):
    """Places of the masked entries of some rows; all of them where there is no mask."""
    if len(mask) > 0:
        _find(mask.reshape(-1), 0, sent, length, row * sent, places)
    else:
        for j in range(len(places)):
            places[j] = row * length + j


@jit
def _decay(tau, numbers, g):
    """``(1 - lr*wd)**tau`` of :func:`naive.adams_step`."""
    kept = abs(numbers[g, _KEEP])
    if tau != 1:
        kept = math.exp(tau * numbers[g, _LOG_KEEP])
    if numbers[g, _KEEP] < 0 and tau % 2 == 1:
        kept = -kept
    return kept


@jit
def _fill_table(numbers, g, table):
    """Place tau: :func:`_decay`."""
    for wait in range(1, len(table)):
        table[wait] = _decay(numbers.dtype.type(wait), numbers, g)


@jit
def _decays_and_blends(tau, numbers, g, table, decay, blend):
    """For every entry: its decay, and ``1 - bt`` of :func:`naive.adams_step`. Waits beyond the table are rare."""
    one, longest = tau.dtype.type(1), tau.dtype.type(len(table) - 1)
    for j in range(len(tau)):
        if tau[j] <= longest:
            decay[j] = table[np.uint64(tau[j])]
        else:
            decay[j] = _decay(tau[j], numbers, g)
    weight = numbers[g, _ONE_MINUS_BETA1]
    for j in range(len(tau)):
        blend[j] = (tau[j] * weight) / ((tau[j] - one) * weight + one)


@jit
def _move(rule, theta, total, mine, m, tau, decay, blend, n, numbers, corrections, masked):
    """Moves the entries of a tile, and their moments m and n."""
    (ranks, longest, largest), (c1, c2) = rule, corrections
    one, zero = theta.dtype.type(1), theta.dtype.type(0)
    lr, eps, beta2, one_minus_beta2 = numbers[_LR], numbers[_EPS], numbers[_BETA2], numbers[_ONE_MINUS_BETA2]
    for j in range(len(theta)):
        new = (one - blend[j]) * m[j] + blend[j] * (total[j] / tau[j])
        moved = tau[j] * new
        moved /= c1
        late = zero if tau[j] == one else one
        common = larger(abs(new / c1), abs(moved * longest)) * late
        squared = total[j] * total[j]
        squared = largest if squared > largest else squared
        if masked:
            known, shared = mine[j] * mine[j], squared if tau[j] == one else mine[j] * total[j]
            known, shared = largest if known > largest else known, clamp(shared, largest)
            weight = one_minus_beta2 / larger(tau[j], one_minus_beta2 * tau[j] * tau[j])
            v2 = weight * (shared - known / ranks) + n[j]
            least = squared * one_minus_beta2 * (one - late)
            v2 = least if v2 < least else v2
            seen = v2 / c2 * ranks * tau[j] * tau[j]
            unseen = squared - (largest if seen > largest else seen)
            v2 += (zero if unseen < zero else unseen) * late * one_minus_beta2
        else:
            v2 = n[j] * beta2 + squared / tau[j] * one_minus_beta2
        v2 = largest if v2 > largest else v2
        u = larger(v2 / c2, common * common)
        theta[j] = decay[j] * theta[j] - moved * lr / (math.sqrt(u) + eps)
        m[j], n[j] = new, v2


@jit
def update(theta, moments, last_step, mask, given, numbers, by_row, rule, first, last):
    """:func:`naive.update_adamw`; ``mask`` is ``[0, 0]`` where everything is sent.

    ``moments``: the first, and the second. ``given``: the mean, and the owner's own part of it, ``[R, q]``.
    ``by_row``: group, step, scale and both corrections, ``[R]`` or ``[1]`` each. ``rule``: N, ``1 / LONGEST_MOVE`` and
    the largest number of the dtype.
    """
    (exp_avg, second), (total, mine), sent, again = moments, given, theta.shape[1], 0
    room, steps = np.empty((5, max(_TILE, sent)), theta.dtype), np.empty(max(_TILE, sent), np.int32)
    all_places, length = np.empty(max(_TILE, sent), np.uint64), last_step.shape[1]
    table, in_table, sink = np.empty(_TABLE, theta.dtype), -1, np.empty(1)
    row = first
    while row < last:
        stop = _alike(by_row, row, min(last, row + _tile_rows(sent)))
        if _number(by_row[2], row) != 0:
            count, g, now = (stop - row) * sent, _number(by_row[0], row), _number(by_row[1], row)
            m, tau, n = room[0, :count], room[1, :count], room[2, :count]
            decay, blend, places = room[3, :count], room[4, :count], all_places[:count]
            _find_rows(mask, sent, length, row, places)
            _read(last_step, exp_avg, second, row, stop, places, steps[:count], m, n, sink)
            again += _waits(now, steps[:count], tau)
            if g != in_table:
                _fill_table(numbers, g, table)
                in_table = g
            _decays_and_blends(tau, numbers, g, table, decay, blend)
            old, gradients = theta[row:stop].reshape(-1), total[row:stop].reshape(-1)
            part = mine[row:stop].reshape(-1)
            corrections = _number(by_row[3], row), _number(by_row[4], row)
            _move(rule, old, gradients, part, m, tau, decay, blend, n, numbers[g], corrections, len(mask) > 0)
            _write(second, places, n)
            _write(exp_avg, places, m)
            _write_steps(last_step, places, now)
        row = stop
    return again


# ---------------------------------------------------------------------------------------- what arrives and what leaves


@jit
def mean(table, total, like_value, first, last):
    """``table``: the address of each rank's entries. They are summed in this order, a part at a time."""
    ranks = total.dtype.type(len(table))
    for start in range(first, last, _TILE):
        part = total[start : min(start + _TILE, last)]
        for rank in range(len(table)):
            given = array_at(table[rank], start, len(part), like_value)
            if rank == 0:
                for e in range(len(part)):
                    part[e] = widen(given[e])
            else:
                for e in range(len(part)):
                    part[e] += part.dtype.type(widen(given[e]))
        for e in range(len(part)):
            part[e] /= ranks


@jit
def changes(theta, before, out, first, last):
    """See :func:`naive.changes`."""
    theta, before, out = theta[first:last], before[first:last], out[first:last]
    for e in range(len(theta)):
        change = theta[e] - before[e]
        out[e] = narrow(-theta.dtype.type(0) if theta[e] == before[e] else change, out)
