"""Which bytes of which file hold which rows of which tensor: the index of a sharded checkpoint.

It is plain data in ``manifest.json``, under ``tensors``, and checked as a whole before a byte of a tensor is read::

    {"model.weight": {"dtype": "float32", "shape": [6, 40],
                      "parts": [["__0_0.distcp", 0, 1577, 0, 3], ["__1_0.distcp", 0, 1577, 3, 3]]}}

A part is: file, place and length in bytes, first row, number of rows. A tensor without dimensions is one row. Version
0.2.0 had the index of torch alone, a pickle; :func:`of_pickle` reads what it says and makes nothing that it names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_scape.checkpoint import pickles

_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_MOST_DIMENSIONS = 64
_LIMIT = 2**63
_OF_TORCH = "torch.distributed.checkpoint."
_NAMES = frozenset(
    {
        *(f"{_OF_TORCH}metadata.{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata")),
        *(f"{_OF_TORCH}metadata.{name}" for name in ("MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_OF_TORCH}metadata.{name}" for name in ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
        *(f"{_OF_TORCH}filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"),
        *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath")),
        *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "PurePosixPath")),
        *(f"torch.{name}" for name in _DTYPES),
    }
)
"""What torch's index names. Torch's own reader makes whatever an index names."""


class Part(NamedTuple):
    """Some rows of a tensor, as ``torch.save`` writes them."""

    file: str
    place: int
    """Of its first byte in the file."""
    length: int
    """In bytes."""
    first: int
    rows: int


class Entry(NamedTuple):
    """One tensor."""

    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[Part, ...]
    """By their rows, which are all of the tensor's; none of a tensor without entries."""


def of_torch(metadata: Metadata) -> dict[str, Any]:
    """Torch's index, which this process has just written, as plain data."""
    places = {
        (at.fqn, tuple(at.offset or ())): (info.relative_path, info.offset, info.length)
        for at, info in metadata.storage_data.items()
    }
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), key
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        found[key] = _plain(key, str(entry.properties.dtype), tuple(entry.size), chunks, places)
    return found


def of_pickle(data: bytes) -> dict[str, Any]:
    """What torch's index says, as plain data.

    Raises:
        ValueError: the pickle is something else.
    """
    said = pickles.read(data, may_name=lambda named: ".".join(named) in _NAMES)
    index = _fields(said, "metadata.Metadata")
    places = {}
    for at, info in _of(index.get("storage_data"), pickles.Pairs, "dict"):
        key, place = _fields(at, "metadata.MetadataIndex"), _fields(info, "filesystem._StorageInfo")
        offset = () if key.get("offset") is None else _size(key["offset"])
        where = tuple(place.get(each) for each in ("relative_path", "offset", "length"))
        places[_of(key.get("fqn"), str, "name"), offset] = where
    found = {}
    for key, entry in _of(index.get("state_dict_metadata"), pickles.Pairs, "dict"):
        if _of(key, str, "name") in found:
            raise ValueError(f"it has {key!r} twice")
        tensor = _fields(entry, "metadata.TensorStorageMetadata")
        (dtype, *_) = _state(tensor.get("properties"), "metadata.TensorProperties", tuple)
        chunks = [_fields(chunk, "metadata.ChunkStorageMetadata") for chunk in _of(tensor.get("chunks"), list, "list")]
        ranges = [(_size(chunk.get("offsets")), _size(chunk.get("sizes"))) for chunk in chunks]
        named = f"{dtype.module}.{dtype.name}" if isinstance(dtype, pickles.Named) else ""
        found[key] = _plain(key, named, _size(tensor.get("size")), ranges, places)
    return found


def _plain(key: str, dtype: str, shape: Any, chunks: list[Any], places: Mapping[Any, Any]) -> dict[str, Any]:
    parts = []
    for offsets, sizes in chunks:
        if any(offsets[1:]) or sizes[1:] != shape[1:] or not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a part of {_short(key)} must be whole rows, got {_short(sizes)} at {_short(offsets)}")
        if (key, offsets) not in places:
            raise ValueError(f"it does not say where the part of {_short(key)} at {_short(offsets)} is")
        parts.append([*places[key, offsets], *(offsets[:1] or (0,)), *(sizes[:1] or (1,))])
    return {"dtype": dtype.removeprefix("torch."), "shape": list(shape), "parts": parts}


def _state(made: Any, name: str, kind: type) -> Any:
    if not isinstance(made, pickles.Made) or not isinstance(made.maker, pickles.Named):
        raise ValueError(f"it must hold a {name}, got a {type(made).__name__}")
    called = ".".join(made.maker)
    if called != _OF_TORCH + name or made.arguments != () or not isinstance(made.state, kind) or not made.state:
        raise ValueError(f"it must hold a {name}, and it names {called[:100]}")
    return made.state


def _fields(made: Any, name: str) -> dict[str, Any]:
    return {_of(key, str, "name"): value for key, value in _state(made, name, pickles.Pairs)}


def _of(value: Any, kind: type, noun: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it must hold a {noun}, got a {type(value).__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """Of a ``torch.Size``."""
    if isinstance(value, pickles.Made) and value.maker == ("torch", "Size") and isinstance(value.arguments, tuple):
        numbers = value.arguments[0] if len(value.arguments) == 1 else None
        if isinstance(numbers, tuple) and all(type(number) is int for number in numbers):
            return numbers
    raise ValueError("it must hold sizes of whole numbers, got something else")


# ------------------------------------------------------------------------------------------------ checks


def checked(index: Any, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """The tensors of an index that is plain data.

    Every part lies in one of the files, alone. The rows of a tensor's parts are the tensor's, each once. No tensor is
    larger than the bytes that hold it.

    Args:
        index: from a manifest, or of :func:`of_pickle`.
        sizes: of the checkpoint's files, in bytes, by name; each of them has a digest.

    Raises:
        ValueError: the first rule that the index breaks.
    """
    if not isinstance(index, dict):
        raise ValueError(f"it must be a dict, got a {type(index).__name__}")
    found = {key: _entry(key, content, sizes) for key, content in index.items()}
    ends = dict.fromkeys(sizes, 0)
    for part in sorted(part for entry in found.values() for part in entry.parts):
        if part.place < ends[part.file]:
            raise ValueError(f"parts must not share bytes, got two at byte {part.place} of {part.file}")
        ends[part.file] = part.place + part.length
    return found


def _entry(key: str, content: Any, sizes: Mapping[str, int]) -> Entry:
    if not isinstance(content, dict) or not {"dtype", "shape", "parts"} <= set(content):
        raise ValueError(f"{_short(key)} must have dtype, shape and parts")
    name, shape, parts = content["dtype"], content["shape"], content["parts"]
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{_short(key)} must be of a dtype of torch, got {_short(name)}")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(map(is_size, shape)):
        raise ValueError(f"{_short(key)} must have a shape of whole numbers >= 0, got {_short(shape)}")
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= _LIMIT:
        raise ValueError(f"{_short(key)} must have less than 2**63 bytes, got shape {_short(shape)}")
    if not isinstance(parts, list):
        raise ValueError(f"{_short(key)} must have a list of parts, got a {type(parts).__name__}")
    if not math.prod(shape):
        return Entry(dtype, torch.Size(shape), ())
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    tiles = sorted(_parts(key, parts, sizes), key=lambda part: part.first)
    rows = 0
    for part in tiles:
        if part.first != rows:
            raise ValueError(f"the parts of {_short(key)} must be each of its rows once, got row {rows} not once")
        if part.rows * row_bytes > part.length:
            raise ValueError(f"{part.rows} rows of {_short(key)} must have {part.rows * row_bytes} bytes or more")
        rows += part.rows
    if rows != (shape[0] if shape else 1):
        raise ValueError(f"the parts of {_short(key)} must be all of its {shape[:1] or [1]} rows, got {rows}")
    return Entry(dtype, torch.Size(shape), tuple(tiles))


def _parts(key: str, parts: list[Any], sizes: Mapping[str, int]) -> Iterator[Part]:
    for content in parts:
        if not isinstance(content, list) or len(content) != len(Part._fields) or not all(map(is_size, content[1:])):
            raise ValueError(f"a part of {_short(key)} must be a file and 4 whole numbers >= 0, got {_short(content)}")
        part = Part(*content)
        if not isinstance(part.file, str) or part.file not in sizes:
            raise ValueError(f"a part of {_short(key)} must be in a file with a digest, got {_short(part.file)}")
        if not part.rows or not part.length or part.place + part.length > sizes[part.file]:
            raise ValueError(
                f"a part of {_short(key)} must lie in {part.file}, of {sizes[part.file]} bytes, got {part.length} at"
                f" {part.place}"
            )
        yield part


def is_size(value: Any) -> bool:
    """Whether it is a whole number that memory may have."""
    return type(value) is int and 0 <= value < _LIMIT


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
