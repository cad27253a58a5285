"""A checkpoint that is a directory: each rank writes its own part, in parallel, by ``torch.distributed.checkpoint``.

::

    DIR/
      __0_0.distcp ... __{N-1}_0.distcp    each rank's tensors
      .metadata                            which file holds which chunk of which tensor
      meta.pt                              all that is not a tensor of the model or an optimizer (rank 0's)
      README.txt                           for who meets it with another strategy: what to run
      manifest.json                        size and digest of every file; written last

Ranks send each other plans, and no tensors. A tensor is cut into chunks along its first dimension. A rank that loads it
reads the chunks that it needs; the number of ranks may be another. The directory is written as ``.DIR.partial`` and
renamed when it is complete: ``DIR`` is whole or is not there. All ranks must see the same file system.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.comm.collectives import Communicator

REST = "meta.pt"
"""As in Lightning's own sharded checkpoints."""


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
    communicator.raise_on_all_ranks(lambda: files.check_replaceable(path))
    partial = files.partial_of(path)
    lead = communicator.rank == 0
    with files.explained_oserror(path):
        try:
            communicator.raise_on_all_ranks(lambda: _make_empty(partial) if lead else None)
            communicator.raise_on_all_ranks(lambda: _find(partial))
            own = _write_tensors(partial, tensors, communicator)
            listed = communicator.all_gather_object(own)
            communicator.raise_on_all_ranks(lambda: _complete(partial, path, rest, listed) if lead else None)
        except Exception:
            if lead:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _make_empty(folder: Path) -> None:
    if folder.exists():  # of a run that was killed
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _find(folder: Path) -> None:
    if not folder.is_dir():
        raise OSError(f"all ranks must see the folder {str(folder.parent)!r}, got one that does not")


def _write_tensors(folder: Path, tensors: Mapping[str, Chunk], communicator: Communicator) -> dict[str, list[Any]]:
    writer = FileSystemWriter(folder)
    writer.fs = _SpeakingFileSystem()
    try:
        with warnings.catch_warnings():  # that one process saves alone is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(
                dict(tensors),
                storage_writer=writer,
                planner=_ChunkSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=communicator.process_group,
                no_dist=communicator.world_size == 1,
            )
    except CheckpointException as error:  # the same on every rank: who failed, and with what
        rank, (cause, _) = sorted(error.failures.items())[0]
        reason = _oserror_in(cause)
        if reason is not None:
            raise OSError(reason.errno, f"{reason.strerror or reason} (on rank {rank})") from None
        raise
    mine = sorted(path.name for path in folder.glob(f"__{communicator.rank}_*.distcp"))
    described: dict[str, list[Any]] = communicator.raise_on_all_ranks(lambda: files.describe_files(folder, mine))
    return described


def _oserror_in(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


README = "README.txt"
_README = """\
This directory is one checkpoint, written by lightning_scape with state_dict_type="sharded".

With the strategy that wrote it (ScapeStrategy, SparseLoCoStrategy, or Fabric's), load it by its path: ckpt_path=...,
fabric.load(...). With any other strategy (ddp, ...), make it one file with AdamW's state first:

    lightning-scape consolidate --optimizer adamw THIS_DIRECTORY NEW_FILE

That takes what ScapeStrategy wrote. From SparseLoCo, load it and save it again with state_dict_type="full": other
strategies take that file as it is.
"""


def _complete(partial: Path, path: Path, rest: bytes, listed: Iterable[dict[str, list[Any]]]) -> None:
    for name, content in ((REST, rest), (README, _README.encode())):
        with open(partial / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    everything = files.describe_files(partial, [".metadata", REST, README])
    world_size = 0
    for own in listed:
        everything |= own
        world_size += 1
    files.write_manifest(partial, everything, world_size)
    files.replace_folder(partial, path)


class _SpeakingFileSystem(FileSystem):
    """Tells why a write failed: torch.save, which writes through it, would hide the reason."""

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:  # noqa: D102 - as in the base class
        return _SpeakingStream(path, mode)


class _SpeakingStream:
    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        self._path, self._mode = path, mode

    def __enter__(self) -> Any:
        self._file: Any = open(self._path, self._mode)  # noqa: SIM115 - closed in __exit__
        self._recorder = files.Recorder(self._file)
        return self._recorder

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._file.close()
        except OSError as late:
            self._recorder.error = self._recorder.error or late
        if self._recorder.error is not None:
            raise self._recorder.error from None


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

    Raises:
        CheckpointError: it is torn, damaged, foreign or newer; on every rank.
    """

    def __init__(self, path: str | os.PathLike[str], communicator: Communicator | None = None) -> None:
        self.path = Path(path)
        communicator = communicator or Communicator.alone()
        self.manifest = communicator.raise_on_all_ranks(lambda: files.read_manifest(self.path))
        communicator.raise_on_all_ranks(
            lambda: files.check_digests(self.path, self.manifest, communicator.rank, communicator.world_size)
        )
        self._reader = _Reader(self.path)
        self._metadata = communicator.raise_on_all_ranks(self._reader.read_metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return int(self.manifest["world_size"])

    def rest(self) -> Any:
        """The content of ``meta.pt``."""
        return files.load_file(self.path / REST)

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """The shapes of tensors by key, for the keys with this prefix."""
        found = self._metadata.state_dict_metadata.items()
        return {
            key: tuple(entry.size)
            for key, entry in found
            if isinstance(entry, TensorStorageMetadata) and key.startswith(prefix)
        }

    def find(self, key: str) -> Tensor | None:
        """A tensor's shape and dtype, as a tensor on ``meta``; None if there is none."""
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def read(self, targets: Mapping[str, Chunk]) -> None:
        """Fills the chunks' tensors, in place; converts dtypes.

        Raises:
            CheckpointError: a key is not there, or its tensor is of another size (nothing has been read then), or what
                is there is no tensor.
        """
        items: list[ReadItem] = []
        for key, chunk in targets.items():
            entry = self._metadata.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata) or entry.size != chunk.size:
                found = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else "nothing"
                raise files.CheckpointError(
                    f"The checkpoint {str(self.path)!r} must hold {key!r} of shape {tuple(chunk.size)}, got {found}."
                    " Load it into the same model."
                )
            items += create_read_items_for_chunk_list(key, entry, [chunk.place])
        try:
            self._reader.read_data(LoadPlan(items), _ChunkLoadPlanner(targets)).wait()
        except OSError:
            raise
        except Exception as error:  # torch raises whatever it trips over
            raise files.CheckpointError(
                f"The checkpoint {str(self.path)!r} must hold tensors, got what cannot be read as one:"
                f" {type(error).__name__}: {error}. Load another checkpoint."
            ) from error

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


class _ChunkLoadPlanner(DefaultLoadPlanner):
    def __init__(self, targets: Mapping[str, Chunk]) -> None:
        super().__init__()
        self.state_dict = dict(targets)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target: Tensor = self.state_dict[read_item.dest_index.fqn].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are planned for; the base class would execute what it reads")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Without executing anything, which the base class would."""
        path = Path(self.path) / ".metadata"
        with open(path, "rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
                assert isinstance(metadata, Metadata)
            except Exception as error:
                raise files.CheckpointError(
                    f"{str(path)!r} must be an index of torch.distributed.checkpoint, got what cannot be read as one:"
                    f" {type(error).__name__}: {error}. Load another checkpoint."
                ) from error
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the dataclasses of torch's index, dtypes and sizes, and nothing else."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
            "_StorageInfo",
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if module in self._MODULES and name in self._NAMES:
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if module.split(".")[0] == "pathlib" and name in ("Path", "PosixPath", "PurePosixPath"):
            return Path
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def as_bytes(content: Any) -> bytes:
    """``content`` as torch.save writes it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
