"""ScapeMonitor: what a method's exchanges cost and bring, in the logger, the progress bar and a report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_scape.core.method import Method, find_all
from lightning_scape.hosts.advice import with_prefixes
from lightning_scape.hosts.run_length import steps_to_tell
from lightning_scape.hosts.run_report import ReportingCallback
from lightning_scape.hosts.run_sum import RunSum
from lightning_scape.hosts.shared_nans import may_look


class ScapeMonitor(ReportingCallback):
    """Logs a method's figures: of a step every ``every_n_steps`` optimizer steps, or of every exchange.

    Under SCAPE, whose every step is an exchange, they are those of :class:`~lightning_scape.StepStats`. Under
    SparseLoCo, and any other method whose ranks exchange less often, they are told whenever an exchange has ended
    (:class:`~lightning_scape.ExchangeStats`). Other steps cost nothing.

    All of them go to every logger of the Trainer under the method's name, ``scape/...`` (``scape-0/...``,
    ``scape-1/...`` with several optimizers); the compression ratio and a norm also go to the progress bar, and so to
    ``trainer.callback_metrics``. The progress bar shows SCAPE's density of the moment, too, as long as the warm-up
    lasts: the strategy sees to that, with or without this callback. The loggers' numbers are rank 0's; their step axis
    is that of the metrics which the module logs.

    With them comes what the run has sent so far: ``bytes_run``, ``bytes_run_dense`` (what DDP would have sent in as
    many steps) and ``bytes_checkpoints`` (what a rank has sent for checkpoints), in this fit. With ``local_group_size``
    the first two are between nodes, and HSDP's. A line says it all when the fit ends. Bytes are those of messages,
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
        ValueError: ``every_n_steps`` is not a whole number >= 1, or rank 0 cannot write to ``report`` (at the start of
            the fit, on every rank).
        ModuleNotFoundError: matplotlib is missing.
    """

    method: ClassVar[str | None] = None
    """Name of the one whose figures are logged; None: of whichever the optimizers are under."""
    _needs = "`Trainer(strategy=ScapeStrategy(...))`"

    def __init__(self, every_n_steps: int = 50, report: str | os.PathLike[str] | None = None) -> None:
        super().__init__(report)
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` must be a whole number >= 1, got {every_n_steps!r}. Drop the callback to log nothing."
            )
        self.every_n_steps = every_n_steps
        self._due = 0
        self._seen: list[int] = []
        """Exchanges of each optimizer that have been told."""
        self._sum: RunSum | None = None

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
        steps = steps_to_tell(trainer, methods[0].progress().steps)
        self._sum = RunSum(methods, steps, trainer, may_look(pl_module))
        self.begin_report(trainer, type(methods[0]), self._sum.about())

    def _watched(self, trainer: Trainer) -> list[Method]:
        return [each for each in find_all(trainer.optimizers) if self.method in (None, each.name)]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note_batch(trainer, pl_module, outputs)
        methods = self._watched(trainer)
        if not methods:
            return
        if not methods[0].exchanges_every_step:
            self.publish(trainer, pl_module, self._news(methods), methods[0].shown)
            return
        # Not `global_step % every_n_steps`: that is true for several batches when gradients are accumulated, and may
        # never be true when a batch steps several optimizers.
        due = trainer.global_step // self.every_n_steps
        if due != self._due:
            self._due = due
            self.publish(trainer, pl_module, collect_metrics(trainer.optimizers), methods[0].shown)

    @override
    def sums(self) -> dict[str, float]:
        return {} if self._sum is None else self._sum.metrics()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._sum is not None and (line := self._sum.said()):
            rank_zero_info(line)
        super().on_fit_end(trainer, pl_module)
        self._sum = None

    def _news(self, methods: list[Method]) -> dict[str, float]:
        """Figures of the exchanges that have ended since the last look; empty if none has."""
        self._seen += [0] * (len(methods) - len(self._seen))
        metrics: dict[str, float] = {}
        for index, (prefix, method) in enumerate(with_prefixes(methods)):
            progress = method.progress()
            if progress.begun > progress.ended or progress.ended == self._seen[index]:
                continue
            self._seen[index] = progress.ended
            metrics |= {f"{prefix}/{name}": value for name, value in method.stats().items()}
        return metrics

    @override
    def last_metrics(self, trainer: Trainer) -> dict[str, float]:
        methods = self._watched(trainer)
        if methods and not methods[0].exchanges_every_step:
            return self._news(methods)
        return collect_metrics(trainer.optimizers)


def collect_metrics(optimizers: Iterable[object]) -> dict[str, float]:
    """The last figures of every optimizer that is under a method, flat; empty before the first."""
    methods = with_prefixes(find_all(optimizers))
    return {f"{prefix}/{name}": value for prefix, method in methods for name, value in method.stats().items()}
