"""Jobs over two hosts made of network namespaces: launched as users do, what they read when it fails, what is sent."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import namespaces
import pytest
import torch
import torch.distributed as dist
from example_modules import BENCHMARKS, load_example
from launcher import run_script
from lightning.pytorch import Trainer
from namespaces import Hosts
from trainer_helpers import weights

JOB = str(Path(__file__).with_name("two_host_job.py"))
LAUNCHERS = re.compile("SLURM|RANK|WORLD_SIZE|MASTER|TORCHELASTIC|SOCKET_IFNAME")
two_host = pytest.mark.two_host


CLONE_NEWNET = 0x40000000
PATIENCE = 6
"""Seconds that a job's `timeout` lets it wait."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, rate="1gbit") as hosts:
        yield hosts


def on_host(rank: int, size: int, namespaces: Sequence[str], environs: Sequence[dict[str, str]], *script: str) -> str:
    """A rank moves to a host, and runs there what a user would start; what it says."""
    dist.destroy_process_group()
    setns = ctypes.CDLL(None).setns
    for name in [name for name in os.environ if LAUNCHERS.search(name)]:
        del os.environ[name]
    os.environ.update({"GLOO_SOCKET_IFNAME": "eth0", "NODE_RANK": str(rank), **environs[rank]})
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{namespaces[rank]}") as host:
        try:
            assert setns(host.fileno(), CLONE_NEWNET) == 0
            with mock.patch.object(os, "_exit", sys.exit):
                return run_script(0, 1, *script)
        finally:  # what is still on a host when that goes is killed
            setns(home.fileno(), CLONE_NEWNET)


def train(
    run_ranks: Callable[..., list[Any]], hosts: Hosts, port: int, nodes: int = 2, errors: bool = False, **of_second: str
) -> list[Any]:
    """The job as it is launched by Lightning's variables, with some of the second host's changed."""
    first = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
    given = [host.namespace for host in hosts], [first, {**first, **of_second}], JOB, str(nodes), str(PATIENCE)
    return run_ranks(on_host, 2, *given, fresh=True, expect_errors=errors, timeout=60)


@two_host
def test_lightnings_variables_train_over_the_link(run_ranks: Callable[..., list[Any]], hosts: Hosts) -> None:
    said = train(run_ranks, hosts, 29501)
    for rank, text in enumerate(said):
        assert f"rank {rank} of 2 steps 4 sent" in text
    assert len({re.findall("digest .*", text)[0] for text in said}) == 1


@two_host
def test_a_wrong_interface_is_an_error_that_names_it(run_ranks: Callable[..., list[Any]], hosts: Hosts) -> None:
    first, second = train(run_ranks, hosts, 29505, errors=True, GLOO_SOCKET_IFNAME="eth7")
    assert "Unable to find address for: eth7" in str(second)
    assert isinstance(first, Exception)


@two_host
def test_too_few_ranks_are_an_error_that_says_how_many_came(run_ranks: Callable[..., list[Any]], hosts: Hosts) -> None:
    first, second = train(run_ranks, hosts, 29506, nodes=3, errors=True)
    assert "2/3 clients joined" in str(first)
    assert isinstance(second, Exception)


# ------------------------------------------------------------------------------------------- hosts and the benchmark


def names_of_hosts() -> list[str]:
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in found.splitlines() if line.startswith("scape-")]


HOLD = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell starts with it ignored
sys.path.insert(0, {str(BENCHMARKS)!r})
from namespaces import Hosts
with Hosts(4) as hosts:
    for host in hosts:
        host.start(["sleep", "600"])
    print("up", flush=True)
    time.sleep(600)
"""


def wait_for_a_process_in(namespace: str) -> int:
    """Its number: what was started there may still be on its way in."""
    for _ in range(100):
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
        if pids.stdout:
            return int(pids.stdout.split()[0])
        time.sleep(0.1)
    raise TimeoutError(f"no process has come up in {namespace}")


@two_host
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_program_leaves_neither_hosts_nor_processes(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        mine = [name for name in names_of_hosts() if f"-{program.pid}-" in name]
        assert len(mine) == 5
        try:
            sleeper = wait_for_a_process_in(sorted(mine)[0])
            program.send_signal(number)
            assert program.wait(30) != 0
        finally:
            program.kill()
    assert not set(mine) & set(names_of_hosts())
    assert not Path(f"/proc/{sleeper}").exists()


COUNT = f"""
import socket, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from namespaces import sent_bytes
if sys.argv[1] == "receive":
    server = socket.create_server(("", 5000))
    print("up", flush=True)
    peer, _ = server.accept()
    left = int(sys.argv[3])
    while left:
        left -= len(peer.recv(1 << 20))
    peer.sendall(b"!")
else:
    peer = socket.create_connection((sys.argv[2], 5000))
    before, began = sent_bytes(), time.perf_counter()
    peer.sendall(bytes(int(sys.argv[3])))
    peer.recv(1)
    print(time.perf_counter() - began, *(b - a for a, b in zip(before, sent_bytes())))
"""


@two_host
def test_a_link_has_its_rate_and_counts_its_bytes() -> None:
    size = 2_000_000
    with Hosts(2, rate="100mbit") as hosts:
        pipes = {"stdout": subprocess.PIPE, "text": True}
        receiver = hosts[0].start([sys.executable, "-c", COUNT, "receive", "", str(size)], **pipes)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "up\n"
        sender = hosts[1].start([sys.executable, "-c", COUNT, "send", hosts[0].address, str(size)], **pipes)
        output, _ = sender.communicate(timeout=30)
        receiver.communicate(timeout=30)
    seconds, sent, headers = (float(word) for word in output.split())
    assert seconds > 0.9 * size / 12.5e6  # 0.16 s; a busy machine may take longer
    assert sent - headers == pytest.approx(size, rel=0.01)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.missing() == "root: got user id 1000. Run it with sudo."
    with pytest.raises(OSError, match="Hosts need root"):
        Hosts(2).__enter__()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "Install iproute2" in str(namespaces.missing())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in str(namespaces.missing())


@pytest.mark.parametrize("rate", ["fast", "1 gbit", "-1gbit", "gbit"])
def test_a_rate_that_is_none_is_an_error(rate: str) -> None:
    with pytest.raises(ValueError, match="A rate must be a number"):
        Hosts(2, rate=rate)


def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, *options: str) -> dict[str, dict[str, Any]]:
    """Rows of a short form, by method."""
    arguments = ["two_hosts.py", what, "--short", "--dirty", "--timeout=150", f"--out={tmp_path}", *options]
    monkeypatch.setattr(sys, "argv", arguments)
    assert load_example("two_hosts").main() == 0
    (table,) = tmp_path.glob("*.md")
    assert "| SCAPE 99% |" in table.read_text()
    return {row["settings"]["method"]: row for row in json.loads((tmp_path / f"{what}.json").read_text())}


@two_host
def test_a_step_sends_what_the_package_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = benchmark(monkeypatch, tmp_path, "steps")
    assert (tmp_path / "steps-tiny-2x1.png").read_bytes().startswith(b"\x89PNG")
    assert set(rows) == set(load_example("two_hosts").STEPS)
    for method in ("scape-0.9", "scape-0.99", "sparseloco-30"):
        row = rows[method]
        assert row["sent"] - row["headers"] == pytest.approx(row["counted"], rel=0.05, abs=4096)
    assert rows["ddp"]["sent"] > 20 * rows["scape-0.99"]["sent"]


@two_host
def test_whole_runs_one_after_the_other_end_near_ddps_loss_and_send_what_is_counted(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(hosts: Hosts, command: Sequence[str], logs: Path, timeout: float, ranks_per_host: int) -> None:
        environs = namespaces.torchrun_variables(hosts, ranks_per_host)
        run_ranks(on_host, 2, [host.namespace for host in hosts], environs, *command, fresh=True, timeout=timeout)

    # Forked: the test before starts them as the benchmark does.
    monkeypatch.setattr(load_example("two_hosts"), "run_ranks", run)
    rows = benchmark(monkeypatch, tmp_path, "runs", "--methods", "ddp", "scape-0.99")
    for row in rows.values():
        assert [point[0] for point in row["curve"]] == list(range(2, 25, 2))
        assert row["curve"][-1][1] <= row["seconds"] + 0.1
        assert row["curve"][-1][2] <= row["sent"]
    assert rows["scape-0.99"]["loss"] == pytest.approx(rows["ddp"]["loss"], abs=0.1)
    own = {method: row["sent"] - row["headers"] for method, row in rows.items()}
    uncounted = own["scape-0.99"] - rows["scape-0.99"]["counted"]
    assert 0 <= uncounted < 12 * 60_000  # what ranks tell each other about twelve directories


def run_here(rank: int, world_size: int, methods: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Whole runs of a few steps by ranks that are there already, over this machine's loopback, and what they end at."""
    namespaces.INTERFACE = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    given = {"ranks_per_host": world_size, "model": "0.03M", "steps": 24, "validations": 2, "context": 32}
    args = SimpleNamespace(**given, seed=0, validated=1, rate=1e-3, folder=folder, name="run")
    fit, ends = Trainer.fit, []
    with mock.patch.object(Trainer, "fit", lambda *given: (fit(*given), ends.append(weights(given[1])))):
        found = {method: load_example("two_hosts_ranks").train(method, args) for method in methods}
    return {method: {**row, "end": end} for (method, row), end in zip(found.items(), ends, strict=True)}


def test_zero1_ends_where_ddp_does(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (found, _) = run_ranks(run_here, 2, ["ddp", "zero1"], str(tmp_path))
    ddp, zero = ([point["loss"] for point in found[method]["points"]] for method in ("ddp", "zero1"))
    assert zero == pytest.approx(ddp, rel=1e-4)
    assert len(ddp) == 2


@pytest.mark.parametrize("method", ["demo", "diloco-4"])
def test_a_rival_of_another_package_trains(run_ranks: Callable[..., list[Any]], tmp_path: Path, method: str) -> None:
    first, second = run_ranks(run_here, 2, [method, "compute"], str(tmp_path), fresh=True)
    before, after = (point["loss"] for point in first[method]["points"])
    assert after < before
    assert torch.equal(first[method]["end"], second[method]["end"])
    assert not torch.equal(first["compute"]["end"], second["compute"]["end"])  # without messages ranks go apart


def test_compute_only_that_differs_before_and_after_is_said() -> None:
    two_hosts = load_example("two_hosts")
    row = {"seconds": 100.0, "settings": {"link": "1gbit", "method": "compute"}, "curve": []}
    assert two_hosts.drifts([{"compute": row}, {"compute": {**row, "again": 102.9}}, {}]) == []
    for wrong, took in (({**row, "again": 96.9}, "took 96.9 s"), (row, "did not run")):
        (said,) = two_hosts.drifts([{"compute": wrong}])
        assert "To be made again" in said
        assert took in said
    assert two_hosts.alone({"compute": {**row, "again": 102.0}}) == 101.0


def test_the_best_of_three_learning_rates_goes_on_to_slower_links_and_what_takes_too_long_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_hosts = load_example("two_hosts")
    ran: list[tuple[str, float | None]] = []

    def run(args: Any, hosts: Any, method: str, rate: float | None) -> dict[str, Any]:
        ran.append((method, rate))
        return {"seconds": 10.0, "sent": 3e9 if method == "ddp" else 1e3, "loss": abs((rate or 0) - 1e-3)}

    monkeypatch.setattr(two_hosts, "whole_run", run)
    args = SimpleNamespace(what="runs", methods=["compute", "ddp", "demo"], rates={}, timeout=300.0)
    hosts, sent = SimpleNamespace(set_rate=lambda rate: None), {}
    first = dict(two_hosts.measure(args, hosts, "1gbit", sent))
    assert ran == [
        ("compute", None),
        ("ddp", None),
        *(("demo", rate) for rate in (3e-4, 1e-3, 3e-3)),
        ("compute", None),
    ]
    assert first["demo"]["rates"][0] == [1e-3, 0.0]
    assert first["compute"]["again"] == 10.0
    ran.clear()
    assert set(dict(two_hosts.measure(args, hosts, "10mbit", sent))) == {"compute", "demo"}
    assert ran == [("compute", None), ("demo", 1e-3), ("compute", None)]


def test_a_method_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["two_hosts.py", "steps", "--methods", "fast-1"])
    with pytest.raises(SystemExit):
        load_example("two_hosts").parse_arguments()
    assert "--rates numbers, got 'fast'" in capsys.readouterr().err
