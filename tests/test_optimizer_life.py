"""Figures, masters, memory formats, and the end of a script."""

from __future__ import annotations

from typing import Any

import torch
from optimizer_helpers import FP32, RunRanks, parameters, set_gradients
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer

# ------------------------------------------------------------------------------------------------------------ figures


def collect_stats(rank: int, world_size: int) -> Any:
    """The figures of the fourth step."""
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, wire_dtype="fp32", sparsity_warmup_steps=0))
    assert optimizer.stats is None
    for step in range(4):
        set_gradients(params, rank, step)
        optimizer.step()
    return optimizer.stats


def test_statistics_tell_what_the_step_did(run_ranks: RunRanks) -> None:
    for stats in run_ranks(collect_stats, 2):
        assert stats.step == 4
        assert stats.density == 0.1
        assert stats.grad_norm > 0
        assert stats.clip_factor == 1.0
        assert stats.bytes_dense == sum(p.numel() for p in parameters()) * 4
        assert stats.compression == stats.bytes_dense / stats.bytes_total
        flat = stats.as_dict()
        assert flat["scape/bytes_total"] == stats.bytes_total
        assert 0 < stats.message_seconds < sum(stats.seconds.values())
        assert set(stats.seconds) == {k.removeprefix("scape/seconds/") for k in flat if "/seconds/" in k}
        assert all(isinstance(v, float) for v in flat.values())


# ------------------------------------------------------------------------------------------ parameters


def test_masters_keep_what_bf16_would_round_away_and_follow_outside_changes() -> None:
    parameter = nn.Parameter(torch.full((8,), 100.0, dtype=torch.bfloat16))
    optimizer = ScapeOptimizer([parameter], lr=0.01, weight_decay=0.0, config=ScapeConfig(sparsity=0.0))
    for _ in range(200):
        parameter.grad = torch.ones(8, dtype=torch.bfloat16)
        optimizer.step()
    assert (parameter < 99).all()  # single steps of 0.01 are far below bf16's spacing of 0.5 there
    parameter.data.fill_(-50.0)
    parameter.grad = torch.zeros(8, dtype=torch.bfloat16)
    optimizer.step()
    assert ((parameter + 50).abs() < 1).all()


def test_channels_last_parameters_and_gradients_of_other_strides_are_kept_in_step() -> None:
    weight = torch.randn(6, 5, 3, 3)
    mine = nn.Parameter(weight.clone().to(memory_format=torch.channels_last))
    twin = nn.Parameter(weight.clone())
    scape = ScapeOptimizer([mine], config=ScapeConfig(sparsity=0, **FP32))
    dense = AdamS([twin])
    for step in range(3):
        grad = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(step))
        mine.grad = grad if step else grad.to(memory_format=torch.channels_last)
        twin.grad = grad.clone()
        scape.step()
        dense.step()
        torch.testing.assert_close(mine, twin, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------ life of an optimizer


def test_step_returns_what_the_closure_returned_with_gradients_enabled() -> None:
    params = parameters(((4,),))
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity_warmup_steps=0))

    def closure() -> Tensor:
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
