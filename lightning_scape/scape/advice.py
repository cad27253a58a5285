"""What is said to who trains by SCAPE: what holds at the start of a run, and where another choice would be better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_scape.core.method import Spelling
from lightning_scape.core.words import show_bytes
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.optimizer import ScapeOptimizer

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


def summary(optimizers: Sequence[ScapeOptimizer], steps: float | None, spell: Spelling) -> str:
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
