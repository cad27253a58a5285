"""A Trainer's checkpoint before it is written: put together by all ranks, of data alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_scape.checkpoint.paths import directory_path
from lightning_scape.checkpoint.saver import RNG, SavedContent, host_checkpoint, is_directory
from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.together import Together
from lightning_scape.hosts.private_names import checkpoints
from lightning_scape.hosts.schedulers import as_data, with_live


class Dump(Together):
    """Takes the place of ``dump_checkpoint`` of a Trainer's connector.

    Much of it is the user's code (hooks on state dicts, callbacks' states, ``on_save_checkpoint``), between messages
    that collect optimizer states. What fails there on one rank is an error on all, at the next :meth:`agree`.
    """

    _connector: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Takes its place, for this fit and what is saved after it."""
        self._connector = checkpoints(trainer)
        self._connector.dump_checkpoint = self

    def __call__(self, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning would have given, schedulers' states as data. Collective."""
        with self.inside():
            checkpoint: dict[str, Any] = type(self._connector).dump_checkpoint(self._connector, weights_only)
            if "lr_schedulers" in checkpoint:
                checkpoint["lr_schedulers"] = [as_data(state) for state in checkpoint["lr_schedulers"]]
        return checkpoint


def restore_schedulers(checkpoint: Any, schedulers: list[Any]) -> None:
    """Makes a loaded checkpoint's states of schedulers such that these take them up as they are."""
    states = checkpoint.get("lr_schedulers", [])
    for place, (scheduler, state) in enumerate(zip(schedulers, states, strict=False)):
        states[place] = with_live(scheduler, state)


def load_dump(
    path: str | Path,
    read: Callable[[], dict[str, Any]],
    group: Callable[[], Communicator],
    weights_only: bool | None = None,
) -> tuple[dict[str, Any], Tensor | None]:
    """A checkpoint, file or directory, and this rank's random number generators in it. Collective.

    Args:
        path: of the checkpoint.
        read: reads it, if it is a file.
        group: gives the ranks, on a group that works in host memory.
        weights_only: as Lightning's; for a directory.

    Raises:
        Exception: what any rank has met; on every rank.
    """
    ranks = Communicator(None, None)
    if not is_directory(path, ranks):
        checkpoint = ranks.raise_on_all_ranks(read)
        states = checkpoint.pop(RNG, [])
        return checkpoint, states[ranks.rank] if len(states) == ranks.world_size else None
    saved = SavedContent(directory_path(path), group(), weights_only)
    return ranks.raise_on_all_ranks(lambda: (host_checkpoint(saved), saved.rng(ranks.rank, ranks.world_size)))
