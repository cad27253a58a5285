"""Loops that select entries of blocks, compiled by numba: see :mod:`.ranking`."""

import numpy as np

from lightning_scape.ops.cpu.numbers import jit
from lightning_scape.ops.cpu.ranking import LANES, make_room, rank_rows


@jit
def select(statistic, networks, chosen, first, last):
    """See :func:`naive.select`; ``networks`` of :func:`cpu_ranking.networks`."""
    room = make_room(statistic.shape[1], chosen.shape[1])
    found = room[2]
    for start in range(first, last, LANES):
        rows = min(LANES, last - start)
        rank_rows(statistic, start, rows, networks, room)
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
