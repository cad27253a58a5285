"""How Lightning's hosts read and write a checkpoint that is one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_scape.checkpoint import files


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
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        loaded: dict[str, Any] = files.load_file(local, weights_only, map_location=map_location)
        return loaded
