"""The kernels as compiled for this GPU, on large buffers. ``test_ops.py`` compares results with the definitions."""

from __future__ import annotations

import pytest
import torch
from ops_cases import FAR, assert_same_bits

from lightning_scape import ops
from lightning_scape.core.layout import Piece
from lightning_scape.ops import cuda

pytestmark = pytest.mark.gpu


class TestFarAwayOnGpu:
    """Buffers of 2**31 entries and more, whole: up to 9 GB of device memory at a time."""

    @pytest.fixture(autouse=True)
    def _memory(self):
        free, _ = torch.cuda.mem_get_info()
        if free < 24 * 2**30:
            pytest.skip(f"needs 24 GB of free device memory, has {free / 2**30:.0f}")
        yield
        torch.cuda.empty_cache()

    def test_select(self) -> None:
        blocks = FAR // 256
        residual = torch.zeros(blocks + 1, 256, device="cuda")
        residual[blocks] = torch.randn(256, device="cuda")
        expected = ops.select(residual[blocks:].cpu(), 2)
        mask = cuda.select(residual, 2)
        assert_same_bits(mask[blocks:].cpu(), expected)

    def test_scatter_and_gather(self) -> None:
        flat = torch.zeros(FAR + 100, dtype=torch.bfloat16, device="cuda")
        piece, values = (
            Piece(0, 0, 0, 2, FAR, 100),
            torch.tensor([[1.0], [2.0]], device="cuda"),
        )
        mask = torch.tensor([[7], [49]], dtype=torch.uint8, device="cuda")
        cuda.scatter_params(ops.ParamEntries([flat], [piece], mask, 50), values, True, torch.ones((), device="cuda"))
        assert (float(flat[FAR + 7]), float(flat[FAR + 99]), float(flat.sum())) == (1.0, 2.0, 3.0)
        out = torch.zeros_like(values)
        cuda.gather_params(ops.ParamEntries([flat], [piece], mask, 50), out)
        assert torch.equal(out, values)
