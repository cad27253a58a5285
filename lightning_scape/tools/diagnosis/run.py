"""Where the time of a run's steps goes, by the figures that it wrote down; and what to switch on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_scape.core.words import show_seconds
from lightning_scape.reporting import History
from lightning_scape.reporting.history import Run
from lightning_scape.tools.diagnosis.findings import Finding

TOPIC = "This run"
MUCH_NETWORK, MUCH_DATA, MUCH_SAVING, MUCH_OWN = 0.2, 0.1, 0.05, 0.2
"""Shares of a step from which on something is to be done."""
ON_THE_DEVICE = (
    "The figures are the CPU's clock, which does not see what a GPU waits for: the messages' time is part of the"
    " computation here. torch's profiler shows it."
)
SLOWER_RANK = "A rank that waits for a slower one counts it as the network, too."


@dataclass(frozen=True)
class Parts:
    """Mean seconds of a step of the newest run's second half."""

    step: float
    network: float
    """Inside messages, waiting for other ranks included."""
    own: float
    """The method's work beside that."""
    data: float | None
    """From a batch's end to the next one's begin; None: the run did not write it down."""
    saving: float | None
    """The same, where a checkpoint was saved there."""

    @property
    def computing(self) -> float:
        """What is left."""
        return max(0.0, self.step - self.network - self.own - (self.data or 0.0) - (self.saving or 0.0))

    @classmethod
    def of(cls, run: Run) -> Parts | None:
        """None where no point of the run has a step's time."""
        points = [point for point in run.points if 0 < (point.get("step_seconds") or 0.0) < math.inf]
        points = points[len(points) // 2 :]
        if not points:
            return None
        before = [run.start, *(int(point["step"]) for point in run.points)]
        network, phases = 0.0, 0.0
        for point in points:
            # An exchange's figures are those of all steps since the last one.
            steps = (
                int(point["step"]) - max((s for s in before if s < point["step"]), default=0) if run.exchanges else 1
            )
            network += _sum(point, "message_seconds", "exchange_wait") / steps
            phases += _sum(point, *{name.partition("/")[2] for name in point["metrics"] if "/seconds/" in name}) / steps
        count = len(points)
        return cls(
            step=sum(point["step_seconds"] for point in points) / count,
            network=network / count,
            own=max(0.0, phases - network) / count,
            data=_mean(points, "data_seconds"),
            saving=_mean(points, "checkpoint_seconds"),
        )


def _sum(point: dict[str, Any], *names: str) -> float:
    """Of all optimizers."""
    metrics: dict[str, float] = point["metrics"]
    return sum(value for name, value in metrics.items() if name.partition("/")[2] in names and math.isfinite(value))


def _mean(points: Sequence[dict[str, Any]], name: str) -> float | None:
    found = [point[name] for point in points if isinstance(point.get(name), (int, float))]
    return sum(found) / len(found) if found else None


def check_run(folder: Path) -> list[Finding]:
    """What the newest run in a report's folder says.

    Raises:
        OSError: its figures cannot be read.
        ValueError: there are none, or no step of them has a time.
    """
    history = History.read(folder)
    runs, odd = history.line(), history.passed_over
    parts = Parts.of(runs[-1]) if runs else None
    if parts is None:
        got = f"none in its newest run, of {len(runs[-1].points)} points" if runs else "none"
        raise ValueError(
            f"{str(folder)!r} must hold the figures of a run with a step's time, got {got}"
            f"{f' ({odd[0]})' if odd else ''}. Name the folder of `ScapeMonitor(report=...)`, and train for two of its"
            " intervals."
        )
    findings = [*judge(parts, runs[-1].title, runs[-1].exchanges), *_warming_up(runs[-1])]
    if odd:
        findings.append(Finding(TOPIC, "note", f"Lines that were passed over: {len(odd)}. {odd[0]}"))
    if runs[-1].about.get("device", "cpu") != "cpu":
        findings.append(Finding(TOPIC, "note", ON_THE_DEVICE))
    return findings


def _warming_up(run: Run) -> list[Finding]:
    """A word where the share of the entries that is sent still falls."""
    shares = [[v for name, v in point["metrics"].items() if name.endswith("/density")] for point in run.points]
    last = [max(each) for each in shares if each][-2:]
    if len(last) < 2 or not last[1] < last[0]:
        return []
    text = f"The warm-up is not over: the last step sent {last[1]:.0%} of the entries, later ones send less."
    return [Finding(TOPIC, "note", text, "Judge the network again after it.")]


def judge(parts: Parts, title: str, exchanges: bool) -> list[Finding]:
    """One line with all parts, and one for each that takes too much.

    Args:
        parts: of a step.
        title: of the method.
        exchanges: whether its ranks exchange after several steps.
    """
    less = "a larger `sync_every`" if exchanges else "a higher `sparsity`, fewer bits (`wire_dtype`), or SparseLoCo"
    rows = [
        ("computing", parts.computing, 2.0, ""),
        (
            "waiting for the network",
            parts.network,
            MUCH_NETWORK,
            f"Send less: {less}; or compute more between messages (a larger batch). {SLOWER_RANK}",
        ),
        (
            f"{title}'s own work",
            parts.own,
            MUCH_OWN,
            "On CPUs install numba (extra `cpu`); `lightning-scape plan` says whether dense training is faster here.",
        ),
        (
            "waiting for data",
            parts.data,
            MUCH_DATA,
            "Load beside the training: `DataLoader(num_workers=4, persistent_workers=True)`; read from a local disk.",
        ),
        (
            "saving checkpoints",
            parts.saving,
            MUCH_SAVING,
            "Save beside the training: `ScapeStrategy(async_save=True)`; or less often.",
        ),
    ]
    told = [(name, seconds) for name, seconds, _, _ in rows if seconds is not None]
    text = ", ".join(f"{show_seconds(seconds)} {name} ({seconds / parts.step:.0%})" for name, seconds in told)
    findings = [Finding(TOPIC, "ok", f"A step takes {show_seconds(parts.step)}: {text}.")]
    for name, seconds, much, remedy in rows:
        if seconds is not None and seconds >= much * parts.step:
            findings.append(Finding(TOPIC, "slow", f"{seconds / parts.step:.0%} of a step is {name}.", remedy))
    if len(findings) == 1:
        findings.append(Finding(TOPIC, "ok", "It computes nearly all the time: there is nothing to switch on."))
    return findings
