"""What bench_end_to_end.py runs on each host: the Trainer's runs, and what they report; no script of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import predicted_steps
import torch
import torch.distributed as dist
from dense_strategies import BY_NAME, PowerSGD
from lightning.pytorch.callbacks import ModelCheckpoint
from pretrain_python import SIZES, Pretraining, build_gpt, make_parser
from python_source import PythonSource
from turns import Turns
from two_hosts import bits_per_second, sent_bytes

from lightning_scape import ScapeStrategy, SparseLoCoStrategy
from lightning_scape.core.method import find_all


def work(args: argparse.Namespace) -> None:
    """What torchrun starts on each host: the runs of ``args.methods``; rank 0 leaves the figures in ``args.worker``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    found = {method: measure(args) if method == "plan" else run(method, args) for method in args.methods}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        args.worker.write_text(json.dumps({method: [each[method] for each in everyone] for method in found}))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # the result is on disk; see two_hosts_ranks.py for what may go wrong behind it


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What ``lightning-scape plan --measure`` would find here."""
    model = build_gpt("plan", args.context, SIZES[args.size])
    return predicted_steps.measure(model, args.batch, args.context, bits_per_second(args.links[0]))


class Clock(pl.Callback):
    """Loss, seconds and bytes at every validation; seconds that validations and checkpoints take.

    Args:
        turns: when the run's parts begin.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.points: list[dict[str, float]] = []
        self.validating = self.saving = 0.0
        self._start = self._counters()
        self._since: float | None = None

    @staticmethod
    def _counters() -> dict[str, float]:
        sent, headers = sent_bytes()
        return {"seconds": time.perf_counter(), "sent": sent, "headers": headers}

    def now(self) -> dict[str, float]:
        return {name: value - self._start[name] for name, value in self._counters().items()}

    def on_train_start(self, *_: Any) -> None:
        self.turns.begin()
        self._start = self._counters()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._since is None:
            return
        # The checkpoint's callback comes last of all at the end of a validation.
        self.saving += time.perf_counter() - self._since
        self._since = None
        self.end_part(trainer)
        before = self.now()
        self.turns.begin()
        for name, value in self.now().items():
            self._start[name] += value - before[name]

    def end_part(self, trainer: pl.Trainer) -> None:
        """What goes on beside training must not fall into another's turn."""
        getattr(trainer.strategy, "wait_for_checkpoint", lambda: None)()
        self.turns.end()

    def on_validation_start(self, *_: Any) -> None:
        self._validation = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        point = {"step": trainer.global_step, "loss": trainer.callback_metrics["val_loss"].item(), **self.now()}
        self.points.append(point)
        self._since = time.perf_counter()
        self.validating += self._since - self._validation


def run(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run of Lightning's Trainer."""
    options = [f"--steps={args.steps}", f"--size={args.size}", f"--context={args.context}", f"--seed={args.seed}"]
    pl.seed_everything(args.seed)
    given = make_parser().parse_args(options)
    source = PythonSource(args.batch, args.context, seed=args.seed)
    module = Pretraining(build_gpt(f"python-{args.size}", args.context, SIZES[args.size]), given)
    rank, ranks, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(args.worker)
    clock = Clock(Turns(folder.parent, method, args.turns, rank, ranks, args.timeout))
    saved = ModelCheckpoint(
        folder.with_suffix("") / method, "last", save_on_train_epoch_end=False, enable_version_counter=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=ranks,
        strategy=strategy_of(method),
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=args.steps // args.validations,
        check_val_every_n_epoch=None,
        limit_val_batches=args.val_batches,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[clock, saved],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    source.trainer = trainer
    trainer.fit(module, source)
    end = clock.now()
    clock.turns.leave()
    clock.end_part(trainer)
    # What the package counted; it says so by ScapeMonitor, which asks for more in each step than a run needs.
    counted = sum(each.communicator.traffic.total for each in find_all(trainer.optimizers))
    checkpoints = getattr(trainer.strategy, "checkpoint_bytes", None)
    return {
        "points": clock.points,
        **end,
        "validating": clock.validating,
        "saving": clock.saving,
        "counted": counted + (checkpoints.sent if checkpoints else 0),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }


def strategy_of(method: str) -> Any:
    """By its name in bench_end_to_end.py."""
    kind, _, option = method.partition("-")
    saved: dict[str, Any] = {"state_dict_type": "auto", "async_save": True}
    if kind == "scape":
        sparsity, _, wire = option.partition("-")
        return ScapeStrategy(sparsity=float(sparsity), **saved, **({"wire_dtype": wire} if wire else {}))
    if kind == "sparseloco":
        return SparseLoCoStrategy(sync_every=int(option), **saved)
    if kind == "powersgd":
        return PowerSGD(rank=int(option))
    return BY_NAME[method]()
