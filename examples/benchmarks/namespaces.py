"""Hosts made of Linux network namespaces: machines that share nothing but links whose rate is known.

    with Hosts(2, rate="1gbit") as hosts:
        ranks = [host.start(["python", "train.py"], env={"NODE_RANK": str(i)}) for i, host in enumerate(hosts)]

Each host has one interface, ``eth0`` with the addresses ``10.<n>.<n>.1``, ``10.<n>.<n>.2``, ..., and a loopback of its
own; two hosts are joined by one cable, more by a switch. Every direction of a cable is limited by a token bucket
(``tc ... tbf``). The processes of all hosts see the same files and share the same cores.

Needs Linux, root and iproute2; :func:`missing` says what is not there. Namespaces are removed, and what still runs in
them is killed, when the block ends: also by an exception, by Ctrl+C and by SIGTERM.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INTERFACE = "eth0"
_HEADERS = 14 + 20 + 32
"""Bytes of Ethernet, IPv4 and TCP (with timestamps) around each packet's payload."""
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_numbers = itertools.count()


def missing() -> str | None:
    """What keeps this machine from making hosts, with the remedy; None where nothing does."""
    if sys.platform != "linux":
        return f"Linux: network namespaces are its own, this is {sys.platform}."
    if os.geteuid() != 0:
        return f"root: got user id {os.geteuid()}. Run it with sudo."
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"the command `{tool}`. Install iproute2 (apt-get install iproute2)."
    name = f"scape-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"the right to make network namespaces: {tried.stderr.strip()}. In a container: --privileged."
    try:
        tried = subprocess.run(
            ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", *_bucket("1gbit")],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return f"the kernel module sch_tbf: {tried.stderr.strip()}." if tried.returncode else None


def bits_per_second(rate: str) -> float:
    """``"100mbit"`` is 1e8.

    Raises:
        ValueError: not a number with kbit, mbit or gbit.
    """
    found = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if not found:
        raise ValueError(f"A rate must be a number with kbit, mbit or gbit, got {rate!r}. Write 1gbit, say.")
    return float(found[1]) * _UNITS[found[2]]


class Host:
    """One namespace; made by :class:`Hosts`."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace, self.address = namespace, address

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a program in a process group of its own, with ``env`` added to this environment."""
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        return subprocess.Popen(self.command(command), env=environ, start_new_session=True, **options)

    def processes(self) -> list[int]:
        """Process ids of what runs here."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        ).stdout
        return [int(pid) for pid in found.split()]


class Hosts:
    """Context manager: ``count`` hosts on links of ``rate``; iterates over :class:`Host`.

    Args:
        count: number of hosts, >= 2.
        rate: of each direction of each link, as tc writes it: ``"10gbit"``, ``"100mbit"``.

    Raises:
        OSError: this machine cannot make hosts; see :func:`missing`.
    """

    def __init__(self, count: int = 2, rate: str = "1gbit") -> None:
        bits_per_second(rate)
        if count < 2:
            raise ValueError(f"`count` must be >= 2, got {count}. One host needs no network.")
        number = next(_numbers)
        self._tag = f"{os.getpid()}-{number}"
        subnet = f"10.{77 + number % 100}.{os.getpid() % 256}"
        self.rate = rate
        self._members = [Host(f"scape-{self._tag}-h{i}", f"{subnet}.{i + 1}") for i in range(count)]
        self._switch = f"scape-{self._tag}-sw"
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        problem = missing()
        if problem:
            raise OSError(f"Hosts need {problem}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_signals_raise())
            stack.callback(self._remove)
            self._build()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._members)

    def __getitem__(self, index: int) -> Host:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def set_rate(self, rate: str) -> None:
        """Limits every direction of every link anew."""
        bits_per_second(rate)
        self.rate = rate
        ends = [(host.namespace, INTERFACE) for host in self._members]
        if len(self._members) > 2:
            ends += [(self._switch, f"port{index}") for index in range(len(self._members))]
        for namespace, interface in ends:
            # As large as the largest packet that the bucket lets pass at once: it would cut larger ones up.
            _run("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(_burst(rate) * 2 // 3))
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *_bucket(rate))

    def _build(self) -> None:
        for host in self._members:
            _run("ip", "netns", "add", host.namespace)
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        first, second = self._members[:2]
        if len(self._members) == 2:
            _run("ip", "-n", first.namespace, "link", "add", INTERFACE, "type", "veth",
                 "peer", "name", INTERFACE, "netns", second.namespace)  # fmt: skip
        else:
            self._build_switch()
        for host in self._members:
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
            # The kernel's usual congestion control: others (BBR) shape the traffic by a rule of their own.
            subnet = host.address.rpartition(".")[0] + ".0/24"
            _run("ip", "-n", host.namespace, "route", "replace", subnet, "dev", INTERFACE, "src", host.address,
                 "congctl", "cubic", optional=True)  # fmt: skip
        self.set_rate(self.rate)

    def _build_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for index, host in enumerate(self._members):
            port = f"port{index}"
            _run("ip", "-n", self._switch, "link", "add", port, "type", "veth",
                 "peer", "name", INTERFACE, "netns", host.namespace)  # fmt: skip
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")

    def kill_all(self) -> None:
        """Kills what runs on these hosts."""
        for host in self._members:
            deadline = time.monotonic() + 5
            while (left := host.processes()) and time.monotonic() < deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

    def _remove(self) -> None:
        self.kill_all()
        for namespace in (*(host.namespace for host in self._members), self._switch):
            # With the namespace goes its end of every cable, and with one end the other.
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def run_ranks(hosts: Hosts, command: Sequence[str], logs: Path, timeout: float, *, ranks_per_host: int = 1) -> None:
    """Runs a Python script on every host, with what torchrun tells a rank, pinned to a core of its host's own.

    Args:
        hosts: the hosts.
        command: the script and its arguments.
        logs: what a rank says goes to ``<logs>.rank<i>.log``.
        timeout: seconds.
        ranks_per_host: processes of a host.

    Raises:
        RuntimeError: a rank has failed, or time is up; the others are killed.
    """
    cores, ranks = sorted(os.sched_getaffinity(0)), torchrun_variables(hosts, ranks_per_host)
    paths = [logs.with_name(f"{logs.name}.rank{rank}.log") for rank in range(len(ranks))]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    running: list[subprocess.Popen[bytes]] = []
    try:
        for log, own in zip(paths, ranks, strict=True):
            host = int(own["GROUP_RANK"])
            pinned = ["taskset", "--cpu-list", str(cores[host % len(cores)]), sys.executable, *command]
            with log.open("w") as out:
                environ = {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
                running.append(hosts[host].start(pinned, env=environ, stdout=out, stderr=out))
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            if time.monotonic() > deadline:
                raise RuntimeError(f"it must end within {timeout:g} s; see {paths[0]}:\n{_last_words(paths[0])}")
            time.sleep(0.1)
        for process, log in zip(running, paths, strict=True):
            if process.poll():
                raise RuntimeError(f"it failed; see {log}:\n{_last_words(log)}")
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def torchrun_variables(hosts: Hosts, ranks_per_host: int = 1) -> list[dict[str, str]]:
    """What torchrun tells each rank."""
    everyone = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29500, "WORLD_SIZE": len(hosts) * ranks_per_host}
    everyone |= {"LOCAL_WORLD_SIZE": ranks_per_host, "TORCHELASTIC_RUN_ID": "none"}
    ranks = [divmod(rank, ranks_per_host) for rank in range(len(hosts) * ranks_per_host)]
    own = [{"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": host} for rank, (host, local) in enumerate(ranks)]
    return [{name: str(value) for name, value in {**everyone, **each}.items()} for each in own]


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-15:])


def sent_bytes() -> tuple[int, int]:
    """What the host on which this process runs has sent so far: bytes, and how many of them are headers.

    Large packets count as one each, for they are cut up only behind the counter; so headers are those of large packets.
    """
    found = re.search(rf"\b{INTERFACE}:(.*)", Path("/proc/self/net/dev").read_text())
    assert found, f"there must be an interface {INTERFACE!r}"
    size, packets = (int(column) for column in found[1].split()[8:10])
    return size, packets * _HEADERS


def _burst(rate: str) -> int:
    """Bytes that may pass at once after a pause: 0.1 ms of the link, and a few packets at least.

    They travel for nothing, so they must be few beside what a step sends.
    """
    return int(min(max(bits_per_second(rate) / 8 * 1e-4, 12_000), 98_000))


def _bucket(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", str(_burst(rate)), "latency", "100ms"]


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl+C does: by way of the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(*command: str, optional: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not optional:
        raise OSError(f"`{' '.join(command)}` must succeed, got: {done.stderr.strip()}. Run it by hand to see why.")
