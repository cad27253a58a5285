"""The loops of :mod:`..cpu`, compiled by numba.

bf16 comes as uint16 and fp16 as int16, for NumPy computes with neither. Tensors of a list come as one table of their
addresses; an array named ``like_...`` has the dtype of what lies there, and may be empty.

Every loop takes a range ``first .. last`` of what it works through, so that several threads can share it. Products and
sums are never contracted: PyTorch's are not. Indices of inner loops start at 0: then numba needs no test for
negative ones, and LLVM vectorizes the loop.
"""

import numpy as np

from lightning_scape.ops.cpu.numbers import array_at, clamp, jit, narrow, overlap, prefetch_line, widen

_AHEAD = 8
"""Rows between the one that is compacted and the one that memory delivers meanwhile."""

# ------------------------------------------------------------------------------------------------------ gradients


@jit
def fold_part(residual, grad, scale):
    """``residual += scale * grad``."""
    for e in range(len(grad)):
        residual[e] += scale * residual.dtype.type(widen(grad[e]))


@jit
def fold_and_square_part(residual, moment, grad, scales, keep, weight, largest):
    """The same, and ``moment = keep * moment + weight * (scale * grad)**2``; ``scales`` of either's dtype."""
    to_residual, to_moment = scales
    for e in range(len(grad)):
        value = widen(grad[e])
        residual[e] += to_residual * residual.dtype.type(value)
        own = to_moment * moment.dtype.type(value)
        value = moment[e] * keep + weight * (own * own)
        moment[e] = largest if value > largest else value


@jit
def fade_part(moment, keep, largest):
    """The moment's part for a gradient of zeros."""
    for e in range(len(moment)):
        value = moment[e] * keep
        moment[e] = largest if value > largest else value


@jit(fastmath={"reassoc", "nsz"})
def squares(table, partials, chunk, like_grad, first, last):
    """``table [n, 3]``: address; chunks of all before, entries. One sum for each chunk; its order never changes.

    A chunk is read in four places at once: memory delivers that a third faster than one stream.
    """
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 1], -(-table[i, 2] // chunk))
        for c in range(start, stop):
            grad = array_at(table[i, 0], c * chunk, min(chunk, table[i, 2] - c * chunk), like_grad)
            total, quarter = widen(grad.dtype.type(0)), len(grad) // 4
            one, two = grad[:quarter], grad[quarter : 2 * quarter]
            three, four = grad[2 * quarter : 3 * quarter], grad[3 * quarter : 4 * quarter]
            for e in range(quarter):
                w, x, y, z = widen(one[e]), widen(two[e]), widen(three[e]), widen(four[e])
                total += w * w + x * x + y * y + z * z
            for e in range(4 * quarter, len(grad)):
                value = widen(grad[e])
                total += value * value
            partials[table[i, 1] + c] = total


@jit
def sketch(table, signs, sums, together, like_grad, first, last):
    """``table [chunks, 6]``: address, entries, width, rotation, offset, sign. ``sums [parts, W]``, each of so many."""
    buckets = sums.shape[1]
    columns = np.empty(buckets, np.float32)
    for part in range(first, last):
        for i in range(part * together, min((part + 1) * together, len(table))):
            count, width, rotation, sign = table[i, 1], table[i, 2], table[i, 3], np.float32(table[i, 5])
            grad, own_signs = array_at(table[i, 0], 0, count, like_grad), signs[table[i, 4] : table[i, 4] + count]
            used = min(count, width)
            _sum_columns(grad, own_signs, columns, width, used)
            head = min(used, buckets - rotation)
            target = sums[part, rotation : rotation + head]
            for j in range(head):
                target[j] += sign * columns[j]
            target, rest = sums[part, : used - head], columns[head:used]
            for j in range(used - head):
                target[j] += sign * rest[j]


@jit
def _sum_columns(grad, signs, columns, width, used):
    """Signed sums over rows of ``width`` entries; several rows at a time, for a sum is read and written each time."""
    for j in range(used):
        columns[j] = widen(grad[j]) * signs[j]
    start = width
    while start + 4 * width <= len(grad):
        a, b = grad[start : start + width], grad[start + width : start + 2 * width]
        c, d = grad[start + 2 * width : start + 3 * width], grad[start + 3 * width : start + 4 * width]
        s, t = signs[start : start + width], signs[start + width : start + 2 * width]
        u, v = signs[start + 2 * width : start + 3 * width], signs[start + 3 * width : start + 4 * width]
        for j in range(width):
            one = widen(a[j]) * s[j] + widen(b[j]) * t[j]
            two = widen(c[j]) * u[j] + widen(d[j]) * v[j]
            columns[j] += one + two
        start += 4 * width
    while start < len(grad):
        a, s = grad[start : start + width], signs[start : start + width]
        for j in range(len(a)):
            columns[j] += widen(a[j]) * s[j]
        start += width


# ------------------------------------------------------------------------------------------------ blocks and shards


@jit
def compact(residual, mask, values, scale, limit, first, last):
    """See :func:`naive.compact`; ``mask`` is ``[0, 0]`` where all is sent, ``scale`` is ``[R]`` or ``[1]``."""
    for row in range(first, last):
        there, out = residual[row], values[row]
        if scale[row if len(scale) > 1 else 0] == 0:
            out[:] = 0
        elif len(mask) == 0:
            for c in range(len(out)):
                out[c] = narrow(clamp(there[c], limit), values)
                there[c] -= widen(out[c])
        else:
            places, ahead = mask[row], mask[min(row + _AHEAD, len(mask) - 1)]
            next_row = residual.ctypes.data + (row + _AHEAD) * residual.shape[1] * residual.itemsize
            for c in range(len(out)):
                prefetch_line(next_row + ahead[c] * residual.itemsize)
                value = there[places[c]]
                out[c] = narrow(clamp(value, limit), values)
                there[places[c]] = value - widen(out[c])
