"""The network interfaces of this host, and which of them leads to the other ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_scape.core.words import show_bandwidth
from lightning_scape.tools.diagnosis.findings import Finding

TOPIC = "Network"
INFINIBAND = Path("/sys/class/infiniband")
SLOW_MBIT = 100.0
"""Mbit/s of an interface, and less, that is called slow."""
VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""By backend: the variable that names its interface."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    up: bool = True
    mbit: float | None = None
    """Mbit/s as its driver says; None is not known (of virtual machines, of Wi-Fi)."""
    address: str | None = None
    """IPv4."""

    @property
    def loopback(self) -> bool:
        """Whether it only reaches this host."""
        return self.address is not None and is_loopback(self.address)

    def __str__(self) -> str:
        """One line."""
        speed = "speed not known" if self.mbit is None else show_mbit(self.mbit)
        return f"{self.name} ({self.address or 'no IPv4 address'}, {speed if self.up else 'down'})"


def interfaces() -> list[Interface]:
    """Those of this host; speeds only where its kernel tells them."""
    addresses = psutil.net_if_addrs()
    found = []
    for name, state in psutil.net_if_stats().items():
        of_ipv4 = [each.address for each in addresses.get(name, []) if each.family == socket.AF_INET]
        mbit = float(state.speed) if state.speed > 0 else None  # 0: not known
        found.append(Interface(name, state.isup, mbit, next(iter(of_ipv4), None)))
    return found


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address only reaches its own host."""
    return ipaddress.ip_address(address).is_loopback


def address_of_host_name() -> str | None:
    """The address that this host's name stands for: gloo listens there if no variable names an interface."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return None


def address_towards(host: str) -> str | None:
    """The address from which this host would send to another; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((socket.gethostbyname(host), 9))
        address: str = asking.getsockname()[0]
        return address
    return None


def check_network(
    found: Sequence[Interface],
    backend: str,
    environ: Mapping[str, str],
    *,
    nodes: int,
    of_host_name: str | None,
    towards: str | None,
) -> list[Finding]:
    """All findings about the interfaces.

    Args:
        found: those of this host.
        backend: ``"gloo"`` or ``"nccl"``: the library that sends the messages.
        environ: the environment's variables.
        nodes: hosts of the job.
        of_host_name: see :func:`address_of_host_name`.
        towards: the address from which this host reaches MASTER_ADDR; None where there is none.
    """
    lines = [Finding(TOPIC, "ok" if each.up else "note", str(each)) for each in found]
    variable = VARIABLES[backend]
    named = environ.get(variable, "")
    used = right = _by_address(found, towards)
    if backend == "nccl" and (not named or named[0] in "^="):  # the way to the first node is the best guess
        if right is None or right.loopback:  # which says nothing: NCCL looks for itself
            return [*lines, Finding(TOPIC, "note", f"NCCL chooses the interface (or set {variable}).")]
    elif named:
        used = _first_named(found, named, prefixes=backend == "nccl")
        if used is None:
            names = ", ".join(each.name for each in found)
            text = f"{variable} must name an interface of this host ({names}), got {named!r}."
            return [*lines, Finding(TOPIC, "broken", text, "Set it to the one that leads to the other nodes.")]
    else:
        used = _by_address(found, of_host_name)
    lines += _check_used(used, right, found, variable, named, nodes)
    if backend == "nccl" and INFINIBAND.is_dir() and (cards := sorted(each.name for each in INFINIBAND.iterdir())):
        lines.append(Finding(TOPIC, "note", f"InfiniBand is there ({', '.join(cards)}): NCCL sends by it."))
    return lines


def _first_named(found: Sequence[Interface], named: str, prefixes: bool) -> Interface | None:
    """The first interface that a variable names: names stand between commas; of NCCL, their beginnings too."""
    for name in filter(None, map(str.strip, named.split(","))):
        for each in found:
            if each.name == name or (prefixes and each.name.startswith(name)):
                return each
    return None


def _check_used(
    used: Interface | None, right: Interface | None, found: Sequence[Interface], variable: str, named: str, nodes: int
) -> list[Finding]:
    """About the interface that the messages will take, and the one that they should take."""
    how = f"{variable}={named}" if named else f"no {variable} is set, and it goes by the host's name"
    if nodes == 1:
        down = used is not None and not used.up
        return (
            [Finding(TOPIC, "broken", f"{used} is what messages take ({how}).", _set(variable, None))] if down else []
        )
    better = right if right is not None and not right.loopback else None
    if used is None:
        # The host's name stands for no address of an interface: gloo then takes the loopback.
        text = f"Ranks of other nodes cannot reach this one: {how}, which stands for none of its interfaces."
        return [Finding(TOPIC, "broken", text, _set(variable, better))]
    if used.loopback:
        text = f"Ranks of other nodes cannot reach this one on {used.name} ({used.address}): {how}."
        return [Finding(TOPIC, "broken", text, _set(variable, better))]
    if not used.up:
        return [Finding(TOPIC, "broken", f"{used.name} is down ({how}).", _set(variable, better))]
    if better is not None and better.name != used.name:
        text = f"Messages take {used.name} ({how}), but the way to MASTER_ADDR is {better.name}."
        return [Finding(TOPIC, "slow", text, _set(variable, better))]
    return [_check_speed(used, found, variable)]


def _check_speed(used: Interface, found: Sequence[Interface], variable: str) -> Finding:
    if used.mbit is None:
        text = (
            f"Messages take {used.name}. How fast it is, the kernel does not say: see what was measured between ranks."
        )
        return Finding(TOPIC, "note", text)
    faster = [each for each in found if each.up and (each.mbit or 0) > used.mbit and each.address]
    if faster:
        best = max(faster, key=lambda each: each.mbit or 0)
        text = f"Messages take {used.name} at {show_mbit(used.mbit)}; {best.name} has {show_mbit(best.mbit or 0)}."
        return Finding(TOPIC, "slow", text, f"If all nodes are on it, set {variable}={best.name}.")
    if used.mbit <= SLOW_MBIT:
        text = f"Messages take {used.name}, which has {show_mbit(used.mbit)}: dense training would wait for it."
        return Finding(TOPIC, "slow", text, "Look at cable and switch; else use SCAPE 99% or SparseLoCo.")
    return Finding(TOPIC, "ok", f"messages take {used.name} at {show_mbit(used.mbit)}")


def _by_address(found: Sequence[Interface], address: str | None) -> Interface | None:
    if address is None:
        return None
    same = (each for each in found if each.address == address)
    # 127.0.1.1 is the loopback's, too, under another address.
    return next(same, next((each for each in found if each.loopback and is_loopback(address)), None))


def _set(variable: str, better: Interface | None) -> str:
    target = f"{variable}={better.name}" if better else f"{variable} to the interface that leads to the other nodes"
    return f"Set {target}, on every node."


def show_mbit(mbit: float) -> str:
    """``25_000`` is ``"25 Gbit/s"``."""
    return show_bandwidth(mbit * 125_000)
