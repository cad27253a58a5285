"""Does SCAPE train as well as dense AdamS and AdamW? Ranks are simulated in one process by the package's own optimizer.

    python examples/bench_quality.py --short               # about a minute: every method and ablation, a few steps each
    python examples/bench_quality.py --suite headline      # one suite of the long form
    python examples/bench_quality.py --jobs 2              # all suites, two runs at a time: many hours
    python examples/bench_quality.py --report              # tables and plots of what is there

A run that was stopped goes on from its last snapshot, bit for bit; a finished one is not run again. Each leaves
<out>/runs/<name>.json; the report writes <out>/quality.md, quality.json and the plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from litgpt import GPT
from pretrain_python import build_gpt
from simulated_ranks import DenseRanks, SimulatedRanks
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_scape import AdamS, PythonSource, ScapeConfig, ScapeOptimizer, ops
from lightning_scape.data import VOCABULARY, Shard
from lightning_scape.mask import DelayedMask, SparsitySchedule, StartMask

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SIZES = {
    "0.03M": {"n_layer": 1, "n_embd": 32, "n_head": 2, "intermediate_size": 96},
    "0.2M": {"n_layer": 2, "n_embd": 72, "n_head": 2, "intermediate_size": 216},
    "1M": {"n_layer": 4, "n_embd": 128, "n_head": 4, "intermediate_size": 384},
    "3M": {"n_layer": 6, "n_embd": 192, "n_head": 6, "intermediate_size": 576},
}
OUT = Path(__file__).parent / "results" / "quality"
MAX_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides the result of a run."""

    method: str
    """adamw, adams or scape."""
    size: str = "0.2M"
    ranks: int = 4
    batch: int = 8
    """Windows per rank and step."""
    context: int = 64
    steps: int = 3000
    lr: float = 2e-3
    seed: int = 0
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly; a cosine to a tenth follows."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of ScapeConfig, and of ABLATIONS."""

    @property
    def name(self) -> str:
        """Also the name of its file."""
        parts = [self.method, self.size, f"N{self.ranks}x{self.batch}x{self.context}", f"{self.steps}"]
        parts += [f"lr{self.lr:g}", f"seed{self.seed}"]
        parts += [f"{key}-{value}" for key, value in self.options]
        return "_".join(parts)

    @property
    def label(self) -> str:
        """What tells methods apart in a table."""
        options = dict(self.options)
        sparsity = f" {options.pop('sparsity', 0.99):.1%}".replace(".0%", "%") if self.method == "scape" else ""
        name = {"adamw": "dense AdamW", "adams": "dense AdamS", "scape": "SCAPE"}[self.method]
        return name + sparsity + "".join(f", {key}={value}" for key, value in options.items())

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.ranks * self.batch * self.context

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))


def scape(sparsity: float = 0.99, **options: Any) -> dict[str, Any]:
    """Arguments of a SCAPE run; what stands in Run's fields goes there, the rest into its options."""
    own = {f.name for f in dataclasses.fields(Run)}
    settings = {key: options.pop(key) for key in list(options) if key in own}
    return {"method": "scape", "options": (("sparsity", sparsity), *sorted(options.items())), **settings}


# ------------------------------------------------------------------------------------------------ training


def build_model(run: Run) -> GPT:
    torch.manual_seed(run.seed)
    return build_gpt(f"python-{run.size}", run.context, SIZES[run.size])


def build_ranks(run: Run, model: GPT) -> SimulatedRanks | DenseRanks:
    settings = {"lr": run.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    if run.method == "scape":
        options = dict(run.options)
        ablations = {key: options.pop(key) for key in list(options) if key in ABLATIONS}
        ranks = SimulatedRanks(model, run.ranks, ScapeConfig(**options), settings)
        for key, value in ablations.items():
            ABLATIONS[key](ranks, value)
        return ranks
    make = {"adamw": torch.optim.AdamW, "adams": AdamS}[run.method]
    return DenseRanks(model, run.ranks, make(model.parameters(), **settings))


def loss_of(model: GPT, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[Tensor]) -> dict[str, float]:
    """On held-out files: loss in nats per byte, bits per byte, and how often the likeliest byte is the right one."""
    loss, accuracy = MeanMetric(), MulticlassAccuracy(VOCABULARY, average="micro")
    for batch in batches:
        logits, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        loss.update(cross_entropy(logits, targets), weight=targets.numel())
        accuracy.update(logits, targets)
    value = float(loss.compute())
    return {"loss": value, "bits_per_byte": value / math.log(2), "accuracy": float(accuracy.compute())}


@dataclass
class Training:
    """A run under way; all of it goes into a snapshot and comes back bit for bit."""

    run: Run
    step: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    """By one rank, so far."""
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.run
        self.model = build_model(run)
        self.ranks = build_ranks(run, self.model)
        sources = [
            PythonSource(run.batch, run.context, seed=run.seed, shard=Shard(rank, run.ranks))
            for rank in range(run.ranks)
        ]
        self.loaders = [source.train_dataloader() for source in sources]
        whole = PythonSource(128, run.context, shard=Shard(0, 1))
        self.validation = [batch for batch, _ in zip(whole.val_dataloader(), range(8), strict=False)]
        self.fingerprint = whole.fingerprint

    def batches(self) -> Iterator[list[Tensor]]:
        while True:
            yield from zip(*self.loaders, strict=True)

    def go(self, snapshot: Path, every: int, seconds_between: float) -> dict[str, Any]:
        """Trains to the end; takes a snapshot now and then."""
        run, began, saved = self.run, time.perf_counter() - self.seconds, time.perf_counter()
        batches = self.batches()
        while self.step < run.steps:
            for rank, batch in enumerate(next(batches)):
                self.ranks.backward(rank, lambda batch=batch: loss_of(self.model, batch))
            self.ranks.step(run.at(self.step), MAX_NORM)
            self.bytes_sent += self.ranks.bytes_sent()
            self.step += 1
            if self.step % every == 0 or self.step == run.steps:
                self.seconds = time.perf_counter() - began
                self.history.append(
                    {
                        "step": self.step,
                        "tokens": self.step * run.tokens,
                        "bytes": self.bytes_sent,
                        **evaluate(self.model, self.validation),
                    }
                )
                left = self.seconds / self.step * (run.steps - self.step)
                print(f"{run.name} {self.step}/{run.steps} loss {self.history[-1]['loss']:.4f}, {left:.0f} s left")
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
            "fingerprint": self.fingerprint,
            "seconds": self.seconds,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            **self.history[-1],
            "history": self.history,
        }

    def save(self, path: Path) -> None:
        state = {
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
        state = torch.load(path)
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
        masks = optimizer._masks
        optimizer._masks = OtherDelay(masks.schedule, masks.interval, steps)


class OtherDelay(DelayedMask):
    """A mask of this very step, or of two steps ago."""

    def __init__(self, schedule: SparsitySchedule, interval: int, delay: int) -> None:
        super().__init__(schedule, interval)
        self.delay = delay
        self._held: list[Tensor] = []

    def due(self, step: int) -> bool:
        sparse = self.schedule.sent(step) < self.schedule.quota.block_size
        return (self.delay == 0 and sparse) or super().due(step)

    def prepare(self, step: int, start: StartMask) -> None:
        if self.delay == 1:
            super().prepare(step, start)
        elif self.delay == 2 and self.active is not None:
            made, _ = start(self.schedule.sent(step + 2)).wait()
            self._held.append(made)
            if len(self._held) == self.delay:
                self.active, self.uses = self._held.pop(0), 0


def plain_update(ranks: SimulatedRanks, on: bool) -> None:
    """AdamS with what arrives taken for one step's gradient: every clock stands at the step before."""

    def reset(optimizer: ScapeOptimizer) -> None:
        state = optimizer._run.state
        if state is not None:
            state.clock.copy_(state.step)

    if on:
        ranks.before_step.append(reset)


def dense_vectors(ranks: SimulatedRanks, on: bool) -> None:
    """Sends everything of the tensors of fewer than two dimensions, with a second optimizer of no sparsity."""
    if on:
        ranks.split(lambda parameter: parameter.dim() < 2, ScapeConfig(sparsity=0.0))


def second_moment_ema(ranks: SimulatedRanks, weight: float) -> None:
    """Divides by an average over an entry's visits of ``A**2 / tau``, ``weight`` for the newest, kept by the owner."""
    for optimizer in ranks.optimizers:
        optimizer._update = EmaUpdate(optimizer, weight)


def vote_bits(ranks: SimulatedRanks, bits: int) -> None:
    """Rounds the votes' 8-bit values to so many bits, sign included; the bytes are counted as if they had 8."""
    levels = (1 << (bits - 1)) - 1

    def coarsened(plain: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        def cast(residual: Tensor, votes: int) -> Tensor:
            ballots = plain(residual, votes)
            codes = ballots[:, -votes - 1 : -1].view(torch.int8)
            codes.copy_((codes.float() * (levels / 127)).round().mul(127 / levels).round())
            return ballots

        return cast

    for optimizer in ranks.optimizers:
        optimizer._cast_ballots = coarsened(optimizer._cast_ballots)


class EmaUpdate:
    """In place of ScapeOptimizer._update: has the average taken for what was measured."""

    def __init__(self, optimizer: ScapeOptimizer, weight: float) -> None:
        self.optimizer, self.weight, self.plain = optimizer, weight, optimizer._update
        self.mean: Tensor | None = None

    def __call__(self, state: Any, mask: Tensor | None, total: Tensor, scale: Tensor, record: Any) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros_like(state.momentum)
        own = self.optimizer._own_rows(mask)
        tau = state.step + 1 - ops.take(state.clock, own)
        sample = total.square() / tau
        old = ops.take(self.mean, own)
        ops.put(self.mean, own, torch.where(old == 0, sample, old + self.weight * (sample - old)))
        measured, state.noise = state.noise, self.mean
        theta = self.plain(state, mask, total, scale, record)
        state.noise = measured
        return theta


ABLATIONS: dict[str, Callable[[SimulatedRanks, Any], None]] = {
    "mask_delay": mask_delay,
    "plain_update": plain_update,
    "dense_vectors": dense_vectors,
    "second_moment_ema": second_moment_ema,
    "vote_bits": vote_bits,
}
"""Options of a run that ScapeConfig does not have."""


# ------------------------------------------------------------------------------------------------- suites


def sweep(
    settings: Iterable[dict[str, Any]], lrs: Iterable[float], seeds: Iterable[int] = (0,), **more: Any
) -> list[Run]:
    """One run for every combination."""
    found = itertools.product(settings, lrs, seeds)
    return [Run(**{**setting, **more, "lr": lr, "seed": seed}) for setting, lr, seed in found]


DENSE = [{"method": "adamw"}, {"method": "adams"}]
SPARSE = [scape(0.9), scape(0.99), scape(0.999)]
VARIED: list[dict[str, Any]] = [
    {"mask_votes": 0},
    {"mask_votes": 1},
    {"mask_votes": 4},
    {"vote_bits": 4},
    {"vote_bits": 2},
    {"second_moment": "reconstructed"},
    {"second_moment": "reconstructed", "mask_votes": 0},
    {"catch_up": "summed"},
    {"plain_update": True},
    {"mask_delay": 0},
    {"mask_delay": 2},
    {"mask_interval": 4},
    {"mask_interval": 16},
    {"block_size": 100},
    {"block_size": 1000},
    {"wire_dtype": "fp32"},
    {"dense_steps": 300},
    {"sparsity_warmup_steps": 600},
    {"clip_norm": "local"},
    {"mask_statistic": "first_moment", "mask_votes": 0},
    {"dense_vectors": True},
    {"second_moment_ema": 0.1},
]
"""What is changed, one at a time, in the default configuration at 99%."""
SHORT = [
    *sweep(DENSE + SPARSE, [2e-3], size="0.03M", ranks=2, batch=2, context=32, steps=4),
    *sweep((scape(**options) for options in VARIED), [2e-3], size="0.03M", ranks=2, batch=2, context=32, steps=4),
]
HALF_AND_90: list[dict[str, Any]] = [{"sparsity": 0.5, "block_size": 200}, {"sparsity": 0.9}]
WARMUPS = [(0, 0), (0, 500), (0, 1000), (200, 800), (500, 500)]
SUITES: dict[str, list[Run]] = {
    "ablations": [
        *sweep(DENSE, [2e-3, 4e-3, 8e-3], size="0.03M"),
        *sweep(SPARSE, [2e-3, 4e-3, 8e-3], size="0.03M"),
        *sweep((scape(**options) for options in VARIED), [4e-3], size="0.03M"),
    ],
    "seeds": sweep([DENSE[1], scape(), *(scape(**options) for options in VARIED[:7])], [4e-3], (0, 1, 2), size="0.03M"),
    "catch_up": sweep(
        [DENSE[1], *(scape(**rate, **way) for rate in HALF_AND_90 for way in ({}, {"catch_up": "summed"}))],
        [4e-3],
        range(4),
        size="0.03M",
        steps=1500,
    ),
    "start": [
        *sweep(DENSE, [2e-3, 4e-3, 8e-3], size="0.03M", steps=1000),
        *sweep(
            (scape(dense_steps=dense, sparsity_warmup_steps=warm) for dense, warm in WARMUPS),
            [2e-3, 4e-3],
            size="0.03M",
            steps=1000,
        ),
    ],
    "ranks": [
        *sweep([DENSE[1], scape()], [4e-3], size="0.03M", ranks=2),
        *sweep([DENSE[1], scape()], [4e-3], size="0.03M", ranks=8),
        *sweep([DENSE[1], scape()], [4e-3], size="0.03M", ranks=8, batch=4),
    ],
    "long": sweep(DENSE + SPARSE[:2], [2e-3, 4e-3], size="0.03M", steps=10_000),
    "sizes": [
        *sweep([DENSE[1], *SPARSE[:2]], [2e-3], size="1M", batch=4, steps=10_000),
        *sweep([DENSE[1], *SPARSE[:2]], [2e-3], size="3M", batch=2, steps=10_000),
    ],
    "headline": [
        *sweep(DENSE + SPARSE[:2], [2e-3, 4e-3, 8e-3], (0, 1, 2), size="0.2M", steps=10_000),
        *sweep(DENSE + SPARSE, [5e-4, 1e-3, 2e-3], size="1M", steps=12_000),
        *sweep(DENSE + SPARSE, [5e-4, 1e-3, 2e-3], size="3M", batch=8, context=128, steps=12_000),
    ],
}
"""Roughly in the order in which they tell something; the last takes days on one core."""


# ------------------------------------------------------------------------------------------------- report


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*.json"))]


def run_of(result: dict[str, Any]) -> Run:
    options = tuple((key, value) for key, value in result["run"]["options"])
    return Run(**{**result["run"], "options": options})


@dataclass(frozen=True)
class Row:
    """One method in one setting, at its best learning rate."""

    setting: tuple[Any, ...]
    label: str
    lr: float
    tried: int
    losses: list[float]
    accuracy: float
    bytes: float
    """Sent by one rank per step and parameter."""
    updates: float
    """Per entry: steps times density."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.losses) if len(self.losses) > 1 else float("nan")

    def above(self, base: Row) -> str:
        """How far it is above another row; with the (unpaired) standard error, where both have several seeds."""
        error = math.hypot(*(row.spread / math.sqrt(len(row.losses)) for row in (self, base))) / base.mean
        gap = f"{self.mean / base.mean - 1:+.1%}"
        return gap if self is base or math.isnan(error) else f"{gap} ± {100 * error:.1f}"


def rows_of(found: list[dict[str, Any]]) -> list[Row]:
    """Best learning rate of each method in each setting, by the mean over seeds."""
    tried: dict[Any, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in found:
        run = run_of(result)
        tried[setting_of(run), run.label][run.lr].append(result)
    rows = []
    for (setting, label), by_lr in tried.items():
        lr, best = min(by_lr.items(), key=lambda item: statistics.mean(r["loss"] for r in item[1]))
        run = run_of(best[0])
        rows.append(
            Row(
                setting,
                label,
                lr,
                len(by_lr),
                [r["loss"] for r in best],
                statistics.mean(r["accuracy"] for r in best),
                best[0]["bytes"] / run.steps / best[0]["parameters"],
                run.steps * (1 - dict(run.options).get("sparsity", 0.99)) if run.method == "scape" else run.steps,
            )
        )
    return rows


def setting_of(run: Run) -> tuple[Any, ...]:
    return run.size, run.ranks, run.batch, run.context, run.steps


def report(out: Path) -> str:
    """Tables, one for each setting, and the plots."""
    found = results(out)
    if not found:
        raise SystemExit(f"error: no results in {out / 'runs'}. Run a suite first.")
    rows = rows_of(found)
    text = []
    for setting in sorted({row.setting for row in rows}, key=str):
        here = sorted((row for row in rows if row.setting == setting), key=lambda row: row.mean)
        base = next((row for row in here if row.label == "dense AdamS"), None)
        size, ranks, batch, context, steps = setting
        text += [
            f"### {size} parameters, {ranks} ranks of {batch} x {context} bytes, {steps:,} steps",
            "",
            "| method | best lr (of) | validation loss, nats | seeds | against dense AdamS (± standard error) |"
            " next byte right | bytes a step and parameter | updates per entry |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in here:
            gap = row.above(base) if base is not None else "-"
            loss = f"{row.mean:.4f}" + (f" ± {row.spread:.4f}" if len(row.losses) > 1 else "")
            text.append(
                f"| {row.label} | {row.lr:g} ({row.tried}) | {loss} | {len(row.losses)} | {gap} |"
                f" {row.accuracy:.1%} | {row.bytes:.3g} | {row.updates:,.0f} |"
            )
        text.append("")
    plot_losses(found, out)
    plot_gaps(rows, out)
    plot_rates(found, out)
    table = "\n".join(text)
    (out / "quality.md").write_text(table)
    (out / "quality.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return table


def plot_losses(found: list[dict[str, Any]], out: Path) -> None:
    """Loss over tokens and over bytes, of the setting with the most tokens that has SCAPE in it."""
    settings = {setting_of(run_of(r)) for r in found if r["run"]["method"] == "scape"}
    setting = max(settings, key=lambda s: (s[4] >= 1000, float(s[0][:-1]), s[4]))
    rows = {row.label: row for row in rows_of(found) if row.setting == setting}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for result in sorted(found, key=lambda r: r["name"]):
        run = run_of(result)
        row = rows.get(run.label)
        if setting_of(run) != setting or row is None or run.lr != row.lr or run.seed or not is_plain(run):
            continue
        history = result["history"][1:]
        for axis, key in zip(axes, ("tokens", "bytes"), strict=True):
            axis.plot([h[key] for h in history], [h["loss"] for h in history], label=f"{run.label}, lr {run.lr:g}")
    axes[0].set(xlabel="tokens", ylabel="validation loss (nats per byte)")
    axes[1].set(xlabel="bytes sent by a rank", xscale="log")
    axes[0].legend()
    figure.suptitle(f"{setting[0]} parameters, {setting[1]} ranks, {setting[4]:,} steps")
    save(figure, out / "loss.png")


def plot_gaps(rows: list[Row], out: Path) -> None:
    """How far SCAPE is behind dense AdamS, over updates per entry."""
    bases = {row.setting: row.mean for row in rows if row.label == "dense AdamS"}
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        plain = row.label.removesuffix(", catch_up=summed")
        if row.setting in bases and plain.startswith("SCAPE") and "," not in plain:
            size, ranks, batch = row.setting[:3]
            gap = 100 * (row.mean / bases[row.setting] - 1)
            points[row.label, f"{size}, {ranks} x {batch}"].append((row.updates, gap))
    labels = sorted({label.split(",")[0] for label, _ in points})
    where = sorted({setting for _, setting in points})
    figure, axis = plt.subplots(figsize=(8, 4))
    for (label, setting), pairs in sorted(points.items()):
        style = {"color": f"C{where.index(setting)}", "marker": "soD^v"[labels.index(label.split(",")[0]) % 5]}
        if "," in label:  # summed: hollow, dashed
            style |= {"markerfacecolor": "white", "linestyle": "--"}
        axis.plot(*zip(*sorted(pairs), strict=True), label=f"{label}, {setting}", **style)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set(xlabel="updates per entry (steps x density)", ylabel="loss above dense AdamS, %", xscale="log")
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small")
    save(figure, out / "gap.png")


def plot_rates(found: list[dict[str, Any]], out: Path) -> None:
    """Loss over the learning rate, in the setting in which most rates were tried, if several were."""
    tried: dict[Any, dict[str, dict[float, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for result in found:
        run = run_of(result)
        if is_plain(run):
            tried[setting_of(run)][run.label][run.lr].append(result["loss"])
    setting, methods = max(tried.items(), key=lambda item: (sum(len(rates) for rates in item[1].values()), item[0][4]))
    methods = {label: rates for label, rates in sorted(methods.items()) if len(rates) > 1}
    if not methods:
        return
    figure, axis = plt.subplots(figsize=(7, 4))
    for label, rates in methods.items():
        lrs = sorted(rates)
        axis.plot(lrs, [statistics.mean(rates[lr]) for lr in lrs], marker="o", label=label)
    axis.set(xlabel="learning rate", ylabel="validation loss (nats per byte)", xscale="log")
    axis.set_title(f"{setting[0]} parameters, {setting[1]} ranks, {setting[4]:,} steps")
    axis.legend()
    save(figure, out / "rates.png")


def is_plain(run: Run) -> bool:
    """Whether nothing but the sparsity, its warm-up and the way of catching up is chosen."""
    return {key for key, _ in run.options} <= {"sparsity", "sparsity_warmup_steps", "catch_up"}


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --------------------------------------------------------------------------------------------------- main


def execute(run: Run, out: Path) -> None:
    """Trains, or goes on from a snapshot."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = out / "snapshots" / f"{run.name}.pt"
    snapshot.parent.mkdir(exist_ok=True)
    training = Training(run)
    if snapshot.exists():
        training.load(snapshot)
        print(f"{run.name}: goes on from step {training.step}")
    result = training.go(snapshot, every=max(1, run.steps // 20), seconds_between=120)
    path = folder / f"{run.name}.json"
    path.with_suffix(".new").write_text(json.dumps(result, indent=1) + "\n")
    os.replace(path.with_suffix(".new"), path)


def execute_all(runs: list[Run], out: Path, jobs: int) -> None:
    """In processes of their own, ``jobs`` at a time, in order."""
    runs = [run for run in dict.fromkeys(runs) if not (out / "runs" / f"{run.name}.json").exists()]
    if not jobs:
        for run in runs:
            execute(run, out)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    waiting, running = list(runs), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop(0)
            plain = json.dumps(dataclasses.asdict(run))
            command = [sys.executable, __file__, "--run", plain, "--out", str(out)]
            running[subprocess.Popen(command, env=environment)] = run
            print(f"started {run.name}; {len(waiting)} of {len(runs)} to go", flush=True)
        time.sleep(0.1)
        for process in [process for process in running if process.poll() is not None]:
            run = running.pop(process)
            if process.returncode:
                raise SystemExit(f"error: {run.name} ended with code {process.returncode}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", choices=sorted(SUITES), help="suites of the long form (default: all)")
    parser.add_argument("--short", action="store_true", help="every method and ablation, a few steps each")
    parser.add_argument("--report", action="store_true", help="only write tables and plots of what is there")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes, one run and one core each; 0: all in this one (default: 1)"
    )
    parser.add_argument("--list", action="store_true", help="only name the runs")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for results (default: {OUT.name})")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.run is not None:
        execute(run_of({"run": args.run}), args.out)
        return
    suites = {"short": SHORT} if args.short else {name: SUITES[name] for name in args.suite or SUITES}
    runs = [run for suite in suites.values() for run in suite]
    if args.list:
        print("\n".join(run.name for run in runs))
        return
    if not args.report:
        execute_all(runs, args.out, 0 if args.short else args.jobs)
    print(report(args.out))


if __name__ == "__main__":
    main()
