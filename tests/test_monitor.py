"""ScapeMonitor: what it logs, when, and that it costs nothing otherwise."""

from __future__ import annotations

import io
import logging
import math
import re
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from trainer_helpers import Recorder, Regression, TwoOptimizers, make_trainer

from lightning_scape import ScapeMonitor, ScapeOptimizer, ScapeStrategy, SparseLoCoStrategy

SHOWN = {"scape/density", "scape/compression", "scape/grad_norm"}


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


LINE = r"(?:SCAPE|SparseLoCo): rank 0 has sent ([\d.]+) (K?)B in (\d+) steps, checkpoints left out; DDP "


def _fit(rank: int, world_size: int, method: str, fits: int = 1) -> tuple[list[Any], list[dict[str, float]]]:
    """Lines and figures of some fits of six steps."""
    recorder, said = Recorder(), io.StringIO()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(said))
    strategy = SparseLoCoStrategy(sync_every=2) if method == "sparseloco" else ScapeStrategy(sparsity=0.9)
    trainer = make_trainer(strategy, callbacks=[ScapeMonitor(1)], logger=recorder, gradient_clip_val=1.0)
    for _ in range(fits):
        trainer.fit(Regression())
        trainer.fit_loop.max_epochs += 1
    return re.findall(LINE, said.getvalue()), [metrics for _, metrics in recorder.records]


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_the_whole_run_is_counted_and_told(run_ranks: Any, method: str) -> None:
    lines, metrics = run_ranks(_fit, 2, method)[0]
    sums = [values[f"{method}/bytes_run"] for values in metrics]
    assert sums == sorted(sums)
    seconds = [values[f"{method}/seconds_run"] for values in metrics]
    assert 0 < seconds[0] < seconds[-1]
    last = metrics[-1]
    assert last[f"{method}/bytes_run_dense"] == last[f"{method}/step"] * last[f"{method}/bytes_dense"]
    ((number, kilo, steps),) = lines
    assert steps == "6"
    # What compares replicas comes on top, and what ends the last window.
    told = float(number) * (1000 if kilo else 1)
    assert sums[-1] <= 1.01 * told <= 1.02 * sums[-1] + 100


def test_a_second_fit_is_told_with_its_own_steps(run_ranks: Any) -> None:
    lines, _ = run_ranks(_fit, 2, "scape", 2)[0]
    assert [line[2] for line in lines] == ["6", "6"]


def _densities(rank: int, world_size: int) -> list[float]:
    recorder = Recorder()
    strategy = ScapeStrategy(sparsity=0.99, sparsity_warmup_steps=3)
    make_trainer(strategy, callbacks=[ScapeMonitor(1)], logger=[recorder]).fit(Regression())
    return [metrics["scape/density"] for _, metrics in recorder.records]


def test_the_density_is_that_of_the_moment(run_ranks: Any) -> None:
    for densities in run_ranks(_densities, 2):
        assert densities == sorted(densities, reverse=True)  # of a block 8, 4, 3 and 2 entries, pads left out
        assert len(set(densities)) == 4
        assert densities[3] == densities[4] == densities[5]


def test_accumulated_batches_are_reported_once_per_optimizer_step(run_ranks: Any) -> None:
    (result,) = run_ranks(_monitored, 1, 1, {"accumulate_grad_batches": 4}, Regression)
    assert [metrics["scape/step"] for _, metrics in result["records"]] == [1, 2, 3]


def test_several_optimizers_are_told_apart_and_none_is_missed(run_ranks: Any) -> None:
    # Every batch steps both: the Trainer's step count is even after each, and 3 divides every third of them.
    result, _ = run_ranks(_monitored, 2, 3, {}, TwoOptimizers)
    assert [metrics["scape-0/step"] for _, metrics in result["records"]] == [2, 3, 5, 6]
    assert all(metrics["scape-1/step"] == metrics["scape-0/step"] for _, metrics in result["records"])


def test_the_progress_bar_shows_density_compression_and_gradient_norm(run_ranks: Any) -> None:
    first, _ = run_ranks(_monitored, 2, 2, {}, Regression)
    last = first["records"][-1][1]
    shown = {name: value for name, value in first["bar"].items() if name.startswith("scape")}
    assert shown == {name: pytest.approx(last[name]) for name in SHOWN}


def test_one_rank_has_no_compression_to_show(run_ranks: Any) -> None:
    (result,) = run_ranks(_monitored, 1, 2, {}, Regression)
    assert math.isnan(result["records"][-1][1]["scape/compression"])
    assert set(result["bar"]) == SHOWN - {"scape/compression"}


def _files_and_bars(rank: int, world_size: int, folder: str) -> bool:
    for bar in (TQDMProgressBar, RichProgressBar):
        options = {"logger": CSVLogger(folder), "enable_progress_bar": True, "log_every_n_steps": 1}
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
