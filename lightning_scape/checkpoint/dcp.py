"""A checkpoint that is a directory: each rank writes its own part, in parallel, by ``torch.distributed.checkpoint``.

::

    DIR/
      __0_0.distcp ... __{N-1}_0.distcp    each rank's tensors
      .metadata                            which file holds which rows of which tensor, for torch's own reader
      meta.pt                              all that is not a tensor of the model or an optimizer (rank 0's)
      README.txt                           for who meets it with another strategy: what to run
      manifest.json                        size and digest of every file, and what torch's index says (:mod:`.index`),
                                           which is what we read; written last

Ranks send each other plans, and no tensors. A tensor is cut into chunks along its first dimension. A rank that loads it
reads the chunks that it needs; the number of ranks may be another. The directory is written beside its place, and is
renamed when it is complete (:mod:`.temporaries`): ``DIR`` is whole or is not there. All ranks must see the same file
system.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint import index
from lightning_scape.checkpoint.regular import open_regular
from lightning_scape.checkpoint.temporaries import LOCKED, NewFolder, check_replaceable
from lightning_scape.comm.collectives import Communicator

REST = "meta.pt"
"""As in Lightning's own sharded checkpoints."""
_INDEX = ".metadata"
"""Torch's."""


class Chunk(NamedTuple):
    """Rows ``[offset, offset + len(tensor))`` of a tensor of ``length`` rows; a tensor without dimensions is one row.

    It is saved, or a load fills it.
    """

    tensor: Tensor
    offset: int
    length: int

    @classmethod
    def whole(cls, tensor: Tensor) -> Chunk:
        """All of a tensor, the same on every rank (one of them writes it), or this rank's alone."""
        return cls(tensor, 0, len(tensor) if tensor.dim() else 1)

    @property
    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size((self.length, *self.tensor.shape[1:])) if self.tensor.dim() else torch.Size(())

    @property
    def place(self) -> ChunkStorageMetadata:
        """Where in the whole tensor it is."""
        shape = self.tensor.shape
        return ChunkStorageMetadata(torch.Size((self.offset, *(0 for _ in shape[1:]))[: len(shape)]), shape)

    def meets(self, first: int, rows: int) -> bool:
        """Whether it has any of these rows of the whole tensor."""
        return max(first, self.offset) < min(first + rows, self.offset + self._rows)

    def fill(self, rows: Tensor, first: int) -> None:
        """Takes its own from some rows of the whole tensor, which begin with row ``first``."""
        if not self.tensor.dim():
            self.tensor.detach().copy_(rows)
            return
        begin, end = max(first, self.offset), min(first + len(rows), self.offset + self._rows)
        own = self.tensor.detach()[begin - self.offset : end - self.offset]
        own.copy_(rows[begin - first : end - first])

    @property
    def _rows(self) -> int:
        return len(self.tensor) if self.tensor.dim() else 1

    def copied(self) -> Chunk:
        """The same in host memory of its own, for a write that goes on while training does."""
        return self._replace(tensor=self.tensor.detach().to("cpu", copy=True))


# ------------------------------------------------------------------------------------------------ writing


def write_directory(path: Path, tensors: Mapping[str, Chunk], rest: bytes, communicator: Communicator) -> None:
    """Writes a sharded checkpoint, in place of what is at ``path``. Collective.

    Args:
        path: the same on all ranks, on a file system that all ranks see.
        tensors: this rank's chunks, by key. A chunk of the same key and offset on several ranks is written once.
        rest: content of ``meta.pt``; rank 0's is written.
        communicator: the ranks, over a group that works in host memory.

    Raises:
        IsADirectoryError: ``path`` is a directory that is no checkpoint.
        OSError: on every rank, if any could not write. What was at ``path`` is untouched, nothing else is left.
    """
    communicator.raise_on_all_ranks(lambda: check_replaceable(path))
    lead = communicator.rank == 0
    with files.explained_oserror(path):
        new = communicator.raise_on_all_ranks(lambda: NewFolder(path) if lead else None)
        try:
            folder = Path(communicator.all_gather_object(str(new.path) if new is not None else "")[0])
            communicator.raise_on_all_ranks(lambda: _find(folder))
            writer = _Writer(folder)
            own = _write_tensors(writer, tensors, communicator)
            listed = communicator.all_gather_object(own)
            communicator.raise_on_all_ranks(
                lambda: _complete(new, rest, listed, writer.index) if new is not None else None
            )
        finally:
            if new is not None:
                new.close()


def _find(folder: Path) -> None:
    if not folder.is_dir():
        raise OSError(f"all ranks must see the folder {str(folder.parent)!r}, got one that does not")


class _Writer(FileSystemWriter):
    """Torch's, which also gives its index (on rank 0)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _SpeakingFileSystem()
        self.folder = folder
        self.index: dict[str, Any] = {}

    def finish(self, metadata: Metadata, results: Any) -> None:  # noqa: D102 - as in the base class
        super().finish(metadata, results)
        self.index = index.of_torch(metadata, results)


def _write_tensors(writer: _Writer, tensors: Mapping[str, Chunk], communicator: Communicator) -> dict[str, list[Any]]:
    planner = _ChunkSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():  # that one process saves alone is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(
                dict(tensors),
                storage_writer=writer,
                planner=planner,
                process_group=communicator.process_group,
                no_dist=communicator.world_size == 1,
            )
    except CheckpointException as error:  # the same on every rank: who failed, and with what
        rank, (cause, _) = sorted(error.failures.items())[0]
        reason = _oserror_in(cause)
        if reason is not None:
            raise OSError(reason.errno, f"{reason.strerror or reason} (on rank {rank})") from None
        raise
    mine = sorted(path.name for path in writer.folder.glob(f"__{communicator.rank}_*.distcp"))
    described: dict[str, list[Any]] = communicator.raise_on_all_ranks(lambda: files.describe_files(writer.folder, mine))
    return described


def _oserror_in(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


_README = """\
This directory is one checkpoint, written by lightning_scape with state_dict_type="sharded".

With the strategy that wrote it, load it by its path: ckpt_path=..., fabric.load(...). With any other strategy (ddp,
...), make it one file with AdamW's state first:

    lightning-scape consolidate --optimizer adamw THIS_DIRECTORY NEW_FILE
"""


def _complete(new: NewFolder, rest: bytes, listed: Sequence[dict[str, list[Any]]], tensors: dict[str, Any]) -> None:
    for name, content in ((REST, rest), (LOCKED, _README.encode())):
        with open(new.path / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    everything = files.describe_files(new.path, [_INDEX, REST, LOCKED])
    for own in listed:
        everything |= own
    index.checked(tensors, {name: size for name, (size, _) in everything.items()})  # as whoever loads it will
    files.write_manifest(new.path, everything, len(listed), tensors)
    new.take_place()


class _SpeakingFileSystem(FileSystem):
    """Tells why a write failed: torch.save, which writes through it, would hide the reason."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # noqa: D102 - as in the base class
        with open(path, mode) as file, files.Recorder(file) as recorder:
            yield recorder


class _ChunkSavePlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(key, chunk) for key, chunk in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        chunk: Chunk = self.state_dict[index.fqn]
        return chunk.tensor


def _write_item(key: str, chunk: Chunk) -> WriteItem:
    properties = TensorProperties(dtype=chunk.tensor.dtype)
    data = TensorWriteData(chunk.place, properties, chunk.size)
    return WriteItem(MetadataIndex(key, chunk.place.offsets), WriteItemType.SHARD, tensor_data=data)


# ------------------------------------------------------------------------------------------------ reading


class Directory:
    """A sharded checkpoint, found complete. Reads no tensor until asked.

    Args:
        path: the directory.
        communicator: the ranks, each of which checks its share of the digests; None checks all of them here.
        weights_only: see :func:`~lightning_scape.checkpoint.atomic_files.only_weights`.

    Raises:
        CheckpointError: it is torn, damaged, foreign or newer; on every rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        communicator: Communicator | None = None,
        weights_only: bool | None = None,
    ) -> None:
        self.path, self.weights_only = Path(path), weights_only
        communicator = communicator or Communicator.alone()
        self.manifest = communicator.raise_on_all_ranks(lambda: files.read_manifest(self.path))
        communicator.raise_on_all_ranks(
            lambda: files.check_digests(self.path, self.manifest, communicator.rank, communicator.world_size)
        )
        self._index = communicator.raise_on_all_ranks(self._read_index)

    def _read_index(self) -> dict[str, index.Entry]:
        sizes = {name: size for name, (size, _) in self.manifest["files"].items()}
        try:
            return index.checked(self.manifest.get("tensors"), sizes)
        except ValueError as error:
            raise files.CheckpointError(
                f"The manifest of {str(self.path)!r} must hold an index of tensors, got what is none: {error}. Load"
                " another checkpoint."
            ) from error

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return int(self.manifest["world_size"])

    def rest(self) -> Any:
        """The content of ``meta.pt``."""
        if REST not in self.manifest["files"]:
            raise files.CheckpointError(
                f"The manifest of {str(self.path)!r} must list {REST}, got one that does not. Load another checkpoint."
            )
        return files.load_file(self.path / REST, inside=True, weights_only=self.weights_only)

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """The shapes of tensors by key, for the keys with this prefix."""
        return {key: tuple(entry.shape) for key, entry in self._index.items() if key.startswith(prefix)}

    def find(self, key: str) -> Tensor | None:
        """A tensor's shape and dtype, as a tensor on ``meta``; None if there is none."""
        entry = self._index.get(key)
        return None if entry is None else torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def read(self, targets: Mapping[str, Chunk]) -> None:
        """Fills the chunks' tensors, in place; converts dtypes.

        Raises:
            CheckpointError: a key is not there, or its tensor is of another size (nothing has been read then), or what
                is there is no tensor of the kind that the index speaks of.
        """
        wanted: list[tuple[index.Part, str]] = []
        for key, chunk in targets.items():
            entry = self._index.get(key)
            if entry is None or entry.shape != chunk.size:
                raise files.CheckpointError(
                    f"The checkpoint {str(self.path)!r} must hold {key!r} of shape {tuple(chunk.size)}, got"
                    f" {'nothing' if entry is None else tuple(entry.shape)}. Load it into the same model."
                )
            wanted += [(part, key) for part in entry.parts if chunk.meets(part.first, part.rows)]
        for name, group in itertools.groupby(sorted(wanted), key=lambda each: each[0].file):
            with open_regular(self.path / name, inside=True) as file:
                for part, key in group:
                    targets[key].fill(self._load(file, part, key), part.first)

    def _load(self, file: BinaryIO, part: index.Part, key: str) -> Tensor:
        entry, name = self._index[key], f"{self.path / part.file}, {key}"
        loaded = files.load_part(file, part.place, part.length, name)
        shape = (part.rows, *entry.shape[1:]) if entry.shape else ()
        got = type(loaded).__name__
        if type(loaded) in (Tensor, torch.nn.Parameter):
            kind = (loaded.dtype, tuple(loaded.shape), loaded.layout, loaded.device.type)
            if kind == (entry.dtype, shape, torch.strided, "cpu"):
                return cast(Tensor, loaded.detach())
            got = f"one of {kind}"
        raise files.CheckpointError(
            f"{name!r} must hold a tensor of {entry.dtype} {shape}, got {got}. Load another checkpoint."
        )

    def tensor(self, key: str) -> Tensor:
        """One whole tensor, in host memory."""
        found = self.find(key)
        if found is None:
            raise files.CheckpointError(
                f"The checkpoint {str(self.path)!r} must hold {key!r}, got none. Load another checkpoint."
            )
        tensor = torch.empty_like(found, device="cpu")
        if tensor.numel():
            self.read({key: Chunk.whole(tensor)})
        return tensor


def as_bytes(content: Any) -> bytes:
    """``content`` as torch.save writes it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
