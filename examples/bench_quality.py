"""Does SCAPE train as well as AdamW and dense AdamS? Ranks are simulated in one process by the package's own optimizer.

    python examples/bench_quality.py --short               # about a minute: every method and ablation, a few steps each
    python examples/bench_quality.py --suite drop_in       # AdamW's settings, unchanged: some 10 hours of one core
    python examples/bench_quality.py --jobs 2              # all suites, two runs at a time: many hours
    python examples/bench_quality.py --device cuda --suite drop_in_10M  # on a GPU: minutes a run
    python examples/bench_quality.py --report              # tables and plots of what is there

Runs in bf16-mixed (the suites of 10M and 30M parameters) compile the model, for which torch wants a C++ compiler.

A run that was stopped goes on from its last snapshot, bit for bit; a finished one is not run again. Each leaves
<out>/runs/<name>.json; the report writes <out>/quality.md, quality.json and the plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import torch
from evaluate_litgpt import save_checkpoint
from lightning.fabric.utilities import move_data_to_device
from quality_report import report
from quality_runs import SHORT, SUITES, Run
from quality_tasks import task_of
from simulated_ranks import DenseRanks, Ranks, SimulatedRanks
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, ops
from lightning_scape.scape.mask import Masks
from lightning_scape.scape.state import NextMask, Step

OUT = Path(__file__).parent / "results" / "quality"
MAX_NORM = 1.0
WEIGHT_DECAY = 0.1


# ------------------------------------------------------------------------------------------------ training


def build_ranks(run: Run, model: nn.Module) -> Ranks:
    settings = {"lr": run.lr, "betas": run.betas, "weight_decay": WEIGHT_DECAY}
    if run.method in peers.METHODS:
        return peers.METHODS[run.method](model, run.ranks, settings, **dict(run.options))
    if run.method == "scape":
        options = dict(run.options)
        ablations = {key: options.pop(key) for key in list(options) if key in ABLATIONS}
        ranks = SimulatedRanks(model, run.ranks, ScapeConfig(**options), {**settings, "total_steps": run.steps})
        for key, value in ablations.items():
            ABLATIONS[key](ranks, value)
        return ranks
    make = {"adamw": torch.optim.AdamW, "adams": AdamS}[run.method]
    return DenseRanks(model, run.ranks, make(model.parameters(), **settings))


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
        self.computed = torch.compile(self.model, dynamic=False) if self.mixed else self.model
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
                self.history.append(
                    {
                        "step": self.step,
                        "tokens": self.step * run.tokens,
                        "bytes": self.bytes_sent,
                        **self.evaluate(),
                    }
                )
                left = self.seconds / self.step * (run.steps - self.step)
                loss = self.history[-1]["loss"]
                print(f"{run.name} {self.step}/{run.steps} loss {loss:.4f}, {left:.0f} s left", flush=True)
            if time.perf_counter() - saved > seconds_between and self.step < run.steps:
                self.save(snapshot)
                saved = time.perf_counter()
        snapshot.unlink(missing_ok=True)
        return self.result()

    def result(self) -> dict[str, Any]:
        return {
            "name": self.run.name,
            "run": dataclasses.asdict(self.run),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "fingerprint": self.task.fingerprint,
            "seconds": self.seconds,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "CPU",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            **self.history[-1],
            "history": self.history,
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


# ---------------------------------------------------------------------------------------------- ablations
# What no user should choose, and the benchmark must show.


def mask_delay(ranks: SimulatedRanks, steps: int) -> None:
    """Uses a mask ``steps`` steps after the gradient it was made from: 0, 1 (SCAPE) or 2."""
    for optimizer in ranks.optimizers:
        engine, kind = optimizer.engine, {0: NoDelay, 1: Masks, 2: LongDelay}[steps]
        engine.masks = kind(engine.config, engine.layout, engine.comm, engine.masks.schedule)


class NoDelay(Masks):
    """Every step makes its own mask."""

    def missing(self, step: Step) -> bool:
        return super().missing(step) or not self.sends_all(step.number)

    def next_after(self, step: Step) -> NextMask | None:
        return None


class LongDelay(Masks):
    """A mask of two steps ago."""

    held: Tensor | None = None

    def wait(self) -> float:
        before = self.active
        waited = super().wait()
        if self.active is not before and before is not None:
            self.held, self.active = self.active, self.held if self.held is not None else before
        return waited


def plain_update(ranks: SimulatedRanks, on: bool) -> None:
    """AdamS with the arriving sum taken for one step's gradient: every entry was updated in the step before."""

    def reset(optimizer: ScapeOptimizer) -> None:
        state = optimizer.engine.state
        if state is not None:
            state.last_step.copy_(state.step)

    if on:
        ranks.before_step.append(reset)


def dense_vectors(ranks: SimulatedRanks, on: bool) -> None:
    """Sends everything of the tensors of fewer than two dimensions, with a second optimizer of no sparsity."""
    if on:
        ranks.split(lambda parameter: parameter.dim() < 2, ScapeConfig(sparsity=0.0, update=ranks.config.update))


def second_moment_ema(ranks: SimulatedRanks, weight: float) -> None:
    """Divides by an average over an entry's updates of ``A**2 / tau``, ``weight`` for the newest, kept by the owner."""
    for optimizer in ranks.optimizers:
        optimizer.engine.shard = EmaShard(optimizer.engine.shard, weight)


def exact(ranks: SimulatedRanks, what: str | int) -> None:
    """With 4 or 8 bits: sends the ``"values"`` in fp32, or the ``"changes"``, or both in so many first steps."""

    def choose(optimizer: ScapeOptimizer) -> None:
        engine = optimizer.engine
        first, bits = isinstance(what, int) and engine.calls < what, engine.config.wire_bits
        engine.outgoing.wire.bits = None if first or what == "values" else bits
        engine.shard.wire.bits = None if first or what == "changes" else bits

    ranks.before_step.append(choose)


def vote_bits(ranks: SimulatedRanks, bits: int) -> None:
    """Rounds the proposals' 8-bit values to so many bits, sign included; the bytes are counted as if they had 8."""
    levels = (1 << (bits - 1)) - 1

    def coarse(plain: Callable[..., Any], votes: int) -> Callable[..., Any]:
        def exchange_proposals(proposals: Tensor) -> Any:
            codes = proposals[:, -votes - 1 : -1].view(torch.int8)
            codes.copy_((codes.float() * (levels / 127)).round().mul(127 / levels).round())
            return plain(proposals)

        return exchange_proposals

    for optimizer in ranks.optimizers:
        comm = optimizer.communicator
        comm.exchange_proposals = coarse(comm.exchange_proposals, optimizer.config.proposed)  # type: ignore[method-assign]


class EmaShard:
    """In place of the engine's own shard: has the average taken for the measured mean square."""

    def __init__(self, plain: Any, weight: float) -> None:
        self.plain, self.weight = plain, weight
        self.mean: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def update(self, step: Step, total: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        state, mask = step.state, step.mask.mine
        if self.mean is None:
            self.mean = torch.zeros_like(state.exp_avg)
        tau = state.step + 1 - ops.gather_blocks(state.last_step, mask)
        sample = total.square() / tau
        old = ops.gather_blocks(self.mean, mask)
        ops.scatter_blocks(self.mean, mask, torch.where(old == 0, sample, old + self.weight * (sample - old)))
        measured, state.local_exp_avg_sq = state.local_exp_avg_sq, self.mean
        updated: tuple[Tensor, Tensor] = self.plain.update(step, total, own)
        state.local_exp_avg_sq = measured
        return updated


ABLATIONS: dict[str, Callable[[SimulatedRanks, Any], None]] = {
    "mask_delay": mask_delay,
    "plain_update": plain_update,
    "dense_vectors": dense_vectors,
    "second_moment_ema": second_moment_ema,
    "exact": exact,
    "vote_bits": vote_bits,
}
"""Options of a run that ScapeConfig does not have."""


# --------------------------------------------------------------------------------------------------- main


def execute(run: Run, out: Path, keep: bool = False, device: str = "cpu") -> None:
    """Trains, or goes on from a snapshot; keeps the language model that has come out, too."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = out / "snapshots" / f"{run.name}.pt"
    snapshot.parent.mkdir(exist_ok=True)
    training = Training(run, device)
    if snapshot.exists():
        training.load(snapshot)
        print(f"{run.name}: goes on from step {training.step}")
    result = training.go(snapshot, every=max(1, run.steps // 20), seconds_between=120)
    if keep and run.task == "python":
        save_checkpoint(training.model, out / "models" / run.name)
    path = folder / f"{run.name}.json"
    path.with_suffix(".new").write_text(json.dumps(result, indent=1) + "\n")
    os.replace(path.with_suffix(".new"), path)


def execute_all(runs: list[Run], out: Path, jobs: int, keep: bool, device: str) -> None:
    """In processes of their own, ``jobs`` at a time, in order; 0 jobs: all in this one.

    They are forked: each starts with everything imported, and all run the code of the moment when the first began.
    """
    runs = [run for run in runs if not (out / "runs" / f"{run.name}.json").exists()]
    if not jobs:
        for run in runs:
            execute(run, out, keep, device)
        return
    waiting, running = list(runs), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop(0)
            arguments = (run, out, keep, device)
            process = multiprocessing.get_context("fork").Process(target=execute, args=arguments, daemon=True)
            process.start()
            running[process] = run
            print(f"started {run.name}; {len(waiting)} of {len(runs)} to go", flush=True)
        time.sleep(0.1)
        for process in [process for process in running if not process.is_alive()]:
            run = running.pop(process)
            if process.exitcode:
                raise SystemExit(f"error: {run.name} ended with code {process.exitcode}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", choices=sorted(SUITES), help="suites of the long form (default: all)")
    parser.add_argument("--short", action="store_true", help="every method and ablation, a few steps each")
    parser.add_argument("--report", action="store_true", help="only write tables and plots of what is there")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes, one run and one core each; 0: all in this one (default: 1)"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where models are trained (default: cpu)"
    )
    parser.add_argument("--keep-models", action="store_true", help="also leave <out>/models/<name>, for LitGPT")
    parser.add_argument("--list", action="store_true", help="only name the runs")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for results (default: {OUT.name})")
    args = parser.parse_args()
    torch.set_num_threads(1)
    suites = {"short": SHORT} if args.short else {name: SUITES[name] for name in args.suite or SUITES}
    runs = list(dict.fromkeys(run for suite in suites.values() for run in suite))
    if args.list:
        print("\n".join(run.name for run in runs))
        return
    if not args.report:
        execute_all(runs, args.out, 0 if args.short else args.jobs, args.keep_models, args.device)
    print(report(args.out))


if __name__ == "__main__":
    main()
