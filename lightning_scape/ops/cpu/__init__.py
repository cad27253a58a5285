"""The operations on a CPU that pay, compiled by numba: each computes that of its name in :mod:`..naive`.

Each reads and writes its tensors once, in one loop per core, and makes no temporary of their size. All are bitwise
equal to the definition, but for three that round otherwise: ``squared_norm`` and ``sketch`` sum in another order, the
same at every run and number of threads; of ``update_shard``, moments and last steps are bitwise equal for entries
updated in the step before, else within rounding (``exp``, and torch's ``sqrt``, which is not correctly rounded).

The :mod:`.loops` release Python's lock, and share their range among ``torch.get_num_threads()`` threads. What they are
not made for, the definition computes: tensors that are not contiguous, fp64, fp16, parameters without a mask.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.ops import naive
from lightning_scape.ops.cpu import loops
from lightning_scape.ops.dispatch import Declined
from lightning_scape.ops.naive.wire import GROUP

_DTYPES = {torch.float32, torch.bfloat16, torch.uint8, torch.uint16, torch.int32, torch.int64}
"""Not fp64, in which no model of size is trained: its loops would take as long to compile as those of fp32."""
_GRAIN = 1 << 16
"""Entries that are worth a thread of their own."""
_NORM_CHUNK = 1 << 15
"""Entries of :func:`squared_norm` that are summed in fp32."""
_SKETCH_PART = 16
"""Chunks of :func:`sketch` that are summed into one partial sketch, by one thread."""


def can_read(tensors: Sequence[Tensor]) -> bool:
    """Whether the loops can read all of them."""
    # Asked of every parameter: `is_cpu` takes a seventh of the time of `device.type`.
    return all(each.is_cpu and each.dtype in _DTYPES and each.is_contiguous() and not each.is_neg() for each in tensors)


# ------------------------------------------------------------------------------------------ gradients and the residual


def select(statistic: Tensor, sent: int) -> Tensor:
    """Of fp32."""
    blocks, length = statistic.shape
    if statistic.dtype != torch.float32:
        raise Declined
    chosen = torch.empty(blocks, sent, dtype=naive.position_dtype(length), device="cpu")
    _in_parallel(functools.partial(loops.select, _array(statistic), _array(chosen)), blocks, _rows(length))
    return chosen


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """Chunks are summed in fp32, their sums in fp64."""
    total = 0.0
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        group = [grad for grad in grads if grad.dtype == dtype]
        *starts, chunks = accumulate((-(-grad.numel() // _NORM_CHUNK) for grad in group), initial=0)
        table = np.array([(g.data_ptr(), start, g.numel()) for g, start in zip(group, starts, strict=True)], np.int64)
        partials = np.empty(chunks, np.float64)
        loop = functools.partial(loops.squares, table, partials, _NORM_CHUNK, _like(dtype))
        _in_parallel(loop, chunks, _GRAIN // _NORM_CHUNK)
        total += float(partials.sum())
    return torch.tensor(total, dtype=torch.float32, device="cpu")


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
        _in_parallel(loop, len(sums), 1)
        total += sums.sum(0)
    return torch.from_numpy(total)


def sweep(work: naive.Sweep) -> None:
    """Two passes: one over memory, which folds, and one over the masked entries, which compacts and packs."""
    residual, scale, second, message = work.residual, work.scale, work.second_moment, work.message
    if residual.dtype != torch.float32 or (second is not None and second.exp_avg_sq.dtype != torch.float32):
        raise Declined
    length, values = residual.shape[1], work.values
    if work.grads is not None:
        state = _array(residual), _or_empty(None if second is None else second.exp_avg_sq), _array(scale.reshape(-1))
        for dtype, table, shares in _pieces_of_sweep(work):
            loop = functools.partial(loops.fold, table, shares, *state, _like(dtype))
            _in_parallel(loop, int(table[:, 2].sum()), _rows(length))
    if values is None:
        return
    for rows in work.region.rows:
        if message is None:
            here, mask = values[rows], _or_empty(naive.cut(work.mask, rows), naive.position_dtype(length))
            matrices = _array(residual[rows]), mask, _array(here), _array(naive.cut(scale, rows).reshape(-1))
            _in_parallel(functools.partial(loops.compact, *matrices), len(here), _rows(values.shape[1]))
            continue
        for shard, part in work.shards_of(rows):
            here, mask = values[part].zero_(), naive.cut(work.mask, part)
            message[shard] = quantize_with_error(residual[part], mask, here, here, naive.cut(scale, part))


def _pieces_of_sweep(work: naive.Sweep) -> list[tuple[torch.dtype, Any, Any]]:
    """By dtype of the gradients: the tables of :func:`loops.fold`. Pieces without a gradient go with the first."""
    pieces, grads, second = work.region.pieces, work.grads or [], work.second_moment
    dtypes = [*dict.fromkeys(grad.dtype for grad in grads if grad is not None)] or [torch.float32]
    found = []
    for dtype in dtypes:
        places = [i for i, g in enumerate(grads) if (dtypes[0] if g is None else g.dtype) == dtype]
        starts = accumulate((pieces[i].blocks for i in places), initial=0)
        rows = [
            (pieces[i].row, before, pieces[i].blocks, 0 if (g := grads[i]) is None else g.data_ptr(), pieces[i].numel)
            for i, before in zip(places, starts, strict=False)
        ]
        weights = np.array([0.0 if second is None else second.weights[i] for i in places])
        shares = np.stack([1 - weights, weights / (1 if second is None else second.ranks)], 1).astype(np.float32)
        found.append((dtype, np.array(rows, np.int64).reshape(-1, 5), shares))
    return found


# ------------------------------------------------------------------------------------------------ what arrives and goes


def dequantize(message: Tensor, count: int) -> Tensor:
    """One pass."""
    values = torch.empty(len(message), count, dtype=torch.float32, device="cpu")
    rows = message.flatten(0, 1)
    loop = functools.partial(loops.dequantize, _array(rows), _array(values.view(-1)), count)
    _in_parallel(loop, len(rows), _rows(GROUP))
    return values


def quantize_with_error(error: Tensor, mask: Tensor | None, theta: Tensor, before: Tensor, scale: Tensor) -> Tensor:
    """One pass."""
    message = naive.new_message(1, theta.numel(), theta.device)[0]
    places = _or_empty(mask, naive.position_dtype(error.shape[1]))
    tensors = _array(theta), _array(before), _array(message), _array(scale.reshape(-1))
    loop = functools.partial(loops.quantize_with_error, _array(error), places, *tensors)
    _in_parallel(loop, len(message), _rows(GROUP))
    return message


def gather_params(entries: naive.ParamEntries, out: Tensor, renew: bool = False) -> None:
    """With a mask, and not to renew."""
    if renew:
        raise Declined
    _exchange(0, entries, out, None)


def scatter_params(
    entries: naive.ParamEntries,
    values: Tensor,
    add: bool,
    scale: Tensor,
    error: Tensor | None = None,
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
    for dtype in dict.fromkeys(flats[piece.segment.index].dtype for piece in pieces):
        group = [piece for piece in pieces if flats[piece.segment.index].dtype == dtype]
        kept = [piece.kept(mask.shape[1], length) for piece in group]
        places = [flats[piece.segment.index].data_ptr() + piece.start * dtype.itemsize for piece in group]
        *starts, count = accumulate(kept, initial=0)
        table = np.array([places, [piece.row for piece in group], starts, kept], np.int64).T.copy()
        narrower = error is not None and dtype.itemsize < error.itemsize
        rest = _array(mask), _array(values), _or_empty(error if narrower else None), length, _like(dtype)
        _in_parallel(functools.partial(loops.exchange, how, table, *rest), count, _GRAIN)


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
    group = numbers.group if numbers.hyper.lr.dim() else None
    by_row = numbers.step.int(), numbers.scale.float(), numbers.first, numbers.second
    loop = functools.partial(
        loops.update,
        _array(theta),
        (_array(exp_avg), _array(second)),
        _array(last_step),
        _or_empty(mask, naive.position_dtype(exp_avg.shape[1])),
        (_array(mean), _array(mean if mine is None else mine)),
        torch.stack(torch.broadcast_tensors(*numbers.hyper), -1).view(-1, len(numbers.hyper)).numpy(),  # [G, 7]
        (np.zeros(1, np.int32) if group is None else _array(group), *(_array(each.reshape(-1)) for each in by_row)),
        tuple(map(np.float32, (ranks, 1 / naive.LONGEST_MOVE, torch.finfo(theta.dtype).max))),
    )
    _in_parallel(loop, len(theta), _rows(theta.shape[1]))


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


def _rows(columns: int) -> int:
    """Rows that are worth a thread of their own."""
    return max(1, _GRAIN // max(1, columns))


def _in_parallel(loop: Callable[[int, int], None], count: int, grain: int) -> None:
    """Calls ``loop(first, last)`` for parts of ``0 .. count``, at least ``grain`` long, on as many threads as torch."""
    threads = min(torch.get_num_threads(), -(-count // grain))
    if threads <= 1:
        loop(0, count)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    others = [_begin(loop, a, b) for a, b in zip(bounds[1:-1], bounds[2:], strict=True)]
    loop(bounds[0], bounds[1])
    for other in others:
        other.result()


def _begin(loop: Callable[[int, int], None], first: int, last: int) -> Future[None]:
    """Calls ``loop`` on another thread; on this one where the interpreter ends, and starts no thread any more."""
    try:
        return _pool(os.getpid()).submit(loop, first, last)
    except RuntimeError:
        loop(first, last)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lightning-scape-ops")
