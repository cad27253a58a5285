"""A real SLURM of two nodes: the script of examples/, and jobs that it stops and starts again.

Where a signal must come in one step and no other, tests/test_requeue.py stands in for it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import launcher
import pytest
from slurm_cluster import Cluster, missing, wait

from lightning_scape.checkpoint.saver import verify

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "slurm.sbatch"
JOB = ROOT / "tests" / "requeue_job.py"
ENDLESS = "1000000"
AT_FIRST = f"$([[ $SLURM_RESTART_COUNT ]] && echo -1 || echo {ENDLESS})"
"""Steps: trains until it is stopped; after that, five more."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

pytestmark = [pytest.mark.skipif(missing() is not None, reason=f"slurm: {missing()}"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its jobs find `python` as in an environment with the package, and what numba has to compile in a new clone."""
    launcher.World(1, tmp_path_factory.mktemp("ranks")).end()  # its server compiles that, as every other would
    tools = tmp_path_factory.mktemp("bin")
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    paths = {"PATH": tools, "PYTHONPATH": ROOT}
    variables = {name: f"{path}{os.pathsep}{os.environ[name]}" for name, path in paths.items()}
    variables |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"}
    with Cluster(variables) as cluster:
        yield cluster


def submit(cluster: Cluster, folder: Path, steps: str, *options: str, **settings: Any) -> tuple[str, Path]:
    """tests/requeue_job.py on both nodes; what bash makes of `steps`. Its number, and its log."""
    log, settings = folder / "job.log", {"newest": True, **settings}
    words = f"""{folder}/ scape {steps} "[]" '{json.dumps(settings)}'"""
    script = f"#!/bin/bash\nsrun --kill-on-bad-exit=1 --ntasks=$SLURM_JOB_NUM_NODES python {JOB} {words}\n"
    (folder / "job.sbatch").write_text(script)
    common = (f"--output={log}", "--open-mode=append", "--requeue", "--ntasks-per-node=1", "--job-name=scape")
    return cluster.submit("--nodes=2", *common, *options, folder / "job.sbatch"), log


def begins(log: Path) -> list[int]:
    """The steps at which the starts of a job have begun, by the words of both ranks."""
    return [int(step) for step in re.findall(r"begins at step (\d+)", log.read_text())] if log.exists() else []


def trains(log: Path, starts: int = 1) -> bool:
    """Whether both ranks have begun, in so many starts."""
    return len(begins(log)) == 2 * starts


def read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


# ------------------------------------------------------------------------------------------- the script of examples/


def test_the_script_trains_on_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--steps=4", "--strategy=scape", "--accelerator=cpu", "--precision=32-true", f"--out={tmp_path}")
    job = cluster.submit("--cpus-per-task=1", f"--output={log}", SCRIPT, *options)
    assert cluster.wait_for(job, *ENDED) == "COMPLETED", read(log)
    assert "MEMBER: 1/2" in read(log)
    assert "MEMBER: 2/2" in read(log)


def test_a_task_gets_the_cores_that_the_script_asks_for(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM 22.05's `srun` takes `--cpus-per-task` from its own variable only, and not from the job's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\nscontrol show step "$SLURM_JOB_ID.$SLURM_STEP_ID"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    path = f"PATH={tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    log = tmp_path / "log"
    job = cluster.submit("--nodes=1", f"--output={log}", f"--export=ALL,{path}", SCRIPT)
    assert cluster.wait_for(job, *ENDED) == "COMPLETED", read(log)
    assert "TresPerStep=cpu:8" in read(log)


# --------------------------------------------------------------------------------- jobs that are stopped, and go on


class Stopped(NamedTuple):
    """A job that was stopped, and started again."""

    job: str
    log: Path


@pytest.fixture(scope="module")
def stopped(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stopped]:
    """One that gets a signal before its time ends, and one that is requeued by hand, and whose time then ends.

    SLURM looks at the times of both at once, every 30 s.
    """
    jobs = {}
    for name, steps, options in (("signal", AT_FIRST, ("--signal=SIGUSR1@70",)), ("hand", ENDLESS, ())):
        folder = tmp_path_factory.mktemp(name)
        jobs[name] = Stopped(*submit(cluster, folder, steps, "--time=60", *options, pause=0.3, save_every=10**6))
    for begun in jobs.values():
        wait(functools.partial(trains, begun.log), "the job trains", 150)
    cluster.run("scontrol", "update", f"jobid={jobs['signal'].job}", "EndTime=now+75")
    job, log = jobs["hand"]
    cluster.run("scontrol", "requeue", job)
    cluster.wait_for_requeue(job)
    wait(functools.partial(trains, log, 2), "the job trains again", 150)
    cluster.run("scontrol", "update", f"jobid={job}", "EndTime=now+5")  # `now` may be over when it arrives
    cluster.wait_for_requeue(jobs["signal"].job, TimeLimit="60")  # else the signal comes again, before the ranks train
    return jobs


def test_a_job_whose_time_is_nearly_over_is_requeued_and_goes_on(cluster: Cluster, stopped: dict[str, Stopped]) -> None:
    job, log = stopped["signal"]
    assert cluster.wait_for(job, *ENDED) == "COMPLETED", read(log)
    saved = re.findall(r"all ranks save after step (\d+)", read(log))  # the first start's words are still there
    assert len(saved) == 1
    assert begins(log)[:2] == [0, 0]
    assert begins(log)[2] == begins(log)[3] >= int(saved[0])
    assert (log.parent / "ended-1.json").exists()


def test_a_job_that_is_requeued_by_hand_or_at_the_end_of_its_time_saves_and_goes_on(
    cluster: Cluster, stopped: dict[str, Stopped]
) -> None:
    """SLURM sends SIGTERM, and kills what lives `KillWait` later."""
    job, log = stopped["hand"]
    assert cluster.wait_for(job, *ENDED) == "TIMEOUT", read(log)
    assert len(begins(log)) == 4, read(log)
    assert begins(log)[2] == begins(log)[3] > 0
    by_hand, at_the_end = sorted((log.parent / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    verify(by_hand)
    verify(at_the_end)
