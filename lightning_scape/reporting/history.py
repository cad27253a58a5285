"""The figures of all runs in a folder: ``figures.jsonl``, one line of JSON each, to which lines are only ever added.

So nothing is lost: not by a crash (what was written is there), not by a run that goes on from a checkpoint, and not by
one that starts again in the same folder. Four kinds of lines, in the order of time::

    {"kind": "run", "step": 0, "time": ..., "method": "scape", "ranks": 2, "strategy": "...", ...}
    {"kind": "point", "step": 50, "time": ..., "loss": 2.31, "step_seconds": 0.12, "metrics": {"scape/density": 0.5}}
    {"kind": "validation", "step": 50, "time": ..., "metrics": {"val_loss": 2.4}}
    {"kind": "end", "step": 60, "time": ..., "how": "finished"}

Steps are optimizer steps since the training began; a run that goes on from a checkpoint begins where that was saved.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIGURES = "figures.jsonl"
"""Name of the file in the report's folder."""


@dataclass
class Run:
    """One fit."""

    start: int = 0
    """Optimizer steps that were done before it."""
    about: dict[str, Any] = field(default_factory=dict)
    """Its first line: ``time`` (seconds since 1970), ``method``, ``ranks``, ``strategy``, ``version``."""
    points: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    """Its last line; None if it is still going on, or was killed."""

    @property
    def last_step(self) -> int:
        """The last step of which something is known."""
        lines = [*self.points[-1:], *self.validations[-1:], *([self.end] if self.end else [])]
        return max([self.start, *(int(line["step"]) for line in lines)])


@dataclass
class History:
    """All runs of a folder, the oldest first."""

    runs: list[Run] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are no JSON: at most the last one of each run that was killed while it wrote."""

    @classmethod
    def read(cls, folder: Path) -> History:
        """Reads ``figures.jsonl``; a folder without it has no runs."""
        history = cls()
        path = folder / FIGURES
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
                kind, _ = line["kind"], int(line["step"])
            except (ValueError, TypeError, KeyError):
                history.unreadable += bool(text.strip())
                continue
            history._add(kind, line)
        return history

    def _add(self, kind: str, line: dict[str, Any]) -> None:
        if kind == "run" or not self.runs:
            self.runs.append(Run(int(line["step"]), line if kind == "run" else {}))
        run = self.runs[-1]
        if kind == "point":
            run.points.append(line)
        elif kind == "validation":
            run.validations.append(line)
        elif kind == "end":
            run.end = line

    def line(self) -> list[Run]:
        """The newest run and those that it goes on from, the oldest first, each only up to where the next one begins.

        Example: of the runs from 0 to 60, from 0 to 100, and from 80 to 120, the last two, the first of them up to 80.
        """
        kept: list[Run] = []
        until = None
        for run in reversed(self.runs):
            if until is None:
                kept.append(run)
            elif run.start < until:
                kept.append(_up_to(run, until))
            else:
                continue  # it began where, or after, the one that is kept did: replaced by that
            until = run.start
            if not until:
                break
        return kept[::-1]

    def others(self) -> list[Run]:
        """The runs that are not in :meth:`line`."""
        starts = {id(run.about) for run in self.line()}
        return [run for run in self.runs if id(run.about) not in starts]


def _up_to(run: Run, step: int) -> Run:
    points, validations = (
        [line for line in lines if int(line["step"]) <= step] for lines in (run.points, run.validations)
    )
    return Run(run.start, run.about, points, validations, run.end)


class Writer:
    """Adds lines to a folder's figures; each is on its way to the disk before the call returns.

    Raises:
        OSError: the folder cannot be made, or not be written to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FIGURES
        with open(self.path, "ab") as file:
            torn = file.tell() > 0 and not _ends_with_newline(self.path)
            if torn:  # a process that was killed while it wrote; the next line must not be part of that one
                file.write(b"\n")

    def add(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line.

        Args:
            kind: see above.
            step: optimizer steps so far.
            values: what JSON can hold.
        """
        line = json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values})
        with open(self.path, "ab", buffering=0) as file:  # in one call: another run may add lines at the same time
            file.write(f"{line}\n".encode())


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def metrics_of(points: list[dict[str, Any]], name: str) -> Iterator[tuple[str, list[float], list[float]]]:
    """A figure over steps: prefix of the optimizer (``scape``, ``scape-1``), steps, values; one for each optimizer.

    Args:
        points: of one or several runs, in order.
        name: of the figure, without prefix: ``density``.
    """
    prefixes = dict.fromkeys(key.partition("/")[0] for point in points for key in point["metrics"])
    for prefix in prefixes:
        found = [(point["step"], point["metrics"].get(f"{prefix}/{name}")) for point in points]
        known = [(step, value) for step, value in found if value is not None]
        if known:
            steps, values = zip(*known, strict=True)
            yield prefix, list(steps), list(values)


def total(point: Mapping[str, Any], name: str) -> float:
    """The sum of a figure over all optimizers."""
    return float(sum(value for key, value in point["metrics"].items() if key.partition("/")[2] == name))
