"""The operations on a CPU, compiled by numba: each the twin of the function of that name in :mod:`.naive`.

Each reads and writes its tensors once, in one loop per core, and makes no temporary of their size. What is bitwise
equal to the twin and what only rounds:

======================================== ==============================================================================
select, vote, elect, compact             bitwise
gather, scatter, fold                    bitwise
accumulate_first_moment                  bitwise
accumulate_second_moment, measure_noise  bitwise where torch was compiled to round ``a + b * c`` once
update, update_adamw                     moments and clocks bitwise for entries visited in the step before (with
                                         ``implicit``), else within rounding: ``exp``, ``expm1``, and torch's ``sqrt``,
                                         which is not correctly rounded
squared_norm, sketch                     another order of summation, the same at every run and number of threads
checksum, take, put, tau_step,           the twin itself: one call of torch, or not part of a step
adamw_step
======================================== ==============================================================================

The loops are compiled when they are first called for a dtype, and kept on disk (``__pycache__`` of this package, or the
user's cache folder). They release Python's lock, and share their range among ``torch.get_num_threads()`` threads. A
tensor that is not on the CPU, or not contiguous, goes to the twin.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import ParamSpec

from lightning_scape.layout import Piece
from lightning_scape.ops import cpu_kernels, cpu_masks, naive
from lightning_scape.ops.naive import (
    AdamWStep,
    Hyper,
    RowNumbers,
    SecondMoment,
    ShardState,
    TauStep,
    adams_step,
    adamw_step,
    checksum,
    gather_blocks,
    position_dtype,
    scatter_blocks,
    sweep,
    to_device,
)

__all__ = [
    "AdamWStep",
    "Hyper",
    "RowNumbers",
    "SecondMoment",
    "ShardState",
    "TauStep",
    "accumulate_exp_avg",
    "accumulate_exp_avg_sq",
    "adamw_step",
    "checksum",
    "compact",
    "merge",
    "fold",
    "gather_params",
    "measure_noise",
    "position_dtype",
    "scatter_blocks",
    "scatter_params",
    "select",
    "sketch",
    "squared_norm",
    "sweep",
    "gather_blocks",
    "adams_step",
    "to_device",
    "update_adams",
    "update_adamw",
    "propose",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_VIEWS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Dtypes without arithmetic in NumPy, and as what the loops take them."""
_DTYPES = {torch.float32, torch.float64, *_VIEWS, torch.uint8, torch.uint16, torch.int32, torch.int64}
_GRAIN = 1 << 16
"""Entries that are worth a thread of their own."""
_NORM_CHUNK = 1 << 15
"""Entries of :func:`squared_norm` that are summed in the gradient's precision."""
_LONGEST_SORTED = 4096
"""Longer blocks are sorted by the twin, where many of their entries are sent."""
_SKETCH_PART = 16
"""Chunks of :func:`sketch` that are summed into one partial sketch, by one thread."""


def _where_it_fits(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Calls the twin instead where a tensor is not what the loops can read."""
    twin: Callable[_P, _T] = getattr(naive, function.__name__)

    @functools.wraps(function)
    def operation(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        fits = all(map(_fits, _tensors((*args, *kwargs.values()))))
        return function(*args, **kwargs) if fits else twin(*args, **kwargs)

    return operation


def _fits(tensor: Tensor) -> bool:
    known = tensor.dtype in _DTYPES and tensor.device.type == "cpu"
    return known and tensor.is_contiguous() and not tensor.is_neg()


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (member for member in value if isinstance(member, Tensor))


# ------------------------------------------------------------------------------------------------------ gradients


@_where_it_fits
def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """See :func:`naive.squared_norm`. Chunks are summed in fp32 (fp64), their sums in fp64."""
    total = 0.0
    for (dtype,), group in _by_dtypes([(grad,) for grad in grads if grad.numel()]):
        sizes = [grad.numel() for (grad,) in group]
        starts, chunks = _starts([-(-size // _NORM_CHUNK) for size in sizes])
        table = np.array([(g.data_ptr(), s, n) for (g,), s, n in zip(group, starts, sizes, strict=True)], np.int64)
        partials = np.empty(chunks, np.float64)
        loop = functools.partial(cpu_kernels.squares, table, partials, _NORM_CHUNK, _like(dtype))
        _in_parallel(loop, chunks, _GRAIN // _NORM_CHUNK)
        total += float(partials.sum())
    return torch.tensor(total, dtype=torch.float32, device="cpu")


@_where_it_fits
def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    """See :func:`naive.sketch`."""
    buckets, length = max(widths), signs.numel() // 2
    total = np.zeros(buckets, np.float32)
    numbered = [(grad, index) for index, grad in enumerate(grads) if grad is not None and grad.numel()]
    for dtype in dict.fromkeys(grad.dtype for grad, _ in numbered):
        group = [(grad, index) for grad, index in numbered if grad.dtype == dtype]
        sizes = tuple(grad.numel() for grad, _ in group)
        plan = _sketch_plan(tuple(index for _, index in group), sizes, length, tuple(widths))
        table, addresses = plan.copy(), np.array([grad.data_ptr() for grad, _ in group], np.int64)
        table[:, 0] = addresses[plan[:, 6]] + plan[:, 0] * dtype.itemsize
        parts = -(-len(table) // _SKETCH_PART)
        sums = np.zeros((parts, buckets), np.float32)
        loop = functools.partial(cpu_kernels.sketch, table, _array(signs), sums, _SKETCH_PART, _like(dtype))
        _in_parallel(loop, parts, 1)
        total += sums.sum(0)
    return torch.from_numpy(total)


@functools.lru_cache(maxsize=16)
def _sketch_plan(
    indices: tuple[int, ...], sizes: tuple[int, ...], length: int, widths: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Each chunk's first entry, length, width, rotation, offset, sign and place in the list: int64 ``[chunks, 7]``."""
    rows = [
        (start, min(length, size - start), *naive._draw(index, start // length, length, widths), place)
        for place, (index, size) in enumerate(zip(indices, sizes, strict=True))
        for start in range(0, size, length)
    ]
    return np.array(rows, np.int64)


@_where_it_fits
def fold(residuals: Sequence[Tensor], grads: Sequence[Tensor | None], scale: Tensor, clip_value: float | None) -> None:
    """See :func:`naive.fold`."""
    factor = float(scale)
    if factor == 0.0:
        return
    pairs = [(r, g) for r, g in zip(residuals, grads, strict=True) if g is not None and g.numel()]
    for (dtype, of_grad), group in _by_dtypes(pairs):
        table, count = _pairs_table(group)
        bound, clip = _bound(clip_value, of_grad)
        number = _number(dtype, factor)
        loop = functools.partial(cpu_kernels.fold, table, number, bound, clip, _like(dtype), _like(of_grad))
        _in_parallel(loop, count, _GRAIN)


@_where_it_fits
def accumulate_exp_avg(
    momentum: Tensor, evidence: Tensor, grad: Tensor, beta1: float, scale: Tensor, clip_value: float | None
) -> None:
    """See :func:`naive.accumulate_exp_avg`."""
    factor = float(scale)
    if factor == 0.0:
        return
    bound, clip = _bound(clip_value, grad.dtype)
    numbers = (_number(momentum.dtype, beta1), _number(momentum.dtype, (1 - beta1) * factor))
    arrays = (_array(tensor) for tensor in (momentum, evidence, grad))
    loop = functools.partial(cpu_kernels.accumulate_exp_avg, *arrays, *numbers, bound, clip)
    _in_parallel(loop, momentum.numel(), _GRAIN)


@_where_it_fits
def measure_noise(
    noise: Tensor, grad: Tensor | None, weight: float, ranks: int, scale: Tensor, clip_value: float | None
) -> None:
    """See :func:`naive.measure_noise`."""
    accumulate_exp_avg_sq([noise], [grad], [weight], ranks, scale, clip_value)


@_where_it_fits
def accumulate_exp_avg_sq(
    moments: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[float],
    ranks: int,
    scale: Tensor,
    clip_value: float | None,
) -> None:
    """See :func:`naive.accumulate_exp_avg_sq`."""
    scales = scale.tolist() if scale.dim() else [float(scale)] * len(moments)
    given = zip(moments, grads, weights, scales, strict=True)
    rows = [(moment, grad, weight, own) for moment, grad, weight, own in given if own != 0.0]
    pairs = [(moment, moment if grad is None else grad) for moment, grad, *_ in rows]
    for (dtype, of_grad), group in _by_dtypes(pairs):
        here = [
            row for row, pair in zip(rows, pairs, strict=True) if (pair[0].dtype, pair[1].dtype) == (dtype, of_grad)
        ]
        table, count = _pairs_table(group)
        table[[grad is None for _, grad, *_ in here], 1] = 0
        like, largest = _like(dtype), _number(dtype, torch.finfo(dtype).max)
        keep = np.array([1 - weight for *_, weight, _ in here], like.dtype)
        added = np.array([weight / ranks * own**2 for *_, weight, own in here], like.dtype)
        bound = _bound(clip_value, of_grad)
        loop = functools.partial(
            cpu_kernels.accumulate_squares, table, keep, added, *bound, largest, like, _like(of_grad)
        )
        _in_parallel(loop, count, _GRAIN)


# ---------------------------------------------------------------------------------------------------------- masks


@_where_it_fits
def select(statistic: Tensor, sent: int) -> Tensor:
    """See :func:`naive.select`."""
    blocks, length = statistic.shape
    assert 1 <= sent <= length
    if length > _LONGEST_SORTED and sent > cpu_masks.MAX_PASSES:
        return naive.select(statistic, sent)
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device="cpu")
    loop = functools.partial(cpu_masks.select, _array(statistic), cpu_masks.network(length, sent), _array(chosen))
    _in_parallel(loop, blocks, _rows_of_a_thread(length))
    return chosen


@_where_it_fits
def propose(residual: Tensor, votes: int) -> Tensor:
    """See :func:`naive.propose`."""
    blocks, length = residual.shape
    if length > _LONGEST_SORTED and votes > cpu_masks.MAX_PASSES:
        return naive.propose(residual, votes)
    width = votes * position_dtype(length).itemsize + votes + 1
    ballots = torch.empty(blocks, width, dtype=torch.uint8, device="cpu")
    loop = functools.partial(
        cpu_masks.propose, _array(residual), cpu_masks.network(length, votes), votes, _array(ballots)
    )
    _in_parallel(loop, blocks, _rows_of_a_thread(length))
    return ballots


@_where_it_fits
def merge(residual: Tensor, ballots: Tensor, own: int, votes: int, sent: int) -> Tensor:
    """See :func:`naive.merge`."""
    blocks, length = residual.shape
    if length > _LONGEST_SORTED and sent > cpu_masks.MAX_PASSES:
        return naive.merge(residual, ballots, own, votes, sent)
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device="cpu")
    network = cpu_masks.network(length, sent)
    loop = functools.partial(cpu_masks.merge, _array(residual), _array(ballots), own, network, votes, _array(chosen))
    _in_parallel(loop, blocks, _rows_of_a_thread(length))
    return chosen


# ------------------------------------------------------------------------------------------------ blocks and shards


@_where_it_fits
def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """See :func:`naive.compact`."""
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device="cpu") if out is None else out
    limit = _number(residual.dtype, naive._within(torch.finfo(wire_dtype).max, residual.dtype))
    places = None if mask is None else _array(mask)
    factors = _array(scale.reshape(-1))
    loop = functools.partial(cpu_kernels.compact, _array(residual), places, _array(values), factors, limit)
    _in_parallel(loop, blocks, _rows_of_a_thread(sent))
    return values


@_where_it_fits
def update_adams(
    shard: ShardState,
    mask: Tensor | None,
    mean: Tensor,
    numbers: RowNumbers,
    floor: float = 1.0,
    implicit: bool = False,
) -> Tensor:
    """See :func:`naive.update_adams`."""
    theta, momentum, noise, clock = shard
    step, scale, hyper, correction, _, group = numbers
    divisor = torch.as_tensor(correction, dtype=theta.dtype, device="cpu")
    loop = functools.partial(
        cpu_kernels.update_adams,
        _array(theta),
        _array(momentum),
        _array(clock),
        None if noise is None else _array(noise),
        None if mask is None else _array(mask),
        _array(mean),
        _numbers(hyper),
        _by_row(hyper, group, step, scale, divisor, divisor),
        _number(theta.dtype, floor),
        implicit,
    )
    again = _in_parallel(loop, theta.shape[0], _rows_of_a_thread(theta.shape[1]))
    return torch.tensor(sum(again), dtype=torch.int64, device="cpu")


@_where_it_fits
def update_adamw(
    shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, ranks: int, implicit: bool = True
) -> Tensor:
    """See :func:`naive.update_adamw`."""
    theta, exp_avg, exp_avg_sq, clock = shard
    step, scale, hyper, c1, c2, group = numbers
    assert exp_avg_sq is not None
    assert isinstance(c1, Tensor)
    assert c2 is not None
    rule = (float(ranks), 1 / naive.LONGEST_MOVE, torch.finfo(theta.dtype).max)
    loop = functools.partial(
        cpu_kernels.update_adamw,
        _array(theta),
        (_array(exp_avg), _array(exp_avg_sq)),
        _array(clock),
        None if mask is None else _array(mask),
        _array(mean),
        _numbers(hyper),
        _by_row(hyper, group, step, scale, c1, c2),
        tuple(_number(theta.dtype, number) for number in rule),
        implicit,
    )
    again = _in_parallel(loop, theta.shape[0], _rows_of_a_thread(theta.shape[1]))
    return torch.tensor(sum(again), dtype=torch.int64, device="cpu")


def _numbers(hyper: Hyper) -> Any:
    """Those of each group: ``[G, 9]``."""
    return torch.stack(torch.broadcast_tensors(*hyper), -1).view(-1, len(hyper)).numpy()


def _by_row(hyper: Hyper, group: Tensor | None, step: Tensor, scale: Tensor, *corrections: Tensor) -> tuple[Any, ...]:
    """Group, step, scale and corrections: ``[R]`` each, or ``[1]`` for all rows."""
    differ = group is not None and any(value.dim() for value in hyper)
    groups = _array(group.int()) if group is not None and differ else np.zeros(1, np.int32)
    rest = (step.int(), scale.float(), *corrections)
    return (groups, *(_array(tensor.reshape(-1)) for tensor in rest))


# --------------------------------------------------------------------------- parameters: each a flat tensor of its own


@_where_it_fits
def gather_params(
    flats: Sequence[Tensor], pieces: Sequence[Piece], mask: Tensor | None, out: Tensor, block_size: int
) -> None:
    """See :func:`naive.gather_params`."""
    if mask is None:  # plain copies
        naive.gather_params(flats, pieces, mask, out, block_size)
        return
    for dtype, table, count in _pieces_table(flats, pieces, mask.shape[1], block_size):
        loop = functools.partial(cpu_kernels.gather_params, table, _array(mask), _array(out), block_size, _like(dtype))
        _in_parallel(loop, count, _GRAIN)


@_where_it_fits
def scatter_params(
    flats: Sequence[Tensor],
    pieces: Sequence[Piece],
    mask: Tensor | None,
    values: Tensor,
    block_size: int,
    add: bool = False,
) -> None:
    """See :func:`naive.scatter_params`."""
    if mask is None:
        naive.scatter_params(flats, pieces, mask, values, block_size, add)
        return
    for dtype, table, count in _pieces_table(flats, pieces, mask.shape[1], block_size):
        loop = functools.partial(
            cpu_kernels.scatter_params, table, _array(mask), _array(values), add, block_size, _like(dtype)
        )
        _in_parallel(loop, count, _GRAIN)


def _pieces_table(
    flats: Sequence[Tensor], pieces: Sequence[Piece], sent: int, block_size: int
) -> Iterator[tuple[torch.dtype, Any, int]]:
    """By dtype of the parameters: the table of :func:`cpu_kernels.gather_params`, and how many entries are chosen in all."""
    for dtype in dict.fromkeys(flats[piece.segment.index].dtype for piece in pieces):
        group = [piece for piece in pieces if flats[piece.segment.index].dtype == dtype]
        kept = [piece.kept(sent, block_size) for piece in group]
        starts, count = _starts(kept)
        addresses = [flats[piece.segment.index].data_ptr() + piece.start * dtype.itemsize for piece in group]
        rows = [piece.row for piece in group]
        yield dtype, np.array([addresses, starts, kept, rows], np.int64).T.copy(), count


# -------------------------------------------------------------------------------------------------- small helpers


def _array(tensor: Tensor) -> Any:
    """The tensor's memory as the loops take it."""
    view = _VIEWS.get(tensor.dtype)
    return (tensor if view is None else tensor.view(view)).detach().numpy()


@functools.cache
def _like(dtype: torch.dtype) -> Any:
    return _array(torch.empty(0, dtype=dtype, device="cpu"))


def _number(dtype: torch.dtype, value: float) -> Any:
    """A number as the loops compute with it: fp64 for fp64, else fp32."""
    return np.float64(value) if dtype == torch.float64 else np.float32(value)


def _bound(clip_value: float | None, dtype: torch.dtype) -> tuple[Any, bool]:
    """The bound as a number of the gradient's dtype, to which torch's clamp rounds it; and whether there is one."""
    if clip_value is None:
        return _number(dtype, 0.0), False
    within = torch.tensor(naive._within(clip_value, dtype), dtype=dtype, device="cpu")
    return _number(dtype, float(within)), True


def _by_dtypes(rows: Sequence[tuple[Tensor, ...]]) -> list[tuple[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]]]:
    """Rows of tensors, grouped by their dtypes, in order."""
    groups: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
    for row in rows:
        groups.setdefault(tuple(tensor.dtype for tensor in row), []).append(row)
    return list(groups.items())


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """How much comes before each, and the sum."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts, total


def _pairs_table(pairs: list[tuple[Tensor, ...]]) -> tuple[Any, int]:
    """The table of :func:`cpu_kernels.fold`, and the number of entries in all."""
    sizes = [first.numel() for first, _ in pairs]
    assert sizes == [second.numel() for _, second in pairs]
    starts, count = _starts(sizes)
    addresses = [[tensor.data_ptr() for tensor in column] for column in zip(*pairs, strict=True)]
    return np.array([*addresses, starts, sizes], np.int64).T.copy(), count


def _rows_of_a_thread(columns: int) -> int:
    return max(1, _GRAIN // max(1, columns))


def _in_parallel(loop: Callable[[int, int], _T], count: int, grain: int) -> list[_T]:
    """Calls ``loop(first, last)`` for parts of ``0 .. count``, at least ``grain`` long, on as many threads as torch."""
    threads = min(torch.get_num_threads(), -(-count // grain))
    if threads <= 1:
        return [loop(0, count)]
    bounds = [count * i // threads for i in range(threads + 1)]
    others = [_pool(os.getpid()).submit(loop, a, b) for a, b in zip(bounds[1:-1], bounds[2:], strict=True)]
    return [loop(bounds[0], bounds[1]), *(other.result() for other in others)]


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lightning-scape-ops")
