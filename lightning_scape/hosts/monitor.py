"""ScapeMonitor: bytes, residual and waiting time of a step, in the logger, the progress bar and a report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_scape.hosts import advice, sparseloco, swap
from lightning_scape.hosts.run_report import ReportingCallback
from lightning_scape.hosts.sparseloco_monitor import PROGRESS_BAR_METRICS as OF_EXCHANGES
from lightning_scape.hosts.sparseloco_monitor import Exchanges

PROGRESS_BAR_METRICS = ("compression", "grad_norm")
"""What the progress bar shows, where it is finite (one rank sends nothing); the logger gets everything."""


class ScapeMonitor(ReportingCallback):
    """Log the statistics of a step (:class:`~lightning_scape.StepStats`) every ``every_n_steps`` optimizer steps.

    All of them go to every logger of the Trainer under ``scape/...`` (``scape-0/...``, ``scape-1/...`` with several
    optimizers); the compression ratio and the gradient norm also go to the progress bar, and so to
    ``trainer.callback_metrics``. The progress bar shows the density of the moment, too, as long as the warm-up lasts:
    the strategy sees to that, with or without this callback. Other steps cost nothing. The loggers' numbers are rank
    0's; their step axis is that of the metrics which the module logs.

    With ``report="folder"`` the run leaves a page with plots there (loss, density, bytes by kind, time by phase, churn,
    skipped steps), ``report.html``: one file, which any browser opens without a network. Rank 0 writes it when the fit
    ends, also by an exception. The figures are added to ``figures.jsonl`` beside it as they come. Nothing in that file
    is ever overwritten: a run that goes on from a checkpoint continues the curves, and one that starts again in the
    folder draws the earlier ones in grey.

    Under ``SparseLoCoStrategy`` it does what :class:`~lightning_scape.SparseLoCoMonitor` does, at every exchange.

    Args:
        every_n_steps: optimizer steps from one report to the next, >= 1.
        report: folder of the page; None for none. Needs matplotlib (extra ``plots``).

    Raises:
        ValueError: ``every_n_steps`` is not a whole number >= 1, or rank 0 cannot write to ``report`` (at the start of
            the fit, on every rank).
        ModuleNotFoundError: matplotlib is missing.
    """

    def __init__(self, every_n_steps: int = 50, report: str | os.PathLike[str] | None = None) -> None:
        super().__init__(report)
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` must be a whole number >= 1, got {every_n_steps!r}. Drop the callback to log nothing."
            )
        self.every_n_steps = every_n_steps
        self._reports_due = 0
        self._exchanges: Exchanges | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        local = bool(sparseloco.wrappers(trainer.optimizers))
        if not local and not swap.scape_optimizers(trainer.optimizers):
            raise MisconfigurationException(
                "`ScapeMonitor` reports on a ScapeOptimizer and there is none: the strategy is"
                f" {type(trainer.strategy).__name__}. Use `Trainer(strategy=ScapeStrategy(...))`, or drop the callback."
            )
        self._exchanges = Exchanges(trainer.optimizers) if local else None
        self._reports_due = trainer.global_step // self.every_n_steps
        self.begin_report(trainer, "sparseloco" if local else "scape")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note_batch(trainer, pl_module, outputs)
        if self._exchanges is not None:
            self.publish(trainer, pl_module, self._exchanges.news(), OF_EXCHANGES)
            return
        # Not `global_step % every_n_steps`: that is true for several batches when gradients are accumulated, and may
        # never be true when a batch steps several optimizers.
        reports_due = trainer.global_step // self.every_n_steps
        if reports_due != self._reports_due:
            self._reports_due = reports_due
            self.publish(trainer, pl_module, collect_metrics(trainer.optimizers), PROGRESS_BAR_METRICS)

    @override
    def last_metrics(self, trainer: Trainer) -> dict[str, float]:
        return collect_metrics(trainer.optimizers) if self._exchanges is None else self._exchanges.news()


def collect_metrics(optimizers: Iterable[object]) -> dict[str, float]:
    """The last step's statistics of every ScapeOptimizer among ``optimizers``, flat; empty before the first step."""
    ours = swap.scape_optimizers(optimizers)
    metrics: dict[str, float] = {}
    for index, optimizer in enumerate(ours):
        stats = optimizer.stats
        if stats is not None:
            metrics |= stats.as_dict(advice.metric_prefix(index, len(ours)))
    return metrics
