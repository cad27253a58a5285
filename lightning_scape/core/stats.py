"""Figures of an exchange; their seconds are told by phases, which a profiler shows by the same names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

from torch.profiler import record_function

from lightning_scape.core.private_names import profiler_records


@dataclass
class Stats:
    """Figures of one exchange on one rank. On CUDA reading one that is a property may wait for the device."""

    METHOD: ClassVar[str]
    PHASES: ClassVar[tuple[str, ...]]
    """In order; also the names of the profiler's ranges, ``method::phase``."""
    KINDS: ClassVar[tuple[str, ...]]
    """Of messages."""
    LOGGED: ClassVar[tuple[str, ...]]
    """Figures of this method's alone."""

    step: int = 0
    """Steps so far, this one included."""
    density: float = 0.0
    """Entries sent / P; pads count as entries."""
    bytes_sent: Counter[str] = field(default_factory=Counter)
    """Bytes this rank sent, by kind of message, counted from the tensors themselves."""
    bytes_dense: int = 0
    """Bytes that a ring all-reduce of the whole gradient (DDP) would have sent in one step, in the parameters' own
    dtypes."""
    skipped_total: int = 0
    """Steps (SparseLoCo: windows) dropped so far; SCAPE's on CUDA up to the step before, for the CPU learns late."""
    message_seconds: float = 0.0
    """Seconds of the CPU inside messages (a mask's left out), waiting for other ranks included; on CUDA the time to
    queue them."""
    seconds: dict[str, float] = field(init=False)
    """Seconds of the CPU by phase. On CUDA that is the time to queue the work, not to do it."""

    def __post_init__(self) -> None:
        self.seconds = dict.fromkeys(self.PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase: a range of torch's profiler, while one records.

        Without a profiler torch's range costs several microseconds, and hands Python's lock to another thread.
        """
        began, label = time.perf_counter(), f"{self.METHOD}::{name}"
        with record_function(label) if profiler_records() else nullcontext():
            yield
        self.seconds[name] += time.perf_counter() - began

    @property
    def bytes_total(self) -> int:
        """All bytes this rank sent, comparisons of replicas left out."""
        return sum(self.bytes_sent[kind] for kind in self.KINDS)

    @property
    def compression(self) -> float:
        """``bytes_dense / bytes_total``; NaN where nothing is sent because there is one rank."""
        return self.bytes_dense / self.bytes_total if self.bytes_total else float("nan")

    def as_dict(self, prefix: str | None = None) -> dict[str, float]:
        """Flat metric names for a logger: ``scape/density``, ``scape/seconds/sweep``, ... May wait for the device.

        Args:
            prefix: in place of the method's name.
        """
        names = ("step", "bytes_dense", "bytes_total", "compression", "density", "message_seconds", "skipped_total")
        flat = {name: float(getattr(self, name)) for name in (*names, *self.LOGGED)}
        flat |= {f"bytes_{kind}": float(self.bytes_sent[kind]) for kind in self.KINDS}
        flat |= {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        prefix = self.METHOD if prefix is None else prefix
        return {f"{prefix}/{name}" if prefix else name: value for name, value in flat.items()}
