"""What the last step did: the figures that tell a user whether SCAPE helps here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

PHASES = ("norm", "wait", "fold", "compact", "synchronize", "update", "reconstruct", "select")
"""Phases of a step, in order; also the names of the profiler ranges (``scape::fold``, ...)."""


@dataclass(frozen=True)
class StepStats:
    """Figures of one step on one rank. Bytes are those this rank sent, counted from the tensors themselves."""

    step: int
    """Calls of ``step()`` so far, this one included."""
    bytes_values: int
    bytes_parameters: int
    bytes_mask: int
    bytes_norm: int
    bytes_dense: int
    """What a ring all-reduce of the whole gradient in the parameters' own dtypes would have sent (DDP)."""
    density: float
    """Entries sent / P."""
    mask_churn: float
    """Share of this shard's entries in the mask that were not in the previous one, 0 to 1."""
    residual_norm: float
    """L2 norm of this rank's residual after the step."""
    energy_captured: float
    """Share of the squared norm of this rank's residual (gradient folded in) that the step sent, 0 to 1."""
    exchange_wait: float
    """Seconds the host waited for the mask; 0 means that it travelled wholly behind the compute."""
    grad_norm: float
    """Norm of the averaged gradient before clipping: the sketch's estimate, or, with ``clip_norm="local"`` or without
    clipping, the root mean square of the ranks' own norms (an over-estimate)."""
    clip_factor: float
    """What the gradient was multiplied with; 0 in a skipped step."""
    skipped: bool
    """Whether the step was skipped because the norm was not finite."""
    skipped_total: int
    """Steps skipped so far."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the host by phase (:data:`PHASES`). On CUDA that is the time to queue the work, not to do it."""

    @property
    def bytes_total(self) -> int:
        """All bytes this rank sent in the step."""
        return self.bytes_values + self.bytes_parameters + self.bytes_mask + self.bytes_norm

    @property
    def compression(self) -> float:
        """``bytes_dense / bytes_total``; NaN where nothing is sent because there is one rank."""
        return self.bytes_dense / self.bytes_total if self.bytes_total else float("nan")

    def as_dict(self, prefix: str = "scape") -> dict[str, float]:
        """Flat metric names for a logger: ``scape/density``, ``scape/seconds/fold``, ..."""
        flat = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name != "seconds"}
        flat |= {"bytes_total": float(self.bytes_total), "compression": self.compression}
        flat |= {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        return {f"{prefix}/{name}": value for name, value in flat.items()}
