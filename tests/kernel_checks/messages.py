"""Checks of what travels: values in few bits, and entries that leave the residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_checks.inputs import (
    BOTH,
    Checks,
    assert_same_bits,
    awkward,
    groups_of_all_kinds,
)
from lightning_scape.ops import naive


class MessageChecks(Checks):
    """Packed values, and compaction."""

    @pytest.mark.parametrize("width", [4, 8])
    @pytest.mark.parametrize(("shards", "count"), [(1, 1), (3, 64), (2, 700), (3, 4097), (2, 0)])
    def test_quantize_and_dequantize_equal_their_twins(self, width: int, shards: int, count: int) -> None:
        theirs = groups_of_all_kinds(shards, count, (1 << (width - 1)) - 1, seed=count)
        ours = theirs.to(self.device, copy=True)
        message = self.module.quantize(ours, width)
        assert_same_bits(message.cpu(), naive.quantize(theirs, width))
        assert_same_bits(ours.cpu(), theirs)
        read = self.module.dequantize(message, width, count)
        assert_same_bits(read.cpu(), naive.dequantize(message.cpu(), width, count))

    @pytest.mark.parametrize(("dtype", "sent"), [(torch.float32, 3), (torch.float64, None)])
    def test_quantize_with_error_equals_its_twin(self, dtype: torch.dtype, sent: int | None) -> None:
        theirs, values = torch.randn(70, 50, dtype=dtype), torch.randn(70, sent or 50, dtype=dtype)
        mask = None if sent is None else naive.select(theirs, sent)
        before = values.roll(1).where(torch.arange(70).unsqueeze(1) % 5 > 0, values)  # some stand still
        for scale in (torch.ones(()), torch.zeros(()), torch.arange(70) % 3.0):
            ours = theirs.to(self.device, copy=True)
            there = None if mask is None else mask.to(self.device)
            mine, moved = values.to(self.device, copy=True), values.clone()
            given = ours, there, mine, before.to(self.device), scale.to(self.device)
            message = self.module.quantize_with_error(*given, 4)
            assert_same_bits(message.cpu(), naive.quantize_with_error(theirs, mask, moved, before, scale, 4))
            assert_same_bits(ours.cpu(), theirs)
            assert_same_bits(mine.cpu(), moved)

    @pytest.mark.parametrize("width", [4, 8])
    def test_quantize_takes_rows_that_lie_apart(self, width: int) -> None:
        wide = groups_of_all_kinds(3, 200, 7, seed=0)
        ours, theirs = wide.to(self.device, copy=True)[:, :100], wide[:, :100].contiguous()
        assert_same_bits(self.module.quantize(ours, width).cpu(), naive.quantize(theirs, width))
        assert_same_bits(ours.cpu(), theirs)

    @pytest.mark.parametrize(
        ("wire", "residual_dtype", "sent"),
        [
            (torch.float32, torch.float32, 1),
            (torch.bfloat16, torch.float32, 2),
            (torch.bfloat16, torch.float64, 200),
            (torch.float16, torch.float32, None),
        ],
    )
    def test_compact_equals_its_twin(self, wire: torch.dtype, residual_dtype: torch.dtype, sent: int | None) -> None:
        residual = awkward(11, 200).to(residual_dtype)
        residual[8, :3] = torch.tensor([3.4e38, -3.4e38, 65520.0])  # beyond the wire's range, or rounded up to it
        residual[9, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-40, -1e-45])  # ties of bf16; denormals
        mask = None if sent is None else naive.select(residual, sent)
        own = residual.to(self.device, copy=True)
        ours = self.module.compact(own, None if mask is None else mask.to(self.device), wire, self.scalar(1.0))
        theirs = naive.compact(residual, mask, wire, torch.ones(()))
        ours, own = ours.cpu(), own.cpu()
        assert torch.equal(ours.isnan(), theirs.isnan())  # which NaN is left open
        assert_same_bits(ours.nan_to_num(), theirs.nan_to_num())
        assert_same_bits(own.nan_to_num(), residual.nan_to_num())

    @pytest.mark.parametrize(("residual_dtype", "sent"), [(torch.float32, 2), (torch.float64, None)])
    def test_compact_leaves_rows_alone_whose_scale_is_zero(self, residual_dtype: torch.dtype, sent: int | None) -> None:
        residual, scale = awkward(600, 20).to(residual_dtype), torch.tensor([0.5, 0.0, 1.0]).repeat(200)
        mask = None if sent is None else naive.select(residual, sent)
        (values, expected), ((left, twin), *_) = self.both("compact", residual, mask, torch.bfloat16, scale)
        assert_same_bits(values.nan_to_num(), expected.nan_to_num())
        assert_same_bits(left.nan_to_num(), twin.nan_to_num())
        assert (values[1::3] == 0).all()
        assert_same_bits(left[1::3], residual[1::3])
        every = self.both("compact", residual, mask, torch.bfloat16, torch.ones(()))[0][0]
        assert_same_bits(values[2::3].nan_to_num(), every[2::3].nan_to_num())  # a scale does not scale what is sent
        assert_same_bits(values[::3].nan_to_num(), every[::3].nan_to_num())

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_compact_into_a_part_of_a_buffer(self, either: Any) -> None:
        residual, scale = torch.randn(6, 200, device=self.device), self.scalar(1.0)
        mask = naive.select(residual, 2)
        expected = either.compact(residual.clone(), mask, torch.bfloat16, scale)
        buffer = torch.full((8, 2), 7.0, dtype=torch.bfloat16, device=self.device)
        assert either.compact(residual, mask, torch.bfloat16, scale, out=buffer[1:7]).data_ptr() == buffer[1].data_ptr()
        assert_same_bits(buffer[1:7].cpu(), expected.cpu())
        assert (buffer[[0, 7]] == 7.0).all()
