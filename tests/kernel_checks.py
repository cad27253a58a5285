"""What must hold of every implementation: of numba's, and of Triton's in its interpreter and on a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.core.layout import Layout, Piece, Region, Segment
from lightning_scape.ops import cuda, naive
from lightning_scape.ops.naive import chunked
from lightning_scape.ops.naive.wire import GROUP
from lightning_scape.scape.clipping import SKETCH_WIDTHS, random_signs

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SWEPT = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float16, torch.float32, torch.float16),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.float64, torch.bfloat16),
    (torch.float64, torch.float32, torch.bfloat16),
]
"""Dtypes of gradients, residual and wire. Each combination is compiled, so not all of them."""
BOTH = ["naive", "own"]
"""The twin, and the implementation that a class of checks is for."""
LENGTHS = pytest.mark.parametrize("steps", [14, pytest.param(50, marks=pytest.mark.slow)])
"""Of a training: skipped steps and gaps are in the short one, too."""
FAR = 2**31 + 64
"""Entries from the start of a buffer to a place that 32-bit offsets do not reach."""


class Trained(NamedTuple):
    """What a training leaves behind."""

    parameters: list[Tensor]
    residual: Tensor
    exp_avg: Tensor
    last_step: Tensor
    exp_avg_sq: Tensor | None


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


class Shard(NamedTuple):
    """A shard in the middle of a training, and what a step does to it: by row, or the same for all rows."""

    ROWS = 300

    theta: Tensor
    first: Tensor
    second: Tensor
    last_step: Tensor
    mask: Tensor | None
    total: Tensor
    step: Tensor
    scale: Tensor
    lr: Any
    group: Tensor | None

    @classmethod
    def draw(cls, masked: bool, by_row: bool, dtype: torch.dtype) -> Shard:
        """Entries have waited for one step, a few, or thousands. A third of the rows stays out of a step by row."""
        rows, length, generator = cls.ROWS, 20, torch.Generator().manual_seed(1)
        first, statistic = (torch.randn(rows, length, generator=generator, dtype=dtype) for _ in range(2))
        second = torch.rand(rows, length, generator=generator, dtype=dtype)
        second *= 10 ** (-6 * torch.rand(rows, length, generator=generator, dtype=dtype))
        tau = torch.randint(1, 6, (rows, length), generator=generator)
        tau[::7] = torch.randint(1, 4900, (len(tau[::7]), length), generator=generator)
        sent = 3 if masked else length
        theta, total = (torch.randn(rows, sent, generator=generator, dtype=dtype) for _ in range(2))
        total[0], second[1], scale = 0.0, 0.0, torch.ones(())
        # Pads, all zeros: a checkpoint leaves their clocks ahead where their parameter has missed steps.
        statistic[::11, 0], tau[::11, 0], tau[::22, 0] = 1e9, 0, -3
        for zeros in (first, second, theta, total):
            zeros[::11, 0] = 0.0
        step, lr, group = torch.tensor(5000), 1e-3, None
        if by_row:
            step, lr = torch.randint(4900, 5000, (rows,), generator=generator), torch.linspace(1e-4, 1e-2, 7)
            group = torch.randint(0, 7, (rows,), generator=generator).int()
            scale = torch.rand(rows, generator=generator) + 0.1
            scale[2::3], total[2::3] = 0.0, float("nan")
        last_step = ((step.unsqueeze(1) if by_row else step) - tau).int()
        mask = naive.select(statistic, sent) if masked else None
        return cls(theta, first, second, last_step, mask, total, step.int(), scale, lr, group)


class SweepJob(NamedTuple):
    """A sweep's arguments, on the host. What it must not touch holds 7."""

    region: Region
    residual: Tensor
    grads: list[Tensor | None] | None
    scale: Tensor
    mask: Tensor | None
    values: Tensor
    second: Tensor | None
    weights: list[float]
    proposals: Tensor | None
    next_mask: Tensor | None
    clip_value: float | None = None

    @classmethod
    def draw(
        cls,
        rank: int | None,
        sent: int | None,
        votes: int | None,
        elected: int | None,
        *,
        sizes: Sequence[int] = (3000, 77, 4096, 5, 40, 1300),
        length: int = 200,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        state: torch.dtype = torch.float32,
        wire: torch.dtype = torch.bfloat16,
    ) -> SweepJob:
        """All rows (None), those of other ranks (0 and 2) or those of rank 1; every fifth piece has no gradient."""
        generator = torch.Generator().manual_seed(seed)
        layout = Layout(sizes, [0] * len(sizes), length, 3)
        region = layout.everything() if rank is None else layout.local(1) if rank == 1 else layout.remote(rank)
        rows = layout.shard_blocks if rank == 1 else layout.blocks
        residual = torch.randn(rows, length, generator=generator, dtype=state)
        grads = [torch.randn(piece.numel, generator=generator).to(dtype) for piece in region.pieces]
        for pads in cls.pads(region, residual):
            pads.zero_()
        mask = None if sent is None else naive.select(residual * torch.randn(rows, length, generator=generator), sent)
        votes_width = naive.proposal_bytes(votes or 0, length)
        positions = naive.position_dtype(length)
        return cls(
            region,
            residual,
            [None if i % 5 == 1 else grad for i, grad in enumerate(grads)],
            torch.tensor(1.0),
            mask,
            torch.full((rows, length if sent is None else sent), 7.0, dtype=wire),
            torch.rand(rows, length, generator=generator, dtype=state),
            [0.1, 1e-3, 0.5, 0.05, 1.0, 0.2, 0.3, 0.4][: len(grads)],
            None if votes is None else torch.full((rows, votes_width), 7, dtype=torch.uint8),
            None if elected is None else torch.full((rows, elected), 7, dtype=positions),
        )

    @staticmethod
    def pads(region: Region, residual: Tensor) -> Iterator[Tensor]:
        """The pads behind the pieces."""
        length = residual.shape[1]
        for piece in region.pieces:
            rows = residual[piece.row : piece.row + piece.blocks].view(-1)
            yield rows[piece.numel : piece.blocks * length]

    def swept(self, module: Any, device: str) -> SweepJob:
        """What a sweep on a device makes of copies."""
        own = copied(self, device)
        second = None if own.second is None else ops.SecondMoment(own.second, own.weights, 3)
        module.sweep(
            own.region,
            own.residual,
            own.grads,
            own.scale,
            own.mask,
            own.values,
            clip_value=own.clip_value,
            second_moment=second,
            proposals=own.proposals,
            next_mask=own.next_mask,
        )
        return copied(own, "cpu")

    def by_parts(self) -> SweepJob:
        """What the separate operations of the definition make of copies."""
        own, length = copied(self, "cpu"), self.residual.shape[1]
        for place, piece in enumerate(own.region.pieces if own.grads is not None else ()):
            entries = slice(piece.row * length, piece.row * length + piece.numel)
            scale = own.scale[piece.row] if own.scale.dim() else own.scale
            naive.fold([own.residual.view(-1)[entries]], [own.grads[place]], scale, own.clip_value)
            if own.second is not None:
                rest = [own.grads[place]], [own.weights[place]], 3, scale, own.clip_value
                naive.accumulate_exp_avg_sq([own.second.view(-1)[entries]], *rest)
        for row in (row for rows in own.region.rows for row in range(rows.start, rows.stop)):
            one, scale = slice(row, row + 1), own.scale[row] if own.scale.dim() else own.scale
            part = None if own.mask is None else own.mask[one]
            own.values[one] = naive.compact(own.residual[one], part, own.values.dtype, scale)
            if own.proposals is not None:
                votes = (own.proposals.shape[1] - 1) // (2 if length <= 256 else 3)
                own.proposals[one] = naive.propose(own.residual[one], votes)
            if own.next_mask is not None:
                own.next_mask[one] = naive.select(own.residual[one], own.next_mask.shape[1])
        return own


SWEEPING_RANKS = (None, 0, 1, 2)
SWEEPS = ((2, 2, None), (25, None, 25), (None, 3, 40), (1, None, None))
"""Entries sent per block, votes, and entries of the next mask."""


class KernelChecks:
    """Inherit, and say what is checked, and on which device."""

    device = "cpu"
    module: Any = cuda
    choice = "cuda"
    caches: Sequence[Any] = (cuda._cached_table, cuda._cached_chunks, cuda._sketch_plan)

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

    # ------------------------------------------------------------------------------------- docstrings' examples

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_select(self, either: Any) -> None:
        statistic = torch.tensor([[3.0, -5, 0, 0], [0, 0, 0, 0]], device=self.device)
        assert either.select(statistic, 2).tolist() == [[1, 0], [0, 1]]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_fold(self, either: Any) -> None:
        residual = torch.tensor([1.0, 1.0], device=self.device)
        either.fold([residual], [torch.tensor([3.0, -8.0], device=self.device)], self.scalar(0.5), 4.0)
        assert residual.tolist() == [2.5, -1.0]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_compact(self, either: Any) -> None:
        residual = torch.tensor([[1.00390625, 5.0]], device=self.device)
        mask = torch.tensor([[0]], dtype=torch.uint8, device=self.device)
        sent = either.compact(residual, mask, torch.bfloat16, self.scalar(1.0))
        assert sent.dtype is torch.bfloat16
        assert sent.tolist() == [[1.0]]
        assert residual.tolist() == [[0.00390625, 5.0]]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_update(self, either: Any) -> None:
        theta, total = (torch.tensor([[v]], device=self.device) for v in (3.0, -2.0))
        momentum, last_step = torch.zeros(1, 2, device=self.device), torch.zeros(1, 2, device=self.device).int()
        numbers = (torch.tensor(v, dtype=torch.float64, device=self.device) for v in (1.0, 0.0, 0.0, 1e-30, 0.0))
        single = ops.Hyper.of(torch.float32, *numbers)
        mask = torch.tensor([[1]], dtype=torch.uint8, device=self.device)
        step = self.scalar(1, torch.int32)
        shard, numbers = (
            ops.ShardState(theta, momentum, None, last_step),
            ops.RowNumbers(step, self.scalar(1.0), single, 1.0),
        )
        again = either.update_adams(shard, mask, total, numbers)
        assert (theta.tolist(), momentum.tolist(), last_step.tolist(), int(again)) == (
            [[4.0]],
            [[0.0, -2.0]],
            [[0, 1]],
            1,
        )

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_update_adamw(self, either: Any) -> None:
        theta, total = (torch.tensor([[v]], device=self.device) for v in (3.0, -2.0))
        exp_avg, exp_avg_sq = torch.zeros(1, 2, device=self.device), torch.zeros(1, 2, device=self.device)
        last_step = torch.zeros(1, 2, dtype=torch.int32, device=self.device)
        numbers = (torch.tensor(v, dtype=torch.float64, device=self.device) for v in (1.0, 0.0, 0.0, 1e-30, 0.0))
        single, one = ops.Hyper.of(torch.float32, *numbers), self.scalar(1.0)
        mask = torch.tensor([[1]], dtype=torch.uint8, device=self.device)
        shard = ops.ShardState(theta, exp_avg, exp_avg_sq, last_step)
        row_numbers = ops.RowNumbers(self.scalar(1, torch.int32), one, single, one, one)
        again = either.update_adamw(shard, mask, total, row_numbers, 1)
        assert (theta.tolist(), exp_avg.tolist(), exp_avg_sq.tolist()) == ([[4.0]], [[0.0, -2.0]], [[0.0, 4.0]])
        assert (last_step.tolist(), int(again)) == ([[0, 1]], 1)

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_gather(self, either: Any) -> None:
        flats = [torch.tensor([5.0, 6.0, 7.0], device=self.device), torch.tensor([8.0], device=self.device)]
        mask = torch.tensor([[1], [0], [0]], dtype=torch.uint8, device=self.device)
        out = torch.zeros(3, 1, device=self.device)
        either.gather_params(flats, list(Layout([3, 1], [0, 0], 2, 1).everything().pieces), mask, out, 2)
        assert out.tolist() == [[6.0], [7.0], [8.0]]
        either.scatter_params(flats, list(Layout([3, 1], [0, 0], 2, 1).everything().pieces), mask, -out, 2)
        assert [flat.tolist() for flat in flats] == [[5.0, -6.0, -7.0], [-8.0]]
        changes = torch.full((3, 1), 0.5, dtype=torch.bfloat16, device=self.device)
        either.scatter_params(flats, list(Layout([3, 1], [0, 0], 2, 1).everything().pieces), mask, changes, 2, True)
        assert [flat.tolist() for flat in flats] == [[5.0, -5.5, -6.5], [-7.5]]

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_renewed_masters(self, either: Any) -> None:
        parameter = torch.tensor([1.0, 3.0], dtype=torch.bfloat16, device=self.device)
        masters = torch.tensor([[1.001, 2.0]], device=self.device)
        either.renew_masters([parameter], list(Layout([2], [0], 2, 1).everything().pieces), None, masters, 2)
        assert_same_bits(masters.cpu(), torch.tensor([[1.001, 3.0]]))

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_example_of_quantize_and_dequantize(self, either: Any) -> None:
        values = torch.tensor([[3.5, -7.0, 0.25]], device=self.device)
        message = either.quantize(values, 4)
        assert message.dtype is torch.uint8
        assert message.tolist() == [[[0x0B, *[0x77] * 31, 0x80, 0x3F]]]
        assert values.tolist() == [[-0.5, 0.0, 0.25]]
        assert_same_bits(either.dequantize(message, 4, 3).cpu(), torch.tensor([[4.0, -7.0, -0.0]]))

    @pytest.mark.parametrize("width", [4, 8])
    @pytest.mark.parametrize(("shards", "count"), [(1, 1), (3, 64), (2, 700), (3, 4097), (2, 0)])
    def test_quantize_and_dequantize_equal_their_twins(self, width: int, shards: int, count: int) -> None:
        theirs = groups_of_all_kinds(shards, count, (1 << (width - 1)) - 1, seed=count)
        ours = theirs.to(self.device, copy=True)
        message = self.module.quantize(ours, width)
        assert_same_bits(message.cpu(), naive.quantize(theirs, width))
        assert_same_bits(ours.cpu(), theirs)
        read = self.module.dequantize(message, width, count)
        assert_same_bits(read.cpu(), naive.dequantize(message.cpu(), width, count))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("sent", [3, None])
    def test_quantize_with_error_equals_its_twin(self, dtype: torch.dtype, sent: int | None) -> None:
        theirs, values = torch.randn(70, 50, dtype=dtype), torch.randn(70, sent or 50, dtype=dtype)
        mask = None if sent is None else naive.select(theirs, sent)
        for scale in (torch.ones(()), torch.zeros(()), torch.arange(70) % 3.0):
            ours = theirs.to(self.device, copy=True)
            there = None if mask is None else mask.to(self.device)
            given = ours, there, values.to(self.device), scale.to(self.device)
            message = self.module.quantize_with_error(*given, 4)
            assert_same_bits(message.cpu(), naive.quantize_with_error(theirs, mask, values, scale, 4))
            assert_same_bits(ours.cpu(), theirs)

    @pytest.mark.parametrize("width", [4, 8])
    def test_quantize_takes_rows_that_lie_apart(self, width: int) -> None:
        wide = groups_of_all_kinds(3, 200, 7, seed=0)
        ours, theirs = wide.to(self.device, copy=True)[:, :100], wide[:, :100].contiguous()
        assert_same_bits(self.module.quantize(ours, width).cpu(), naive.quantize(theirs, width))
        assert_same_bits(ours.cpu(), theirs)

    # ------------------------------------------------------------------------------------------------ select

    @pytest.mark.parametrize(
        ("rows", "length", "sent"),
        [(23, 200, 2), (9, 250, 25), (5, 256, 32), (9, 100, 1), (9, 8, 8), (3, 1000, 1), (2, 256, 256), (2, 5000, 3)],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_select_equals_its_twin(self, rows: int, length: int, sent: int, dtype: torch.dtype) -> None:
        statistic = awkward(rows, length).to(dtype)
        assert_same_bits(self.module.select(statistic.to(self.device), sent).cpu(), naive.select(statistic, sent))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_select_ranks_narrow_statistics(self, dtype: torch.dtype) -> None:
        statistic = awkward(9, 100).to(dtype)
        assert_same_bits(self.module.select(statistic.to(self.device), 4).cpu(), naive.select(statistic, 4))

    def test_select_of_an_empty_shard_is_empty(self) -> None:
        assert self.module.select(torch.zeros(0, 200, device=self.device), 2).shape == (0, 2)

    def test_select_reads_rows_that_lie_apart(self) -> None:
        wide = awkward(9, 300)
        assert_same_bits(
            self.module.select(wide.to(self.device)[:, :200], 2).cpu(), naive.select(wide[:, :200].contiguous(), 2)
        )

    # ------------------------------------------------------------------------------------- fold and first moment

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("clip_value", [None, 0.3])
    def test_fold_equals_its_twin(
        self, dtype: torch.dtype, residual_dtype: torch.dtype, clip_value: float | None
    ) -> None:
        sizes = (5000, 4096, 1, 0, 77)
        buffer = torch.randn(sum(sizes) + 20, dtype=residual_dtype)
        grads = [torch.randn(n).to(dtype) for n in sizes]
        results = []
        for module, device in ((naive, "cpu"), (self.module, self.device)):
            own = buffer.to(device, copy=True)
            residuals = [part[:n] for part, n in zip(own.split([n + 4 for n in sizes]), sizes, strict=True)]
            given = [*(grad.to(device) for grad in grads[:-1]), None]
            module.fold(residuals, given, torch.tensor(0.7, device=device), clip_value)
            results.append(own.cpu())
        assert_same_bits(*results)

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_a_bound_may_lie_beyond_the_gradients_dtype(self, either: Any) -> None:
        residual = torch.zeros(2, device=self.device)
        grad = torch.tensor([6e4, -3.0], dtype=torch.float16, device=self.device)
        either.fold([residual], [grad], self.scalar(1.0), 1e5)
        either.accumulate_exp_avg_sq([residual], [grad], [0.5], 1, self.scalar(1.0), 1e5)
        assert residual[1].item() == 0.5 * -3.0 + 0.5 * 9.0

    def test_fold_with_scale_one_equals_the_twin_on_the_host(self) -> None:
        residual, grad = torch.randn(3000), torch.randn(3000)
        other = residual.to(self.device, copy=True)
        naive.fold([residual], [grad], torch.ones(()), None)
        self.module.fold([other], [grad.to(self.device)], self.scalar(1.0), None)
        assert_same_bits(other.cpu(), residual)

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_scale_zero_changes_nothing_though_gradients_are_not_finite(self, either: Any) -> None:
        zero, bad = self.scalar(0.0), torch.full((300,), float("nan"), device=self.device)
        state = [torch.randn(300, device=self.device) for _ in range(5)]
        before = [tensor.clone() for tensor in state]
        residual, momentum, exp_avg_sum, theta, second = state
        mask = torch.zeros(3, 1, dtype=torch.uint8, device=self.device)
        either.fold([residual], [bad], zero, None)
        either.accumulate_exp_avg(momentum, exp_avg_sum, bad, 0.9, zero, None)
        sent = either.compact(residual.view(3, 100), mask, torch.bfloat16, zero)
        last_step = torch.zeros(3, 100, dtype=torch.int32, device=self.device)
        moments = momentum.view(3, 100), second.view(3, 100)
        one = hyper(self.device, torch.float32)
        numbers = ops.RowNumbers(self.scalar(1, torch.int32), zero, one, 1.0)
        shard = ops.ShardState(theta[:3].view(3, 1), *moments, last_step)
        either.update_adams(shard._replace(exp_avg_sq=None), mask, bad[:3].view(3, 1), numbers)
        corrected = numbers._replace(first=bad[0], second=bad[0])
        either.update_adamw(shard, mask, bad[:3].view(3, 1), corrected, 2)
        either.accumulate_exp_avg_sq([second], [bad], [0.1], 2, zero, None)
        either.accumulate_exp_avg_sq([second], [bad], [0.1], 2, zero.view(1), 1.0)
        assert (sent == 0).all()
        assert (last_step == 0).all()
        for tensor, old in zip(state, before, strict=True):
            assert_same_bits(tensor, old)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("clip_value", [None, 0.3])
    def test_first_moment_equals_its_twin(self, dtype: torch.dtype, clip_value: float | None) -> None:
        momentum, exp_avg_sum, grad = torch.randn(5000), torch.randn(5000), torch.randn(5000).to(dtype)
        own = [tensor.to(self.device, copy=True) for tensor in (momentum, exp_avg_sum, grad)]
        naive.accumulate_exp_avg(momentum, exp_avg_sum, grad, 0.9, torch.tensor(0.7), clip_value)
        self.module.accumulate_exp_avg(*own, 0.9, self.scalar(0.7), clip_value)
        assert_same_bits(own[0].cpu(), momentum)
        assert_same_bits(own[1].cpu(), exp_avg_sum)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("clip_value", [None, 0.3])
    @pytest.mark.parametrize("by_piece", [False, True])
    def test_second_moment_equals_its_twin_within_rounding(
        self, dtype: torch.dtype, clip_value: float | None, by_piece: bool
    ) -> None:
        moment_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        sizes = (5000, 300, 4096, 1, 0, 77, 900)
        moments = [torch.rand(n, dtype=moment_dtype) for n in sizes]
        grads: list[Tensor | None] = [torch.randn(n).to(torch.float32 if n == 900 else dtype) for n in sizes]
        grads[1], scale = None, torch.tensor(0.7)
        weights = [0.05, 0.05, 1e-3, 0.5, 0.1, 1.0, 0.01]
        if by_piece:  # a gradient that is on no rank, and one that is not finite, where nothing may change
            scale = torch.tensor([0.7, 0.0, 0.7, 0.7, 0.7, 0.7, 0.0])
            grads[6] = torch.full((900,), float("nan"))
        _, ((ours, theirs), *_) = self.both("accumulate_exp_avg_sq", moments, grads, weights, 3, scale, clip_value)
        few = 16 * torch.finfo(moment_dtype).eps  # on a GPU, a division may be off by two places
        for place, (mine, twin) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(mine, twin, rtol=few, atol=0.0)
            if scale.dim() and not scale[place]:
                assert_same_bits(mine, moments[place])
            elif mine.numel():
                assert not torch.equal(mine, moments[place])
        assert_same_bits(ours[1], theirs[1])  # without a gradient, the kernel is the twin

    def test_second_moments_of_any_size_stay_finite(self) -> None:
        moments = [torch.full((3,), 1.0), torch.full((3,), 3e38)]
        grads = [torch.tensor([1e19, -1e30, 3e38])] * 2
        for ranks, clip_value in ((1, None), (4, 2e38)):
            _, ((ours, theirs), *_) = self.both(
                "accumulate_exp_avg_sq", moments, grads, [0.5, 0.5], ranks, torch.ones(()), clip_value
            )
            for mine, twin in zip(ours, theirs, strict=True):
                assert mine.isfinite().all()
                torch.testing.assert_close(mine, twin, rtol=1e-6, atol=0.0)

    # -------------------------------------------------------------------------------------------------- norms

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_squared_norm_equals_its_twin_but_for_the_order_of_summation(self, dtype: torch.dtype) -> None:
        grads = [torch.randn(n).to(dtype) for n in (9000, 4096, 0, 13)]
        ours = self.module.squared_norm([grad.to(self.device) for grad in grads])
        torch.testing.assert_close(ours.cpu(), naive.squared_norm(grads), rtol=5e-6, atol=0)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_sketch_equals_its_twin_but_for_the_order_of_summation(self, dtype: torch.dtype) -> None:
        signs = random_signs(1 << 14)
        grads = [torch.randn(20_000).to(dtype), None, torch.randn(5).to(dtype), torch.randn(9_001)]
        own = [None if grad is None else grad.to(self.device) for grad in grads]
        ours = self.module.sketch(own, signs.to(self.device), SKETCH_WIDTHS)
        torch.testing.assert_close(ours.cpu(), naive.sketch(grads, signs, SKETCH_WIDTHS), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
    def test_norms_of_what_is_not_finite_are_not_finite(self, bad: float) -> None:
        grad = torch.randn(9000, device=self.device)
        grad[8999] = bad
        assert not self.module.squared_norm([grad]).isfinite()
        signs = random_signs(1 << 14).to(self.device)
        assert not self.module.sketch([grad], signs, SKETCH_WIDTHS).norm().isfinite()

    def test_norms_are_the_same_at_every_run(self) -> None:
        grad, signs = torch.randn(30_000, device=self.device), random_signs(1 << 14).to(self.device)
        assert_same_bits(self.module.squared_norm([grad]), self.module.squared_norm([grad]))
        assert_same_bits(
            self.module.sketch([grad], signs, SKETCH_WIDTHS), self.module.sketch([grad], signs, SKETCH_WIDTHS)
        )

    # ------------------------------------------------------------------------------------------------- compact

    @pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("sent", [1, 2, 200, None])
    def test_compact_equals_its_twin(self, wire: torch.dtype, residual_dtype: torch.dtype, sent: int | None) -> None:
        residual = awkward(11, 200).to(residual_dtype)
        residual[8, :3] = torch.tensor([3.4e38, -3.4e38, 65520.0])  # beyond the wire's range, or rounded up to it
        residual[9, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-40, -1e-45])  # ties of bf16; denormals
        mask = None if sent is None else naive.select(residual, sent)
        own = residual.to(self.device, copy=True)
        ours = self.module.compact(own, None if mask is None else mask.to(self.device), wire, self.scalar(1.0))
        theirs = naive.compact(residual, mask, wire, torch.ones(()))
        ours, own = ours.cpu(), own.cpu()
        assert torch.equal(ours.isnan(), theirs.isnan())  # which NaN is left open
        assert_same_bits(ours.nan_to_num(), theirs.nan_to_num())
        assert_same_bits(own.nan_to_num(), residual.nan_to_num())

    @pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("sent", [2, None])
    def test_compact_leaves_rows_alone_whose_scale_is_zero(self, residual_dtype: torch.dtype, sent: int | None) -> None:
        residual, scale = awkward(600, 20).to(residual_dtype), torch.tensor([0.5, 0.0, 1.0]).repeat(200)
        mask = None if sent is None else naive.select(residual, sent)
        (values, expected), ((left, twin), *_) = self.both("compact", residual, mask, torch.bfloat16, scale)
        assert_same_bits(values.nan_to_num(), expected.nan_to_num())
        assert_same_bits(left.nan_to_num(), twin.nan_to_num())
        assert (values[1::3] == 0).all()
        assert_same_bits(left[1::3], residual[1::3])
        every = self.both("compact", residual, mask, torch.bfloat16, torch.ones(()))[0][0]
        assert_same_bits(values[2::3].nan_to_num(), every[2::3].nan_to_num())  # a scale does not scale what is sent
        assert_same_bits(values[::3].nan_to_num(), every[::3].nan_to_num())

    @pytest.mark.parametrize("either", BOTH, indirect=True)
    def test_compact_into_a_part_of_a_buffer(self, either: Any) -> None:
        residual, scale = torch.randn(6, 200, device=self.device), self.scalar(1.0)
        mask = naive.select(residual, 2)
        expected = either.compact(residual.clone(), mask, torch.bfloat16, scale)
        buffer = torch.full((8, 2), 7.0, dtype=torch.bfloat16, device=self.device)
        assert either.compact(residual, mask, torch.bfloat16, scale, out=buffer[1:7]).data_ptr() == buffer[1].data_ptr()
        assert_same_bits(buffer[1:7].cpu(), expected.cpu())
        assert (buffer[[0, 7]] == 7.0).all()

    # -------------------------------------------------------------------------------------------------- update

    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize("by_row", [True, False])
    @pytest.mark.parametrize("correction", [1.0, 0.3, "scalar", "rows"])
    def test_update_equals_its_twin_within_rounding(self, masked: bool, by_row: bool, correction: Any) -> None:
        self.compare_update(masked, by_row, correction, torch.float32, rtol=2e-6)

    def test_update_in_fp64_equals_its_twin_within_rounding(self) -> None:
        self.compare_update(True, False, 1.0, torch.float64, rtol=1e-14)

    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_update_with_measured_noise_equals_its_twin_within_rounding(self, masked: bool, dtype: torch.dtype) -> None:
        rtol = 2e-6 if dtype is torch.float32 else 1e-14
        self.compare_update(masked, False, 0.3, dtype, rtol=rtol, noisy=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("noisy", [True, False])
    def test_update_by_row_equals_its_twin_within_rounding(self, noisy: bool, dtype: torch.dtype) -> None:
        rtol = 2e-6 if dtype is torch.float32 else 1e-14
        self.compare_update(True, True, "rows", dtype, rtol=rtol, noisy=noisy)

    @pytest.mark.parametrize("decay", [0.0, 1000.0, 1500.0])  # 1 - lr * decay is 1, 0, -0.5
    @pytest.mark.parametrize("beta1", [0.0, 0.999])
    def test_update_with_extreme_hyperparameters(self, decay: float, beta1: float) -> None:
        self.compare_update(True, False, 1.0, torch.float32, rtol=2e-6, decay=decay, beta1=beta1)

    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize("by_row", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_adamws_update_equals_its_twin_within_rounding(
        self, masked: bool, by_row: bool, dtype: torch.dtype
    ) -> None:
        rtol = 2e-6 if dtype is torch.float32 else 1e-14
        self.compare_adamw(masked, by_row, dtype, rtol, ranks=1 if masked == by_row else 4)

    @pytest.mark.parametrize("decay", [0.0, 1000.0, 1500.0])
    @pytest.mark.parametrize("beta1", [0.0, 0.999])
    @pytest.mark.parametrize("masked", [True, False])
    def test_adamws_update_with_extreme_hyperparameters(self, decay: float, beta1: float, masked: bool) -> None:
        self.compare_adamw(masked, False, torch.float32, 2e-6, ranks=4, decay=decay, beta1=beta1)

    @pytest.mark.parametrize("masked", [True, False])
    def test_adamws_second_moment_stays_finite_whatever_arrives(self, masked: bool) -> None:
        """Squares beyond fp32, of what arrives and of what the owner has seen: their difference must not be NaN."""
        sizes = torch.tensor([0.0, 1.0, 1e15, 1e19, 3e19, 3e38])
        total = sizes.view(6, 1).expand(6, 12).contiguous()
        second = sizes.square().clamp(max=3.4e38).view(1, 6).expand(6, 6).repeat(1, 2).contiguous()
        last_step = torch.tensor([[8] * 6 + [0] * 6] * 6, dtype=torch.int32)
        mask = torch.arange(12, dtype=torch.uint8).expand(6, 12).contiguous() if masked else None
        state = torch.zeros(6, 12), torch.zeros(6, 12), second, last_step
        one = hyper("cpu", torch.float32)
        half = torch.tensor(0.5)
        row_numbers = ops.RowNumbers(torch.tensor(9, dtype=torch.int32), torch.ones(()), one, half, half)
        _, ((ours_after, theirs_after), *_) = self.both(
            "update_adamw", ops.ShardState(*state), mask, total, row_numbers, 4
        )
        for ours, theirs in zip(ours_after, theirs_after, strict=True):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)

    def compare_adamw(
        self, masked: bool, by_row: bool, dtype: torch.dtype, rtol: float, ranks: int, **options: float
    ) -> None:
        shard = Shard.draw(masked, by_row, dtype)
        corrections = torch.tensor(0.6, dtype=dtype), torch.tensor(0.3, dtype=dtype)
        if by_row:
            corrections = (
                torch.linspace(0.1, 1, Shard.ROWS, dtype=dtype),
                torch.linspace(0.05, 1, Shard.ROWS, dtype=dtype),
            )
        self.compare_step("update_adamw", shard, shard.second, corrections, (ranks,), rtol, **options)

    def compare_update(
        self,
        masked: bool,
        by_row: bool,
        correction: Any,
        dtype: torch.dtype,
        rtol: float,
        noisy: bool = False,
        **options: float,
    ) -> None:
        shard = Shard.draw(masked, by_row, dtype)
        divisor = {"scalar": torch.tensor(0.3, dtype=dtype), "rows": torch.linspace(0.1, 1, Shard.ROWS, dtype=dtype)}
        given = divisor.get(correction, correction) if isinstance(correction, str) else correction
        noise = shard.second * 3 if noisy else None
        self.compare_step("update_adams", shard, noise, (given, None), (0.375,), rtol, **options)

    def compare_step(
        self,
        name: str,
        shard: Shard,
        second: Tensor | None,
        corrections: tuple[Any, Any],
        rest: tuple[Any, ...],
        rtol: float,
        **options: float,
    ) -> None:
        single = hyper("cpu", shard.theta.dtype, shard.lr, **options)
        numbers = ops.RowNumbers(shard.step, shard.scale, single, *corrections, shard.group)
        state = ops.ShardState(shard.theta, shard.first, second, shard.last_step)
        (ours, again), ((after, twins), *_) = self.both(name, state, shard.mask, shard.total, numbers, *rest)
        assert int(ours) == int(again)
        still = shard.scale.expand(Shard.ROWS) == 0
        for field, mine, twin, old in zip(state._fields, after, twins, state, strict=True):
            if old is None:
                continue
            if old.is_floating_point():
                # Differences of nearly equal numbers keep the absolute error of what they are made of.
                torch.testing.assert_close(mine, twin, rtol=rtol, atol=10 * rtol if field == "theta" else rtol)
            else:
                assert torch.equal(mine, twin)
            assert_same_bits(mine[still], old[still])
            reads_only = name == "update_adams" and field == "exp_avg_sq"
            assert torch.equal(mine[~still], old[~still]) == reads_only

    # ------------------------------------------------------------------------------------------------- sweep

    @pytest.mark.parametrize("rank", SWEEPING_RANKS)
    @pytest.mark.parametrize(("sent", "votes", "elected"), SWEEPS)
    def test_sweep_equals_its_parts(
        self, rank: int | None, sent: int | None, votes: int | None, elected: int | None
    ) -> None:
        job = SweepJob.draw(rank, sent, votes, elected)
        self.compare_sweep(job)
        self.compare_sweep(job._replace(clip_value=0.3, scale=torch.tensor(0.7)))
        self.compare_sweep(job._replace(second=None, scale=torch.tensor(-0.5)))

    @pytest.mark.parametrize(("dtype", "residual_dtype", "wire"), SWEPT)
    def test_sweep_of_any_dtypes_equals_its_parts(
        self, dtype: torch.dtype, residual_dtype: torch.dtype, wire: torch.dtype
    ) -> None:
        job = SweepJob.draw(None, 3, 2, None, dtype=dtype, state=residual_dtype, wire=wire)
        self.compare_sweep(job._replace(scale=torch.tensor(0.7), clip_value=0.6))

    def test_sweep_takes_gradients_of_several_dtypes(self) -> None:
        job = SweepJob.draw(0, 2, 2, None)
        assert job.grads is not None
        assert sum(grad is not None for grad in job.grads) > 2
        mixed = [grad if grad is None else grad.to(FLOATS[i % 4]) for i, grad in enumerate(job.grads)]
        self.compare_sweep(job._replace(grads=mixed))

    @pytest.mark.parametrize("rank", [None, 1])
    def test_sweep_of_a_skipped_step_only_ranks(self, rank: int | None) -> None:
        job = SweepJob.draw(rank, 2, 2, 7)
        assert job.grads is not None
        bad = [grad if grad is None else torch.full_like(grad, float("nan")) for grad in job.grads]
        skipped = job._replace(grads=bad, scale=torch.tensor(0.0))
        after = self.compare_sweep(skipped)
        assert_same_bits(after.residual, job.residual)
        assert after.second is not None
        assert job.second is not None
        assert_same_bits(after.second, job.second)
        for rows in job.region.rows:
            assert not after.values[rows].any()

    def test_sweep_by_rows_leaves_alone_the_pieces_whose_scale_is_zero(self) -> None:
        job = SweepJob.draw(None, 2, 2, 5)
        scale = torch.ones(len(job.residual))
        for number, piece in enumerate(job.region.pieces):
            scale[piece.row : piece.row + piece.blocks] = (0.0, 0.5, 1.0)[number % 3]
        assert job.grads is not None
        bad = [g if g is None or i % 3 else torch.full_like(g, float("inf")) for i, g in enumerate(job.grads)]
        after = self.compare_sweep(job._replace(grads=bad, scale=scale))
        still = scale == 0
        assert_same_bits(after.residual[still], job.residual[still])
        assert not torch.equal(after.residual[~still], job.residual[~still])

    def test_sweep_without_gradients_compacts_and_ranks(self) -> None:
        job = SweepJob.draw(2, 2, 3, None)._replace(grads=None)
        after = self.compare_sweep(job)
        assert after.second is not None
        assert job.second is not None
        assert_same_bits(after.second, job.second)

    def test_sweep_of_zeros_denormals_and_huge_numbers_equals_its_parts(self) -> None:
        job = SweepJob.draw(None, 3, 3, 3)
        odd = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, 65520.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0])
        residual = odd[torch.randint(0, 10, job.residual.shape)]
        for blocks in SweepJob.pads(job.region, residual):
            blocks.zero_()
        assert job.grads is not None
        grads = [g if g is None else odd[torch.randint(0, 4, g.shape)] for g in job.grads]
        self.compare_sweep(job._replace(residual=residual, grads=grads))

    def test_sweep_of_an_empty_region_does_nothing(self) -> None:
        job = SweepJob.draw(None, 2, 2, 2)._replace(region=Region((), ()), grads=[], weights=[])
        after = self.compare_sweep(job)
        assert_same_bits(after.residual, job.residual)

    def compare_sweep(self, job: SweepJob) -> SweepJob:
        """By the implementation, the twin, and its parts: bitwise, but for second moments where they round."""
        ours, theirs, parts = job.swept(self.module, self.device), job.swept(naive, "cpu"), job.by_parts()
        for name in ("residual", "values", "proposals", "next_mask", "second"):
            mine, twin, part = (getattr(each, name) for each in (ours, theirs, parts))
            assert (mine is None) == (twin is None) == (part is None)
            if mine is not None:
                assert_same_bits(twin, part)
                (self.assert_same_moments if name == "second" else assert_same_bits)(mine, twin)
        return ours

    # --------------------------------------------------------------------------------------- votes and noise

    @pytest.mark.parametrize(("length", "votes", "sent"), [(200, 2, 2), (250, 25, 40), (1000, 3, 1), (16, 16, 16)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_votes_and_the_elected_equal_their_twins(
        self, length: int, votes: int, sent: int, dtype: torch.dtype
    ) -> None:
        residuals = [torch.randn(40, length, dtype=dtype) for _ in range(3)]
        residuals[2][7:9] = torch.tensor([[0.0], [1e-40]])  # a proposal of zeros, and one of denormals
        proposals = torch.stack([naive.propose(residual, votes) for residual in residuals])
        for residual, proposal in zip(residuals, proposals, strict=True):
            assert torch.equal(self.module.propose(residual.to(self.device), votes).cpu(), proposal)
        for own, residual in enumerate(residuals):
            chosen = self.module.merge(residual.to(self.device), proposals.to(self.device), own, votes, sent)
            assert torch.equal(chosen.cpu(), naive.merge(residual, proposals, own, votes, sent))

    def test_the_elected_of_an_empty_shard_are_none(self) -> None:
        empty = torch.zeros(0, 200, device=self.device)
        proposals = torch.zeros(2, 0, 7, dtype=torch.uint8, device=self.device)
        assert self.module.merge(empty, proposals, 0, 2, 2).shape == (0, 2)

    def test_tables_do_not_come_to_lie_on_the_default_device(self) -> None:
        """Under ``torch.set_default_device("cuda")`` they were made there, and could not be pinned."""
        residual, grad = torch.ones(500, device=self.device), torch.ones(500, device=self.device)
        signs, scale = random_signs(1 << 17).to(self.device), self.scalar(1.0)
        for cache in self.caches:
            cache.cache_clear()
        with torch.device("meta"):
            self.module.fold([residual], [grad], scale, 0.5)
            norm = self.module.squared_norm([grad])
            self.module.sketch([grad], signs, SKETCH_WIDTHS)
        assert residual.tolist() == [1.5] * 500
        assert float(norm) == 500.0

    def test_a_checksum_does_not_depend_on_its_parts(self) -> None:
        flat = torch.randn(300_000)
        assert torch.equal(self.module.checksum(flat.to(self.device)).cpu(), naive.checksum(flat))
        assert torch.equal(chunked.checksum(flat), naive.checksum(flat))
        sums = [naive.column_and_row_sums(flat[first : first + 1024], first) for first in range(0, 300_000, 1024)]
        columns, rows = (torch.stack(each).sum(0) for each in zip(*sums, strict=True))
        assert torch.equal(naive.checksum_of_sums(columns, rows), naive.checksum(flat))

    @pytest.mark.parametrize("clip_value", [None, 0.3])
    def test_measured_noise_equals_its_twin(self, clip_value: float | None) -> None:
        noise, grad = torch.rand(5000), torch.randn(5000)
        own = [tensor.to(self.device, copy=True) for tensor in (noise, grad)]
        naive.accumulate_exp_avg_sq([noise], [grad], [0.1], 4, torch.tensor(0.7), clip_value)
        self.module.accumulate_exp_avg_sq([own[0]], [own[1]], [0.1], 4, self.scalar(0.7), clip_value)
        self.assert_same_moments(own[0].cpu(), noise)
        before = own[0].clone()
        bad = own[1] * float("nan")
        self.module.accumulate_exp_avg_sq([own[0]], [bad], [0.1], 4, self.scalar(0.0), clip_value)
        assert_same_bits(own[0], before)

    def assert_same_moments(self, ours: Tensor, theirs: Tensor) -> None:
        """Equal second moments, to the rounding that the implementation states."""
        torch.testing.assert_close(ours, theirs, rtol=16 * torch.finfo(theirs.dtype).eps, atol=0.0)

    # --------------------------------------------------------------------------------------- gather and scatter

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize("rank", [None, 0, 2])
    def test_gather_and_scatter_equal_their_twins(self, dtype: torch.dtype, masked: bool, rank: int | None) -> None:
        sizes = [1000, 7, 4096, 33, 1]
        layout = Layout(sizes, [0] * len(sizes), 50, 3)
        pieces = list(layout.everything().pieces if rank is None else layout.local(rank).pieces)
        rows = layout.blocks if rank is None else layout.shard_blocks
        flats = [torch.randn(n).to(dtype if i % 2 else torch.float32) for i, n in enumerate(sizes)]
        own = [flat.to(self.device, copy=True) for flat in flats]
        mask = naive.select(torch.randn(rows, 50), 3) if masked else None
        if mask is not None:  # as select leaves it: pads come last in their block
            for piece in pieces:
                tail = piece.numel - (piece.blocks - 1) * 50
                mask[piece.row + piece.blocks - 1] = torch.arange(3) if tail < 3 else torch.randperm(tail)[:3]
        own_mask = None if mask is None else mask.to(self.device)
        out = torch.full((rows, 3 if masked else 50), 7.0)
        own_out = out.to(self.device, copy=True)
        naive.gather_params(flats, pieces, mask, out, 50)
        self.module.gather_params(own, pieces, own_mask, own_out, 50)
        assert_same_bits(own_out.cpu(), out)
        naive.scatter_params(flats, pieces, mask, out * 1.001, 50)
        self.module.scatter_params(own, pieces, own_mask, (out * 1.001).to(self.device), 50)
        changes = torch.randn_like(out).to(torch.bfloat16)
        naive.scatter_params(flats, pieces, mask, changes, 50, True)
        self.module.scatter_params(own, pieces, own_mask, changes.to(self.device), 50, True)
        for ours, theirs in zip(own, flats, strict=True):
            assert_same_bits(ours.cpu(), theirs)
        masters = torch.full_like(out, 7.0, dtype=torch.promote_types(dtype, torch.float32))
        naive.gather_params(flats, pieces, mask, masters, 50)
        masters *= 1 + torch.randint(-1, 2, masters.shape) * torch.finfo(dtype).eps * 0.4  # some round to it, some not
        masters[::2, ::3] = 0.0
        own_masters = masters.to(self.device, copy=True)
        naive.renew_masters(flats, pieces, mask, masters, 50)
        self.module.renew_masters(own, pieces, own_mask, own_masters, 50)
        assert_same_bits(own_masters.cpu(), masters)

    @pytest.mark.parametrize("add", [True, False])
    @pytest.mark.parametrize("masked", [True, False])
    def test_scatter_writes_no_row_of_scale_0(self, masked: bool, add: bool) -> None:
        sizes = [40, 7, 100, 20]
        layout = Layout(sizes, [0] * len(sizes), 20, 1)
        pieces = list(layout.everything().pieces)
        before = [torch.randn(size) for size in sizes]
        before[1][:] = float("nan")
        mask = torch.zeros(layout.blocks, 1, dtype=torch.uint8, device=self.device) if masked else None
        values = torch.full((layout.blocks, 1 if masked else 20), 3.0, device=self.device)
        by_row = torch.full((layout.blocks,), 0.5)
        for piece in pieces[1:3]:
            by_row[piece.row : piece.row + piece.blocks] = 0.0
        for scale, written in ((by_row, {0, 3}), (torch.tensor(0.0), set()), (torch.tensor(0.5), {0, 1, 2, 3})):
            flats = [flat.to(self.device, copy=True) for flat in before]
            self.module.scatter_params(flats, pieces, mask, values, 20, add, scale.to(self.device))
            for place, (flat, old) in enumerate(zip(flats, before, strict=True)):
                expected = old.clone()
                if place in written:
                    chosen = slice(None, None, 20) if masked else slice(None)
                    expected[chosen] = expected[chosen] + 3.0 if add else 3.0
                assert_same_bits(flat.cpu(), expected)

    def test_a_parameter_that_moved_to_other_memory_is_found_there(self) -> None:
        pieces = list(Layout([50], [0], 50, 1).everything().pieces)
        for value in (1.0, 2.0, 1.0):
            flats, out = [torch.full((50,), value, device=self.device)], torch.zeros(1, 50, device=self.device)
            self.module.gather_params(flats, pieces, None, out, 50)
            assert (out == value).all()

    # ------------------------------------------------------------------------------------------- whole trainings

    @pytest.mark.parametrize(
        ("sparsity", "dtype", "options"),
        [
            (0.99, torch.bfloat16, {}),
            (0.9, torch.float32, {"update": "adamw"}),
            (0.9, torch.float32, {"mask_statistic": "first_moment"}),
        ],
    )
    @LENGTHS
    def test_steps_on_given_gradients(
        self, sparsity: float, dtype: torch.dtype, options: dict[str, Any], steps: int
    ) -> None:
        config = ScapeConfig(sparsity=sparsity, dense_steps=2, sparsity_warmup_steps=3, **options)
        theirs = train(config, "naive", "cpu", dtype, steps, follow=False)
        ours = train(config, self.choice, self.device, dtype, steps, follow=False)
        # The gradient does not depend on the parameters: every entry is chosen alike, and what is left is the same.
        assert_same_bits(ours.residual.cpu(), theirs.residual)
        assert_same_bits(ours.last_step.cpu(), theirs.last_step)
        torch.testing.assert_close(ours.exp_avg.cpu(), theirs.exp_avg, rtol=1e-5, atol=1e-5)
        if ours.exp_avg_sq is not None:
            torch.testing.assert_close(ours.exp_avg_sq.cpu(), theirs.exp_avg_sq, rtol=1e-5, atol=1e-5)
        self.compare_parameters(ours, theirs, dtype)

    @pytest.mark.parametrize("update", ["adams", "adamw"])
    @LENGTHS
    def test_steps_whose_gradients_follow_the_parameters(self, update: str, steps: int) -> None:
        config = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0, update=update)
        theirs = train(config, "naive", "cpu", torch.float32, steps, follow=True)
        ours = train(config, self.choice, self.device, torch.float32, steps, follow=True)
        self.compare_parameters(ours, theirs, torch.float32)
        torch.testing.assert_close(ours.residual.cpu(), theirs.residual, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("update", ["adams", "adamw"])
    @pytest.mark.parametrize("dense_steps", [0, 20])
    def test_pads_stay_zero_when_a_state_with_missed_steps_is_loaded(self, update: str, dense_steps: int) -> None:
        config = ScapeConfig(
            sparsity=0.5, block_size=10, update=update, dense_steps=dense_steps, sparsity_warmup_steps=0
        )
        saved: dict[str, Any] | None = None
        for _ in range(2):
            parameter = torch.nn.Parameter(torch.ones(13, device=self.device))
            optimizer = ScapeOptimizer([parameter], config=config)
            if saved is not None:
                optimizer.load_state_dict(saved)
            with ops.using("cuda"):
                for step in range(4):
                    parameter.grad = None if step == 1 else torch.ones_like(parameter)
                    optimizer.step()
                optimizer.drain()
            saved, state = optimizer.state_dict(), optimizer.engine.state
            assert state is not None
            for shard in (state.residual, state.exp_avg, state.exp_avg_sq, state.local_exp_avg_sq):
                assert shard is None or not shard.view(-1)[13:].any()
            assert parameter.isfinite().all()

    def compare_parameters(self, ours: Trained, theirs: Trained, dtype: torch.dtype) -> None:
        # Of order 1 after up to 50 steps of 1e-2: rounding alone. An entry chosen otherwise would be off by 1e-2.
        rtol = 1e-5 if dtype == torch.float32 else 2**-7  # bf16: the last bit of a weight may go the other way
        for a, b in zip(ours.parameters, theirs.parameters, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=rtol, atol=1e-5)


def train(config: ScapeConfig, choice: str, device: str, dtype: torch.dtype, steps: int, *, follow: bool) -> Trained:
    """Steps with two parameter groups, clipping, skipped steps and gaps; gradients may follow the parameters."""
    generator = torch.Generator().manual_seed(3)
    sizes = (900, 40, 611)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(device, dtype)) for n in sizes]
    goals = [torch.randn(n, generator=generator) for n in sizes]
    groups = [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 5e-3, "weight_decay": 0.0}]
    optimizer = ScapeOptimizer(groups, config=config)
    with ops.using(choice):
        for step in range(steps):
            for parameter, goal in zip(parameters, goals, strict=True):
                noise = torch.randn(goal.shape, generator=generator)
                at = parameter.detach().cpu() if follow else 0.0
                parameter.grad = (at - goal + noise).to(device, dtype)
            if step % 4 == 1:
                parameters[1].grad = None  # on every rank: it is left alone
            if step % 10 == 7:
                parameters[0].grad[3] = float("nan")  # skipped: nothing may have changed
            if step % 3 == 0:
                optimizer.clip_grad_norm(5.0) if follow else optimizer.clip_grad_value(0.9)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.drain()
    state = optimizer.engine.state
    assert state is not None
    assert state.missed is not None
    missed = sum(step % 4 == 1 and step % 10 != 7 for step in range(steps))  # those that were skipped are no steps
    assert state.missed.tolist() == [0, missed, 0]
    return Trained([p.detach() for p in parameters], state.residual, state.exp_avg, state.last_step, state.exp_avg_sq)


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
