"""Looks at checkpoints on disk: whether one would load, and which is the newest that would."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint import packed
from lightning_scape.checkpoint.saver import SavedContent


def verify(path: str | os.PathLike[str]) -> None:
    """Reads a whole checkpoint, file or directory, as loading does, and fails where loading would.

    Every byte is compared with its checksum, and all that is in the checkpoint is loaded; no more than its largest
    tensor (of SparseLoCo, than one rank's part) is kept in memory. Whether it fits a model only the model can tell. Of
    a folder that LitGPT saved, its ``lit_model.pth``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: what is wrong with it.
    """
    path = _checkpoint_in(Path(path))
    files.check_there(path)
    if path.is_dir():
        saved = SavedContent(path)
        for key in saved.directory.shapes():
            saved.directory.tensor(key)
        for shards in saved.optimizers.values():
            for _ in packed.parts(shards):  # unpickled, as loading does
                pass
    else:
        files.load_file(path, _let_go)


_KEPT = 1 << 26
"""Bytes. Longer memory than this comes fresh from the system, and takes none until it is written to."""


def _let_go(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
    """Memory of the same length in place of what was read, so that a tensor of a wrong shape is still an error."""
    return storage if storage.nbytes() <= _KEPT else torch.UntypedStorage(storage.nbytes())


def newest_checkpoint(
    folder: str | os.PathLike[str], pattern: str = "*", *, check: Callable[[Path], None] = verify
) -> Path | None:
    """The newest checkpoint in a folder that is complete and undamaged, to resume from after a crash.

    Looks at files and directories right in the folder that match ``pattern`` (of LitGPT's ``step-...`` folders, at the
    ``lit_model.pth`` in them; other folders are left out), newest modification first, and reads each fully until one
    passes; those that do not are named in a warning. Writes that a crash cut short count only if they are complete (a
    directory may be, just before it takes its place). Call it on one rank, or before the launch.

    Args:
        folder: where checkpoints are.
        pattern: of their names, as in ``Path.glob``; ``"*.ckpt"`` is Lightning's.
        check: raises :class:`~lightning_scape.CheckpointError` or ``OSError`` for those to be passed over.

    Returns:
        Its path, or None.
    """
    for path in sorted(_candidates(Path(folder), pattern), key=_modified, reverse=True):
        try:
            check(path)
        except (files.CheckpointError, OSError) as error:
            warnings.warn(f"Passed over: {error}", stacklevel=2)
            continue
        return path
    return None


def _candidates(folder: Path, pattern: str) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in map(_checkpoint_in, folder.glob(pattern)):
        is_one = not path.is_dir() or (path / files.MANIFEST).exists() or files.has_parts(path)
        if is_one and not path.name.startswith("."):
            yield path
    for unfinished in (*folder.glob(f".{pattern}.partial"), *folder.glob(f".{pattern}.previous")):
        if unfinished.is_dir() and (unfinished / files.MANIFEST).exists():
            yield unfinished


def _checkpoint_in(path: Path) -> Path:
    """The checkpoint in a folder that LitGPT saved, file or directory; any other path as it is."""
    inside = path / "lit_model.pth"
    return inside if inside.exists() else path


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):
        return (path / files.MANIFEST if path.is_dir() else path).stat().st_mtime_ns
    return 0
