"""ScapeMonitor: what it logs, when, and that it costs nothing otherwise."""

from __future__ import annotations

import io
import logging
import math
import re
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from trainer_helpers import BATCHES, Recorder, Regression, TwoOptimizers, make_trainer

from lightning_scape import ScapeConfig, ScapeMonitor, ScapeOptimizer, ScapeStrategy, SparseLoCoStrategy, StepStats
from lightning_scape.core.method import find
from lightning_scape.core.words import show_bytes


def _monitored(rank: int, world_size: int, every: int, options: dict[str, Any], model: type) -> dict[str, Any]:
    looked = []
    real = ScapeOptimizer.stats
    ScapeOptimizer.stats = property(lambda self: looked.append(self) or real.fget(self))
    recorders = [Recorder(), Recorder()]
    trainer = make_trainer(callbacks=[ScapeMonitor(every)], logger=recorders, **options)
    trainer.fit(model())
    ScapeOptimizer.stats = real
    return {
        "records": recorders[0].records,
        "other": recorders[1].records,
        "looked": len(looked),
        "bar": {name: float(value) for name, value in trainer.progress_bar_metrics.items()},
    }


def test_every_logger_gets_all_statistics_every_n_optimizer_steps(run_ranks: Any) -> None:
    first, _ = run_ranks(_monitored, 2, 2, {}, Regression)
    assert [step for step, _ in first["records"]] == [1, 3, 5]  # Lightning counts from 0 here, for every metric
    assert [metrics["scape/step"] for _, metrics in first["records"]] == [2, 4, 6]
    assert first["other"] == first["records"]
    for _, metrics in first["records"]:
        assert metrics["scape/bytes_total"] > 0
        assert {"scape/compression", "scape/density", "scape/grad_norm", "scape/seconds/sweep"} <= set(metrics)
        assert all(isinstance(value, float) for value in metrics.values())


def _whole_run(rank: int, world_size: int, folder: str, strategy: Any) -> dict[str, Any]:
    recorder, said = Recorder(), io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    checkpoint = ModelCheckpoint(folder, save_on_train_epoch_end=True)
    options = {"callbacks": [ScapeMonitor(1), checkpoint], "logger": recorder, "gradient_clip_val": 1.0}
    trainer = make_trainer(**options | strategy, enable_checkpointing=True)
    trainer.fit(Regression())
    moved = trainer.strategy.checkpoint_bytes
    return {"records": recorder.records, "said": said.getvalue(), "moved": (moved.sent, moved.received)}


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_the_whole_run_is_counted_announced_and_told(run_ranks: Any, tmp_path: Any, method: str) -> None:
    """Warm-up, first messages and set-up included; each step's own count leaves the set-up out."""
    config = {"sparsity": 0.9, "sparsity_warmup_steps": 3} if method == "scape" else {"sync_every": 2}
    kind = {"scape": ScapeStrategy, "sparseloco": SparseLoCoStrategy}[method]
    first, other = run_ranks(_whole_run, 2, str(tmp_path), {"strategy": kind(**config)})
    metrics = [values for _, values in first["records"]]
    sums = [values[f"{method}/bytes_run"] for values in metrics]
    counted = sum(values[f"{method}/bytes_total"] for values in metrics)
    assert sums == sorted(sums)
    assert counted <= sums[-1] <= counted + 2000  # comparisons of replicas, and room for a sketch, once
    dense = [values[f"{method}/bytes_run_dense"] / values[f"{method}/step"] for values in metrics]
    assert len(set(dense)) == 1
    assert dense[0] > 0
    assert first["moved"][1] == other["moved"][0] > 0
    before, after = re.findall(r"(?:SCAPE|SparseLoCo): (?:this run of|rank 0 has sent) .*", first["said"])
    assert re.search(r"this run of 6 steps will send .*, .* in the last (step|exchange), from each rank,", before)
    assert "DDP would send " in before
    assert "in 6 steps. DDP would have sent " in after
    last = f"{show_bytes(metrics[-1][f'{method}/bytes_total'])} in the last "
    assert last in before
    assert last in after
    assert re.search(r"For checkpoints a rank has sent [\d.]+ [KM]?B\.", after)


def _said_before_and_after(rank: int, world_size: int, kind: str, folder: str) -> tuple[str, list[int], float]:
    """Lines, steps that were taken of each fit, and the sum of checkpoints."""
    said, taken = io.StringIO(), []
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(said))
    monitor, schedule = ScapeMonitor(1), GradientAccumulationScheduler({0: 4, 1: 1})
    more = [schedule] if kind == "schedule" else [ModelCheckpoint(folder, save_on_train_epoch_end=True)]
    options = {"max_steps": 8} if kind == "several" else {"max_epochs": 2 if kind == "schedule" else 1}
    trainer = make_trainer(callbacks=[monitor, *more], **options, enable_checkpointing=kind != "schedule")
    module = (TwoOptimizers if kind == "several" else Regression)()
    for _ in range(2 if kind == "second fit" else 1):
        trainer.fit(module)
        taken.append(trainer.global_step)
        trainer.fit_loop.max_epochs += 1
    found = re.findall(r"For checkpoints a rank has sent ([\d.]+) KB", said.getvalue())
    return said.getvalue(), taken, float(found[-1]) / float(found[0]) if found else 1.0


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["schedule", "second fit", "several"])
def test_a_run_is_announced_with_the_steps_that_its_optimizer_takes(run_ranks: Any, tmp_path: Any, kind: str) -> None:
    """It said 12 for a schedule of accumulation, both fits' steps for the second, all optimizers' for each."""
    said, taken, checkpoints = run_ranks(_said_before_and_after, 2, kind, str(tmp_path))[0]
    before, after = (re.findall(found, said) for found in (r"this run of (\d+) steps will", r", in (\d+) steps\."))
    steps = {"schedule": ["8"], "second fit": ["6", "6"], "several": ["4"]}[kind]
    assert taken == {"schedule": [8], "second fit": [6, 12], "several": [8]}[kind]
    assert after == steps
    assert before == ([] if kind == "several" else steps)  # nobody knows which of them takes how many
    assert checkpoints == pytest.approx(1.0, abs=0.02)  # the second fit's own


class Looks(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


def _announced_and_sent(rank: int, world_size: int, looks: bool, clips: float | None) -> list[float]:
    said = io.StringIO()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(said))
    trainer = make_trainer(
        callbacks=[ScapeMonitor(1)], max_steps=6, gradient_clip_val=clips, enable_checkpointing=False
    )
    trainer.fit(Looks() if looks else Regression())
    found = re.findall(r"(?:will send|has sent) ([\d.]+) (K?)B,", said.getvalue())
    return [float(number) * (1000 if kilo else 1) for number, kilo in found]


@pytest.mark.few(1)
@pytest.mark.parametrize("clips", [1.0, None])
def test_the_message_before_a_hook_that_may_look_at_gradients_is_announced(run_ranks: Any, clips: float | None) -> None:
    plain, looking = (run_ranks(_announced_and_sent, 2, looks, clips)[0] for looks in (False, True))
    announced, sent = (more - less for less, more in zip(plain, looking, strict=True))
    # The first one of a process may be short: no sketch was sent yet. Sums are said by three digits.
    assert -0.01 * looking[0] <= announced - sent <= (announced / 6 if clips else 0) + 0.01 * looking[0]
    assert announced > (0.9 * plain[0] if clips else 100)


def _densities(rank: int, world_size: int) -> list[float]:
    recorder = Recorder()
    strategy = ScapeStrategy(sparsity=0.9, block_size=10, dense_steps=1, sparsity_warmup_steps=3)
    make_trainer(strategy, callbacks=[ScapeMonitor(1)], logger=[recorder]).fit(Regression())
    return [metrics["scape/density"] for _, metrics in recorder.records]


def test_the_density_is_that_of_the_moment(run_ranks: Any) -> None:
    for densities in run_ranks(_densities, 2):
        # By real entries: parameters of 5 and 3 fill no block of 10, and send at least as many of a block as the rest.
        assert densities == sorted(densities, reverse=True)
        assert densities[0] == 1.0
        assert len(set(densities)) == 5
        assert densities[4] == densities[5] < 0.2


@pytest.mark.few(0)
def test_the_statistics_are_not_even_looked_at_on_other_steps(run_ranks: Any) -> None:
    steps, at_the_end = BATCHES, 1  # of each of two ranks; the last line tells of the last step
    assert run_ranks(_monitored, 2, steps - 1, {}, Regression)[0]["looked"] == 1 + at_the_end
    assert run_ranks(_monitored, 2, steps + 1, {}, Regression)[0]["looked"] == at_the_end


def test_accumulated_batches_are_reported_once_per_optimizer_step(run_ranks: Any) -> None:
    (result,) = run_ranks(_monitored, 1, 1, {"accumulate_grad_batches": 4}, Regression)
    assert [metrics["scape/step"] for _, metrics in result["records"]] == [1, 2, 3]


def test_several_optimizers_are_told_apart_and_none_is_missed(run_ranks: Any) -> None:
    # Every batch steps both: the Trainer's step count is even after each, and 3 divides every third of them.
    result, _ = run_ranks(_monitored, 2, 3, {}, TwoOptimizers)
    assert [metrics["scape-0/step"] for _, metrics in result["records"]] == [2, 3, 5, 6]
    assert all(metrics["scape-1/step"] == metrics["scape-0/step"] for _, metrics in result["records"])


@pytest.mark.few(0)
def test_the_progress_bar_shows_compression_and_gradient_norm(run_ranks: Any) -> None:
    first, _ = run_ranks(_monitored, 2, 2, {}, Regression)
    last = first["records"][-1][1]
    shown = {name: value for name, value in first["bar"].items() if name.startswith("scape")}
    assert shown == {name: pytest.approx(last[name]) for name in ("scape/compression", "scape/grad_norm")}


def test_one_rank_has_no_compression_to_show(run_ranks: Any) -> None:
    (result,) = run_ranks(_monitored, 1, 2, {}, Regression)
    assert math.isnan(result["records"][-1][1]["scape/compression"])
    assert set(result["bar"]) == {"scape/grad_norm"}


def _files_and_bars(rank: int, world_size: int, folder: str) -> bool:
    for bar in (TQDMProgressBar, RichProgressBar):
        options = {"logger": CSVLogger(folder), "enable_progress_bar": True, "log_every_n_steps": 1}
        # By default: the warm-up lasts for the whole run, and bars show the density.
        make_trainer(ScapeStrategy(), callbacks=[ScapeMonitor(2), bar()], **options).fit(Regression())
    return True


def test_lightnings_own_logger_and_bars_take_the_names(run_ranks: Any, tmp_path: Any) -> None:
    pytest.importorskip("rich")
    run_ranks(_files_and_bars, 2, str(tmp_path))
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    assert {"scape/bytes_total", "scape/compression", "scape/seconds/launch"} <= set(header.split(","))


def _without_scape(rank: int, world_size: int) -> None:
    make_trainer(DDPStrategy(), callbacks=[ScapeMonitor()]).fit(Regression())


def test_another_strategy_is_an_error_that_names_it_and_the_remedy(run_ranks: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"is DDPStrategy. Use `Trainer\(strategy=ScapeStrategy"):
        run_ranks(_without_scape, 2)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "50"])
def test_an_interval_that_is_not_a_positive_whole_number_is_an_error(every: Any) -> None:
    with pytest.raises(ValueError, match="`every_n_steps` must be a whole number >= 1, got"):
        ScapeMonitor(every)


def test_metrics_are_those_of_the_stats_and_none_before_the_first_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig())
    method = find(optimizer)
    assert method is not None
    assert method.stats() == {}
    parameter.grad = torch.ones(10)
    optimizer.step()
    assert isinstance(optimizer.stats, StepStats)
    assert repr(method.stats()) == repr(optimizer.stats.as_dict(""))  # repr: NaN equals NaN
