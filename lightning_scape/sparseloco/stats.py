"""Figures of the last exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

PHASES = ("norm", "fold", "send", "outer", "set_out")
"""Phases of an exchange, in order; also the names of the profiler ranges (``sparseloco::fold``, ...)."""


@dataclass(frozen=True)
class ExchangeStats:
    """Figures of one exchange on one rank. Bytes are those this rank sent, counted from the tensors themselves."""

    step: int
    """Inner steps when it ended."""
    exchange: int
    """Exchanges so far, this one included."""
    bytes_parameters: int
    """Messages to all ranks."""
    bytes_norm: int
    """First messages."""
    bytes_dense: int
    """Bytes that a ring all-reduce of the gradient (DDP) would have sent in one step, in the parameters' own dtypes."""
    density: float
    """Entries sent / P."""
    delta_norm: float
    """Root mean square over ranks of the norm of the pseudo-gradient, start minus parameters."""
    skipped: bool
    """Whether the window was dropped because some rank's parameters were not finite."""
    skipped_total: int
    """Windows dropped so far."""
    message_seconds: float
    """Seconds of the CPU inside messages, waiting for other ranks included; on CUDA the time to queue most of them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the CPU by phase (:data:`PHASES`). On CUDA that is the time to queue the work, not to do it."""

    @property
    def bytes_total(self) -> int:
        """All bytes this rank sent in the exchange."""
        return self.bytes_parameters + self.bytes_norm

    @property
    def compression(self) -> float:
        """``bytes_dense / bytes_total``, of one exchange; NaN where nothing is sent because there is one rank."""
        return self.bytes_dense / self.bytes_total if self.bytes_total else float("nan")

    def as_dict(self, prefix: str = "sparseloco") -> dict[str, float]:
        """Flat metric names for a logger: ``sparseloco/density``, ``sparseloco/seconds/fold``, ..."""
        flat = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name != "seconds"}
        flat |= {"bytes_total": float(self.bytes_total), "compression": self.compression}
        flat |= {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        return {f"{prefix}/{name}" if prefix else name: value for name, value in flat.items()}
