"""Loops that select entries of blocks, compiled by numba: see :mod:`.ranking`."""

import numpy as np

from lightning_scape.ops.cpu.numbers import jit, prefetch
from lightning_scape.ops.cpu.ranking import LANES, MAGNITUDE, NOTHING, TILE, key_of, make_room, rank_rows, take_rows

_AHEAD = 8
"""Rows between the one that is ranked and the one that memory delivers meanwhile."""


@jit
def select(statistic, networks, chosen, first, last):
    """See :func:`naive.select`; ``networks`` of :func:`cpu_ranking.networks`."""
    room = make_room(statistic.shape[1], chosen.shape[1])
    for start in range(first, last, LANES):
        rows = min(LANES, last - start)
        take_rows(statistic, start, (0, rows), networks, room, NOTHING)
        rank_rows(statistic, start, rows, networks, room)
        write_positions(room[2], chosen, start, rows)


@jit
def write_positions(found, chosen, start, rows):
    """The first of the positions found in each row."""
    for row in range(rows):
        for turn in range(chosen.shape[1]):
            chosen[start + row, turn] = found[row, turn]


@jit
def pack_mask(mask, bits, first, last):
    """See :func:`naive.pack_mask`."""
    for row in range(first, last):
        chosen, out = mask[row], bits[row]
        for w in range(len(out)):
            out[w] = 0
        for turn in range(len(chosen)):
            place = np.uint64(chosen[turn])
            out[place >> np.uint64(3)] |= np.uint8(1 << (place & np.uint64(7)))


@jit
def unpack_mask(bits, chosen, table, counts, first, last):
    """See :func:`naive.unpack_mask`; ``table [256, 8]``: which bits a byte has, and ``counts``: how many."""
    room = np.empty(8 * bits.shape[1] + 8, chosen.dtype)
    for row in range(first, last):
        given, out, found = bits[row], chosen[row], np.uint64(0)
        for w in range(len(given)):
            here, places = table[given[w]], room[found : found + np.uint64(8)]
            for i in range(8):  # those that are too many are written over, without a branch
                places[i] = here[i] + chosen.dtype.type(8 * w)
            found += counts[given[w]]
        for turn in range(len(out)):
            out[turn] = room[turn]


@jit
def propose(residual, networks, proposed, proposals, first, last):
    """See :func:`naive.propose`; ``networks`` as in :func:`select`."""
    room = make_room(residual.shape[1], proposed)
    for start in range(first, last, LANES):
        rows = min(LANES, last - start)
        take_rows(residual, start, (0, rows), networks, room, NOTHING)
        rank_rows(residual, start, rows, networks, room)
        write_proposals(residual, room[2], proposed, proposals, start, rows)


@jit
def write_proposals(residual, found, proposed, proposals, start, rows):
    """Proposals of the first ``proposed`` positions found in each row: see :func:`naive.propose`."""
    wide = residual.shape[1] > 256
    codes = 2 * proposed if wide else proposed
    for row in range(rows):
        values, chosen, proposal = residual[start + row], found[row], proposals[start + row]
        largest = np.float32(values[chosen[0]]).view(np.int32) & MAGNITUDE
        above = np.int32((largest >> 23) + 1)
        exponent = above if above < 254 else np.int32(254)
        unit = np.float32(127) / np.int32(exponent << 23).view(np.float32)
        for turn in range(proposed):
            position = chosen[turn]
            if wide:
                proposal[2 * turn], proposal[2 * turn + 1] = position & 255, position >> 8
            else:
                proposal[turn] = position
            proposal[codes + turn] = np.uint8(np.int8(np.rint(values[position] * unit)))
        proposal[codes + proposed] = exponent


@jit
def _add_proposals(totals, proposals, start, rows, owner, proposed):
    """See :func:`naive.merge`; in the order of ranks."""
    wide = totals.shape[1] > 256
    codes = 2 * proposed if wide else proposed
    for rank in range(len(proposals)):
        if rank == owner:
            continue
        for row in range(rows[0], rows[1]):
            total, proposal = totals[row], proposals[rank, start + row]
            unit = np.int32(np.int32(proposal[codes + proposed]) << 23).view(np.float32) / np.float32(127)
            for turn in range(proposed):
                position = np.int64(proposal[turn])
                if wide:
                    position = np.int64(proposal[2 * turn]) + 256 * np.int64(proposal[2 * turn + 1])
                total[position] += np.float32(np.int8(proposal[codes + turn])) * unit


@jit
def _merge_by_maximum(residual, proposals, owner, proposed, chosen, room, first, last):
    """For a few chosen: sums are made only where entries are proposed. One function, as `_rank_by_maximum` is."""
    length, keys, lows = residual.shape[1], room[0][0], room[3]
    high, wide = np.int32(MAGNITUDE & ~lows[0]), length > 256
    codes = 2 * proposed if wide else proposed
    totals, places = np.empty(length, np.float32), np.empty((len(proposals), proposed), np.int64)
    address, size = residual.ctypes.data, length * residual.itemsize
    for row in range(first, last):
        prefetch(address + (row + _AHEAD) * size, size)
        values, found = residual[row], chosen[row]
        for i in range(length):
            keys[i] = key_of(values[i], high, lows[i])
        for rank in range(len(proposals)):
            for turn in range(proposed if rank != owner else 0):
                position = np.int64(proposals[rank, row, 2 * turn if wide else turn])
                if wide:
                    position += 256 * np.int64(proposals[rank, row, 2 * turn + 1])
                places[rank, turn] = position
                totals[position] = values[position]
        for rank in range(len(proposals)):  # in their order
            unit = np.int32(np.int32(proposals[rank, row, codes + proposed]) << 23).view(np.float32) / np.float32(127)
            for turn in range(proposed if rank != owner else 0):
                position = places[rank, turn]
                totals[position] += np.float32(np.int8(proposals[rank, row, codes + turn])) * unit
                keys[position] = key_of(totals[position], high, lows[position])
        for turn in range(len(found)):
            best = np.int32(-1)
            for i in range(length):
                best = max(best, keys[i])
            position = lows[0] - (best & lows[0])
            found[turn] = position
            keys[position] = -1


@jit
def merge(residual, proposals, owner, networks, proposed, chosen, first, last):
    """See :func:`naive.merge`; ``networks`` as in :func:`select`."""
    length = residual.shape[1]
    totals, room = np.empty((LANES, length), np.float32), make_room(length, chosen.shape[1])
    if len(networks[0]) == 0:
        _merge_by_maximum(residual, proposals, owner, proposed, chosen, room, first, last)
        return
    for start in range(first, last, LANES):
        rows = min(LANES, last - start)
        for above in range(0, rows, TILE):
            below = min(above + TILE, rows)
            for row in range(above, below):
                values, total = residual[start + row], totals[row]
                for i in range(len(total)):
                    total[i] = values[i]
            _add_proposals(totals, proposals, start, (above, below), owner, proposed)
            take_rows(totals, 0, (above, below), networks, room, NOTHING)
        rank_rows(totals, 0, rows, networks, room)
        write_positions(room[2], chosen, start, rows)
