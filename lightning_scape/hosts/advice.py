"""What is said to a user: what holds at the start of a run, and where another choice would be better."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from lightning_scape.hosts.swap import scape_optimizers
from lightning_scape.planning import dense_would_be_faster, show_bytes
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.scape.stats import StepStats


class PayoffCheck:
    """Looks at a few early steps of a run and says once if, by their own figures, dense training would be faster.

    On the CPU only: elsewhere the host's seconds are those of queueing the work. Steps that send more than the options
    say (dense ones, the warm-up) are not judged, nor are the first ones after them, for buffers and caches are new to
    them. With several optimizers, the one that steps first is judged.

    Args:
        first: steps at the final density before the first that counts.
        steps: how many count.
    """

    def __init__(self, first: int = 10, steps: int = 5) -> None:
        self.first, self.steps = first, steps
        self._sparse_steps = 0
        self._seen: list[StepStats] = []
        self._judged: weakref.ref[ScapeOptimizer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For who copies or pickles a strategy: a weak reference is not copied."""
        return {**self.__dict__, "_judged": None}

    def look(self, optimizer: ScapeOptimizer, device: torch.device) -> str | None:
        """Call after each step of an optimizer; returns a sentence with the figures, at most once."""
        if optimizer.config.dense or device.type != "cpu" or len(self._seen) == self.steps:
            return None
        if self._judged is None:
            self._judged = weakref.ref(optimizer)
        if self._judged() is not optimizer or _still_dense(optimizer):
            return None
        self._sparse_steps += 1
        after = self._sparse_steps - self.first
        if after > 0 and (stats := optimizer.stats) is not None:
            self._seen.append(stats)
        judged = len(self._seen) == self.steps
        # A message that travels while other work is done does not show the speed of the link.
        optimizer.communicator.at_once = after >= 0 and not judged
        return dense_would_be_faster(self._seen) if judged else None


def chosen(config: Any) -> str:
    """The first option of a configuration, and those that differ from their defaults, as in a call."""
    first, defaults = fields(config)[0].name, vars(type(config)())
    return ", ".join(
        f"{name}={value!r}" for name, value in vars(config).items() if name == first or value != defaults[name]
    )


FEW_UPDATES = 50
"""Of an entry: with so few in the whole run SCAPE ends well behind dense training (``docs/quality.md``)."""
SHORTEST_RUN = 100
"""Steps: a shorter one tries out whether things work."""


def too_short(optimizer: ScapeOptimizer, steps: float | None) -> str | None:
    """What to tell who trains for ``steps`` steps in which entries are updated too rarely to learn; None otherwise.

    Args:
        optimizer: its schedule is that of this run.
        steps: of the whole run; None is not known.
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


def densities(optimizers: Iterable[object]) -> dict[str, float]:
    """Share of the entries that the last step sent, of each optimizer whose warm-up lasts: for a progress bar.

    The host knows it: nothing waits for a device. Named as :class:`~lightning_scape.ScapeMonitor` names it.
    """
    ours = scape_optimizers(optimizers)
    return {
        f"{metric_prefix(index, len(ours))}/density": optimizer.schedule.sent(optimizer.steps_taken - 1)
        / optimizer.schedule.quota.block_size
        for index, optimizer in enumerate(ours)
        if optimizer.steps_taken and _still_dense(optimizer)
    }


def metric_prefix(index: int, optimizers: int) -> str:
    """Prefix of one optimizer's metrics: ``scape``, or ``scape-0``, ``scape-1``, ... if there are several."""
    return "scape" if optimizers == 1 else f"scape-{index}"


def _still_dense(optimizer: ScapeOptimizer) -> bool:
    """Whether the last step was one of the dense steps or of the warm-up."""
    schedule = optimizer.schedule
    return not optimizer.config.dense and optimizer.steps_taken <= schedule.dense_steps + schedule.warmup_steps


Spelling = Callable[[Mapping[str, str]], str]
"""Writes options down as a user of the host would: those of a call, or flags."""


def as_call(name: str) -> Spelling:
    """``ScapeStrategy(sparsity=...)``."""
    return lambda options: f"{name}({', '.join(f'{option}={value}' for option, value in options.items())})"


def what_holds(optimizers: Sequence[ScapeOptimizer], steps: float | None, spell: Spelling) -> str:
    """One line for the start of a run: how much is sent, after which warm-up, by which update, and how to change it.

    Args:
        optimizers: those of the run, built from the same options.
        steps: of the whole run; None is not known.
        spell: how the user writes options.
    """
    config = optimizers[0].config
    schedule = max((optimizer.schedule for optimizer in optimizers), key=lambda schedule: schedule.warmup_steps)
    size = sum(optimizer.bytes_per_step() for optimizer in optimizers)
    of_node = optimizers[0].engine.shards.world_size
    where, alone = (f" between nodes of {of_node} ranks", "node") if of_node > 1 else ("", "rank")
    sent = f"{show_bytes(size)} per rank and step{where}" if size else f"0 bytes with one {alone}"
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
    return f"{within} (this run of {steps:,.0f} ends at {100 * last:.2g}%)"
