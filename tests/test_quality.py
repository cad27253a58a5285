"""The quality benchmark: its simulated ranks are the real thing, its runs resume, its short form runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from example_modules import EXAMPLES, load_example
from litgpt import Config
from torch import Tensor
from warm_python import warm_python

from lightning_scape import ScapeConfig, ScapeOptimizer, ops

RunRanks = Callable[..., list[Any]]
STEPS = 6


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_example("bench_quality")


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (2, 3)])
def test_votes_of_fewer_bits_have_as_many_levels(bench: ModuleType, bits: int, levels: int) -> None:
    run = small(bench, mask_votes=2, vote_bits=bits)
    ranks = bench.build_ranks(run, bench.task_of(run).build_model())
    arrived: list[Tensor] = []

    def exchange(rank: int) -> None:
        optimizer = ranks.optimizers[rank]
        residual = torch.randn(optimizer.engine.layout.blocks, 200).pow(15)  # so that the second is often far smaller
        proposals = ops.propose(residual, 2)
        arrived.append(optimizer.communicator.exchange_proposals(proposals))

    ranks.each(exchange)
    assert len(arrived) == 2
    for received in arrived:
        values = received[..., 2:4].contiguous().view(torch.int8)
        assert values.unique().numel() == levels
        assert values.abs().max() == 127


def small(bench: ModuleType, **options: Any) -> Any:
    """A run of SCAPE with the paper's update, that takes seconds."""
    return tiny(bench, **{"update": "adams", "sparsity_warmup_steps": 0, "wire_dtype": "bf16", **options})


def tiny(bench: ModuleType, **options: Any) -> Any:
    settings = {"size": "0.03M", "ranks": 2, "batch": 2, "context": 32, "steps": STEPS}
    return bench.Run(**{**load_example("quality_runs").scape(**{**settings, **options})})


def train_for_real(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    """The benchmark's run, by one of several processes."""
    bench = load_example("bench_quality")
    run = small(bench, **options)
    task = bench.task_of(run)
    model = task.build_model()
    optimizer = ScapeOptimizer(
        model.parameters(),
        betas=run.betas,
        weight_decay=bench.WEIGHT_DECAY,
        config=ScapeConfig(**dict(run.options)),
        total_steps=run.steps,
    )
    for step, batch in zip(range(run.steps), task.loaders()[rank], strict=False):
        task.loss(model, batch).backward()
        optimizer.param_groups[0]["lr"] = run.at(step)
        optimizer.clip_grad_norm(bench.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.9, "mask_votes": 3},
        {"sparsity": 0.99},
        {"sparsity": 0.9, "update": "adamw", "sparsity_warmup_steps": None, "betas": (0.9, 0.999)},
        {"sparsity": 0.99, "update": "adamw", "sparsity_warmup_steps": 2, "task": "digits-gru"},
    ],
    ids=["adams-90", "adams-99", "adamw-90", "adamw-99-digits"],
)
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
    run = small(bench, sparsity=0.9, wire_dtype=wire_dtype, ranks=ranks)
    training = bench.Training(run)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    for _ in range(3):
        training.advance()
    moved = [parameter.detach() - old for parameter, old in zip(training.model.parameters(), before, strict=True)]
    return float(torch.stack([change.norm() for change in moved]).norm())


@pytest.mark.parametrize("ranks", [2, 3])
def test_simulated_ranks_move_as_far_by_changes_as_by_values(bench: ModuleType, ranks: int) -> None:
    assert distance(bench, ranks, "bf16") == pytest.approx(distance(bench, ranks, "fp32"), rel=0.02)


def test_the_dense_gradient_is_the_mean_over_ranks(bench: ModuleType) -> None:
    training = bench.Training(bench.dataclasses.replace(small(bench), method="adamw", options=()))
    task, model = training.task, training.model
    batches = [next(iter(loader)) for loader in training.loaders]
    training.ranks.backward(batches, lambda batch: task.loss(model, batch), task.joined)
    of_ranks = [torch.autograd.grad(task.loss(model, batch), list(model.parameters())) for batch in batches]
    for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
        torch.testing.assert_close(parameter.grad, sum(grads) / len(grads), rtol=1e-4, atol=1e-7)


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


def test_a_failing_rank_ends_the_others_and_its_error_is_told(bench: ModuleType) -> None:
    run = small(bench)
    simulated = bench.build_ranks(run, bench.task_of(run).build_model())

    def act(rank: int) -> None:
        if rank == 1:
            raise ValueError("of rank 1")
        simulated.meeting.share(rank, None)

    with pytest.raises((RuntimeError, ValueError)) as caught:
        simulated.each(act)
    assert "of rank 1" in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.few(1)
@pytest.mark.parametrize(("task", "precision"), [("python", "fp32"), ("digits-conv", "fp32"), ("python", "bf16-mixed")])
@pytest.mark.parametrize("method", ["scape", "adams"])
def test_a_run_goes_on_from_its_snapshot_bit_for_bit(
    bench: ModuleType, tmp_path: Path, method: str, task: str, precision: str
) -> None:
    run = bench.dataclasses.replace(small(bench, mask_votes=1), method=method, task=task, precision=precision)
    whole, first = bench.Training(run), bench.Training(run)
    whole.go(tmp_path / "a.pt", every=2, seconds_between=1e9)
    for _ in range(3):
        first.advance()
    first.save(tmp_path / "b.pt")
    second = bench.Training(run)
    second.load(tmp_path / "b.pt")
    second.go(tmp_path / "b.pt", every=2, seconds_between=1e9)
    assert whole.bytes_sent == second.bytes_sent
    for parameter, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_model_that_is_kept_is_a_checkpoint_of_litgpt(bench: ModuleType, tmp_path: Path) -> None:
    run = bench.dataclasses.replace(tiny(bench), method="adamw", options=(), steps=1)
    bench.execute(run, tmp_path, keep=True)
    folder = tmp_path / "models" / run.name
    assert (folder / "tokenizer.json").is_file()
    model = load_example("evaluate_litgpt").load_model(Config.from_file(folder / "model_config.yaml"), folder)
    found = bench.task_of(run).evaluate(model)["loss"]
    assert found == pytest.approx(json.loads((tmp_path / "runs" / f"{run.name}.json").read_text())["loss"])


def test_the_default_warmup_goes_by_the_update_and_that_of_adams_by_the_run(bench: ModuleType) -> None:
    run = tiny(bench)
    simulated = bench.build_ranks(run, bench.task_of(run).build_model())
    assert {optimizer.engine.masks.schedule.shape for optimizer in simulated.optimizers} == {"waits"}
    assert {optimizer.config.update for optimizer in simulated.optimizers} == {"adamw"}
    run = tiny(bench, update="adams")
    simulated = bench.build_ranks(run, bench.task_of(run).build_model())
    assert {optimizer.engine.masks.schedule.warmup_steps for optimizer in simulated.optimizers} == {STEPS}


def test_ranks_read_every_digit_of_an_epoch_once_and_none_held_out(bench: ModuleType) -> None:
    task = bench.task_of(tiny(bench, task="digits-conv", ranks=4, batch=5))
    images, _ = task.train
    loaders = [iter(loader) for loader in task.loaders()]
    seen = torch.cat([next(loader)[0] for _ in range(len(images) // 20) for loader in loaders])
    assert {tuple(image.flatten().tolist()) for image in seen} == {tuple(image.flatten().tolist()) for image in images}
    assert len(seen) == len(images)
    assert len(task.test[0]) == 1797 - len(images)


def test_a_name_says_what_differs_from_the_defaults_and_survives_json(bench: ModuleType) -> None:
    runs = load_example("quality_runs")
    plain = tiny(bench, sparsity=0.9)
    assert plain.name == f"scape_0.03M_N2x2x32_{STEPS}_lr0.002_seed0_sparsity-0.9_update-adamw_wire_dtype-int4"
    assert plain.label == "SCAPE 90%"
    assert small(bench).label == "SCAPE 99%, AdamS's update, no warm-up"
    assert tiny(bench, sparsity_warmup_steps=1000).label == "SCAPE 99%, warm-up 1,000"
    assert tiny(bench, wire_dtype="bf16").label == "SCAPE 99%, wire_dtype=bf16"
    other = tiny(bench, task="digits-gru", betas=(0.9, 0.999))
    changed = "betas-0.9-0.999_sparsity-0.99_update-adamw_wire_dtype-int4"
    assert other.name == f"scape_digits-gru_N2x2_{STEPS}_lr0.002_seed0_{changed}"
    assert len({plain.setting, other.setting, tiny(bench, betas=(0.9, 0.999)).setting}) == 3
    for run in (plain, other):
        assert runs.run_of(json.loads(json.dumps({"run": bench.dataclasses.asdict(run)}))) == run


def test_committed_results_stand_under_their_runs_names_and_name_update_and_wire() -> None:
    runs = load_example("quality_runs")
    found = {path.stem: json.loads(path.read_text()) for path in (EXAMPLES / "results/quality/runs").glob("*.json")}
    assert found
    for name, result in found.items():
        run = runs.run_of(result)
        assert name == run.name == result["name"]
        assert run.method != "scape" or {"update", "wire_dtype"} <= dict(run.options).keys(), name


def test_the_drop_in_suite_gives_scape_adamws_settings() -> None:
    runs = load_example("quality_runs")
    dense = {(run.setting, run.lr, run.seed) for run in runs.SUITES["drop_in"] if run.method == "adamw"}
    for run in runs.SUITES["drop_in"]:
        assert (run.setting, run.lr, run.seed) in dense
        assert run.method == "adamw" or run.label.startswith("SCAPE 9") and "," not in run.label


def rows(bench: ModuleType, losses: dict[tuple[float, int], float]) -> list[Any]:
    """The report's rows for made-up runs of one method, losses by learning rate and seed."""
    runs = {small(bench, lr=lr, seed=seed): loss for (lr, seed), loss in losses.items()}
    found = [result(bench, run, loss) for run, loss in runs.items()]
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


def result(bench: ModuleType, run: Any, loss: float) -> dict[str, Any]:
    rest = {"accuracy": 0.5, "bytes": 1, "parameters": 1}
    return {"run": bench.dataclasses.asdict(run), "loss": loss, **rest}


def test_drop_in_compares_at_adamws_best_rate_and_betas(bench: ModuleType) -> None:
    """Not at SCAPE's own best, nor with what ran with other betas or other options."""
    report, dense = load_example("quality_report"), {"method": "adamw", "options": ()}
    adamw = {(1e-3, 0): 2.2, (2e-3, 0): 2.0, (4e-3, 0): 2.1, (2e-3, 1): 2.0}
    found = [
        result(bench, bench.dataclasses.replace(tiny(bench, lr=lr, seed=seed), **dense), loss)
        for (lr, seed), loss in adamw.items()
    ]
    found += [result(bench, tiny(bench, lr=2e-3, seed=seed), loss) for seed, loss in ((0, 2.1), (1, 2.3), (2, 9.0))]
    found += [result(bench, tiny(bench, lr=1e-3), 1.0), result(bench, small(bench, lr=2e-3), 1.0)]
    found += [result(bench, tiny(bench, lr=2e-3, betas=(0.9, 0.999)), 1.0)]
    text = "\n".join(report.drop_in_tables(found))
    assert text.count("###") == 1
    assert "| dense AdamW | 0.002 (3) | 2.0000 ± 0.0000 | 2 |" in text
    assert "| SCAPE 99% | 0.002 (1) | 4.4667 ± 3.9273 | 3 | +10.0% ± 5.0 |" in text
    assert "no warm-up" not in text
    assert "on seed 0, by learning rate: 0.001: 2.2000, **0.002**: 2.0000, 0.004: 2.1000." in text


def test_a_sweep_of_the_rate_compares_at_each_rate_on_the_seeds_of_all(bench: ModuleType) -> None:
    report, dense = load_example("quality_report"), {"method": "adamw", "options": ()}
    losses = {1e-3: (2.0, 2.1), 2e-3: (1.0, 1.1)}
    found = [result(bench, tiny(bench, lr=lr), loss) for lr, (_, loss) in losses.items()]
    found += [
        result(bench, bench.dataclasses.replace(tiny(bench, lr=lr), **dense), loss) for lr, (loss, _) in losses.items()
    ]
    found += [result(bench, bench.dataclasses.replace(tiny(bench, lr=1e-3, seed=1), **dense), 7.0)]
    lines = report.sweep_table(report.losses_by_rate(found))
    assert "| 0.001 | 2.0000 | 2.1000 (+5.0%) |" in lines
    assert "| 0.002 | 1.0000 | 1.1000 (+10.0%) |" in lines


def test_learning_rates_without_a_common_seed_are_compared_on_what_each_has(bench: ModuleType) -> None:
    (row,) = rows(bench, {(1e-3, 0): 1.5, (2e-3, 1): 1.6, (4e-3, 2): 1.7})
    assert (row.lr, row.losses, row.tried) == (1e-3, [1.5], 3)


@pytest.mark.few(0)
def test_short_form_runs_every_method_and_ablation_and_reports(tmp_path: Path) -> None:
    command = [warm_python(), str(EXAMPLES / "bench_quality.py"), "--short", f"--out={tmp_path}", "--jobs=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("*.*")} == {
        "quality.md",
        "quality.json",
        "loss.png",
        "gap.png",
        "rates.png",
        "drop_in.png",
    }
    rows = json.loads((tmp_path / "quality.json").read_text())
    assert {"dense AdamW", "dense AdamS", "SCAPE 90%", "SCAPE 99%", "SCAPE 99.9%"} <= {row["label"] for row in rows}
    again = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert "started" not in again.stdout  # finished runs are not run again
