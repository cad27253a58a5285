"""Whether all ranks see the same folder. Tried: the same path on two machines says nothing."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from lightning_scape.checkpoint.regular import open_regular
from lightning_scape.checkpoint.temporaries import NewFolder
from lightning_scape.comm.channel import asked
from lightning_scape.comm.collectives import Communicator

SECONDS = 5.0
"""A file system that takes longer for one of the trial's few bytes counts as one that is not shared."""
VISIBLE_SECONDS = 2.0
"""So much later another machine may see what was written."""


def is_shared(folder: Path, ranks: Communicator) -> bool:
    """Whether all ranks read and write in the same folder. Collective; the same on all ranks.

    Rank 0 leaves a random word in a new folder inside, the others read it there and leave it in files of their own.
    All of it is removed. What a file system refuses, or does not do in time, is a no.

    Args:
        folder: rank 0's path holds; it is made where it is not there.
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
