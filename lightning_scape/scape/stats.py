"""Figures of the last step, which tell a user whether SCAPE helps here."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_scape.core.stats import Stats
from lightning_scape.scape.communicator import KINDS


@dataclass
class StepStats(Stats):
    """Figures of one step on one rank. On CUDA reading one that is a property may wait for the device.

    The part of my shard in ``seconds["sweep"]`` comes after ``"exchange"`` has begun, while values travel.
    """

    METHOD = "scape"
    PHASES = ("wait", "norm", "mask", "sweep", "exchange", "update", "write", "launch")
    KINDS = KINDS
    LOGGED = ("exchange_wait", "grad_norm", "clip_factor", "skipped")

    norm: Tensor | None = None
    scale: Tensor | None = None
    exchange_wait: float = 0.0
    """Seconds the CPU waited for the mask. Without CUDA 0 means that it travelled wholly behind compute. With CUDA
    the GPU waits instead, which a profiler shows and this figure does not."""

    @property
    def grad_norm(self) -> float:
        """Norm of the averaged gradient before clipping: the sketch's estimate.

        With ``clip_norm="local"`` or without clipping, the root mean square of the ranks' own norms: an over-estimate.
        """
        return float("nan") if self.norm is None else float(self.norm)

    @property
    def clip_factor(self) -> float:
        """Factor of the gradient; 0 in a skipped step."""
        return float("nan") if self.scale is None else float(self.scale)

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped because the norm was not finite."""
        return self.clip_factor == 0.0
