"""What a step's kernels move, counted as they run in Triton's interpreter, against what the planner says they move."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kernel_checks import hyper
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from lightning_scape import ScapeConfig, ops
from lightning_scape.core.layout import Layout
from lightning_scape.ops.cuda import launch as cuda_launch
from lightning_scape.ops.registry import CUDA as cuda
from lightning_scape.scape.cost import scape_traffic

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
        reason="kernels are compiled for the GPU here: set TRITON_INTERPRET=1 to run them on CPU tensors",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's: the parameters are zeros
]

SECTOR = 32
"""Bytes that a GPU's memory moves at a time, however few of them are wanted."""


class Count:
    """Memory that launches read and wrote: each sector once per launch, for what a program reads again is in cache."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self._touched: dict[tuple[int, str], list[Any]] = defaultdict(list)

    def note(self, kind: str, pointers: Any, mask: Any, itemsize: int) -> None:
        """One access of a program; ``pointers`` are to entries of so many bytes."""
        entries = np.broadcast_to(pointers, mask.shape)[mask].astype(np.uint64)
        bytes_touched = (entries[:, None] + np.arange(itemsize, dtype=np.uint64)).reshape(-1)
        self._touched[len(self.launches), kind].append(bytes_touched)

    def moved(self, unit: int) -> int:
        """Bytes, where memory moves in units of so many."""
        return sum(
            unit * np.unique(np.concatenate(touched) // np.uint64(unit)).size for touched in self._touched.values()
        )


@contextmanager
def counting(run: bool = True) -> Iterator[Count]:
    """Counts what is launched within it, and what that moves where it is run."""
    count, launch = Count(), cuda_launch.launch
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def noted_launch(kernel: Any, *args: Any, **meta: Any) -> None:
        count.launches.append(kernel.__name__)
        if run:
            launch(kernel, *args, **meta)

    def noted_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        result = load(self, ptrs, mask, *rest, **options)
        count.note("load", ptrs.data, mask.data, result.data.itemsize)
        return result

    def noted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count.note("store", ptrs.data, mask.data, value.data.itemsize)
        return store(self, ptrs, value, mask, *rest)

    with (
        patch.object(cuda_launch, "launch", noted_launch),
        patch.object(InterpreterBuilder, "create_masked_load", noted_load),
        patch.object(InterpreterBuilder, "create_masked_store", noted_store),
    ):
        yield count


class Rank:
    """One rank's tensors in the middle of a training with AdamW, and a step on them without the messages."""

    def __init__(self, sparsity: float, ranks: int, dtype: torch.dtype, blocks: int) -> None:
        self.config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update="adamw")
        self.ranks, (self.length, self.sent) = ranks, self.config.quota
        half = blocks // 2 * self.length
        self.layout = Layout([half, half], [0, 0], self.length, ranks)
        self.rank = ranks // 2
        generator = torch.Generator().manual_seed(0)
        self.flats = [torch.zeros(half, dtype=dtype) for _ in range(2)]
        self.grads = [torch.randn(half, generator=generator).to(dtype) for _ in range(2)]
        rows, own = self.layout.blocks, self.layout.shard_blocks
        self.residual = torch.randn(rows, self.length, generator=generator)
        self.state = [torch.rand(own, self.length, generator=generator) for _ in range(2)]
        self.last_step = torch.zeros(own, self.length, dtype=torch.int32)
        self.mask = ops.select(torch.randn(rows, self.length, generator=generator), self.sent)
        self.values = torch.zeros(rows, self.sent, dtype=self.config.values_dtype)
        self.next_mask = torch.zeros(own, self.sent, dtype=torch.uint8)
        width = ops.proposal_bytes(self.config.proposed, self.length)
        self.proposals = torch.zeros(rows, width, dtype=torch.uint8)
        self.arrived = torch.zeros(ranks, own, width, dtype=torch.uint8)
        self.as_changes = dtype.itemsize > self.values.element_size()

    def step(self) -> None:
        layout, own, one = self.layout, self.layout.rows_of(self.rank), torch.ones(())
        remote, local = layout.remote(self.rank), layout.local(self.rank)
        mask, residual, values = self.mask[own], self.residual[own], self.values[own]
        proposed = self.config.proposed

        def parts(region: Any) -> list[Tensor]:
            return [self.grads[piece.segment.index][piece.of_parameter] for piece in region.pieces]

        cuda.squared_norm(self.grads)
        proposals = self.proposals if proposed else None
        cuda.sweep(ops.Sweep(remote, self.residual, parts(remote), one, self.mask, self.values, proposals=proposals))
        moment = ops.SecondMoment(self.state[1], [0.01] * len(local.pieces), self.ranks)
        chosen = None if proposed else self.next_mask
        swept = residual, parts(local), one, mask, values
        cuda.sweep(ops.Sweep(local, *swept, second_moment=moment, next_mask=chosen))
        if proposed:
            cuda.merge(residual, self.arrived, self.rank, proposed, self.sent)
        theta, mean = torch.zeros(mask.shape), torch.zeros(mask.shape)
        cuda.gather_params(ops.ParamEntries(self.flats, local.pieces, mask, self.length), theta)
        shard = ops.ShardState(theta, *self.state, self.last_step)
        numbers = ops.RowNumbers(torch.tensor(9, dtype=torch.int32), one, hyper("cpu", torch.float32), one, one)
        cuda.update_adamw(shard, mask, mean, mean + 1, numbers, self.ranks)
        back = torch.zeros_like(self.values)
        cuda.scatter_params(ops.ParamEntries(self.flats, local.pieces, mask, self.length), back[own], self.as_changes)
        cuda.scatter_params(ops.ParamEntries(self.flats, remote.pieces, self.mask, self.length), back, self.as_changes)


class Moved(NamedTuple):
    """Bytes per parameter."""

    wanted: float
    """Each byte once."""
    sectors: float
    predicted: float
    launches: list[str]


def measured(sparsity: float, ranks: int, dtype: torch.dtype, blocks: int = 128) -> Moved:
    rank = Rank(sparsity, ranks, dtype, blocks)
    with counting() as count:
        rank.step()
    with counting(run=False) as next_step:
        rank.step()
    assert next_step.launches == count.launches
    numel = rank.layout.numel
    config = rank.config
    whole, shard = scape_traffic(
        config.quota.density,
        proposed=config.proposed > 0,
        parameter_bytes=dtype.itemsize,
        wire_bytes=config.values_dtype.itemsize,
    )
    return Moved(count.moved(1) / numel, count.moved(SECTOR) / numel, whole + shard / ranks, count.launches)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sparsity", "ranks", "dtype", "at_most", "launches"),
    [
        (0.99, 8, torch.float32, 18.5, 8),
        (0.9, 8, torch.float32, 26.0, 7),
        (0.99, 2, torch.bfloat16, 18.5, 8),
        (0.9, 2, torch.bfloat16, 26.0, 7),
    ],
)
def test_a_step_moves_what_is_predicted(
    sparsity: float, ranks: int, dtype: torch.dtype, at_most: float, launches: int
) -> None:
    moved = measured(sparsity, ranks, dtype)
    assert moved.wanted <= at_most
    assert moved.sectors == pytest.approx(moved.predicted, rel=0.03)
    assert len(moved.launches) == launches
    assert moved.launches.count("_sweep_kernel") == 2
