"""Figures of the last exchange."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields

from torch import Tensor

from lightning_scape.core.layout import Layout
from lightning_scape.core.ranges import timed_range
from lightning_scape.sparseloco.phase import Opened

PHASES = ("norm", "fold", "send", "average", "return", "outer", "set_out")
"""Phases of an exchange, in order; also the names of the profiler ranges (``sparseloco::fold``, ...). ``set_out`` moves
the parameters."""


@dataclass(frozen=True)
class ExchangeStats:
    """Figures of one exchange on one rank. Bytes are those this rank sent, counted from the tensors themselves."""

    step: int
    """Inner steps when it ended."""
    exchange: int
    """Exchanges so far, this one included."""
    bytes_values: int
    """To the owners."""
    bytes_parameters: int
    """Back to all ranks."""
    bytes_norm: int
    bytes_dense: int
    """Bytes that a ring all-reduce of the gradient (DDP) would have sent in one step, in the parameters' own dtypes."""
    density: float
    """Entries sent / P, each way."""
    delta_norm: float
    """Root mean square over ranks of the norm of the pseudo-gradient, start minus parameters."""
    error_norm: float
    """L2 norm of this rank's error feedback after the exchange."""
    skipped: bool
    """Whether the window was dropped because some rank's parameters were not finite."""
    skipped_total: int
    """Windows dropped so far; on CUDA up to the one before, for the CPU learns of it a step late."""
    message_seconds: float
    """Seconds of the CPU inside messages, waiting for other ranks included; on CUDA the time to queue them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the CPU by phase (:data:`PHASES`). On CUDA that is the time to queue the work, not to do it."""

    @classmethod
    def of(
        cls, record: ExchangeRecord, layout: Layout, sent: int, dense: int, error_norm: float, skipped_total: int
    ) -> ExchangeStats:
        """From a record, whose norm is read: on CUDA it waits for the device.

        Args:
            record: of the exchange, which has ended.
            layout: of this rank's parameters.
            sent: entries of a block that are sent.
            dense: bytes of an all-reduce.
            error_norm: norm of the error feedback.
            skipped_total: dropped windows.
        """
        norm = float(record.norm)
        entries = sum(piece.kept(sent, layout.block_size) for piece in layout.everything().pieces)
        return cls(
            step=record.step,
            exchange=record.exchange,
            bytes_values=record.bytes_sent["values"],
            bytes_parameters=record.bytes_sent["parameters"],
            bytes_norm=record.bytes_sent["norm"],
            bytes_dense=dense,
            density=entries / max(1, layout.numel),
            delta_norm=norm,
            error_norm=error_norm,
            skipped=not math.isfinite(norm),
            skipped_total=skipped_total,
            message_seconds=record.message_seconds,
            seconds=dict(record.seconds),
        )

    @property
    def bytes_total(self) -> int:
        """All bytes this rank sent in the exchange."""
        return self.bytes_values + self.bytes_parameters + self.bytes_norm

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


@dataclass
class ExchangeRecord:
    """Raw figures of an exchange, for :class:`ExchangeStats`. Tensors stay on the device until someone asks."""

    norm: Tensor = field(init=False)
    """0-dim: see :attr:`ExchangeStats.delta_norm`; not finite where the window was dropped."""
    opened: Opened | None = None
    """Every rank's first message."""
    idle: bool = False
    """Whether no rank had a window, so that nothing was exchanged."""
    step: int = 0
    """Inner steps when it ended."""
    exchange: int = 0
    """Its number, from 1."""
    message_seconds: float = 0.0
    bytes_sent: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a phase of the exchange."""
        return timed_range(f"sparseloco::{name}", self.seconds)
