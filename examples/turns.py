"""Runs that go on in turns, a part of each at a time, while the others are stopped; no script of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

WAIT_SECONDS = 0.1
"""Between two looks at whose turn it is."""


class Turns:
    """Lets runs go on one after the other, a part of each at a time, once all are ready for their first.

    Each rank leaves a file where it is ready, and where its part ends; and one that holds its processes' numbers, as
    long as others may stop it.

    Args:
        folder: of these files.
        run: this one; one of ``runs``.
        runs: in their order.
        rank: of ``ranks``, each of which runs all.
        timeout: seconds that a run waits for its turn.
    """

    def __init__(self, folder: Path, run: str, runs: list[str], rank: int, ranks: int, timeout: float) -> None:
        self._folder, self._rank, self._ranks, self._timeout = folder, rank, ranks, timeout
        self._number, self._runs = runs.index(run) - len(runs), len(runs)
        """Of the part that is to begin, among those of all runs; below 0 none begins yet."""
        self._processes = folder / f"{run}-{rank}.processes"
        self._processes.write_text(f"{os.getpid()} {os.getppid()}")  # with torchrun's

    def begin(self) -> None:
        """Waits until all ranks have ended the parts before this one."""
        if self._number < 0:
            self.end()
        deadline = time.monotonic() + self._timeout
        for number, rank in itertools.product(range(-self._runs, self._number), range(self._ranks)):
            while not self._file(number, rank).exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"its turn must come within {self._timeout:g} s, got none: another has failed")
                time.sleep(WAIT_SECONDS)

    def end(self) -> None:
        """The next one's turn."""
        self._file(self._number, self._rank).touch()
        self._number += self._runs

    def leave(self) -> None:
        """Before the end of the last part: this rank is not stopped any more."""
        self._processes.unlink()

    def _file(self, number: int, rank: int) -> Path:
        return self._folder / f"{number}-{rank}"


def stop_all_but_one(folder: Path, runs: list[str], ranks: int) -> None:
    """Of the runs that take turns (:class:`Turns`), stops those that wait, and lets the one go on whose turn it is."""
    parts: dict[str, int] = {}
    for place, run in enumerate(runs):
        number = place - len(runs)
        while all((folder / f"{number}-{rank}").exists() for rank in range(ranks)):
            number += len(runs)
        parts[run] = number
    processes = {path: path.name.rpartition("-")[0] for path in folder.glob("*.processes")}
    turn = min((parts[run] for run in processes.values()), default=0)
    for path, run in processes.items():
        stopped = 0 <= parts[run] != turn  # below 0 a run is being set up
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in map(int, path.read_text().split()):
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
