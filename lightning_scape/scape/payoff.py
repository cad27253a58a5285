"""Whether a run of SCAPE pays, by its own figures: dense training may be faster where the network is fast."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from lightning_scape.core.words import show_seconds
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.scape.stats import StepStats

WARN_BELOW = 0.95
"""Dense counts as faster when its step is shorter than so much of SCAPE's."""


class PayoffCheck:
    """Looks at a few early steps of a run and says once if, by their own figures, dense training would be faster.

    On the CPU only: elsewhere the host's seconds are those of queueing the work. Steps that send more than the options
    say (dense ones, the warm-up) are not judged, nor are the first ones after them, for buffers and caches are new to
    them. With several optimizers, the strategy asks of the one that steps first.

    Args:
        first: steps at the final density before the first that counts.
        steps: how many count.
    """

    def __init__(self, first: int = 10, steps: int = 5) -> None:
        self.first, self.steps = first, steps
        self._sparse_steps = 0
        self._seen: list[StepStats] = []

    def look(self, optimizer: ScapeOptimizer, device: torch.device) -> str | None:
        """Call after each step of an optimizer; returns a sentence with the figures, at most once."""
        if optimizer.config.dense or device.type != "cpu" or len(self._seen) == self.steps:
            return None
        if still_dense(optimizer):
            return None
        self._sparse_steps += 1
        after = self._sparse_steps - self.first
        if after > 0 and (stats := optimizer.stats) is not None:
            self._seen.append(stats)
        judged = len(self._seen) == self.steps
        # A message that travels while other work is done does not show the speed of the link.
        optimizer.communicator.at_once = after >= 0 and not judged
        return dense_would_be_faster(self._seen) if judged else None


def still_dense(optimizer: ScapeOptimizer) -> bool:
    """Whether the last step was one of the dense steps or of the warm-up."""
    schedule = optimizer.schedule
    return not optimizer.config.dense and optimizer.steps_taken <= schedule.dense_steps + schedule.warmup_steps


def dense_would_be_faster(stats: Sequence[Any]) -> str | None:
    """What a run's own figures say: None where SCAPE pays or nothing can be said, else a sentence with the figures.

    The bandwidth is what the step's own messages reached, waiting included, which is less than large messages would:
    the estimate errs on SCAPE's side. Dense AdamW's own time is taken from the sweep's by the
    memory they touch (28 bytes a parameter against 12), which makes it too long where ranking is what takes the time.

    Args:
        stats: :class:`~lightning_scape.StepStats` of a few sparse steps of one rank, whose host did the work itself
            and waited for each message where it was sent (``Communicator.at_once``).
    """
    if not stats or any(s.skipped or not s.bytes_total or s.message_seconds <= 0 for s in stats):
        return None
    messages = median(s.message_seconds for s in stats)
    sweep, clipping = (median(s.seconds.get(phase, 0.0) for s in stats) for phase in ("sweep", "norm"))
    # A comparison of replicas sends its messages outside of the phases.
    own = median(max(sum(s.seconds.values()), s.message_seconds) for s in stats)
    waited = median(s.bytes_values + s.bytes_parameters + s.bytes_norm for s in stats)
    bandwidth = waited / messages
    dense = median(s.bytes_dense for s in stats) / bandwidth + 28 / 12 * sweep + clipping  # which is as dear there
    if dense >= WARN_BELOW * own:
        return None
    return (
        f"Dense training would be faster here: SCAPE's part of a step takes {show_seconds(own)}, of which"
        f" {show_seconds(messages)} for messages; at the {bandwidth * 8e-9:.3g} Gbit/s that these reached, a dense"
        f" all-reduce and AdamW would take about {show_seconds(dense)}."
    )
