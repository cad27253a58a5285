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

import pytest
from slurm_cluster import Cluster, missing, wait

from lightning_scape.checkpoint.inspection import verify

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "slurm.sbatch"
JOB = ROOT / "tests" / "requeue_job.py"
AT_FIRST = "$([[ $SLURM_RESTART_COUNT ]] && echo -1 || echo 1000000)"
"""Steps: trains until it is stopped; after that, five more."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"slurm: {missing()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its jobs find `python` as in an environment with the package."""
    tools = tmp_path_factory.mktemp("bin")
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    variables = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
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


def trains(log: Path) -> bool:
    """Whether both ranks have begun."""
    return len(begins(log)) == 2


def wait_for_steps(folder: Path, log: Path) -> None:
    """Until the ranks train, and the first checkpoint is there."""
    wait(lambda: any((folder / "saved").glob("*.ckpt")), f"the first checkpoint; {log.name} has:\n{read(log)}", 60)


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


class Timed(NamedTuple):
    """A job whose time SLURM has been told to shorten; it looks at jobs' times every 30 s."""

    job: str
    log: Path


@pytest.fixture(scope="module")
def timed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timed]:
    """One that gets a signal before its time ends, and one that does not: SLURM looks at both at once."""
    jobs = {}
    for name, options in {"signal": ("--signal=SIGUSR1@70",), "none": ()}.items():
        folder = tmp_path_factory.mktemp(name)
        jobs[name] = Timed(*submit(cluster, folder, AT_FIRST, "--time=60", *options, pause=0.3, save_every=10**6))
    for name, change in {"signal": "EndTime=now+75", "none": "EndTime=now"}.items():
        job, log = jobs[name]
        wait(functools.partial(trains, log), "the job trains", 300)
        cluster.run("scontrol", "update", f"jobid={job}", change)
    return jobs


def test_a_job_whose_time_is_nearly_over_is_requeued_and_goes_on(cluster: Cluster, timed: dict[str, Timed]) -> None:
    job, log = timed["signal"]
    cluster.wait_for_requeue(job, TimeLimit="60")  # else the signal comes again, while the ranks still import
    assert cluster.wait_for(job, *ENDED) == "COMPLETED", read(log)
    saved = re.findall(r"all ranks save after step (\d+)", read(log))  # the first start's words are still there
    assert len(saved) == 1
    assert begins(log)[:2] == [0, 0]
    assert begins(log)[2] == begins(log)[3] >= int(saved[0])
    assert (log.parent / "ended-1.json").exists()


def test_a_job_at_the_end_of_its_time_saves(cluster: Cluster, timed: dict[str, Timed]) -> None:
    """SLURM sends SIGTERM, and kills what lives `KillWait` later."""
    job, log = timed["none"]
    assert cluster.wait_for(job, *ENDED) == "TIMEOUT", read(log)
    (saved,) = (log.parent / "saved").glob("*.ckpt")
    verify(saved)


def test_a_job_that_is_requeued_by_hand_saves_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job, log = submit(cluster, tmp_path, AT_FIRST, pause=0.05)
    wait_for_steps(tmp_path, log)
    cluster.run("scontrol", "requeue", job)
    cluster.wait_for_requeue(job)
    assert cluster.wait_for(job, *ENDED) == "COMPLETED", read(log)
    assert len(begins(log)) == 4, read(log)
    assert begins(log)[2] == begins(log)[3] >= 5
