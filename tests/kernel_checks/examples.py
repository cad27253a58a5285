"""The examples of the operations' docstrings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_checks.inputs import (
    BOTH,
    Checks,
    assert_same_bits,
)
from lightning_scape import ops
from lightning_scape.core.layout import Layout


class ExampleChecks(Checks):
    """By the definition, and by the implementation."""

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_select(self, either: Any) -> None:
        statistic = torch.tensor([[3.0, -5, 0, 0], [0, 0, 0, 0]], device=self.device)
        assert either.select(statistic, 2).tolist() == [[1, 0], [0, 1]]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_fold(self, either: Any) -> None:
        residual = torch.tensor([1.0, 1.0], device=self.device)
        either.fold([residual], [torch.tensor([3.0, -8.0], device=self.device)], self.scalar(0.5))
        assert residual.tolist() == [2.5, -3.0]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_compact(self, either: Any) -> None:
        residual = torch.tensor([[1.00390625, 5.0]], device=self.device)
        mask = torch.tensor([[0]], dtype=torch.uint8, device=self.device)
        sent = either.compact(residual, mask, torch.bfloat16, self.scalar(1.0))
        assert sent.dtype is torch.bfloat16
        assert sent.tolist() == [[1.0]]
        assert residual.tolist() == [[0.00390625, 5.0]]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_update_adamw(self, either: Any) -> None:
        theta, total = (torch.tensor([[v]], device=self.device) for v in (3.0, -2.0))
        exp_avg, exp_avg_sq = torch.tensor([[[0.0, 0.0]], [[0.0, 0.5]]], device=self.device)
        last_step = torch.zeros(1, 2, dtype=torch.int32, device=self.device)
        numbers = (torch.tensor(v, dtype=torch.float64, device=self.device) for v in (1.0, 0.0, 0.0, 1e-30, 0.0))
        single, one = ops.Hyper.of(torch.float32, *numbers), self.scalar(1.0)
        mask = torch.tensor([[1]], dtype=torch.uint8, device=self.device)
        shard = ops.ShardState(theta, exp_avg, exp_avg_sq, last_step)
        row_numbers = ops.RowNumbers(self.scalar(1, torch.int32), one, single, one, one)
        again = either.update_adamw(shard, mask, total, total / 2, row_numbers, 2)
        assert (theta.tolist(), exp_avg.tolist(), exp_avg_sq.tolist()) == ([[4.0]], [[0.0, -2.0]], [[0.0, 4.0]])
        assert (last_step.tolist(), int(again)) == ([[0, 1]], 1)

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_gather(self, either: Any) -> None:
        flats = [torch.tensor([5.0, 6.0, 7.0], device=self.device), torch.tensor([8.0], device=self.device)]
        mask = torch.tensor([[1], [0], [0]], dtype=torch.uint8, device=self.device)
        out = torch.zeros(3, 1, device=self.device)
        pieces = list(Layout([3, 1], [0, 0], 2, 1).everything().pieces)
        entries = ops.ParamEntries(flats, pieces, mask, 2)
        either.gather_params(entries, out)
        assert out.tolist() == [[6.0], [7.0], [8.0]]
        either.scatter_params(entries, -out)
        assert [flat.tolist() for flat in flats] == [[5.0, -6.0, -7.0], [-8.0]]
        changes = torch.full((3, 1), 0.5, dtype=torch.bfloat16, device=self.device)
        either.scatter_params(entries, changes, True)
        assert [flat.tolist() for flat in flats] == [[5.0, -5.5, -6.5], [-7.5]]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_renewed_masters(self, either: Any) -> None:
        parameter = torch.tensor([1.0, 3.0], dtype=torch.bfloat16, device=self.device)
        masters = torch.tensor([[1.001, 2.0]], device=self.device)
        pieces = list(Layout([2], [0], 2, 1).everything().pieces)
        either.gather_params(ops.ParamEntries([parameter], pieces, None, 2), masters, renew=True)
        assert_same_bits(masters.cpu(), torch.tensor([[1.001, 3.0]]))

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_what_rounding_loses(self, either: Any) -> None:
        parameter = torch.ones(1, dtype=torch.bfloat16, device=self.device)
        added, error = torch.full((1, 1), 0.003, device=self.device), torch.zeros(1, 1, device=self.device)
        entries = ops.ParamEntries([parameter], list(Layout([1], [0], 1, 1).everything().pieces), None, 1)
        either.scatter_params(entries, added, True, None, error)
        assert parameter.tolist() == [1.0]
        assert_same_bits(error.cpu(), added.cpu())

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_a_mask_as_bits(self, either: Any) -> None:
        mask = torch.tensor([[9, 0]], dtype=torch.uint8, device=self.device)
        assert either.pack_mask(mask, 10).tolist() == [[1, 2]]
        assert either.unpack_mask(either.pack_mask(mask, 10), 2, 10).tolist() == [[0, 9]]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_quantize_and_dequantize(self, either: Any) -> None:
        values = torch.tensor([[3.5, -7.0, 0.25]], device=self.device)
        message = either.quantize(values, 4)
        assert message.dtype is torch.uint8
        assert message.tolist() == [[[0x0B, *[0x77] * 31, 0x80, 0x3F]]]
        assert values.tolist() == [[-0.5, 0.0, 0.25]]
        assert_same_bits(either.dequantize(message, 4, 3).cpu(), torch.tensor([[4.0, -7.0, -0.0]]))
