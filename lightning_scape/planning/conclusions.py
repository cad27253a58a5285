"""Which method to take, and from which bandwidth on: conclusions from predictions, and from a run's own figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.planning.cost_model import Link, Prediction

WORTH = 1.1
"""Speed-up from which sparse training is advised."""
SPARSEST = 0.99
"""Sparsity up to which training was measured to end near AdamW; above it ends percents higher (docs/quality.md)."""
NEAR_COMPUTE = 1.15
"""A step of so many times compute alone is as good as free of messages."""
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
    dense = [p for p in predictions if not p.title and p.bytes_sent]
    if not dense:
        raise ValueError("`predictions` must be of at least 2 ranks, got none that sends anything. Give a job of more.")
    return _fastest([p for p in dense if p.memory <= memory] or dense)


Gain = Callable[[float], float]
"""By bytes per second: the seconds by which a method is faster than asked for."""


def gain_of(
    method: str,
    predict: Callable[[Link], Sequence[Prediction]],
    link: Link,
    *,
    speedup: float = 1.0,
    memory: float = math.inf,
) -> Gain:
    """How much faster a method is than the best dense one (that fits), slowed down by ``speedup``.

    Args:
        method: the name of its prediction: ``"SCAPE 0.99"``.
        predict: a step over a link, by this method and by the dense ones.
        link: between nodes; its bandwidth is varied.
        speedup: how many times as fast it is to be.
        memory: bytes of a rank's device.
    """

    def gain(bandwidth: float) -> float:
        found = predict(replace(link, bandwidth=bandwidth))
        (sparse,) = (p for p in found if p.method == method)
        return best_dense(found, memory).seconds - speedup * sparse.seconds

    return gain


def break_even_bandwidth(gain: Gain, bandwidth: float) -> float | None:
    """Bytes per second below which there is a gain, on links like the one with ``bandwidth``.

    Returns:
        None where there is none at 1 Mbit/s already; infinite where there is one at 100 Tbit/s still.
    """
    low, high = SLOWEST, FASTEST
    if gain(low) <= 0:
        return None
    if gain(high) > 0:
        if gain(bandwidth) > 0:
            return math.inf
        high = bandwidth  # on faster links it wins again, by sending fewer messages
    return _where_it_turns(gain, low, high)


def least_bandwidth(gain: Gain, bandwidth: float) -> float | None:
    """The opposite: bytes per second from which on there is a gain, though there is none on the slowest links.

    On many ranks a method sends fewer messages than dense ones do, but its all-to-all may load a node's link with more
    bytes. None where there is no gain at ``bandwidth``, or there is one at 1 Mbit/s already.
    """
    if gain(bandwidth) <= 0 or gain(SLOWEST) > 0:
        return None
    return _where_it_turns(gain, SLOWEST, bandwidth)


def _where_it_turns(gain: Gain, low: float, high: float) -> float:
    """Where the gain changes its sign, to one in a thousand."""
    falling = gain(low) > 0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (gain(middle) > 0) == falling else (low, middle)
    return math.sqrt(low * high)


def _fastest(methods: Iterable[Prediction]) -> Prediction:
    return min(methods, key=lambda p: p.seconds)


def advice(predictions: Sequence[Prediction], memory: float = math.inf, unit: str = "a step") -> str:
    """What to use, and why; never what does not fit.

    Args:
        predictions: from :func:`~lightning_scape.planning.cost_model.predict`, compute alone included; or of runs.
        memory: bytes of a rank's device.
        unit: what they are of: ``"a step"``, or ``"this run"``.

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
    alone = _fastest(p for p in predictions if not p.title and not p.bytes_sent)
    choice = _choice(fitting)
    several = any(p.sparsity for p in fitting) and not all(p.title for p in fitting)
    if several:
        said = _compared(choice, best_dense(fitting), sparse_choice(fitting), alone, unit)
    else:
        said = (
            f"Use {choice.method}: of what fits into the {show_bytes(memory)} of a rank it is the fastest; {unit} takes"
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
    sparse, dense = [p for p in methods if p.sparsity], [p for p in methods if not p.title]
    if not sparse or not dense:
        return _fastest(methods)
    found, instead = sparse_choice(methods), _fastest(dense)
    return found if instead.seconds >= WORTH * found.seconds else instead


def sparse_choice(methods: Sequence[Prediction]) -> Prediction:
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


def _compared(choice: Prediction, dense: Prediction, sparse: Prediction, alone: Prediction, unit: str) -> str:
    """The advice where both kinds are there: ``choice`` is one of the two."""
    gain = dense.seconds / sparse.seconds
    if choice is sparse:
        fewer = dense.on_card / sparse.on_card
        where = " per network card" if sparse.group_size > 1 else ""
        cost = f" But {COSTS_QUALITY}." if (sparse.sparsity or 0) > SPARSEST else ""
        return (
            f"Use {sparse.method}: {unit} takes {show_seconds(sparse.seconds)} instead of {show_seconds(dense.seconds)}"
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
        f"Stay with {dense.method}: {unit} takes {show_seconds(dense.seconds)}, with {sparse.method}"
        f" {show_seconds(sparse.seconds)}; {reason}."
    )


def which_method(
    predictions: Sequence[Prediction],
    local: Sequence[Prediction],
    memory: float = math.inf,
    unit: str = "a step",
) -> str:
    """The one advice of a plan: a method that exchanges in every step, or one that does so after several; and why.

    The first, up to a sparsity of 99%, is preferred where its exchange in every step is nearly free, or where the other
    gains little: its ranks never differ. Else the choice is the shortest window whose messages are nearly free, or that
    is within 5% of the fastest: longer ones cost more in quality. What does not fit into memory is never advised.

    Args:
        predictions: from :func:`~lightning_scape.planning.cost_model.predict`, compute alone included.
        local: from :func:`~lightning_scape.planning.cost_model.predict_local`; or of runs, as the others.
        memory: bytes of a rank's device.
        unit: what they are of: ``"a step"``, or ``"this run"``.

    Raises:
        ValueError: the predictions are of one rank.
    """
    said = advice(predictions, memory, unit)
    mean = " on average" if unit == "a step" else ""
    alone = min(p.seconds for p in predictions if not p.bytes_sent)
    fitting = [p for p in local if p.memory <= memory]
    every_step = [p for p in predictions if p.bytes_sent and p.memory <= memory]
    weighed = [p for p in every_step if (p.sparsity or 0) <= SPARSEST]
    if not weighed or not fitting:
        least = [] if fitting else sorted(local, key=lambda p: p.memory)[:1]
        return said + "".join(f" {p.title} needs {show_bytes(p.memory)} per rank: too much." for p in least)
    limit = max(NEAR_COMPUTE * alone, 1.05 * min(p.seconds for p in fitting))
    choice = next(p for p in fitting if p.seconds <= limit)
    best = min(weighed, key=lambda p: p.seconds)
    if best.seconds <= NEAR_COMPUTE * alone or best.seconds < WORTH * choice.seconds:
        return (
            f"{said} {choice.title} is not needed: with {choice.option} {unit} would take"
            f" {show_seconds(choice.seconds)}{mean}, {choice.seconds / alone:.2f}x of compute alone."
        )
    sparser = min(every_step, key=lambda p: p.seconds)
    dearer = f" ({sparser.method}: {show_seconds(sparser.seconds)}, but {COSTS_QUALITY})"
    return (
        f"Take {choice.title} with {choice.option}: {unit} takes {show_seconds(choice.seconds)}{mean},"
        f" {choice.seconds / alone:.2f}x of compute alone, and sends {show_bytes(choice.bytes_sent)}; exchanging in"
        f" every step takes {show_seconds(best.seconds)} with {best.method}{dearer if sparser is not best else ''}."
        " Ranks differ between exchanges, which costs some quality: take the shortest window that you can afford."
    )
