"""ScapeMonitor: bytes, residual and waiting time of a step, in the logger and the progress bar."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_scape.integrations import advice, swap

PROGRESS_BAR_METRICS = ("compression", "grad_norm")
"""What the progress bar shows, where it is finite (one rank sends nothing); the logger gets everything."""


class ScapeMonitor(Callback):
    """Log the statistics of a step (:class:`~lightning_scape.StepStats`) every ``every_n_steps`` optimizer steps.

    All of them go to every logger of the Trainer under ``scape/...`` (``scape-0/...``, ``scape-1/...`` with several
    optimizers); the compression ratio and the gradient norm also go to the progress bar, and so to
    ``trainer.callback_metrics``. The progress bar shows the density of the moment, too, as long as the warm-up lasts:
    the strategy sees to that, with or without this callback. Other steps cost nothing. The loggers' numbers are rank
    0's; their step axis is that of the metrics which the module logs.

    Args:
        every_n_steps: optimizer steps from one report to the next, >= 1.

    Raises:
        ValueError: ``every_n_steps`` is not a whole number >= 1.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` must be a whole number >= 1, got {every_n_steps!r}. Drop the callback to log nothing."
            )
        self.every_n_steps = every_n_steps
        self._reports_due = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not swap.scape_optimizers(trainer.optimizers):
            raise MisconfigurationException(
                "`ScapeMonitor` reports on a ScapeOptimizer and there is none: the strategy is"
                f" {type(trainer.strategy).__name__}. Use `Trainer(strategy=ScapeStrategy(...))`, or drop the callback."
            )
        self._reports_due = trainer.global_step // self.every_n_steps

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not `global_step % every_n_steps`: that is true for several batches when gradients are accumulated, and may
        # never be true when a batch steps several optimizers.
        reports_due = trainer.global_step // self.every_n_steps
        if reports_due == self._reports_due:
            return
        self._reports_due = reports_due
        metrics = collect_metrics(trainer.optimizers)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        shown = {
            name: value
            for name, value in metrics.items()
            if name.rpartition("/")[2] in PROGRESS_BAR_METRICS and math.isfinite(value)
        }
        pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False)


def collect_metrics(optimizers: Iterable[object]) -> dict[str, float]:
    """The last step's statistics of every ScapeOptimizer among ``optimizers``, flat; empty before the first step."""
    ours = swap.scape_optimizers(optimizers)
    metrics: dict[str, float] = {}
    for index, optimizer in enumerate(ours):
        stats = optimizer.stats
        if stats is not None:
            metrics |= stats.as_dict(advice.metric_prefix(index, len(ours)))
    return metrics
