"""Whether a strategy's checkpoints are files or directories, and what is said where files hold the training up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from lightning_scape.checkpoint.dcp import Moved
from lightning_scape.checkpoint.shared_folder import is_shared
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.words import show_bytes, show_seconds

LONG_SHARE = 0.05
"""Of the time of training, which it may wait for checkpoints before that is said."""
ENOUGH_SECONDS = 10.0
"""Of training, before that is judged."""


StateDictType = Literal["full", "sharded", "auto"]


class Saving:
    """One strategy's.

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
        """What an earlier one has waited for does not count."""
        self._since = None

    def settle(self, folders: Sequence[Path | None], nodes: int) -> None:
        """With ``"auto"``: directories where several nodes see the same folder, which is tried once. Collective.

        Args:
            folders: where checkpoints go, the same on all ranks; None is not on this machine.
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
            folder: of the file, the same on all ranks; None is not on this machine.
            moved: bytes of all checkpoints so far.
            instead: the remedy where the user cannot set a strategy's options.
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
