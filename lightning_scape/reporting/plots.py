"""The plots of a report: each an SVG file's text, drawn by matplotlib without a screen."""

from __future__ import annotations

import functools
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

from lightning_scape.reporting.history import History, Run, last_values, metrics_of, total
from lightning_scape.reporting.words import plain

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
MOST_LINES, MOST_PLOTS, MOST_EARLIER, MOST_PHASES = 8, 6, 50, 20
"""Lines of a kind in a plot, validation metrics with a plot of their own, earlier runs in grey, phases of a step."""
LARGEST = 1e100
"""What is larger is left out of a drawing."""
LOG_ABOVE, LOG_ABOVE_OTHERS = 20.0, 1000.0
"""From here on, largest over smallest value, a loss has a logarithmic axis, and another metric has."""
CUT_ABOVE = 4.0
"""Times by phase are cut at so many medians: a first step compiles, and would press all others flat."""
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lightning_scape",  # the same figures give the same file
    "text.parse_math": False,  # a metric may be called $x
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
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
    validated = last_values(each for run in line for each in run.validations)
    others = [name for name in validated if not is_loss(name)][:MOST_PLOTS]
    return _of_the_run(history, line) + [
        _draw(plain(name, 60), _VALIDATION, functools.partial(_validation, line=line, name=name), _resumed(line))
        for name in others
    ]


def is_loss(name: str) -> bool:
    """Whether a validation metric is drawn beside the training loss, by its name."""
    return any(word in name.lower() for word in ("loss", "nll", "entropy"))


def _resumed(line: Sequence[Run]) -> list[int]:
    return [run.start for run in line[1:]]


def _of_the_run(history: History, line: list[Run]) -> list[Plot]:
    points = thinned([point for run in line for point in run.points])
    resumed = _resumed(line)
    local = any(run.exchanges for run in line)
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
    "Seconds by rank 0's clock. Coloured phases are SCAPE's, of the step at the point; the rest (forward, backward,"
    " data) is what is left of the mean step since the point before."
)
_PHASES_LOCAL = "Seconds by rank 0's clock in an exchange; the local steps between exchanges come on top."
_CHURN = (
    "New in the mask: entries of rank 0's shard that the mask before did not have. Energy sent: share of the residual's"
    " squared norm that the step sent."
)
_NORMS = "Pseudo-gradient: what a window has changed. Error feedback: what rank 0 still owes after the exchange."
_VALIDATION = "As the module logged it in validation."
_SKIPPED = "{what} that all ranks have left out, because a gradient or a parameter was not finite."


def thinned(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most :data:`MOST_POINTS`, evenly chosen; always the last."""
    every = -(-len(points) // MOST_POINTS)
    return points[::-1][::every][::-1] if points else []


def _draw(title: str, caption: str, draw: Callable[[Any], None], resumed: Sequence[int]) -> Plot:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fonts here may lack what a browser's have; an odd range is seen
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel("optimizer step")
        draw(axes)
        for step in resumed:
            axes.axvline(step, color="black", linestyle=":", linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            columns = max(1, min(3, 48 // (4 + max(map(len, labels)))))
            figure.legend(loc="outside upper left", ncols=columns, frameon=False, columnspacing=1.2, handlelength=1.6)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
    return Plot(title, caption, file.getvalue())


def _loss(axes: Any, line: Sequence[Run], others: Sequence[Run]) -> None:
    for index, run in enumerate(others[-MOST_EARLIER:]):
        _curve(axes, thinned(run.points), _loss_of, "earlier runs" if index == 0 else "", color=GREY)
    _curve(axes, thinned([point for run in line for point in run.points]), _loss_of, "training", ".-", markersize=3)
    names = last_values(each for run in line for each in run.validations)
    for name in [*filter(is_loss, names)][:MOST_LINES]:
        _validation(axes, line, name, plain(name, 28))
    axes.set_ylabel("loss")
    _fit_scale(axes, LOG_ABOVE)


def _loss_of(point: dict[str, Any]) -> float | None:
    return cast("float | None", point.get("loss"))


def _validation(axes: Any, line: Sequence[Run], name: str, label: str = "") -> None:
    known = thinned([each for run in line for each in run.validations if name in each["metrics"]])
    _curve(axes, known, lambda each: each["metrics"][name], label, "o-", markersize=4)
    if not label:
        axes.set_ylabel(plain(name, 40))
        _fit_scale(axes, LOG_ABOVE_OTHERS)


def _curve(
    axes: Any,
    lines: Sequence[dict[str, Any]],
    value: Callable[[Any], float | None],
    label: str,
    *form: str,
    **style: Any,
) -> None:
    """A line through what is known; what is not finite leaves a gap."""
    known = [(line["step"], drawable(found)) for line in lines if (found := value(line)) is not None]
    # A name that begins with an underscore would not be in the legend.
    named = f" {label}" if label.startswith("_") else label or None
    axes.plot([step for step, _ in known], [found for _, found in known], *form, label=named, **style)


def drawable(value: float) -> float:
    """NaN, a gap, for what is not finite, and for what is beyond a drawing's arithmetic."""
    return value if abs(value) <= LARGEST else math.nan


def _fit_scale(axes: Any, above: float) -> None:
    """A logarithmic axis where all is above 0 and linear steps would press most of it flat."""
    values = [value for drawn in axes.lines for value in drawn.get_ydata() if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > above * min(values):
        _use_log_scale(axes)


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
        values = [drawable(total(point, f"bytes_{kind}") / 1e6) for point in points]
        if any(values):
            # Values and parameters often cost the same: the first lies below, and is wider.
            width = 3.6 if kind == "values" else 1.6
            axes.plot(_steps(points), values, ".-", markersize=3, linewidth=width, label=name)
    dense = [drawable(total(point, "bytes_dense") / 1e6) for point in points]
    if not any(dense):
        axes.text(0.5, 0.5, "one rank: nothing is sent", transform=axes.transAxes, ha="center")
    else:
        axes.plot(_steps(points), dense, color="black", linestyle="--", label="dense all-reduce")
        _use_log_scale(axes)
    axes.set_ylabel(f"sent per rank and {unit} (MB)")


def _phases(axes: Any, points: list[dict[str, Any]], unit: str, rest: bool) -> None:
    def milliseconds(seconds: float) -> float:
        return 1e3 * seconds if 0 <= seconds <= LARGEST else 0.0  # stacked: a gap in one would be one in all

    keys = dict.fromkeys(key for point in points for key in point["metrics"] if "/seconds/" in key)
    names = [*dict.fromkeys(key.rpartition("/")[2] for key in keys)][:MOST_PHASES]
    series = {name: [milliseconds(total(point, f"seconds/{name}")) for point in points] for name in names}
    if rest:
        steps = [milliseconds(point.get("step_seconds") or 0.0) for point in points]
        series["rest"] = [max(0.0, step - sum(phases)) for step, *phases in zip(steps, *series.values(), strict=True)]
    series = {name: values for name, values in series.items() if any(values)}
    if len(points) == 1:
        left = 0.0
        for name, (value,) in series.items():
            axes.bar(points[0]["step"], value, bottom=left, label=plain(name, 20))
            left += value
    elif series:
        colors = ["#d9d9d9" if name == "rest" else f"C{index}" for index, name in enumerate(series)]
        labels = [plain(name, 20) for name in series]
        axes.stackplot(_steps(points), *series.values(), labels=labels, colors=colors)
    axes.set_ylabel(f"time per {unit} (ms)")
    axes.set_ylim(bottom=0)
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    if totals and max(totals) > (top := CUT_ABOVE * median(totals)) > 0:
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
    counts = [drawable(total(point, "skipped_total")) for point in points]
    most = max([1.0, *filter(math.isfinite, counts)])
    axes.set(ylabel="skipped so far (count)", ylim=(-0.05 * most, 1.1 * most))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _lines(axes: Any, points: list[dict[str, Any]], name: str, label: str, **style: Any) -> int:
    """A line for each optimizer, named only where there are several; returns how many."""
    found = list(metrics_of(points, name))[:MOST_LINES]
    for prefix, steps, values in found:
        named = " ".join(part for part in (label, plain(prefix, 20) if len(found) > 1 else "") if part)
        axes.plot(steps, [*map(drawable, values)], ".-", markersize=3, label=named or None, **style)
    return len(found)


def _steps(lines: Sequence[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines]
