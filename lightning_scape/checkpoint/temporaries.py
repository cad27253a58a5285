"""A new file or directory is written beside its place, by a name that no other save uses, and then takes its place.

Several processes may save to one name at once: nobody writes into another one's file, each save that reports success
was whole in its place, and the last one stays. A temporary is locked while its writer lives. A later save to the same
name removes those that are not: their writers were killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

MANIFEST = "manifest.json"
"""In a directory that is a complete checkpoint."""
LOCKED = "README.txt"
"""In a directory that is being written: the file that its writer holds locked."""
_LONGEST_STEM = 200
"""Bytes; file systems allow 255 for a name."""
_END = re.compile(r"[0-9a-f]{16}\.(?P<kind>partial|previous)")
"""Of a temporary's name."""
_MOST_TURNS = 1000
_LONG_AGO = 24 * 3600.0
"""Seconds, after which a temporary is left behind where the file system has no locks."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of ``path``, synced, when the block ends. If it raises, nothing is left of it.

    Raises:
        OSError: the file could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_behind(path)
    file = _create(path)
    partial = Path(file.name)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            put_in_place(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


class NewFolder:
    """A new directory, which takes the place of ``path`` when it is complete.

    Raises:
        OSError: it could not be made.
    """

    def __init__(self, path: Path) -> None:
        self._target = path
        remove_left_behind(path)
        self._held = _create(path, inside=LOCKED)
        self.path = Path(self._held.name).parent

    def take_place(self) -> None:
        """Puts the finished directory where it belongs."""
        put_in_place(self.path, self._target)

    def close(self) -> None:
        """Ends the work. If the directory has not taken its place, it is removed."""
        self._held.close()  # first: a network's file system keeps a file that is open, and so its folder
        shutil.rmtree(self.path, ignore_errors=True)


def put_in_place(partial: Path, path: Path) -> None:
    """Renames a finished file or directory to ``path``. At every moment one complete checkpoint has a name.

    What was there is moved aside first where it, or what comes, is a directory: no call replaces those. Others may do
    the same at the same time; the last one stays.

    Raises:
        IsADirectoryError: something has come to ``path`` that is no checkpoint.
        OSError: the file system refuses.
    """
    # Not those that come later: what another save moves aside now may be this one.
    before, previous = list(_temporaries(path)), None
    try:
        for _ in range(_MOST_TURNS):
            try:
                os.replace(partial, path)
                break
            except OSError as error:
                if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
            check_replaceable(path)
            with contextlib.suppress(FileNotFoundError):  # another save has moved it
                aside = _beside(path, "previous")
                os.rename(path, aside)
                _remove(previous)
                previous = aside
        else:
            raise OSError(errno.EBUSY, f"{_MOST_TURNS} other saves to the same name came first")
    except BaseException:
        if previous is not None:
            with contextlib.suppress(OSError):
                if not path.exists():
                    os.rename(previous, path)
        raise
    sync_folder(path.parent)
    _remove(previous)
    for entry, kind in before:
        if kind == "previous":
            _remove(entry)
        else:
            _remove_if_left_behind(entry)


def check_replaceable(path: Path) -> None:
    """Raises ``OSError`` if a checkpoint would take the place of something that is none.

    Of a directory that holds other things (``IsADirectoryError``), or of a pipe, a socket or a device.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:  # nothing there, or writing tells why
        return
    if stat.S_ISDIR(mode):
        if _holds_other_things(path):
            raise IsADirectoryError(
                errno.EISDIR,
                f"A checkpoint must take a free name or that of another checkpoint, got the directory {str(path)!r},"
                " which holds other things. Give the checkpoint a name inside it.",
            )
    elif not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise OSError(
            errno.EINVAL,
            f"A checkpoint must take a free name or that of another checkpoint, got {str(path)!r}, which is"
            f" {kind_of(mode)}. Give it another name.",
        )


def _holds_other_things(folder: Path) -> bool:
    """Whether a directory is neither empty nor a checkpoint. Another save may move it meanwhile, or replace it."""
    manifest = folder / MANIFEST
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return not manifest.exists() and any(folder.iterdir()) and not manifest.exists()
    return False


_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(mode: int) -> str:
    """In words, for errors."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder last through a power cut; a no-op where folders cannot be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_left_behind(path: Path) -> None:
    """Removes what killed saves to ``path`` have left, but for complete checkpoints: there may be no other."""
    for entry, kind in _temporaries(path):
        if kind == "partial" and not (entry / MANIFEST).exists():
            _remove_if_left_behind(entry)


def _temporaries(path: Path) -> Iterator[tuple[Path, str]]:
    """Those of a path, each with its kind."""
    start = f".{_stem(path)}."
    with contextlib.suppress(OSError):
        for entry in list(path.parent.iterdir()):
            found = _END.fullmatch(entry.name, len(start)) if entry.name.startswith(start) else None
            if found is not None:
                yield entry, found["kind"]


def _remove_if_left_behind(partial: Path) -> None:
    """Removes a temporary that nobody holds, and holds it meanwhile: one just made is not locked yet."""
    held = partial / LOCKED if partial.is_dir() else partial
    try:
        if not stat.S_ISREG(held.lstat().st_mode):
            return
        handle = os.open(held, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:  # a directory that has just been made
        _remove_empty(partial)
        return
    except OSError:
        return
    try:
        free = _lock(handle)
        if free is None:
            free = time.time() - os.fstat(handle).st_mtime > _LONG_AGO
        if free:
            _remove(partial)
    finally:
        os.close(handle)
    _remove_empty(partial)  # a network's file system kept it, for the file that was open


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{_stem(path)}.{secrets.token_hex(8)}.{kind}")


def _stem(path: Path) -> str:
    name = os.fsencode(path.name)
    return path.name if len(name) <= _LONGEST_STEM else hashlib.blake2b(name, digest_size=16).hexdigest()


def _create(path: Path, inside: str | None = None) -> IO[bytes]:
    """A new file beside ``path``, or of the name ``inside`` in a new directory there; nobody else's, and locked."""
    for _ in range(_MOST_TURNS):
        name = _beside(path, "partial")
        if inside is not None:
            name.mkdir(parents=True)
            name /= inside
        try:
            file = open(name, "xb")  # noqa: SIM115 - whoever writes it closes it
        except FileNotFoundError:
            if inside is None:  # the folder is not there
                raise
            continue  # another save took the new directory for one left behind
        if _lock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another save took it for one left behind
    raise OSError(errno.EBUSY, f"{_MOST_TURNS} names for a temporary were taken")


def _lock(handle: int) -> bool | None:
    """Whether this process has the file's lock now; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove(entry: Path | None) -> None:
    """Removes a file or a directory; what cannot be removed stays."""
    if entry is None:
        return
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()
