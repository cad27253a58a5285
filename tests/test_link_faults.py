"""A link between two hosts that breaks, slows down or loses packets while a job runs over it."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))

from namespaces import Hosts  # noqa: E402 - a script's helper, not a package's module

JOB = str(Path(__file__).with_name("link_job.py"))
ports = itertools.count(29600)
pytestmark = pytest.mark.two_host


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, rate="1gbit") as hosts:
        yield hosts


class Ranks(NamedTuple):
    processes: list[subprocess.Popen]
    output: list[list[str]]
    readers: list[threading.Thread]

    def wait_for_step(self, step: int, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not all(any(line.startswith(f"step {step} ") for line in lines) for lines in self.output):
            assert time.monotonic() < deadline, self.output
            assert all(process.poll() is None for process in self.processes), self.output
            time.sleep(0.05)

    def end(self, seconds: float) -> list[int]:
        statuses = [process.wait(seconds) for process in self.processes]
        for reader in self.readers:
            reader.join(10)
        return statuses

    def times(self, rank: int) -> list[float]:
        return [float(line.split()[2]) for line in self.output[rank] if line.startswith("step ")]

    def digests(self) -> set[str]:
        return {line for lines in self.output for line in lines if line.startswith("digest")}


@pytest.fixture
def launch(hosts: Hosts) -> Iterator[Callable[..., Ranks]]:
    """Starts one rank on each host. Kills what is left in the end, and mends the link."""
    started: list[subprocess.Popen] = []

    def start(steps: int, timeout: float, sparsity: float = 0.9) -> Ranks:
        place = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(next(ports)), "WORLD_SIZE": "2"}
        place |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [warm_python(), JOB, str(steps), str(timeout), str(sparsity)]
        processes = [host.start(command, env={**place, "RANK": str(i)}, **pipes) for i, host in enumerate(hosts)]
        started.extend(processes)
        output: list[list[str]] = [[], []]

        def read(process: subprocess.Popen, lines: list[str]) -> None:
            assert process.stdout is not None
            lines.extend(iter(process.stdout.readline, ""))

        pairs = zip(processes, output, strict=True)
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in pairs]
        for reader in readers:
            reader.start()
        return Ranks(processes, output, readers)

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    hosts[1].set_link("up")
    hosts.set_rate("1gbit")


@pytest.mark.slow
def test_a_link_that_is_down_for_three_seconds_only_holds_training_up(
    hosts: Hosts, launch: Callable[..., Ranks]
) -> None:
    ranks = launch(100, 40.0)
    ranks.wait_for_step(20)
    hosts[1].set_link("down")
    time.sleep(3)
    hosts[1].set_link("up")
    assert ranks.end(90) == [0, 0], ranks.output
    assert len(ranks.digests()) == 1
    assert "skipped 0" in ranks.digests().pop()
    times = ranks.times(0)
    assert max(after - before for before, after in itertools.pairwise(times)) > 2.0  # it did break


@pytest.mark.few(0)
def test_a_link_that_stays_down_is_an_error_on_all_ranks_soon_after_the_timeout(
    hosts: Hosts, launch: Callable[..., Ranks]
) -> None:
    timeout = 6.0
    ranks = launch(100_000, timeout)
    ranks.wait_for_step(20)
    hosts[1].set_link("down")
    cut = time.time()
    assert ranks.end(timeout + 60) == [3, 3], ranks.output
    for lines in ranks.output:
        (failed,) = (line for line in lines if line.startswith("failed"))
        assert float(failed.split()[1]) - cut < timeout + 10
        assert "All ranks must answer, got no answer" in failed
        assert "the network broke" in failed


@pytest.mark.slow
def test_bandwidth_that_falls_a_hundredfold_only_slows_training_down(
    hosts: Hosts, launch: Callable[..., Ranks]
) -> None:
    ranks = launch(30, 60.0, 0.0)  # 0.8 MB a step: 6 ms before, 640 ms after
    ranks.wait_for_step(15)
    hosts.set_rate("10mbit")
    assert ranks.end(120) == [0, 0], ranks.output
    assert len(ranks.digests()) == 1
    times = ranks.times(0)
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.median(steps[-10:]) > 1.5 * statistics.median(steps[3:14])


@pytest.mark.parametrize(
    "impairment", [("loss", "1%"), ("delay", "5ms", "reorder", "25%", "50%")], ids=["loss", "reordering"]
)
def test_lost_and_reordered_packets_are_tcps_to_mend(
    hosts: Hosts, launch: Callable[..., Ranks], impairment: tuple[str, ...]
) -> None:
    try:
        hosts.set_netem(*impairment)
    except OSError as error:
        pytest.skip(f"this kernel has no netem: {error}")
    ranks = launch(40, 60.0)
    assert ranks.end(150) == [0, 0], ranks.output
    assert len(ranks.digests()) == 1
