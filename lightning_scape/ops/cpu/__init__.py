"""The operations on a CPU that pay, compiled by numba: each computes that of its name in :mod:`..naive`.

Each reads and writes its tensors once, in one loop per core, and makes no temporary of their size. All are bitwise
equal to the definition, but for two that round otherwise: ``sketch`` sums in another order, the same at every run and
number of threads; of ``update_shard``, moments and last steps are bitwise equal for entries updated in the step before,
else within rounding (``exp``, and torch's ``sqrt``, which is not correctly rounded).

The :mod:`.loops` release Python's lock, and share their range among ``torch.get_num_threads()`` threads. What they are
not made for, the definition computes: tensors that are not contiguous, fp64, fp16, parameters without a mask.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.core.layout import Piece
from lightning_scape.ops import naive
from lightning_scape.ops.cpu import loops
from lightning_scape.ops.dispatch import Declined
from lightning_scape.ops.naive.wire import GROUP

_GRAIN = 1 << 16
"""Entries that are worth a thread of their own."""
_SKETCH_PART = 16
"""Chunks of :func:`sketch` that are summed into one partial sketch, by one thread."""


# ------------------------------------------------------------------------------------------ gradients and the residual


def select(statistic: Tensor, sent: int) -> Tensor:
    """Few entries by repeated maximum, many by counting."""
    blocks, length = statistic.shape
    chosen = torch.empty(blocks, sent, dtype=naive.position_dtype(length), device="cpu")
    _in_parallel(functools.partial(loops.select, _array(statistic), _array(chosen)), blocks, length)
    return chosen


def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    """Chunks are summed in parts, the parts in order."""
    buckets, length = max(widths), signs.numel() // 2
    total = np.zeros(buckets, np.float32)
    given = [(index, grad) for index, grad in enumerate(grads) if grad is not None and grad.numel()]
    for dtype in dict.fromkeys(grad.dtype for _, grad in given):
        rows = []
        for index, grad in given:
            for start in range(0, grad.numel() if grad.dtype == dtype else 0, length):
                drawn = naive.draw(index, start // length, length, tuple(widths))
                rows.append((grad.data_ptr() + start * dtype.itemsize, min(length, grad.numel() - start), *drawn))
        table = np.array(rows, np.int64)
        sums = np.zeros((-(-len(table) // _SKETCH_PART), buckets), np.float32)
        loop = functools.partial(loops.sketch, table, _array(signs), sums, _SKETCH_PART, _like(dtype))
        _in_parallel(loop, len(sums), _GRAIN)
        total += sums.sum(0)
    return torch.from_numpy(total)


def sweep(work: naive.Sweep) -> None:
    """Two passes: one over memory, which folds, and one over the masked entries, which compacts and packs."""
    residual, scale, second, message = work.residual, work.scale, work.second_moment, work.message
    length, values, pieces = residual.shape[1], work.values, work.region.pieces
    if work.grads is not None:
        shares = [(1.0, 0.0)] if second is None else [(1 - weight, weight / second.ranks) for weight in second.weights]
        moments = _or_empty(None if second is None else second.exp_avg_sq)
        state = np.array(shares, np.float32).reshape(-1, 2), _array(residual), moments, _array(scale.reshape(-1))
        for table, like in _tables(pieces, work.grads, [piece.numel for piece in pieces]):
            _in_parallel(functools.partial(loops.fold, table, *state, like), int(table[:, 3].sum()))
    if values is None:
        return
    for rows in work.region.rows:
        if message is None:
            here, mask = values[rows], _or_empty(naive.cut(work.mask, rows), naive.position_dtype(length))
            matrices = _array(residual[rows]), mask, _array(here), _array(naive.cut(scale, rows).reshape(-1))
            _in_parallel(functools.partial(loops.compact, *matrices), len(here), values.shape[1])
            continue
        for shard, part in work.shards_of(rows):
            here, mask = values[part].zero_(), naive.cut(work.mask, part)
            message[shard] = quantize_with_error(residual[part], mask, here, here, naive.cut(scale, part))


def _tables(
    pieces: Sequence[Piece], flats: Sequence[Tensor | None], counts: Sequence[int]
) -> Iterator[tuple[Any, Any]]:
    """What loops go through, by dtype of ``flats``; pieces of a parameter that has none go with the first.

    A table ``[n, 5]`` of pieces: address in the flat tensor (0: none), first row, entries of all before, own, and which
    piece it is; and an array that is like the flat tensors.
    """
    given = [flats[piece.index] for piece in pieces]
    dtypes = list(dict.fromkeys(flat.dtype for flat in given if flat is not None)) or [torch.float32]
    for dtype in dtypes:
        rows = [
            (0 if flat is None else flat.data_ptr() + piece.start * dtype.itemsize, piece.row, 0, count, place)
            for place, (piece, flat, count) in enumerate(zip(pieces, given, counts, strict=True))
            if dtype == (dtypes[0] if flat is None else flat.dtype)
        ]
        table = np.array(rows, np.int64).reshape(-1, 5)
        table[:, 2] = table[:, 3].cumsum() - table[:, 3]
        yield table, _like(dtype)


# ------------------------------------------------------------------------------------------------ what arrives and goes


def dequantize(message: Tensor, count: int) -> Tensor:
    """One pass."""
    values = torch.empty(len(message), count, dtype=torch.float32, device="cpu")
    rows = message.flatten(0, 1)
    loop = functools.partial(loops.dequantize, _array(rows), _array(values.view(-1)), count)
    _in_parallel(loop, len(rows), GROUP)
    return values


def quantize_with_error(error: Tensor, mask: Tensor | None, theta: Tensor, before: Tensor, scale: Tensor) -> Tensor:
    """One pass."""
    message = naive.new_message(1, theta.numel(), theta.device)[0]
    places = _or_empty(mask, naive.position_dtype(error.shape[1]))
    tensors = _array(theta), _array(before), _array(message), _array(scale.reshape(-1))
    loop = functools.partial(loops.quantize_with_error, _array(error), places, *tensors)
    _in_parallel(loop, len(message), GROUP)
    return message


def gather_params(entries: naive.ParamEntries, out: Tensor, renew: bool = False) -> None:
    """With a mask, and not to renew."""
    if renew:
        raise Declined
    _exchange(0, entries, out, None)


def scatter_params(
    entries: naive.ParamEntries, values: Tensor, add: bool, scale: Tensor, error: Tensor | None = None
) -> None:
    """With a mask."""
    scales = _array(scale.reshape(-1))
    taken = [piece for piece in entries.pieces if scales[piece.row if scale.dim() else 0] != 0]
    _exchange(2 if add else 1, entries._replace(pieces=taken), values, error if add else None)


def _exchange(how: int, entries: naive.ParamEntries, values: Tensor, error: Tensor | None) -> None:
    """Between parameters and values, by dtype of the parameters."""
    flats, pieces, mask, length = entries
    if mask is None:  # plain copies and sums
        raise Declined
    for table, like in _tables(pieces, flats, [piece.kept(mask.shape[1], length) for piece in pieces]):
        narrower = error is not None and like.itemsize < error.itemsize
        rest = _array(mask), _array(values), _or_empty(error if narrower else None), length, like
        _in_parallel(functools.partial(loops.exchange, how, table, *rest), int(table[:, 3].sum()))


def update_shard(
    shard: naive.ShardState,
    mask: Tensor | None,
    mean: Tensor,
    mine: Tensor | None,
    numbers: naive.RowNumbers,
    ranks: int,
) -> None:
    """One pass."""
    theta, exp_avg, second, last_step = shard
    if second is None:  # AdamS
        raise Declined
    hyper, by_row = numbers.matrices()
    loop = functools.partial(
        loops.update,
        _array(theta),
        (_array(exp_avg), _array(second)),
        _array(last_step),
        _or_empty(mask, naive.position_dtype(exp_avg.shape[1])),
        (_array(mean), _array(mean if mine is None else mine)),
        _array(hyper),
        _array(by_row),
        tuple(map(np.float32, (ranks, 1 / naive.LONGEST_MOVE, torch.finfo(theta.dtype).max))),
    )
    _in_parallel(loop, len(theta), theta.shape[1])


# --------------------------------------------------------------------------------------------------- arrays and threads


def _array(tensor: Tensor) -> Any:
    """The tensor's memory as the loops take it: bf16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


@functools.cache
def _like(dtype: torch.dtype) -> Any:
    """An empty array, which tells the loops what lies at an address."""
    return _array(torch.empty(0, dtype=dtype, device="cpu"))


def _or_empty(matrix: Tensor | None, dtype: torch.dtype = torch.float32) -> Any:
    """An optional matrix as the loops take it; ``[0, 0]`` is none."""
    return _array(torch.empty(0, 0, dtype=dtype, device="cpu") if matrix is None else matrix)


def _in_parallel(loop: Callable[[int, int], None], count: int, columns: int = 1) -> None:
    """Calls ``loop(first, last)`` for parts of ``0 .. count``, each of so many entries, on as many threads as torch."""
    threads = min(torch.get_num_threads(), -(-count * max(1, columns) // _GRAIN))
    if threads <= 1:
        loop(0, count)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    others: list[Future[None]] = []
    with suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        for first, last in zip(bounds[1:-1], bounds[2:], strict=True):
            others.append(_pool(os.getpid()).submit(loop, first, last))
    loop(bounds[0], bounds[1])
    loop(bounds[1 + len(others)], count)
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lightning-scape-ops")
