"""Looks at checkpoints on disk: whether one would load, and which is the newest that would."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.dcp import REST
from lightning_scape.checkpoint.index import is_size
from lightning_scape.checkpoint.pickles import Pairs, entry
from lightning_scape.checkpoint.rng import states_in
from lightning_scape.checkpoint.saver import SavedContent
from lightning_scape.checkpoint.temporaries import MANIFEST
from lightning_scape.comm.collectives import Communicator, is_distributed, new_group_like
from lightning_scape.core.method import names

_LONGEST_CHECK = timedelta(hours=1)


def verify(path: str | os.PathLike[str], weights_only: bool | None = None) -> None:
    """Reads a whole checkpoint, file or directory, as loading does, and fails where loading would.

    Every byte is compared with its checksum, and all that is in the checkpoint is loaded; no more than its largest
    tensor (of SparseLoCo, than one rank's part) is kept in memory. Whether it fits a model only the model can tell. Of
    a folder that LitGPT saved, its ``lit_model.pth``.

    Args:
        path: of the checkpoint.
        weights_only: False lets it execute code, as loading it so does; None leaves it to torch's environment variable.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: what is wrong with it.
    """
    path = checkpoint_in(Path(path))
    files.check_there(path)
    if path.is_dir():
        saved = SavedContent(path, weights_only=weights_only)
        for key in saved.directory.shapes():
            saved.directory.tensor(key)
        for rank in range(saved.directory.world_size if saved.optimizers else 0):
            states_in(saved.directory.tensor(f"rng.{rank}"))
        for shards in saved.optimizers.values():
            for key in (key for key, shape in shards.form.shapes(shards.common) if shape is None):
                shards.unpacked(key)
    else:
        files.load_file(path, _let_go, weights_only=weights_only)


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
    ``lit_model.pth`` in them; other folders are left out). The newest is the one of the latest step, as the checkpoint
    itself counts it: the Trainer's ``global_step``, else the steps of its optimizer of SCAPE or SparseLoCo, else an
    entry ``step``, ``step_count`` or ``iter_num``. Of one step, the last written; those that tell no step come after
    all that do. Reads each fully until one passes; those that do not, and those that cannot be read at all, are named
    in a warning. Writes that a crash cut short count only if they are complete (a directory may be, just before it
    takes its place). Call it on one rank, or before the launch.

    Args:
        folder: where checkpoints are.
        pattern: of their names, as in ``Path.glob``; ``"*.ckpt"`` is Lightning's.
        check: raises :class:`~lightning_scape.CheckpointError` or ``OSError`` for those to be passed over.

    Returns:
        Its path, or None.
    """
    return _newest(_newest_first(_candidates(Path(folder), pattern)), check)


def resume_path(
    *places: str | os.PathLike[str], pattern: str = "*", check: Callable[[Path], None] = verify
) -> Path | None:
    """The newest complete checkpoint in some places, the same on all ranks: what a restarted job goes on from.

    Collective, if there is a process group. Rank 0 looks, as :func:`newest_checkpoint` does, and tells the others, who
    wait for it as long as reading takes, up to an hour.

    Args:
        places: folders with checkpoints, and single checkpoints; what does not exist is left out. All of one run: what
            another run ended with, which counts its own steps, is to be loaded where this gives None.
        pattern: of names in the folders, as in ``Path.glob``; ``"*.ckpt"`` is Lightning's.
        check: raises :class:`~lightning_scape.CheckpointError` or ``OSError`` for those to be passed over.

    Returns:
        Its path; None if there is no checkpoint, and training begins.

    Raises:
        CheckpointError: there are checkpoints, and none of them loads; on every rank.
        FileNotFoundError: ranks see different files; on every rank. All must see the same, for the machine that rank 0
            ran on may be the one that is lost.
    """
    # A group of its own: the others wait for rank 0 longer than for a message of the training.
    group = new_group_like(backend="gloo", timeout=_LONGEST_CHECK) if is_distributed() else None
    ranks = Communicator(group)
    try:
        found = ranks.raise_on_all_ranks(
            lambda: _newest_first(path for place in map(Path, places) for path in _candidates_at(place, pattern))
        )
        mine = ranks.raise_on_all_ranks(lambda: _newest_of(found, check) if ranks.rank == 0 else None)
        chosen, by_rank_0 = ranks.all_gather_object((mine, found))[0]
        ranks.raise_on_all_ranks(lambda: _check_seen(ranks.rank, found, chosen, by_rank_0))
    finally:
        if group is not None:
            torch.distributed.destroy_process_group(group)
    return None if chosen is None else chosen.path


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=_modified, reverse=True)


class _Chosen(NamedTuple):
    path: Path
    size: int | None
    """In bytes, of a file."""


def _newest_of(found: list[Path], check: Callable[[Path], None]) -> _Chosen | None:
    chosen = _newest(found, check)
    if chosen is not None:
        return _Chosen(chosen, chosen.stat().st_size if chosen.is_file() else None)
    if found:
        listed = ", ".join(map(str, found))
        raise files.CheckpointError(
            f"Where there are checkpoints one of them must load, got {len(found)} and none that does: {listed}. The"
            " warnings say why. Mend what they name; to begin anew, move these away."
        )
    return None


def _check_seen(rank: int, found: list[Path], chosen: _Chosen | None, by_rank_0: list[Path]) -> None:
    """Raises ``FileNotFoundError`` if this rank and rank 0 see different files."""
    only_there = chosen
    if chosen is not None and chosen.path.exists() and chosen.size in (None, chosen.path.stat().st_size):
        only_there = None
    only_here = next((path for path in found[:1] if path not in by_rank_0), None)
    if only_there is not None or only_here is not None:
        sees, sees_not = (0, rank) if only_there is not None else (rank, 0)
        name = str(only_here if only_there is None else only_there.path)
        raise FileNotFoundError(
            f"All ranks must see the same checkpoints, got {name!r}, which rank {sees} sees"
            f" and rank {sees_not} does not, or sees another one of. Save to a file system that all machines share."
        )


def _newest(last_written_first: Iterable[Path], check: Callable[[Path], None]) -> Path | None:
    """The first that passes, by steps; a sort leaves those of one step as they came."""
    found: list[tuple[int, Path]] = []
    for path in last_written_first:
        try:
            step = step_of(path)
        except _UNREADABLE:
            if not _passes(path, check):
                continue
            step = None  # a file of a kind that only its user knows
        found.append((-1 if step is None else step, path))
    return next((path for _, path in sorted(found, key=lambda each: -each[0]) if _passes(path, check)), None)


_UNREADABLE = (files.CheckpointError, OSError, MemoryError, RuntimeError)
"""The last two: of a machine that has too little memory for a checkpoint."""


def _passes(path: Path, check: Callable[[Path], None]) -> bool:
    try:
        check(path)
    except _UNREADABLE as error:
        what = str(error) if str(path) in str(error) else f"{str(path)!r}: {type(error).__name__}: {error}"
        warnings.warn(f"Passed over: {what}", stacklevel=3)
        return False
    return True


def _candidates_at(place: Path, pattern: str) -> Iterator[Path]:
    inside = checkpoint_in(place)
    if (inside.exists() and not inside.is_dir()) or (inside / MANIFEST).exists():
        yield inside
    else:
        yield from _candidates(place, pattern)


def _candidates(folder: Path, pattern: str) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in map(checkpoint_in, folder.glob(pattern)):
        is_one = not path.is_dir() or (path / MANIFEST).exists() or files.has_parts(path)
        if is_one and not path.name.startswith("."):
            yield path
    *above, name = pattern.rsplit("/", 1)
    patterns = ["/".join([*above, f".{name}.*.{kind}"]) for kind in ("partial", "previous")]
    for unfinished in dict.fromkeys(path for each in patterns for path in folder.glob(each)):
        if unfinished.is_dir() and (unfinished / MANIFEST).exists():
            yield unfinished


def checkpoint_in(path: Path) -> Path:
    """The checkpoint in a folder that LitGPT saved, file or directory; any other path as it is."""
    inside = path / "lit_model.pth"
    return inside if inside.exists() else path


def _modified(path: Path) -> int:
    with contextlib.suppress(OSError):
        return (path / MANIFEST if path.is_dir() else path).stat().st_mtime_ns
    return 0


# ------------------------------------------------------------------------------------------------ steps


_OF_THE_TRAINER = "global_step"
_OF_USERS = ("step", "step_count", "iter_num")
"""Where no optimizer of ours is in a checkpoint; the last two are LitGPT's."""


def step_of(path: Path) -> int | None:
    """Optimizer steps behind a checkpoint, file or directory: the Trainer's count, the optimizers', or its user's.

    From its pickle alone: no tensor is read, and nothing is built.

    Returns:
        None if it has no such number.

    Raises:
        CheckpointError: it cannot be read; that it can is no proof that it is whole.
        OSError: likewise.
    """
    if path.is_dir():
        files.read_manifest(path)
        table = files.read_pickle(path / REST, inside=True)
        content, optimizers = entry(table, "rest"), entry(table, "optimizers")
    else:
        content = files.read_pickle(path)
        optimizers = content
    states = [value for _, value in optimizers] if isinstance(optimizers, Pairs) else []
    listed = entry(content, "optimizer_states")
    states += listed if type(listed) is list else []
    ours = [step for state in states for step in _steps_of(state)]
    counts = [entry(content, _OF_THE_TRAINER), max(ours, default=None), *(entry(content, name) for name in _OF_USERS)]
    return next((count for count in counts if is_size(count)), None)


def _steps_of(state: Any) -> Iterator[int]:
    """Of one optimizer: whole, its facts are a part of it; in a directory, they may be all of it."""
    bare = state if entry(state, "format") is not None and entry(state, "config") is not None else None
    for facts in (bare, *(entry(state, name) for name in names())):
        counts = (entry(facts, "step"), entry(entry(facts, "progress"), "steps"))
        yield from (step for step in counts if is_size(step))
