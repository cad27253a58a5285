"""Looks at checkpoints on disk: whether one would load, and which is the newest that would."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint import packed
from lightning_scape.checkpoint.saver import SavedContent
from lightning_scape.comm.collectives import Communicator


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
    return _newest(_candidates(Path(folder), pattern), check)


def resume_path(
    *places: str | os.PathLike[str], pattern: str = "*", check: Callable[[Path], None] = verify
) -> Path | None:
    """The newest complete checkpoint in some places, the same on all ranks: what a restarted job goes on from.

    Collective, if there is a process group. Rank 0 looks, as :func:`newest_checkpoint` does, and tells the others.

    Args:
        places: folders with checkpoints, and single checkpoints; what does not exist is left out.
        pattern: of names in the folders, as in ``Path.glob``; ``"*.ckpt"`` is Lightning's.
        check: raises :class:`~lightning_scape.CheckpointError` or ``OSError`` for those to be passed over.

    Returns:
        Its path; None if there is no complete one, and training begins.

    Raises:
        FileNotFoundError: a rank does not see the checkpoint that another one sees; on every rank. All ranks must see
            the same files: the machine that rank 0 ran on may be the one that is lost.
    """
    ranks = Communicator(None, None)
    found = [path for place in map(Path, places) for path in _candidates_at(place, pattern)]
    chosen = ranks.raise_on_all_ranks(lambda: _newest(found, check) if ranks.rank == 0 else None)
    told: tuple[Path | None, list[Path]] = ranks.all_gather_object((chosen, found))[0]
    ranks.raise_on_all_ranks(lambda: _check_seen(ranks.rank, found, *told))
    return told[0]


def _check_seen(rank: int, found: list[Path], chosen: Path | None, by_rank_0: list[Path]) -> None:
    """Raises ``FileNotFoundError`` if this rank and rank 0 see different files."""
    unseen = chosen if chosen is not None and not chosen.exists() else None
    only_here = found[0] if found and not by_rank_0 else None
    if unseen is not None or only_here is not None:
        sees, sees_not = (0, rank) if unseen is not None else (rank, 0)
        raise FileNotFoundError(
            f"All ranks must see the same checkpoints, got {str(unseen or only_here)!r}, which rank {sees} sees and"
            f" rank {sees_not} does not. Save to a file system that all machines share."
        )


def _newest(candidates: Iterable[Path], check: Callable[[Path], None]) -> Path | None:
    for path in sorted(candidates, key=_modified, reverse=True):
        try:
            check(path)
        except (files.CheckpointError, OSError) as error:
            warnings.warn(f"Passed over: {error}", stacklevel=3)
            continue
        return path
    return None


def _candidates_at(place: Path, pattern: str) -> Iterator[Path]:
    inside = _checkpoint_in(place)
    if inside.is_file() or (inside / files.MANIFEST).exists():
        yield inside
    else:
        yield from _candidates(place, pattern)


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
