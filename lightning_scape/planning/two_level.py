"""Nodes of several ranks: FSDP2 inside the node and, between nodes, an all-reduce (HSDP) or a registered method.

Symbols: ``L`` ranks of a node, ``G`` nodes, and those of :mod:`lightning_scape.planning.cost_model`.

- **Inside a node** each block is gathered for forward and for backward and its gradient reduce-scattered, as FSDP does
  it, over the node's own links.
- **Between nodes** each rank talks to the ranks of the other nodes that hold the same rows: ``P/L`` parameters on ``G``
  ranks. All L ranks of a node share its network card, so each has ``W/L`` of its bandwidth.
- HSDP's all-reduces overlap with the backward pass; a method's messages as it predicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_scape.planning.cost_model import (
    BACKWARD_SHARE,
    Job,
    Link,
    Machine,
    Prediction,
    Weight,
    fsdp,
    moments,
    of_methods,
)

_NO_OPTIMIZER = Machine(adamw=0.0, clip=0.0)


def predict_nodes(
    job: Job, link: Link, machine: Machine, inside: Link, sparsities: Sequence[float] = (0.9, 0.99)
) -> list[Prediction]:
    """HSDP (LitGPT's HYBRID_SHARD), and methods with ``local_group_size`` that exchange in every step.

    ``bytes_sent`` are those that a rank sends to other nodes.

    Args:
        job: on nodes of several ranks.
        link: between nodes.
        machine: what the optimizers cost.
        inside: from a rank of a node to its other ranks.
        sparsities: of the methods.

    Raises:
        ValueError: nodes have one rank.
    """
    if job.ranks_per_node < 2:
        raise ValueError(
            f"`ranks_per_node` must be at least 2 to shard inside a node, got {job.ranks_per_node}. Use predict()."
        )
    node = _inside(job, inside)
    between = replace(_shard(job), step_compute=node.seconds), _own_link(job, link), machine, sparsities
    methods = of_methods(*between, every_step=True)
    return [hsdp(job, link, machine, inside), *(_on_nodes(job, node, p) for p in methods)]


def hsdp(job: Job, link: Link, machine: Machine, inside: Link) -> Prediction:
    """FSDP inside the node; the shards' gradients all-reduced between nodes, during the backward pass."""
    node, shard, own_link = _inside(job, inside), _shard(job), _own_link(job, link)
    ring = 2 * shard.parameters * job.parameter_bytes * (shard.ranks - 1) / shard.ranks
    reduced = ring / own_link.bandwidth + 2 * (shard.ranks - 1) * link.latency
    last = max(weight.numel for weight in job.weights) / job.parameters  # the embedding: the last to be ready
    began = (1 - BACKWARD_SHARE) * node.seconds
    seconds = max(began + reduced, node.seconds + last * reduced, node.seconds + ring * link.reduce_seconds)
    optimizer = shard.parameters * (machine.adamw + (machine.clip if job.clip else 0))
    return Prediction(
        method="HSDP",
        seconds=seconds + optimizer,
        bytes_sent=round(ring),
        memory=node.memory,
        card_bytes=round(ring) * job.ranks_per_node,
    )


def _on_nodes(job: Job, node: Prediction, between: Prediction) -> Prediction:
    """FSDP inside the node; ``between`` nodes a method, on shards."""
    held = 2 * job.parameter_bytes + moments(job)
    gathered = node.memory - round(held * job.parameters / job.ranks_per_node)
    begins = between.begins
    return replace(
        between,
        method=f"{between.method}, local_group_size {job.ranks_per_node}",
        memory=between.memory + gathered,
        card_bytes=between.bytes_sent * job.ranks_per_node,
        group_size=job.ranks_per_node,
        begins=begins and (lambda steps: [(count, _on_nodes(job, node, p)) for count, p in begins(steps)]),
    )


def _inside(job: Job, inside: Link) -> Prediction:
    """Forward and backward of a step on one node, without the optimizer."""
    return fsdp(replace(job, ranks=job.ranks_per_node, ranks_per_node=1), inside, _NO_OPTIMIZER)


def _shard(job: Job) -> Job:
    """What the ranks with the same rows share: an L-th of every parameter, one rank a node."""
    size = job.ranks_per_node
    weights = tuple(Weight(-(-weight.numel // size), weight.block, weight.multiplied) for weight in job.weights)
    return replace(job, weights=weights, ranks=job.ranks // size, ranks_per_node=1)


def _own_link(job: Job, link: Link) -> Link:
    return replace(link, bandwidth=link.bandwidth / job.ranks_per_node)
