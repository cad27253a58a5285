"""``lightning-scape doctor``: says what does not work here, what is slow, and what to do about it (``--help``)."""

from __future__ import annotations

import os
import sys
import threading
from argparse import Namespace
from dataclasses import asdict, replace
from typing import Any

import torch

from lightning_scape.__about__ import __version__
from lightning_scape.tools.diagnosis import network
from lightning_scape.tools.diagnosis.findings import Finding, exit_status, report
from lightning_scape.tools.diagnosis.host import check_host
from lightning_scape.tools.diagnosis.meeting import Meeting, Place
from lightning_scape.tools.diagnosis.packages import check_packages
from lightning_scape.tools.diagnosis.ranks import TOPIC, check_messages, compare_ranks, missing_ranks, silent_rank
from lightning_scape.tools.diagnosis.run import check_run
from lightning_scape.tools.diagnosis.watch import check_now

COMPILING_SECONDS = 120.0
"""How much longer ranks wait for one that compiles its operations for the first time."""
ALONE = (
    "One process looked at this host alone. To look at the network, run this on every node: torchrun --nnodes N"
    " --nproc_per_node 1 --node_rank I --master_addr HOST -m lightning_scape doctor"
)


def run(args: Namespace) -> int:
    """The command, with its arguments read; returns its exit status.

    Raises:
        ValueError: a launcher's variables contradict each other.
    """
    if args.folder is not None or args.watch is not None:
        findings = check_run(args.folder) if args.folder is not None else []
        findings += check_now(args.watch) if args.watch is not None else []
        print(report(findings))
        return exit_status(findings)
    place = Place.of(os.environ)
    device = _device(place)
    with Watch(place, 5 * args.timeout + 2 * COMPILING_SECONDS) as watch:
        if place.world_size > 1:
            return _meet(place, device, args.timeout, watch)
        findings = _of_this_host(place, device, watch)
        print(report([*findings, Finding(TOPIC, "note", ALONE)]))
        return exit_status(findings)


def _device(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", min(place.local_rank, torch.cuda.device_count() - 1))
    torch.cuda.set_device(device)
    return device


def _of_this_host(place: Place, device: torch.device, watch: Watch) -> list[Finding]:
    on_cuda = device.type == "cuda"
    watch.at("importing what is installed")
    found = check_packages(on_cuda)
    watch.at("trying a step")
    found += check_host(device, place.local_world_size, os.environ)
    return found + network.check_network(
        network.interfaces(),
        "nccl" if on_cuda else "gloo",
        os.environ,
        nodes=place.nodes,
        of_host_name=network.address_of_host_name(),
        towards=network.address_towards(place.address) if place.address else None,
    )


def _meet(place: Place, device: torch.device, timeout: float, watch: Watch) -> int:
    """What the ranks of a job find together; rank 0 prints it, all return the same status."""
    watch.at(f"looking for the store at {place.address}:{place.port}")
    try:
        meeting = Meeting(place, timeout)
    except RuntimeError as error:
        return _alone(place, device, watch, str(error))
    try:
        watch.at("waiting for all ranks")
        meeting.leave("here", {"name": place.name})
        came = meeting.collect("here", timeout)
        if 0 not in came:  # torchrun keeps the store, so the others meet without it
            missing = missing_ranks(sorted(came), place, timeout)
            return _alone(place, device, watch, missing.text, missing.remedy)
        present: list[int] = meeting.decide("present", None if place.rank else sorted(came), 2 * timeout)
        if place.rank not in present:
            late = f"{place.name} came after the others had given up."
            return _alone(place, device, watch, late, "Start all of them at the same time.")
        return _look_together(meeting, device, present, watch)
    except (RuntimeError, TimeoutError) as error:  # the store, or rank 0, is lost on the way
        return _alone(place, device, watch, f"{place.name} has lost the others: {error}")


def _alone(place: Place, device: torch.device, watch: Watch, problem: str, remedy: str = "") -> int:
    """The report of a rank that the others will not hear."""
    print(report([*_of_this_host(place, device, watch), Finding(TOPIC, "broken", problem, remedy)]), flush=True)
    return 1


def _look_together(meeting: Meeting, device: torch.device, present: list[int], watch: Watch) -> int:
    place, first = meeting.place, meeting.place.rank == 0
    findings = _of_this_host(place, device, watch)
    watch.at("waiting until all ranks have looked at their hosts")
    info = {"lightning_scape": __version__, "torch": torch.__version__, "device": device.type, "name": place.name}
    meeting.leave("ready", info)
    infos = meeting.collect("ready", meeting.seconds + COMPILING_SECONDS, present)
    ready: list[int] = meeting.decide(
        "go on", sorted(infos) if first else None, 2 * meeting.seconds + COMPILING_SECONDS
    )
    together = compare_ranks(infos)
    if len(ready) == place.world_size:
        together += check_messages(meeting, device, watch.at)
    else:
        together.append(missing_ranks(ready, place, meeting.seconds))
    watch.at("collecting what all ranks have found")
    meeting.leave("findings", [asdict(finding) for finding in [*findings, *together]])
    status = None
    if first:
        findings += together
        others = meeting.collect("findings", 2 * meeting.seconds, ready)
        findings += _of_others(others, {rank: str(info["name"]) for rank, info in infos.items()}, findings)
        findings += [silent_rank(rank) for rank in ready if rank not in others]
        print(report(findings), flush=True)
        status = exit_status(findings)
    status = int(meeting.decide("status", status, 3 * meeting.seconds))
    meeting.part(ready)
    return status


def _of_others(theirs: dict[int, Any], names: dict[int, str], known: list[Finding]) -> list[Finding]:
    """What is wrong on other ranks and not known yet, each said once with the names of those who say so."""
    said: dict[Finding, list[str]] = {}
    for rank, findings in theirs.items():
        for finding in (Finding(**each) for each in findings):
            if finding.verdict in ("slow", "broken") and finding not in known:
                said.setdefault(finding, []).append(names[rank])
    return [replace(finding, text=f"{', '.join(who)}: {finding.text}") for finding, who in said.items()]


class Watch:
    """Ends this process where it would wait for ever inside a ``with`` block, and says what it waited for.

    Args:
        place: which rank it is.
        seconds: after which it is ended.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds, self.doing = place, seconds, "starting"
        self._timer = threading.Timer(seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def at(self, doing: str) -> None:
        """Notes what is being done from now on."""
        self.doing = doing

    def _give_up(self) -> None:
        text = f"must end within {self.seconds:g} s, got stuck while {self.doing}. End it on all nodes, and look at the"
        print(f"lightning-scape doctor: {self.place.name} {text} last lines above.", file=sys.stderr, flush=True)
        os._exit(1)
