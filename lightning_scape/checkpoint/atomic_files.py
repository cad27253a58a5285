"""Checkpoints on disk: each is whole or not there. Damage is found and named before anything is loaded.

A file is written beside its place, synced, and renamed into it (:mod:`.temporaries`). It ends with a seal, the CRC-32
of all its other bytes, in the zip archive's comment, which other readers pass over. A directory (:mod:`.dcp`) is
written likewise. Its ``manifest.json`` is written last, and lists its files with their digests. Both are loaded by
``weights_only``: a checkpoint never executes code. A stranger may have made it: only regular files are opened, in a
directory only those with a digest, and what a file says of its sizes is compared with the bytes that are there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from typing_extensions import Self

from lightning_scape.checkpoint import pickles
from lightning_scape.checkpoint.regular import CheckpointError as CheckpointError
from lightning_scape.checkpoint.regular import Slice, open_regular, size_of
from lightning_scape.checkpoint.temporaries import MANIFEST, check_replaceable, replacing
from lightning_scape.core.private_names import RecordReader

FORMAT = 1
_KIND = "lightning_scape sharded checkpoint"
_CHUNK = 1 << 22
_OLDER = "Load an older checkpoint: `lightning_scape.newest_checkpoint(folder)` finds the newest that is complete."


# ------------------------------------------------------------------------------------------------ writing


def save_file(content: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` that leaves either the whole new file or what was there before.

    Raises:
        OSError: the file could not be written; with what to do.
    """
    path = Path(path)
    check_replaceable(path)
    with explained_oserror(path), replacing(path) as file, SealedFile(file) as stream:
        torch.save(content, stream)
        stream.seal()


class Recorder:
    """A binary file that remembers why a write failed, and says so at the end: torch.save hides the reason."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.error is not None:
            raise self.error from None

    def write(self, data: Any) -> int:
        """As the file's."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SealedFile(Recorder):
    """A file that torch.save writes from its begin to its end, and that is then given its seal."""

    crc = 0

    def write(self, data: Any) -> int:
        """As the file's."""
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)

    def seal(self) -> None:
        """Appends the seal, and sets the length of the archive's comment, which stood there as 0."""
        self._file.seek(-2, os.SEEK_END)
        self._file.write(_SEAL_BYTES.to_bytes(2, "little") + _seal_of(self.crc))


_SEAL = b"lightning_scape crc32 "
_SEAL_BYTES = len(_SEAL) + 8
_END_OF_ARCHIVE = b"PK\x05\x06"
_END_BYTES = 22
"""Of the last record of a zip archive, the comment not counted; the comment's length is its last two bytes."""


def _seal_of(crc: int) -> bytes:
    return _SEAL + f"{crc:08x}".encode()


_A_FILE_ABOVE = "A file has the name of one of its folders: move that away, or save elsewhere."
_REMEDIES = {
    errno.ENOSPC: "Free space on that disk, or save elsewhere.",
    errno.EDQUOT: "Raise the quota, or save elsewhere.",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or save elsewhere.",
    errno.EACCES: "Give this user the right to write there, or save elsewhere.",
    errno.EEXIST: _A_FILE_ABOVE,
    errno.ENOTDIR: _A_FILE_ABOVE,
    errno.EROFS: "Save to a disk that is not mounted read-only.",
}


@contextlib.contextmanager
def explained_oserror(path: Path) -> Iterator[None]:
    """Adds to an OSError the checkpoint's path, and that earlier checkpoints are untouched."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Save elsewhere, or mend the disk.")
        raise OSError(
            error.errno or errno.EIO,
            f"The checkpoint {str(path)!r} could not be written: {error.strerror or error}. Nothing of it is left, and"
            f" the checkpoints before it are untouched. {remedy}",
        ) from error


# ------------------------------------------------------------------------------------------------ manifests


def digest(path: Path) -> str:
    """128 bits of BLAKE2b over a file."""
    total = hashlib.blake2b(digest_size=16)
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def describe_files(folder: Path, names: list[str]) -> dict[str, list[Any]]:
    """Size and digest of each file, for the manifest."""
    return {name: [(folder / name).stat().st_size, digest(folder / name)] for name in names}


def write_manifest(
    folder: Path, files: dict[str, list[Any]], world_size: int, tensors: dict[str, Any] | None = None
) -> None:
    """Marks the directory as complete; ``tensors`` is its index (:mod:`.index`)."""
    content = {"kind": _KIND, "format": FORMAT, "world_size": world_size, "files": files}
    if tensors is not None:
        content["tensors"] = tensors
    body = json.dumps(content, indent=1, sort_keys=True)
    seal = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    with replacing(folder / MANIFEST) as file:
        file.write(f"{body}\n{seal}\n".encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a sharded checkpoint. All its files are there and have their length; its index is not checked.

    Raises:
        CheckpointError: the directory is torn, damaged, foreign or newer.
    """
    try:
        with open_regular(folder / MANIFEST, inside=True) as file:
            body, _, seal = file.read().decode().removesuffix("\n").rpartition("\n")
    except FileNotFoundError:
        raise CheckpointError(_why_no_manifest(folder)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"The manifest of checkpoint {str(folder)!r} cannot be read: {error}. {_OLDER}"
        ) from error
    if hashlib.blake2b(body.encode(), digest_size=16).hexdigest() != seal:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is damaged: its manifest is not as it was written. {_OLDER}"
        )
    try:
        content = json.loads(body, object_pairs_hook=_without_repeats, parse_constant=_no_number)
        problem = _problem_of(content)
    except (ValueError, RecursionError) as error:
        problem = f"JSON that can be read, got {type(error).__name__}: {error}"
    if problem is not None:
        raise CheckpointError(f"The manifest of checkpoint {str(folder)!r} must hold {problem}. {_OLDER}")
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"The format of {str(folder)!r} must be at most {FORMAT}, got {content['format']}: a newer lightning_scape"
            " wrote it. Upgrade this installation."
        )
    for name, (size, _) in content["files"].items():
        found = size_of(folder / name)
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"The checkpoint {str(folder)!r} is torn: {name} {state}. {_OLDER}")
    return dict(content)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _problem_of(content: Any) -> str | None:
    """What a manifest must hold and does not."""
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        return f"the kind {_KIND!r}, got another one's"
    for name in ("format", "world_size"):
        value = content.get(name)
        if type(value) is not int or not 1 <= value < 2**31:
            return f"a whole number from 1 to 2**31 - 1 as `{name}`, got {str(value)[:100]}"
    if content["format"] > FORMAT:  # whose rules are others
        return None
    listed = content.get("files")
    if not isinstance(listed, dict):
        return f"a dict of files, got a {type(listed).__name__}"
    if len({name.casefold() for name in listed}) < len(listed):
        return "files that differ in more than upper and lower case, got two that do not"
    for name, described in listed.items():
        if not _PLAIN.fullmatch(name) or name in (".", "..") or name.casefold() == MANIFEST:
            return f"plain names of files in its folder, got {name[:100]!r}"
        if not isinstance(described, list) or [type(value) for value in described] != [int, str]:
            return f"a size and a digest of {name[:100]!r}, got something else"
        if described[0] < 0 or not _DIGEST.fullmatch(described[1]):
            return f"a size >= 0 and a digest of 32 digits of {name[:100]!r}, got others"
    return None


_PLAIN = re.compile(r"[^/\\\0\ud800-\udfff]{1,255}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def check_there(path: Path) -> None:
    """Raises ``FileNotFoundError`` unless something is at ``path``."""
    if not path.exists():
        raise FileNotFoundError(f"A checkpoint must be at {str(path)!r}, got nothing there. Check the path.")


def has_parts(folder: Path) -> bool:
    """Whether the directory holds what ``torch.distributed.checkpoint`` writes."""
    return (folder / ".metadata").exists() or any(folder.glob("*.distcp"))


def _why_no_manifest(folder: Path) -> str:
    if has_parts(folder):
        return (
            f"The checkpoint {str(folder)!r} is torn, or another strategy's: it has no {MANIFEST}, which is written"
            f" when all else is there. {_OLDER}"
        )
    return f"A sharded checkpoint must hold {MANIFEST}, got the directory {str(folder)!r} without it. Check the path."


def check_digests(folder: Path, manifest: dict[str, Any], part: int = 0, of: int = 1) -> None:
    """Reads every ``of``-th file, from the ``part``-th on, and compares it with its digest.

    Raises:
        CheckpointError: a file is not as it was written.
    """
    for name in sorted(manifest["files"])[part::of]:
        if digest(folder / name) != manifest["files"][name][1]:
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} is damaged: {name} is not as it was written (its digest differs)."
                f" {_OLDER}"
            )


# ------------------------------------------------------------------------------------------------ reading


def load_file(
    path: str | os.PathLike[str], map_location: Any = "cpu", inside: bool = False, weights_only: bool | None = None
) -> Any:
    """``torch.load``, after every byte was compared with the file's checksums.

    Args:
        path: of the file.
        map_location: as in ``torch.load``.
        inside: see :func:`open_regular`.
        weights_only: see :func:`only_weights`.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is torn, damaged, or holds what ``weights_only`` does not read.
    """
    path = Path(path)
    with open_regular(path, inside) as file:
        return load_stream(file, str(path), map_location, weights_only)


def only_weights(asked: bool | None) -> bool:
    """Whether a checkpoint may hold data alone. Else loading it executes code, as in torch, if the user trusts it.

    Args:
        asked: what the user says; None leaves it to torch's environment variable.
    """
    forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true")
    return not forced if asked is None else asked


def load_stream(file: BinaryIO, name: str, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
    """:func:`load_file` for an open file; ``name`` is for errors."""
    _check_whole(file, name)
    return _load(file, name, map_location, weights_only)


def load_part(file: BinaryIO, place: int, length: int, name: str) -> Any:
    """:func:`load_file` for some bytes of an open file, which have a digest of their own."""
    part = cast(BinaryIO, io.BufferedReader(Slice(file, place, length)))
    _check_records(part, name, length, compare=False)
    return _load(part, name, "cpu")


def read_pickle(path: Path, inside: bool = False) -> Any:
    """What the pickle of a file of ``torch.save`` says (:mod:`.pickles`); None if we cannot tell. Compares nothing.

    Raises:
        CheckpointError: the file is torn, damaged or none of torch.save.
        OSError: it cannot be read.
    """
    with open_regular(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        with _no_damage(str(path), size), zipfile.ZipFile(file) as archive:
            found = archive.infolist()
            if min(info.header_offset for info in found):  # zipfile looks for the last table that is whole
                raise ValueError("its end is missing, and what is found is the end of an archive inside it")
            (record,) = (info for info in found if info.filename.partition("/")[2] == "data.pkl")
            if record.compress_type or record.file_size > size:
                raise ValueError("its pickle is compressed")
            with contextlib.suppress(pickles.UnknownOpcode):
                return pickles.read(archive.read(record))
    return None


@contextlib.contextmanager
def _no_damage(name: str, size: int) -> Iterator[None]:
    """Inside, any error is one of the file: of a damaged one, its readers raise many kinds."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {name!r} ({size} bytes) is torn or damaged: {_first_line(error)} {_OLDER}"
        ) from error


def _load(file: BinaryIO, name: str, map_location: Any, weights_only: bool | None = True) -> Any:
    file.seek(0)
    if not only_weights(weights_only):
        return torch.load(file, map_location=map_location, weights_only=False)  # what it raises may be the user's
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {name!r} must hold tensors, numbers, strings and containers of them, got what only"
            f" executing its code would load: {_first_line(error)} Trust a class of your own by"
            " `torch.serialization.add_safe_globals([...])`, save what the class holds instead, or, if you trust the"
            " file, load it with `weights_only=False`."
        ) from error
    except Exception as error:  # torch raises whatever it trips over
        raise CheckpointError(
            f"The file {name!r} is no checkpoint of torch.save, or is damaged: {_first_line(error)} {_OLDER}"
        ) from error


def _check_whole(file: BinaryIO, name: str) -> None:
    """Compares a file with its seal. One without, of plain torch.save: each record with its CRC-32, if it has any."""
    file.seek(0)
    magic = file.read(4)
    size = file.seek(0, os.SEEK_END)
    if not size:
        raise CheckpointError(f"The checkpoint {name!r} is torn: it is empty. {_OLDER}")
    if magic != b"PK\x03\x04":
        raise CheckpointError(
            f"The file {name!r} must be a zip archive of torch.save, got one that starts with {magic!r}: another"
            f" program's, or damaged. {_OLDER}"
        )
    file.seek(max(0, size - _SEAL_BYTES))
    seal = file.read()
    sealed = seal.startswith(_SEAL)
    if sealed and seal != _seal_of(_crc_before(file, size - _SEAL_BYTES)):
        raise CheckpointError(
            f"The checkpoint {name!r} ({size} bytes) is damaged: it is not as it was written (CRC-32). {_OLDER}"
        )
    _check_records(file, name, size, compare=not sealed)


def _crc_before(file: BinaryIO, end: int) -> int:
    """CRC-32 of what torch wrote: it ended with 0 for the length of a comment. -1 if that is not the seal's now."""
    file.seek(0)
    crc, left = 0, end - 2
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    return zlib.crc32(b"\0\0", crc) if int.from_bytes(file.read(2), "little") == _SEAL_BYTES else -1


def _check_records(file: BinaryIO, name: str, size: int, compare: bool) -> None:
    """The zip archive's directory, and what its pickle says.

    Records are read by torch's own reader: where a directory is damaged, it may find other bytes than Python's does.
    ``compare`` also each record with its CRC-32, which torch writes and does not compare; else all has been compared.
    """
    file.seek(max(0, size - _END_BYTES))
    end = file.read()
    with _no_damage(name, size):
        with zipfile.ZipFile(file) as archive:
            listed = archive.infolist()
        records = {info.filename.partition("/")[2]: info for info in listed}
        if len(records) < len(listed) or sum(info.file_size for info in listed) > size:
            raise ValueError("its directory has a record twice, or larger ones than the file has room for")
        missing = "data.pkl" not in records
        # torch compresses no record. If one claims to be, torch's reader returns stale memory for it.
        packed = [n for n, info in records.items() if info.compress_type or info.compress_size != info.file_size]
        damaged = packed[0] if packed else None if missing else _damaged_record(file, records, compare)
    if damaged is not None:
        raise CheckpointError(
            f"The checkpoint {name!r} is damaged: its record {damaged!r} is not as it was written (CRC-32). {_OLDER}"
        )
    if missing:
        raise CheckpointError(
            f"The file {name!r} must be a checkpoint of torch.save, got a zip archive without `data.pkl`. Check the"
            " path."
        )
    if compare and not (end.startswith(_END_OF_ARCHIVE) and end.endswith(b"\0\0")):
        raise CheckpointError(
            f"The checkpoint {name!r} ({size} bytes) is torn or damaged: it must end with its seal, or as torch.save"
            f" ends a file, got {end[-8:]!r} at its end. {_OLDER}"
        )


def _damaged_record(file: BinaryIO, records: dict[str, zipfile.ZipInfo], compare: bool) -> str | None:
    """The first record that torch does not find, or whose CRC-32 is not the one written; None if all are well.

    Raises:
        ValueError: of what the pickle says.
    """
    file.seek(0)
    reader = RecordReader(file)
    names = reader.get_all_records()
    for name in sorted(set(names) ^ set(records)):
        return name
    for name in names if compare else ():
        if zlib.crc32(reader.get_record(name)) != records[name].CRC:
            return name
    with contextlib.suppress(pickles.UnknownOpcode):  # nor does torch know it
        pickles.read(reader.get_record("data.pkl"))
    return None


def _first_line(error: BaseException) -> str:
    # Before these words torch has advice, with a terminal's colours; after them what is wrong, and other advice.
    text = str(error).rpartition("WeightsUnpickler error: ")[2].partition(". Please use")[0].strip().splitlines()
    line = "".join(letter if letter.isprintable() else "?" for letter in text[0][:300]) if text else "no reason given"
    return f"{type(error).__name__}: {line.rstrip('.')}."
