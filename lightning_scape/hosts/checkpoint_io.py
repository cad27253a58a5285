"""How Lightning's hosts read and write a checkpoint that is one file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.paths import local_path
from lightning_scape.checkpoint.saver import is_directory
from lightning_scape.hosts.private_names import replace_reader


class ScapeCheckpointIO(TorchCheckpointIO):
    """``torch.save`` files that are whole or not there, checked before they are loaded.

    Nothing in them is executed, unless the caller asks for that by ``weights_only=False``; our files never need it. The
    strategies' default; any other ``checkpoint_io`` takes its place. Paths that are no local files (``s3://``) are
    written and read by Lightning: such stores replace objects at once.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or (local := local_path(path)) is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        files.save_file(checkpoint, local)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if (local := local_path(path)) is None:
            return super().load_checkpoint(path, map_location, weights_only=files.only_weights(weights_only))
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        loaded: dict[str, Any] = files.load_file(local, map_location, weights_only=weights_only)
        return loaded


def _explained(load: Callable[..., Any]) -> Callable[..., Any]:
    """A sharded checkpoint that is given to Lightning's ``load_from_checkpoint`` gets an error that says what to do."""

    @functools.wraps(load)
    def explained_load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, (str, os.PathLike)) and is_directory(path_or_url):
            raise IsADirectoryError(
                f"load_from_checkpoint needs a checkpoint that is one file, got the sharded one {str(path_or_url)!r}, a"
                f" directory. Make it a file by `lightning-scape consolidate {path_or_url} one-file.ckpt`, or load it"
                " by `trainer.test(model, ckpt_path=...)` (validate, predict, fit)."
            )
        return load(path_or_url, *args, **kwargs)

    return explained_load


replace_reader(_explained)
