"""Files and directories that are whole or not there, and are checked before they are loaded. Nothing is executed.

Each is written under a hidden name beside its place, ``.NAME.<16 digits>.partial``, synced, and renamed. What a kill
leaves there goes with the next save to the same name. A directory that another one replaces is called ``.previous``
for that moment: no call replaces a directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import re
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

META = "meta.pt"
"""In a directory that is a complete checkpoint: all but the ranks' parts. Written last."""
_END = re.compile(r"\.[0-9a-f]{16}\.(partial|previous)")
_LONG_AGO = 24 * 3600.0
"""Seconds, after which a temporary is left behind where the file system has no locks."""
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
_OLDER = "Load an older checkpoint: `lightning_scape.newest_checkpoint(folder)` finds the newest that is complete."


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
    with explained(path):
        new = Temporary(path)
        try:
            write(content, new.path)
            new.take_place()
        finally:
            new.close()


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
            " the checkpoints before it are untouched. Free space there, get the right to write there, or save"
            " elsewhere: a directory must be where all ranks see it.",
        ) from error


class Temporary:
    """A new file or directory, which takes the place of ``path`` when it is complete.

    It is locked while its writer lives, so that another save to the name does not take it for one left behind.

    Args:
        path: its place.
        folder: whether it is a directory.

    Raises:
        OSError: it could not be made, or ``path`` is something that is no checkpoint.
    """

    def __init__(self, path: Path, folder: bool = False) -> None:
        self._target = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            _check_replaceable(path)
            for each in _temporaries(path):
                if each.suffix == ".partial" and not (each / META).exists() and _is_dead(each):
                    remove(each)
            self.path = _beside(path, "partial")
            (self.path.mkdir if folder else self.path.touch)()
            self._lock = os.open(self.path, os.O_RDONLY)
            _lock(self._lock)

    def take_place(self) -> None:
        """Renames what is complete. At every moment one complete checkpoint has a name."""
        target = self._target
        with _locked(target.parent) as folder:
            _check_replaceable(target)
            aside: Path | None = None
            if os.path.lexists(target) and (self.path.is_dir() or target.is_dir()):
                aside = target.rename(_beside(target, "previous"))
            try:
                os.replace(self.path, target)
            except OSError:
                if aside is not None:
                    os.rename(aside, target)
                raise
            with contextlib.suppress(OSError):
                os.fsync(folder)  # renames last through a power cut
            for each in _temporaries(target):
                if each.suffix == ".previous" or _is_dead(each):
                    remove(each)

    def close(self) -> None:
        """Ends the work. What has not taken its place is removed."""
        os.close(self._lock)  # first: a network's file system keeps what is open
        remove(self.path)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{_stem(path)}.{secrets.token_hex(8)}.{kind}")


def _stem(path: Path) -> str:
    """Under SLURM Lightning takes each name with "hpc_ckpt_" in it for a checkpoint to go on from."""
    return path.name.replace("hpc_ckpt_", "hpc-ckpt-")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """One save at a time makes or renames something in the folder, where its file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a forked process may have the handle, too
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Whether this process has the lock now; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_dead(entry: Path) -> bool:
    """Whether the writer of a temporary was killed."""
    try:
        handle = os.open(entry, os.O_RDONLY)
    except OSError:
        return False
    try:
        free = _lock(handle)
        return time.time() - os.fstat(handle).st_mtime > _LONG_AGO if free is None else free
    finally:
        os.close(handle)


def _temporaries(path: Path) -> list[Path]:
    start = f".{_stem(path)}"
    return [
        each for each in path.parent.iterdir() if each.name.startswith(start) and _END.fullmatch(each.name, len(start))
    ]


def finished_temporaries(folder: Path, pattern: str) -> Iterator[Path]:
    """Complete directories that a killed save has not put into their places, or has moved out of theirs."""
    for each in folder.glob(f".{_stem(Path(pattern))}.*.p*"):
        if _END.search(each.name) and (each / META).exists():
            yield each


def _check_replaceable(path: Path) -> None:
    """Raises ``OSError`` if a checkpoint would take the place of something that is none."""
    if path.is_dir() and ((path / META).exists() or not any(path.iterdir())):
        return
    if path.exists() and not path.is_file() and not path.is_symlink():
        raise IsADirectoryError(
            errno.EISDIR,
            f"A checkpoint must take a free name or that of another checkpoint, got {str(path)!r}, which is something"
            " else. Give the checkpoint another name",
        )


def remove(path: Path) -> None:
    """Removes a file or directory, if it is there; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
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
    with _archive(path) as archive:
        records = archive.infolist()
        damaged = archive.testzip() if whole else None
    if not records or min(each.header_offset for each in records):  # the end of an archive inside it
        raise _damage(path, "its end is missing")
    # Torch compresses none, and reads none well. Of one that says it is a folder it reads nothing, without an error.
    if any(each.compress_type or each.external_attr or each.is_dir() for each in records):
        raise _damage(path, "a record is compressed, or a folder")
    if whole and any(each.file_size for each in records) and not any(each.CRC for each in records):
        raise _unchecked(path, "one that was saved after torch.serialization.set_crc32_options(False)")
    if damaged is not None:
        raise _damage(path, f"{damaged} is not as it was written")


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """The file, opened; whatever goes wrong inside is damage: of a damaged file, zipfile raises many kinds."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except Exception as error:
        raise _damage(path, error) from error


def _unchecked(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(path)!r} must have checksums, got {got}. Load it by torch.load, and save it again by"
        " torch.save, with checksums."
    )


def _damage(path: Path, what: object) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(path)!r} ({path.stat().st_size} bytes) is torn, damaged, or no file of torch.save:"
        f" {what}. {_OLDER}"
    )


def load_file(path: Path, weights_only: bool | None = None, **options: Any) -> Any:
    """:func:`check`, then :func:`read`."""
    check(path)
    return read(path, weights_only, **options)


def read(path: Path, weights_only: bool | None = None, **options: Any) -> Any:
    """``torch.load`` into host memory.

    Args:
        path: of the file.
        weights_only: False lets the file execute code; None is torch's own default, True.
        options: others of ``torch.load``.

    Raises:
        CheckpointError: the file holds what ``weights_only`` does not read.
    """
    try:
        return torch.load(path, weights_only=weights_only, **{"map_location": "cpu", **options})
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {str(path)!r} must hold tensors, numbers, strings and containers of them, got what only"
            f" executing its code would load: {str(error).partition(chr(10))[0]} Trust a class of your own by"
            " torch.serialization.add_safe_globals; or, if you trust whoever made the file, give weights_only=False."
        ) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if weights_only is False:  # it may be the user's own
            raise
        raise _damage(path, str(error).partition("\n")[0]) from error
