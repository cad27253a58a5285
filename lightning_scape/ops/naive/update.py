"""What an owner does with its shard: ``tau`` steps of an optimizer at once (docs/design.md, 4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.masks import column, cut, gather_blocks, scatter_blocks

LONGEST_MOVE = 25.0
"""The largest move of an entry in one update, in learning rates (AdamW)."""


class Hyper(NamedTuple):
    """Hyperparameters of parameter groups, ``[G]`` each, or columns ``[R, 1]`` by row; in the state's dtype.

    What fp32 cannot form from rounded betas without losing digits (``1 - 0.999`` is off by 5e-5) stands here ready.
    """

    lr: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    eps: Tensor
    keep: Tensor
    """``1 - lr * weight_decay``."""
    log_keep: Tensor
    """Of its magnitude."""

    @classmethod
    def of(
        cls, dtype: torch.dtype, lr: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor, weight_decay: Tensor
    ) -> Hyper:
        """From the five numbers, given in fp64."""
        keep = 1 - lr * weight_decay
        exact = (lr, 1 - beta1, beta2, 1 - beta2, eps, keep, keep.abs().log())
        return cls(*(value.to(dtype) for value in exact))

    def rows(self, group: Tensor | None) -> Hyper:
        """Those of each row, as columns, from the groups ``[R]`` of the rows; None: one group has all."""
        return Hyper(*(value if group is None else column(value, group) for value in self))


class ShardState(NamedTuple):
    """What an update changes: the rows of a shard."""

    theta: Tensor
    """``[R, q]``, contiguous: values of the masked parameters."""
    exp_avg: Tensor
    """``[R, B]`` of theta's dtype."""
    exp_avg_sq: Tensor | None
    """Likewise; None: the update of AdamS."""
    last_step: Tensor
    """``[R, B]`` int32, step of each entry's last update."""


class RowNumbers(NamedTuple):
    """What an update needs to know of each row: ``[R]``, or 0-dim where it is the same for all."""

    step: Tensor
    """int32, t of this step."""
    scale: Tensor
    """fp32; 0 changes nothing."""
    hyper: Hyper
    """By group."""
    first: Tensor
    """Divides AdamW's first moments: ``1 - beta1**t``."""
    second: Tensor
    """Divides AdamW's second moments: ``1 - beta2**t``."""
    group: Tensor | None = None
    """int32 ``[R]``, the parameter group of each row; None where there is one."""

    def cut(self, rows: slice) -> RowNumbers:
        """Those of some rows."""
        return RowNumbers(*(cut(each, rows) for each in self))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Hyperparameters, ``[G, 7]``, and numbers of rows, fp64 ``[R, 5]``, or ``[1, 5]`` for all of them.

        These are the group, the step, whether the row takes part, and what divides the first and the second moments.
        """
        group = self.step * 0 if self.group is None else self.group
        group, *rest = torch.broadcast_tensors(group, self.step, self.scale != 0, self.first, self.second)
        by_row = torch.empty(*group.shape, 5, dtype=torch.float64, device=group.device)
        for out, numbers in zip(by_row.unbind(-1), (group, *rest), strict=True):  # in a third of the time of a stack
            out.copy_(numbers)
        return torch.stack(self.hyper, -1).view(-1, 7), by_row.view(-1, 5)


def adams_step(theta: Tensor, exp_avg: Tensor, tau: Tensor, total: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """``tau`` steps of AdamS at once, from the sum of their gradients (docs/design.md, 4; AdamS: arXiv 2505.16363).

    With ``g = A / tau``, the mean gradient since the last update, the first moment's tau steps are one step of backward
    Euler::

        bt    = b1/(b1 + (1-b1)*tau)
        m'    = bt*m + (1-bt)*g
        S     = tau*m'
        v     = b2*m**2 + (1-b2)*A**2/tau             A**2/tau estimates E[g**2] per step
        theta = (1 - lr*wd)**tau * theta - lr*S/(sqrt(v)+eps)

    It is ``S = tau*g + (m - m')*b1/(1-b1)``: all of a gradient reaches the parameter in the end, whatever the waits. On
    a quadratic whose curvature, in units of the step size, is h, with constant tau and b1 = 0.9, it is stable up to
    ``h = 2*(2*b1/(1-b1)/tau + 1)/tau``: 10, 0.56 and 0.024 (tau = 2, 10, 100). AdamS is up to 38.

    For ``tau = 1`` this is AdamS, term for term. For ``tau > 1``, v rests on a single sample of ``E[g**2]`` and one of
    ``E[m**2]``.

    All tensors have one shape and float dtype; pure.

    Args:
        theta: parameter values.
        exp_avg: m, first moment after the last update.
        tau: steps since the last update, >= 1.
        total: A, mean over ranks of the gradients summed since the last update.
        hyper: lr, betas, eps, weight decay.

    Returns:
        theta and m'.
    """
    m, h = exp_avg, hyper
    new, moved = _first_moments(m, tau, total, h)
    v = m.square() * h.beta2 + total.square() / tau * h.one_minus_beta2
    return _decay(tau, h) * theta - moved * h.lr / (v.sqrt() + h.eps), new


def _first_moments(m: Tensor, tau: Tensor, total: Tensor, h: Hyper) -> tuple[Tensor, Tensor]:
    """``m'`` and ``S`` of :func:`adams_step`."""
    one_minus_bt = tau * h.one_minus_beta1 / ((tau - 1) * h.one_minus_beta1 + 1)
    new = (1 - one_minus_bt) * m + one_minus_bt * (total / tau)
    return new, tau * new


def _decay(tau: Tensor, h: Hyper) -> Tensor:
    """``(1 - lr*wd)**tau``; for one step to the last digit. AdamW allows ``lr*wd`` above 1, too."""
    magnitude = torch.where(tau == 1, h.keep.abs(), (tau * h.log_keep).exp())
    return torch.where((h.keep < 0) & (tau % 2 == 1), -magnitude, magnitude)


def adamw_step(
    theta: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    tau: Tensor,
    total: Tensor,
    mine: Tensor | None,
    hyper: Hyper,
    corrections: tuple[Tensor, Tensor],
    ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``tau`` steps of AdamW at once, from the sum of their gradients (docs/design.md, 4.1, has the reasons).

    The first moment m', what it moves S, and the decay are those of :func:`adams_step`, with AdamW's bias corrections
    ``c1 = 1 - b1**t`` and ``c2 = 1 - b2**t``. The owner's v has taken in an N-th of its own gradient's square in every
    step (:func:`accumulate_exp_avg_sq`). At an update it takes in what the ranks have in common::

        x     = A**2 for tau = 1, a*A for tau > 1
        v     = max(0, v + min((1-b2)/tau, 1/tau**2) * (x - a**2/N))     # AdamW's (1-b2) * A**2 at least for tau = 1
        u     = v/c2                                                     # AdamW's mean square, per step
        theta = (1 - lr*wd)**tau * theta - lr * S/c1 / (sqrt(u) + eps)

    For ``tau = 1`` that is AdamW, term for term. For ``tau > 1`` an update is also held to what tau steps of AdamW
    would do, and to a move of L = LONGEST_MOVE learning rates::

        v     = v + (1-b2) * max(0, A**2 - N * tau**2 * v/c2)            # what the owner cannot have seen
        u     = max(v/c2, (m'/c1)**2, (S/c1 / L)**2)

    Without ``mine``, everything is sent: A is the averaged gradient itself, and nothing was added to v before::

        v     = b2*v + (1-b2) * A**2/tau                                 # u as above

    All tensors have one shape and float dtype; pure.

    Args:
        theta: parameter values.
        exp_avg: m, first moment after the last update, not corrected.
        exp_avg_sq: v, not corrected.
        tau: steps since the last update, >= 1.
        total: A, mean over ranks of the gradients summed since the last update.
        mine: a, the owner's sum of them; None where everything is sent.
        hyper: lr, betas, eps, weight decay.
        corrections: c1 and c2.
        ranks: N.

    Returns:
        theta, m' and v.
    """
    h, (c1, c2), v, largest = hyper, corrections, exp_avg_sq, torch.finfo(total.dtype).max
    new, moved = _first_moments(exp_avg, tau, total, h)
    moved = moved / c1
    common = torch.maximum((new / c1).abs(), (moved * (1 / LONGEST_MOVE)).abs())
    common = torch.where(tau == 1, 0.0, common)
    squared = total.square().clamp(max=largest)
    if mine is None:
        v = v * h.beta2 + squared / tau * h.one_minus_beta2
    else:
        shared = torch.where(tau == 1, squared, (mine * total).clamp(-largest, largest))
        weight = h.one_minus_beta2 / torch.maximum(tau, h.one_minus_beta2 * tau * tau)
        least = torch.where(tau == 1, squared * h.one_minus_beta2, 0.0)
        v = torch.maximum(weight * (shared - mine.square().clamp(max=largest) / ranks) + v, least)
        unseen = (squared - (v / c2 * ranks * tau * tau).clamp(max=largest)).clamp(min=0)
        v = torch.where(tau == 1, 0.0, unseen) * h.one_minus_beta2 + v
    v = v.clamp(max=largest)
    u = torch.maximum(v / c2, common.square())
    return _decay(tau, h) * theta - moved * h.lr / (u.sqrt() + h.eps), new, v


@operation
def update_shard(
    shard: ShardState, mask: Tensor | None, mean: Tensor, mine: Tensor | None, numbers: RowNumbers, ranks: int
) -> None:
    """Updates the masked entries of a shard by :func:`adamw_step`; theta, both moments and last_step change in place.

    Example: lr 1, no decay, both betas 0, eps 1e-30, two ranks: ``theta = [[3]]`` at step 1 with ``mean = [[-2]]``,
    ``mine = [[-1]]``, exp_avg_sq ``[[0, 0.5]]``, last steps ``[[0, 0]]`` and mask ``[[1]]`` gives ``theta = [[4]]``,
    exp_avg ``[[0, -2]]``, exp_avg_sq ``[[0, 4]]``.

    Args:
        shard: changed in place. Its second moment is that of the step before without a mask, else it has this step's
            own gradient in it. Without one the rule is :func:`adams_step`, of which no back end has a twin.
        mask: ``[R, q]`` or None.
        mean: ``[R, q]``, A of :func:`adamw_step`.
        mine: likewise of its dtype, a; None without a mask.
        numbers: of each row. Rows of scale 0 are left alone.
        ranks: N.
    """
    theta, exp_avg, exp_avg_sq, last_step = shard
    now, applied, hyper = column(numbers.step), column(numbers.scale) != 0, numbers.hyper.rows(numbers.group)
    tau = (now - gather_blocks(last_step, mask)).clamp(min=1).to(theta.dtype)
    m = gather_blocks(exp_avg, mask)
    if exp_avg_sq is None:
        moved, *new = adams_step(theta, m, tau, mean, hyper)
        changed = [exp_avg, last_step]
    else:
        v, corrections = gather_blocks(exp_avg_sq, mask), (column(numbers.first), column(numbers.second))
        moved, *new = adamw_step(theta, m, v, tau, mean, mine, hyper, corrections, ranks)
        changed = [exp_avg, exp_avg_sq, last_step]
    for matrix, value in zip(changed, (*new, now.to(last_step)), strict=True):
        scatter_blocks(matrix, mask, torch.where(applied, value, gather_blocks(matrix, mask)))
    theta.copy_(torch.where(applied, moved, theta))
