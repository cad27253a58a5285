"""What an exchange of SparseLoCo costs: bytes of its messages, memory that it keeps, its own work; and a plan's steps.

A window is ``H`` steps of compute and AdamW on every rank, then one exchange: an all-gather of 40 bytes, an all-to-all
and an all-gather of the same size. Its own work reads and writes about as much memory as a few steps of AdamW. Nothing
overlaps, as with ``overlap_steps=0``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from lightning_scape.core.layout import Layout
from lightning_scape.planning.cost_model import (
    Job,
    Link,
    Machine,
    Prediction,
    RunBytes,
    StepCost,
    all_reduce_bytes,
    all_to_all,
    all_to_all_hop,
    compute_only,
    message,
    moments,
    nodes_share,
    replicated_memory,
)
from lightning_scape.sparseloco.config import SparseLoCoConfig

EXCHANGE_WORK = 14.0
"""Own work of an exchange in steps of fused AdamW: measured on one CPU core, 13M parameters."""
OPENING_BYTES = 40
"""Bytes of an exchange's first message to each of the other ranks."""
WINDOWS = (1, 5, 15, 30, 60, 100)
"""``sync_every`` of a plan's predictions."""


class SparseLoCoCost(StepCost):
    """The defaults at several lengths of the window, shortest first."""

    @override
    def predict(self, job: Job, link: Link, machine: Machine, sparsities: Sequence[float]) -> list[Prediction]:
        return [predict(job, link, machine, SparseLoCoConfig(sync_every=every)) for every in WINDOWS]

    @override
    def run_bytes(self, method: Any, first: int, steps: int, clips: bool) -> RunBytes:
        """A run ends with an exchange, however short its last window is."""
        loco = method.loco
        every, ranks = loco.config.sync_every, loco.communicator.world_size
        of_one = loco.bytes_per_exchange() + OPENING_BYTES * (ranks - 1)
        began = loco.progress.steps - loco.progress.in_window  # a fit before it has ended its own last window
        exchanges = -(-(steps - began) // every) - (first - began) // every
        dense = max(0, steps - first) * all_reduce_bytes(loco.parameters.local, ranks)
        return RunBytes(exchanges * of_one, of_one, dense)


def predict(job: Job, link: Link, machine: Machine, config: SparseLoCoConfig) -> Prediction:
    """SparseLoCo with ``config``; time and bytes are per step, on average over a window."""
    sent = exchange_bytes([weight.numel for weight in job.weights], job.ranks, config)
    share = config.quota.sent / (config.quota.sent + config.return_quota.sent)
    there = 0.0 if config.gathers(job.ranks) else sent * share
    messages = all_to_all(job, link, there) + message(link, sent - there, 0, adding=False)
    latency = 3 * (job.ranks - 1) * link.latency + all_to_all_hop(job, link)
    own = EXCHANGE_WORK * machine.adamw * job.parameters
    alone = compute_only(job, machine)
    every = config.sync_every
    on_card = sent + there * (nodes_share(job.ranks, job.ranks_per_node) - 1)
    state = moments(job) + state_bytes(config, job.ranks, job.parameter_bytes)
    # Each rank's parameters, errors and AdamW; and an N-th of what all ranks know, or own.
    gathered = job.parameter_bytes + 4 + moments(job) + (4 if config.gathers(job.ranks) else 8) / job.ranks
    over_window = Prediction(
        method=f"SparseLoCo H={every}",
        title="SparseLoCo",
        window=every,
        option=f"sync_every={every}",
        seconds=alone.seconds + (messages + latency + own) / every,
        bytes_sent=round(sent / every),
        card_bytes=round(on_card / every),
        memory=replicated_memory(job, state),
        exposed=(messages + latency) / every,
        latency=latency / every,
        gathered=round(gathered * job.parameters),
    )

    def last_window(steps: int) -> list[tuple[int, Prediction]]:
        """A run ends with an exchange, however short its last window is."""
        if not (short := steps % every):
            return []
        seconds = alone.seconds + (messages + latency + own) / short
        of_rank, of_card = round(sent / short), round(on_card / short)
        return [(short, replace(over_window, seconds=seconds, bytes_sent=of_rank, card_bytes=of_card))]

    return replace(over_window, begins=last_window)


def exchange_bytes(numels: Sequence[int], ranks: int, config: SparseLoCoConfig) -> int:
    """Bytes that a rank sends in an exchange; exactly what the package counts, the first message left out.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: densities, bits and block length are used.
    """
    blocks = Layout(numels, [0] * len(numels), config.quota.block_size, ranks).blocks
    return sum(config.message_bytes(blocks, ranks))


def state_bytes(config: SparseLoCoConfig, ranks: int, parameter_bytes: int) -> float:
    """Bytes that a rank's device keeps for each parameter, the inner optimizer's left out."""
    owners = 0.0 if config.gathers(ranks) else 4 / ranks
    here = 0.0 if config.device is not None else 8 + owners  # starting point, error feedback, owners' errors
    return here + (parameter_bytes if config.overlap_steps else 0)
