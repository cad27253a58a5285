"""The plots of a report: each an SVG file's text, drawn by matplotlib without a screen."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_scape.reporting.history import History, Run, metrics_of, total

MOST_POINTS = 1000
"""Of a run in a plot; of more, every second, third, ... is drawn."""
KINDS = {
    "values": "gradient values",
    "parameters": "parameters back",
    "mask": "mask",
    "votes": "proposals",
    "norm": "norm",
}
"""Kinds of messages, and their names in the legend."""
CUT_ABOVE = 4.0
"""Times by phase are cut at so many medians: a first step compiles, and would press all others flat."""
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lightning_scape",  # the same figures give the same file
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
}
SIZE = 4.4, 3.2
"""Inches: on a phone, whose width an image takes, text is about 11 pixels high."""
GREY = "#b0b0b0"


@dataclass(frozen=True)
class Plot:
    """A drawing, and what stands below it."""

    title: str
    caption: str
    svg: str


def plots(history: History) -> list[Plot]:
    """All plots of a folder's runs."""
    line = history.line()
    points = thinned([point for run in line for point in run.points])
    resumed = [run.start for run in line[1:]]
    local = any(run.about.get("method") == "sparseloco" for run in line)
    unit, one = ("exchange", "an exchange") if local else ("step", "a step")
    found = [_draw("Loss", _LOSS, lambda axes: _loss(axes, line, history.others()), resumed)]
    if not points:
        return found
    return [
        *found,
        _draw("Density", f"Share of all entries that a rank sends in {one}.",
              lambda axes: _density(axes, points), resumed),
        _draw("Bytes by kind", _BYTES.format(unit=one), lambda axes: _bytes(axes, points, unit), resumed),
        _draw("Time by phase", _PHASES_LOCAL if local else _PHASES,
              lambda axes: _phases(axes, points, unit, rest=not local), resumed),
        _draw("Norms", _NORMS, lambda axes: _norms(axes, points), resumed)
        if local
        else _draw("Churn", _CHURN, lambda axes: _churn(axes, points), resumed),
        _draw("Skipped windows" if local else "Skipped steps", _SKIPPED.format(what="Windows" if local else "Steps"),
              lambda axes: _skipped(axes, points), resumed),
    ]  # fmt: skip


_LOSS = (
    "Training: rank 0's own batches, the mean since the point before. Validation: as the module logged it. Grey:"
    " earlier runs of this folder. Dotted lines: where a run went on from a checkpoint."
)
_BYTES = "What one rank sends in {unit}, by kind, and what an all-reduce of the whole gradient would send."
_PHASES = (
    "Seconds of rank 0's host. Coloured phases are SCAPE's, of the step at the point; the rest (forward, backward,"
    " data) is what is left of the mean step since the point before."
)
_PHASES_LOCAL = "Seconds of rank 0's host in an exchange; the local steps between exchanges come on top."
_CHURN = (
    "New in the mask: entries of rank 0's shard that the mask before did not have. Energy sent: share of the residual's"
    " squared norm that the step sent."
)
_NORMS = "Pseudo-gradient: what a window has changed. Error feedback: what rank 0 still owes after the exchange."
_SKIPPED = "{what} that all ranks have left out, because a gradient or a parameter was not finite."


def thinned(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most :data:`MOST_POINTS`, evenly chosen; always the last."""
    every = -(-len(points) // MOST_POINTS)
    return points[::-1][::every][::-1] if points else []


def _draw(title: str, caption: str, draw: Callable[[Any], None], resumed: Sequence[int]) -> Plot:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel("optimizer step")
        draw(axes)
        for step in resumed:
            axes.axvline(step, color="black", linestyle=":", linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper left", ncols=3, frameon=False, columnspacing=1.2, handlelength=1.6)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
    return Plot(title, caption, file.getvalue())


def _loss(axes: Any, line: Sequence[Run], others: Sequence[Run]) -> None:
    for index, run in enumerate(others):
        points = thinned([point for point in run.points if point.get("loss") is not None])
        label = "earlier runs" if index == 0 else None
        axes.plot(_steps(points), [point["loss"] for point in points], color=GREY, label=label)
    points = thinned([point for run in line for point in run.points if point.get("loss") is not None])
    axes.plot(_steps(points), [point["loss"] for point in points], ".-", markersize=3, label="training")
    lines = thinned([each for run in line for each in run.validations])
    for name in dict.fromkeys(name for each in lines for name in each["metrics"]):
        known = [each for each in lines if name in each["metrics"]]
        axes.plot(_steps(known), [each["metrics"][name] for each in known], "o-", markersize=4, label=name)
    axes.set_ylabel("loss")


def _density(axes: Any, points: list[dict[str, Any]]) -> None:
    several = _lines(axes, points, "density", "")
    axes.set(ylabel="density (share of entries)")
    if several and any(total(point, "density") > 0 for point in points):
        _use_log_scale(axes)


def _use_log_scale(axes: Any) -> None:
    """With plain numbers, 0.2 in place of a power of ten; over many decades only 1, 10, 100."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(plain if high < 1e3 * low else NullFormatter())


def _bytes(axes: Any, points: list[dict[str, Any]], unit: str) -> None:
    for kind, name in KINDS.items():
        values = [total(point, f"bytes_{kind}") / 1e6 for point in points]
        if any(values):
            # Values and parameters often cost the same: the first lies below, and is wider.
            width = 3.6 if kind == "values" else 1.6
            axes.plot(_steps(points), values, ".-", markersize=3, linewidth=width, label=name)
    dense = [total(point, "bytes_dense") / 1e6 for point in points]
    if not any(dense):
        axes.text(0.5, 0.5, "one rank: nothing is sent", transform=axes.transAxes, ha="center")
    else:
        axes.plot(_steps(points), dense, color="black", linestyle="--", label="dense all-reduce")
        _use_log_scale(axes)
    axes.set_ylabel(f"sent per rank and {unit} (MB)")


def _phases(axes: Any, points: list[dict[str, Any]], unit: str, rest: bool) -> None:
    names = dict.fromkeys(key.rpartition("/")[2] for point in points for key in point["metrics"] if "/seconds/" in key)
    series = {name: [1e3 * total(point, f"seconds/{name}") for point in points] for name in names}
    if rest:
        known = zip(points, *series.values(), strict=True)
        series["rest"] = [max(0.0, 1e3 * (point.get("step_seconds") or 0.0) - sum(phases)) for point, *phases in known]
    series = {name: values for name, values in series.items() if any(values)}
    if len(points) == 1:
        left = 0.0
        for name, (value,) in series.items():
            axes.bar(points[0]["step"], value, bottom=left, label=name)
            left += value
    elif series:
        colors = ["#d9d9d9" if name == "rest" else f"C{index}" for index, name in enumerate(series)]
        axes.stackplot(_steps(points), *series.values(), labels=[*series], colors=colors)
    axes.set_ylabel(f"time per {unit} (ms)")
    axes.set_ylim(bottom=0)
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    if totals and max(totals) > (top := CUT_ABOVE * median(totals)):
        axes.set_ylim(0, top)
        axes.set_title(f"cut at {CUT_ABOVE:g} times the median; the longest took {max(totals):,.0f} ms", fontsize=9)


def _churn(axes: Any, points: list[dict[str, Any]]) -> None:
    _lines(axes, points, "mask_churn", "new in the mask")
    _lines(axes, points, "energy_captured", "energy sent")
    axes.set(ylabel="share", ylim=(-0.03, 1.03))


def _norms(axes: Any, points: list[dict[str, Any]]) -> None:
    _lines(axes, points, "delta_norm", "pseudo-gradient")
    _lines(axes, points, "error_norm", "error feedback")
    axes.set(ylabel="L2 norm")


def _skipped(axes: Any, points: list[dict[str, Any]]) -> None:
    _lines(axes, points, "skipped_total", "", drawstyle="steps-post")
    most = max(total(point, "skipped_total") for point in points)
    axes.set(ylabel="skipped so far (count)", ylim=(-0.05 * max(1.0, most), 1.1 * max(1.0, most)))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _lines(axes: Any, points: list[dict[str, Any]], name: str, label: str, **style: Any) -> int:
    """A line for each optimizer, named only where there are several; returns how many."""
    found = list(metrics_of(points, name))
    for prefix, steps, values in found:
        finite = [value if math.isfinite(value) else math.nan for value in values]
        named = " ".join(part for part in (label, prefix if len(found) > 1 else "") if part)
        axes.plot(steps, finite, ".-", markersize=3, label=named or None, **style)
    return len(found)


def _steps(lines: Sequence[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines]
