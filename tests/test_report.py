"""``lightning-scape report``: a picture and a table of what a CSV logger has kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from trainer_helpers import MARKS, Regression, make_trainer

from lightning_scape import ScapeMonitor, ScapeStrategy
from lightning_scape.tools.cli import main
from lightning_scape.tools.report import Run, report

pytestmark = MARKS


def _train(rank: int, world_size: int, folder: str) -> None:
    options = {"callbacks": [ScapeMonitor(1)], "logger": CSVLogger(folder), "log_every_n_steps": 1}
    make_trainer(ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=2), max_epochs=2, **options).fit(Regression())


def test_a_run_is_drawn_and_told(run_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_train, 2, str(tmp_path))
    (file,) = tmp_path.rglob("metrics.csv")
    for path in (tmp_path, file):
        assert main(["report", str(path)]) == 0
        assert file.with_name("report.png").read_bytes().startswith(b"\x89PNG")
        file.with_name("report.png").unlink()
    said = capsys.readouterr().out
    run = Run(file)
    (steps, sent), (_, dense) = run.total("bytes_run"), run.total("bytes_run_dense")
    assert [*steps] == [*range(12)]
    assert (sent[1:] > sent[:-1]).all()
    assert f"| DDP would have sent | {dense[-1] / 1e3:.3g} KB, {dense[-1] / sent[-1]:.3g} times as much |" in said
    assert f"| loss | {run.of(['loss'])[1][-1]:.4f} |" in said


def test_figures_of_two_optimizers_are_added_up(tmp_path: Path) -> None:
    lines = ["step,loss,scape-0/bytes_run,scape-0/seconds_run,scape-1/bytes_run,scape-1/seconds_run"]
    lines += ["0,2.5,,,,", "0,,10,1,5,1", "1,,20,2,9,2", "1,2.25,,,,"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    run = Run(tmp_path / "metrics.csv")
    assert [*run.total("bytes_run")[1]] == [15, 29]
    assert [*run.seconds[1]] == [1, 2]
    assert [*run.of(["loss"])[1]] == [2.5, 2.25]


def test_a_run_of_one_report_is_told(tmp_path: Path) -> None:
    names = ("bytes_run", "bytes_run_dense", "seconds_run", "message_seconds")
    lines = [",".join(["step", *(f"scape/{name}" for name in names)]), "49,10,20,3,1"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    (tmp_path / "ddp").mkdir()
    (tmp_path / "ddp" / "metrics.csv").write_text("step,loss\n49,1\n")  # newer, and not the monitor's
    said = report(tmp_path)
    assert "| steps | 50 |" in said
    assert "| DDP would have sent | 20 B, 2 times as much |" in said


@pytest.mark.parametrize(("text", "said"), [(None, "must hold a metrics.csv"), ("name\nBob,1\n", "of ScapeMonitor")])
def test_what_cannot_be_drawn_is_an_error(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    assert main(["report", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
