"""Checks of what reads whole gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks.inputs import (
    BOTH,
    FLOATS,
    Checks,
    assert_same_bits,
    hyper,
)
from lightning_scape import ops
from lightning_scape.ops import naive
from lightning_scape.scape.clipping import SKETCH_WIDTHS, random_signs


class GradientChecks(Checks):
    """Folds, moments and norms."""

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float64])
    def test_fold_equals_its_twin(self, dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
        sizes = (5000, 4096, 1, 0, 77)
        buffer = torch.randn(sum(sizes) + 20, dtype=residual_dtype)
        grads = [torch.randn(n).to(dtype) for n in sizes]
        results = []
        for module, device in ((naive, "cpu"), (self.module, self.device)):
            own = buffer.to(device, copy=True)
            residuals = [part[:n] for part, n in zip(own.split([n + 4 for n in sizes]), sizes, strict=True)]
            given = [*(grad.to(device) for grad in grads[:-1]), None]
            module.fold(residuals, given, torch.tensor(0.7, device=device))
            results.append(own.cpu())
        assert_same_bits(*results)

    def test_fold_with_scale_one_equals_the_twin_on_the_host(self) -> None:
        residual, grad = torch.randn(3000), torch.randn(3000)
        other = residual.to(self.device, copy=True)
        naive.fold([residual], [grad], torch.ones(()))
        self.module.fold([other], [grad.to(self.device)], self.scalar(1.0))
        assert_same_bits(other.cpu(), residual)

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_scale_zero_changes_nothing_though_gradients_are_not_finite(self, either: Any) -> None:
        zero, bad = self.scalar(0.0), torch.full((300,), float("nan"), device=self.device)
        state = [torch.randn(300, device=self.device) for _ in range(4)]
        before = [tensor.clone() for tensor in state]
        residual, momentum, theta, second = state
        mask = torch.zeros(3, 1, dtype=torch.uint8, device=self.device)
        either.fold([residual], [bad], zero)
        sent = either.compact(residual.view(3, 100), mask, torch.bfloat16, zero)
        last_step = torch.zeros(3, 100, dtype=torch.int32, device=self.device)
        moments = momentum.view(3, 100), second.view(3, 100)
        one = hyper(self.device, torch.float32)
        numbers = ops.RowNumbers(self.scalar(1, torch.int32), zero, one, bad[0], bad[0])
        shard = ops.ShardState(theta[:3].view(3, 1), *moments, last_step)
        either.update_adams(shard._replace(exp_avg_sq=None), mask, bad[:3].view(3, 1), numbers)
        either.update_adamw(shard, mask, bad[:3].view(3, 1), bad[:3].view(3, 1), numbers, 2)
        either.accumulate_exp_avg_sq([second], [bad], [0.1], 2, zero)
        either.accumulate_exp_avg_sq([second], [bad], [0.1], 2, zero.view(1))
        assert (sent == 0).all()
        assert (last_step == 0).all()
        for tensor, old in zip(state, before, strict=True):
            assert_same_bits(tensor, old)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("by_piece", [False, True])
    def test_second_moment_equals_its_twin_within_rounding(self, dtype: torch.dtype, by_piece: bool) -> None:
        moment_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        sizes = (5000, 300, 4096, 1, 0, 77, 900)
        moments = [torch.rand(n, dtype=moment_dtype) for n in sizes]
        grads: list[Tensor | None] = [torch.randn(n).to(torch.float32 if n == 900 else dtype) for n in sizes]
        grads[1], scale = None, torch.tensor(0.7)
        weights = [0.05, 0.05, 1e-3, 0.5, 0.1, 1.0, 0.01]
        if by_piece:  # a gradient that is on no rank, and one that is not finite, where nothing may change
            scale = torch.tensor([0.7, 0.0, 0.7, 0.7, 0.7, 0.7, 0.0])
            grads[6] = torch.full((900,), float("nan"))
        _, ((ours, theirs), *_) = self.both("accumulate_exp_avg_sq", moments, grads, weights, 3, scale)
        few = 16 * torch.finfo(moment_dtype).eps  # on a GPU, a division may be off by two places
        for place, (mine, twin) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(mine, twin, rtol=few, atol=0.0)
            if scale.dim() and not scale[place]:
                assert_same_bits(mine, moments[place])
            elif mine.numel():
                assert not torch.equal(mine, moments[place])
        assert_same_bits(ours[1], theirs[1])  # without a gradient, the kernel is the twin

    def test_second_moments_of_any_size_stay_finite(self) -> None:
        moments = [torch.full((3,), 1.0), torch.full((3,), 3e38)]
        grads = [torch.tensor([1e19, -1e30, 3e38])] * 2
        for ranks in (1, 4):
            _, ((ours, theirs), *_) = self.both(
                "accumulate_exp_avg_sq", moments, grads, [0.5, 0.5], ranks, torch.ones(())
            )
            for mine, twin in zip(ours, theirs, strict=True):
                assert mine.isfinite().all()
                torch.testing.assert_close(mine, twin, rtol=1e-6, atol=0.0)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_squared_norm_equals_its_twin_but_for_the_order_of_summation(self, dtype: torch.dtype) -> None:
        grads = [torch.randn(n).to(dtype) for n in (9000, 4096, 0, 13)]
        ours = self.module.squared_norm([grad.to(self.device) for grad in grads])
        torch.testing.assert_close(ours.cpu(), naive.squared_norm(grads), rtol=5e-6, atol=0)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_sketch_equals_its_twin_but_for_the_order_of_summation(self, dtype: torch.dtype) -> None:
        signs = random_signs(1 << 14)
        grads = [torch.randn(20_000).to(dtype), None, torch.randn(5).to(dtype), torch.randn(9_001)]
        own = [None if grad is None else grad.to(self.device) for grad in grads]
        ours = self.module.sketch(own, signs.to(self.device), SKETCH_WIDTHS)
        torch.testing.assert_close(ours.cpu(), naive.sketch(grads, signs, SKETCH_WIDTHS), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("sizes", [(70_000, 65_000, 131_073), (40, 5000)], ids=str)
    def test_sketch_of_whole_chunks_with_signs_in_bytes(self, sizes: tuple[int, ...]) -> None:
        signs = random_signs(1 << 17)
        grads = [torch.randn(size) for size in sizes]
        ours = self.module.sketch([g.to(self.device) for g in grads], self.signs(signs), SKETCH_WIDTHS)
        torch.testing.assert_close(ours.cpu(), naive.sketch(grads, signs, SKETCH_WIDTHS), rtol=1e-5, atol=2e-5)

    def signs(self, signs: torch.Tensor) -> torch.Tensor:
        """As :class:`GradientClipping` has them: bytes where a GPU's kernels read them."""
        return signs if self.module.name == "cpu" else signs.to(self.device, torch.int8)

    @pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
    def test_norms_of_what_is_not_finite_are_not_finite(self, bad: float) -> None:
        grad = torch.randn(9000, device=self.device)
        grad[8999] = bad
        assert not self.module.squared_norm([grad]).isfinite()
        signs = random_signs(1 << 14).to(self.device)
        assert not self.module.sketch([grad], signs, SKETCH_WIDTHS).norm().isfinite()

    def test_norms_are_the_same_at_every_run(self) -> None:
        grad, signs = torch.randn(30_000, device=self.device), random_signs(1 << 14).to(self.device)
        assert_same_bits(self.module.squared_norm([grad]), self.module.squared_norm([grad]))
        assert_same_bits(
            self.module.sketch([grad], signs, SKETCH_WIDTHS), self.module.sketch([grad], signs, SKETCH_WIDTHS)
        )

    def test_tables_do_not_come_to_lie_on_the_default_device(self) -> None:
        """Under ``torch.set_default_device("cuda")`` they were made there, and could not be pinned."""
        residual, grad = torch.ones(500, device=self.device), torch.ones(500, device=self.device)
        signs, scale = random_signs(1 << 17).to(self.device), self.scalar(1.0)
        for cache in self.caches:
            cache.cache_clear()
        with torch.device("meta"):
            self.module.fold([residual], [grad], scale)
            norm = self.module.squared_norm([grad])
            self.module.sketch([grad], signs, SKETCH_WIDTHS)
        assert residual.tolist() == [2.0] * 500
        assert float(norm) == 500.0

    def test_measured_noise_equals_its_twin(self) -> None:
        noise, grad = torch.rand(5000), torch.randn(5000)
        own = [tensor.to(self.device, copy=True) for tensor in (noise, grad)]
        naive.accumulate_exp_avg_sq([noise], [grad], [0.1], 4, torch.tensor(0.7))
        self.module.accumulate_exp_avg_sq([own[0]], [own[1]], [0.1], 4, self.scalar(0.7))
        self.assert_same_moments(own[0].cpu(), noise)
        before = own[0].clone()
        bad = own[1] * float("nan")
        self.module.accumulate_exp_avg_sq([own[0]], [bad], [0.1], 4, self.scalar(0.0))
        assert_same_bits(own[0], before)
