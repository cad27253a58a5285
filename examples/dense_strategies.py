"""Dense methods to compare with, as strategies of Lightning's that work with gloo; no script of its own."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


class Unsynchronized(DDPStrategy):
    """Every rank for itself: what a run takes without its messages. A broadcast's or a barrier's word still travels."""

    def configure_ddp(self) -> None:
        pass


class BFloat16DDP(DDPStrategy):
    """DDP with the hook that sends gradients as bf16. Lightning registers hooks on CUDA only; gloo can do it, too."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(None, _bf16_hook)


class PowerSGD(DDPStrategy):
    """DDP with PowerSGD (arXiv 1905.13727), torch's: gradients as products of two narrow matrices.

    Args:
        rank: width of the matrices.
    """

    def __init__(self, rank: int) -> None:
        # One bucket: with several, gloo calls the hook's callbacks in another order on each rank, and aborts.
        super().__init__(bucket_cap_mb=4096)
        self._rank = rank

    def _register_ddp_hooks(self) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=self._rank, start_powerSGD_iter=2)
        self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


BY_NAME = {"compute": Unsynchronized, "ddp": DDPStrategy, "ddp-bf16": BFloat16DDP}
"""As the benchmarks name them; PowerSGD has a rank besides."""


def _bf16_hook(state, bucket):  # DDP wants its annotations as classes or not at all
    # DDP knows torch's own hook by name and refuses it without CUDA.
    return default_hooks.bf16_compress_hook(state, bucket)
