"""What SCAPE tells its user: what holds at the start of a run, and where another choice would be better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from typing_extensions import override

from lightning_scape.core.method import Advice, Spelling
from lightning_scape.core.words import show_bytes, show_seconds, show_times
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.scape.stats import StepStats

FEW_UPDATES = 50
"""Updates of an entry: with fewer in the whole run SCAPE ends well behind dense training (``docs/results.md``)."""
SHORTEST_RUN = 100
"""Steps: a shorter one tries out whether things work."""
WARN_BELOW = 0.95
"""Dense counts as faster when its step is shorter than so much of SCAPE's."""


def too_short(optimizer: ScapeOptimizer, steps: float | None) -> str | None:
    """A warning if entries are updated too rarely to learn in ``steps`` steps; None otherwise.

    Args:
        optimizer: its schedule is that of this run.
        steps: of the whole run; None: not known.
    """
    if steps is None or not SHORTEST_RUN <= steps < math.inf:
        return None
    config, updates = optimizer.config, optimizer.schedule.updates(int(steps))
    if updates >= FEW_UPDATES:
        return None
    ways = ["train longer", f"lower `sparsity` (now {config.sparsity:g})"]
    by_default = SparsitySchedule.of(replace(config, sparsity_warmup_steps=None), steps)
    if by_default.updates(int(steps)) > updates:
        given, longer = optimizer.schedule.warmup_steps, by_default.warmup_steps
        ways.insert(0, f"leave `sparsity_warmup_steps` at its default (here {longer:,} instead of {given:,})")
    advice = ", ".join([*ways[:-1], f"or {ways[-1]}"])
    return (
        f"Entries should be updated at least {FEW_UPDATES} times for SCAPE to train as well as dense training, got"
        f" about {updates:.0f} times in the {steps:,.0f} steps of this run. Measured without a warm-up: validation loss"
        f" 21% higher after 10 updates, 4 to 7% after 30, 1 to 2% after 100. {advice[0].upper()}{advice[1:]}."
    )


def summary(optimizers: Sequence[ScapeOptimizer], steps: float | None, spell: Spelling) -> str:
    """One line for the start of a run: how much is sent, after which warm-up, by which update, and how to change it.

    Args:
        optimizers: those of the run, built from the same options.
        steps: of the whole run; None: not known.
        spell: how the user writes options.
    """
    config = optimizers[0].config
    schedule = max((optimizer.schedule for optimizer in optimizers), key=lambda schedule: schedule.warmup_steps)
    size = sum(optimizer.bytes_per_step() for optimizer in optimizers)
    of_node = optimizers[0].engine.node.world_size
    where, alone = (f" between nodes of {of_node} ranks", "node") if of_node > 1 else ("", "rank")
    beside = f" per rank and step{where} beside the norm's message"
    sent = f"{show_bytes(size)}{beside}" if size else f"0 bytes with one {alone}"
    updates = sorted({str(optimizer.config.update) for optimizer in optimizers}, reverse=True)
    change = {
        "sparsity": "...",
        "sparsity_warmup_steps": "0" if schedule.warmup_steps else "None",
        "update": '"adams"' if updates == ["adamw"] else '"adamw"',
    }
    if config.dense:
        change.pop("sparsity_warmup_steps")
        how_much = f"every entry at every step (sparsity=0), {sent}"
    else:
        share = f"{100 * (1 - config.sparsity):.3g}% of the entries per step (sparsity={config.sparsity:g})"
        how_much = f"{share}, {sent}, {_beginning(schedule, steps)}"
    update = "; ".join(_UPDATES[name] for name in updates)
    return f"SCAPE: sends {how_much}. Update: {update}. To change: {spell(change)}."


_UPDATES = {
    "adamw": "AdamW's, your lr, betas and eps hold",
    "adams": "AdamS's, as in SCAPE's paper",
}


def _beginning(schedule: SparsitySchedule, steps: float | None) -> str:
    parts = [f"{schedule.dense_steps:,} dense steps"] if schedule.dense_steps else []
    parts += [f"a warm-up of {schedule.warmup_steps:,} steps"] if schedule.warmup_steps else []
    if not parts:
        return "from the first step on"
    within = f"after {' and '.join(parts)}"
    settled = schedule.dense_steps + schedule.warmup_steps
    if steps is None or not 0 < steps <= settled:
        return within
    if steps == settled:
        return f"{within} (the whole run)"
    last = schedule.sent(int(steps) - 1) / schedule.quota.block_size
    return f"{within} (this run of {steps:,.0f} ends at {show_times(100 * last, 2)}%)"


class ScapeAdvice(Advice):
    """Warns if the run is too short, or if a few early steps show that dense training would be faster.

    The latter on the CPU only: elsewhere the CPU's seconds are those of queueing the work. Steps that send more than
    the options say (dense ones, the warm-up) are not judged, nor are the first ones after them, for buffers and caches
    are new to them.

    Args:
        optimizer: the one that it judges.
        first: steps at the final density before the first that counts.
        steps: how many count.
    """

    def __init__(self, optimizer: ScapeOptimizer, first: int = 10, steps: int = 5) -> None:
        self._optimizer, self._first, self._steps = optimizer, first, steps
        self._sparse_steps = 0
        self._seen: list[StepStats] = []

    @override
    def at_start(self, steps: float | None) -> str | None:
        return too_short(self._optimizer, steps)

    @override
    def after_step(self, device: torch.device) -> str | None:
        optimizer = self._optimizer
        if optimizer.config.dense or device.type != "cpu" or len(self._seen) == self._steps or still_dense(optimizer):
            return None
        self._sparse_steps += 1
        after = self._sparse_steps - self._first
        if after > 0 and (stats := optimizer.stats) is not None:
            self._seen.append(stats)
        judged = len(self._seen) == self._steps
        # A message that travels while other work is done does not show the speed of the link.
        optimizer.communicator.at_once = after >= 0 and not judged
        return dense_would_be_faster(self._seen) if judged else None


def still_dense(optimizer: ScapeOptimizer) -> bool:
    """Whether the last step was one of the dense steps or of the warm-up."""
    schedule = optimizer.schedule
    return not optimizer.config.dense and optimizer.steps_taken <= schedule.dense_steps + schedule.warmup_steps


def dense_would_be_faster(stats: Sequence[Any]) -> str | None:
    """What a run's own figures say: None where SCAPE pays or nothing can be said, else a sentence with the figures.

    The bandwidth is what the step's own messages reached, waiting included. Large messages would reach more, so the
    estimate favours SCAPE. Dense AdamW's own time is the sweep's, times the ratio of the memory they touch (28 bytes a
    parameter against 12). That is too long where the sweep spends its time on scoring.

    Args:
        stats: :class:`~lightning_scape.StepStats` of a few sparse steps of one rank, whose CPU did the work itself
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
    dense = median(s.bytes_dense for s in stats) / bandwidth + 28 / 12 * sweep + clipping  # as much there
    if dense >= WARN_BELOW * own:
        return None
    return (
        f"Dense training would be faster here: SCAPE's part of a step takes {show_seconds(own)}, of which"
        f" {show_seconds(messages)} for messages; at the {bandwidth * 8e-9:.3g} Gbit/s that these reached, a dense"
        f" all-reduce and AdamW would take about {show_seconds(dense)}."
    )
