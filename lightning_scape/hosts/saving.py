"""Whether a strategy's checkpoints are files or directories, and what is said if files hold up the training."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from lightning_scape.checkpoint.dcp import Moved
from lightning_scape.checkpoint.regular import open_regular
from lightning_scape.checkpoint.temporaries import NewFolder
from lightning_scape.comm.channel import asked
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.words import show_bytes, show_seconds

LONG_SHARE = 0.05
"""Share of the time of training that it may wait for checkpoints before that is said."""
ENOUGH_SECONDS = 10.0
"""Seconds of training before that is judged."""
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
        self._judged = False
        self._collected, self._moved = 0.0, 0
        self._since: float | None = None

    def begin_fit(self) -> None:
        """A fit begins: what an earlier one has waited for does not count."""
        self._since = None

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

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Around the messages that bring a state to rank 0, for which training waits."""
        began = time.perf_counter()
        yield
        self._collected += time.perf_counter() - began

    def advice(self, folder: Path | None, moved: Moved, instead: str = "") -> str | None:
        """After a file was saved, with several nodes: a sentence on what that costs, once. Collective.

        Judged by what was measured from the end of the first save on: a checkpoint may come as two files (the best, the
        last), and the first takes longer.

        Args:
            folder: of the file, the same on all ranks; None: not on this machine.
            moved: bytes of all checkpoints so far.
            instead: the remedy if the user cannot set a strategy's options.
        """
        if self._judged:
            return None
        now = time.perf_counter()
        if self._since is None:
            self._since, self._collected, self._moved = now, 0.0, moved.received
            return None
        trained = now - self._since - self._collected
        enough, long = trained >= ENOUGH_SECONDS, self._collected >= LONG_SHARE * trained
        self._judged, long = Communicator().all_gather_object((enough, long))[0]
        if not (self._judged and long):
            return None
        remedy = instead or "`async_save=True` collects and writes them beside training"
        if not instead and self._is_shared(folder):
            remedy += f'; `state_dict_type="sharded"` writes them where the ranks are, which all see {str(folder)!r}'
        return (
            f"In {show_seconds(trained)} of training ranks waited {show_seconds(self._collected)} for"
            f" {show_bytes(moved.received - self._moved)} of checkpoints to come to rank 0: {remedy}."
        )


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
