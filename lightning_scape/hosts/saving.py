"""Whether a strategy's checkpoints are files or directories."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args

from lightning_scape.checkpoint.regular import open_regular
from lightning_scape.checkpoint.temporaries import NewFolder
from lightning_scape.comm.collectives import Communicator

T = TypeVar("T")
SECONDS = 5.0
"""A file system that takes longer for the few bytes of a trial counts as not shared."""
VISIBLE_SECONDS = 2.0
"""Seconds after which another machine sees what was written, at the latest."""


StateDictType = Literal["full", "sharded", "auto"]


class Saving:
    """How one strategy saves.

    Args:
        state_dict_type: as the user gives it.
    """

    def __init__(self, state_dict_type: StateDictType) -> None:
        if state_dict_type not in get_args(StateDictType):
            raise ValueError(
                '`state_dict_type` must be "full" (one file) or "sharded" (a directory), or "auto" (a directory where'
                f' several nodes see the same folder), got {state_dict_type!r}. Use "full" if unsure.'
            )
        self.asked = state_dict_type
        self.sharded = state_dict_type == "sharded"
        """Whether checkpoints are directories; with ``"auto"`` it is settled before each fit (Trainer) or save."""
        self._shared: dict[str, bool] = {}

    def settle(self, folders: Sequence[Path | None], nodes: int) -> None:
        """With ``"auto"``: directories where several nodes see the same folder, which is tried once. Collective.

        Args:
            folders: where checkpoints go, the same on all ranks; None: not on this machine.
            nodes: how many there are.
        """
        if self.asked == "auto":
            self.sharded = nodes > 1 and bool(folders) and all(map(self._is_shared, folders))

    def _is_shared(self, folder: Path | None) -> bool:
        if folder is None:
            return False
        known = str(folder)
        if known not in self._shared:
            self._shared[known] = is_shared(folder, Communicator())
        return self._shared[known]


def asked(ask: Callable[[], T], seconds: float) -> T | None:
    """The result of ``ask``, if it comes in time: a file system may not answer at all. None, too, if it fails."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else None


def is_shared(folder: Path, ranks: Communicator) -> bool:
    """Whether all ranks read and write in the same folder. Collective; the same on all ranks.

    A trial tells: the same path on two machines says nothing. Rank 0 leaves a random word in a new folder inside, the
    others read it there and leave it in files of their own. All of it is removed. If a file system refuses anything, or
    takes too long, the answer is no.

    Args:
        folder: rank 0's path counts; it is made if it is missing.
        ranks: all of them.
    """
    lead = ranks.rank == 0
    trial = asked(lambda: _new_inside(folder), SECONDS) if lead else None
    try:
        offered = None
        if trial is not None:
            path, word = trial.path, secrets.token_hex(16)
            offered = (str(path), word) if asked(lambda: _leave(path, 0, word), SECONDS) else None
        (offered, *_) = ranks.all_gather_object(offered)
        if offered is None:
            return False
        path, word = Path(offered[0]), offered[1]
        answered = lead or asked(lambda: _read(path, 0, word) and _leave(path, ranks.rank, word), SECONDS)
        if not all(ranks.all_gather_object(bool(answered))):
            return False
        seen = lead and asked(lambda: all(_read(path, rank, word) for rank in range(ranks.world_size)), SECONDS)
        return bool(ranks.all_gather_object(bool(seen))[0])
    finally:
        if trial is not None:
            asked(trial.close, SECONDS)


def _new_inside(folder: Path) -> NewFolder:
    end = time.monotonic() + SECONDS
    new = NewFolder(folder / "scape-trial")
    if time.monotonic() > end:  # nobody waits for it any more
        new.close()
        raise TimeoutError
    return new


def _leave(folder: Path, rank: int, word: str) -> bool:
    with open(folder / f"{rank}.txt", "x", encoding="ascii") as file:
        file.write(word)
    return True


def _read(folder: Path, rank: int, word: str) -> bool:
    """Whether a rank has left the word."""
    end = time.monotonic() + VISIBLE_SECONDS
    while True:
        with contextlib.suppress(FileNotFoundError), open_regular(folder / f"{rank}.txt", inside=True) as file:
            if file.read(2 * len(word)) == word.encode():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
