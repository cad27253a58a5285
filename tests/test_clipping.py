"""Accumulation and clipping, and steps that are skipped because a gradient is not finite."""

from __future__ import annotations

import warnings

import pytest
import torch
from optimizer_helpers import (
    FP32,
    Ledger,
    RunRanks,
    assert_replicas_equal,
    gradients,
    kept_by_a_skipped_step,
    parameters,
    set_gradients,
    values,
)
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer

# --------------------------------------------------------------------------------------------- accumulation, clipping


def accumulate(rank: int, world_size: int, split: int) -> list[Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3)).double()
    optimizer = ScapeOptimizer(
        model.parameters(),
        config=ScapeConfig(sparsity=0.9, wire_dtype="fp32", sparsity_warmup_steps=0),
    )
    torch.manual_seed(rank)
    for _ in range(5):
        batch = torch.randn(8, 8, dtype=torch.float64)
        for part in batch.chunk(split):
            (model(part).square().mean() / split).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_four_micro_batches_equal_one_large_batch(run_ranks: RunRanks) -> None:
    for one, four in zip(run_ranks(accumulate, 2, 1)[0], run_ranks(accumulate, 2, 4)[0], strict=True):
        torch.testing.assert_close(one, four, rtol=1e-6, atol=1e-7)


def clip_ranks(rank: int, world_size: int, kind: str, rule: str) -> tuple[float, float, float, float]:
    params = parameters(((700, 300), (200_000,), (17,)))
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.99, clip_norm=rule, **FP32))
    everyone = [gradients(params, other, 0) for other in range(world_size)]
    if kind == "heavy-tailed":
        everyone = [
            [g / torch.rand(g.shape, generator=torch.Generator().manual_seed(9)).clamp(min=1e-6) for g in grads]
            for grads in everyone
        ]
    for parameter, grad in zip(params, everyone[rank], strict=True):
        parameter.grad = grad
    mean = [torch.stack(grads).mean(0).view(-1) for grads in zip(*everyone, strict=True)]
    true = float(torch.cat(mean).double().norm())
    if rule == "local":
        own = [torch.cat([g.view(-1) for g in grads]).double().square().sum() for grads in everyone]
        true = float((sum(own) / world_size) ** 0.5)
    norm = float(optimizer.clip_grad_norm(true / 4))
    untouched = torch.equal(params[0].grad, everyone[rank][0])  # type: ignore[arg-type]
    assert untouched
    optimizer.step()
    stats, state = optimizer.stats, optimizer.engine.state
    assert stats is not None
    assert state is not None
    return norm, true, stats.clip_factor, stats.grad_norm


@pytest.mark.parametrize(("world_size", "kind"), [(2, "heavy-tailed"), (3, "random")])
def test_sketched_norm_is_within_five_percent_and_all_ranks_scale_alike(
    run_ranks: RunRanks, world_size: int, kind: str
) -> None:
    results = run_ranks(clip_ranks, world_size, kind, "sketch")
    norm, true, factor, shown = results[0]
    assert norm == pytest.approx(true, rel=0.05)
    assert factor == pytest.approx(true / 4 / norm, rel=1e-4)
    assert shown == norm
    assert len({(n, f) for n, _, f, _ in results}) == 1


def test_local_norm_is_the_root_mean_square_over_ranks(run_ranks: RunRanks) -> None:
    for norm, true, factor, _ in run_ranks(clip_ranks, 2, "random", "local"):
        assert norm == pytest.approx(true, rel=1e-5)
        assert factor == pytest.approx(0.25, rel=1e-4)


def test_one_rank_clips_by_the_exact_norm() -> None:
    norm, true, factor, _ = clip_ranks(0, 1, "heavy-tailed", "sketch")
    assert norm == pytest.approx(true, rel=1e-5)
    assert factor == pytest.approx(0.25, rel=1e-4)


def test_a_clip_recorded_for_a_gradient_that_is_gone_is_forgotten() -> None:
    params = parameters(((50,),))
    optimizer = ScapeOptimizer(params, config=ScapeConfig(**FP32))
    set_gradients(params, 0, 0)
    optimizer.clip_grad_norm(1e-3)
    optimizer.zero_grad()  # as after a step that a gradient scaler skipped
    set_gradients(params, 0, 1)
    optimizer.step()
    assert optimizer.stats is not None
    assert optimizer.stats.clip_factor == 1.0


@pytest.mark.parametrize(("change", "then"), [("in place", "step"), ("another", "clip"), ("gone", "step")])
def test_gradients_that_change_after_the_clip_are_refused_and_nothing_is_done(change: str, then: str) -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    set_gradients(params, 0, 0)
    before = values(params)
    optimizer.clip_grad_norm(1.0)
    assert params[1].grad is not None
    if change == "in place":
        params[1].grad.view(-1)[0] = float("nan")
    else:
        params[1].grad = None if change == "gone" else params[1].grad.clone()
    with pytest.raises(RuntimeError, match=r"must stay as they are once .*, got another one for parameter 1\."):
        optimizer.step() if then == "step" else optimizer.clip_grad_norm(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, values(params), strict=True))
    optimizer.zero_grad()
    set_gradients(params, 0, 1)
    optimizer.step()
    assert not torch.equal(before[1], params[1])


@pytest.mark.parametrize("bounds", [(0.5, 1e9), (1e9, 0.5)])
def test_what_is_clipped_twice_is_clipped_as_torch_does(bounds: tuple[float, float]) -> None:
    """The last call alone counted: who logged `clip_grad_norm(inf)` behind his clipping trained without it."""
    parameter, reference = nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, **FP32))
    ledger = Ledger(optimizer)
    parameter.grad, reference.grad = torch.linspace(-5, 5, 50), torch.linspace(-5, 5, 50)
    for bound in bounds:
        expected = nn.utils.clip_grad_norm_([reference], bound)
        torch.testing.assert_close(optimizer.clip_grad_norm(bound), expected, rtol=1e-4, atol=0)
    optimizer.step()
    torch.testing.assert_close(ledger.totals()[0], reference.grad.double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_clip_bounds_must_be_positive(bad: float) -> None:
    optimizer = ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(ValueError, match=r"`max_norm` must be > 0, got"):
        optimizer.clip_grad_norm(bad)


# --------------------------------------------------------------------------------------------------------- not finite


def train_through_nan(rank: int, world_size: int, bad: float, clip: bool, update: str) -> int:
    params = parameters()
    config = ScapeConfig(sparsity=0.9, max_skipped=3, sparsity_warmup_steps=0, update=update)
    optimizer = ScapeOptimizer(params, config=config)
    skipped = 0
    for step in range(12):
        set_gradients(params, rank, step)
        if step in (2, 5):
            params[5].grad = None
        poisoned = step in (4, 5, 9)
        if poisoned and rank == 1:
            params[3].grad.view(-1)[77] = bad  # type: ignore[union-attr]
        before, state = values(params), optimizer.engine.state
        held = None
        if state is not None:
            optimizer.drain()
            held = [None if t is None else t.clone() for t in kept_by_a_skipped_step(state)]
        if clip:
            norm = optimizer.clip_grad_norm(1.0)
            assert bool(norm.isfinite()) is not poisoned
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert optimizer.stats is not None
        assert optimizer.stats.skipped is poisoned
        skipped += poisoned
        assert optimizer.stats.skipped_total == skipped
        if poisoned:
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
            assert held is not None
            assert state is not None
            for was, now in zip(held, kept_by_a_skipped_step(state), strict=True):
                assert (was is now is None) or torch.equal(was, now)
            assert bool(caught) == (rank == 0)
        else:
            assert any(not torch.equal(a, b) for a, b in zip(before, params, strict=True))
        assert_replicas_equal(params)
        assert all(p.isfinite().all() for p in params)
    return skipped


@pytest.mark.parametrize(("bad", "clip", "update"), [(float("nan"), True, "adamw"), (float("inf"), False, "adams")])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    run_ranks: RunRanks, bad: float, clip: bool, update: str
) -> None:
    assert run_ranks(train_through_nan, 2, bad, clip, update) == [3, 3]


def skip_forever(rank: int, world_size: int) -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(max_skipped=4, sparsity_warmup_steps=0))
    try:
        for step in range(9):
            set_gradients(params, rank, step)
            if rank == 1:
                params[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
            optimizer.step()
    finally:
        assert optimizer.stats is not None
        assert optimizer.stats.skipped_total == 4


@pytest.mark.filterwarnings("ignore:The gradient norm was not finite", "ignore:The checkpoint was written with other")
@pytest.mark.parametrize("before", ["skipped steps", "dense training"])
def test_where_nothing_is_left_to_rank_a_mask_is_made_of_the_steps_own_gradient(before: str) -> None:
    """Not of an empty residual: that would be the first entries of each block."""
    parameter = nn.Parameter(torch.zeros(1000))
    sparse = ScapeConfig(sparsity=0.999, sparsity_warmup_steps=0, wire_dtype="fp32")

    def step(optimizer: ScapeOptimizer, value: float) -> None:
        parameter.grad = torch.zeros(1000)
        parameter.grad[7] = value
        optimizer.step()

    optimizer = ScapeOptimizer([parameter], config=sparse if before == "skipped steps" else ScapeConfig(sparsity=0))
    for _ in range(2):
        step(optimizer, float("nan") if before == "skipped steps" else 1.0)
    going_on = ScapeOptimizer([parameter], config=sparse)  # also from a checkpoint of skipped steps
    going_on.load_state_dict(optimizer.state_dict())
    for each in (optimizer, going_on) if before == "skipped steps" else (going_on,):
        old = parameter.detach().clone()
        step(each, 1.0)
        assert (parameter.detach() != old).nonzero().view(-1).tolist() == [7]


def test_a_step_that_fails_counts_as_neither_taken_nor_skipped() -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity_warmup_steps=0))
    compare = optimizer.engine.check_replicas

    def fail() -> None:
        raise RuntimeError("ranks differ")

    optimizer.engine.check_replicas = fail  # type: ignore[method-assign]
    for parameter in params:
        parameter.grad = torch.full_like(parameter, torch.inf)
    with pytest.raises(RuntimeError, match="ranks differ"):
        optimizer.step()
    optimizer.engine.check_replicas = compare  # type: ignore[method-assign]
    optimizer.zero_grad()
    set_gradients(params, 0, 0)
    optimizer.step()
    assert optimizer.stats is not None
    assert optimizer.stats.skipped_total == 0


@pytest.mark.filterwarnings("error:The gradient norm was not finite")
def test_what_the_cpu_learns_late_it_learns_at_the_end_of_a_fit() -> None:
    """As on CUDA, where no step waits for what became of it."""
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity_warmup_steps=0))
    engine = optimizer.engine
    hear, engine._hear_verdict = engine._hear_verdict, lambda: None  # type: ignore[method-assign]
    set_gradients(params, 0, 0)
    params[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
    optimizer.step()
    engine._hear_verdict = hear  # type: ignore[method-assign]
    assert optimizer.stats is not None
    assert optimizer.stats.skipped_total == 0
    with pytest.warns(UserWarning, match="1 in a row, 1 in total"):
        optimizer.finish()
    assert optimizer.stats.skipped_total == 1


@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_max_skipped_in_a_row_raises_the_same_error_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(skip_forever, 2, expect_errors=True)
    assert isinstance(first, FloatingPointError)
    assert "got NaN or inf in 4 steps in a row (max_skipped=4)" in str(first)
    assert str(first) == str(second)


@pytest.mark.parametrize("ask", ["clip_grad_norm", "step"])
def test_no_message_of_a_step_begins_while_a_mask_is_under_way(ask: str) -> None:
    """Two communicators of NCCL that are busy at once may wait for each other."""
    params, found = parameters(), []
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    masks, send = optimizer.engine.masks, optimizer.communicator.all_reduce_sum
    optimizer.communicator.all_reduce_sum = lambda own: (found.append(masks.pending), send(own))[1]  # type: ignore
    for step in range(3):
        set_gradients(params, 0, step)
        getattr(optimizer, ask)(*[1.0] * (ask == "clip_grad_norm"))
        optimizer.step()
        assert masks.pending is not None
    assert len(found) >= 3
    assert not any(found)
