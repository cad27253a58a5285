"""``lightning-scape report``: one picture and a table of a run, from what ScapeMonitor logged to a CSV logger."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_scape.core.words import show_bytes, show_seconds, show_times

Numbers = npt.NDArray[np.float64]
SIZE = 13.0, 7.0
"""Inches."""


class Run:
    """The figures of a run, by name.

    Args:
        file: a CSV logger's: a column ``step``, and one for each figure, empty where it was not logged.

    Raises:
        ValueError: it has no figures of ScapeMonitor.
    """

    def __init__(self, file: Path) -> None:
        found: dict[str, dict[int, float]] = defaultdict(dict)
        self.prefixes = prefixes(file)
        if not self.prefixes:
            raise ValueError(
                f"{file} must hold figures of ScapeMonitor, got none. Train with Trainer(callbacks=[ScapeMonitor()])."
            )
        with file.open(newline="", encoding="utf-8") as lines:
            for line in csv.DictReader(lines):
                step = int(float(line.pop("step", None) or 0))
                for name, value in line.items():
                    if value and name != "epoch":
                        found[name][step] = float(value)
        self.figures = dict(found)
        self.seconds = self.of([f"{self.prefixes[0]}/seconds_run"])

    def of(self, names: Iterable[str]) -> tuple[Numbers, Numbers]:
        """Steps and values of a figure; of several the sum, at the steps that all know."""
        known = [self.figures[name] for name in names if name in self.figures]
        steps = sorted(set.intersection(*map(set, known))) if known else []
        return np.array(steps, float), np.array([sum(each[step] for each in known) for step in steps], float)

    def total(self, name: str) -> tuple[Numbers, Numbers]:
        """Steps and values of one of the monitor's figures, of all optimizers together."""
        return self.of(f"{prefix}/{name}" for prefix in self.prefixes)

    def losses(self) -> list[str]:
        """Names of the figures that are a loss, by their names."""
        return [name for name in self.figures if "loss" in name.lower()]


def report(path: Path) -> str:
    """Writes ``report.png`` beside a run's CSV file; returns what is to be printed.

    Args:
        path: the file, or a folder; of a folder the newest ``metrics.csv`` in it that has figures of ScapeMonitor.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it has no figures of ScapeMonitor, or matplotlib is missing.
    """
    files = [file for file in path.rglob("metrics.csv") if prefixes(file)] if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(
            f"{path} must hold a metrics.csv with figures of ScapeMonitor, got none. Train with"
            " Trainer(callbacks=[ScapeMonitor()], logger=CSVLogger(FOLDER)), and name its folder."
        )
    file = max(files, key=lambda file: file.stat().st_mtime)
    run, picture = Run(file), file.with_name("report.png")
    draw(run, picture)
    return "\n".join([f"{file}, drawn to {picture}", "", *table(run)])


def prefixes(file: Path) -> list[str]:
    """Of the optimizers whose figures a CSV file has, by its head: ``scape``, or ``scape-0``, ``scape-1``."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        names = lines.readline().strip().split(",")
    return [name.rpartition("/")[0] for name in names if name.endswith("/bytes_run")]


def table(run: Run) -> list[str]:
    """What a run has come to, in Markdown."""
    steps, sent = run.total("bytes_run")
    _, dense = run.total("bytes_run_dense")
    rows = [
        ("steps", f"{steps[-1] + 1:,.0f}"),
        *((name, f"{run.of([name])[1][-1]:.4f}") for name in run.losses()),
        ("time", show_seconds(run.seconds[1][-1])),
        ("rank 0 has sent", show_bytes(sent[-1])),
    ]
    if sent[-1]:
        rows += [
            ("DDP would have sent", f"{show_bytes(dense[-1])}, {show_times(dense[-1] / sent[-1])} times as much"),
            *(("a step at the end", show_bytes(each)) for each in per_step(steps, sent)[1][-1:]),
            *(("waiting in the last step", show_seconds(each)) for each in _waiting(run)[1][-1:]),
        ]
    return ["| | at the end |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def per_step(steps: Numbers, sums: Numbers) -> tuple[Numbers, Numbers]:
    """What was added in a step, on average since the point before."""
    return steps[1:], np.diff(sums) / np.diff(steps)


def _waiting(run: Run) -> tuple[Numbers, Numbers]:
    return run.of(f"{prefix}/{name}" for prefix in run.prefixes for name in ("message_seconds", "exchange_wait"))


def draw(run: Run, file: Path) -> None:
    """Loss over steps, seconds and bytes; bytes of a step, beside DDP's; waiting.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("`report` draws with matplotlib, which is missing. Install lightning-scape[plots].") from error
    figure = Figure(figsize=SIZE, layout="constrained")
    (over_steps, over_seconds, over_bytes), (sent, waiting, nothing) = figure.subplots(2, 3)
    nothing.set_axis_off()
    steps, bytes_run = run.total("bytes_run")
    for name in run.losses():
        at, loss = run.of([name])
        over_steps.plot(at, loss, ".-", label=name)
        over_seconds.plot(np.interp(at, *run.seconds, left=np.nan), loss, ".-")
        over_bytes.plot(np.interp(at, steps, bytes_run, left=np.nan) / 1e6, loss, ".-")
    _label(over_steps, "step", "loss")
    _label(over_seconds, "seconds", "loss")
    _label(over_bytes, "sent by rank 0 (MB)", "loss")
    for name, label in (("bytes_run", "sent"), ("bytes_run_dense", "DDP")):
        at, values = per_step(*run.total(name))
        sent.plot(at, values / 1e6, label=label)
    if bytes_run[-1]:
        sent.set_yscale("log")
    _label(sent, "step", "bytes of a step (MB)")
    at, seconds = _waiting(run)
    waiting.plot(at, 1e3 * seconds)
    _label(waiting, "step", "in messages and waiting (ms)")
    figure.savefig(file, dpi=120)


def _label(axes: Any, below: str, beside: str) -> None:
    axes.set(xlabel=below, ylabel=beside)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
