"""The update of AdamW: what a user's settings of torch.optim.AdamW mean, they mean here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from example_modules import load_example
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer

RunRanks = Callable[..., list[Any]]
SIZES = ((37, 11), (5,), (1,), (300, 7), (3, 3, 3), (641,))
MAX_NORM = 30.0
"""About half of the norm of the averaged gradients: it clips."""


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def gradients(rank: int, step: int) -> list[Tensor]:
    """The gradients of a rank at a step, with noise, drift and entries that are nearly zero."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drift = torch.Generator().manual_seed(7)
    return [
        torch.randn(size, generator=generator) * torch.rand(size, generator=drift) ** 8
        + 0.3 * torch.randn(size, generator=drift)
        for size in SIZES
    ]


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 3e-2, "weight_decay": 0.3},
        {"params": params[2:4], "betas": (0.8, 0.99), "eps": 1e-3},
        {"params": params[4:]},
    ]


def scape_of(dense: torch.optim.Optimizer, **options: Any) -> ScapeOptimizer:
    return ScapeOptimizer.from_optimizer(dense, ScapeConfig(**options))


# -------------------------------------------------------------------------------------- density 1 is torch's AdamW


def train_beside_adamw(rank: int, world_size: int, betas: tuple[float, float], clip: bool) -> float:
    params, reference = parameters(), parameters()
    mine = torch.optim.AdamW(groups_of(params), lr=1e-2, betas=betas)
    dense = torch.optim.AdamW(groups_of(reference), lr=1e-2, betas=betas)
    # The ranks' own norms are exact; what the sketch costs has a test of its own.
    scape = scape_of(mine, sparsity=0.0, wire_dtype="fp32", clip_norm="local")
    worst = 0.0
    for step in range(25):
        everyone = [gradients(other, step) for other in range(world_size)]
        for parameter, grad in zip(params, everyone[rank], strict=True):
            parameter.grad = grad
        means = [torch.stack(grads).mean(0) for grads in zip(*everyone, strict=True)]
        scale = 1.0
        if clip:
            norms = [torch.stack([grad.norm() for grad in grads]).norm() for grads in everyone]
            norm = torch.stack(norms).square().mean().sqrt()
            scale = float((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
            scape.clip_grad_norm(MAX_NORM)
        for twin, mean in zip(reference, means, strict=True):
            twin.grad = mean * scale
        scape.step()
        dense.step()
        for parameter, twin in zip(params, reference, strict=True):
            worst = max(worst, float((parameter - twin).detach().norm() / twin.detach().norm().clamp(min=1.0)))
    return worst


@pytest.mark.parametrize(
    ("world_size", "betas", "clip"), [(1, (0.9, 0.95), False), (2, (0.9, 0.999), True), (3, (0.9, 0.95), True)]
)
def test_full_density_equals_torchs_adamw(
    run_ranks: RunRanks, world_size: int, betas: tuple[float, float], clip: bool
) -> None:
    assert max(run_ranks(train_beside_adamw, world_size, betas, clip)) <= 1e-6


def test_the_update_fits_the_optimizer_given_unless_it_is_named() -> None:
    weight = [nn.Parameter(torch.ones(10))]

    def update_of(dense: torch.optim.Optimizer, **options: Any) -> str | None:
        return ScapeOptimizer.from_optimizer(dense, ScapeConfig(**options)).config.update

    assert update_of(torch.optim.AdamW(weight)) == "adamw"
    assert update_of(torch.optim.Adam(weight)) == "adamw"
    assert update_of(AdamS(weight)) == "adams"
    assert update_of(torch.optim.AdamW(weight), update="adams") == "adams"
    assert update_of(AdamS(weight), update="adamw") == "adamw"
    assert ScapeOptimizer(weight, config=ScapeConfig()).config.update == "adams"


# ---------------------------------------------------------------------------- parameters without a gradient


def train_with_gaps(rank: int, world_size: int, sparsity: float) -> Any:
    """Parameter 0 never has a gradient, 1 on rank 0 only, 3 from step 6 on, 5 at every third step."""
    params, reference = parameters(), parameters()
    scape = scape_of(
        torch.optim.AdamW(groups_of(params), lr=1e-2),
        sparsity=sparsity,
        wire_dtype="fp32",
        sparsity_warmup_steps=0,
    )
    dense = torch.optim.AdamW(groups_of(reference), lr=1e-2)

    def has(place: int, rank: int, step: int) -> bool:
        return {0: False, 1: rank == 0, 3: step >= 6, 5: step % 3 == 0}.get(place, True)

    still = 0
    for step in range(12):
        everyone = [gradients(other, step) for other in range(world_size)]
        before = [parameter.detach().clone() for parameter in params]
        for place, parameter in enumerate(params):
            parameter.grad = everyone[rank][place] if has(place, rank, step) else None
            grads = [everyone[other][place] for other in range(world_size) if has(place, other, step)]
            reference[place].grad = torch.stack(grads).sum(0) / world_size if grads else None
            still += not grads
        scape.step()
        dense.step()
        for place, (parameter, old) in enumerate(zip(params, before, strict=True)):
            if not any(has(place, other, step) for other in range(world_size)):
                assert torch.equal(parameter, old), f"parameter {place} moved in step {step}"
    assert still == 12 + 6 + 8
    scape.consolidate_state_dict()
    steps = [entry["step"] for entry in scape.state_dict()["state"].values()] if rank == 0 else []
    gap = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(params, reference, strict=True))
    return steps, gap, [p.detach().clone() for p in params]


@pytest.mark.parametrize(("world_size", "sparsity"), [(2, 0.0), (3, 0.9)])
def test_a_parameter_without_a_gradient_on_every_rank_is_left_alone(
    run_ranks: RunRanks, world_size: int, sparsity: float
) -> None:
    results = run_ranks(train_with_gaps, world_size, sparsity)
    assert results[0][0] == [0, 12, 12, 6, 12, 4]  # as torch counts
    for _, gap, params in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(params, results[0][2], strict=True))
        if not sparsity:
            assert gap <= 1e-6


# ------------------------------------------------------------------------------------------------- checkpoints


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, grad in zip(params, gradients(0, step), strict=True):
            parameter.grad = grad
        optimizer.step()


def test_a_checkpoint_of_adamw_goes_on_with_both_moments_and_back() -> None:
    params, reference = parameters(), parameters()
    dense = torch.optim.AdamW(groups_of(reference), lr=1e-2)
    train(dense, reference, range(10))
    saved = dense.state_dict()

    scape = scape_of(torch.optim.AdamW(groups_of(params), lr=1e-2), sparsity=0.0, wire_dtype="fp32")
    with torch.no_grad():
        for mine, theirs in zip(params, reference, strict=True):
            mine.copy_(theirs)
    with pytest.warns(UserWarning, match="first and second moments and step"):
        scape.load_state_dict(saved)
    train(scape, params, range(10, 20))
    train(dense, reference, range(10, 20))
    for mine, theirs in zip(params, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)

    again = torch.optim.AdamW(groups_of(params), lr=1e-2)
    again.load_state_dict(scape.state_dict())
    train(again, params, range(20, 30))
    train(dense, reference, range(20, 30))
    for mine, theirs in zip(params, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_run_goes_on_by_its_own_options_and_says_which_were_others() -> None:
    params = parameters()
    before = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=40))
    train(before, params, range(3))
    after = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9))
    with pytest.warns(UserWarning, match=r"sparsity_warmup_steps=40 \(now 1424\)"):
        after.load_state_dict(before.state_dict())
    assert after.config.warmup_steps == 1424


def test_by_default_the_wait_of_an_entry_grows_evenly() -> None:
    """By one step in 50 steps, or in 500 sqrt(rho) where that is more, until it is 1/rho (docs/design.md, 3.3)."""
    for sparsity, steps in ((0.5, 354), (0.9, 1424), (0.99, 4950), (0.999, 49_950)):
        schedule = ScapeConfig(sparsity=sparsity, update="adamw")
        assert schedule.warmup_steps == steps
        block = schedule.quota.block_size
        for step in (0, 3, 49, 99, steps // 2, steps - 2):
            waits = 1 + (step + 1) / max(50, 500 * (1 - sparsity) ** 0.5)
            expected = block / waits if round(block / waits) <= block / 2 else block  # more than half is everything
            assert schedule.sent(step) == pytest.approx(expected, rel=0.005, abs=0.51)
        assert schedule.sent(steps - 2) >= schedule.quota.sent
        assert schedule.sent(steps) == schedule.quota.sent == schedule.sent(10 * steps)
        falls = [schedule.sent(step) for step in range(0, steps + 2, max(1, steps // 500))]
        assert falls == sorted(falls, reverse=True)


# --------------------------------------------------------------------- it trains as AdamW does, settings unchanged


class Simulated:
    """Two ranks in this process, by SCAPE with AdamW's settings, or by AdamW itself on the averaged gradient."""

    def __init__(self, model: nn.Module, lr: float, sparsity: float | None) -> None:
        self.model = model
        if sparsity is None:
            self.adamw = torch.optim.AdamW(model.parameters(), lr=lr)
            self.handles = [list(model.parameters())] * 2
            return
        ranks = load_example("simulated_ranks")
        config = ScapeConfig(sparsity=sparsity, update="adamw")
        settings = {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.01}
        self.adamw = None
        self.scape = ranks.SimulatedRanks(model, 2, config, settings)
        self.handles = self.scape.handles

    def step(self, losses: list[Callable[[], Tensor]]) -> None:
        """One step, on each rank's loss."""
        for handle in self.handles[0] + self.handles[1]:
            handle.grad = torch.zeros_like(handle)
        for handles, loss in zip(self.handles, losses, strict=True):
            for handle, grad in zip(handles, torch.autograd.grad(loss(), list(self.model.parameters())), strict=True):
                handle.grad += grad / 2 if self.adamw else grad
        if self.adamw:
            self.adamw.step()
        else:
            self.scape.each(lambda rank: self.scape.optimizers[rank].step())


def regression(lr: float, sparsity: float | None) -> float:
    """The loss of a small network after 400 steps on a smooth function of eight numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(8, 1, generator=generator)

    def loss() -> Tensor:
        x = torch.randn(8, 8, generator=generator)
        return nn.functional.mse_loss(model(x), torch.tanh(x @ direction / 3))

    ranks, last = Simulated(model, lr, sparsity), []
    for step in range(400):
        ranks.step([loss, loss])
        if step >= 360:
            with torch.no_grad():
                x = torch.randn(256, 8, generator=torch.Generator().manual_seed(step))
                last.append(float(nn.functional.mse_loss(model(x), torch.tanh(x @ direction / 3))))
    return sum(last) / len(last)


@pytest.mark.parametrize(("lr", "sparsity"), [(3e-3, 0.99)])
def test_a_small_regression_ends_near_adamws_loss(lr: float, sparsity: float) -> None:
    """With the update of AdamS it stayed at 11 to 54 times that loss."""
    assert regression(lr, sparsity) <= 3 * regression(lr, None)
