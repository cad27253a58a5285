"""Tables and plots of what `quality.py` has measured; no script."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import record
from quality_runs import BETAS, Run, Setting, run_of

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after its back end is chosen


@dataclass
class Line:
    """One method in one setting, at one learning rate: all its seeds."""

    run: Run
    """Of one of them."""
    rows: dict[int, dict[str, Any]]
    """By seed."""

    def values(self, key: str) -> list[float]:
        """A figure of each seed that has it."""
        return [row[key] for row in self.rows.values() if row[key] is not None]

    def mean(self, key: str = "loss", scale: float = 1, digits: int = 4, unit: str = "") -> str:
        """And, of several seeds, their standard deviation."""
        numbers = [scale * number for number in self.values(key)]
        if not numbers:
            return "-"
        spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
        return f"{statistics.mean(numbers):.{digits}f}{unit}{spread}"

    @property
    def bytes(self) -> float:
        """Sent by a rank, per step and parameter."""
        row = next(iter(self.rows.values()))
        return float(row["bytes"]) / self.run.steps / float(row["parameters"])

    def gaps(self, base: Line) -> list[float]:
        """The differences of shared seeds: of the loss in percent, or of digits named right in points."""
        seeds = sorted(self.rows.keys() & base.rows.keys())
        pairs = [(self.rows[seed], base.rows[seed]) for seed in seeds if self is not base]
        if self.run.of_text:
            return [100 * (mine["loss"] / theirs["loss"] - 1) for mine, theirs in pairs]
        return [100 * (mine["accuracy"] - theirs["accuracy"]) for mine, theirs in pairs]

    def above(self, base: Line) -> str:
        """The mean of the gaps, with its standard error."""
        unit, gaps = "%" if self.run.of_text else " points", self.gaps(base)
        if not gaps:
            return ""
        error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.1f}" if len(gaps) > 1 else ""
        return f"{statistics.mean(gaps):+.1f}{unit}{error}"


def lines_of(rows: Iterable[dict[str, Any]]) -> list[Line]:
    """All rows, those that differ in the seed alone together."""
    found: dict[tuple[Any, ...], Line] = {}
    for row in rows:
        run = run_of(row)
        line = found.setdefault((run.setting, run.label, run.ranks, run.lr), Line(run, {}))
        line.rows[run.seed] = row
    return sorted(found.values(), key=in_order)


def in_order(line: Line) -> tuple[Any, ...]:
    """The language model before the digits, small before large, short before long, AdamW first."""
    run = line.run
    size = float(run.setting.size[:-1]) if run.setting.size else 0.0
    here = (not run.of_text, run.task, size, run.steps, run.betas, run.lr)
    return *here, run.method != "adamw", run.ranks, dict(run.options).get("sparsity", 0), -sum(line.values("bytes"))


def report(rows: Iterable[dict[str, Any]], suites: dict[str, list[Run]], out: Path) -> None:
    """A table of each suite that has rows of more than AdamW, and the plots."""
    by_name = {row["name"]: row for row in rows}
    for suite, runs in suites.items():
        found = [by_name[run.name] for run in runs if run.name in by_name]
        if any(row["settings"]["method"] != "adamw" for row in found):
            which = "--short" if suite == "short" else f"--suite {suite}"
            command = f"python examples/benchmarks/quality.py {which}"
            tables = [suite_table(lines_of(found))]
            if suite == "many_ranks":
                by_ranks = lines_by_ranks(lines_of(found))
                plot_ranks(by_ranks, out)
                tables.insert(0, ranks_table(by_ranks))
            record.write_table(out / f"quality-{suite}.md", "\n\n".join([*tables, record.made_by(command, found)]))
    drawn = [row for row in by_name.values() if row["curve"]]
    if drawn and "largest" in suites:
        plot_curves(lines_of(drawn), out)


# ------------------------------------------------------------------------------------------------------------ tables


def suite_table(lines: list[Line]) -> str:
    """Sparse methods beside AdamW, in the same setting at AdamW's best rate; what all share stands below."""
    dense = [line for line in lines if line.run.method == "adamw"]
    rates = shown_rates(lines)
    shown = [line for line in lines if line.run.lr in rates.get(line.run.setting, ())]
    columns = {name: [column(line.run) for line in shown] for name, column in COLUMNS.items()}
    varied = [name for name, cells in columns.items() if len(set(cells)) > 1]
    common = [f"{name} {cells[0]}" for name, cells in columns.items() if name not in varied and cells[0]]
    head = [*varied, "method", "seeds", "loss", "against AdamW", "named right", "bytes a step and parameter"]
    cells = []
    for index, line in enumerate(shown):
        base = base_of(line, shown)
        what = [*(columns[name][index] for name in varied), line.run.label, str(len(line.rows)), line.mean()]
        right = line.mean("accuracy", 100, 1, "%")
        cells.append([*what, line.above(base) if base else "", right, f"{line.bytes:.2g}"])
    notes = [f"All: {'; '.join(common)}.", *tried(dense)]
    made_of = [line.rows.values() for line in shown]
    return "\n\n".join([record.table(head, cells, made_of), " ".join(notes)])


def shown_rates(lines: list[Line]) -> dict[Setting, set[float]]:
    """Of each setting, AdamW's best of the learning rates at which a sparse method ran."""
    rates: dict[Setting, set[float]] = {}
    losses: dict[tuple[Setting, float], float] = {}
    for line in lines:
        if line.run.method == "adamw":
            losses[line.run.setting, line.run.lr] = line.rows[min(line.rows)]["loss"]
        else:
            rates.setdefault(line.run.setting, set()).add(line.run.lr)
    return {at: {min(tried, key=lambda lr: losses.get((at, lr), math.inf))} for at, tried in rates.items()}


COLUMNS = {
    "task": lambda run: {"python": "Python bytes"}.get(run.task, run.task),
    "parameters": lambda run: run.size if run.of_text else "30,000",
    "ranks": lambda run: str(run.ranks),
    "a rank's batch": lambda run: f"{run.batch} x {run.context} bytes" if run.of_text else f"{run.batch} images",
    "steps": lambda run: f"{run.steps:,}",
    "betas": lambda run: str(run.betas),
    "precision": lambda run: run.precision,
    "learning rate": lambda run: f"{run.lr:g}",
}


def base_of(line: Line, lines: list[Line]) -> Line | None:
    """What a line is compared with: AdamW, whose ranks count as one."""
    same = line.run.setting, line.run.lr, "AdamW"
    return next((each for each in lines if (each.run.setting, each.run.lr, each.run.label) == same), None)


def tried(dense: list[Line]) -> list[str]:
    """AdamW's losses at all the rates that it was tried at, where there are several, on the first seed."""
    by_setting: dict[Setting, dict[float, float]] = {}
    for line in dense:
        seed = min(line.rows)
        by_setting.setdefault(line.run.setting, {})[line.run.lr] = line.rows[seed]["loss"]
    sentences = []
    for setting, losses in by_setting.items():
        if len(losses) > 1:
            shown = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in sorted(losses.items()))
            what = setting.size if setting.size else setting.task
            betas = "" if setting.betas == BETAS else f", betas {setting.betas}"
            sentences.append(f"AdamW's loss by learning rate ({what}{betas}): {shown}.")
    return sentences


class Point(NamedTuple):
    """A sparsity with some number of ranks."""

    bytes: float
    """A step and parameter."""
    gap: float
    """Percent above AdamW."""
    text: str
    """The gap as a table has it."""
    rows: list[dict[str, Any]]
    """That it comes from."""


def lines_by_ranks(lines: list[Line]) -> dict[tuple[int, int], dict[float, Point]]:
    """By ranks and a rank's windows, then by sparsity, all that can be compared with AdamW."""
    found: dict[tuple[int, int], dict[float, Point]] = {}
    for line in sorted(lines, key=lambda line: (line.run.ranks, line.run.batch)):
        base, sparsity = base_of(line, lines), dict(line.run.options).get("sparsity")
        if sparsity is not None and base is not None and (gaps := line.gaps(base)):
            rows = [*line.rows.values(), *base.rows.values()]
            point = Point(line.bytes, statistics.mean(gaps), line.above(base), rows)
            found.setdefault((line.run.ranks, line.run.batch), {})[sparsity] = point
    return found


def ranks_table(found: dict[tuple[int, int], dict[float, Point]]) -> str:
    """Loss above AdamW's, and bytes a step and parameter; and what sends least of all within 1% of AdamW."""
    sparsities = sorted({sparsity for points in found.values() for sparsity in points})
    cells = []
    for (ranks, windows), points in found.items():
        near = [sparsity for sparsity in sparsities if sparsity in points and points[sparsity].gap <= 1]
        least = min(near, key=lambda sparsity: points[sparsity].bytes, default=None)
        shown = [f"{points[s].text}, {points[s].bytes:.2g}" if s in points else "-" for s in sparsities]
        cells.append([str(ranks), str(windows), *shown, "none" if least is None else percent(least)])
    made_of = [[row for point in points.values() for row in point.rows] for points in found.values()]
    return record.table(
        ["ranks", "a rank's windows", *map(percent, sparsities), "least bytes within 1%"], cells, made_of
    )


def percent(sparsity: float) -> str:
    """As a label has it."""
    return f"{sparsity:.1%}".replace(".0%", "%")


# ------------------------------------------------------------------------------------------------------------- plots


def plot_ranks(found: dict[tuple[int, int], dict[float, Point]], out: Path) -> None:
    """Loss above AdamW's over bytes, a line for each number of ranks."""
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for (ranks, windows), points in found.items():
        sent, gaps, *_ = zip(*(points[sparsity] for sparsity in sorted(points)), strict=True)
        axis.plot(sent, gaps, marker="o", label=f"{ranks} x {windows}")
        for sparsity, point in points.items():
            axis.annotate(percent(sparsity), point[:2], fontsize="x-small")
    axis.set(xlabel="bytes a step and parameter, mean of the run", ylabel="loss above AdamW, %")
    axis.legend(title="ranks x windows of each", fontsize="small")
    save(figure, out / "quality-many_ranks.png")


def plot_curves(lines: list[Line], out: Path) -> None:
    """Loss over steps and over bytes, and how far it is above AdamW's; a row of plots for each size."""
    longest = {line.run.size: max(each.run.steps for each in lines if each.run.size == line.run.size) for line in lines}
    drawn = [line for line in lines if line.run.steps == longest[line.run.size]]
    sizes = list(dict.fromkeys(line.run.size for line in drawn))
    figure, axes = plt.subplots(len(sizes), 3, figsize=(15, 4 * len(sizes)), squeeze=False)
    for size, (over_steps, over_bytes, above) in zip(sizes, axes, strict=True):
        here = [line for line in drawn if line.run.size == size]
        dense = mean_curve(here[0])
        for line in here:
            steps, sent, losses = zip(*mean_curve(line), strict=True)
            look = {"label": f"{line.run.label}, {len(line.rows)} seeds"}
            over_steps.plot(steps, losses, **look)
            over_bytes.plot(sent, losses, **look)
            gaps = [100 * (loss / base[2] - 1) for loss, base in zip(losses, dense, strict=True)]
            above.plot(steps, gaps, **look)
        over_bytes.sharey(over_steps)
        over_steps.set(xlabel="step", ylabel="validation loss (nats per byte)")
        over_bytes.set(xlabel="bytes sent by a rank", xscale="log", title=f"{size} parameters")
        above.set(xlabel="step", ylabel="loss above AdamW, %")
        over_steps.legend(fontsize="small")
    save(figure, out / "quality-loss.png")


def mean_curve(line: Line) -> list[tuple[float, ...]]:
    """Steps, bytes and losses, averaged over the seeds."""
    curves = [row["curve"] for row in line.rows.values()]
    return [tuple(map(statistics.mean, zip(*points, strict=True))) for points in zip(*curves, strict=True)]


def save(figure: Any, path: Path) -> None:
    """As PNG, small enough to be kept beside the rows."""
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
