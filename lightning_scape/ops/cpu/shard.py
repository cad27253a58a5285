"""What an owner does with its shard, and all ranks with their parameters: a part of :mod:`..cpu`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.ops import naive
from lightning_scape.ops.cpu import update as cpu_update
from lightning_scape.ops.cpu.arrays import (
    GRAIN,
    array,
    implements,
    in_parallel,
    like,
    or_empty,
    pieces_table,
    rows_of_a_thread,
)
from lightning_scape.ops.naive import ParamEntries, RowNumbers, ShardState, chunked, position_dtype


@implements
def update_adamw(
    shard: ShardState, mask: Tensor | None, mean: Tensor, mine: Tensor | None, numbers: RowNumbers, ranks: int
) -> Tensor:
    theta, exp_avg, second, last_step = shard
    assert second is not None
    rule = tuple(map(np.float32, (ranks, 1 / naive.LONGEST_MOVE, torch.finfo(theta.dtype).max)))
    loop = functools.partial(
        cpu_update.update,
        array(theta),
        (array(exp_avg), array(second)),
        array(last_step),
        or_empty(mask, position_dtype(exp_avg.shape[1])),
        (array(mean), array(mean if mine is None else mine)),
        torch.stack(torch.broadcast_tensors(*numbers.hyper), -1).view(-1, len(numbers.hyper)).numpy(),  # [G, 8]
        _by_row(numbers),
        rule,
    )
    again = in_parallel(loop, theta.shape[0], rows_of_a_thread(theta.shape[1]))
    return torch.tensor(sum(again), dtype=torch.int64, device="cpu")


def _by_row(numbers: RowNumbers) -> tuple[Any, ...]:
    """Group, step, scale and corrections: ``[R]`` each, or ``[1]`` for all rows."""
    group = numbers.group
    differ = group is not None and any(value.dim() for value in numbers.hyper)
    groups = array(group.int()) if group is not None and differ else np.zeros(1, np.int32)
    rest = (numbers.step.int(), numbers.scale.float(), numbers.first, numbers.second)
    return (groups, *(array(tensor.reshape(-1)) for tensor in rest))


@implements
def mean(contributions: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    first = contributions[0]
    if any((each.dtype, each.shape) != (first.dtype, first.shape) for each in contributions):
        return naive.mean(contributions, dtype)
    total, table = torch.empty(first.shape, dtype=dtype, device="cpu"), [each.data_ptr() for each in contributions]
    loop = functools.partial(cpu_update.mean, np.array(table, np.int64), array(total.view(-1)), like(first.dtype))
    in_parallel(loop, total.numel(), GRAIN)
    return total


@implements
def changes(theta: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(theta.shape, dtype=dtype, device="cpu")
    loop = functools.partial(cpu_update.changes, *(array(each.view(-1)) for each in (theta, before, out)))
    in_parallel(loop, out.numel(), GRAIN)
    return out


# --------------------------------------------------------------------------- parameters: each a flat tensor of its own


@implements
def gather_params(entries: ParamEntries, out: Tensor, renew: bool = False) -> None:
    if entries.mask is None:  # plain copies
        chunked.gather_params(entries, out, renew)
    else:
        _exchange(entries, out, cpu_update.RENEW if renew else cpu_update.GATHER)


@implements
def scatter_params(
    entries: ParamEntries,
    values: Tensor,
    add: bool = False,
    scale: Tensor | None = None,
    error: Tensor | None = None,
) -> None:
    if scale is not None:
        scales = array(scale.reshape(-1))
        taken = [piece for piece in entries.pieces if scales[piece.row if scale.dim() else 0] != 0]
        entries = entries._replace(pieces=taken)
    if entries.mask is None:
        chunked.scatter_params(entries, values, add, None, error)
    else:
        _exchange(entries, values, cpu_update.ADD if add else cpu_update.WRITE, error if add else None)


def _exchange(entries: ParamEntries, values: Tensor, way: int, error: Tensor | None = None) -> None:
    assert entries.mask is not None
    for dtype, table, count in pieces_table(entries, entries.mask.shape[1]):
        rest = entries.block_size, like(dtype)
        loop = functools.partial(cpu_update.exchange, table, array(entries.mask), array(values), way, *rest)
        if error is not None and dtype.itemsize < error.itemsize:
            loop = functools.partial(cpu_update.add, table, array(entries.mask), array(values), array(error), *rest)
        in_parallel(loop, count, GRAIN)


@implements
def gather_blocks(matrix: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return matrix
    out = torch.empty(mask.shape, dtype=matrix.dtype, device="cpu")
    _exchange_blocks(matrix, mask, out, cpu_update.GATHER)
    return out


@implements
def scatter_blocks(matrix: Tensor, mask: Tensor | None, values: Tensor, add: bool = False) -> None:
    if mask is None:
        naive.scatter_blocks(matrix, mask, values, add)
    else:
        _exchange_blocks(matrix, mask, values, cpu_update.ADD if add else cpu_update.WRITE)


def _exchange_blocks(matrix: Tensor, mask: Tensor, values: Tensor, way: int) -> None:
    """The matrix as if it were a parameter's only piece."""
    table = np.array([[matrix.data_ptr(), 0, mask.numel(), 0]], np.int64)
    rest = array(mask), array(values), way, matrix.shape[1], like(matrix.dtype)
    in_parallel(functools.partial(cpu_update.exchange, table, *rest), mask.numel(), GRAIN)
