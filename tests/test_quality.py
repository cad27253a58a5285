"""The quality benchmark: its simulated ranks are the real thing, its runs resume, its short form runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from example_modules import EXAMPLES, load_example
from torch import Tensor

from lightning_scape import ScapeConfig, ScapeOptimizer

RunRanks = Callable[..., list[Any]]
STEPS = 6


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_example("bench_quality")


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (2, 3)])
def test_votes_of_fewer_bits_have_as_many_levels(bench: ModuleType, bits: int, levels: int) -> None:
    run = small(bench, mask_votes=2, vote_bits=bits)
    ranks = bench.build_ranks(run, bench.build_model(run))
    residual = torch.randn(ranks.optimizers[0]._layout.blocks, 200).pow(15)  # so that the second is often far smaller
    ballots = ranks.optimizers[0]._cast_ballots(residual, 2)
    values = ballots[:, 2:4].view(torch.int8)
    assert values.unique().numel() == levels
    assert values.abs().max() == 127


def small(bench: ModuleType, **options: Any) -> Any:
    settings = {"size": "0.03M", "ranks": 2, "batch": 2, "context": 32, "steps": STEPS}
    return bench.Run(**{**load_example("quality_runs").scape(**options), **settings})


def train_for_real(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    """The benchmark's run, by one of several processes."""
    bench = load_example("bench_quality")
    run = small(bench, **options)
    model = bench.build_model(run)
    optimizer = ScapeOptimizer(
        model.parameters(),
        betas=bench.BETAS,
        weight_decay=bench.WEIGHT_DECAY,
        config=ScapeConfig(**dict(run.options)),
    )
    loader = bench.PythonSource(run.batch, run.context, seed=0, shard=bench.Shard(rank, world_size)).train_dataloader()
    for step, batch in zip(range(run.steps), loader, strict=False):
        bench.loss_of(model, batch).backward()
        optimizer.param_groups[0]["lr"] = run.at(step)
        optimizer.clip_grad_norm(bench.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{"sparsity": 0.9, "mask_votes": 3}, {"sparsity": 0.99}])
def test_two_simulated_ranks_equal_two_processes_bit_for_bit(
    run_ranks: RunRanks, bench: ModuleType, tmp_path: Path, options: dict[str, Any]
) -> None:
    training = bench.Training(small(bench, **options))
    training.go(tmp_path / "snapshot.pt", every=STEPS, seconds_between=1e9)
    for found in run_ranks(train_for_real, 2, options):
        for parameter, other in zip(training.model.parameters(), found, strict=True):
            assert torch.equal(parameter.detach(), other)


def distance(bench: ModuleType, ranks: int, wire_dtype: str) -> float:
    """How far three steps of simulated ranks move the parameters."""
    settings = load_example("quality_runs").scape(0.9, wire_dtype=wire_dtype, size="0.03M", ranks=ranks, context=32)
    model = bench.build_model(bench.Run(**settings))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    simulated = bench.build_ranks(bench.Run(**settings), model)
    batches = torch.randint(0, 256, (ranks, 2, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for rank in range(ranks):
            simulated.backward(rank, lambda rank=rank: bench.loss_of(model, batches[rank]))
        simulated.step(1e-3, 1.0)
    moved = [parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)]
    return float(torch.stack([change.norm() for change in moved]).norm())


@pytest.mark.parametrize("ranks", [2, 3])
def test_simulated_ranks_move_as_far_by_changes_as_by_values(bench: ModuleType, ranks: int) -> None:
    assert distance(bench, ranks, "bf16") == pytest.approx(distance(bench, ranks, "fp32"), rel=0.02)


@pytest.mark.parametrize("method", ["scape", "adams"])
def test_a_run_goes_on_from_its_snapshot_bit_for_bit(bench: ModuleType, tmp_path: Path, method: str) -> None:
    run = bench.dataclasses.replace(small(bench, mask_votes=1), method=method)
    whole, first = bench.Training(run), bench.Training(run)
    whole.go(tmp_path / "a.pt", every=2, seconds_between=1e9)
    batches = first.batches()
    for _ in range(3):
        for rank, batch in enumerate(next(batches)):
            first.ranks.backward(rank, lambda batch=batch: bench.loss_of(first.model, batch))
        first.ranks.step(run.at(first.step), bench.MAX_NORM)
        first.bytes_sent += first.ranks.bytes_sent()
        first.step += 1
    first.save(tmp_path / "b.pt")
    second = bench.Training(run)
    second.load(tmp_path / "b.pt")
    second.go(tmp_path / "b.pt", every=2, seconds_between=1e9)
    assert whole.bytes_sent == second.bytes_sent
    for parameter, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def rows(bench: ModuleType, losses: dict[tuple[float, int], float]) -> list[Any]:
    """The report's rows for made-up runs of one method, losses by learning rate and seed."""
    runs = {small(bench, lr=lr, seed=seed): loss for (lr, seed), loss in losses.items()}
    rest = {"accuracy": 0.5, "bytes": 1, "parameters": 1}
    found = [{"run": bench.dataclasses.asdict(run), "loss": loss, **rest} for run, loss in runs.items()]
    return load_example("quality_report").rows_of(found)


def test_learning_rates_are_compared_on_the_seeds_that_all_of_them_have(bench: ModuleType) -> None:
    """2e-3 is better on seed 0, though its mean over seeds 0 to 2 is above the other's one loss."""
    (row,) = rows(bench, {(1e-3, 0): 1.5, (2e-3, 0): 1.4, (2e-3, 1): 1.6, (2e-3, 2): 1.8})
    assert (row.lr, row.losses, row.tried) == (2e-3, [1.4, 1.6, 1.8], 2)
    (row,) = rows(bench, {(1e-3, 0): 1.4, (1e-3, 1): 1.9, (2e-3, 0): 1.5, (2e-3, 3): 1.1})
    assert (row.lr, row.losses, row.tried) == (1e-3, [1.4, 1.9], 2)


def test_a_learning_rate_that_ran_on_fewer_seeds_is_not_the_best(bench: ModuleType) -> None:
    (row,) = rows(bench, {(1e-3, 0): 1.4, (2e-3, 0): 1.5, (2e-3, 1): 1.1, (2e-3, 2): 1.1})
    assert (row.lr, row.losses, row.tried) == (2e-3, [1.5, 1.1, 1.1], 2)


def test_methods_are_compared_on_the_seeds_that_both_have(bench: ModuleType) -> None:
    (base,) = rows(bench, {(1e-3, 0): 2.0, (1e-3, 3): 1.0})
    (row,) = rows(bench, {(1e-3, 0): 2.1, (1e-3, 1): 9.0, (1e-3, 2): 9.0})
    assert row.above(base) == "+5.0%"
    (other,) = rows(bench, {(1e-3, 1): 2.1})
    assert other.above(base) == "-"
    (both,) = rows(bench, {(1e-3, 0): 2.2, (1e-3, 3): 1.1})
    assert both.above(base) == "+10.0% ± 49.6"


def test_learning_rates_without_a_common_seed_are_compared_on_what_each_has(bench: ModuleType) -> None:
    (row,) = rows(bench, {(1e-3, 0): 1.5, (2e-3, 1): 1.6, (4e-3, 2): 1.7})
    assert (row.lr, row.losses, row.tried) == (1e-3, [1.5], 3)


def test_short_form_runs_every_method_and_ablation_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "bench_quality.py"), "--short", f"--out={tmp_path}", "--jobs=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("*.*")} == {"quality.md", "quality.json", "loss.png", "gap.png"}
    rows = json.loads((tmp_path / "quality.json").read_text())
    assert {"dense AdamW", "dense AdamS", "SCAPE 90%", "SCAPE 99%", "SCAPE 99.9%"} <= {row["label"] for row in rows}
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "started" not in again.stdout  # finished runs are not run again
