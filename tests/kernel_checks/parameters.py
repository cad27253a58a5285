"""Checks of what lies between parameters and blocks."""

from __future__ import annotations

import pytest
import torch

from kernel_checks.inputs import (
    FLOATS,
    Checks,
    assert_same_bits,
)
from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.ops import naive
from lightning_scape.ops.naive import chunked


class ParameterChecks(Checks):
    """Gathering, scattering, checksums."""

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(("masked", "rank"), [(True, None), (False, 0), (True, 2)])
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
        naive.gather_params(ops.ParamEntries(flats, pieces, mask, 50), out)
        self.module.gather_params(ops.ParamEntries(own, pieces, own_mask, 50), own_out)
        assert_same_bits(own_out.cpu(), out)
        naive.scatter_params(ops.ParamEntries(flats, pieces, mask, 50), out * 1.001)
        self.module.scatter_params(ops.ParamEntries(own, pieces, own_mask, 50), (out * 1.001).to(self.device))
        changes = torch.randn_like(out).to(torch.bfloat16)
        naive.scatter_params(ops.ParamEntries(flats, pieces, mask, 50), changes, True)
        self.module.scatter_params(ops.ParamEntries(own, pieces, own_mask, 50), changes.to(self.device), True)
        errors = [torch.randn(rows, 50) / 1000 for _ in range(2)]
        before, by_row = [flat.to(torch.float64, copy=True) for flat in flats], torch.ones(rows)
        by_row[pieces[0].row : pieces[0].row + pieces[0].blocks] = 0.0
        for scale in (None, by_row):
            twins, given = [errors[0].clone(), errors[0].clone()], torch.randn_like(out) / 100
            naive.scatter_params(ops.ParamEntries(flats, pieces, mask, 50), given, True, scale, twins[0])
            there = None if scale is None else scale.to(self.device)
            ours = twins[1].to(self.device)
            entries = ops.ParamEntries(own, pieces, own_mask, 50)
            self.module.scatter_params(entries, given.to(self.device), True, there, ours)
            assert_same_bits(ours.cpu(), twins[0])
            for piece in pieces if scale is None else ():  # what a parameter has lost to rounding is in its error
                flat, old = flats[piece.segment.index], before[piece.segment.index]
                added = torch.zeros(rows, 50).double()
                naive.scatter_blocks(added, mask, given, add=True)
                inside, part = piece.of_blocks(50), piece.of_parameter
                left = (twins[0].double() - errors[0].double()).view(-1)[inside]
                narrow = flat.itemsize < 4
                assert left.any() == narrow
                total = flat.double()[part] - old[part] + left
                torch.testing.assert_close(total, added.view(-1)[inside], rtol=1e-6, atol=1e-6)
        for ours, theirs in zip(own, flats, strict=True):
            assert_same_bits(ours.cpu(), theirs)
        masters = torch.full_like(out, 7.0, dtype=torch.promote_types(dtype, torch.float32))
        naive.gather_params(ops.ParamEntries(flats, pieces, mask, 50), masters)
        masters *= 1 + torch.randint(-1, 2, masters.shape) * torch.finfo(dtype).eps * 0.4  # some round to it, some not
        masters[::2, ::3] = 0.0
        own_masters = masters.to(self.device, copy=True)
        naive.gather_params(ops.ParamEntries(flats, pieces, mask, 50), masters, renew=True)
        self.module.gather_params(ops.ParamEntries(own, pieces, own_mask, 50), own_masters, renew=True)
        assert_same_bits(own_masters.cpu(), masters)

    @pytest.mark.parametrize(("masked", "add"), [(True, True), (False, False)])
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
            self.module.scatter_params(ops.ParamEntries(flats, pieces, mask, 20), values, add, scale.to(self.device))
            for place, (flat, old) in enumerate(zip(flats, before, strict=True)):
                expected = old.clone()
                if place in written:
                    chosen = slice(None, None, 20) if masked else slice(None)
                    expected[chosen] = expected[chosen] + 3.0 if add else 3.0
                    # What is added to a NaN is a NaN, of which processors have several.
                    assert torch.equal(flat.cpu().isnan(), expected.isnan())
                    flat, expected = flat.cpu().nan_to_num(), expected.nan_to_num()
                assert_same_bits(flat.cpu(), expected)

    def test_a_parameter_that_moved_to_other_memory_is_found_there(self) -> None:
        pieces = list(Layout([50], [0], 50, 1).everything().pieces)
        for value in (1.0, 2.0, 1.0):
            flats, out = [torch.full((50,), value, device=self.device)], torch.zeros(1, 50, device=self.device)
            self.module.gather_params(ops.ParamEntries(flats, pieces, None, 50), out)
            assert (out == value).all()

    def test_a_checksum_does_not_depend_on_its_parts(self) -> None:
        flat = torch.randn(300_000)
        assert torch.equal(self.module.checksum(flat.to(self.device)).cpu(), naive.checksum(flat))
        assert torch.equal(chunked.checksum(flat), naive.checksum(flat))
        sums = [naive.column_and_row_sums(flat[first : first + 1024], first) for first in range(0, 300_000, 1024)]
        columns, rows = (torch.stack(each).sum(0) for each in zip(*sums, strict=True))
        assert torch.equal(naive.checksum_of_sums(columns, rows), naive.checksum(flat))
