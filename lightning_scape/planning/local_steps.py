"""SparseLoCo's part of the plan: a step on average over a window, and which of the two methods to take.

A window is ``H`` steps of compute and AdamW on every rank, then one exchange: an all-reduce of 4 bytes, an all-to-all
and an all-gather of the same size. Its own work reads and writes about as much memory as a few steps of AdamW
(:data:`EXCHANGE_WORK`). Nothing overlaps, as with ``overlap_steps=0``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_scape.core.layout import Layout
from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.planning.conclusions import COSTS_QUALITY, SPARSEST, WORTH, advice
from lightning_scape.planning.cost_model import PEER_SECONDS, Job, Link, Machine, Prediction, compute_only, nodes_share
from lightning_scape.sparseloco.config import SparseLoCoConfig

EXCHANGE_WORK = 14.0
"""Own work of an exchange in steps of fused AdamW: measured on one CPU core, 13M parameters."""
WINDOWS = (1, 5, 15, 30, 60, 100)
"""``sync_every`` of the predictions."""
NEAR_COMPUTE = 1.15
"""A step of so many times compute alone is as good as free of messages."""


def exchange_bytes(numels: Sequence[int], ranks: int, config: SparseLoCoConfig) -> int:
    """Bytes that a rank sends in an exchange; exactly what the package counts, the first message left out.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: densities, bits and block length are used.
    """
    blocks = Layout(numels, [0] * len(numels), config.quota.block_size, ranks).blocks
    return sum(config.message_bytes(blocks, ranks))


def sparseloco(job: Job, link: Link, machine: Machine, config: SparseLoCoConfig) -> Prediction:
    """SparseLoCo with ``config``; time and bytes are per step, on average over a window."""
    sent = exchange_bytes([weight.numel for weight in job.weights], job.ranks, config)
    hops = job.ranks - 1
    share = config.quota.sent / (config.quota.sent + config.return_quota.sent)
    there = 0.0 if config.gathers(job.ranks) else sent * share
    crossing = there * nodes_share(job.ranks, job.ranks_per_node)
    messages = max(crossing / (link.bandwidth * link.exchange_share), there * link.copy_seconds)
    messages += max((sent - there) / (link.bandwidth * link.exchange_share), (sent - there) * link.copy_seconds)
    latency = 3 * hops * link.latency + (link.latency + hops * PEER_SECONDS if hops else 0.0)
    own = EXCHANGE_WORK * machine.adamw * job.parameters
    alone = compute_only(job, machine)
    every = config.sync_every
    state = 8 + 8 + 4 / job.ranks  # AdamW's; starting point and error feedback; the owner's
    home = 8 if config.device is not None else 0
    overlapped = job.parameter_bytes if config.overlap_steps else 0
    return Prediction(
        method=f"SparseLoCo H={every}",
        seconds=alone.seconds + (messages + latency + own) / every,
        bytes_sent=round(sent / every),
        memory=round(job.parameters * (2 * job.parameter_bytes + state - home + overlapped)),
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
            f"{said} SparseLoCo is not needed: with sync_every={_window(choice)} a step would take"
            f" {show_seconds(choice.seconds)} on average, {choice.seconds / alone:.2f}x of compute alone."
        )
    sparser = min(every_step, key=lambda p: p.seconds)
    dearer = f" ({sparser.method}: {show_seconds(sparser.seconds)}, but {COSTS_QUALITY})"
    return (
        f"Take SparseLoCo with sync_every={_window(choice)}: a step takes {show_seconds(choice.seconds)} on average,"
        f" {choice.seconds / alone:.2f}x of compute alone, and sends {show_bytes(choice.bytes_sent)}; exchanging in"
        f" every step takes {show_seconds(best.seconds)} with {best.method}{dearer if sparser is not best else ''}."
        " Ranks differ between exchanges, which costs some quality: take the shortest window that you can afford."
    )


def _window(prediction: Prediction) -> str:
    return prediction.method.partition("=")[2]
