"""Checks of what ranks entries."""

from __future__ import annotations

import pytest
import torch

from kernel_checks.inputs import (
    Checks,
    assert_same_bits,
    awkward,
)
from lightning_scape import ops
from lightning_scape.ops import naive


class MaskChecks(Checks):
    """Selection, and masks on their way."""

    @pytest.mark.parametrize(
        ("rows", "length", "sent"),
        [(23, 200, 2), (9, 250, 25), (5, 256, 32), (9, 100, 1), (9, 8, 8), (3, 1000, 1), (2, 256, 256), (2, 5000, 3)],
    )
    def test_select_equals_its_twin(self, rows: int, length: int, sent: int) -> None:
        statistic = awkward(rows, length)
        assert_same_bits(self.module.select(statistic.to(self.device), sent).cpu(), naive.select(statistic, sent))

    @pytest.mark.parametrize(
        ("rows", "length", "sent"),
        [(23, 200, 30), (9, 250, 249), (5, 256, 33), (70, 100, 100), (9, 8, 1), (3, 1000, 70), (2, 5000, 900)],
    )
    def test_a_mask_travels_as_bits_and_comes_back_in_order(self, rows: int, length: int, sent: int) -> None:
        mask = naive.select(torch.randn(rows, length), sent)
        bits = self.module.pack_mask(mask.to(self.device), length)
        assert_same_bits(bits.cpu(), naive.pack_mask(mask, length))
        assert bits.shape == (rows, -(-length // 8))
        back = self.module.unpack_mask(bits, sent, length).cpu()
        assert_same_bits(back, naive.unpack_mask(bits.cpu(), sent, length))
        assert back.dtype == mask.dtype
        assert torch.equal(back.int(), mask.int().sort(dim=1).values)
        assert ops.mask_bytes(sent, length) == (bits.shape[1] if ops.as_bits(sent, length) else mask[0].nbytes)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_select_ranks_statistics_of_other_dtypes(self, dtype: torch.dtype) -> None:
        statistic = awkward(9, 100).to(dtype)
        assert_same_bits(self.module.select(statistic.to(self.device), 4).cpu(), naive.select(statistic, 4))

    def test_select_of_an_empty_shard_is_empty(self) -> None:
        assert self.module.select(torch.zeros(0, 200, device=self.device), 2).shape == (0, 2)

    def test_select_reads_rows_that_lie_apart(self) -> None:
        wide = awkward(9, 300)
        assert_same_bits(
            self.module.select(wide.to(self.device)[:, :200], 2).cpu(), naive.select(wide[:, :200].contiguous(), 2)
        )
