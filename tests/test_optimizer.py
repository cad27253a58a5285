"""ScapeOptimizer on 1 to 3 ranks: the claims of the method, each checked on what the ranks really hold and send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_helpers import (
    FP32,
    Ledger,
    RunRanks,
    dense_first,
    gathered,
    gradients,
    parameters,
    set_gradients,
    values,
)
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm import collectives
from lightning_scape.scape.opening import DIGITS

# ------------------------------------------------------------------------------------------- density 1 is dense AdamS


def train_dense(rank: int, world_size: int, betas: tuple[float, float]) -> float:
    params, reference = parameters(), parameters()
    groups = [{"params": params[:2], "lr": 3e-2, "weight_decay": 0.3}, {"params": params[2:]}]
    twins = [{"params": reference[:2], "lr": 3e-2, "weight_decay": 0.3}, {"params": reference[2:]}]
    config = ScapeConfig(sparsity=0.0, **FP32)
    scape = ScapeOptimizer(groups, lr=1e-2, betas=betas, config=config)
    dense = AdamS(twins, lr=1e-2, betas=betas)
    worst = 0.0
    # A parameter of one entry may pass through zero: relative to the largest it has been.
    scales = [float(p.detach().norm()) for p in params]
    for step in range(25):
        set_gradients(params, rank, step)
        everyone = [gradients(params, other, step) for other in range(world_size)]
        for twin, grads in zip(reference, zip(*everyone, strict=True), strict=True):
            twin.grad = torch.stack(grads).mean(0)
        scape.step()
        dense.step()
        scales = [max(scale, float(twin.detach().norm())) for scale, twin in zip(scales, reference, strict=True)]
        for mine, twin, scale in zip(params, reference, scales, strict=True):
            worst = max(worst, float((mine - twin).detach().norm()) / scale)
    return worst


@pytest.mark.parametrize(
    ("world_size", "betas"),
    [(1, (0.0, 0.0)), (2, (0.9, 0.95)), (3, (0.99, 0.9999))],
)
def test_full_density_equals_dense_adams(run_ranks: RunRanks, world_size: int, betas: tuple[float, float]) -> None:
    assert max(run_ranks(train_dense, world_size, betas)) <= 1e-6


# ----------------------------------------------------------------------------------------------- nothing is ever lost


def train_with_ledger(rank: int, world_size: int, whole: bool, update: str) -> float:
    params = parameters()
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=2, wire_dtype="fp32", update=update)
    optimizer = ScapeOptimizer(params, config=config)
    dense_first(optimizer)
    ledger = Ledger(optimizer)
    folded = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    for step in range(15):
        set_gradients(params, rank, step, whole)
        if step % 4 == 2 or rank == 0:  # no rank has a gradient of it, or rank 1 alone
            params[3].grad = None
        if not whole:
            optimizer.clip_grad_norm(3.0)
        optimizer.step()
        assert optimizer.stats is not None
        factor = optimizer.stats.clip_factor
        for total, parameter in zip(folded, params, strict=True):
            if parameter.grad is not None:
                total += factor * parameter.grad.double()
    return max(float((total.view(-1) - seen).abs().max()) for total, seen in zip(folded, ledger.totals(), strict=True))


@pytest.mark.parametrize("update", ["adams", "adamw"])
def test_sent_plus_residual_equals_all_gradients_exactly(run_ranks: RunRanks, update: str) -> None:
    # Whole numbers: fp32 adds them without rounding, so that equality can be exact.
    assert run_ranks(train_with_ledger, 2, True, update) == [0.0, 0.0]


def test_sent_plus_residual_equals_clipped_gradients_to_fp32_rounding(run_ranks: RunRanks) -> None:
    assert max(run_ranks(train_with_ledger, 2, False, "adamw")) < 2e-6


# --------------------------------------------------------------------- the mask: whose, when, how many, what it costs


def train_watching_masks(rank: int, world_size: int) -> dict[str, Any]:
    params = parameters()
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
    quota = config.quota
    optimizer = ScapeOptimizer(params, config=config)
    expected: Tensor | None = None
    seen: list[Tensor] = []
    for step in range(6):
        before = values(params)
        state = optimizer.engine.state
        set_gradients(params, rank, step)
        optimizer.step()
        state = optimizer.engine.state
        assert state is not None
        mask = optimizer.engine.masks.active
        assert mask is not None
        assert mask.shape == (optimizer.engine.layout.blocks, quota.sent)
        assert all(row.unique().numel() == quota.sent for row in mask)
        if expected is not None:
            assert torch.equal(mask, expected), f"step {step} did not use the mask made in step {step - 1}"
        seen.append(mask.clone())
        # By turns each rank's choice, from its own residual after this step: the mask of the next.
        chosen = gathered(ops.select(state.residual, quota.sent))
        layout, turn = optimizer.engine.layout, step + 1
        shards = [(chosen[(shard + turn) % world_size], layout.rows_of(shard)) for shard in range(world_size)]
        expected = torch.cat([made[rows] for made, rows in shards])
        inside = torch.zeros(optimizer.engine.layout.blocks, quota.block_size, dtype=torch.bool)
        inside.scatter_(1, mask.long(), True)
        parts = [inside.view(-1)[piece.of_blocks(quota.block_size)] for piece in layout.pieces]
        for part, old, parameter in zip(parts, before, params, strict=True):
            assert torch.equal(parameter.detach().view(-1)[~part], old.view(-1)[~part])
    assert optimizer.stats is not None
    return {"seen": len(seen)}


def test_mask_of_a_step_was_made_by_its_owners_one_step_before(run_ranks: RunRanks) -> None:
    run_ranks(train_watching_masks, 3)


def count_messages(rank: int, world_size: int, config: ScapeConfig, dtype: torch.dtype, clip: bool) -> dict[str, Any]:
    params = parameters(dtype=dtype)
    optimizer = ScapeOptimizer(params, config=config)
    sizes: list[tuple[str, int]] = []

    def spy(name: str) -> None:
        home = collectives if name.endswith("_into") else dist
        real = getattr(home, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sizes.append((name, args[0].numel() * args[0].element_size()))
            return real(*args, **kwargs)

        setattr(home, name, call)

    for step in range(3):
        set_gradients(params, rank, step)
        if clip:  # before the first sketch of all ranks compare where they are: it is longer than what was sent so far
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()  # the mask travels on a thread
    for name in (
        "all_reduce",
        "all_to_all_into",
        "all_gather_into",
        "broadcast",
        "all_gather",
        "reduce_scatter_tensor",
    ):
        spy(name)
    set_gradients(params, rank, 3)
    if clip:
        optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.drain()
    stats = optimizer.stats
    assert stats is not None
    layout, quota = optimizer.engine.layout, config.quota
    entries = layout.blocks * quota.sent
    share = (world_size - 1) / world_size
    norm = (4093 + len(params) + DIGITS) * 4  # in a step that is not clipped, too
    values_bytes, parameter_bytes = entries * 4, entries * dtype.itemsize
    mask_bytes = entries * (1 if quota.block_size <= 256 else 2)
    assert sizes == [
        ("all_reduce", norm),
        ("all_to_all_into", values_bytes),
        ("all_gather_into", parameter_bytes),
        ("all_gather_into", mask_bytes),
    ]
    assert stats.bytes_sent["norm"] == int(2 * norm * share)
    assert stats.bytes_sent["values"] == int(values_bytes * share)
    assert stats.bytes_sent["parameters"] == int(parameter_bytes * share)
    assert stats.bytes_sent["mask"] == int(mask_bytes * share)
    assert stats.bytes_total == int(2 * norm * share) + sum(
        int(b * share) for b in (values_bytes, parameter_bytes, mask_bytes)
    )
    assert sum(optimizer.engine.step_bytes().values()) == stats.bytes_total
    return {"density": stats.density}


@pytest.mark.parametrize(("sparsity", "dtype", "clip"), [(0.9, torch.float32, False), (0.99, torch.bfloat16, True)])
def test_a_step_sends_four_messages_of_the_stated_sizes(
    run_ranks: RunRanks, sparsity: float, dtype: torch.dtype, clip: bool
) -> None:
    config = ScapeConfig(sparsity=sparsity, wire_dtype="fp32", sparsity_warmup_steps=0, update="adamw")
    run_ranks(count_messages, 2, config, dtype, clip)


def test_one_rank_sends_nothing_and_needs_no_process_group() -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0))
    before = values(params)
    for step in range(3):
        set_gradients(params, 0, step)
        optimizer.step()
    assert optimizer.stats is not None
    assert optimizer.stats.bytes_total == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, params, strict=True))


# --------------------------------------------------------------------------------- what stands still, what catches up


def test_unmasked_entries_stand_still_and_a_visit_catches_up() -> None:
    # One block of 1,000, one entry sent. Entry 0 alone has a gradient for five steps; entry 3 gets a tiny one in the
    # sixth, hence a place in the mask of the seventh, where its decay of seven steps is made up for.
    parameter = nn.Parameter(torch.full((1000,), 2.0, dtype=torch.float64))
    config = ScapeConfig(sparsity=0.999, wire_dtype="fp32", sparsity_warmup_steps=0)
    lr, decay, tiny = 0.1, 0.5, 2.0**-10
    optimizer = ScapeOptimizer([parameter], lr=lr, weight_decay=decay, config=config)

    def step(entry: int | None, value: float) -> None:
        parameter.grad = torch.zeros_like(parameter)
        if entry is not None:
            parameter.grad[entry] = value
        optimizer.step()

    for _ in range(5):
        step(0, 1.0)
    assert (parameter.detach()[1:] == 2.0).all()
    state = optimizer.engine.state
    assert state is not None
    assert state.last_step.view(-1).tolist() == [5] + [0] * 999
    assert (state.exp_avg.view(-1)[1:] == 0).all()
    step(3, tiny)
    old = parameter.detach().clone()
    assert (old[1:] == 2.0).all()
    step(None, 0.0)
    assert state.last_step.view(-1).tolist() == [6, 0, 0, 7] + [0] * 996
    moved = 7 * (0.7 / (0.9 + 0.7)) * tiny / 7
    expected = 2.0 * (1 - lr * decay) ** 7 - lr * moved / ((0.05 * tiny**2 / 7) ** 0.5 + 1e-8)
    assert float(parameter.detach()[3]) == pytest.approx(expected, rel=1e-9)
    others = [i for i in range(1000) if i != 3]
    assert torch.equal(parameter.detach()[others], old[others])
