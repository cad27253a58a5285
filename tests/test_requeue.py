"""SLURM requeues a job: by the signal before its time ends, and after a machine was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from test_doctor import free_port
from trainer_helpers import MARKS, Regression
from warm_python import warm_python

from lightning_scape import ScapeStrategy
from lightning_scape.hosts import requeue
from lightning_scape.hosts.private_names import signals
from lightning_scape.tools import commands

ROOT = Path(__file__).resolve().parents[1]
JOB = str(ROOT / "tests" / "requeue_job.py")
pytestmark = MARKS


def start(
    folder: Path,
    steps: int,
    signals: Sequence[int | None] = (),
    *,
    method: str = "scape",
    ranks: int = 2,
    late: float = 0.0,
    **options: Any,
) -> list[int | None]:
    """What `srun` does on one node; the ranks' exit codes. `scontrol` writes down how it was called."""
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    scontrol = tools / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/scontrol.txt"\n')
    scontrol.chmod(0o755)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TORCHELASTIC"))}
    environ |= {"PATH": f"{tools}{os.pathsep}{environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "scape", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
    environ |= {"SLURM_NTASKS": str(ranks), "SLURM_NTASKS_PER_NODE": str(ranks), "SLURM_JOB_NODELIST": "localhost"}
    environ["LATE"] = str(late)  # seconds that rank 1 takes until it has the signal; rank 2, twice
    command = [warm_python(), JOB, str(folder), method, str(steps), json.dumps(list(signals)), json.dumps(options)]
    started = []
    for rank in range(ranks):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        started.append(subprocess.Popen(command, env=environ | place))
    try:
        return [process.wait(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()


def ended(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "options", "saved_at"),
    [
        ("scape", {}, 8),  # the later rank leaves word after step 7
        ("scape", {"state_dict_type": "sharded", "async_save": True}, 8),
        ("sparseloco", {}, 9),  # after the exchange that follows
    ],
    ids=["scape", "background", "sparseloco"],
)
def test_ranks_that_get_the_signal_in_different_steps_save_the_same_one(
    tmp_path: Path, method: str, options: dict[str, Any], saved_at: int
) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert start(straight, 14, method=method) == [0, 0]
    assert start(stopped, 11, [5, 7], method=method, **options) == [0, 0]
    assert (stopped / "scontrol.txt").read_text() == "requeue 77\n"
    checkpoint = stopped / "hpc_ckpt_1.ckpt"
    commands.main(["verify", str(checkpoint)])  # and so it was there when the job was requeued
    if not options:
        saved = torch.load(checkpoint, weights_only=True)
        assert saved["global_step"] == saved_at

    # The newest: saved by the signal, though a file that is older has a later step in its name.
    (stopped / "saved" / "epoch=0-step=10.ckpt").rename(stopped / "saved" / "later.none")
    (stopped / ".hpc_ckpt_9.ckpt.partial").write_bytes(b"cut off")  # for Lightning alone, the newest
    if method == "scape":
        options["resume"] = "auto"
    assert start(stopped, 14, method=method, **options) == [0, 0]
    first, second = ended(stopped)
    assert first == second
    assert first == ended(straight)[0]  # bit for bit as never stopped


@pytest.mark.few(0)
def test_exchanges_beside_the_steps_are_counted_when_they_end(tmp_path: Path) -> None:
    """Rank 2 leaves word when exchange 2 has begun, and the others may have ended it before."""
    options = {"method": "sparseloco", "ranks": 3, "overlap_steps": 1}
    assert start(tmp_path, 14, [4, 4, 6], late=0.5, **options) == [0, 0, 0]
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == 10  # when exchange 3 has ended


def test_a_rank_alone_saves_between_two_steps(tmp_path: Path) -> None:
    assert start(tmp_path, 3, [6], ranks=1, accumulate=4) == [0]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] == 8


def test_a_second_fit_knows_nothing_of_the_firsts_signal(run_ranks: Any) -> None:
    """The store outlives a fit: words left in it would count for the next one."""
    assert run_ranks(_two_fits, 2) == [[1, 0]] * 2


def test_a_job_that_is_requeued_after_a_crash_goes_on_by_itself_on_fewer_ranks(tmp_path: Path) -> None:
    codes = start(tmp_path, 30, [-1, -1], resume="auto", batches_per_step=2)
    assert codes == [-signal.SIGKILL] * 2
    assert (tmp_path / "saved" / "epoch=0-step=10.ckpt").exists()
    assert start(tmp_path, 14, ranks=1, resume="auto", batches_per_step=2) == [0]
    assert ended(tmp_path, 1)[0]["step"] == 14
    steps = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(steps) == 2, steps  # the second start has not begun at 0: it saved none of steps 5 and 10 again


class _Signals:
    """Lightning's handler, by its name."""

    saves = 0

    def _slurm_sigusr_handler_fn(self, number: int, frame: Any) -> None:
        self.saves += 1


def _two_fits(rank: int, world_size: int) -> list[int]:
    """How many saves each of two fits has seen; the second signal reaches rank 0 only."""
    saves = []
    for signalled in ((0, 1), (0,)):
        connector = _Signals()
        trainer = SimpleNamespace(
            _signal_connector=connector,
            strategy=SimpleNamespace(
                cluster_environment=SLURMEnvironment(), wait_for_checkpoint=int, checkpoint_io=None, barrier=int
            ),
            callbacks=[],
            optimizers=[],
            global_rank=rank,
            world_size=world_size,
            global_step=0,
            save_checkpoint=int,
        )
        requeue.attach(trainer)
        (callback,) = trainer.callbacks
        if rank in signalled:
            callback.note(10, None)
        for ended in range(4):
            dist.barrier()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(requeue.Exchanges, "of", lambda trainer, ended=ended: requeue.Exchanges(ended, ended))
                callback.on_train_batch_end(trainer, torch.nn.Module(), None, None, 0)
        saves.append(connector.saves)
    return saves


def test_a_handler_of_the_users_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NTASKS": "1", "JOB_NAME": "scape", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    seen: list[int] = []

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            handler = signal.getsignal(signal.SIGUSR1)
            assert callable(handler)
            handler(signal.SIGUSR1, None)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=ScapeStrategy(),
            plugins=[SLURMEnvironment()],
            max_steps=2,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Look()],
        )
        trainer.fit(Regression())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1] * 2
    assert not list(tmp_path.glob("hpc_ckpt*"))


class Replaces(Callback):
    """Gives the Trainer another list of callbacks while it trains."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.callbacks = [self]  # type: ignore[attr-defined]


def test_signals_are_handled_as_before_though_callbacks_were_replaced() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ScapeStrategy(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Replaces()],
    )
    before = set(vars(signals(trainer)))
    trainer.fit(Regression())
    assert set(vars(signals(trainer))) == before
