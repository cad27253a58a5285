"""The loops of :mod:`lightning_scape.ops.cpu`, compiled by numba.

bf16 comes as uint16 and fp16 as int16, for NumPy computes with neither. Tensors of a list come as one table of their
addresses; an array named ``like_...`` has the dtype of what lies there, and may be empty.

Every loop takes a range ``first .. last`` of what it works through, so that several threads can share it. Products and
sums are never contracted: PyTorch's are not. Indices of inner loops start at 0: then numba needs no test for
negative ones, and LLVM vectorizes the loop.
"""

import math

import numpy as np

from lightning_scape.ops.cpu_numbers import array_at, clamp, jit, larger, narrow, overlap, widen

_TILE = 512
"""Entries that an update reads before it computes: their cache misses overlap."""
_TABLE = 256
"""Waits, in steps, whose powers are computed once."""
_LR, _BETA1, _LOG_BETA1, _ONE_MINUS_BETA1, _BETA2, _ONE_MINUS_BETA2, _EPS, _KEEP, _LOG_KEEP = range(9)
"""Columns of ``numbers``, in the order of :class:`naive.Hyper`."""


# ------------------------------------------------------------------------------------------------------ gradients


@jit
def fold(table, scale, bound, clip, like_residual, like_grad, first, last):
    """``table [n, 4]``: address of the residual, of the gradient; entries of all before, entries."""
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 2], table[i, 3])
        if start < stop:
            residual = array_at(table[i, 0], start, stop - start, like_residual)
            fold_part(residual, array_at(table[i, 1], start, stop - start, like_grad), scale, bound, clip)


@jit
def fold_part(residual, grad, scale, bound, clip):
    """``residual += scale * grad``."""
    for e in range(len(grad)):
        value = widen(grad[e])
        if clip:
            value = clamp(value, bound)
        residual[e] += scale * residual.dtype.type(value)


@jit
def accumulate_squares(table, scales, keeps, weights, bound, clip, largest, like_moment, like_grad, first, last):
    """``table`` as in :func:`fold`, with moments; an address of 0 is a gradient of zeros. Numbers are by piece."""
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 2], table[i, 3])
        if start < stop:
            moment = array_at(table[i, 0], start, stop - start, like_moment)
            if table[i, 1] == 0:
                fade_part(moment, keeps[i], largest)
            else:
                grad = array_at(table[i, 1], start, stop - start, like_grad)
                square_part(moment, grad, scales[i], keeps[i], weights[i], bound, clip, largest)


@jit
def square_part(moment, grad, scale, keep, weight, bound, clip, largest):
    """``moment = keep * moment + weight * (scale * grad)**2``."""
    for e in range(len(grad)):
        value = widen(grad[e])
        if clip:
            value = clamp(value, bound)
        own = scale * moment.dtype.type(value)
        value = moment[e] * keep + weight * (own * own)
        moment[e] = largest if value > largest else value


@jit
def fold_and_square_part(residual, moment, grad, scales, keep, weight, bound, clip, largest):
    """:func:`fold_part` and :func:`square_part` in one pass over the gradient; ``scales`` of either's dtype."""
    to_residual, to_moment = scales
    for e in range(len(grad)):
        value = widen(grad[e])
        if clip:
            value = clamp(value, bound)
        residual[e] += to_residual * residual.dtype.type(value)
        own = to_moment * moment.dtype.type(value)
        value = moment[e] * keep + weight * (own * own)
        moment[e] = largest if value > largest else value


@jit
def fade_part(moment, keep, largest):
    """The same for a gradient of zeros."""
    for e in range(len(moment)):
        value = moment[e] * keep
        moment[e] = largest if value > largest else value


@jit
def accumulate_exp_avg(exp_avg, exp_avg_sum, grad, beta1, weight, bound, clip, first, last):
    """See :func:`naive.accumulate_exp_avg`; ``weight`` is ``(1 - beta1) * scale``."""
    exp_avg, exp_avg_sum, grad = exp_avg[first:last], exp_avg_sum[first:last], grad[first:last]
    for e in range(len(exp_avg)):
        value = widen(grad[e])
        if clip:
            value = clamp(value, bound)
        exp_avg[e] = exp_avg[e] * beta1 + weight * exp_avg.dtype.type(value)
        exp_avg_sum[e] += exp_avg[e]


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
        columns[j] = np.float32(widen(grad[j])) * signs[j]
    start = width
    while start + 4 * width <= len(grad):
        a, b = grad[start : start + width], grad[start + width : start + 2 * width]
        c, d = grad[start + 2 * width : start + 3 * width], grad[start + 3 * width : start + 4 * width]
        s, t = signs[start : start + width], signs[start + width : start + 2 * width]
        u, v = signs[start + 2 * width : start + 3 * width], signs[start + 3 * width : start + 4 * width]
        for j in range(width):
            one = np.float32(widen(a[j])) * s[j] + np.float32(widen(b[j])) * t[j]
            two = np.float32(widen(c[j])) * u[j] + np.float32(widen(d[j])) * v[j]
            columns[j] += one + two
        start += 4 * width
    while start < len(grad):
        a, s = grad[start : start + width], signs[start : start + width]
        for j in range(len(a)):
            columns[j] += np.float32(widen(a[j])) * s[j]
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
            places = mask[row]
            for c in range(len(out)):
                value = there[places[c]]
                out[c] = narrow(clamp(value, limit), values)
                there[places[c]] = value - widen(out[c])


@jit
def gather_params(table, mask, out, length, like_flat, first, last):
    """``table [n, 4]``: address of the piece's first entry, chosen entries of all before, chosen entries, first row."""
    sent, chosen, taken, places = mask.shape[1], mask.reshape(-1), out.reshape(-1), np.empty(_TILE, np.uint64)
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 1], table[i, 2])
        flat, before = array_at(table[i, 0], 0, 0, like_flat), table[i, 3] * sent
        for begin in range(start, stop, _TILE):
            count = min(_TILE, stop - begin)
            _find(chosen, before, sent, length, begin, places[:count])
            values = taken[before + begin : before + begin + count]
            for j in range(count):
                values[j] = narrow(widen(flat[places[j]]), out)


@jit
def scatter_params(table, mask, values, add, length, like_flat, first, last):
    """The reverse. What is added is first rounded to the parameter's dtype."""
    sent, chosen, arrived, places = mask.shape[1], mask.reshape(-1), values.reshape(-1), np.empty(_TILE, np.uint64)
    for i in range(len(table)):
        start, stop = overlap(first, last, table[i, 1], table[i, 2])
        flat, before = array_at(table[i, 0], 0, 0, like_flat), table[i, 3] * sent
        for begin in range(start, stop, _TILE):
            count = min(_TILE, stop - begin)
            _find(chosen, before, sent, length, begin, places[:count])
            given = arrived[before + begin : before + begin + count]
            for j in range(count):
                value = narrow(widen(given[j]), like_flat)
                if add:
                    value = narrow(widen(flat[places[j]]) + widen(value), like_flat)
                flat[places[j]] = value


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
def _read_waits(last_step, places, now, steps, tau):
    """The steps since each entry's last visit, raised to 1. Returns how many were exactly 1 before."""
    _read(last_step, places, steps)
    again = 0
    for j in range(len(tau)):
        wait = np.int32(now - steps[j])
        again += wait == 1
        tau[j] = max(wait, 1)
    return again


@jit
def _read(matrix, places, out):
    """The entries at these places."""
    flat = matrix.reshape(-1)
    for j in range(len(places)):
        out[j] = flat[places[j]]


@jit
def _write(matrix, places, values):
    """The reverse of :func:`_read`."""
    flat = matrix.reshape(-1)
    for j in range(len(places)):
        flat[places[j]] = values[j]


@jit
def _write_steps(last_step, places, now):
    """The step of the last visit."""
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
def _decay_and_blend(tau, numbers, g):
    """``(1 - lr*wd)**tau`` and ``1 - b1**tau`` of :func:`naive.adams_step`."""
    kept = abs(numbers[g, _KEEP])
    if tau != 1:
        kept = math.exp(tau * numbers[g, _LOG_KEEP])
    if numbers[g, _KEEP] < 0 and tau % 2 == 1:
        kept = -kept
    return kept, -math.expm1(tau * numbers[g, _LOG_BETA1])


@jit
def _fill_table(numbers, g, table):
    """Column tau: :func:`_decay_and_blend`."""
    for wait in range(1, table.shape[1]):
        table[0, wait], table[1, wait] = _decay_and_blend(numbers.dtype.type(wait), numbers, g)


@jit
def _decays_and_blends(tau, numbers, g, implicit, table, decay, blend):
    """For every entry; waits beyond the table are rare."""
    one, longest = tau.dtype.type(1), tau.dtype.type(table.shape[1] - 1)
    for j in range(len(tau)):
        if tau[j] <= longest:
            wait = np.uint64(tau[j])
            decay[j], blend[j] = table[0, wait], table[1, wait]
        else:
            decay[j], blend[j] = _decay_and_blend(tau[j], numbers, g)
    if implicit:
        weight = numbers[g, _ONE_MINUS_BETA1]
        for j in range(len(tau)):
            blend[j] = (tau[j] * weight) / ((tau[j] - one) * weight + one)


@jit
def _first_moment(m, tau, a, blend, one, beta1, one_minus_beta1, implicit):
    """``m'`` and ``S`` of :func:`naive.adams_step`; ``one`` is 1 in the dtype of the rest."""
    mean = a / tau
    new = (one - blend) * m + blend * mean
    if implicit:
        return new, tau * new
    first = one if tau == one else one - one
    moved = tau * mean + (m - mean) * (blend * beta1 / one_minus_beta1)
    return new, moved * (one - first) + new * first


@jit
def update_adams(
    theta, exp_avg, last_step, local_exp_avg_sq, mask, total, numbers, by_row, floor, implicit, first, last
):
    """:func:`naive.update_adams`; ``local_exp_avg_sq`` may be ``[0, 0]``, all else as in :func:`update_adamw`."""
    sent, again, one, zero = theta.shape[1], 0, theta.dtype.type(1), theta.dtype.type(0)
    room, steps = np.empty((5, max(_TILE, sent)), theta.dtype), np.empty(max(_TILE, sent), np.int32)
    all_places, length = np.empty(max(_TILE, sent), np.uint64), last_step.shape[1]
    table, in_table = np.empty((2, _TABLE), theta.dtype), -1
    row = first
    while row < last:
        stop = _alike(by_row, row, min(last, row + _tile_rows(sent)))
        if _number(by_row[2], row) != 0:
            count, g = (stop - row) * sent, _number(by_row[0], row)
            now, c1 = _number(by_row[1], row), _number(by_row[3], row)
            m, tau, decay, blend, n = (
                room[0, :count],
                room[1, :count],
                room[2, :count],
                room[3, :count],
                room[4, :count],
            )
            places = all_places[:count]
            _find_rows(mask, sent, length, row, places)
            again += _read_waits(last_step, places, now, steps[:count], tau)
            _read(exp_avg, places, m)
            if len(local_exp_avg_sq) > 0:
                _read(local_exp_avg_sq, places, n)
            if g != in_table:
                _fill_table(numbers, g, table)
                in_table = g
            _decays_and_blends(tau, numbers, g, implicit, table, decay, blend)
            lr, eps, beta1, beta2 = numbers[g, _LR], numbers[g, _EPS], numbers[g, _BETA1], numbers[g, _BETA2]
            one_minus_beta1, one_minus_beta2 = numbers[g, _ONE_MINUS_BETA1], numbers[g, _ONE_MINUS_BETA2]
            steady = one_minus_beta1 / (one + beta1)
            old, gradients = theta[row:stop].reshape(-1), total[row:stop].reshape(-1)
            for j in range(count):
                new, moved = _first_moment(m[j], tau[j], gradients[j], blend[j], one, beta1, one_minus_beta1, implicit)
                corrected = m[j] / c1
                m2, g2 = corrected * corrected, gradients[j] * gradients[j] / tau[j]
                if len(local_exp_avg_sq) > 0:
                    known = (n[j] * (zero if tau[j] == one else one)) * floor
                    g2, m2 = larger(g2, known), larger(m2, known * steady)
                v = m2 * beta2 + g2 * one_minus_beta2
                old[j] = decay[j] * old[j] - moved / c1 * lr / (math.sqrt(v) + eps)
                m[j] = new
            _write(exp_avg, places, m)
            _write_steps(last_step, places, now)
        row = stop
    return again


@jit
def update_adamw(theta, moments, last_step, mask, total, numbers, by_row, rule, implicit, first, last):
    """:func:`naive.update_adamw`; ``mask`` is ``[0, 0]`` where everything is sent.

    ``by_row``: group, step, scale and both corrections, ``[R]`` or ``[1]`` each. ``rule``: N, ``1 / LONGEST_MOVE``, and
    the largest number of the dtype.
    """
    (exp_avg, exp_avg_sq), (ranks, longest, largest) = moments, rule
    sent, again, one, zero = theta.shape[1], 0, theta.dtype.type(1), theta.dtype.type(0)
    room, steps = np.empty((5, max(_TILE, sent)), theta.dtype), np.empty(max(_TILE, sent), np.int32)
    all_places, length = np.empty(max(_TILE, sent), np.uint64), last_step.shape[1]
    table, in_table = np.empty((2, _TABLE), theta.dtype), -1
    row = first
    while row < last:
        stop = _alike(by_row, row, min(last, row + _tile_rows(sent)))
        if _number(by_row[2], row) != 0:
            count, g, now = (stop - row) * sent, _number(by_row[0], row), _number(by_row[1], row)
            c1, c2 = _number(by_row[3], row), _number(by_row[4], row)
            m, tau, decay, blend, v = (
                room[0, :count],
                room[1, :count],
                room[2, :count],
                room[3, :count],
                room[4, :count],
            )
            places = all_places[:count]
            _find_rows(mask, sent, length, row, places)
            again += _read_waits(last_step, places, now, steps[:count], tau)
            _read(exp_avg, places, m)
            _read(exp_avg_sq, places, v)
            if g != in_table:
                _fill_table(numbers, g, table)
                in_table = g
            _decays_and_blends(tau, numbers, g, implicit, table, decay, blend)
            lr, eps, beta1, beta2 = numbers[g, _LR], numbers[g, _EPS], numbers[g, _BETA1], numbers[g, _BETA2]
            one_minus_beta1, one_minus_beta2 = numbers[g, _ONE_MINUS_BETA1], numbers[g, _ONE_MINUS_BETA2]
            old, gradients = theta[row:stop].reshape(-1), total[row:stop].reshape(-1)
            for j in range(count):
                new, moved = _first_moment(m[j], tau[j], gradients[j], blend[j], one, beta1, one_minus_beta1, implicit)
                moved /= c1
                common = larger(abs(new / c1), abs(moved * longest))
                squared = gradients[j] * gradients[j]
                if len(mask) == 0:
                    v2 = v[j] * beta2 + squared / tau[j] * one_minus_beta2
                    common *= zero if tau[j] == one else one
                else:
                    seen = v[j] / c2 * ranks * tau[j] * tau[j]
                    unseen = squared - (largest if seen > largest else seen)
                    v2 = (zero if unseen < zero else unseen) * one_minus_beta2 + v[j]
                v2 = largest if v2 > largest else v2
                u = larger(v2 / c2, common * common)
                old[j] = decay[j] * old[j] - moved * lr / (math.sqrt(u) + eps)
                m[j], v[j] = new, v2
            _write(exp_avg, places, m)
            _write(exp_avg_sq, places, v)
            _write_steps(last_step, places, now)
        row = stop
    return again
