"""The report of a run: what it holds, that nothing is lost, and that a page is whole or not there."""

from __future__ import annotations

import base64
import html.parser
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from trainer_helpers import MARKS, Regression, TwoOptimizers, make_trainer

from lightning_scape import ScapeMonitor, SparseLoCoMonitor, SparseLoCoStrategy
from lightning_scape.core.words import show_bytes
from lightning_scape.hosts import monitor
from lightning_scape.reporting import FIGURES, PAGE, History, write_page
from lightning_scape.reporting import history as histories
from lightning_scape.reporting import page as pages
from lightning_scape.reporting.plots import MOST_POINTS, plots, thinned
from lightning_scape.tools import commands

pytest.importorskip("matplotlib", reason="reports are drawn with matplotlib")
pytestmark = MARKS
RunRanks = Callable[..., list[Any]]
TITLES = ["Loss", "Density", "Bytes by kind", "Time by phase", "Churn", "Skipped steps"]


class Logged(Regression):
    """With a loss of its own on every batch, so that a mean can be told."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 0 + self.trainer.global_step + 1.0


class Page(html.parser.HTMLParser):
    """What a page shows and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.images: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            kind, data = str(given["src"]).split(",")
            assert kind == "data:image/svg+xml;base64"
            self.images.append(base64.b64decode(data).decode())
        self.loads += [str(given[name]) for name in ("src", "href", "action") if name in given]
        assert tag not in ("script", "link", "iframe")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def texts(svg: str) -> list[str]:
    """All that is written in a drawing."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(each.itertext()) for each in found]


def fit(rank: int, world_size: int, folder: str, options: dict[str, Any], model: Any = Regression) -> None:
    options = {"callbacks": [ScapeMonitor(2, report=folder)]} | options
    path = options.pop("ckpt_path", None)
    make_trainer(**options).fit(model(), ckpt_path=path)


def test_a_run_leaves_a_page_with_all_plots(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fit, 2, str(tmp_path), {"limit_val_batches": 1, "check_val_every_n_epoch": 1})
    page = Page((tmp_path / PAGE).read_text())
    assert [title for title in TITLES if f"{title}." in page.text] == TITLES
    assert all(load.startswith("data:") for load in page.loads)
    assert len(page.images) == len(TITLES)
    loss, density, sent, phases, churn, skipped = map(texts, page.images)
    assert {"optimizer step", "loss", "training", "val_loss"} <= set(loss)
    assert {"optimizer step", "density (share of entries)"} <= set(density)
    assert {"sent per rank and step (MB)", "gradient values", "dense all-reduce"} <= set(sent)
    assert {"time per step (ms)", "sweep", "rest"} <= set(phases)
    assert {"share", "new in the mask", "energy sent"} <= set(churn)
    assert "skipped so far (count)" in skipped
    assert "ended finished ranks 2 strategy" in page.text
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(("store", "stacks"))) == [
        FIGURES,
        PAGE,
    ]


def test_the_figures_are_those_of_the_steps(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fit, 2, str(tmp_path), {}, Logged)
    (run,) = History.read(tmp_path).runs
    assert [point["step"] for point in run.points] == [2, 4, 6]
    assert [point["loss"] for point in run.points] == [1.5, 3.5, 5.5]
    assert [point["metrics"]["scape/step"] for point in run.points] == [2, 4, 6]
    assert all(point["step_seconds"] > 0 for point in run.points)
    assert (run.about["method"], run.about["ranks"], run.end["how"]) == ("scape", 2, "finished")


def test_the_page_has_the_sum_of_the_run_beside_ddps(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Of both fits of a run that goes on from a checkpoint; and what is left, where it has not ended."""
    checkpoint = ModelCheckpoint(tmp_path / "saved", "last", every_n_train_steps=4, save_on_train_epoch_end=False)
    callbacks = [ScapeMonitor(2, report=tmp_path), checkpoint]
    run_ranks(fit, 2, str(tmp_path), {"max_steps": 4, "callbacks": callbacks, "enable_checkpointing": True})
    options = {"max_steps": 6, "ckpt_path": str(tmp_path / "saved" / "last.ckpt")}
    run_ranks(fit, 2, str(tmp_path), options)
    history = History.read(tmp_path)
    first, second = history.runs
    assert (first.about["steps"], second.about["steps"]) == (4, 6)
    sums = [run.points[-1]["metrics"]["scape/bytes_run"] for run in history.runs]
    text = Page((tmp_path / PAGE).read_text()).text
    assert f"sent per rank in the whole run {show_bytes(sum(sums))} in 6 steps, " in text
    assert re.search(r"per step on average; DDP would have sent .* times as much", text)
    assert "sent by a rank" in text
    second.end, second.points = None, []
    second.validations = [{"step": 5, "metrics": {}}]
    left = second.about["bytes_expected"]
    assert f"expected of the whole run {show_bytes(sums[0] + left)} in 6 steps" in Page(pages.page(history)).text


@pytest.mark.few(0)
def test_accumulated_batches_count_with_their_whole_loss(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Lightning hands a callback the loss divided by the batches of a step."""
    run_ranks(fit, 1, str(tmp_path), {"accumulate_grad_batches": 4}, Logged)
    (run,) = History.read(tmp_path).runs
    assert [(point["step"], point["loss"]) for point in run.points] == [(2, 1.5), (3, 3.0)]  # 3: the end of the fit


def test_a_run_shorter_than_the_interval_has_its_last_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fit, 2, str(tmp_path), {"callbacks": [ScapeMonitor(report=str(tmp_path))]})
    (run,) = History.read(tmp_path).runs
    assert [point["step"] for point in run.points] == [6]


def fail(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(Exception, match="own mistake|must answer") as raised:
        make_trainer(callbacks=[ScapeMonitor(1, report=folder)]).fit(Regression(fail_at=3))
    return type(raised.value).__name__


def test_an_exception_leaves_the_page_up_to_there_and_is_told(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fail, 1, str(tmp_path))
    (run,) = History.read(tmp_path).runs
    assert [point["step"] for point in run.points] == [1, 2, 3]
    assert run.end["how"] == 'KeyError: "the model\'s own mistake"'
    assert 'KeyError: "the model\'s own mistake"' in Page((tmp_path / PAGE).read_text()).text


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def stop_and_go_on(rank: int, world_size: int, folder: str) -> None:
    saver = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=4, save_top_k=-1)
    monitor = ScapeMonitor(1, report=f"{folder}/report")
    options = {"max_epochs": 3, "enable_checkpointing": True, "min_epochs": 0, "min_steps": 0}
    make_trainer(callbacks=[monitor, saver, Stop(6)], **options).fit(Regression())
    (path,) = Path(folder).glob("at-*4.ckpt")
    make_trainer(callbacks=[ScapeMonitor(1, report=f"{folder}/report")], max_epochs=2).fit(Regression(), ckpt_path=path)


def test_a_resumed_run_goes_on_with_the_curves_and_loses_nothing(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(stop_and_go_on, 2, str(tmp_path))
    folder = tmp_path / "report"
    history = History.read(folder)
    assert [(run.start, run.last_step) for run in history.runs] == [(0, 6), (4, 12)]
    before, after = history.line()
    assert [point["step"] for point in [*before.points, *after.points]] == [*range(1, 13)]
    assert [point["step"] for point in history.runs[0].points] == [1, 2, 3, 4, 5, 6]
    assert history.others() == []
    assert "in colour 2 " in Page((folder / PAGE).read_text()).text.replace("finished ", "")


@pytest.mark.few(0)
def test_a_run_that_starts_again_draws_the_earlier_one_in_grey(run_ranks: RunRanks, tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(fit, 2, str(tmp_path), {})
    history = History.read(tmp_path)
    assert [len(run.points) for run in history.runs] == [3, 3]
    assert history.line() == history.runs[1:]
    page = Page((tmp_path / PAGE).read_text())
    assert "earlier runs" in texts(page.images[0])
    assert "grey" in page.text


def local(rank: int, world_size: int, folder: str, monitor: str) -> None:
    monitors = {"scape": lambda: ScapeMonitor(report=folder), "sparseloco": lambda: SparseLoCoMonitor(report=folder)}
    make_trainer(SparseLoCoStrategy(sync_every=2), callbacks=[monitors[monitor]()]).fit(Regression())


@pytest.mark.few(0)
@pytest.mark.parametrize("monitor", ["scape", "sparseloco"])
def test_sparseloco_has_a_report_by_either_monitor(monitor: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(local, 2, str(tmp_path), monitor)
    (run,) = History.read(tmp_path).runs
    assert [point["step"] for point in run.points] == [2, 4, 6]
    assert [point["metrics"]["sparseloco/exchange"] for point in run.points] == [1, 2, 3]
    page = Page((tmp_path / PAGE).read_text())
    assert "SparseLoCo: 6 steps" in page.text
    assert "Skipped windows." in page.text
    drawn = set(sum(map(texts, page.images), []))
    assert {"sent per rank and exchange (MB)", "time per exchange (ms)", "pseudo-gradient", "L2 norm"} <= drawn


def test_several_optimizers_have_lines_of_their_own(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fit, 2, str(tmp_path), {}, TwoOptimizers)
    page = Page((tmp_path / PAGE).read_text())
    assert {"scape-0", "scape-1"} <= set(texts(page.images[1]))


def test_one_rank_sends_nothing_and_says_so(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fit, 1, str(tmp_path), {})
    page = Page((tmp_path / PAGE).read_text())
    assert "nothing: there is one rank" in page.text
    assert "one rank: nothing is sent" in texts(page.images[2])


def unwritable(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(ValueError, match="`report` must name a folder that rank 0 can write to, got") as raised:
        make_trainer(callbacks=[ScapeMonitor(report=f"{folder}/file/below")]).fit(Regression())
    return str(raised.value)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(unwritable, 2, str(tmp_path))
    assert first == second


FORKED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from trainer_helpers import Regression
import lightning.pytorch as pl
from lightning_scape import ScapeMonitor, ScapeStrategy

torch.set_num_threads(1)
strategy = ScapeStrategy(sparsity=0.9, start_method="fork", sparsity_warmup_steps=0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
monitor = ScapeMonitor(1, report=sys.argv[2])
pl.Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, callbacks=[monitor], **quiet).fit(
    Regression(fail_at=3)
)
"""


@pytest.mark.few(0)
def test_an_exception_in_forked_ranks_leaves_the_page_too(tmp_path: Path) -> None:
    """The process that started them hears of the exception, and has no figures of its own."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode != 0
    assert "own mistake" in done.stderr
    (run,) = History.read(tmp_path).runs
    assert len(run.points) == 3
    assert run.end["how"] == 'KeyError: "the model\'s own mistake"'  # it was "ProcessRaisedException: "
    assert (tmp_path / PAGE).exists()


# ------------------------------------------------------------------------------------------------------- history


def written(folder: Path, *lines: dict[str, Any] | str) -> History:
    texts_ = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / FIGURES).write_text("\n".join(texts_))
    return History.read(folder)


def run_line(start: int, time: float = 0.0) -> dict[str, Any]:
    return {"kind": "run", "step": start, "time": time, "method": "scape", "ranks": 2, "strategy": "<x>"}


def point(step: int, **metrics: float) -> dict[str, Any]:
    figures = {f"scape/{name}": value for name, value in ({"density": 0.1, "skipped_total": 0.0} | metrics).items()}
    return {"kind": "point", "step": step, "time": 0.0, "loss": 1.0, "step_seconds": 0.1, "metrics": figures}


def test_the_line_of_runs_is_that_of_the_docstring(tmp_path: Path) -> None:
    runs = []
    for start, end in ((0, 60), (0, 100), (80, 120)):
        runs += [run_line(start), *map(point, range(start + 20, end + 1, 20))]
    history = written(tmp_path, *runs)
    first, second = history.line()
    assert [each["step"] for each in first.points] == [20, 40, 60, 80]
    assert [each["step"] for each in second.points] == [100, 120]
    assert history.others() == history.runs[:1]


def test_a_line_that_was_torn_costs_no_other_and_is_told(tmp_path: Path) -> None:
    written(tmp_path, run_line(0), point(1), '{"kind": "poi')
    histories.Writer(tmp_path).add("point", 2, {"loss": 1.0, "step_seconds": None, "metrics": {"scape/density": 1.0}})
    history = History.read(tmp_path)
    assert [each["step"] for each in history.runs[0].points] == [1, 2]
    (word,) = history.passed_over
    assert (
        word
        == f"{tmp_path / FIGURES}, line 3: it must be JSON, and whole. It may have been cut as a process was killed."
    )
    assert f"A line was passed over. {word}" in Page(pages.page(history)).text


def test_a_page_of_a_run_that_was_killed_can_be_made_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, run_line(0), point(1), point(2))
    assert commands.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / PAGE}\n"
    assert "ended not yet, or it was killed" in Page((tmp_path / PAGE).read_text()).text
    with open(tmp_path / FIGURES, "a") as file:
        file.write('\n{"kind": "poi')
    assert commands.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / PAGE}\n"
    assert said.err.startswith(f"lightning-scape: passed over: {tmp_path / FIGURES}, line 4: it must be JSON")
    assert commands.main(["report", str(tmp_path / "nothing")]) == 1
    assert "got no figures in" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, run_line(0), point(1))
    (tmp_path / PAGE).write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_page(tmp_path)
    assert (tmp_path / PAGE).read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [FIGURES, PAGE]


def broken_page(rank: int, world_size: int, folder: str) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no font")

    monitor.write_page = fail
    with pytest.warns(UserWarning, match="got RuntimeError: no font. Its figures are there") if not rank else nothing():
        fit(rank, world_size, folder, {})


def test_a_page_that_cannot_be_drawn_is_a_warning_and_the_fit_ends_well(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(broken_page, 2, str(tmp_path))
    assert History.read(tmp_path).runs[0].end["how"] == "finished"


def test_what_a_run_says_of_itself_is_text_and_no_markup(tmp_path: Path) -> None:
    end = {"kind": "end", "step": 1, "time": 0.0, "how": "ValueError: <script>alert(1)</script>"}
    history = written(tmp_path, run_line(0), point(1), end)
    assert "<script" not in pages.page(history)
    assert "ValueError: <script>alert(1)</script>" in Page(pages.page(history)).text


def test_figures_that_are_not_finite_leave_a_gap_and_no_error(tmp_path: Path) -> None:
    text = json.dumps(point(2, density=float("nan"), skipped_total=1.0)).replace("1.0", "NaN", 1)
    history = written(tmp_path, run_line(0), point(1), text, point(3))
    assert len(plots(history)) == len(TITLES)


ODD = {
    "[" * 100_000: "it must be JSON, and whole",
    "\x00\x00": "it must be JSON, and whole",
    "7": "it must be an object, got '7'",
    '{"kind": ["point"], "step": 1}': "`kind` must be 'run', 'point', 'validation' or 'end', got a list",
    '{"kind": "point", "metrics": {}}': "`step` must be a whole number from 0 to 2**53, got nothing",
    '{"kind": "point", "step": 1e400, "metrics": {}}': "`step` must be a whole number from 0 to 2**53, got 'inf'",
    '{"kind": "point", "step": -1, "metrics": {}}': "`step` must be a whole number from 0 to 2**53, got '-1'",
    '{"kind": "point", "step": 1.5, "metrics": {}}': "`step` must be a whole number from 0 to 2**53, got '1.5'",
    '{"kind": "point", "step": true, "metrics": {}}': "`step` must be a number, got 'True'",
    '{"kind": "run", "step": 0, "time": "x"}': "`time` must be a number, got 'x'",
    '{"kind": "run", "step": 0, "time": 1e300}': "`time` must be in seconds since 1970, got '1e+300'",
    '{"kind": "run", "step": 0, "method": []}': "`method` must be a name, got a list",
    '{"kind": "point", "step": 1}': "`metrics` must be an object, got nothing",
    '{"kind": "validation", "step": 1, "metrics": []}': "`metrics` must be an object, got a list",
    '{"kind": "point", "step": 1, "loss": "a", "metrics": {}}': "`loss` must be a number, got 'a'",
    '{"kind": "point", "step": 1, "metrics": {"a\\ud800": "x"}}': "`a\ufffd` must be a number, got 'x'",
    f'{{"kind": "point", "step": 1, "loss": 1{"0" * 400}, "metrics": {{}}}}': "`loss` must be a number, got '1000",
}


def test_a_line_of_another_shape_is_passed_over_and_named(tmp_path: Path) -> None:
    """Each of them ended in a traceback, or in no page."""
    history = written(tmp_path, run_line(0), point(1), *ODD, point(2))
    assert [each["step"] for each in history.runs[0].points] == [1, 2]
    for number, (reason, word) in enumerate(zip(ODD.values(), history.passed_over, strict=True), 3):
        assert word.startswith(f"{tmp_path / FIGURES}, line {number}: {reason}")
    assert f"{len(ODD)} lines were passed over." in Page(pages.page(history)).text


def test_a_folder_with_nothing_but_odd_lines_is_an_error_that_names_one(tmp_path: Path) -> None:
    written(tmp_path, "[1]")
    with pytest.raises(ValueError, match=rf"got no figures in .*{FIGURES}, line 1: it must be an object, got a list"):
        write_page(tmp_path)


def test_figures_that_are_no_file_are_an_error_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FIGURES)
    with pytest.raises(OSError, match=f"{FIGURES} must be a file, got something else of that name"):
        write_page(tmp_path)
    with pytest.raises(OSError, match=f"{FIGURES} must be a file"):
        histories.Writer(tmp_path)


NAMES = [
    "$x",
    r"val_loss $\frac$",
    "_val_loss",
    "val_loss\n2\0",
    "val_loss\ud800",
    "",
    "損失loss",
    "x" * 3000,
    "<script>",
]


@pytest.mark.filterwarnings("error")
def test_metrics_of_any_name_and_size_are_text_in_a_page(tmp_path: Path) -> None:
    """A name with a dollar sign gave no page: matplotlib took it for a formula."""
    values = [1e-7, math.inf, -1.7e308, 1e308, math.nan, 5e-324, 0.0, 2.0, 3.0]
    validations = [
        {"kind": "validation", "step": step, "metrics": dict(zip(NAMES, values[step:] + values[:step], strict=True))}
        for step in (1, 2, 3)
    ]
    points = [point(1, **{"seconds/$\\q$": -1.0, "skipped_total": math.inf}), point(2, **{"seconds/$\\q$": math.inf})]
    prefixed = {"kind": "point", "step": 3, "loss": 1e308, "step_seconds": math.inf, "metrics": {"s$\\x$/density": 0.1}}
    written(tmp_path, run_line(0), *points, prefixed, *validations)
    page = Page(write_page(tmp_path).read_text(encoding="utf-8"))
    assert "$x 1e+308" in page.text
    assert "val_loss 2\ufffd" in page.text
    assert "(no name)" in page.text
    drawn = set(sum(map(texts, page.images), []))
    assert {"$x", r"val_loss $\frac$", " _val_loss", "損失loss", r"s$\x$"} <= drawn
    assert not any(len(text) > 100 for text in drawn)


def validated(history: History) -> tuple[list[str], list[str]]:
    page = Page(pages.page(history))
    return texts(page.images[0]), [page.text, *map(" ".join, map(texts, page.images[len(TITLES) :]))]


def test_losses_have_digits_enough_and_a_logarithmic_axis_where_they_span_decades(tmp_path: Path) -> None:
    losses = [2.0, 0.05, 0.00123456789]
    lines = [point(step, loss=0) | {"loss": loss} for step, loss in enumerate(losses, 1)]
    loss, (text,) = validated(written(tmp_path, run_line(0), *lines))
    assert "training loss, last point 0.00123457" in text
    assert {"0.01", "0.1", "1"} <= set(loss)
    loss, _ = validated(written(tmp_path, run_line(0), lines[0], point(2) | {"loss": 1.0}))
    assert {"1.0", "2.0"} <= set(loss)


class ValidatedOtherwise(Regression):
    """Logs a training metric beside a loss and a figure of validation, none of them called val_loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("fit_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/nll", 0.0000125, sync_dist=True)
        self.log("accuracy", float("nan") if self.trainer.global_step else 1.0, sync_dist=True)


def test_a_validation_metric_of_any_name_is_in_the_report_and_no_training_metric(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": 1}
    run_ranks(fit, 2, str(tmp_path), options, ValidatedOtherwise)
    history = History.read(tmp_path)
    assert {name for each in history.runs[0].validations for name in each["metrics"]} == {"val/nll", "accuracy"}
    loss, (text, accuracy) = validated(history)
    assert "val/nll" in loss
    assert "val/nll 1.25e-05 accuracy nan" in text
    assert "accuracy" in accuracy


def test_figures_without_bytes_do_not_say_that_there_is_one_rank(tmp_path: Path) -> None:
    assert "there is one rank" not in pages.page(written(tmp_path, run_line(0), point(1)))


def test_a_run_whose_first_lines_are_gone_has_no_mean_of_its_steps(tmp_path: Path) -> None:
    """Its bytes are of all steps, and were divided by those that the figures still have."""
    summed = {"bytes_run": 60.0, "bytes_run_dense": 600.0}
    assert "in 6 steps" in pages.page(written(tmp_path, run_line(0), point(6, **summed)))
    assert "per step on average" not in pages.page(written(tmp_path, point(3), point(6, **summed)))


def test_a_run_without_any_point_still_has_a_page(tmp_path: Path) -> None:
    assert "No figures yet" in Page(pages.page(written(tmp_path, run_line(0)))).text


def test_a_method_that_is_not_known_here_says_its_title_and_that_it_exchanges(tmp_path: Path) -> None:
    third = {**run_line(0), "method": "third", "title": "Third", "unit": "exchange"}
    history = written(tmp_path, third, point(1))
    assert [plot.title for plot in plots(history)][4:] == ["Norms", "Skipped windows"]
    said = Page(pages.page(history)).text
    assert "Third: 1 steps" in said
    assert "skipped windows" in said


def test_long_runs_are_thinned_evenly_to_their_last_point() -> None:
    kept = thinned([{"step": step} for step in range(1, 5 * MOST_POINTS + 4)])
    steps = [each["step"] for each in kept]
    assert len(steps) <= MOST_POINTS
    assert steps[-1] == 5 * MOST_POINTS + 3
    assert {after - before for before, after in zip(steps, steps[1:], strict=False)} == {6}
    assert thinned([]) == []


def test_the_same_figures_give_the_same_drawing(tmp_path: Path) -> None:
    history = written(tmp_path, run_line(0), point(1), point(2))
    assert plots(history) == plots(history)


def test_the_command_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert commands.main(["report", "x"]) == 1
    assert "`lightning-scape report` needs matplotlib. Install it: pip install 'lightning" in capsys.readouterr().err


def test_a_report_without_matplotlib_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(ModuleNotFoundError, match=r"Install lightning-scape\[plots\]"):
        ScapeMonitor(report="x")
    ScapeMonitor()


@pytest.mark.parametrize("monitor", [ScapeMonitor, SparseLoCoMonitor])
def test_a_name_that_is_no_folders_is_an_error(monitor: Any) -> None:
    for name in ("", "s3://bucket/report"):
        with pytest.raises(ValueError, match=f"`report` must name a folder of a file system, got '{name}'"):
            monitor(report=name)
    assert monitor(report="~/report").report == Path.home() / "report"
