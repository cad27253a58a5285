"""Figures of the last step, which tell a user whether SCAPE helps here."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from lightning_scape.core.ranges import timed_range
from lightning_scape.scape.communicator import KINDS

PHASES = ("wait", "norm", "mask", "sweep", "exchange", "update", "write", "launch")
"""Phases of a step, in order; also the names of the profiler ranges (``scape::sweep``, ...). The part of my shard in
``sweep`` comes after ``exchange`` has begun, while values travel."""


@dataclass
class StepStats:
    """Figures of one step on one rank. On CUDA reading one that is a property may wait for the device."""

    norm: Tensor | None = None
    scale: Tensor | None = None
    step: int = 0
    """Calls of ``step()`` so far, this one included."""
    density: float = 0.0
    """Entries sent / P; pads count as entries."""
    bytes_sent: Counter[str] = field(default_factory=Counter)
    """Bytes this rank sent, by kind of message, counted from the tensors themselves."""
    bytes_dense: int = 0
    """Bytes that a ring all-reduce of the whole gradient (DDP) would have sent, in the parameters' own dtypes."""
    exchange_wait: float = 0.0
    """Seconds the CPU waited for the mask. Without CUDA 0 means that it travelled wholly behind compute. With CUDA
    the GPU waits instead, which a profiler shows and this figure does not."""
    skipped_total: int = 0
    """Steps skipped so far; on CUDA up to the step before, for the CPU learns of a skip one step late."""
    message_seconds: float = 0.0
    """Seconds of the CPU inside the step's own messages (norm, values, parameters), waiting for other ranks included;
    on CUDA the time to queue them."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds of the CPU by phase (:data:`PHASES`). On CUDA that is the time to queue the work, not to do it."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a phase of the step."""
        return timed_range(f"scape::{name}", self.seconds)

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

    @property
    def bytes_total(self) -> int:
        """All bytes this rank sent in the step, comparisons of replicas left out."""
        return sum(self.bytes_sent[kind] for kind in KINDS)

    @property
    def compression(self) -> float:
        """``bytes_dense / bytes_total``; NaN where nothing is sent because there is one rank."""
        return self.bytes_dense / self.bytes_total if self.bytes_total else float("nan")

    def as_dict(self, prefix: str = "scape") -> dict[str, float]:
        """Flat metric names for a logger: ``scape/density``, ``scape/seconds/sweep``, ..."""
        of_transfer = ("bytes_dense", "bytes_total", "compression", "density", "exchange_wait", "message_seconds")
        of_gradient = ("grad_norm", "clip_factor", "skipped", "skipped_total")
        flat = {name: float(getattr(self, name)) for name in ("step", *of_transfer, *of_gradient)}
        flat |= {f"bytes_{kind}": float(self.bytes_sent[kind]) for kind in KINDS}
        flat |= {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        return {f"{prefix}/{name}" if prefix else name: value for name, value in flat.items()}
