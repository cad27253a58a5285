"""Whether a job waits for the network, by the counters of this host's interfaces: of any job, plain DDP's too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import psutil

from lightning_scape.core.words import show_bandwidth
from lightning_scape.tools.diagnosis.findings import Finding
from lightning_scape.tools.diagnosis.network import Interface, interfaces

TOPIC = "Network"
EVERY = 0.01
"""Seconds between two looks: a message of several looks has the link to itself in those between its ends."""
MUCH, SOME = 0.5, 0.2
"""Shares of the time that the link is busy."""
QUIET = 1e5
"""Bytes a second: less is no training's."""

Counters = Callable[[], Mapping[str, tuple[int, int]]]


@dataclass(frozen=True)
class Traffic:
    """Of one interface while it was watched."""

    rates: Sequence[float]
    """Bytes a second, from look to look."""
    stated: float | None
    """Bytes a second that it can carry as its driver says, which of virtual machines and of shaped links is too much;
    None: it says nothing."""

    @property
    def mean(self) -> float:
        """Bytes a second."""
        return fmean(self.rates)

    @property
    def speed(self) -> float:
        """Bytes a second while messages are on their way: the most that lasted for three looks.

        Where nothing lasts so long but what trickles between shorter messages, the stated speed; or the largest rate.
        """
        lasting = max(map(min, zip(self.rates, self.rates[1:], self.rates[2:], strict=False)), default=0.0)
        return lasting if lasting >= 0.9 * self.mean else self.stated or max(self.rates)

    @property
    def busy(self) -> float:
        """Share of the time that the bytes take at this speed."""
        return min(1.0, self.mean / self.speed)


def counters() -> Mapping[str, tuple[int, int]]:
    """Bytes since the start of the host, sent and received, of each interface."""
    return {name: (c.bytes_sent, c.bytes_recv) for name, c in psutil.net_io_counters(pernic=True).items()}


def watch(seconds: float, read: Counters = counters) -> dict[str, list[float]]:
    """Rates of each interface in bytes a second, looked at every :data:`EVERY` seconds; the direction with more."""
    rates: dict[str, list[float]] = {}
    began = before = time.perf_counter()
    last = read()
    while before - began < seconds:
        time.sleep(EVERY)
        now, seen = time.perf_counter(), read()
        for name, counts in seen.items():
            if name in last:
                moved = max(count - old for count, old in zip(counts, last[name], strict=True))
                rates.setdefault(name, []).append(moved / (now - before))
        before, last = now, seen
    return rates


def check_traffic(rates: Mapping[str, Sequence[float]], known: Sequence[Interface]) -> list[Finding]:
    """What the traffic says of a job that trains meanwhile, by the interface that carries most."""
    of_name = {interface.name: interface for interface in known}
    outward = {name: each for name, each in rates.items() if each and not (name in of_name and of_name[name].loopback)}
    if not outward or max(map(fmean, outward.values())) < QUIET:
        return [Finding(TOPIC, "ok", "No interface carries a training's messages: no job waits for the network now.")]
    name = max(outward, key=lambda each: fmean(outward[each]))
    mbit = of_name[name].mbit if name in of_name else None
    return [judge(name, Traffic(outward[name], mbit * 125_000 if mbit else None))]


def judge(name: str, traffic: Traffic) -> Finding:
    """In plain words."""
    speed, mean = map(show_bandwidth, (traffic.speed, traffic.mean))
    says = "no speed" if traffic.stated is None else show_bandwidth(traffic.stated)
    text = (
        f"{name} is busy for {traffic.busy:.0%} of the time: messages move at {speed}, {mean} on average (its driver"
        f" says {says})."
    )
    plan = "`lightning-scape plan` computes what it brings."
    if traffic.stated is not None and traffic.speed < traffic.stated / 2:
        plan += " `lightning-scape doctor` under torchrun measures the link: data that is streamed looks the same here."
    if traffic.busy >= MUCH:
        remedy = (
            'Training waits for it: ScapeStrategy(sparsity=0.99) in the place of "ddp" sends 1% of the entries after'
            f" its warm-up, and a step takes {1 - traffic.busy:.0%} of its time at best. {plan}"
        )
        return Finding(TOPIC, "slow", text, remedy)
    if traffic.busy >= SOME:
        return Finding(TOPIC, "note", text, f"A part of it may hide behind the computation. {plan}")
    return Finding(TOPIC, "ok", f"{text} Training does not wait for it: look at data loading and at the computation.")


def check_now(seconds: float) -> list[Finding]:
    """Watches this host for so long."""
    return check_traffic(watch(seconds), interfaces())
