"""What the checks of operations share: inputs of all kinds, comparisons, and the base class."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Piece, Segment
from lightning_scape.ops import naive
from lightning_scape.ops.cuda import gradients, launch
from lightning_scape.ops.naive.wire import GROUP
from lightning_scape.ops.registry import CUDA

FLOATS = [torch.float32, torch.bfloat16]
if torch.cuda.is_available():  # for a processor each of them is compiled by itself, and these are not its own
    FLOATS += [torch.float16, torch.float64]
BOTH = ["naive", "own"]
"""The twin, and the implementation that a class of checks is for."""
FAR = 2**31 + 64
"""Entries from the start of a buffer to a place that 32-bit offsets do not reach."""


def awkward(rows: int, length: int) -> Tensor:
    """Blocks of random numbers, ties, zeros, denormals, infinities, NaN and pads; fp32."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    matrix = torch.randn(rows, length, generator=generator)
    matrix *= torch.logspace(-20, 20, rows).unsqueeze(1)
    matrix[1 % rows] = 2.0
    matrix[2 % rows] = 0.0
    matrix[3 % rows] = torch.randint(0, 3, (length,), generator=generator) * 1e-40
    matrix[4 % rows, : length // 2] = 0.0
    matrix[5 % rows, length // 2 :] = -0.0
    matrix[6 % rows, 0] = float("nan")
    matrix[7 % rows, -1] = -float("inf")
    return matrix


def groups_of_all_kinds(shards: int, count: int, levels: int, seed: int) -> Tensor:
    """fp32 ``[shards, count]``; groups of 64: of different sizes, with ties, of zeros, of tiny and of huge numbers."""
    generator = torch.Generator().manual_seed(seed)
    groups = (shards, -(-count // GROUP), GROUP)
    kind, power = (torch.randint(*ends, (*groups[:2], 1), generator=generator) for ends in ((0, 5), (-90, 60)))
    normal, sign = torch.randn(groups, generator=generator), torch.randint(-1, 2, groups, generator=generator)
    halves = torch.randint(-2 * levels, 2 * levels + 1, groups, generator=generator) / 2
    halves[..., 0] = levels  # the unit is 1
    kinds = (normal * 2.0**power, halves * 2.0**power, levels * normal * 1e-30, 3.4e38 * sign, -0.0 * sign)
    values = torch.stack(kinds).take_along_dim(kind.expand(groups).unsqueeze(0), 0)[0]
    return values.flatten(1)[:, :count].contiguous()


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which NaN equals itself and 0 is not -0."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(bits(a), bits(b))


def hyper(device: str, dtype: torch.dtype, lr: Any = 1e-3, beta1: float = 0.9, decay: float = 0.1) -> ops.Hyper:
    given = (torch.as_tensor(v, dtype=torch.float64) for v in (lr, beta1, 0.95, 1e-8, decay))
    rows = torch.broadcast_tensors(*given)
    return ops.Hyper(*(value.to(device) for value in ops.Hyper.of(dtype, *rows)))


def copied(value: Any, device: str) -> Any:
    """An argument of an operation, with copies of its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, (list, tuple)):
        items = [copied(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a NamedTuple, or a plain one
    return value


def flattened(values: Any) -> list[Any]:
    """The members of nested lists and tuples, in order."""
    if isinstance(values, (list, tuple)):
        return [item for value in values for item in flattened(value)]
    return [values]


class Checks:
    """Inherit, and say what is checked, and on which device."""

    device = "cpu"
    module: Any = CUDA
    choice = "cuda"
    caches: Sequence[Any] = (launch.cached_table, launch.cached_chunks, gradients.sketch_plan)

    @pytest.fixture
    def either(self, request: pytest.FixtureRequest) -> Any:
        return naive if request.param == "naive" else self.module

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=self.device)

    def both(self, name: str, *arguments: Any) -> tuple[tuple[Any, Any], Iterator[tuple[Any, Any]]]:
        """What an operation returns and what it leaves in its arguments: by the kernel, and by its twin."""
        ours, theirs = copied(arguments, self.device), copied(arguments, "cpu")
        result = getattr(self.module, name)(*ours)
        expected = getattr(naive, name)(*theirs)
        return (copied(result, "cpu"), expected), zip(copied(ours, "cpu"), theirs, strict=True)

    def assert_same_moments(self, ours: Tensor, theirs: Tensor) -> None:
        """Equal second moments, to the rounding that the implementation states."""
        torch.testing.assert_close(ours, theirs, rtol=16 * torch.finfo(theirs.dtype).eps, atol=0.0)


class FarAway:
    """Host memory of 2**32 entries and more, of which only the pages that are touched exist."""

    def __init__(self, entries: int, itemsize: int = 4) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.memory = mmap.mmap(-1, entries * itemsize, flags=flags)

    def at(self, entry: int, count: int, dtype: Any = np.float32) -> Tensor:
        """A tensor of ``count`` entries, whose storage is not larger than that."""
        return torch.from_numpy(np.frombuffer(self.memory, dtype, count, entry * np.dtype(dtype).itemsize))

    def rows(self, length: int, dtype: Any = np.float32) -> Tensor:
        """Two rows, ``FAR`` apart."""
        return self.at(0, FAR + length, dtype).as_strided((2, length), (FAR, 1))


def far_piece(numel: int, block_size: int) -> Piece:
    return Piece(Segment(0, 0, FAR + numel, 0, 1), 0, -(-numel // block_size), FAR, numel)
