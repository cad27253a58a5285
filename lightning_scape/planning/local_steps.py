"""SparseLoCo's part of the plan: a step on average over a window, and which of the two methods to take.

A window is ``H`` steps of compute and AdamW on every rank, then one exchange: an all-reduce of 4 bytes, an all-to-all
and an all-gather of the same size. Its own work reads and writes about as much memory as a few steps of AdamW
(:data:`~lightning_scape.sparseloco.cost.EXCHANGE_WORK`). Nothing overlaps, as with ``overlap_steps=0``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.planning.conclusions import COSTS_QUALITY, SPARSEST, WORTH, advice
from lightning_scape.planning.cost_model import (
    Job,
    Link,
    Machine,
    Prediction,
    all_to_all,
    all_to_all_hop,
    compute_only,
    message,
)
from lightning_scape.sparseloco.config import SparseLoCoConfig
from lightning_scape.sparseloco.cost import EXCHANGE_WORK, exchange_bytes, state_bytes

WINDOWS = (1, 5, 15, 30, 60, 100)
"""``sync_every`` of the predictions."""
NEAR_COMPUTE = 1.15
"""A step of so many times compute alone is as good as free of messages."""


def sparseloco(job: Job, link: Link, machine: Machine, config: SparseLoCoConfig) -> Prediction:
    """SparseLoCo with ``config``; time and bytes are per step, on average over a window."""
    sent = exchange_bytes([weight.numel for weight in job.weights], job.ranks, config)
    share = config.quota.sent / (config.quota.sent + config.return_quota.sent)
    there = 0.0 if config.gathers(job.ranks) else sent * share
    messages = all_to_all(job, link, there) + message(link, sent - there, 0, adding=False)
    latency = 3 * (job.ranks - 1) * link.latency + all_to_all_hop(job, link)
    own = EXCHANGE_WORK * machine.adamw * job.parameters
    alone = compute_only(job, machine)
    every = config.sync_every
    state = 8 + state_bytes(config, job.ranks, job.parameter_bytes)  # AdamW's, and the method's
    return Prediction(
        method=f"SparseLoCo H={every}",
        window=every,
        seconds=alone.seconds + (messages + latency + own) / every,
        bytes_sent=round(sent / every),
        memory=round(job.parameters * (2 * job.parameter_bytes + state)),
        exposed=(messages + latency) / every,
        latency=latency / every,
    )


def predict_local(job: Job, link: Link, machine: Machine, windows: Sequence[int] = WINDOWS) -> list[Prediction]:
    """SparseLoCo with its defaults at several window lengths, shortest first."""
    return [sparseloco(job, link, machine, SparseLoCoConfig(sync_every=every)) for every in windows]


def which_method(predictions: Sequence[Prediction], local: Sequence[Prediction], memory: float = math.inf) -> str:
    """The one advice of a plan: SparseLoCo, or which of the methods that exchange in every step; and why.

    SCAPE, up to a sparsity of 99%, is preferred where its exchange in every step is nearly free, or where SparseLoCo
    gains little: its ranks never differ. Else SparseLoCo's shortest window whose messages are nearly free is the
    choice: longer ones cost more in quality. What does not fit into memory is never advised.

    Args:
        predictions: from :func:`~lightning_scape.planning.predict`, compute alone included.
        local: from :func:`predict_local`.
        memory: bytes of a rank's device.

    Raises:
        ValueError: the predictions are of one rank.
    """
    said = advice(predictions, memory)
    alone = min(p.seconds for p in predictions if not p.bytes_sent)
    fitting = [p for p in local if p.memory <= memory]
    every_step = [p for p in predictions if p.bytes_sent and p.memory <= memory]
    weighed = [p for p in every_step if (p.sparsity or 0) <= SPARSEST]
    if not weighed or not fitting:
        least = min(local, key=lambda p: p.memory)
        return said if fitting else f"{said} SparseLoCo needs {show_bytes(least.memory)} per rank: too much."
    free = next((p for p in fitting if p.seconds <= NEAR_COMPUTE * alone), None)
    choice = free or min(fitting, key=lambda p: p.seconds)
    best = min(weighed, key=lambda p: p.seconds)
    if best.seconds <= NEAR_COMPUTE * alone or best.seconds < WORTH * choice.seconds:
        return (
            f"{said} SparseLoCo is not needed: with sync_every={choice.window} a step would take"
            f" {show_seconds(choice.seconds)} on average, {choice.seconds / alone:.2f}x of compute alone."
        )
    sparser = min(every_step, key=lambda p: p.seconds)
    dearer = f" ({sparser.method}: {show_seconds(sparser.seconds)}, but {COSTS_QUALITY})"
    return (
        f"Take SparseLoCo with sync_every={choice.window}: a step takes {show_seconds(choice.seconds)} on average,"
        f" {choice.seconds / alone:.2f}x of compute alone, and sends {show_bytes(choice.bytes_sent)}; exchanging in"
        f" every step takes {show_seconds(best.seconds)} with {best.method}{dearer if sparser is not best else ''}."
        " Ranks differ between exchanges, which costs some quality: take the shortest window that you can afford."
    )
