"""A real SLURM of two nodes on this machine, with daemons, ports and folders of its own: for tests/test_slurm.py."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
FIRST_PORT, PORTS, STEP = 21000, 1000, 20
"""Each cluster has `STEP` ports: of the controller, and of its nodes."""
CONFIGURATION = """
ClusterName=scape{port}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=0
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser=root
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
JobRequeue=1
KillWait=5
MinJobAge=3600
FirstJobId={first_job}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=8 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=8 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
GRES = "NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero\n"
"""No GPUs: the scripts ask for one, and the tests train on the CPU."""


def missing() -> str | None:
    """Why no cluster can be had here."""
    if os.name != "posix" or os.geteuid() != 0:
        return "a SLURM of the test's own needs root"
    absent = [name for name in DAEMONS if not _program(name)]
    return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)" if absent else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """Two nodes, up within the ``with`` block; jobs get the environment of this process and `variables`."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._folder.chmod(0o755)
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self._environ |= {"SLURM_CONF": str(self._folder / "slurm.conf"), **self._variables}
        with contextlib.ExitStack() as stack:
            stack.callback(self.__exit__)
            self._start_munge()
            for port in range(FIRST_PORT + os.getpid() % (PORTS // STEP) * STEP, FIRST_PORT + 2 * PORTS, STEP):
                if self._start_nodes(FIRST_PORT + port % PORTS):
                    break
            else:
                raise RuntimeError(f"No {len(NODES) + 1} ports in a row are free from {FIRST_PORT} on.")
            wait(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "both nodes are idle", 60)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(["scancel", "--state=RUNNING"], env=self._environ, timeout=5, check=False)
            wait(lambda: not self.run("squeue", "-h", "-t", "running,completing"), "no job is left", 20)
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._started):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._kill_what_is_left()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_what_is_left(self) -> None:
        """Steps of jobs that have failed may outlive the daemons."""
        of_ours = f"SLURM_CONF={self._folder / 'slurm.conf'}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if of_ours in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def _start_munge(self) -> None:
        munge = self._folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start("munged", "--foreground", *(f"--{option}={munge / name}" for option, name in files.items()))
        wait((munge / "socket").exists, "munged listens", 20)

    def _start_nodes(self, port: int) -> bool:
        """Whether all three ports were free, for us and for the daemons."""
        ports = [port, port + 1, port + 2]
        try:
            for number in ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            return False
        names = {"folder": self._folder, "host": socket.gethostname().partition(".")[0]}
        # Lightning takes a port from the last four digits of the job's number: each cluster has 200 of its own.
        first_job = 10000 + (port - FIRST_PORT) * 10
        numbers = {"port": port, "port_1": port + 1, "port_2": port + 2, "first_job": max(1, first_job)}
        (self._folder / "slurm.conf").write_text(CONFIGURATION.format(**names, **numbers))
        (self._folder / "gres.conf").write_text(GRES)
        (self._folder / "state").mkdir(exist_ok=True)
        controller = self._start("slurmctld", "-D", "-c")
        with contextlib.suppress(TimeoutError):
            wait(functools.partial(_listens, port, controller), "slurmctld listens", 20)
        if controller.poll() is not None:
            self._started.remove(controller)
            return False
        for node in NODES:
            self.start_node(node)
        return True

    def start_node(self, node: str) -> None:
        """Its daemon."""
        self._start("slurmd", "-D", "-N", node)

    def _start(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        path = _program(program)
        assert path is not None
        log = (self._folder / f"{program}.out").open("ab")
        process = subprocess.Popen([path, *options], env=self._environ, stdout=log, stderr=log, start_new_session=True)
        self._started.append(process)
        return process

    def run(self, *command: str) -> str:
        """What one of SLURM's programs prints."""
        pipes = {"capture_output": True, "text": True}
        done = subprocess.run(command, env=self._environ, cwd=ROOT, timeout=60, check=False, **pipes)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *options: str | Path) -> str:
        """The number of the job."""
        return self.run("sbatch", "--parsable", *map(str, options))

    def show(self, job: str, field: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{field}=(\S*)", self.run("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def wait_for(self, job: str, *states: str, seconds: float = 120) -> str:
        """The state, once it is one of these."""
        wait(lambda: self.show(job, "JobState") in states, f"job {job} is {' or '.join(states)}", seconds)
        return self.show(job, "JobState")

    def wait_for_requeue(self, job: str, **changes: str) -> None:
        """And start it again soon, with the changes: SLURM waits two minutes.

        Not at once: a node refuses a job that begins in the second in which it was stopped ("Job credential revoked").
        """
        wait(lambda: self.show(job, "Restarts") != "0", f"job {job} is requeued", 120)
        self.wait_for(job, "PENDING")
        words = {**changes, "StartTime": "now+2"}
        self.run("scontrol", "update", f"jobid={job}", *(f"{name}={value}" for name, value in words.items()))


def _listens(port: int, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return True
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(holds: Callable[[], bool], what: str, seconds: float) -> None:
    """Until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Within {seconds} s must be true: {what}. It was not.")
        time.sleep(0.1)
