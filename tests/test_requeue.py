"""SLURM requeues a job by the signal before its time ends: all ranks save after the same batch, and the next start
goes on bit for bit. Its signal and its command are played here; ``test_slurm.py`` has a real SLURM.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import requeue_job
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from trainer_helpers import MARKS, Regression, make_trainer

from lightning_scape import ScapeStrategy

pytestmark = MARKS


def job(
    rank: int, world_size: int, folder: str, method: str, steps: int, signals: list[int | None], options: dict[str, Any]
) -> dict[str, Any]:
    """What ``srun`` starts on one node. ``scontrol`` writes down how it was called."""
    variables = {"JOB_ID": 77, "JOB_NAME": "scape", "NODEID": 0, "NNODES": 1, "JOB_NODELIST": "localhost"}
    variables |= {"NTASKS": world_size, "NTASKS_PER_NODE": world_size, "PROCID": rank, "LOCALID": rank}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in variables.items()})
    os.environ["PATH"] = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
    requeue_job.main(Path(folder), method, steps, signals, dict(options))
    ended: dict[str, Any] = json.loads(Path(folder, f"ended-{rank}.json").read_text())
    return ended


def start(
    run_ranks: Any,
    folder: Path,
    steps: int,
    signals: Sequence[int | None] = (),
    *,
    method: str = "scape",
    ranks: int = 2,
    **options: Any,
) -> list[dict[str, Any]]:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    scontrol = folder / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/scontrol.txt"\n')
    scontrol.chmod(0o755)
    started: list[dict[str, Any]] = run_ranks(
        job, ranks, str(folder), method, steps, list(signals), options, fresh=True
    )
    return started


@pytest.mark.parametrize(
    ("method", "options"),
    [("scape", {}), ("scape", {"state_dict_type": "sharded", "async_save": True}), ("sparseloco", {})],
    ids=["scape", "beside", "sparseloco"],
)
def test_ranks_that_get_the_signal_in_different_steps_save_the_same_one(
    run_ranks: Any, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    """The second signal comes after the save was heard of: it saves and requeues no second time."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    whole = start(run_ranks, straight, 14, method=method)
    start(run_ranks, stopped, 11, [5, 7], method=method, **options)
    assert (stopped / "scontrol.txt").read_text() == "requeue 77\n"
    checkpoint = stopped / "hpc_ckpt_1.ckpt"
    path = checkpoint / "meta.pt" if options else checkpoint
    if not options:
        saved = torch.load(path, weights_only=True)
        assert 5 <= saved["global_step"] <= 10
    (stopped / "saved" / "epoch=0-step=10.ckpt").rename(stopped / "saved" / "later.none")
    first, second = start(run_ranks, stopped, 14, method=method, **options)
    assert first == second == whole[0]


def test_a_rank_alone_saves_between_two_steps(run_ranks: Any, tmp_path: Path) -> None:
    start(run_ranks, tmp_path, 3, [6], ranks=1, accumulate=4)
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] == 8


def test_a_handler_of_the_users_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NTASKS": "1", "JOB_NAME": "scape", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    seen: list[int] = []

    class Signals(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        options = {"plugins": [SLURMEnvironment()], "max_steps": 2, "default_root_dir": tmp_path}
        make_trainer(ScapeStrategy(), callbacks=[Signals()], **options).fit(Regression())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1] * 2
    assert not list(tmp_path.glob("hpc_ckpt*"))
