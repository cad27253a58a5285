"""What ranks and owners still owe, carried from one rule of averaging to another.

On another number of ranks each takes the mean of the saved errors, ``e``. So all owe the same, all send the same
entries, and every rule divides their sum by their number: the parameters move by ``e``, once. What an owner owes joins
it as it is, for it has been divided already. A warning names both rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_scape.sparseloco.config import SparseLoCoConfig


class Rule(NamedTuple):
    """How a run averages: its options, with what they leave open filled in."""

    ranks: int
    reduction: str
    average: str

    @classmethod
    def of(cls, config: SparseLoCoConfig, ranks: int) -> Rule:
        """Of a run."""
        return cls(ranks, "gathered" if config.gathers(ranks) else "sharded", config.averages(ranks))

    @classmethod
    def saved(cls, facts: Mapping[str, Any]) -> Rule:
        """Of the run that has saved a state. Older checkpoints do not store it; it follows from their options."""
        if {"reduction", "average"} <= set(facts):
            return cls(facts["world_size"], facts["reduction"], facts["average"])
        known = {field.name for field in dataclasses.fields(SparseLoCoConfig)}
        options = {name: value for name, value in facts["config"].items() if name in known and name != "device"}
        return cls.of(SparseLoCoConfig(**options), facts["world_size"])

    def __str__(self) -> str:
        return f"{self.reduction!r} with average={self.average!r}"


def notes(before: Rule, now: Rule) -> list[str]:
    """What the user should know where the rule has changed."""
    if before[1:] == now[1:]:
        return []
    return [f"The reduction was {before}, and is now {now}: it goes by the number of ranks where it is not given."]
