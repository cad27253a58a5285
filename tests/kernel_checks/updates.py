"""Checks of an owner's update."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernel_checks.inputs import (
    Checks,
    assert_same_bits,
    hyper,
)
from lightning_scape import ops
from lightning_scape.ops import naive


class Shard(NamedTuple):
    """A shard in the middle of a training, and what a step does to it: by row, or the same for all rows."""

    ROWS = 300

    theta: Tensor
    first: Tensor
    second: Tensor
    last_step: Tensor
    mask: Tensor | None
    total: Tensor
    own: Tensor | None
    step: Tensor
    scale: Tensor
    lr: Any
    group: Tensor | None

    @classmethod
    def draw(cls, masked: bool, by_row: bool, dtype: torch.dtype) -> Shard:
        """Entries have waited for one step, a few, or thousands. A third of the rows stays out of a step by row."""
        rows, length, generator = cls.ROWS, 20, torch.Generator().manual_seed(1)
        first, statistic = (torch.randn(rows, length, generator=generator, dtype=dtype) for _ in range(2))
        second = torch.rand(rows, length, generator=generator, dtype=dtype)
        second *= 10 ** (-6 * torch.rand(rows, length, generator=generator, dtype=dtype))
        tau = torch.randint(1, 6, (rows, length), generator=generator)
        tau[::7] = torch.randint(1, 4900, (len(tau[::7]), length), generator=generator)
        sent = 3 if masked else length
        theta, total, own = (torch.randn(rows, sent, generator=generator, dtype=dtype) for _ in range(3))
        total[0], second[1], scale = 0.0, 0.0, torch.ones(())
        # Pads, all zeros: a checkpoint leaves their clocks ahead where their parameter has missed steps.
        statistic[::11, 0], tau[::11, 0], tau[::22, 0] = 1e9, 0, -3
        for zeros in (first, second, theta, total, own):
            zeros[::11, 0] = 0.0
        step, lr, group = torch.tensor(5000), 1e-3, None
        if by_row:
            step, lr = torch.randint(4900, 5000, (rows,), generator=generator), torch.linspace(1e-4, 1e-2, 7)
            group = torch.randint(0, 7, (rows,), generator=generator).int()
            scale = torch.rand(rows, generator=generator) + 0.1
            scale[2::3], total[2::3] = 0.0, float("nan")
        last_step = ((step.unsqueeze(1) if by_row else step) - tau).int()
        mask = naive.select(statistic, sent) if masked else None
        part = own if masked else None
        return cls(theta, first, second, last_step, mask, total, part, step.int(), scale, lr, group)


class UpdateChecks(Checks):
    """Of AdamW's update."""

    @pytest.mark.parametrize(
        ("masked", "by_row", "dtype"),
        [(True, False, torch.float32), (False, True, torch.float32), (True, True, torch.float64)],
    )
    def test_adamws_update_equals_its_twin_within_rounding(
        self, masked: bool, by_row: bool, dtype: torch.dtype
    ) -> None:
        rtol = 2e-6 if dtype is torch.float32 else 1e-14
        self.compare_adamw(masked, by_row, dtype, rtol, ranks=1 if masked == by_row else 4)

    @pytest.mark.parametrize(
        ("decay", "beta1", "masked"), [(0.0, 0.999, True), (1000.0, 0.0, False), (1500.0, 0.999, True)]
    )
    def test_adamws_update_with_extreme_hyperparameters(self, decay: float, beta1: float, masked: bool) -> None:
        self.compare_adamw(masked, False, torch.float32, 2e-6, ranks=4, decay=decay, beta1=beta1)

    @pytest.mark.parametrize("masked", [True, False])
    def test_adamws_second_moment_stays_finite_whatever_arrives(self, masked: bool) -> None:
        """Squares beyond fp32, of what arrives and of what the owner has seen: their difference must not be NaN."""
        sizes = torch.tensor([0.0, 1.0, 1e15, 1e19, 3e19, 3e38])
        total = sizes.view(6, 1).expand(6, 12).contiguous()
        second = sizes.square().clamp(max=3.4e38).view(1, 6).expand(6, 6).repeat(1, 2).contiguous()
        last_step = torch.tensor([[8] * 6 + [0] * 6] * 6, dtype=torch.int32)
        mask = torch.arange(12, dtype=torch.uint8).expand(6, 12).contiguous() if masked else None
        state = torch.zeros(6, 12), torch.zeros(6, 12), second, last_step
        one = hyper("cpu", torch.float32)
        half = torch.tensor(0.5)
        row_numbers = ops.RowNumbers(torch.tensor(9, dtype=torch.int32), torch.ones(()), one, half, half)
        own = total.flip(0) if masked else None
        _, ((ours_after, theirs_after), *_) = self.both(
            "update_adamw", ops.ShardState(*state), mask, total, own, row_numbers, 4
        )
        for ours, theirs in zip(ours_after, theirs_after, strict=True):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)

    def compare_adamw(
        self, masked: bool, by_row: bool, dtype: torch.dtype, rtol: float, ranks: int, **options: float
    ) -> None:
        shard = Shard.draw(masked, by_row, dtype)
        corrections = torch.tensor(0.6, dtype=dtype), torch.tensor(0.3, dtype=dtype)
        if by_row:
            corrections = (
                torch.linspace(0.1, 1, Shard.ROWS, dtype=dtype),
                torch.linspace(0.05, 1, Shard.ROWS, dtype=dtype),
            )
        single = hyper("cpu", shard.theta.dtype, shard.lr, **options)
        numbers = ops.RowNumbers(shard.step, shard.scale, single, *corrections, shard.group)
        state = ops.ShardState(shard.theta, shard.first, shard.second, shard.last_step)
        given = state, shard.mask, shard.total, shard.own, numbers, ranks
        (ours, again), ((after, twins), *_) = self.both("update_adamw", *given)
        assert int(ours) == int(again)
        still = shard.scale.expand(Shard.ROWS) == 0
        for field, mine, twin, old in zip(state._fields, after, twins, state, strict=True):
            if old.is_floating_point():
                # Differences of nearly equal numbers keep the absolute error of what they are made of.
                torch.testing.assert_close(mine, twin, rtol=rtol, atol=10 * rtol if field == "theta" else rtol)
            else:
                assert torch.equal(mine, twin)
            assert_same_bits(mine[still], old[still])
            assert not torch.equal(mine[~still], old[~still])
