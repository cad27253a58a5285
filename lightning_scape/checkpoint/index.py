"""Which bytes of which file hold which rows of which tensor: the index of a sharded checkpoint.

It is plain data in ``manifest.json``, under ``tensors``, and checked as a whole before a byte of a tensor is read::

    {"model.weight": {"dtype": "float32", "shape": [6, 40],
                      "parts": [["__0_0.distcp", 0, 1577, 0, 3], ["__1_0.distcp", 0, 1577, 3, 3]]}}

A part is: file, place and length in bytes, first row, number of rows. A tensor without dimensions is one row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_MOST_DIMENSIONS = 64
_LIMIT = 2**63


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


def of_torch(metadata: Metadata, results: Iterable[Sequence[WriteResult]]) -> dict[str, Any]:
    """Torch's index, which this process has just written, as plain data.

    Args:
        metadata: the tensors.
        results: of each rank, what it has written where.
    """
    places = {}
    for written in itertools.chain.from_iterable(results):
        at, info = written.index, written.storage_data
        places[at.fqn, tuple(at.offset or ())] = (info.relative_path, info.offset, info.length)
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), key
        parts = [
            [*places[key, tuple(chunk.offsets)], *(chunk.offsets[:1] or (0,)), *(chunk.sizes[:1] or (1,))]
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        found[key] = {"dtype": dtype, "shape": list(entry.size), "parts": parts}
    return found


# ------------------------------------------------------------------------------------------------ checks


def checked(index: Any, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """The tensors of an index that is plain data.

    Every part lies in one of the files, alone. The rows of a tensor's parts are the tensor's, each once. No tensor is
    larger than the bytes that hold it.

    Args:
        index: from a manifest.
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
