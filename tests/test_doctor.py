"""``lightning-scape doctor``: what it calls broken, what slow, and that it ends."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from trainer_helpers import WIDTH, Regression, make_trainer

from lightning_scape import ScapeMonitor
from lightning_scape.comm.round_trips import neighbours
from lightning_scape.reporting import History
from lightning_scape.tools import commands, doctor
from lightning_scape.tools.diagnosis import host, network, packages, ranks, run, watch
from lightning_scape.tools.diagnosis.findings import Finding, exit_status, report
from lightning_scape.tools.diagnosis.meeting import Place
from lightning_scape.tools.diagnosis.network import Interface
from lightning_scape.tools.diagnosis.ranks import Trip

RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
LO = Interface("lo", address="127.0.0.1")
FAST = Interface("eth0", mbit=25_000.0, address="10.0.0.1")
OLD = Interface("eth1", mbit=100.0, address="10.1.0.1")
DOWN = Interface("eth2", up=False, mbit=1000.0, address="10.2.0.1")
UNKNOWN = Interface("veth0", address="10.3.0.1")
RANGES = {"torch": ">=2.7", "lightning": ">=2.6.1,!=2.6.2", "litgpt": ">=0.5"}
ALL = (LO, FAST, OLD, DOWN, UNKNOWN)


# ------------------------------------------------------------------------------------------------------- ranks


def look(rank: int, world_size: int, port: int, options: tuple[str, ...], environ: dict[str, str]) -> tuple[int, str]:
    """Status and output of the command on a rank that a launcher has started."""
    part()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **environ)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = commands.main(["doctor", *options])
    return status, printed.getvalue()


def part() -> None:
    """Ends the fixture's process group, for a launcher leaves none; not before all ranks have connected."""
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ranks_that_reach_each_other_are_well_and_rank_0_reports(run_ranks: RunRanks) -> None:
    (status, said), *others = run_ranks(look, 3, free_port(), (), {})
    assert status == 0
    assert [other for other, _ in others] == [0, 0]
    assert [text for _, text in others] == ["", ""]
    assert "all 3 ranks on 1 node reach each other by gloo" in said
    for pair in ("rank 0 and rank 1", "rank 1 and rank 2", "rank 2 and rank 0"):
        assert f"{pair} (inside one node): " in said
    assert "torch " + torch.__version__.split("+")[0] in said
    assert "FAILS" not in said


def leave_out_one(rank: int, world_size: int, port: int) -> tuple[int, str, float]:
    began = time.monotonic()
    if rank == 1:
        part()
        return 1, "", 0.0
    return *look(rank, world_size, port, ("--timeout=8",), {}), time.monotonic() - began


def test_a_rank_that_does_not_come_is_named_within_the_time_limit(run_ranks: RunRanks) -> None:
    """An all-reduce would wait for it, and its timeout would name a socket."""
    first, _, third = run_ranks(leave_out_one, 3, free_port())
    assert (first[0], third[0]) == (1, 1)
    assert "FAILS  All 3 ranks must come to 127.0.0.1:" in first[1]
    assert "got no sign of rank 1" in " ".join(first[1].split())
    assert third[1] == ""
    assert max(first[2], third[2]) < 100


def die_on_the_way(rank: int, world_size: int, port: int) -> tuple[int, str]:
    if rank == 1:
        ranks.check_messages = lambda *_: os._exit(3)
        doctor.check_messages = ranks.check_messages
    return look(rank, world_size, port, ("--timeout=4",), {})


@pytest.mark.few(0)
def test_a_rank_that_dies_on_the_way_is_an_error_and_no_hang(run_ranks: RunRanks) -> None:
    (status, said), _ = run_ranks(die_on_the_way, 2, free_port(), expect_errors=True)
    assert status == 1
    assert "Ranks have met, but messages fail on rank 0" in said


def another_version(rank: int, world_size: int, port: int) -> tuple[int, str]:
    if rank == 1:
        doctor.__version__ = "0.0.7"
        os.environ["LIGHTNING_SCAPE_OPS"] = "naive"
    return look(rank, world_size, port, (), {})


def test_what_is_wrong_on_another_rank_is_reported_by_rank_0(run_ranks: RunRanks) -> None:
    (status, said), (other, _) = run_ranks(another_version, 2, free_port())
    assert (status, other) == (1, 1)
    text = " ".join(said.split())
    assert "All ranks must have the same lightning_scape, got " in text
    assert "0.0.7 on rank 1" in text
    assert f"SLOW rank 1 ({socket.gethostname()}): LIGHTNING_SCAPE_OPS=naive makes a step" in text


def unreachable(rank: int, world_size: int, port: int) -> tuple[int, str]:
    os.environ["RANK"] = "1"
    return look(rank, world_size, port, ("--timeout=2",), {"WORLD_SIZE": "2"})


def test_a_store_that_nobody_keeps_is_an_error_that_says_what_to_check(run_ranks: RunRanks) -> None:
    ((status, said),) = run_ranks(unreachable, 1, free_port())
    assert status == 1
    assert "Check that MASTER_ADDR is the first node's address" in " ".join(said.split())


def get_stuck(rank: int, world_size: int, errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    sys.stderr = open(sys.stderr.fileno(), "w", closefd=False)  # noqa: SIM115 - until the process ends
    with doctor.Watch(Place(rank=3, world_size=4), 0.2) as watch:
        watch.at("waiting for nobody")
        time.sleep(60)


def test_whoever_gets_stuck_is_ended_and_says_where(run_ranks: RunRanks, tmp_path: Path) -> None:
    (error,) = run_ranks(get_stuck, 1, tmp_path / "errors", expect_errors=True)
    assert "died without a result, exit code 1" in str(error)
    said = (tmp_path / "errors").read_text()
    assert f"rank 3 ({socket.gethostname()}) must end within 0.2 s, got stuck while waiting for nobody" in said


def test_a_process_that_has_called_the_doctor_goes_on() -> None:
    """It was ended nine minutes later: a notebook, say, or the tests."""
    before = set(threading.enumerate())
    with doctor.Watch(Place(rank=0, world_size=1), 60.0):
        (watching,) = set(threading.enumerate()) - before
        assert watching.is_alive()
    watching.join(10)
    assert not watching.is_alive()  # nothing is left that could end this process


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "got no WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK must be a whole number >= 0"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "got rank 2 of 2"),
    ],
)
def test_variables_that_contradict_each_other_are_an_error(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Place.of(environ)


def test_a_process_that_nothing_has_launched_is_alone() -> None:
    assert Place.of({}) == Place.of({"WORLD_SIZE": "1"}) == Place()


def test_nodes_are_counted_by_the_ranks_of_each() -> None:
    place = Place(rank=3, world_size=8, local_rank=1, local_world_size=2)
    assert place.nodes == 4
    assert [place.node_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_five_ranks_meet_as_in_the_docstring() -> None:
    assert neighbours(5) == [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]


@pytest.mark.parametrize("count", range(2, 12))
def test_every_neighbour_is_met_once_and_nobody_twice_at_a_time(count: int) -> None:
    rounds = neighbours(count)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(sorted({i, (i + 1) % count}) for i in range(count if count > 2 else 1))
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def test_a_link_that_is_slow_says_why_that_matters() -> None:
    place = Place(world_size=4, local_world_size=1, address="h")
    good, late, thin = 1.25e9, 0.02, 11.8e6
    trips = [Trip(0, 1, 5e-5, good, 1), Trip(1, 2, late, good, 1), Trip(2, 3, 5e-5, thin, 1), Trip(3, 0, 5e-5, 3e8, 1)]
    found = ranks.judge_trips(trips, place)
    assert [finding.verdict for finding in found] == ["ok", "slow", "slow", "slow"]
    assert "each waits that long" in found[1].text
    assert "94.4 Mbit/s" in found[2].text
    assert "would take 33.90 s" in found[2].text  # 400 MB there, and the same back for a whole all-reduce
    assert "other neighbours reach" in found[3].text


@pytest.mark.parametrize(("seconds", "size"), [(1e-4, 1 << 22), (0.05, 131072), (3.0, 1 << 16)])
def test_a_large_message_takes_about_a_tenth_of_a_second(seconds: float, size: int) -> None:
    assert ranks.message_size(seconds) == size


# ----------------------------------------------------------------------------------------------------- network


def judged(
    backend: str = "gloo", name: str = "", nodes: int = 2, of_host_name: str | None = None, towards: str | None = None
) -> list[Finding]:
    """What is found beside the list of the interfaces."""
    environ = {network.VARIABLES[backend]: name} if name else {}
    found = network.check_network(ALL, backend, environ, nodes=nodes, of_host_name=of_host_name, towards=towards)
    assert [str(each) for each in ALL] == [finding.text for finding in found[: len(ALL)]]
    return found[len(ALL) :]


@pytest.mark.parametrize(
    ("options", "verdict", "said"),
    [
        ({"name": "eth0", "towards": "10.0.0.1"}, "ok", "messages take eth0 at 25 Gbit/s"),
        ({"of_host_name": "10.0.0.1", "towards": "10.0.0.1"}, "ok", "messages take eth0 at 25 Gbit/s"),
        ({"name": "lo", "towards": "10.0.0.1"}, "broken", "cannot reach this one on lo (127.0.0.1)"),
        ({"of_host_name": "127.0.1.1", "towards": "10.0.0.1"}, "broken", "Set GLOO_SOCKET_IFNAME=eth0, on every node."),
        ({"of_host_name": None}, "broken", "stands for none of its interfaces"),
        ({"name": "eth9"}, "broken", "must name an interface of this host (lo, eth0, eth1, eth2, veth0), got 'eth9'"),
        ({"name": "eth2", "towards": "10.0.0.1"}, "broken", "eth2 is down"),
        ({"name": "eth2", "nodes": 1}, "broken", "eth2 (10.2.0.1, down) is what messages take"),
        ({"name": "eth1", "towards": "10.0.0.1"}, "slow", "but the way to MASTER_ADDR is eth0"),
        ({"name": "eth1", "towards": "10.1.0.1"}, "slow", "eth0 has 25 Gbit/s"),
        ({"name": "veth0", "towards": "10.3.0.1"}, "note", "the kernel does not say"),
        ({"backend": "nccl", "towards": "10.0.0.1"}, "ok", "messages take eth0"),
        ({"backend": "nccl", "name": "^docker", "towards": "10.0.0.1"}, "ok", "messages take eth0"),
        ({"backend": "nccl", "towards": "127.0.1.1"}, "note", "NCCL chooses the interface"),
        ({"backend": "nccl", "name": "eth7"}, "broken", "NCCL_SOCKET_IFNAME must name an interface"),
    ],
)
def test_the_interface_that_messages_take_is_judged(options: dict[str, Any], verdict: str, said: str) -> None:
    finding = judged(**options)[0]
    assert finding.verdict == verdict
    assert said in f"{finding.text} {finding.remedy}"


def test_one_host_alone_needs_no_interface() -> None:
    assert judged(nodes=1, of_host_name="127.0.0.1") == []


def test_a_100_mbit_interface_is_slow_where_there_is_no_better() -> None:
    found = network.check_network(
        [LO, OLD], "gloo", {"GLOO_SOCKET_IFNAME": "eth1"}, nodes=2, of_host_name=None, towards="10.1.0.1"
    )
    assert found[-1].verdict == "slow"
    assert "eth1, which has 100 Mbit/s: dense training would wait for it" in found[-1].text


@pytest.mark.parametrize(("backend", "named"), [("gloo", "eth9,eth1"), ("nccl", "eth"), ("nccl", "ib,eth1")])
def test_several_names_and_nccls_beginnings_of_names_are_taken(backend: str, named: str) -> None:
    variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}[backend]
    found = network.check_network([LO, OLD], backend, {variable: named}, nodes=2, of_host_name=None, towards="10.1.0.1")
    assert [finding for finding in found if finding.verdict == "broken"] == []


def test_interfaces_are_read_as_the_kernel_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"a": (True, 1000), "b": (False, 0), "c": (True, 0)}
    addresses = {"a": [(socket.AF_INET6, "fe80::1"), (socket.AF_INET, "10.0.0.1")], "b": [(socket.AF_INET6, "::1")]}
    told = {name: SimpleNamespace(isup=up, speed=speed) for name, (up, speed) in stats.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: told)
    listed = {name: [SimpleNamespace(family=f, address=a) for f, a in found] for name, found in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)
    assert network.interfaces() == [
        Interface("a", True, 1000.0, "10.0.0.1"),
        Interface("b", False),
        Interface("c", True),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's name of the loopback")
def test_the_loopback_of_this_host_is_found_with_its_address() -> None:
    assert Interface("lo", address="127.0.0.1") in network.interfaces()
    assert network.address_towards("127.0.0.1") == "127.0.0.1"


# ------------------------------------------------------------------------------------------- host and packages


@pytest.mark.parametrize(
    ("available", "here", "threads", "verdict", "said"),
    [
        (8, 2, 4, "ok", "8 cores, 2 ranks, 4 threads each"),
        (8, 2, 8, "slow", "fight over the cores. Set OMP_NUM_THREADS=4."),
        (8, 2, 1, "slow", "only 2 of them compute"),
        (2, 4, 1, "slow", "Start at most 2 here."),
        (1, 1, 1, "ok", "1 core, 1 rank, 1 thread each"),
    ],
)
def test_threads_and_ranks_must_fit_the_cores(available: int, here: int, threads: int, verdict: str, said: str) -> None:
    (finding,) = host.check_threads(available, here, threads, CPU, {})
    assert finding.verdict == verdict
    assert said in f"{finding.text} {finding.remedy}"


def test_a_step_that_fails_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_step(CPU, 1000).verdict == "ok"

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(host, "ScapeOptimizer", fail)
    finding = host.check_step(CPU, 1000)
    assert finding.verdict == "broken"
    assert "OSError: no compiler" in finding.text


def test_a_choice_that_rules_out_the_fast_operations_is_said() -> None:
    assert host.check_choice({}) == []
    assert host.check_choice({"LIGHTNING_SCAPE_OPS": "naive"})[0].verdict == "slow"
    assert host.check_choice({"LIGHTNING_SCAPE_OPS": "fast"})[0].verdict == "broken"


def as_installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> dict[str, Finding]:
    """What is found, by the first word, where these versions are installed instead."""
    known = {name: packages.installed_version(name) for name in (*packages.REQUIRED, *packages.OPTIONAL)}
    known |= dict.fromkeys(packages.BESIDE_LITGPT, "1") | versions
    monkeypatch.setattr(packages, "installed_version", known.get)
    ranges = {name: SpecifierSet(range_) for name, range_ in RANGES.items()}
    monkeypatch.setattr(packages, "required_ranges", lambda: ranges)
    return {finding.text.split()[0]: finding for finding in packages.check_packages(on_cuda=False)}


def test_versions_out_of_range_and_missing_packages_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = as_installed(monkeypatch, torch="2.6.0", lightning="2.6.2", numba=None, triton=None, torchmetrics=None)
    assert found["torch"].text == "torch must be >=2.7, got 2.6.0."
    assert {found[name].verdict for name in ("torch", "lightning", "torchmetrics")} == {"broken"}
    assert found["numba"].verdict == "slow"
    assert "four to seven times as long" in found["numba"].text
    assert found["numba"].remedy == "Install it: pip install 'lightning-scape[cpu]'"
    assert found["triton"].verdict == "note"  # without CUDA nothing needs it
    assert found["numpy"].verdict == "ok"


def test_a_build_of_torch_with_a_local_version_is_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_installed(monkeypatch, torch="2.13.0+cpu")["torch"].verdict == "ok"


@pytest.mark.parametrize(
    "extra", ["", *metadata.metadata("lightning-scape").get_all("Provides-Extra")], ids="extra {}".format
)
def test_what_an_extra_did_not_promise_is_no_failure(monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    """The README's first command, which installs `[examples]`, ended in FAILS: LitGPT without tensorboard."""
    wanted = [Requirement(line) for line in metadata.requires("lightning-scape")]
    brought = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})}
    everything = (*packages.REQUIRED, *packages.OPTIONAL, *packages.BESIDE_LITGPT)
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: None)
    found = as_installed(monkeypatch, **{name: "9" if name in brought else None for name in everything})
    assert {name: each.text for name, each in found.items() if each.verdict == "broken"} == {}
    beside = found.get("`litgpt-scape")
    if extra == "examples":
        assert beside is not None
        assert beside.text == "`litgpt-scape pretrain` needs tensorboard too, which litgpt does not bring."
        assert beside.remedy == "To use it: pip install 'lightning-scape[litgpt]'"
    elif extra in ("litgpt", ""):
        assert beside is None


def test_an_old_version_of_what_is_optional_is_no_failure_either(monkeypatch: pytest.MonkeyPatch) -> None:
    found = as_installed(monkeypatch, litgpt="0.4")["litgpt"]
    assert found.verdict == "note"
    assert found.text == "litgpt must be >=0.5 for `litgpt-scape` and `lightning-scape plan`, got 0.4."


def test_requirements_of_several_extras_hold_together() -> None:
    found = packages.ranges_of(["a>=1; extra == 'x'", "A!=1.5; extra == 'y'", "b", "not a requirement !"])
    assert found == {"a": SpecifierSet(">=1,!=1.5"), "b": SpecifierSet()}


# ------------------------------------------------------------------------------------------------- the command


def test_one_process_looks_at_its_host_and_says_how_to_look_at_the_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert commands.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line in ("Installed", "This host", "Network", "Ranks")] == [
        "Installed",
        "This host",
        "Network",
        "Ranks",
    ]
    assert "torchrun --nnodes N" in said


def test_slow_is_no_failure_and_broken_is_one() -> None:
    slow, broken = Finding("Network", "slow", "a", "b"), Finding("Ranks", "broken", "c")
    assert exit_status([slow]) == 0
    assert report([slow]).splitlines()[-1] == "1 thing is slow (SLOW): see above."
    assert exit_status([slow, broken]) == 1
    assert (
        report([slow, broken]).splitlines()[-1]
        == "1 thing does not work (FAILS) and 1 thing is slow (SLOW): see above."
    )
    assert report([]) == "All is well."


@pytest.mark.parametrize("given", ["0", "x", "nan", "-1"])
def test_a_time_limit_that_is_none_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["doctor", f"--timeout={given}"])
    assert ended.value.code == 2
    assert "it must be a number of seconds from 1 to 3600" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- why a run is slow


def figures(folder: Path, **changes: Any) -> Path:
    """A run of four points; the second half has `changes`."""
    metrics = {"scape/message_seconds": 0.02, "scape/exchange_wait": 0.0, "scape/seconds/exchange": 0.025}
    usual = {"step_seconds": 0.2, "data_seconds": 0.001, "checkpoint_seconds": 0.0, "loss": 1.0}
    lines: list[dict[str, Any]] = [{"kind": "run", "step": 0, "method": "scape", "title": "SCAPE", "device": "cpu"}]
    for number in range(1, 5):
        point = {**usual, **(changes if number > 2 else {})}
        own = {**metrics, **point.pop("metrics", {})}
        lines.append({"kind": "point", "step": 50 * number, "time": 1.0, "metrics": own, **point})
    (folder / "figures.jsonl").write_text("".join(json.dumps({"time": 1.0, **line}) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("changes", "slow", "remedy"),
    [
        ({}, None, ""),
        ({"metrics": {"scape/message_seconds": 0.1}}, "50% of a step is waiting for the network.", "Send less"),
        ({"metrics": {"scape/seconds/sweep": 0.075}}, "40% of a step is SCAPE's own work.", "numba"),
        ({"data_seconds": 0.05}, "25% of a step is waiting for data.", "num_workers"),
        ({"checkpoint_seconds": 0.04}, "20% of a step is saving checkpoints.", "async_save=True"),
    ],
)
def test_a_runs_figures_say_where_its_time_goes_and_what_to_switch_on(
    changes: dict[str, Any], slow: str | None, remedy: str, tmp_path: Path
) -> None:
    first, *others = run.check_run(figures(tmp_path, **changes))
    assert first.text.startswith("A step takes 200 ms: ")
    assert "computing" in first.text
    (other,) = others
    if slow is None:
        assert "nothing to switch on" in other.text
    else:
        assert (other.verdict, other.text) == ("slow", slow)
        assert remedy in other.remedy


def test_a_run_that_still_warms_up_is_told_to_be_judged_again(tmp_path: Path) -> None:
    note = run.check_run(figures(tmp_path))[-1]
    assert "warm-up" not in note.text
    with open(tmp_path / "figures.jsonl", "a") as file:
        for step, density in ((250, 0.5), (300, 0.25)):
            metrics = {"scape/message_seconds": 0.1, "scape/density": density}
            point = {"kind": "point", "step": step, "time": 1.0, "metrics": metrics, "step_seconds": 0.2, "loss": 1.0}
            file.write(json.dumps(point) + "\n")
    note = run.check_run(tmp_path)[-1]
    assert note.verdict == "note"
    assert "the last step sent 25% of the entries" in note.text


def test_the_parts_of_a_step_are_the_step(tmp_path: Path) -> None:
    folder = figures(tmp_path, data_seconds=0.05, checkpoint_seconds=0.04)
    parts = run.Parts.of(History.read(folder).runs[0])
    assert parts is not None
    assert parts.network == pytest.approx(0.02)
    assert parts.own == pytest.approx(0.005)
    assert parts.computing == pytest.approx(0.2 - 0.02 - 0.005 - 0.05 - 0.04)


def test_the_command_reads_a_run_and_says_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["doctor", str(tmp_path)]) == 1
    assert "must hold the figures of a run" in capsys.readouterr().err
    assert commands.main(["doctor", str(figures(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "A step takes 200 ms" in said
    assert "passed over" not in said
    with open(tmp_path / "figures.jsonl", "a") as file:
        file.write("{")
    assert commands.main(["doctor", str(tmp_path)]) == 0
    assert "Lines that were passed over: 1." in capsys.readouterr().out
    (tmp_path / "figures.jsonl").write_text("[1]")
    assert commands.main(["doctor", str(tmp_path)]) == 1
    assert "line 1: it must be an object" in capsys.readouterr().err


def test_a_run_writes_down_what_it_waited_for_between_batches(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(_waits, 1, str(tmp_path))
    points = History.read(tmp_path).runs[0].points
    assert all(point["data_seconds"] > 0.02 for point in points)
    assert sum(point["checkpoint_seconds"] > 0.02 for point in points) == 1  # of one in the middle, and not of two
    assert points[0]["step_seconds"] > points[0]["data_seconds"]


class Slow(Callback):
    """Saves once, slowly."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "x.ckpt")
            time.sleep(0.1)


def _waits(rank: int, world_size: int, folder: str) -> None:
    def batches() -> Any:
        for _ in range(8):
            time.sleep(0.05)
            yield [torch.randn(4, WIDTH), torch.randn(4, 3)]

    loader = torch.utils.data.DataLoader(_Batches(batches), batch_size=None)
    callbacks = [ScapeMonitor(4, report=folder), Slow()]
    trainer = make_trainer(max_steps=8, callbacks=callbacks, default_root_dir=folder)
    trainer.fit(Regression(), loader)


class _Batches(torch.utils.data.IterableDataset[Any]):
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Any:
        return self.make()


GBIT = 125e6


@pytest.mark.parametrize(
    ("rates", "verdict", "text"),
    [
        ({"lo": [GBIT] * 9, "eth0": [10.0] * 9}, "ok", "no job waits for the network"),
        ({"lo": [GBIT] * 9, "eth2": [0.9 * GBIT] * 7 + [0.0] * 3}, "slow", "eth2 is busy for 70% of the time"),
        (
            {"eth2": [0.9 * GBIT] * 3 + [0.0] * 7},
            "note",
            "move at 900 Mbit/s, 270 Mbit/s on average (its driver says 1 Gbit",
        ),
        ({"eth2": [0.1 * GBIT] * 8 + [0.0] * 2}, "slow", "80% of the time: messages move at 100 Mbit/s"),
        ({"eth2": [0.1 * GBIT] * 9}, "slow", "busy for 100% of the time: messages move at 100 Mbit/s"),
        ({"eth2": [0.9 * GBIT] + [0.0] * 9}, "ok", "Training does not wait for it"),
        ({"eth2": [0.2 * GBIT, 0.002 * GBIT] * 5}, "ok", "busy for 10% of the time: messages move at 1 Gbit/s"),
        ({"veth0": [0.1 * GBIT] * 8 + [0.0] * 2}, "slow", "100 Mbit/s, 80 Mbit/s on average (its driver says no speed"),
    ],
)
def test_a_links_counters_say_whether_a_job_waits_for_it(
    rates: dict[str, list[float]], verdict: str, text: str
) -> None:
    (finding,) = watch.check_traffic(rates, ALL)
    assert finding.verdict == verdict
    assert text in finding.text
    assert ("sends 1% of the entries" in finding.remedy) == (verdict == "slow")


def test_what_is_watched_are_the_differences_of_counters() -> None:
    """The direction with more is that of now: a host may have received a lot before."""
    counts = iter(range(0, 10**9, 1000))
    rates = watch.watch(0.2, lambda: {"eth0": (next(counts), 10**12)})["eth0"]
    assert rates
    assert all(0 < rate <= 1000 / watch.EVERY for rate in rates)


def test_the_command_watches_for_the_seconds_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", "--watch", "1"]) == 0
    assert "Network\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("report --watch 1", "FOLDER and --watch"), ("--watch 1 --timeout 5", "--watch and --timeout")],
)
def test_the_command_is_asked_one_thing_at_a_time(
    capsys: pytest.CaptureFixture[str], arguments: str, named: str
) -> None:
    """It did the first and passed over the other without a word."""
    with pytest.raises(SystemExit, match="2"):
        commands.main(["doctor", *arguments.split()])
    assert f"one thing at a time, got {named}." in capsys.readouterr().err
