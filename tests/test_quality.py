"""Simulated ranks are the real thing: equal to processes, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from example_modules import load_example
from torch import Tensor

from lightning_scape import ScapeConfig, ScapeOptimizer

STEPS = 6


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_example("quality")


def small(method: dict[str, Any], **options: Any) -> Any:
    """A run that takes a second."""
    settings = {"size": "0.03M", "ranks": 2, "batch": 2, "context": 32, "steps": STEPS}
    return load_example("quality_runs").Run(**{**method, **settings, **options})


def train_for_real(rank: int, world_size: int, run: Any) -> list[Tensor]:
    """The benchmark's run, by one of several processes."""
    bench = load_example("quality")
    task = bench.task_of(run)
    model = task.build_model()
    settings = {"betas": run.betas, "weight_decay": bench.WEIGHT_DECAY}
    optimizer = ScapeOptimizer(model.parameters(), **settings, config=ScapeConfig(**dict(run.options)))
    for step, batch in zip(range(run.steps), task.loaders()[rank], strict=False):
        task.loss(model, batch).backward()
        optimizer.param_groups[0]["lr"] = run.at(step)
        optimizer.clip_grad_norm(bench.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("task", ["python", "digits-gru"])
def test_two_simulated_ranks_equal_two_processes_bit_for_bit(
    run_ranks: Callable[..., list[Any]], bench: ModuleType, tmp_path: Path, task: str
) -> None:
    run = small(load_example("quality_runs").scape(sparsity_warmup_steps=2), task=task)
    training = bench.Training(run)
    training.go(tmp_path / "snapshot.pt", every=STEPS, seconds_between=1e9)
    for found in run_ranks(train_for_real, 2, run):
        for parameter, other in zip(training.model.parameters(), found, strict=True):
            assert torch.equal(parameter.detach(), other)


@pytest.mark.parametrize("method", ["adamw", "scape", "sparseloco"])
def test_a_run_goes_on_from_its_snapshot_bit_for_bit(bench: ModuleType, tmp_path: Path, method: str) -> None:
    runs = load_example("quality_runs")
    run = small({"adamw": runs.ADAMW, "scape": runs.scape(0.9), "sparseloco": runs.sparseloco(2)}[method])
    whole, first = bench.Training(run), bench.Training(run)
    whole.go(tmp_path / "a.pt", every=2, seconds_between=1e9)
    for _ in range(3):  # SparseLoCo is then within a window
        first.advance()
    first.save(tmp_path / "b.pt")
    second = bench.Training(run)
    second.load(tmp_path / "b.pt")
    second.go(tmp_path / "b.pt", every=2, seconds_between=1e9)
    assert whole.bytes_sent == second.bytes_sent
    for parameter, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_the_dense_gradient_is_the_mean_over_ranks(bench: ModuleType) -> None:
    training = bench.Training(small({"method": "adamw"}))
    task, model = training.task, training.model
    batches = [next(iter(loader)) for loader in training.loaders]
    training.ranks.backward(batches, lambda batch: task.loss(model, batch), task.joined)
    of_ranks = [torch.autograd.grad(task.loss(model, batch), list(model.parameters())) for batch in batches]
    for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
        torch.testing.assert_close(parameter.grad, sum(grads) / len(grads), rtol=1e-4, atol=1e-7)


def test_each_rank_uses_an_expert_of_its_own(bench: ModuleType) -> None:
    training = bench.Training(small({"method": "adamw"}, task="experts", ranks=4))
    (experts,) = (module.experts for module in training.model.modules() if hasattr(module, "experts"))
    for rank, loader in enumerate(training.loaders):
        training.task.loss(training.model, next(iter(loader))).backward()
        used = [any(bool(p.grad.any()) for p in expert.parameters()) for expert in experts]
        assert used == [of == rank for of in range(4)]
        training.model.zero_grad()
    assert 4 < training.evaluate()["loss"] < 7


def test_sparseloco_counts_the_bytes_of_its_exchanges(bench: ModuleType) -> None:
    training, sent = bench.Training(small(load_example("quality_runs").sparseloco(3), steps=7)), []
    for _ in range(7):
        training.advance()
        sent.append(training.ranks.bytes_sent())
    counted = training.ranks.wrappers[0].stats.bytes_total
    assert [step for step, each in enumerate(sent) if each] == [2, 5, 6]  # the last ends a window that has begun
    assert sent[2] == pytest.approx(counted, abs=8)


def test_ranks_read_every_digit_of_an_epoch_once_and_none_held_out(bench: ModuleType) -> None:
    task = bench.task_of(small({"method": "adamw"}, task="digits-conv", ranks=4, batch=5))
    images, _ = task.train
    loaders = [iter(loader) for loader in task.loaders()]
    seen = torch.cat([next(loader)[0] for _ in range(len(images) // 20) for loader in loaders])
    assert {tuple(image.flatten().tolist()) for image in seen} == {tuple(image.flatten().tolist()) for image in images}
    assert len(seen) == len(images)
    assert len(task.test[0]) == 1797 - len(images)


def test_ranks_meet_in_rank_order_and_run_one_at_a_time() -> None:
    ranks = load_example("simulated_ranks")
    meeting, order = ranks.Meeting(3), []

    def act(rank: int) -> list[list[int]]:
        meeting.start(rank)
        met = []
        for round_ in range(3):
            order.append(rank)
            met.append(meeting.share(rank, 10 * round_ + rank))
        meeting.end(rank)
        return met

    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):  # it begins anew
            assert list(threads.map(act, range(3))) == [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]] * 3
    assert order[:9] == [0, 1, 2, 2, 0, 1, 1, 2, 0]


def test_a_failing_rank_ends_the_others_and_its_error_is_told() -> None:
    turns = load_example("simulated_ranks").Turns(2)

    def act(rank: int) -> None:
        if rank == 1:
            raise ValueError("of rank 1")
        turns.meeting.share(rank, None)

    with pytest.raises((RuntimeError, ValueError)) as caught:
        turns.each(act)
    assert "of rank 1" in f"{caught.value} {caught.value.__cause__}"
