"""Files and directories that are whole or not there, and are checked before they are loaded. Nothing is executed.

Each is written under a hidden name beside its place, ``.NAME.<16 digits>.partial``, synced, and renamed. A directory in
its way is called ``.previous`` for that moment, for no call replaces a directory: at every moment one that is complete
has a name. What a kill leaves of both goes with the next save to the same name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import math
import os
import pickle
import secrets
import shutil
import stat
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

META = "meta.pt"
"""In a directory that is a complete checkpoint: all but the ranks' parts. Written last."""
_LONG_AGO = 24 * 3600.0
"""Seconds, after which a temporary is left behind where the file system has no locks."""
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"


class CheckpointError(ValueError):
    """A checkpoint is torn, damaged or of something else; names the file and what is wrong."""


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Absolute, ``~`` being the user's home; None if it is at a store (``s3://``)."""
    local = os.fspath(path).removeprefix("file://")
    return None if "://" in local else Path(local).expanduser().absolute()


# ------------------------------------------------------------------------------------------------ writing


def save_file(content: Any, path: Path) -> None:
    """``torch.save`` that leaves either the whole new file or what was there before.

    Raises:
        OSError: the file could not be written; with what to do.
    """
    with explained(path), replacing(path) as new:
        write(content, new)


def write(content: Any, path: Path) -> None:
    """``torch.save`` with checksums, whatever the user has set, and synced."""
    checksums: Any = config.patch({"save.compute_crc32": True})  # type: ignore[attr-defined]  # made when torch runs
    with checksums, open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch raises one more while it handles that of a write
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Adds to an OSError the checkpoint's path, and that earlier checkpoints are untouched."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO,
            f"The checkpoint {str(path)!r} could not be written: {error.strerror or error}. Nothing of it is left, and"
            " the checkpoints before it are untouched. Free space there, get the right to read and write there, or save"
            " elsewhere: a directory must be where all ranks see it.",
        ) from error


@contextlib.contextmanager
def replacing(path: Path, folder: bool = False) -> Iterator[Path]:
    """Gives a new file or directory, which takes the place of ``path`` if the block ends without an error.

    Args:
        path: its place.
        folder: whether it is a directory.

    Raises:
        OSError: it could not be made or renamed, or ``path`` is something that is no checkpoint.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_replaceable(path)
    new, parent = _beside(path, "partial"), os.open(path.parent, os.O_RDONLY)
    aside = hidden(path.parent, glob.escape(path.name), "previous")  # left behind, or of a save that is not complete
    try:
        _remove_left(hidden(path.parent, glob.escape(path.name), "partial"), parent)
        (new.mkdir if folder else new.touch)()
        yield new
        while True:
            try:
                os.replace(new, path)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR):
                    raise
                with contextlib.suppress(FileNotFoundError):  # another save has moved it
                    _check_replaceable(path)
                    aside.append(path.rename(_beside(path, "previous")))
        with contextlib.suppress(OSError):
            os.fsync(parent)  # renames last through a power cut
        for each in aside:
            remove(each)
    finally:
        remove(new)
        if aside and not os.path.lexists(path):
            with contextlib.suppress(OSError):
                aside[-1].rename(path)
        with contextlib.suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_UN)  # else it lasts as long as processes that were forked meanwhile
        os.close(parent)


def _remove_left(partials: list[Path], folder: int) -> None:
    """Removes what killed saves have left, unless another save into the folder is under way; then says that one is."""
    dead = math.inf
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # another save's, or of a file system without locks
        dead = 0.0 if isinstance(error, BlockingIOError) else time.time() - _LONG_AGO
    for partial in partials:
        with contextlib.suppress(OSError):  # another save has removed it
            if partial.stat().st_mtime < dead:
                remove(partial)
    with contextlib.suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_SH)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{_stem(path.name)}.{secrets.token_hex(8)}.{kind}")


def _stem(name: str) -> str:
    """Under SLURM Lightning takes each name with "hpc_ckpt_" in it for a checkpoint to go on from."""
    return name.replace("hpc_ckpt_", "hpc-ckpt-")


def hidden(folder: Path, pattern: str, kind: str) -> list[Path]:
    """What saves to names of a pattern have beside them now, or have left when they were killed."""
    return [*folder.glob(f".{_stem(pattern)}.{'[0-9a-f]' * 16}.{kind}")]


def _check_replaceable(path: Path) -> None:
    """Raises ``OSError`` if a checkpoint would take the place of something that is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it is free, or another save moves it meanwhile
        mode = path.stat().st_mode
        names = os.listdir(path) if stat.S_ISDIR(mode) else [META]
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)) or (names and META not in names):
            raise IsADirectoryError(
                errno.EISDIR,
                f"A checkpoint must take a free name or that of another checkpoint, got {str(path)!r}, which is"
                " something else. Give the checkpoint another name",
            )


def remove(path: Path) -> None:
    """Removes a file or directory, if it is there; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)  # leaves files and links alone
    with contextlib.suppress(OSError):
        path.unlink()


# ------------------------------------------------------------------------------------------------ reading


def check(path: Path, whole: bool = True) -> None:
    """Compares every record with its CRC-32, which torch.save writes and torch.load does not compare.

    Args:
        path: of the file.
        whole: False looks at its ends alone: it was written to the end.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is torn or damaged, has no checksums, or is none of torch.save.
    """
    with open(path, "rb") as file:
        if file.read(len(_OLD_FORMAT)) == _OLD_FORMAT:
            raise _unchecked(path, "one of torch's old format, which has none")
        try:
            archive = zipfile.ZipFile(file)
            records, damaged = archive.infolist(), archive.testzip() if whole else None
        except Exception as error:  # of a damaged file, zipfile raises many kinds
            raise _damage(path, error) from error
    if not records or min(each.header_offset for each in records):  # the end of an archive inside it
        raise _damage(path, "its end is missing")
    # Torch compresses none, and reads none well. Of one that says it is a folder it reads nothing, without an error.
    if any(each.compress_type or each.external_attr or each.is_dir() for each in records):
        raise _damage(path, "a record is compressed, or a folder")
    if whole and any(each.file_size for each in records) and not any(each.CRC for each in records):
        raise _unchecked(path, "one that was saved after torch.serialization.set_crc32_options(False)")
    if damaged is not None:
        raise _damage(path, f"{damaged} is not as it was written")


def _unchecked(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(path)!r} must have checksums, got {got}. Load it by torch.load, and save it again by"
        " torch.save, with checksums."
    )


def _damage(path: Path, what: object) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(path)!r} ({path.stat().st_size} bytes) is torn, damaged, or no file of torch.save:"
        f" {what}. Load an older one: `lightning_scape.newest_checkpoint(folder)` finds the newest that is complete."
    )


def load_file(path: Path, weights_only: bool | None = None, checked: bool = True, **options: Any) -> Any:
    """``torch.load`` into host memory.

    Args:
        path: of the file.
        weights_only: False lets the file execute code; None is torch's own default, True.
        checked: whether :func:`check` comes first.
        options: others of ``torch.load``.

    Raises:
        CheckpointError: the file is damaged, or holds what ``weights_only`` does not read.
    """
    if checked:
        check(path)
    try:
        return torch.load(path, weights_only=weights_only, **{"map_location": "cpu", **options})
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {str(path)!r} must hold tensors, numbers, strings and containers of them, got what only"
            f" executing its code would load: {str(error).partition(chr(10))[0]} Trust a class of your own by"
            " torch.serialization.add_safe_globals; or, if you trust whoever made the file, give weights_only=False."
        ) from error
    except Exception as error:
        if isinstance(error, (OSError, MemoryError)) or weights_only is False:  # it may be the user's own
            raise
        raise _damage(path, str(error).partition("\n")[0]) from error
