"""Does SCAPE train as well as AdamW? Ranks are simulated in one process by the package's own optimizers.

    python examples/benchmarks/quality.py --short              # every method, a few steps each: under a minute
    python examples/benchmarks/quality.py --suite 10000_steps  # AdamW's settings, unchanged: hours of one core
    python examples/benchmarks/quality.py --suite largest --device cuda
    python examples/benchmarks/quality.py --report             # tables and plots of the rows that are there

Each run adds its row to <out>/quality.json; the report writes a table a suite, <out>/quality-<suite>.md, and the plots.
A run that was stopped goes on from its last snapshot, in <out>/snapshots, bit for bit. One that has a row is not run
again; with --again it is, if another commit made the row. Runs in bf16-mixed (10M and 30M parameters) and of the
one-page version compile the model, for which torch wants a C++ compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record
import torch
from lightning.fabric.utilities import move_data_to_device
from quality_report import report
from quality_runs import SHORT, SUITES, Run
from quality_tasks import task_of
from simulated_ranks import DenseRanks, OnePage, Ranks, SimulatedRanks, SparseLoCoRanks
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))
from muon_adamw import MuonAdamW  # noqa: E402 - an example

MAX_NORM = 1.0
WEIGHT_DECAY = 0.1


def build_ranks(run: Run, model: nn.Module) -> Ranks:
    """The run's method, over its number of ranks."""
    settings = {"lr": run.lr, "betas": run.betas, "weight_decay": WEIGHT_DECAY}
    if run.method == "scape":
        config = ScapeConfig(**dict(run.options))
        return SimulatedRanks(model, run.ranks, config, settings)
    if run.method == "one-page":
        return OnePage(model, run.ranks, settings, **dict(run.options))
    make = {"adamw": torch.optim.AdamW, "adams": AdamS, "muon": MuonAdamW}
    if run.method == "sparseloco":
        options = dict(run.options)
        inner = functools.partial(make[options.pop("inner", "adamw")], **settings)
        return SparseLoCoRanks(model, run.ranks, inner, **options)
    return DenseRanks(model, run.ranks, make[run.method](model.named_parameters(), **settings))


@dataclass
class Training:
    """A run under way; all of it goes into a snapshot and comes back bit for bit."""

    run: Run
    device: str = "cpu"
    step: int = 0
    seconds: float = 0.0
    bytes_sent: float = 0
    """By one rank, so far."""
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.run
        self.task = task_of(run)
        self.model = self.task.build_model().to(self.device)
        compiled = self.mixed or run.method == "one-page"
        self.computed = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.ranks = build_ranks(run, self.model)
        self.loaders = self.task.loaders()
        self._batches = self._read()

    def _read(self) -> Iterator[tuple[Any, ...]]:
        """Each rank's next batch; begins when the first is asked for, after a snapshot has set the loaders."""
        while True:
            for batches in zip(*self.loaders, strict=True):
                yield tuple(move_data_to_device(batch, self.device) for batch in batches)

    def advance(self) -> None:
        """One step of all ranks."""
        self.ranks.backward(next(self._batches), self.loss, self.task.joined)
        self.ranks.step(self.run.at(self.step), MAX_NORM)
        if self.step + 1 == self.run.steps:
            self.ranks.end()
        self.bytes_sent += self.ranks.bytes_sent()
        self.step += 1

    @property
    def mixed(self) -> bool:
        return self.run.precision == "bf16-mixed"

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.mixed)

    def loss(self, batch: Any) -> Tensor:
        """Of one rank."""
        with self.precision():
            return self.task.loss(self.computed, batch)

    def evaluate(self) -> dict[str, float]:
        """On held-out data."""
        with self.precision():
            return self.task.evaluate(self.computed)

    def go(self, snapshot: Path, every: int, seconds_between: float) -> dict[str, Any]:
        """Trains to the end; takes a snapshot now and then."""
        run, began, saved = self.run, time.perf_counter() - self.seconds, time.perf_counter()
        while self.step < run.steps:
            self.advance()
            if self.step % every == 0 or self.step == run.steps:
                self.seconds = time.perf_counter() - began
                self.history.append({"step": self.step, "bytes": self.bytes_sent, **self.evaluate()})
                left = self.seconds / self.step * (run.steps - self.step)
                loss = self.history[-1]["loss"]
                print(f"{run.name} {self.step}/{run.steps} loss {loss:.4f}, {left:.0f} s left", flush=True)
            if time.perf_counter() - saved > seconds_between and self.step < run.steps:
                self.save(snapshot)
                saved = time.perf_counter()
        snapshot.unlink(missing_ok=True)
        return self.result()

    def result(self) -> dict[str, Any]:
        """The row, but for its origin."""
        settings = dataclasses.asdict(self.run)
        last = self.history[-1]
        return {
            "name": self.run.name,
            "seed": settings.pop("seed"),
            "settings": settings,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "data": self.task.fingerprint,
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "bytes": self.bytes_sent,
            "loss": last["loss"],
            "accuracy": last["accuracy"],
            "curve": [[at["step"], at["bytes"], round(at["loss"], 5)] for at in self.history]
            if self.run.drawn
            else None,
        }

    def save(self, path: Path) -> None:
        state = {
            "device": self.device,
            "step": self.step,
            "seconds": self.seconds,
            "bytes_sent": self.bytes_sent,
            "history": self.history,
            "model": self.model.state_dict(),
            "ranks": self.ranks.state_dict(),
            "loaders": [loader.state_dict() for loader in self.loaders],
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu")  # where torch's AdamW keeps its numbers of steps
        if state.get("device", "cpu") != self.device:
            raise SystemExit(
                f"error: {path} must be of --device {self.device}, got {state['device']}. Name another --out."
            )
        for key in ("step", "seconds", "bytes_sent", "history"):
            setattr(self, key, state[key])
        self.model.load_state_dict(state["model"])
        self.ranks.load_state_dict(state["ranks"])
        for loader, saved in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(saved)


# --------------------------------------------------------------------------------------------------- main


def execute(run: Run, out: Path, device: str) -> dict[str, Any]:
    """Trains, or goes on from a snapshot."""
    snapshot = out / "snapshots" / f"{run.name}.pt"
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    torch.compiler.reset()  # what another run of this process has compiled
    training = Training(run, device)
    if snapshot.exists():
        training.load(snapshot)
        print(f"{run.name}: goes on from step {training.step}")
    return training.go(snapshot, every=run.steps // 20 or run.steps, seconds_between=120)


def execute_all(runs: list[Run], rows: record.Rows, origin: dict[str, Any], args: argparse.Namespace) -> None:
    """In processes of their own, ``args.jobs`` at a time, in order; 0: all in this one."""
    if not args.jobs:
        for run in runs:
            rows.add([execute(run, args.out, args.device) | origin])
        return
    # Forked: each starts with everything imported.
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(execute, run, args.out, args.device) for run in runs]
        for number, job in enumerate(as_completed(jobs), 1):
            rows.add([job.result() | origin])
            print(f"{number} of {len(runs)} runs have ended", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", choices=sorted(SUITES), help="suites (default: all)")
    parser.add_argument("--short", action="store_true", help="every method, a few steps each")
    parser.add_argument("--report", action="store_true", help="only write tables and plots of what is there")
    parser.add_argument("--again", action="store_true", help="also what has a row of another commit")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one run and one core each; 0: all in this one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where models are trained")
    parser.add_argument("--list", action="store_true", help="only name the runs")
    record.add_options(parser)
    args = parser.parse_args()
    args.out = record.folder(args)
    torch.set_num_threads(1)
    suites = {"short": SHORT} if args.short else {name: SUITES[name] for name in args.suite or SUITES}
    rows = record.Rows(args.out / "quality.json")
    runs = list(dict.fromkeys(run for suite in suites.values() for run in suite))
    if args.list:
        print("\n".join(run.name for run in runs))
        return
    if not args.report:
        origin = record.origin(args.dirty)
        done = {row["name"] for row in rows if not args.again or row["commit"] == origin["commit"]}
        execute_all([run for run in runs if run.name not in done], rows, origin, args)
    report(rows, suites, args.out)


if __name__ == "__main__":
    main()
