"""Where a checkpoint is: what hosts are given as its path, read as Lightning reads it."""

from __future__ import annotations

import os
from pathlib import Path


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Of a file or directory, absolute, ``~`` being the user's home; None if it is at a store (``s3://``).

    What is written in the background goes where the process was when it was asked for.
    """
    local = os.fspath(path).removeprefix("file://")
    return None if "://" in local else Path(local).expanduser().absolute()


def directory_path(path: str | os.PathLike[str]) -> Path:
    """Of a directory, to be written or read.

    Raises:
        ValueError: it is at a store.
    """
    local = local_path(path)
    if local is None:
        raise ValueError(
            'A checkpoint with state_dict_type="sharded" must be at a path that all machines share, got'
            f' {os.fspath(path)!r}. Save there with state_dict_type="full", or to a shared file system.'
        )
    return local
