"""Figures of the last exchange."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_scape.core.stats import Stats


@dataclass
class ExchangeStats(Stats):
    """Figures of one exchange on one rank. ``step`` counts inner steps; ``"norm"`` is the first message."""

    METHOD = "sparseloco"
    PHASES = ("norm", "fold", "send", "outer", "set_out")
    KINDS = ("parameters", "norm")
    LOGGED = ("exchange", "delta_norm", "skipped")

    exchange: int = 0
    """Exchanges so far, this one included."""
    delta_norm: float = 0.0
    """Root mean square over ranks of the norm of the pseudo-gradient, start minus parameters."""
    skipped: bool = False
    """Whether the window was dropped because some rank's parameters were not finite."""
