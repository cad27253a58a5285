"""ScapeMonitor: what a method's exchanges cost and bring, in the logger, the progress bar and a report."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException
from typing_extensions import override

from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint.paths import local_path
from lightning_scape.core.method import Method, find_all
from lightning_scape.hosts.ending import mention
from lightning_scape.hosts.private_names import logged_step
from lightning_scape.hosts.run_length import steps_to_tell
from lightning_scape.hosts.run_sum import RunSum, with_prefixes
from lightning_scape.hosts.shared_nans import may_look
from lightning_scape.reporting import History, write_page
from lightning_scape.reporting.history import Writer


class ScapeMonitor(Callback):
    """Logs a method's figures: of a step every ``every_n_steps`` optimizer steps, or of every exchange.

    Under SCAPE, whose every step is an exchange, they are those of :class:`~lightning_scape.StepStats`. Under
    SparseLoCo, and any other method whose ranks exchange less often, they are told whenever an exchange has ended
    (:class:`~lightning_scape.ExchangeStats`). Other steps cost nothing.

    All of them go to every logger of the Trainer under the method's name, ``scape/...`` (``scape-0/...``,
    ``scape-1/...`` with several optimizers); the compression ratio and a norm also go to the progress bar, and so to
    ``trainer.callback_metrics``. The progress bar shows SCAPE's density of the moment, too, as long as the warm-up
    lasts. The strategy does that, with or without this callback. The loggers' numbers are rank 0's; their step axis is
    that of the metrics which the module logs.

    They come with what the run has sent so far: ``bytes_run``, ``bytes_run_dense`` (what DDP would have sent in as
    many steps) and ``bytes_checkpoints`` (what a rank has sent for checkpoints), in this fit. With ``local_group_size``
    the first two are between nodes, and HSDP's. When the fit ends, a line says all of it. Bytes are those of messages,
    without protocol headers, which take some 2% more.

    With ``report="folder"`` the run leaves a page with plots there (loss, density, bytes by kind, time by phase, churn,
    skipped steps), ``report.html``: one file, which any browser opens without a network. Rank 0 writes it when the fit
    ends, also by an exception. The figures are added to ``figures.jsonl`` beside it as they come. Nothing in that file
    is ever overwritten: a run that goes on from a checkpoint continues the curves, and one that starts again in the
    folder draws the earlier ones in grey.

    Args:
        every_n_steps: optimizer steps from one report to the next, >= 1, where every step is an exchange.
        report: folder of the page; None for none. Needs matplotlib (extra ``plots``).

    Raises:
        ValueError: ``every_n_steps`` is not a whole number >= 1; ``report`` is empty or at a store, or rank 0 cannot
            write to it (at the start of the fit, on every rank).
        ModuleNotFoundError: matplotlib is missing.
    """

    method: ClassVar[str | None] = None
    """Name of the method whose figures are logged; None: whichever the optimizers are under."""
    _needs = "`Trainer(strategy=ScapeStrategy(...))`"

    def __init__(self, every_n_steps: int = 50, report: str | os.PathLike[str] | None = None) -> None:
        folder = local_path(report) if report is not None and os.fspath(report) else None
        if report is not None and folder is None:
            raise ValueError(
                f'`report` must name a folder of a file system, got {os.fspath(report)!r}. Write `report="report"`,'
                " or leave it out."
            )
        if report is not None and importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                f"`report={os.fspath(report)!r}` draws with matplotlib, got a Python without it. Install"
                " lightning-scape[plots], or leave `report` out."
            )
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` must be a whole number >= 1, got {every_n_steps!r}. Drop the callback to log nothing."
            )
        self.every_n_steps = every_n_steps
        self._due = 0
        self._seen: list[int] = []
        """Exchanges of each optimizer that were logged."""
        self.report = folder
        self._made = time.time() - 1e-3  # times in the file are rounded
        self._writer: Writer | None = None
        self._loss: Tensor | None = None
        self._losses = 0
        self._clock = _Clock()
        self._last = -1
        self._before: dict[str, Tensor] = {}
        self._sum: RunSum | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises on every rank if rank 0 cannot write to the folder."""
        if self.report is None or stage != "fit":
            return
        problem = None
        if trainer.is_global_zero:
            try:
                self._writer = Writer(self.report)
            except Exception as error:  # a name that cannot be one is no OSError
                problem = (
                    f"`report` must name a folder that rank 0 can write to, got {str(self.report)!r}: {error}. Choose"
                    " another one."
                )
        if problem := trainer.strategy.broadcast(problem):
            raise ValueError(problem)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        methods = self._watched(trainer)
        if not methods:
            raise MisconfigurationException(
                f"`{type(self).__name__}` reports on the exchanges of an optimizer, and there are none: the strategy is"
                f" {type(trainer.strategy).__name__}. Use {self._needs}, or drop the callback."
            )
        self._due = trainer.global_step // self.every_n_steps
        self._seen = [each.progress().ended for each in methods]
        method = methods[0]
        steps = steps_to_tell(trainer, method.progress().steps)
        self._sum = RunSum(methods, steps, trainer, may_look(pl_module))
        self._last, self._loss, self._losses = -1, None, 0
        step = steps_taken(trainer)  # that of the checkpoint, if the fit goes on from one
        self._clock.start(step)
        unit = "step" if method.exchanges_every_step else "exchange"
        about: dict[str, Any] = {"method": method.name, "title": method.title, "unit": unit}
        about |= {"ranks": trainer.world_size, "strategy": repr(trainer.strategy)}
        about["device"] = trainer.strategy.root_device.type
        self._add("run", step, {**about, **self._sum.about(), "version": __version__})

    def _watched(self, trainer: Trainer) -> list[Method]:
        return [each for each in find_all(trainer.optimizers) if self.method in (None, each.name)]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clock.batch_begins()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note_loss(trainer, pl_module, outputs)
        methods = self._watched(trainer)
        # Not `global_step % every_n_steps`: that is true for several batches when gradients are accumulated, and may
        # never be true when a batch steps several optimizers.
        before, self._due = self._due, trainer.global_step // self.every_n_steps
        if methods and (self._due != before or not methods[0].exchanges_every_step):
            self._publish(trainer, pl_module, self._newest(methods), methods[0].shown)

    def _note_loss(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        """Adds a batch's loss to the mean of the coming point; nothing waits for the device."""
        self._clock.batch_ends()
        if self._writer is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided it by the number of batches of a step.
            batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            loss = loss.detach().reshape(()).to(torch.float32) * batches
            self._loss = loss if self._loss is None else self._loss + loss
            self._losses += 1

    def _newest(self, methods: list[Method]) -> dict[str, float]:
        """Figures of exchanges that have ended since the last look, without what adds up over the fit."""
        self._seen += [0] * (len(methods) - len(self._seen))
        metrics: dict[str, float] = {}
        for index, (prefix, method) in enumerate(with_prefixes(methods)):
            progress, seen = method.progress(), self._seen[index]
            self._seen[index] = progress.ended
            if method.exchanges_every_step or progress.begun == progress.ended != seen:
                metrics |= {f"{prefix}/{name}": value for name, value in method.stats().items()}
        return metrics

    def _publish(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float], shown: Sequence[str]
    ) -> None:
        """Gives figures, unless there are none, to every logger, the progress bar (those ``shown``) and the report."""
        if not metrics:
            return
        metrics = metrics | self._sums()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logged_step(trainer))
        bar = {
            name: value for name, value in metrics.items() if name.rpartition("/")[2] in shown and math.isfinite(value)
        }
        pl_module.log_dict(bar, prog_bar=True, logger=False, on_step=True, on_epoch=False)
        self._note_point(trainer, metrics)

    def _note_point(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        step = steps_taken(trainer)
        if self._writer is None or step == self._last or not metrics:
            return
        self._last = step
        loss = None if self._loss is None else float(self._loss) / self._losses
        self._loss, self._losses = None, 0
        self._add("point", step, {"loss": loss, **self._clock.per_step(step), "metrics": metrics})
        self._clock.batch_ends()  # what was told here is not the loader's time

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._clock.saves()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.pause()
        if self._writer is not None:  # nothing is computed for it: the validation has no results yet
            self._before = dict(trainer.callback_metrics)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.go_on()
        if self._writer is None or trainer.sanity_checking:
            return
        # All that the validation has logged, whatever the names: what training logged is there, too, unchanged.
        logged = trainer.callback_metrics.items()
        metrics = {name: float(value) for name, value in logged if self._before.get(name) is not value}
        self._before = {}
        if metrics:
            self._add("validation", steps_taken(trainer), {"metrics": metrics})

    def _sums(self) -> dict[str, float]:
        """Figures that add up over the fit; told with every point."""
        return {} if self._sum is None else self._sum.metrics()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._sum is not None and (line := self._sum.said()):
            rank_zero_info(line)
        if self._writer is not None:
            last = self._newest(self._watched(trainer))
            self._note_point(trainer, last and last | self._sums())
            self._end(trainer, "finished")
        self._sum = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.report is None or not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
            return
        # If ranks are forked, the process that started them gets here, and it has written nothing itself.
        try:
            runs = History.read(self.report).runs
            if runs and runs[-1].end is None and runs[-1].about.get("time", 0.0) >= self._made:
                self._writer = self._writer or Writer(self.report)
                self._end(trainer, _in_a_line(exception))
        except Exception as error:  # the other error must be seen
            mention(f"The report must be written to {str(self.report)!r}, got {type(error).__name__}: {error}.")

    def _end(self, trainer: Trainer, how: str) -> None:
        """Writes the page. If that fails it is a warning: this rank alone would raise, and the others wait for it."""
        assert self.report is not None
        self._add("end", steps_taken(trainer), {"how": how, "metrics": self._sums()})
        self._writer = None
        try:
            write_page(self.report)
        except Exception as error:
            rank_zero_warn(
                f"The report's page must be written to {str(self.report)!r}, got {type(error).__name__}: {error}. Its"
                f" figures are there: run `lightning-scape report {self.report}` when that is mended."
            )

    def _add(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.add(kind, step, values)
        except Exception as error:  # this rank's alone: the others would wait for it
            self._writer = None
            rank_zero_warn(
                f"The report's figures must be written to {str(self.report)!r}, got: {error}. The training goes on; the"
                " report ends here."
            )


def _in_a_line(exception: BaseException) -> str:
    """Its name and the first line of its text; for an error on a forked rank, whose text is a traceback, the last."""
    lines = [line for line in str(exception).splitlines() if line.strip()]
    if isinstance(exception, ProcessRaisedException) and lines:
        return lines[-1][:500]
    return ": ".join([type(exception).__name__, *lines[:1]])[:500]


def steps_taken(trainer: Trainer) -> int:
    """Steps of the first optimizer since the training began, those before the checkpoint included.

    Lightning's own counts are no such axis: ``global_step`` adds up all optimizers, and what the loggers get is one too
    low after a checkpoint that was saved inside an epoch.
    """
    return next((method.progress().steps for method in find_all(trainer.optimizers)), 0)


class _Clock:
    """Mean seconds of a step from one point to the next, without validation; and of what lies between batches."""

    def __init__(self) -> None:
        self._began = self._paused_at = 0.0
        self._ended: float | None = None
        """When the last batch ended."""
        self._saving = False
        self._step = 0
        self._between = {"data_seconds": 0.0, "checkpoint_seconds": 0.0}

    def start(self, step: int) -> None:
        self._began, self._step = time.perf_counter(), step
        self._between = dict.fromkeys(self._between, 0.0)

    def batch_ends(self) -> None:
        self._ended, self._saving = time.perf_counter(), False

    def saves(self) -> None:
        """A checkpoint is made: the time until the next batch counts as its own."""
        self._saving = True

    def batch_begins(self) -> None:
        if self._ended is not None:
            kind = "checkpoint_seconds" if self._saving else "data_seconds"
            self._between[kind] += time.perf_counter() - self._ended

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def go_on(self) -> None:
        paused = time.perf_counter() - self._paused_at
        self._began += paused
        self._ended = None if self._ended is None else self._ended + paused

    def per_step(self, step: int) -> dict[str, float | None]:
        """Seconds per step by kind; None if no step was taken since."""
        steps = step - self._step
        seconds = {"step_seconds": time.perf_counter() - self._began, **self._between}
        self.start(step)
        return {name: value / steps if steps > 0 else None for name, value in seconds.items()}
