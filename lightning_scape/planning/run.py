"""A whole run: what it takes and sends, warm-up, validations and checkpoints included.

A user pays for the run, not for its last step. The steps of a method's beginning (``Prediction.begins``) are added up;
what is left of the run is like the method's late step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_scape.planning.conclusions import which_method
from lightning_scape.planning.cost_model import Job, Link, Prediction


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long a run is, and what comes on top of its steps."""

    steps: int
    """Of the optimizer."""
    validation: float = 0.0
    """Seconds of all validations together."""
    checkpoints: int = 0
    """How many are saved."""
    saving: float = 0.0
    """Seconds in which training stands still while a checkpoint is written, messages not counted."""
    sharded: bool = False
    """Whether each rank writes its own part of a checkpoint, so that nothing is sent."""
    beside: bool = False
    """Whether checkpoints are collected and written while training goes on (``async_save``)."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"`steps` must be >= 1, got {self.steps}. Give the steps of the optimizer in the whole run."
            )
        for name in ("validation", "checkpoints", "saving"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be >= 0, got {getattr(self, name)}. 0 leaves it out.")


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """What a run takes."""

    late: Prediction
    """A step at its end."""
    whole: Prediction
    """Seconds and bytes of all of it; bytes are those of the rank that sends most: rank 0 collects checkpoints."""
    steps: int
    beginning: int
    """Steps that are not like the late one: a warm-up."""
    of_checkpoints: int
    """Bytes of the whole that checkpoints take."""

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.whole.seconds

    @property
    def bytes_sent(self) -> int:
        """In the whole run, by the rank that sends most."""
        return self.whole.bytes_sent


def predict_run(late: Prediction, job: Job, link: Link, run: Run) -> RunPrediction:
    """Seconds and bytes of a whole run.

    Args:
        late: a step of a method once all warm-up is over, for ``job`` on ``link``.
        job: what is trained, on how many ranks.
        link: between nodes.
        run: its length, and what comes on top.
    """
    begun = [(count, p) for count, p in (late.begins(run.steps) if late.begins else ()) if count]
    settled = run.steps - sum(count for count, _ in begun)
    parts = [*begun, (settled, late)]
    gathered = 0 if run.sharded else run.checkpoints * late.gathered
    standing = 0.0 if run.beside else run.checkpoints * run.saving
    if not run.beside:  # the link of rank 0's node carries what the other nodes' ranks send
        crossing = (job.ranks - job.ranks_per_node) / link.bandwidth
        standing += gathered * max(crossing, (job.ranks - 1) * link.copy_seconds)

    def summed(value: Callable[[Prediction], float]) -> float:
        return sum(count * value(p) for count, p in parts)

    whole = replace(
        late,
        seconds=summed(lambda p: p.seconds) + run.validation + standing,
        bytes_sent=round(summed(lambda p: p.bytes_sent)) + gathered,
        card_bytes=round(summed(lambda p: p.on_card)) + gathered * job.ranks_per_node,
        exposed=summed(lambda p: p.exposed) + standing,
        latency=summed(lambda p: p.latency),
        begins=None,
    )
    last = late if settled else begun[-1][1]
    return RunPrediction(
        late=last, whole=whole, steps=run.steps, beginning=run.steps - settled, of_checkpoints=gathered
    )


def advice_on_run(
    predictions: Sequence[Prediction],
    local: Sequence[Prediction],
    job: Job,
    link: Link,
    run: Run,
    memory: float = math.inf,
) -> list[str]:
    """What to take for a run: paragraphs. Where full checkpoints make any method's 5% longer, also without them.

    Args:
        predictions: steps, as :func:`~lightning_scape.planning.conclusions.which_method` takes them; as the next.
        local: of the methods that exchange after several steps.
        job: what is trained, on how many ranks.
        link: between nodes.
        run: its length, and what comes on top.
        memory: bytes of a rank's device.
    """

    def advised(given: Run) -> tuple[str, list[float]]:
        runs, apart = ([predict_run(p, job, link, given).whole for p in each] for each in (predictions, local))
        return which_method(runs, apart, memory, "this run"), [each.seconds for each in (*runs, *apart)]

    (said, full), (instead, sharded) = map(advised, (run, replace(run, sharded=True)))
    if all(a < 1.05 * b for a, b in zip(full, sharded, strict=True)):
        return [said]
    return [said, "", f'With `state_dict_type="sharded"`, by which no state travels: {instead}']


def message_load(sent: float, job: Job, link: Link) -> float:
    """Seconds that bytes take on the link, over those of a step's forward and backward: what decides, not Gbit/s alone.

    It is the same for a model of twice the size on the same link, and half as much for twice the batch.
    """
    return sent / link.bandwidth / job.step_compute
