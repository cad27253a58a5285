"""The loops of :mod:`..cpu`, compiled by numba when they are first called for a dtype, and kept on disk.

They stand in one file, for numba looks for changes in the file of a loop only. bf16 comes as uint16, for NumPy does not
compute with it. Tensors of a list come as one table of their addresses; an array named ``like_...`` has the dtype of
what lies there, and may be empty. An optional matrix is ``[0, 0]`` for none; numbers of rows are ``[R]``, or ``[1]``
for all of them.

Every loop takes a range ``first .. last`` of what it works through, so that several threads can share it. Products and
sums are never contracted: PyTorch's are not. Indices of inner loops start at 0: then numba needs no test for
negative ones, and LLVM vectorizes the loop.
"""

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from lightning_scape.ops.naive.wire import GROUP, LEAST_SCALE, LEVELS

if numba.config.DISABLE_JIT:
    raise ImportError("the environment variable NUMBA_DISABLE_JIT must not be set")

_LEAST_SCALE, _LEVELS = np.float32(LEAST_SCALE), np.int32(LEVELS)
_MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 but its sign."""
_PASSES = 5
"""Up to so many entries of a block are selected by repeated maximum."""
_TILE = 512
"""Entries that an update reads before it computes: their cache misses overlap."""
_WAITS = 256
"""Waits, in steps, whose powers are computed once."""
_GROUP, _STEP, _TAKES_PART, _CORRECTION, _CORRECTION2 = range(5)
"""Columns of ``by_row``, in the order of :meth:`naive.RowNumbers.matrices`."""
_LR, _ONE_MINUS_BETA1, _BETA2, _ONE_MINUS_BETA2, _EPS, _KEEP, _LOG_KEEP = range(7)
"""Columns of ``numbers``, in the order of :class:`naive.Hyper`."""


def jit(function):
    """Compiles on first use, keeps the code on disk, and releases Python's lock while it runs."""
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder to write to: compiled anew by each process
        return numba.njit(function, **options)


@intrinsic
def _pointer(typingctx, address, like):
    """An address, as a pointer to entries like those of an array."""
    pointer = types.CPointer(like.dtype)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@jit
def _array_at(address, start, count, like):
    """``count`` entries that begin ``start`` entries behind an address."""
    return numba.carray(_pointer(address + start * like.itemsize, like), count)


def _widen(raw):
    """What lies in memory, in fp32."""


@overload(_widen)
def _overload_widen(raw):
    if raw == types.uint16:
        return lambda raw: np.uint32(np.uint32(raw) << 16).view(np.float32)
    return lambda raw: raw


def _narrow(value, like):
    """The reverse, to the nearest, ties to even."""


@overload(_narrow)
def _overload_narrow(value, like):
    return _narrow_to_bfloat if like.dtype == types.uint16 else lambda value, like: like.dtype.type(value)


def _narrow_to_bfloat(value, like):
    single = np.float32(value)
    bits = single.view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.uint16(rounded if single == single else 0x7FC0)


@jit
def _clamp(value, limit):
    """Keeps NaN, as torch's clamp does."""
    value = limit if value > limit else value
    return -limit if value < -limit else value


@jit
def _larger(a, b):
    """NaN if either is, as torch's maximum."""
    return a if a > b or a != a else b


@jit
def _overlap(first, last, before, count):
    """The part of ``first .. last`` in the ``count`` entries that come after ``before`` others, counted in these."""
    return max(first - before, 0), min(last - before, count)


@jit
def _number(values, row):
    """Of a row, or the one of all rows."""
    return values[row if len(values) > 1 else 0]


# ------------------------------------------------------------------------------------------------- ranking, the sketch


@jit
def select(statistic, chosen, first, last):
    """See :func:`naive.select`. Few entries are found by repeated maximum; for many, the least key is found bit by bit.

    Keys have 32 bits at each step: numba would make them 64, of which a register holds half as many.
    """
    length, sent = statistic.shape[1], chosen.shape[1]
    low = np.int32(0)
    while low < length - 1:
        low = np.int32(2 * low + 1)
    high, keys, best = np.int32(_MAGNITUDE & ~low), np.empty(length, np.int32), np.empty(length + 1, np.int32)
    for row in range(first, last):
        there, out, largest = statistic[row], chosen[row], np.int32(-1)
        for i in range(length):
            keys[i] = np.int32((np.float32(there[i]).view(np.int32) & high) | np.int32(low - np.int32(i)))
            largest = max(largest, keys[i])
        if sent <= _PASSES:
            for turn in range(sent):
                out[turn] = low - (largest & low)
                keys[low - (largest & low)] = -1
                largest = np.int32(-1)
                for i in range(length if turn + 1 < sent else 0):
                    largest = max(largest, keys[i])
            continue
        least = _least(keys, sent, largest)
        found = np.uint64(0)
        for i in range(length):  # without a branch
            best[found] = keys[i]
            found += np.uint64(keys[i] >= least)
        for i in range(sent):  # each goes where so many are larger
            place = np.int32(0)
            for j in range(sent):
                place = np.int32(place + np.int32(best[j] > best[i]))
            out[np.uint64(place)] = low - (best[i] & low)


@jit
def _least(keys, sent, largest):
    """A number that exactly the ``sent`` largest keys, no two of them equal, reach. Mostly it is within 4 octaves."""
    least, bit = np.int32(0), np.int32(1 << 30)
    below = np.int32(max(0, largest - (1 << 25)))
    if _reaching(keys, below) >= sent:
        least, bit = below, np.int32(1 << 25)
    while bit > 0:
        trial = np.int32(least + bit)
        count = _reaching(keys, trial)
        if count >= sent:
            least = trial
            if count == sent:
                break
        bit >>= 1
    return least


@jit
def _reaching(keys, least):
    count = np.int32(0)
    for i in range(len(keys)):
        count = np.int32(count + np.int32(keys[i] >= least))
    return count


@jit
def sketch(table, signs, sums, together, like_grad, first, last):
    """``table [chunks, 6]``: address, entries, width, rotation, offset, sign. ``sums [parts, W]``, each of so many."""
    buckets = sums.shape[1]
    columns = np.empty(buckets, np.float32)
    for part in range(first, last):
        for i in range(part * together, min((part + 1) * together, len(table))):
            count, width, rotation, sign = table[i, 1], table[i, 2], table[i, 3], np.float32(table[i, 5])
            grad, own_signs = _array_at(table[i, 0], 0, count, like_grad), signs[table[i, 4] : table[i, 4] + count]
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
        columns[j] = _widen(grad[j]) * signs[j]
    start = width
    while start + 4 * width <= len(grad):
        g, t = grad[start : start + 4 * width].reshape(4, width), signs[start : start + 4 * width].reshape(4, width)
        for j in range(width):
            one = _widen(g[0, j]) * t[0, j] + _widen(g[1, j]) * t[1, j]
            two = _widen(g[2, j]) * t[2, j] + _widen(g[3, j]) * t[3, j]
            columns[j] += one + two
        start += 4 * width
    while start < len(grad):
        a, s = grad[start : start + width], signs[start : start + width]
        for j in range(len(a)):
            columns[j] += _widen(a[j]) * s[j]
        start += width


# --------------------------------------------------------------------------------------------------------- the residual


@jit
def fold(table, shares, residual, moments, scale, like_grad, first, last):
    """The first of :func:`naive.sweep`'s operations, for pieces whose gradients have one dtype, or none.

    ``table [n, 5]``: address of the gradient (0: none), first row, entries of all before, own, and place in ``shares
    [places, 2]``: what is kept of the second moment, and what is added of the square.
    """
    flat, all_moments, largest = residual.reshape(-1), moments.reshape(-1), np.float32(np.finfo(np.float32).max)
    for i in range(len(table)):
        address, begin = table[i, 0], table[i, 1] * residual.shape[1]
        start, stop = _overlap(first, last, table[i, 2], table[i, 3])
        factor = _number(scale, table[i, 1])
        if start >= stop or factor == 0:
            continue
        grad, here = _array_at(address, start, stop - start, like_grad), flat[begin + start : begin + stop]
        if address != 0:
            for e in range(len(grad)):
                here[e] += factor * _widen(grad[e])
        if len(moments) > 0:
            keep, weight = shares[table[i, 4], 0], shares[table[i, 4], 1]
            moment = all_moments[begin + start : begin + stop]
            if address != 0:
                for e in range(len(grad)):
                    own = factor * _widen(grad[e])
                    value = moment[e] * keep + weight * (own * own)
                    moment[e] = largest if value > largest else value
            else:
                for e in range(len(moment)):
                    moment[e] *= keep


@jit
def compact(residual, mask, values, scale, first, last):
    """See :func:`naive.compact`."""
    sent, flat, out = values.shape[1], residual.reshape(-1), values.reshape(-1)
    all_places, rows = np.empty(max(sent, _TILE), np.uint64), max(1, _TILE // sent)
    for row in range(first, last, rows):
        count = (min(row + rows, last) - row) * sent
        places, here = all_places[:count], out[row * sent : row * sent + count]
        _find(residual, mask, sent, residual.shape[1], row * sent, places)
        for c in range(count):
            value = flat[places[c]]
            applied = scale[0] != 0 if len(scale) == 1 else scale[row + c // sent] != 0
            here[c] = value if applied else np.float32(0)
            flat[places[c]] = value - here[c]


@jit
def _find(matrix, mask, sent, length, begin, places):
    """Places of masked entries in a matrix with rows of ``length``, from the ``begin``-th on; all without a mask.

    Places come before the entries are read, which are on their way from memory then: the core waits for many at once.
    """
    row, column, done, chosen = begin // sent, begin % sent, 0, mask.reshape(-1)
    while done < len(places):
        count = min(sent - column, len(places) - done)
        out, start = places[done : done + count], np.uint64(row * length)
        if len(chosen) > 0:
            there = chosen[begin + done : begin + done + count]
            for j in range(count):
                out[j] = start + np.uint64(there[j])
        else:
            for j in range(count):
                out[j] = start + np.uint64(column + j)
        row, column, done = row + 1, 0, done + count
    _ask_for(matrix.ctypes.data, matrix.itemsize, places)


@jit
def _ask_for(address, size, places):
    """Asks memory for the entries at these places, of so many bytes each."""
    for j in range(len(places)):
        _prefetch(address + np.int64(places[j]) * size)


@intrinsic
def _prefetch(typingctx, address):
    """Asks for the cache line at an address, into the second cache: more lines can be under way to it."""

    def generate(context, builder, signature, args):
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        signature_of_llvm = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], signature_of_llvm)
        to_read, second_cache, data = number(0), number(2), number(1)
        builder.call(function, [builder.inttoptr(args[0], pointer), to_read, second_cache, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# -------------------------------------------------------------------------------------------------- values in few bits


@jit
def quantize_with_error(error, mask, theta, before, message, scale, first, last):
    """See :func:`naive.quantize_with_error`. The range is of groups."""
    sent, count = theta.shape[1], theta.size
    codes, due, all_places = np.empty(GROUP, np.int32), np.empty(_TILE, np.float32), np.empty(_TILE, np.uint64)
    there, all_new, all_old = error.reshape(-1), theta.reshape(-1), before.reshape(-1)
    for begin in range(first * GROUP, min(last * GROUP, count), _TILE):
        size = min(_TILE, min(last * GROUP, count) - begin)
        places, new, old = all_places[:size], all_new[begin : begin + size], all_old[begin : begin + size]
        _find(error, mask, sent, error.shape[1], begin, places)
        due[size:] = 0
        for j in range(size):
            kept = there[places[j]]
            kept = kept if abs(kept) < np.inf else np.float32(0)
            due[j] = kept if new[j] == old[j] else (new[j] - old[j]) + kept
            if scale[0 if len(scale) == 1 else (begin + j) // sent] == 0:
                there[places[j]], due[j], places[j] = kept, 0, there.size
        for group in range(-(-size // GROUP)):
            part = slice(group * GROUP, (group + 1) * GROUP)
            code, row = _take_steps(due[part], codes), message[begin // GROUP + group]
            _put_values(codes, code, new[part])
            for i in range(GROUP // 2):
                row[i] = codes[2 * i] | codes[2 * i + 1] << 4
            row[GROUP // 2], row[GROUP // 2 + 1] = code & 255, code >> 8
        for j in range(size):
            if places[j] < there.size:
                there[places[j]] = due[j]


@jit
def _take_steps(group, codes):
    """Codes of a group, whose rounding errors stay behind; returns the scale.

    The bits of single values are looked at: a view of the group's would take as long as all the rest.
    """
    largest = np.int32(0)
    for i in range(GROUP):
        magnitude = np.int32(np.float32(group[i]).view(np.int32) & _MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    exact = np.float32(np.int32(largest).view(np.float32) / np.float32(_LEVELS))
    if not exact > _LEAST_SCALE:
        codes[:] = _LEVELS
        return np.int32(0)
    scale = np.int32((exact.view(np.int32) + 0xFFFF) >> 16)
    unit, most = np.int32(scale << 16).view(np.float32), np.float32(_LEVELS)
    for i in range(GROUP):
        step = np.int32(_clamp(np.rint(group[i] / unit), most))
        group[i] -= np.float32(step) * unit
        codes[i] = step + _LEVELS
    return scale


@jit
def _put_values(codes, scale, values):
    """The values of a group as they are sent; -0.0 for a zero."""
    negative = -np.int32(scale << 16).view(np.float32)
    for i in range(len(values)):
        values[i] = np.float32(_LEVELS - codes[i]) * negative


@jit
def dequantize(message, values, count, first, last):
    """See :func:`naive.dequantize`; ``values [S * n]``, ``message [S * G, W]``; ``count`` is n."""
    per_shard, codes = -(-count // GROUP), np.empty(GROUP, np.int32)
    for number in range(first, last):
        begin, row = number % per_shard * GROUP, message[number]
        start, there = number // per_shard * count + begin, min(GROUP, count - begin)
        for i in range(GROUP // 2):
            codes[2 * i], codes[2 * i + 1] = row[i] & 15, row[i] >> 4
        scale = np.int32(row[GROUP // 2]) | np.int32(row[GROUP // 2 + 1]) << 8
        _put_values(codes, scale, values[start : start + there])


# ------------------------------------------------------------------------------------------------ parameters, an update


@jit
def exchange(how, table, mask, values, error, length, like_flat, first, last):
    """See :func:`naive.gather_params` and :func:`naive.scatter_params`.

    ``how``: 0 gathers, 1 writes, 2 adds. ``table [n, 5]``: address, first row, entries of all before, own.
    """
    sent, matrix, all_places = mask.shape[1], values.reshape(-1), np.empty(_TILE, np.uint64)
    for i in range(len(table)):
        start, stop = _overlap(first, last, table[i, 2], table[i, 3])
        row, flat = table[i, 1], _array_at(table[i, 0], 0, 0, like_flat)
        errors = error[row:].reshape(-1)
        for begin in range(start, stop, _TILE):
            places, there = all_places[: min(_TILE, stop - begin)], row * sent + begin
            _find(flat, mask[row:], sent, length, begin, places)
            for j in range(len(places)):
                old = flat[places[j]]
                if how == 0:
                    matrix[there + j] = _narrow(_widen(old), values)
                    continue
                value = _widen(matrix[there + j])
                new = _narrow(_widen(old) + value if how == 2 else value, like_flat)
                flat[places[j]] = new
                if len(errors) > 0:  # what rounding loses
                    errors[places[j]] += value if new == old else value - (_widen(new) - _widen(old))


@jit
def update(theta, moments, last_step, mask, given, numbers, by_row, rule, first, last):
    """See :func:`naive.update_shard`.

    ``moments``: the first, and the second. ``given``: the mean, and the owner's own part of it, ``[R, q]``.
    ``numbers`` and ``by_row``: see :meth:`naive.RowNumbers.matrices`. ``rule``: N, ``1 / LONGEST_MOVE`` and the largest
    number.
    """
    (exp_avg, second), (total, mine), sent = moments, given, theta.shape[1]
    rows = max(1, _TILE // sent)
    room, all_places = np.empty((5, rows * sent), theta.dtype), np.empty(rows * sent, np.uint64)
    dates, firsts, seconds = last_step.reshape(-1), exp_avg.reshape(-1), second.reshape(-1)
    decays, of_group, row = np.empty(_WAITS, theta.dtype), -1, first
    while row < last:
        stop, begin, here = _alike(by_row, row, min(last, row + rows)), row * sent, _number(by_row, row)
        if here[_TAKES_PART] != 0:
            count, group, now = (stop - row) * sent, int(here[_GROUP]), np.int32(here[_STEP])
            places, (m, tau, n, decay, blend) = all_places[:count], room[:, :count]
            _find(last_step, mask, sent, last_step.shape[1], begin, places)
            _ask_for(exp_avg.ctypes.data, exp_avg.itemsize, places)
            _ask_for(second.ctypes.data, second.itemsize, places)
            for j in range(count):
                steps = np.int32(now - dates[places[j]])
                dates[places[j]] = now
                tau[j] = max(steps, 1)
            for j in range(count):
                m[j], n[j] = firsts[places[j]], seconds[places[j]]
            if group != of_group:
                of_group = group
                for wait in range(1, _WAITS):
                    decays[wait] = _decay(numbers.dtype.type(wait), numbers[group])
            _decay_and_blend(tau, numbers[group], decays, decay, blend)
            part = slice(begin, begin + count)
            tensors = theta.reshape(-1)[part], total.reshape(-1)[part], mine.reshape(-1)[part]
            corrections = np.float32(here[_CORRECTION]), np.float32(here[_CORRECTION2])
            _move(rule, tensors, m, tau, decay, blend, n, numbers[group], corrections, len(mask) > 0)
            for j in range(count):
                firsts[places[j]], seconds[places[j]] = m[j], n[j]
        row = stop


@jit
def _alike(by_row, row, stop):
    """The first row behind ``row``, up to ``stop``, that is updated with other numbers."""
    if len(by_row) == 1:
        return stop
    for end in range(row + 1, stop):
        for column in range(by_row.shape[1]):
            if by_row[end, column] != by_row[row, column]:
                return end
    return stop


@jit
def _decay(tau, numbers):
    """``(1 - lr*wd)**tau`` of :func:`naive.adams_step`."""
    kept = abs(numbers[_KEEP])
    if tau != 1:
        kept = math.exp(tau * numbers[_LOG_KEEP])
    if numbers[_KEEP] < 0 and tau % 2 == 1:
        kept = -kept
    return kept


@jit
def _decay_and_blend(tau, numbers, table, decay, blend):
    """For every entry: its decay, and ``1 - bt`` of :func:`naive.adams_step`. Waits beyond the table are rare."""
    one, longest, weight = tau.dtype.type(1), tau.dtype.type(len(table) - 1), numbers[_ONE_MINUS_BETA1]
    for j in range(len(tau)):
        decay[j] = table[np.uint64(tau[j])] if tau[j] <= longest else _decay(tau[j], numbers)
    for j in range(len(tau)):
        blend[j] = (tau[j] * weight) / ((tau[j] - one) * weight + one)


@jit
def _move(rule, tensors, m, tau, decay, blend, n, numbers, corrections, masked):
    """Moves the entries of a tile, and their moments m and n."""
    (ranks, longest, largest), (theta, total, mine), (c1, c2) = rule, tensors, corrections
    one, zero = theta.dtype.type(1), theta.dtype.type(0)
    lr, eps, beta2, one_minus_beta2 = numbers[_LR], numbers[_EPS], numbers[_BETA2], numbers[_ONE_MINUS_BETA2]
    for j in range(len(theta)):
        new = (one - blend[j]) * m[j] + blend[j] * (total[j] / tau[j])
        moved = tau[j] * new
        moved /= c1
        late = zero if tau[j] == one else one
        common = _larger(abs(new / c1), abs(moved * longest)) * late
        squared = total[j] * total[j]
        squared = largest if squared > largest else squared
        if masked:
            known, shared = mine[j] * mine[j], squared if tau[j] == one else mine[j] * total[j]
            known, shared = largest if known > largest else known, _clamp(shared, largest)
            weight = one_minus_beta2 / _larger(tau[j], one_minus_beta2 * tau[j] * tau[j])
            v2 = weight * (shared - known / ranks) + n[j]
            least = squared * one_minus_beta2 * (one - late)
            v2 = least if v2 < least else v2
            seen = v2 / c2 * ranks * tau[j] * tau[j]
            unseen = squared - (largest if seen > largest else seen)
            v2 += (zero if unseen < zero else unseen) * late * one_minus_beta2
        else:
            v2 = n[j] * beta2 + squared / tau[j] * one_minus_beta2
        v2 = largest if v2 > largest else v2
        u = _larger(v2 / c2, common * common)
        theta[j] = decay[j] * theta[j] - moved * lr / (math.sqrt(u) + eps)
        m[j], n[j] = new, v2
