"""Tensors as the loops of :mod:`.kernels` take them, and threads to run these on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import ParamSpec

from lightning_scape.ops import naive
from lightning_scape.ops.naive.params import ParamEntries
from lightning_scape.ops.registry import CHUNKED, CPU

_P = ParamSpec("_P")
_T = TypeVar("_T")
_VIEWS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Dtypes without arithmetic in NumPy, and as what the loops take them."""
_DTYPES = {torch.float32, *_VIEWS, torch.uint8, torch.uint16, torch.int32, torch.int64}
"""Not fp64, in which no model of size is trained: its loops would take as long to compile as those of fp32."""
GRAIN = 1 << 16
"""Entries that are worth a thread of their own."""


def fits(tensor: Tensor) -> bool:
    """Whether the loops can read it."""
    # Asked of every parameter: `is_cpu` takes a seventh of the time of `device.type`.
    return tensor.is_cpu and tensor.dtype in _DTYPES and tensor.is_contiguous() and not tensor.is_neg()


def all_fit(values: Iterable[object]) -> bool:
    """Whether the loops can read all tensors among the values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            if not fits(value):
                return False
        elif isinstance(value, (list, tuple)) and not all_fit(value):
            return False
    return True


def implements(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Registers an operation. Where a tensor is not what the loops can read, its twin serves."""
    twin: Callable[_P, _T] = getattr(CHUNKED, function.__name__)

    @functools.wraps(function)
    def operation(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        known = all_fit(args) and all_fit(kwargs.values())
        return function(*args, **kwargs) if known else twin(*args, **kwargs)

    return CPU.implements(operation)


def array(tensor: Tensor) -> Any:
    """The tensor's memory as the loops take it."""
    view = _VIEWS.get(tensor.dtype)
    return (tensor if view is None else tensor.view(view)).detach().numpy()


@functools.cache
def like(dtype: torch.dtype) -> Any:
    """An empty array, which tells the loops what lies at an address."""
    return array(torch.empty(0, dtype=dtype, device="cpu"))


def wire_limit(residual: Tensor, wire_dtype: torch.dtype) -> Any:
    """The largest number of the wire's dtype, as one of the residual's."""
    return np.float32(naive.within(torch.finfo(wire_dtype).max, residual.dtype))


def or_empty(matrix: Tensor | None, dtype: torch.dtype) -> Any:
    """An optional matrix as the loops take it; ``[0, 0]`` is none."""
    return array(torch.empty(0, 0, dtype=dtype, device="cpu") if matrix is None else matrix)


def by_dtypes(rows: Sequence[tuple[Tensor, ...]]) -> list[tuple[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]]]:
    """Rows of tensors, grouped by their dtypes, in order."""
    groups: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
    for row in rows:
        groups.setdefault(tuple(tensor.dtype for tensor in row), []).append(row)
    return list(groups.items())


def pieces_table(entries: ParamEntries, sent: int) -> Iterator[tuple[torch.dtype, Any, int]]:
    """By dtype of the parameters: the table of :func:`cpu_update.exchange`, and the number of masked entries."""
    flats = entries.flats
    for dtype in dict.fromkeys(flats[piece.segment.index].dtype for piece in entries.pieces):
        group = [piece for piece in entries.pieces if flats[piece.segment.index].dtype == dtype]
        kept = [piece.kept(sent, entries.block_size) for piece in group]
        *starts, count = accumulate(kept, initial=0)
        addresses = [flats[piece.segment.index].data_ptr() + piece.start * dtype.itemsize for piece in group]
        rows = [piece.row for piece in group]
        yield dtype, np.array([addresses, starts, kept, rows], np.int64).T.copy(), count


@functools.lru_cache(maxsize=16)
def sketch_plan(
    indices: tuple[int, ...], sizes: tuple[int, ...], length: int, widths: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Each chunk's first entry, length, width, rotation, offset, sign and place in the list: int64 ``[chunks, 7]``."""
    rows = [
        (start, min(length, size - start), *naive.draw(index, start // length, length, widths), place)
        for place, (index, size) in enumerate(zip(indices, sizes, strict=True))
        for start in range(0, size, length)
    ]
    return np.array(rows, np.int64)


def rows_of_a_thread(columns: int) -> int:
    """Rows that are worth a thread of their own."""
    return max(1, GRAIN // max(1, columns))


def in_parallel(loop: Callable[[int, int], _T], count: int, grain: int) -> list[_T]:
    """Calls ``loop(first, last)`` for parts of ``0 .. count``, at least ``grain`` long, on as many threads as torch."""
    threads = min(torch.get_num_threads(), -(-count // grain))
    if threads <= 1:
        return [loop(0, count)]
    bounds = [count * i // threads for i in range(threads + 1)]
    others = [_begin(loop, a, b) for a, b in zip(bounds[1:-1], bounds[2:], strict=True)]
    return [loop(bounds[0], bounds[1]), *(other.result() for other in others)]


def _begin(loop: Callable[[int, int], _T], first: int, last: int) -> Future[_T]:
    """Calls ``loop`` on another thread; on this one where the interpreter ends, and starts no thread any more."""
    try:
        return _pool(os.getpid()).submit(loop, first, last)
    except RuntimeError:
        done: Future[_T] = Future()
        done.set_result(loop(first, last))
        return done


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lightning-scape-ops")
