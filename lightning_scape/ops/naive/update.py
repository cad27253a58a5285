"""What an owner does with its shard, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape.ops.naive.rules import RowNumbers, ShardState, adams_step, adamw_step, column
from lightning_scape.ops.naive.wire import gather_blocks, scatter_blocks
from lightning_scape.ops.registry import operation


@operation
def update_adams(shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers) -> Tensor:
    """:func:`adams_step` on the masked entries of a shard; the rest as :func:`update_adamw`. No back end has a twin."""
    hyper, tau = numbers.hyper.rows(numbers.group), _waits(shard, mask, numbers.step)
    new = adams_step(shard.theta, gather_blocks(shard.exp_avg, mask), tau, mean, hyper)
    return _write(shard, mask, numbers, new.theta, new.exp_avg, None)


@operation
def update_adamw(
    shard: ShardState, mask: Tensor | None, mean: Tensor, mine: Tensor | None, numbers: RowNumbers, ranks: int
) -> Tensor:
    """:func:`adamw_step` on the masked entries of a shard; theta, both moments and last_step change in place.

    Example: lr 1, no decay, both betas 0, eps 1e-30, two ranks: ``theta = [[3]]`` at step 1 with ``mean = [[-2]]``,
    ``mine = [[-1]]``, exp_avg_sq ``[[0, 0.5]]``, last steps ``[[0, 0]]`` and mask ``[[1]]`` gives ``theta = [[4]]``,
    exp_avg ``[[0, -2]]``, exp_avg_sq ``[[0, 4]]``.

    Args:
        shard: changed in place. Its second moment is that of the step before without a mask, else it has this step's
            own gradient in it.
        mask: ``[R, q]`` or None.
        mean: ``[R, q]``, A of :func:`adamw_step`.
        mine: likewise of its dtype, a; None without a mask.
        numbers: of each row.
        ranks: N.

    Returns:
        0-dim int64: how many of the entries were updated in the step before too.
    """
    assert shard.exp_avg_sq is not None
    hyper, corrections = numbers.hyper.rows(numbers.group), (column(numbers.first), column(numbers.second))
    tau = _waits(shard, mask, numbers.step)
    moments = gather_blocks(shard.exp_avg, mask), gather_blocks(shard.exp_avg_sq, mask)
    new = adamw_step(shard.theta, *moments, tau, mean, mine, hyper, corrections, ranks)
    return _write(shard, mask, numbers, *new)


def _waits(shard: ShardState, mask: Tensor | None, step: Tensor) -> Tensor:
    """Steps since each masked entry's last update, at least 1: ``[R, q]`` of theta's dtype."""
    return (column(step) - gather_blocks(shard.last_step, mask)).clamp(min=1).to(shard.theta.dtype)


def _write(
    shard: ShardState,
    mask: Tensor | None,
    numbers: RowNumbers,
    theta: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
) -> Tensor:
    """Writes an update's result, but for rows of scale 0; counts entries that were updated in the step before."""
    last_step = gather_blocks(shard.last_step, mask)
    step, applied = column(numbers.step).to(last_step), column(numbers.scale) != 0
    again = (applied & (step - last_step == 1)).sum()
    for matrix, value in ((shard.exp_avg, exp_avg), (shard.exp_avg_sq, exp_avg_sq), (shard.last_step, step)):
        if matrix is not None and value is not None:
            scatter_blocks(matrix, mask, torch.where(applied, value, gather_blocks(matrix, mask)))
    shard.theta.copy_(torch.where(applied, theta, shard.theta))
    return again
