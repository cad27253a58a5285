"""The figures of all runs in a folder: ``figures.jsonl``, one line of JSON each, to which lines are only ever added.

So nothing is lost: not by a crash (what was written is there), not by a run that goes on from a checkpoint, and not by
one that starts again in the same folder. Four kinds of lines, in the order of time::

    {"kind": "run", "step": 0, "time": ..., "method": "scape", "ranks": 2, "strategy": "...", ...}
    {"kind": "point", "step": 50, "time": ..., "loss": 2.31, "step_seconds": 0.12, "metrics": {"scape/density": 0.5}}
    {"kind": "validation", "step": 50, "time": ..., "metrics": {"val_loss": 2.4}}
    {"kind": "end", "step": 60, "time": ..., "how": "finished", "metrics": {"scape/bytes_run": 1234567.0}}

Steps are optimizer steps since the training began; a run that goes on from a checkpoint begins where that was saved. A
line of another shape, such as the last one of a process that was killed as it wrote, is passed over, and is told of.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_scape.reporting.words import plain

FIGURES = "figures.jsonl"
"""Name of the file in the report's folder."""
TITLES = {"scape": "SCAPE", "sparseloco": "SparseLoCo"}
"""By method, where its first line gives none."""
MOST_STEPS = 2**53
"""Above it a drawing, which counts in floating point, would mix up steps."""
END_OF_TIME = 253402300799
"""The year 9999, with which calendars end."""


@dataclass
class Run:
    """One fit."""

    start: int = 0
    """Optimizer steps that were done before it."""
    about: dict[str, Any] = field(default_factory=dict)
    """Its first line: ``time`` (seconds since 1970), ``method``, ``ranks``, ``strategy``, ``version``; of a method that
    is not known here ``title``, and ``unit`` (``"exchange"``, else a step), too."""
    points: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    """Its last line; None if it is still going on, or was killed."""

    @property
    def title(self) -> str:
        """Of its method."""
        return plain(self.about.get("title") or TITLES.get(self.about.get("method", ""), "Training"), 40)

    @property
    def exchanges(self) -> bool:
        """Whether its ranks send in an exchange after several steps, in place of in every step."""
        return self.about.get("unit") == "exchange" or self.about.get("method") == "sparseloco"

    @property
    def last_step(self) -> int:
        """The last step of which something is known."""
        lines = [*self.points[-1:], *self.validations[-1:], *([self.end] if self.end else [])]
        return max([self.start, *(int(line["step"]) for line in lines)])


@dataclass
class History:
    """All runs of a folder, the oldest first."""

    runs: list[Run] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    """A sentence on each line that is not as above; of runs that were killed while they wrote, one each is usual."""

    @classmethod
    def read(cls, folder: Path) -> History:
        """Reads ``figures.jsonl``; a folder without it has no runs.

        Raises:
            OSError: it cannot be read.
        """
        history = cls()
        path = folder / FIGURES
        if not path.exists():
            return history
        _check_regular(path)
        for number, text in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").split("\n"), 1):
            if text.strip():
                try:
                    history._add(parsed(text))
                except ValueError as error:
                    history.passed_over.append(f"{path}, line {number}: {error}")
        return history

    def _add(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "run" or not self.runs:
            self.runs.append(Run(line["step"], line if kind == "run" else {}))
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


def parsed(text: str) -> dict[str, Any]:
    """One line, its numbers as Python's: each has the fields that its kind has above, and any others.

    Raises:
        ValueError: it has not; says which.
    """
    try:
        line: Any = json.loads(text)
    except (ValueError, RecursionError):  # the second: nested a thousand deep
        raise ValueError("it must be JSON, and whole. It may have been cut as a process was killed.") from None
    if not isinstance(line, dict):
        raise ValueError(f"it must be an object, got {_shown(line)}.")
    kind = line.get("kind")
    if kind not in ("run", "point", "validation", "end"):
        raise ValueError(f"`kind` must be 'run', 'point', 'validation' or 'end', got {_shown(kind)}.")
    step = _number(line, "step")
    if step is None or not 0 <= step <= MOST_STEPS or step != int(step):
        raise ValueError(f"`step` must be a whole number from 0 to 2**53, got {_shown(line.get('step'))}.")
    line["step"] = int(step)
    seconds = _number(line, "time")
    if seconds is not None and not 0 <= seconds <= END_OF_TIME:
        raise ValueError(f"`time` must be in seconds since 1970, got {_shown(seconds)}.")
    if kind == "run" and not isinstance(line.get("method", ""), str):
        raise ValueError(f"`method` must be a name, got {_shown(line['method'])}.")
    if kind == "point":
        line |= {name: _number(line, name) for name in ("loss", "step_seconds")}
    if kind in ("point", "validation") or "metrics" in line:
        metrics = line.get("metrics")
        if not isinstance(metrics, dict):
            raise ValueError(f"`metrics` must be an object, got {_shown(metrics)}.")
        line["metrics"] = {name: value for name in metrics if (value := _number(metrics, name)) is not None}
    return line


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    try:
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return None if value is None else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        pass
    raise ValueError(f"`{plain(name, 80)}` must be a number, got {_shown(value)}.")


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return repr(plain(value, 40)) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _up_to(run: Run, step: int) -> Run:
    points, validations = ([line for line in lines if line["step"] <= step] for lines in (run.points, run.validations))
    return Run(run.start, run.about, points, validations, run.end)


class Writer:
    """Adds lines to a folder's figures; each is on its way to the disk before the call returns.

    Raises:
        OSError: the folder cannot be made, or not be written to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FIGURES
        _check_regular(self.path)
        with open(self.path, "ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # of a process that was killed while it wrote: the next line is no part of it
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


def _check_regular(path: Path) -> None:
    """Raises ``OSError`` for a pipe, say, at which reading would wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} must be a file, got something else of that name. Move it away.")


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


def last_values(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each metric, in the order in which they came."""
    return {name: value for line in lines for name, value in line["metrics"].items()}
