"""SparseLoCoMonitor: bytes, norms and waiting time of an exchange, in the logger and the progress bar."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_scape.integrations import sparseloco

PROGRESS_BAR_METRICS = ("compression", "delta_norm")
"""What the progress bar shows, where it is finite; the logger gets everything."""


class SparseLoCoMonitor(Callback):
    """Logs the statistics of every exchange (:class:`~lightning_scape.ExchangeStats`).

    All of them go to every logger of the Trainer under ``sparseloco/...`` (``sparseloco-0/...``, ``sparseloco-1/...``
    with several optimizers); the compression ratio and the norm of the pseudo-gradient also go to the progress bar, and
    so to ``trainer.callback_metrics``. Steps between exchanges cost nothing. The loggers' numbers are rank 0's.
    """

    def __init__(self) -> None:
        self._reported: list[int] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrappers = sparseloco.wrappers(trainer.optimizers)
        if not wrappers:
            raise MisconfigurationException(
                "`SparseLoCoMonitor` reports on exchanges of SparseLoCo and there are none: the strategy is"
                f" {type(trainer.strategy).__name__}. Use `Trainer(strategy=SparseLoCoStrategy(...))`, or drop the"
                " callback."
            )
        self._reported = [loco.progress.exchanges for loco in wrappers]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        wrappers = sparseloco.wrappers(trainer.optimizers)
        for index, loco in enumerate(wrappers):
            if loco.progress.under_way or loco.progress.exchanges == self._reported[index]:
                continue
            self._reported[index] = loco.progress.exchanges
            stats = loco.stats
            assert stats is not None
            metrics = stats.as_dict("sparseloco" if len(wrappers) == 1 else f"sparseloco-{index}")
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
            shown = {
                name: value
                for name, value in metrics.items()
                if name.rpartition("/")[2] in PROGRESS_BAR_METRICS and math.isfinite(value)
            }
            pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False)
