"""Figures of the last step, which tell a user whether SCAPE helps here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields

from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import all_reduce_bytes
from lightning_scape.core.layout import Layout, Piece
from lightning_scape.core.ranges import timed_range
from lightning_scape.scape.communicator import KINDS

PHASES = ("norm", "wait", "mask", "sweep", "exchange", "update", "write", "launch")
"""Phases of a step, in order; also the names of the profiler ranges (``scape::sweep``, ...). The part of my shard in
``sweep`` comes after ``exchange`` has begun, while values travel."""


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
    """Bytes that a ring all-reduce of the whole gradient (DDP) would have sent, in the parameters' own dtypes."""
    density: float
    """Entries sent / P."""
    mask_churn: float
    """Share of this shard's entries in the mask that were not in the previous one, 0 to 1."""
    residual_norm: float
    """L2 norm of this rank's residual after the step."""
    exchange_wait: float
    """Seconds the CPU waited for the mask. Without CUDA 0 means that it travelled wholly behind compute. With CUDA
    the GPU waits instead, which a profiler shows and this figure does not."""
    grad_norm: float
    """Norm of the averaged gradient before clipping: the sketch's estimate, or, with ``clip_norm="local"`` or without
    clipping, the root mean square of the ranks' own norms (an over-estimate)."""
    clip_factor: float
    """Factor of the gradient; 0 in a skipped step."""
    skipped: bool
    """Whether the step was skipped because the norm was not finite."""
    skipped_total: int
    """Steps skipped so far; on CUDA up to the step before, for the CPU learns of a skip one step late."""
    message_seconds: float
    """Seconds of the CPU inside the step's own messages (norm, values, parameters), waiting for other ranks included;
    on CUDA the time to queue them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the CPU by phase (:data:`PHASES`). On CUDA that is the time to queue the work, not to do it."""

    @property
    def bytes_total(self) -> int:
        """All bytes this rank sent in the step."""
        return self.bytes_values + self.bytes_parameters + self.bytes_mask + self.bytes_norm

    @property
    def compression(self) -> float:
        """``bytes_dense / bytes_total``; NaN where nothing is sent because there is one rank."""
        return self.bytes_dense / self.bytes_total if self.bytes_total else float("nan")

    def as_dict(self, prefix: str = "scape") -> dict[str, float]:
        """Flat metric names for a logger: ``scape/density``, ``scape/seconds/sweep``, ..."""
        flat = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name != "seconds"}
        flat |= {"bytes_total": float(self.bytes_total), "compression": self.compression}
        flat |= {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        return {f"{prefix}/{name}" if prefix else name: value for name, value in flat.items()}


@dataclass
class StepRecord:
    """Raw figures of a step, for :class:`StepStats`. Tensors stay on the device until someone asks."""

    exchange_wait: float = 0.0
    sent: int = 0
    """q of the step."""
    norm: Tensor | None = None
    scale: Tensor | None = None
    again: Tensor | None = None
    """Entries of the shard, pads included, that were updated in the step before, too."""
    skipped_total: int = 0
    message_seconds: float = 0.0
    bytes_sent: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a phase of the step."""
        return timed_range(f"scape::{name}", self.seconds)

    def summary(
        self, step: int, residual: Tensor, parameters: Sequence[Tensor], layout: Layout, shard_pieces: Sequence[Piece]
    ) -> StepStats:
        """The figures. Reads the whole residual once, and waits for the device.

        Args:
            step: calls of ``step()`` so far.
            residual: this rank's, as the step left it.
            parameters: those trained.
            layout: theirs.
            shard_pieces: what lies in this rank's shard.
        """
        assert self.norm is not None
        assert self.scale is not None
        assert self.again is not None
        left, scale = float(ops.squared_norm([residual])), float(self.scale)
        mine = sum(piece.kept(self.sent, layout.block_size) for piece in shard_pieces)
        everywhere = sum(piece.kept(self.sent, layout.block_size) for piece in layout.everything().pieces)
        pads = layout.shard_blocks * self.sent - mine  # the same ones at every step
        again = max(0.0, float(self.again) - pads)
        return StepStats(
            step=step,
            **{f"bytes_{kind}": self.bytes_sent[kind] for kind in KINDS},
            bytes_dense=all_reduce_bytes(parameters, layout.world_size),
            density=everywhere / max(1, layout.numel),
            mask_churn=1 - again / mine if mine and scale else 0.0,
            residual_norm=left**0.5,
            exchange_wait=self.exchange_wait,
            grad_norm=float(self.norm),
            clip_factor=scale,
            skipped=scale == 0.0,
            skipped_total=self.skipped_total,
            message_seconds=self.message_seconds,
            seconds=dict(self.seconds),
        )
