"""How Lightning's hosts write and read one file, and what a Trainer's ranks do together when they save and load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_scape.checkpoint import files
from lightning_scape.checkpoint.saver import agreed
from lightning_scape.comm.collectives import Communicator
from lightning_scape.hosts.private_names import checkpoints, replace


class ScapeCheckpointIO(TorchCheckpointIO):
    """``torch.save`` files that are whole or not there, and are checked before they are loaded.

    The strategies' default; any other ``checkpoint_io`` takes its place. Stores (``s3://``) replace objects at once:
    Lightning writes and reads them.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or (local := files.local_path(path)) is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        files.save_file(checkpoint, local)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        if (local := files.local_path(path)) is None:
            safe = weights_only is not False  # which Lightning does not ask of a store
            return super().load_checkpoint(path, map_location, weights_only=safe)
        loaded: dict[str, Any] = files.load_file(local, weights_only, map_location=map_location)
        return loaded


def act_together(replaced: ExitStack, trainer: Trainer, before_save: Callable[[], None]) -> None:
    """Replaces two methods of a Trainer's connector, for what all ranks must do alike, until the stack is closed.

    Much of a save is the user's code (hooks on state dicts, callbacks' states, ``on_save_checkpoint``), between
    messages. What fails there on one rank is an error on all.
    """
    connector = checkpoints(trainer)
    dump, resume = connector.dump_checkpoint, connector.resume_start

    def dump_together(weights_only: bool | None = None) -> dict[str, Any]:
        before_save()
        checkpoint: dict[str, Any] = Communicator().raise_on_all_ranks(lambda: dump(weights_only))
        return checkpoint

    def resume_together(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        agreed(checkpoint_path, Communicator())  # Lightning has chosen it before ranks met, each by what it sees
        resume(checkpoint_path, weights_only)

    replace(replaced, connector, "dump_checkpoint", dump_together)
    replace(replaced, connector, "resume_start", resume_together)
