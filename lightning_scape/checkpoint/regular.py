"""Only regular files are opened: a stranger may have put a pipe or a device in their place."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from lightning_scape.checkpoint.temporaries import kind_of


class CheckpointError(ValueError):
    """A checkpoint that is torn, damaged, foreign or newer than this package; names the file and what is wrong."""


def open_regular(path: Path, inside: bool = False) -> BinaryIO:
    """A regular file, opened for reading; opening a pipe would wait, and opening a device may do anything.

    Args:
        path: of the file.
        inside: it is one of a directory that is a checkpoint, and no symbolic link may lead out of that.

    Raises:
        FileNotFoundError: there is nothing.
        CheckpointError: it is something else.
    """
    mode = (path.lstat() if inside else path.stat()).st_mode
    if stat.S_ISREG(mode):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if inside else 0))
        file = open(handle, "rb")  # noqa: SIM115 - whoever reads it closes it
        mode = os.fstat(handle).st_mode  # it may be another one by now
        if stat.S_ISREG(mode):
            return file
        file.close()
    raise CheckpointError(
        f"{str(path)!r} must be a regular file, got {kind_of(mode)}. Give the checkpoint's own path; copy what a link"
        " of it leads to."
    )


def size_of(path: Path) -> int | None:
    """Of a regular file; None if there is none. What a symbolic link leads to is not one of the folder."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


class Slice(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, file: BinaryIO, place: int, length: int) -> None:
        self._file, self._place, self._length, self._at = file, place, length, 0

    def readinto(self, buffer: Any) -> int:  # noqa: D102 - as in the base class
        room = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._place + self._at)
        count = self._file.readinto(room)  # type: ignore[attr-defined]
        self._at += count
        return int(count)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # noqa: D102 - as in the base class
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def seekable(self) -> bool:  # noqa: D102 - as in the base class
        return True

    def readable(self) -> bool:  # noqa: D102 - as in the base class
        return True
