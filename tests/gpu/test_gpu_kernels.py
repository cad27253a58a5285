"""The kernels as compiled for this GPU, against their twins on the CPU."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import FAR, KernelChecks, assert_same_bits, far_piece

from lightning_scape import ops
from lightning_scape.ops import naive
from lightning_scape.ops.cuda import launch  # noqa: F401  with it, all that Triton does
from lightning_scape.ops.registry import CUDA as cuda

pytestmark = pytest.mark.gpu


class TestOnGpu(KernelChecks):
    device = "cuda"


class TestFarAwayOnGpu:
    """Buffers of 2**31 entries and more, whole: up to 9 GB of device memory at a time."""

    @pytest.fixture(autouse=True)
    def _memory(self):
        free, _ = torch.cuda.mem_get_info()
        if free < 24 * 2**30:
            pytest.skip(f"needs 24 GB of free device memory, has {free / 2**30:.0f}")
        yield
        torch.cuda.empty_cache()

    def test_select_and_compact(self) -> None:
        blocks = FAR // 256
        residual = torch.zeros(blocks + 1, 256, device="cuda")
        residual[blocks] = torch.randn(256, device="cuda")
        expected = naive.select(residual[blocks:].cpu(), 2)
        mask = cuda.select(residual, 2)
        assert_same_bits(mask[blocks:].cpu(), expected)
        before = residual[blocks:].clone()
        sent = cuda.compact(residual, mask, torch.bfloat16, torch.ones((), device="cuda"))
        assert_same_bits(sent[blocks:].float(), before.gather(1, mask[blocks:].long()).bfloat16().float())

    def test_fold(self) -> None:
        residual = torch.zeros(FAR + 100, device="cuda")
        grad = torch.zeros(FAR + 100, dtype=torch.bfloat16, device="cuda")
        grad[FAR:] = 3.0
        cuda.fold([residual], [grad], torch.full((), 0.5, device="cuda"))
        assert (residual[FAR:] == 1.5).all()
        assert float(cuda.squared_norm([grad])) == 900.0

    def test_scatter_and_gather(self) -> None:
        flat = torch.zeros(FAR + 100, dtype=torch.bfloat16, device="cuda")
        piece, values = far_piece(100, 50), torch.tensor([[1.0], [2.0]], device="cuda")
        mask = torch.tensor([[7], [49]], dtype=torch.uint8, device="cuda")
        cuda.scatter_params(ops.ParamEntries([flat], [piece], mask, 50), values)
        assert (float(flat[FAR + 7]), float(flat[FAR + 99]), float(flat.sum())) == (1.0, 2.0, 3.0)
        out = torch.zeros_like(values)
        cuda.gather_params(ops.ParamEntries([flat], [piece], mask, 50), out)
        assert torch.equal(out, values)
