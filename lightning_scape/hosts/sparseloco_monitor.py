"""SparseLoCoMonitor: bytes, norms and waiting time of an exchange, in the logger, the progress bar and a report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_scape.hosts import sparseloco
from lightning_scape.hosts.run_report import ReportingCallback

PROGRESS_BAR_METRICS = ("compression", "delta_norm")
"""What the progress bar shows, where it is finite; the logger gets everything."""


class Exchanges:
    """The exchanges of all optimizers that SparseLoCo wraps: which of them have ended since the last look.

    Args:
        optimizers: those of the Trainer.
    """

    def __init__(self, optimizers: Iterable[object]) -> None:
        self._wrappers = sparseloco.wrappers(optimizers)
        self._seen = [loco.progress.exchanges for loco in self._wrappers]

    def __getstate__(self) -> dict[str, Any]:
        """For who copies or pickles a monitor: the optimizers stay with this one."""
        return {"_wrappers": [], "_seen": []}

    def news(self) -> dict[str, float]:
        """Statistics of those that have ended since, flat; empty if none has."""
        metrics: dict[str, float] = {}
        for index, loco in enumerate(self._wrappers):
            if loco.progress.under_way or loco.progress.exchanges == self._seen[index]:
                continue
            self._seen[index] = loco.progress.exchanges
            stats = loco.stats
            assert stats is not None
            metrics |= stats.as_dict("sparseloco" if len(self._wrappers) == 1 else f"sparseloco-{index}")
        return metrics


class SparseLoCoMonitor(ReportingCallback):
    """Logs the statistics of every exchange (:class:`~lightning_scape.ExchangeStats`).

    All of them go to every logger of the Trainer under ``sparseloco/...`` (``sparseloco-0/...``, ``sparseloco-1/...``
    with several optimizers); the compression ratio and the norm of the pseudo-gradient also go to the progress bar, and
    so to ``trainer.callback_metrics``. Steps between exchanges cost nothing. The loggers' numbers are rank 0's.

    With ``report="folder"`` the run leaves a page with plots there: see :class:`~lightning_scape.ScapeMonitor`.

    Args:
        report: folder of the page; None for none. Needs matplotlib (extra ``plots``).

    Raises:
        ValueError: rank 0 cannot write to ``report`` (at the start of the fit, on every rank).
        ModuleNotFoundError: matplotlib is missing.
    """

    def __init__(self, report: str | os.PathLike[str] | None = None) -> None:
        super().__init__(report)
        self._exchanges = Exchanges([])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not sparseloco.wrappers(trainer.optimizers):
            raise MisconfigurationException(
                "`SparseLoCoMonitor` reports on exchanges of SparseLoCo and there are none: the strategy is"
                f" {type(trainer.strategy).__name__}. Use `Trainer(strategy=SparseLoCoStrategy(...))`, or drop the"
                " callback."
            )
        self._exchanges = Exchanges(trainer.optimizers)
        self.begin_report(trainer, "sparseloco")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note_batch(trainer, pl_module, outputs)
        self.publish(trainer, pl_module, self._exchanges.news(), PROGRESS_BAR_METRICS)

    @override
    def last_metrics(self, trainer: Trainer) -> dict[str, float]:
        return self._exchanges.news()
