"""Tables and plots of what `bench_quality.py` has measured."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from quality_runs import Run, results, run_of

from lightning_scape import ScapeConfig
from lightning_scape.mask import SparsitySchedule

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Row:
    """One method in one setting, at its best learning rate."""

    setting: tuple[Any, ...]
    label: str
    lr: float
    tried: int
    seeds: list[int]
    losses: list[float]
    """By seed."""
    accuracy: float
    bytes: float
    """Sent by one rank per step and parameter."""
    updates: float
    """Per entry, on average."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.losses) if len(self.losses) > 1 else float("nan")

    def is_of(self, run: Run) -> bool:
        """Whether the run is one of its."""
        return (self.setting, self.label, self.lr) == (run.setting, run.label, run.lr)

    def above(self, base: Row) -> str:
        """How far it is above another row, by the seeds of both; with the (unpaired) standard error, if several."""
        mine, theirs = self.shared_with(base)
        if not mine:
            return "-"
        gap = f"{statistics.mean(mine) / statistics.mean(theirs) - 1:+.1%}"
        if self is base or len(mine) == 1:
            return gap
        error = math.hypot(*(statistics.stdev(losses) for losses in (mine, theirs))) / math.sqrt(len(mine))
        return f"{gap} ± {100 * error / statistics.mean(theirs):.1f}"

    def shared_with(self, base: Row) -> tuple[list[float], list[float]]:
        """The losses of both on the seeds that both have."""
        shared = [seed for seed in self.seeds if seed in base.seeds]
        return tuple([row.losses[row.seeds.index(seed)] for seed in shared] for row in (self, base))


def mean_losses(by_lr: dict[float, list[dict[str, Any]]]) -> dict[float, float]:
    """Mean loss at each learning rate over the seeds that all of them have; if there are none, over those it has."""
    seeds = {lr: {run_of(result).seed for result in here} for lr, here in by_lr.items()}
    shared = set.intersection(*seeds.values())
    return {
        lr: statistics.mean(r["loss"] for r in here if run_of(r).seed in (shared or seeds[lr]))
        for lr, here in by_lr.items()
    }


def rows_of(found: list[dict[str, Any]]) -> list[Row]:
    """Each method in each setting, with all its seeds at the best learning rate.

    That is the one with the lowest of the `mean_losses`, of those that ran on the most seeds: one run proves little.
    """
    tried: dict[Any, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in found:
        run = run_of(result)
        tried[run.setting, run.label][run.lr].append(result)
    rows = []
    for (setting, label), by_lr in tried.items():
        most = max(len(here) for here in by_lr.values())
        means = mean_losses({lr: here for lr, here in by_lr.items() if len(here) == most})
        lr = min(means, key=means.__getitem__)
        best = by_lr[lr]
        run = run_of(best[0])
        rows.append(
            Row(
                setting,
                label,
                lr,
                len(by_lr),
                [run_of(r).seed for r in best],
                [r["loss"] for r in best],
                statistics.mean(r["accuracy"] for r in best),
                best[0]["bytes"] / run.steps / best[0]["parameters"],
                updates_of(run),
            )
        )
    return rows


def updates_of(run: Run) -> float:
    if run.method != "scape":
        return run.steps
    known = {f.name for f in dataclasses.fields(ScapeConfig)}
    config = ScapeConfig(**{key: value for key, value in run.options if key in known})
    return SparsitySchedule.of(config).updates(run.steps)


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
            "| method | best lr (of) | validation loss, nats | seeds |"
            " against dense AdamS, shared seeds (± standard error) | next byte right |"
            " bytes a step and parameter | updates per entry |",
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
    """Mean loss over tokens and over bytes, of the largest model of those that most methods have trained."""
    plain = [result for result in found if is_plain(run_of(result)) and "catch_up" not in dict(run_of(result).options)]
    lines: dict[Any, list[Row]] = defaultdict(list)
    for row in rows_of(plain):
        lines[row.setting].append(row)

    def worth(setting: tuple[Any, ...]) -> tuple[float, ...]:
        methods = {row.label.split(",")[0] for row in lines[setting]}
        return len(methods), float(setting[0][:-1]), setting[4]

    setting = max(lines, key=worth)
    rows = lines[setting]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for row in sorted(rows, key=lambda row: row.label):
        runs = [result for result in plain if row.is_of(run_of(result))]
        history = [result["history"][1:] for result in runs]
        losses = [statistics.mean(h["loss"] for h in points) for points in zip(*history, strict=True)]
        label = f"{row.label}, lr {row.lr:g}, seeds: {len(runs)}"
        for axis, key in zip(axes, ("tokens", "bytes"), strict=True):
            axis.plot([h[key] for h in history[0]], losses, label=label)
    axes[0].set(xlabel="tokens", ylabel="validation loss (nats per byte)")
    axes[1].set(xlabel="bytes sent by a rank", xscale="log")
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{setting[0]} parameters, {setting[1]} ranks, {setting[4]:,} steps")
    save(figure, out / "loss.png")


def plot_gaps(rows: list[Row], out: Path) -> None:
    """How far SCAPE is behind dense AdamS, over updates per entry."""
    bases = {row.setting: row for row in rows if row.label == "dense AdamS"}
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        plain = row.label.removesuffix(", catch_up=summed")
        if row.setting in bases and plain.startswith("SCAPE") and "," not in plain:
            size, ranks, batch = row.setting[:3]
            mine, theirs = row.shared_with(bases[row.setting])
            if mine:
                gap = 100 * (statistics.mean(mine) / statistics.mean(theirs) - 1)
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
    axis.set(xlabel="updates per entry", ylabel="loss above dense AdamS, %", xscale="log")
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small")
    save(figure, out / "gap.png")


def plot_rates(found: list[dict[str, Any]], out: Path) -> None:
    """Loss over the learning rate, in the setting in which most rates were tried, if several were."""
    tried: dict[Any, dict[str, dict[float, list[dict[str, Any]]]]]
    tried = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for result in found:
        run = run_of(result)
        if is_plain(run):
            tried[run.setting][run.label][run.lr].append(result)
    setting, methods = max(tried.items(), key=lambda item: (sum(len(rates) for rates in item[1].values()), item[0][4]))
    methods = {label: rates for label, rates in sorted(methods.items()) if len(rates) > 1}
    if not methods:
        return
    figure, axis = plt.subplots(figsize=(9, 4))
    for label, rates in methods.items():
        axis.plot(*zip(*sorted(mean_losses(rates).items()), strict=True), marker="o", label=label)
    axis.set(xlabel="learning rate", ylabel="validation loss (nats per byte)", xscale="log")
    axis.set_title(
        f"{setting[0]} parameters, {setting[1]} ranks, {setting[4]:,} steps; on the seeds that all rates share"
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small")
    save(figure, out / "rates.png")


def is_plain(run: Run) -> bool:
    """Whether nothing but the sparsity, its warm-up and the way of catching up is chosen."""
    return {key for key, _ in run.options} <= {"sparsity", "sparsity_warmup_steps", "catch_up"}


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
