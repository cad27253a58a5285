"""What ranks and owners still owe, carried from one rule of averaging to another.

What N ranks owe alike, ``e`` each, moves the parameters by ``N e`` over the divisor: by ``e`` where it is N
(``"all"``), by ``sqrt(N) e`` where it is the root (``"root"``). With ``"senders"`` it is ``e``, if all of them send it.
The factor is the rule's gain. What an owner owes has been divided already. A load scales the errors by the gain of the
run that saved them over the gain of its own. So what is owed is applied once.

Example: 6 ranks (sharded, divided by their number) owe 3 on average, an owner 1. Then 2 ranks go on (gathered, divided
by the root). Each begins with ``(3 + 1) / sqrt(2)``, and the parameters move by ``2 * 4 / sqrt(2) / sqrt(2) = 4``.
"""

from __future__ import annotations

import dataclasses
import math
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
        """Of the run that has saved a state. States of before do not say it; their options do."""
        if {"reduction", "average"} <= set(facts):
            return cls(facts["world_size"], facts["reduction"], facts["average"])
        known = {field.name for field in dataclasses.fields(SparseLoCoConfig)}
        options = {name: value for name, value in facts["config"].items() if name in known and name != "device"}
        return cls.of(SparseLoCoConfig(**options), facts["world_size"])

    @property
    def gain(self) -> float:
        """Of what all ranks owe, see above."""
        return math.sqrt(self.ranks) if self.average == "root" else 1.0

    def __str__(self) -> str:
        divisor = {"all": "their number", "root": "the root of their number", "senders": "those that sent an entry"}
        return f"{self.reduction!r} (the ranks' sum divided by {divisor[self.average]})"


def notes(before: Rule, now: Rule) -> list[str]:
    """What the user should know where the rule has changed."""
    scale = before.gain / now.gain
    if before[1:] == now[1:] and scale == 1:
        return []
    what = f"reduction was {before}, and is now {now}" if before[1:] != now[1:] else f"reduction stays {now}"
    return [
        f"The {what}. Error feedbacks are multiplied by {scale:.3g}, so that what is not yet sent moves the parameters"
        " once."
    ]
