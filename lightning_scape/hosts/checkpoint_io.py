"""How Lightning's hosts read and write a checkpoint that is one file."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.saver import is_directory


class ScapeCheckpointIO(TorchCheckpointIO):
    """``torch.save`` files that are whole or not there, checked before they are loaded.

    Nothing in them is executed, unless who loads one asks for that by ``weights_only=False``; ours never need it. The
    strategies' default; any other ``checkpoint_io`` takes its place. Paths that are no local files (``s3://``) are
    written and read as Lightning does, whose stores replace objects at once.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        files.save_file(checkpoint, _local(path))

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Any | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if not _is_local_file_protocol(path):
            return super().load_checkpoint(path, map_location, weights_only=weights_only is not False)
        if not os.path.exists(_local(path)):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        loaded: dict[str, Any] = files.load_file(_local(path), map_location, weights_only=weights_only is not False)
        return loaded


def explain_directories() -> None:
    """A sharded checkpoint that is given to Lightning's ``load_from_checkpoint`` gets an error that says what to do.

    A module and a data module have this method. It opens the file itself and asks no plugin of a strategy, of which it
    knows none: so Lightning's own function is replaced, once.
    """
    from lightning.pytorch.core import saving

    load = getattr(saving, "pl_load", None)
    if load is None or hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def explained_load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, (str, os.PathLike)) and is_directory(path_or_url):
            raise IsADirectoryError(
                f"load_from_checkpoint needs a checkpoint that is one file, got the sharded one {str(path_or_url)!r}, a"
                f" directory. Make it a file by `lightning-scape consolidate {path_or_url} one-file.ckpt`, or load it"
                " by `trainer.test(model, ckpt_path=...)` (validate, predict, fit)."
            )
        return load(path_or_url, *args, **kwargs)

    vars(saving)["pl_load"] = explained_load


def _local(path: _PATH) -> Path:
    return Path(str(path).removeprefix("file://"))
