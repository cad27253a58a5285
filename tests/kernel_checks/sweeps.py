"""Checks of the sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernel_checks.inputs import (
    FLOATS,
    Checks,
    assert_same_bits,
    copied,
)
from lightning_scape import ops
from lightning_scape.core.layout import Layout, Region
from lightning_scape.ops import naive
from lightning_scape.ops.naive.wire import GROUP

SWEPT = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
]
"""Dtypes of gradients, residual and wire. Each combination is compiled, so not all of them."""
if torch.cuda.is_available():
    SWEPT += [
        (torch.float16, torch.float32, torch.float16),
        (torch.float64, torch.float64, torch.float64),
        (torch.bfloat16, torch.float64, torch.bfloat16),
        (torch.float64, torch.float32, torch.bfloat16),
    ]


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
    message: Tensor | None = None

    @classmethod
    def draw(
        cls,
        rank: int | None,
        sent: int | None,
        *,
        sizes: Sequence[int] = (3000, 77, 4096, 5, 40, 1300),
        length: int = 200,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        state: torch.dtype = torch.float32,
        wire: torch.dtype = torch.bfloat16,
        bits: int | None = None,
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
        shards, columns = 1 if rank == 1 else 3, length if sent is None else sent
        packed = None if bits is None else (shards, -(-rows // shards * columns // GROUP), naive.group_bytes(bits))
        return cls(
            region,
            residual,
            [None if i % 5 == 1 else grad for i, grad in enumerate(grads)],
            torch.tensor(1.0),
            mask,
            torch.full((rows, columns), 7.0, dtype=wire),
            torch.rand(rows, length, generator=generator, dtype=state),
            [0.1, 1e-3, 0.5, 0.05, 1.0, 0.2, 0.3, 0.4][: len(grads)],
            message=None if packed is None else torch.full(packed, 7, dtype=torch.uint8),
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
        work = ops.Sweep(
            own.region,
            own.residual,
            own.grads,
            own.scale,
            own.mask,
            own.values,
            second_moment=second,
            message=own.message,
        )
        module.sweep(work)
        return copied(own, "cpu")

    def by_parts(self) -> SweepJob:
        """What the separate operations of the definition make of copies."""
        own, length = copied(self, "cpu"), self.residual.shape[1]
        for place, piece in enumerate(own.region.pieces if own.grads is not None else ()):
            entries = slice(piece.row * length, piece.row * length + piece.numel)
            scale = own.scale[piece.row] if own.scale.dim() else own.scale
            naive.fold([own.residual.view(-1)[entries]], [own.grads[place]], scale)
            if own.second is not None:
                rest = [own.grads[place]], [own.weights[place]], 3, scale
                naive.accumulate_exp_avg_sq([own.second.view(-1)[entries]], *rest)
        for row in (row for rows in own.region.rows for row in range(rows.start, rows.stop)):
            one, scale = slice(row, row + 1), own.scale[row] if own.scale.dim() else own.scale
            part = None if own.mask is None else own.mask[one]
            own.values[one] = naive.compact(own.residual[one], part, own.values.dtype, scale)
        for rows in own.region.rows if own.message is not None else ():
            for shard in range(rows.start // own.rows_of_shard, rows.stop // own.rows_of_shard):
                own.pack_shard(shard)
        return own

    @property
    def rows_of_shard(self) -> int:
        return len(self.residual) // (1 if self.message is None else len(self.message))

    def pack_shard(self, shard: int) -> None:
        """What rounding leaves of a shard's values is put back one entry at a time."""
        assert self.message is not None
        rows = range(shard * self.rows_of_shard, (shard + 1) * self.rows_of_shard)
        part, bits = self.values[rows.start : rows.stop].view(1, -1), naive.bits_in(self.message.shape[2])
        self.message[shard] = naive.quantize(part, bits)[0]
        for row in rows:
            places = torch.arange(self.residual.shape[1]) if self.mask is None else self.mask[row].long()
            self.residual[row, places] += self.values[row]
        part.copy_(naive.dequantize(self.message[shard : shard + 1], bits, part.numel()))


SWEEPS = ((None, 2), (0, 25), (1, None), (2, 1))
"""Rank, and entries sent per block."""


class SweepChecks(Checks):
    """Of one pass over memory."""

    @pytest.mark.parametrize(("rank", "sent"), SWEEPS)
    def test_sweep_equals_its_parts(self, rank: int | None, sent: int | None) -> None:
        job = SweepJob.draw(rank, sent)
        self.compare_sweep(job)
        self.compare_sweep(job._replace(scale=torch.tensor(0.7)))
        self.compare_sweep(job._replace(second=None, scale=torch.tensor(-0.5)))

    @pytest.mark.parametrize(("dtype", "residual_dtype", "wire"), SWEPT)
    def test_sweep_of_any_dtypes_equals_its_parts(
        self, dtype: torch.dtype, residual_dtype: torch.dtype, wire: torch.dtype
    ) -> None:
        job = SweepJob.draw(None, 3, dtype=dtype, state=residual_dtype, wire=wire)
        self.compare_sweep(job._replace(scale=torch.tensor(0.7)))

    @pytest.mark.parametrize(("sent", "bits"), [(2, 4), (25, 8)])
    def test_sweep_packs_what_it_takes_and_gives_back_what_rounding_leaves(self, sent: int | None, bits: int) -> None:
        """Groups of 64 values cross rows, pieces, and runs of one dtype; no two shards share one."""
        for rank in (0, None):
            job = SweepJob.draw(rank, sent, wire=torch.float32, bits=bits)
            assert job.grads is not None
            mixed = [grad if grad is None else grad.to(FLOATS[i // 2 % 2]) for i, grad in enumerate(job.grads)]
            after = self.compare_sweep(job._replace(grads=mixed))
            exact = self.compare_sweep(job._replace(grads=mixed, message=None))
            assert after.message is not None
            count = job.rows_of_shard * job.values.shape[1]
            read = naive.dequantize(after.message, bits, count).view(job.values.shape)
            for rows in job.region.rows:  # sent plus left is what was there, bit for bit
                left = naive.gather_blocks(after.residual[rows], naive.cut(job.mask, rows))
                assert torch.equal(read[rows].double() + left.double(), exact.values[rows].double())
                assert_same_bits(after.values[rows], read[rows])
                assert not naive.gather_blocks(exact.residual[rows], naive.cut(job.mask, rows)).any()
            self.compare_sweep(job._replace(scale=torch.tensor(0.0)))
            self.compare_sweep(job._replace(grads=None))

    def test_sweep_takes_gradients_of_several_dtypes(self) -> None:
        job = SweepJob.draw(0, 2)
        assert job.grads is not None
        assert sum(grad is not None for grad in job.grads) > 2
        mixed = [grad if grad is None else grad.to(FLOATS[i % len(FLOATS)]) for i, grad in enumerate(job.grads)]
        self.compare_sweep(job._replace(grads=mixed))

    @pytest.mark.parametrize("rank", [None, 1])
    def test_sweep_of_a_skipped_step_changes_nothing(self, rank: int | None) -> None:
        job = SweepJob.draw(rank, 2)
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
        job = SweepJob.draw(None, 2)
        scale = torch.ones(len(job.residual))
        for number, piece in enumerate(job.region.pieces):
            scale[piece.row : piece.row + piece.blocks] = (0.0, 0.5, 1.0)[number % 3]
        assert job.grads is not None
        bad = [g if g is None or i % 3 else torch.full_like(g, float("inf")) for i, g in enumerate(job.grads)]
        after = self.compare_sweep(job._replace(grads=bad, scale=scale))
        still = scale == 0
        assert_same_bits(after.residual[still], job.residual[still])
        assert not torch.equal(after.residual[~still], job.residual[~still])

    def test_sweep_without_gradients_compacts(self) -> None:
        job = SweepJob.draw(2, 2)._replace(grads=None)
        after = self.compare_sweep(job)
        assert after.second is not None
        assert job.second is not None
        assert_same_bits(after.second, job.second)

    def test_sweep_of_zeros_denormals_and_huge_numbers_equals_its_parts(self) -> None:
        job = SweepJob.draw(None, 3)
        odd = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, 65520.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0])
        residual = odd[torch.randint(0, 10, job.residual.shape)]
        for blocks in SweepJob.pads(job.region, residual):
            blocks.zero_()
        assert job.grads is not None
        grads = [g if g is None else odd[torch.randint(0, 4, g.shape)] for g in job.grads]
        self.compare_sweep(job._replace(residual=residual, grads=grads))

    def test_sweep_of_an_empty_region_does_nothing(self) -> None:
        job = SweepJob.draw(None, 2)._replace(region=Region((), ()), grads=[], weights=[])
        after = self.compare_sweep(job)
        assert_same_bits(after.residual, job.residual)

    def compare_sweep(self, job: SweepJob) -> SweepJob:
        """By the implementation, the twin, and its parts: bitwise, but for second moments where they round."""
        ours, theirs, parts = job.swept(self.module, self.device), job.swept(naive, "cpu"), job.by_parts()
        for name in ("residual", "values", "second", "message"):
            mine, twin, part = (getattr(each, name) for each in (ours, theirs, parts))
            assert (mine is None) == (twin is None) == (part is None)
            if mine is not None:
                assert_same_bits(twin, part)
                (self.assert_same_moments if name == "second" else assert_same_bits)(mine, twin)
        return ours
