"""ScapeMonitor: what a method's exchanges cost and bring, in every logger and in the progress bar."""

from __future__ import annotations

import math
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_scape.comm.collectives import all_reduce_bytes
from lightning_scape.core.local_shards import local
from lightning_scape.core.method import Method, find_all
from lightning_scape.core.words import show_bytes, show_times
from lightning_scape.hosts.private_names import logged_step


class ScapeMonitor(Callback):
    """Logs a method's figures every ``every_n_steps`` optimizer steps; other steps cost nothing.

    They are those of the last step (:class:`~lightning_scape.StepStats`) or exchange
    (:class:`~lightning_scape.ExchangeStats`), and what the fit has come to: ``bytes_run``, which rank 0 has sent,
    ``bytes_run_dense``, which DDP would have sent in as many steps, and ``seconds_run``. They go to every logger under
    the method's name, ``scape/...`` (``scape-0/...``, ``scape-1/...`` with several optimizers), on the step axis of the
    metrics that the module logs. A few also go to the progress bar, and so to ``trainer.callback_metrics``.

    A line at the end of a fit says what it has sent; DDP (with ``local_group_size`` above 1: HSDP, between nodes)
    stands beside it. Bytes are those of messages, without protocol headers, which take some 2% more.
    ``lightning-scape report`` draws what a CSV logger has kept, ``lightning-scape plan`` says what a run will send.

    Args:
        every_n_steps: optimizer steps from one report to the next, >= 1.

    Raises:
        ValueError: it is not a whole number >= 1.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` must be a whole number >= 1, got {every_n_steps!r}. Drop the callback to log nothing."
            )
        self.every_n_steps = every_n_steps
        self._due, self._began = 0, 0.0
        self._before: list[tuple[int, int]] = []
        """Of each optimizer, when the fit began: steps that it had taken, and bytes that this rank had sent for it."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        methods = find_all(trainer.optimizers)
        if not methods:
            raise MisconfigurationException(
                "`ScapeMonitor` reports on the exchanges of an optimizer, and there are none: the strategy is"
                f" {type(trainer.strategy).__name__}. Use `Trainer(strategy=ScapeStrategy(...))`, or drop the callback."
            )
        self._due, self._began = trainer.global_step // self.every_n_steps, time.perf_counter()
        self._before = [(each.steps_taken, each.communicator.traffic.total) for each in methods]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not `global_step % every_n_steps`: a batch may step several optimizers, or none.
        before, self._due = self._due, trainer.global_step // self.every_n_steps
        if self._due == before:
            return
        metrics: dict[str, float] = {}
        shown: dict[str, float] = {}
        methods = find_all(trainer.optimizers)
        for place, method in enumerate(methods):
            prefix = method.name if len(methods) == 1 else f"{method.name}-{place}"
            stats = {} if method.stats is None else method.stats.as_dict("")
            steps, sent, dense = self._run(place, method)
            stats |= {"bytes_run": float(sent), "bytes_run_dense": float(dense)}
            stats["seconds_run"] = time.perf_counter() - self._began
            metrics |= {f"{prefix}/{name}": value for name, value in stats.items()}
            shown |= {
                f"{prefix}/{name}": stats[name] for name in method.shown if math.isfinite(stats.get(name, math.nan))
            }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logged_step(trainer))
        pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        methods = find_all(trainer.optimizers)
        runs = [self._run(place, method) for place, method in enumerate(methods)]
        sent, dense = sum(run[1] for run in runs), sum(run[2] for run in runs)
        if sent and dense:
            nodes = getattr(trainer.strategy, "device_mesh", None) is not None
            beside, where = ("HSDP", " to other nodes") if nodes else ("DDP", "")
            rank_zero_info(
                f"{methods[0].title}: rank 0 has sent {show_bytes(sent)}{where} in {runs[0][0]:,} steps, checkpoints"
                f" left out; {beside} {show_bytes(dense)}, {show_times(dense / sent)} times as much."
            )

    def _run(self, place: int, method: Method) -> tuple[int, int, int]:
        """Steps of an optimizer in this fit, bytes that this rank has sent, and those that DDP would have sent."""
        steps, sent = self._before[place]
        steps, ranks = method.steps_taken - steps, method.communicator
        trained = [local(p) for group in method.optimizer.param_groups for p in group["params"] if p.requires_grad]
        return steps, ranks.traffic.total - sent, steps * all_reduce_bytes(trained, ranks.world_size)
