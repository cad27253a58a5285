"""SCAPE in a plan: predicts a step from its messages, its own work, and the measured cost of that work.

Its mask travels during forward and backward; its other three messages are waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_scape import ops
from lightning_scape.planning.cost_model import (
    ADAMW_TENSORS,
    Job,
    Link,
    Machine,
    Prediction,
    RunBytes,
    StepCost,
    all_reduce_bytes,
    all_to_all,
    all_to_all_hop,
    message,
    nodes_share,
    replicated_memory,
)
from lightning_scape.planning.measure import CPU, median_seconds
from lightning_scape.scape.clipping import SKETCH_WIDTHS
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.config import ScapeConfig, WireDtype, usual_wire
from lightning_scape.scape.cost import PACKING_BYTES, norm_bytes, scape_bytes, scape_traffic, state_bytes
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.optimizer import ScapeOptimizer

WIRES: tuple[WireDtype, ...] = ("int4", "bf16")
"""Those with which the loss was measured to be as good (docs/quality.md)."""
Costs = Mapping[float, tuple[float, float]]
"""Seconds by density: per parameter of the model (norm, sweep, write-back), and of the shard (second moment, merge,
update). Where it is measured, the second may be negative: an owner proposes nothing to itself."""


class ScapeCost(StepCost):
    """Its entry of ``Machine.own`` is :data:`Costs`."""

    @override
    def predict(self, job: Job, link: Link, machine: Machine, sparsities: Sequence[float]) -> list[Prediction]:
        return [predict(job, link, machine, ScapeConfig(sparsity=sparsity)) for sparsity in sparsities]

    @override
    def of_memory(self, bytes_per_second: float, parameter_bytes: int) -> Costs:
        def of(density: float) -> tuple[float, float]:
            proposed = 0 < density < 1 and ScapeConfig(sparsity=1 - density).proposed > 0
            whole, shard = scape_traffic(density, proposed=proposed, parameter_bytes=parameter_bytes)
            return whole / bytes_per_second, shard / bytes_per_second

        return {density: of(density) for density in (0.0, 0.001, 0.01, 0.05, 0.1, 1.0)}

    @override
    def measure(self, parameters: Sequence[Tensor], sparsities: Sequence[float], repeats: int) -> Costs:
        device, count = parameters[0].device, sum(parameter.numel() for parameter in parameters)
        grads = [parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None]
        signs = torch.ones(1 << 17, dtype=torch.float32, device=device)
        norm = median_seconds(lambda: ops.sketch(grads, signs, SKETCH_WIDTHS), repeats, device)
        found: dict[float, tuple[float, float]] = {}
        for sparsity in dict.fromkeys((*sparsities, 0.0)):  # a warm-up begins with steps that send all
            config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update="adamw")
            optimizer = ScapeOptimizer(parameters, lr=1e-6, config=config, communicator=ScapeCommunicator.alone())
            whole, shard = (as_a_whole if device.type == "cuda" else by_phase)(optimizer, repeats)
            optimizer.drain()
            found[config.quota.density] = ((whole + norm) / count, shard / count)
        return found

    @override
    def alternatives(self, job: Job, link: Link, machine: Machine, late: Prediction) -> list[Prediction]:
        """Predictions with the wires that ``late`` does not use."""
        if not late.sparsity or late.group_size > 1:
            return []
        config = ScapeConfig(sparsity=late.sparsity)
        wires = [wire for wire in WIRES if wire != config.wire]
        return [predict(job, link, machine, replace(config, wire_dtype=wire)) for wire in wires]

    @override
    def run_bytes(self, method: Any, first: int, steps: int, clips: bool) -> RunBytes:
        optimizer: ScapeOptimizer = method.optimizer
        schedule, ranks = optimizer.schedule, optimizer.communicator.world_size
        parameters = optimizer.engine.parameters.local
        norm = norm_bytes(optimizer.config, len(parameters), ranks, clip=clips)
        counts = schedule.sent_by_step(steps, first)
        sent = sum(count * (optimizer.bytes_per_step(q) + norm) for q, count in counts.items())
        last = optimizer.bytes_per_step(schedule.sent(max(0, steps - 1))) + norm
        return RunBytes(sent, last, max(0, steps - first) * all_reduce_bytes(parameters, ranks))


def predict(job: Job, link: Link, machine: Machine, config: ScapeConfig, kept: int | None = None) -> Prediction:
    """SCAPE with ``config``; at sparsity 0 it is dense training, sharded.

    While its messages travel, a step sweeps its own shard and applies its own changes. The model adds that time to the
    messages': on slow links its result is up to that much too long.

    Args:
        job: what is trained, on how many ranks.
        link: between nodes.
        machine: what the optimizers cost.
        config: of the method.
        kept: entries of a block that a step of the warm-up sends, q; None: the warm-up is over.
    """
    numels, quota = [weight.numel for weight in job.weights], config.quota
    density = quota.density if kept is None else kept / quota.block_size
    sent = scape_bytes(numels, job.ranks, config, parameter_bytes=job.parameter_bytes, clip=job.clip, sent=kept)
    exposed = message(link, sent["norm"], 2 * (job.ranks - 1), adding=True)
    hop = all_to_all_hop(job, link)
    exposed += all_to_all(job, link, sent["values"])
    exposed += hop
    exposed += message(link, sent["parameters"], job.ranks - 1, adding=False)
    beside = sent["mask"] + sent["votes"]
    mask = message(link, beside, job.ranks - 1, adding=False) if beside else 0.0
    compute = max(job.step_compute + beside * link.copy_seconds, mask)
    own = own_seconds(machine.own.get("scape", {}), density, job.parameters, job.ranks)
    packs = config.wire_bits is not None
    shared = nodes_share(job.ranks, job.ranks_per_node)
    kept_bytes = state_bytes(config, job.ranks, job.parameter_bytes)
    if packs:
        adamw_bytes = ADAMW_TENSORS * job.parameter_bytes
        own += density * job.parameters * PACKING_BYTES / adamw_bytes * machine.adamw
    return Prediction(
        method=f"SCAPE {config.sparsity:g}{'' if config.wire == usual_wire(config.sparsity) else f', {config.wire}'}",
        title="SCAPE",
        option=f'wire_dtype="{config.wire}"',
        seconds=compute + exposed + own,
        bytes_sent=sum(sent.values()),
        memory=replicated_memory(job, kept_bytes),
        sparsity=config.sparsity,
        exposed=exposed,
        card_bytes=sum(sent.values()) + round((sent["values"] + sent["votes"]) * (shared - 1)),
        latency=3 * (job.ranks - 1) * link.latency + hop,
        begins=functools.partial(_warm_up, job, link, machine, config) if kept is None else None,
        gathered=round(kept_bytes * job.parameters),
    )


def _warm_up(job: Job, link: Link, machine: Machine, config: ScapeConfig, steps: int) -> list[tuple[int, Prediction]]:
    """The steps of a run that send more than its last ones do, by how many entries they send."""
    counts = SparsitySchedule.of(config, steps).sent_by_step(steps)
    return [(n, predict(job, link, machine, config, q)) for q, n in counts.items() if q != config.quota.sent]


def own_seconds(costs: Costs, density: float, parameters: int, ranks: int) -> float:
    """A step's own time, interpolated between the known densities (beyond them, that of the nearest).

    Raises:
        ValueError: nothing is known.
    """
    if not costs:
        raise ValueError('`own["scape"]` must hold a measurement, got none. Measure, or use Machine.of_memory().')
    known = sorted(costs)
    density = min(max(density, known[0]), known[-1])
    low = max(d for d in known if d <= density)
    high = min(d for d in known if d >= density)
    part = 0.0 if low == high else (density - low) / (high - low)
    whole, shard = (a + part * (b - a) for a, b in zip(costs[low], costs[high], strict=True))
    return parameters * (whole + shard / ranks)


def by_phase(optimizer: ScapeOptimizer, repeats: int) -> tuple[float, float]:
    """Seconds of a step without the norm: of what all parameters need, and of what the shard does."""
    rows = []
    for step in range(repeats + 2):  # the first makes its mask twice, and touches new memory
        optimizer.step()
        if step >= 2 and optimizer.stats is not None:
            rows.append(dict(optimizer.stats.seconds))
    phases = {name: median(row[name] for row in rows) for name in rows[0]}
    remote = median_seconds(_remote_sweep(optimizer), repeats, CPU)
    # A rank alone has everything in its own shard, whose sweep also keeps the second moment and scores for the mask.
    shard = phases["update"] + max(0.0, phases["sweep"] - remote)
    return remote + phases["write"], shard


def _remote_sweep(optimizer: ScapeOptimizer) -> Callable[[], None]:
    """The sweep of other ranks' shards, over all blocks; a rank alone has none."""
    engine, config = optimizer.engine, optimizer.config
    assert engine.state is not None
    residual, region = engine.state.residual, engine.layout.everything()
    grads = [parameter.grad for parameter in engine.parameters.tensors]
    parts = [None if grad is None else grad.reshape(-1) for grad in grads]
    taken = [parts[piece.segment.index] for piece in region.pieces]
    blocks, quota = engine.layout.blocks, config.quota
    mask = ops.select(residual, quota.sent)
    values = torch.empty(blocks, quota.sent, dtype=config.values_dtype, device=CPU)
    width = ops.proposal_bytes(config.proposed, quota.block_size)
    proposals = torch.empty(blocks, width, dtype=torch.uint8, device=CPU) if width else None
    scale = torch.ones((), dtype=torch.float32, device=CPU)
    return functools.partial(ops.sweep, ops.Sweep(region, residual, taken, scale, mask, values, proposals=proposals))


def as_a_whole(optimizer: ScapeOptimizer, repeats: int) -> tuple[float, float]:
    """The same if the CPU only queues the work: times a step to its end, and divides that as its memory traffic.

    One rank alone proposes nothing; the traffic counts proposals, which are few bytes.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0].device
    grads = [parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None]
    optimizer.step()  # as above
    step = median_seconds(optimizer.step, repeats, device)
    norm = median_seconds(lambda: ops.squared_norm(grads), repeats, device)  # a rank alone makes no sketch
    config = optimizer.config
    width = parameters[0].element_size()
    whole, shard = scape_traffic(config.quota.density, proposed=config.proposed > 0, parameter_bytes=width)
    own = whole - width  # without the norm, which reads the gradient
    part = max(0.0, step - norm) / (own + shard)
    return own * part, shard * part
