"""How Lightning's hosts read and write a checkpoint that is one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_scape.checkpoint import atomic_files as files


class ScapeCheckpointIO(TorchCheckpointIO):
    """``torch.save`` files that are whole or not there, checked before they are loaded, and never executed.

    The strategies' default; any other ``checkpoint_io`` takes its place. Paths that are no local files (``s3://``) are
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
        if weights_only is False:
            raise ValueError(
                "`weights_only` must be True or None under SCAPE, got False: a checkpoint never executes code. Trust"
                " single classes by `torch.serialization.add_safe_globals([...])`, or give the strategy"
                " `checkpoint_io=TorchCheckpointIO()`."
            )
        if not _is_local_file_protocol(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        if not os.path.exists(_local(path)):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        loaded: dict[str, Any] = files.load_file(_local(path), map_location)
        return loaded


def _local(path: _PATH) -> Path:
    return Path(str(path).removeprefix("file://"))
