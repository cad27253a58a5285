"""Which method to take, and from which bandwidth on: conclusions from predictions, and from a run's own figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypedDict

from typing_extensions import Unpack

from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.planning.cost_model import Job, Link, Machine, Prediction, predict, scape
from lightning_scape.planning.two_level import predict_nodes
from lightning_scape.scape.config import ScapeConfig

WORTH = 1.1
"""Speed-up from which sparse training is advised."""
SPARSEST = 0.99
"""Sparsity up to which training was measured to end near AdamW; above it ends percents higher (docs/quality.md)."""
COSTS_QUALITY = f"above {SPARSEST:.0%}, once the warm-up is over, the loss ended several percent higher"
SLOWEST, FASTEST = 1.25e5, 1.25e13
"""Bytes per second between which break-even is looked for: 1 Mbit/s and 100 Tbit/s."""


def best_dense(predictions: Iterable[Prediction], memory: float = math.inf) -> Prediction:
    """The fastest of what a user would use instead.

    Args:
        predictions: of all methods.
        memory: bytes of a rank's device. What needs more is left out, unless all do.

    Raises:
        ValueError: they are of one rank, which has nobody to talk to.
    """
    dense = [p for p in predictions if not p.is_scape and p.bytes_sent]
    if not dense:
        raise ValueError("`predictions` must be of at least 2 ranks, got none that sends anything. Give a job of more.")
    return _fastest([p for p in dense if p.memory <= memory] or dense)


class Which(TypedDict, total=False):
    """What :func:`break_even_bandwidth` compares; each may be left out."""

    speedup: float
    """How many times as fast SCAPE is to be; 1."""
    memory: float
    """Bytes of a rank's device; infinite."""
    inside: Link | None
    """From a rank of a node to its other ranks; HSDP is then one of the dense methods. None."""
    whole_nodes: bool
    """Of SCAPE with ``local_group_size``; needs ``inside``. False."""


def break_even_bandwidth(
    job: Job, link: Link, machine: Machine, sparsity: float, **which: Unpack[Which]
) -> float | None:
    """Bytes per second below which SCAPE is ``speedup`` times as fast as the best dense method (that fits).

    Args:
        job: what is trained, on how many ranks.
        link: between nodes; its bandwidth is varied.
        machine: what the optimizers cost.
        sparsity: of SCAPE.
        **which: :class:`Which` step of SCAPE, against which of the dense methods.

    Returns:
        None where it is not so fast at 1 Mbit/s already; infinite where it is at 100 Tbit/s still.
    """
    gain = _gain(job, link, machine, sparsity, **which)
    low, high = SLOWEST, FASTEST
    if gain(low) <= 0:
        return None
    if gain(high) > 0:
        if gain(link.bandwidth) > 0:
            return math.inf
        high = link.bandwidth  # on faster links it wins again, by sending fewer messages
    return _where_it_turns(gain, low, high)


def least_bandwidth(job: Job, link: Link, machine: Machine, sparsity: float, **which: Unpack[Which]) -> float | None:
    """The opposite: bytes per second from which on SCAPE is so fast, though it is not on the slowest links.

    On many ranks it sends fewer messages than dense methods do, but its all-to-all may load a node's link with more
    bytes. None where it is not so fast on ``link``, or is at 1 Mbit/s already. Arguments are those of
    :func:`break_even_bandwidth`.
    """
    gain = _gain(job, link, machine, sparsity, **which)
    if gain(link.bandwidth) <= 0 or gain(SLOWEST) > 0:
        return None
    return _where_it_turns(gain, SLOWEST, link.bandwidth)


def _gain(job: Job, link: Link, machine: Machine, sparsity: float, **which: Unpack[Which]) -> Callable[[float], float]:
    inside, whole_nodes = which.get("inside"), which.get("whole_nodes", False)

    def gain(bandwidth: float) -> float:
        there = replace(link, bandwidth=bandwidth)
        found = predict(job, there, machine, [sparsity])
        found += [] if inside is None else predict_nodes(job, there, machine, inside, [sparsity])
        scape = next(p for p in found if p.is_scape and (p.group_size > 1) == whole_nodes)
        dense = best_dense(found, which.get("memory", math.inf))
        return dense.seconds - which.get("speedup", 1.0) * scape.seconds

    return gain


def _where_it_turns(gain: Callable[[float], float], low: float, high: float) -> float:
    """Where the gain changes its sign, to one in a thousand."""
    falling = gain(low) > 0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (gain(middle) > 0) == falling else (low, middle)
    return math.sqrt(low * high)


def in_four_bits(job: Job, link: Link, machine: Machine, predictions: Iterable[Prediction]) -> list[Prediction]:
    """SCAPE with ``wire_dtype="int4"``, where that shortens a step by at least 5%.

    Args:
        job: what is trained, on how many ranks.
        link: between nodes.
        machine: what the optimizers cost.
        predictions: from :func:`predict`: the same in bf16.
    """
    found = []
    for p in predictions:
        if p.sparsity and p.group_size == 1:
            narrow = scape(job, link, machine, ScapeConfig(sparsity=p.sparsity, wire_dtype="int4"))
            found += [narrow] if 1.05 * narrow.seconds <= p.seconds else []
    return found


def _fastest(methods: Iterable[Prediction]) -> Prediction:
    return min(methods, key=lambda p: p.seconds)


def advice(predictions: Sequence[Prediction], memory: float = math.inf) -> str:
    """What to use, and why; never what does not fit.

    Args:
        predictions: from :func:`predict`, compute alone included.
        memory: bytes of a rank's device.

    Raises:
        ValueError: the predictions are of one rank.
    """
    methods = [p for p in predictions if p.bytes_sent]
    dense = best_dense(methods)
    if not any(p.sparsity for p in methods) and dense.memory <= memory:
        return f"Use {dense.method}: no sparsity was asked for."
    fitting = [p for p in methods if p.memory <= memory]
    if not fitting:
        least = min(methods, key=lambda p: p.memory)
        return (
            f"None of these methods fits into the {show_bytes(memory)} of a rank: {least.method} needs the least,"
            f" {show_bytes(least.memory)}. Use more ranks, devices with more memory, or a smaller model."
        )
    alone = _fastest(p for p in predictions if not p.is_scape and not p.bytes_sent)
    choice = _choice(fitting)
    several = any(p.sparsity for p in fitting) and not all(p.is_scape for p in fitting)
    if several:
        said = _compared(choice, best_dense(fitting), _sparse_choice(fitting), alone)
    else:
        said = (
            f"Use {choice.method}: of what fits into the {show_bytes(memory)} of a rank it is the fastest; a step takes"
            f" {show_seconds(choice.seconds)}."
        )
    wished = _choice(methods)
    if wished.memory > memory:
        sharded = [f"; FSDP needs {show_bytes(p.memory)}" for p in methods if p.method == "FSDP"]
        return (
            f"{said} {wished.method} would take {show_seconds(wished.seconds)}, but needs {show_bytes(wished.memory)}"
            f" per rank{''.join(sharded)}."
        )
    return said if several else f"{said} It needs {show_bytes(choice.memory)}."


def _choice(methods: Sequence[Prediction]) -> Prediction:
    """Sparse training where it pays, else the fastest dense method; the fastest of all where one kind is missing."""
    sparse, dense = [p for p in methods if p.sparsity], [p for p in methods if not p.is_scape]
    if not sparse or not dense:
        return _fastest(methods)
    found, instead = _sparse_choice(methods), _fastest(dense)
    return found if instead.seconds >= WORTH * found.seconds else instead


def _sparse_choice(methods: Sequence[Prediction]) -> Prediction:
    """The lowest sparsity within 5% of the fastest that pays, for it costs less in quality; else the fastest.

    What is sparser than :data:`SPARSEST` is weighed only where nothing else pays.
    """
    sparse, limit = [p for p in methods if p.sparsity], best_dense(methods).seconds / WORTH
    near = [p for p in sparse if (p.sparsity or 0) <= SPARSEST]
    if any(p.seconds <= limit for p in near):
        sparse = near
    limit = min(1.05 * _fastest(sparse).seconds, limit)
    paying = [p for p in sparse if p.seconds <= limit]
    return min(paying, key=lambda p: (p.sparsity or 0, p.seconds), default=_fastest(sparse))


def _compared(choice: Prediction, dense: Prediction, sparse: Prediction, alone: Prediction) -> str:
    """The advice where both kinds are there: ``choice`` is one of the two."""
    gain = dense.seconds / sparse.seconds
    if choice is sparse:
        fewer = dense.on_card / sparse.on_card
        where = " per network card" if sparse.group_size > 1 else ""
        cost = f" But {COSTS_QUALITY}." if (sparse.sparsity or 0) > SPARSEST else ""
        return (
            f"Use {sparse.method}: a step takes {show_seconds(sparse.seconds)} instead of {show_seconds(dense.seconds)}"
            f" with {dense.method}, {gain:.1f}x as fast, and sends {fewer:.0f}x fewer bytes{where}.{cost}"
        )
    if gain >= 1.0:
        return (
            f"Stay with {dense.method}: {sparse.method} would be {gain:.2f}x as fast, too little to pay for training"
            " on sparse updates."
        )
    if sparse.latency > max(sparse.exposed / 2, sparse.seconds - dense.seconds):
        reason = f"{show_seconds(sparse.latency)} of that are the latency of so many ranks, whatever the bandwidth"
    elif dense.seconds <= WORTH * alone.seconds:
        reason = "the link is fast enough for this model"
    elif sparse.exposed > sparse.seconds - dense.seconds:
        reason = f"{show_seconds(sparse.exposed)} of that are spent waiting for its messages"
    else:
        reason = "its own work takes longer here than its smaller messages save"
    return (
        f"Stay with {dense.method}: its step takes {show_seconds(dense.seconds)}, with {sparse.method}"
        f" {show_seconds(sparse.seconds)}; {reason}."
    )


def show_bandwidth(value: float | None) -> str:
    """Bytes per second as bits: ``1.25e9`` is ``"10 Gbit/s"``."""
    if value is None:
        return "never"
    if math.isinf(value):
        return "always"
    bits = value * 8
    if bits >= 1e12:
        return f"{bits * 1e-12:.3g} Tbit/s"
    return f"{bits * 1e-9:.3g} Gbit/s" if bits >= 1e9 else f"{bits * 1e-6:.3g} Mbit/s"
