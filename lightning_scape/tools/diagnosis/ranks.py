"""Whether the ranks of a job reach each other, and how fast."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch names it late

from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.round_trips import neighbours, round_trip
from lightning_scape.core.words import show_bandwidth, show_bytes, show_seconds
from lightning_scape.hosts.rendezvous import explained_rendezvous
from lightning_scape.planning.measure import measure_link, median_seconds
from lightning_scape.tools.diagnosis.findings import Finding
from lightning_scape.tools.diagnosis.meeting import Meeting, Place

TOPIC = "Ranks"
SMALL, TRIAL, LARGE = 8, 1 << 16, 1 << 22
"""Bytes of messages: of the one that shows the latency, of the first larger one, and of the largest."""
SHARE_OF_SECOND = 0.1
"""A large message is so large that it takes about so long, on slow links too."""
SLOW_BYTES = 12.5e6
"""Bytes per second between ranks, and less, that are called slow: 100 Mbit/s."""
SLOW_SECONDS = 5e-3
"""Seconds of a message one way, and more, that are called slow."""
APART = 3.0
"""A pair whose messages take so many times the median pair's is named."""


@dataclass(frozen=True)
class Trip:
    """What messages between two neighbours cost."""

    first: int
    second: int
    """Ranks."""
    latency: float
    """Seconds of the smallest message, one way."""
    bandwidth: float
    """Bytes per second of large ones, one way at a time."""
    size: int
    """Bytes of a large one."""


def missing_ranks(present: Sequence[int], place: Place, seconds: float) -> Finding:
    """Names those who did not come."""
    missing = [rank for rank in range(place.world_size) if rank not in present]
    nodes = sorted({place.node_of(rank) for rank in missing})
    names = _list("rank", missing)
    return Finding(
        TOPIC,
        "broken",
        f"All {place.world_size} ranks must come to {place.address}:{place.port} within {seconds:g} s, got no sign of"
        f" {names} ({_list('node', nodes)}).",
        "Look at the output there: was the command started, with the same MASTER_ADDR, MASTER_PORT and number of nodes,"
        " and a --node_rank of its own? Does a firewall let it through?",
    )


def silent_rank(rank: int) -> Finding:
    """Of a rank that came, and did not say what it has found."""
    text = f"All ranks must say what they have found, got nothing from rank {rank}: it has died, or hangs."
    return Finding(TOPIC, "broken", text, "Look at its output.")


def check_messages(meeting: Meeting, device: torch.device, at: Callable[[str], None]) -> list[Finding]:
    """Joins all ranks in a process group and times messages; all ranks call it. Rank 0's findings are the job's.

    Args:
        meeting: to which all ranks have come.
        device: where messages are.
        at: told what is being done, for whoever has to say where it got stuck.
    """
    place, backend = meeting.place, "nccl" if device.type == "cuda" else "gloo"
    # An error in time, where NCCL would end the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    joined = False
    try:
        at(f"connecting all ranks by {backend}")
        with explained_rendezvous(meeting.environment):
            dist.init_process_group(
                backend,
                store=PrefixStore("group", meeting.store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=meeting.seconds),
            )
        joined = True
        return _measured(meeting, device, backend, at)
    except (RuntimeError, ValueError) as error:
        return [Finding(TOPIC, "broken", f"Ranks have met, but messages fail on {place.name}: {error}")]
    finally:
        if joined:
            dist.destroy_process_group()


def _measured(meeting: Meeting, device: torch.device, backend: str, at: Callable[[str], None]) -> list[Finding]:
    place = meeting.place
    communicator = Communicator()
    at("the first all-reduce")
    total = communicator.all_reduce_sum(torch.tensor([float(place.rank)], dtype=torch.float32, device=device))
    expected = place.world_size * (place.world_size - 1) / 2
    if float(total) != expected:
        text = f"An all-reduce of the ranks' numbers must give {expected:g}, got {float(total):g} on {place.name}."
        return [Finding(TOPIC, "broken", text, "Ask whoever looks after the network: messages are damaged.")]
    at("all-reduces")
    trial = torch.zeros(TRIAL // 4, dtype=torch.float32, device=device)
    seconds = median_seconds(lambda: communicator.all_reduce_sum(trial), 3, device)
    size = int(meeting.decide("size", None if place.rank else message_size(seconds), meeting.seconds))
    trips = _trips(place, communicator, size, device, at)
    at("all-reduces and all-to-alls")
    link = measure_link(size * 1e-6, 3, device=device, ranks_per_node=place.local_world_size)
    meeting.leave("trips", [asdict(trip) for trip in trips])
    if place.rank:
        return []
    everyone = [Trip(**trip) for trips in meeting.collect("trips", meeting.seconds).values() for trip in trips]
    text = (
        f"all {place.world_size} ranks on {place.nodes} node{'s' if place.nodes > 1 else ''} reach each other by"
        f" {backend}; an all-reduce of {show_bytes(TRIAL)} takes {show_seconds(seconds)}, large ones run at"
        f" {show_bandwidth(link.bandwidth)}"
    )
    return [Finding(TOPIC, "ok", text), *judge_trips(everyone, place)]


def message_size(seconds: float) -> int:
    """Bytes of a large message that takes about :data:`SHARE_OF_SECOND`, where :data:`TRIAL` bytes take ``seconds``."""
    return max(TRIAL, min(LARGE, int(TRIAL * SHARE_OF_SECOND / max(seconds, 1e-9))))


def _trips(
    place: Place, communicator: Communicator, size: int, device: torch.device, at: Callable[[str], None]
) -> list[Trip]:
    """Times messages with both neighbours; those of which this rank is the first."""
    found, signal = [], torch.zeros(1, dtype=torch.float32, device=device)
    for pairs in neighbours(place.world_size):
        communicator.all_reduce_sum(signal)  # a round begins when the one before has ended everywhere
        for first, second in pairs:
            if place.rank not in (first, second):
                continue
            peer = second if place.rank == first else first
            at(f"messages between rank {place.rank} and rank {peer}")
            begins = place.rank == first
            small = median_seconds(round_trip(peer, begins, SMALL, device), 20, device)
            large = median_seconds(round_trip(peer, begins, size, device), 3, device)
            if begins:
                found.append(Trip(first, second, small / 2, 2 * size / max(large - small, 1e-9), size))
    return found


def judge_trips(trips: Sequence[Trip], place: Place) -> list[Finding]:
    """A line for each pair of neighbours, of which slow ones say why that matters.

    Args:
        trips: of all pairs.
        place: which ranks share a host.
    """
    found = []
    usual = median_high(trip.bandwidth for trip in trips) if trips else 0.0
    for trip in trips:
        between = place.node_of(trip.first) != place.node_of(trip.second)
        where = "between nodes" if between else "inside one node"
        text = (
            f"rank {trip.first} and rank {trip.second} ({where}): {show_seconds(trip.latency)} for a small message,"
            f" {show_bandwidth(trip.bandwidth)} for {show_bytes(trip.size)}"
        )
        why, remedy = _why_slow(trip, usual)
        found.append(Finding(TOPIC, "slow" if why else "ok", text + (f": {why}." if why else ""), remedy))
    return found


def _why_slow(trip: Trip, usual: float) -> tuple[str, str]:
    if trip.bandwidth <= SLOW_BYTES * 1.05:
        dense = 8e8 / 2 / trip.bandwidth
        why = f"a dense all-reduce of 100 million parameters would take {show_seconds(dense)} and more in every step"
        return why, "Use SCAPE 99%, or SparseLoCo (`lightning-scape plan` says which)."
    if trip.latency >= SLOW_SECONDS:
        why = "a step of SCAPE sends four or five messages, and each waits that long"
        return why, "Use SparseLoCo, which exchanges every 30 steps."
    if usual >= APART * trip.bandwidth:
        why = f"other neighbours reach {show_bandwidth(usual)}"
        return why, "Look at the cable, the switch and the load of these two."
    return "", ""


def compare_ranks(infos: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Whether all ranks run the same versions on the same kind of device.

    Args:
        infos: by rank, what each says of itself: name and value.
    """
    found = []
    for name in ("lightning_scape", "torch", "device"):
        values: dict[Any, list[int]] = {}
        for rank, info in sorted(infos.items()):
            values.setdefault(info.get(name), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{value} on {_list('rank', ranks)}" for value, ranks in values.items())
            text = f"All ranks must have the same {name}, got {said}."
            found.append(
                Finding(TOPIC, "broken", text, "Install the same versions and use the same devices everywhere.")
            )
    return found


def _list(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
