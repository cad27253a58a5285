"""Each example trains in short form, and leaves what it says it leaves."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import launcher
import pytest
import torch

RunRanks = Callable[..., list[Any]]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(rank: int, world_size: int, folder: Path, name: str, *options: object) -> str:
    os.chdir(folder)
    return launcher.run_script(rank, world_size, str(EXAMPLES / name), *map(str, options))


def start(folder: Path, log: str, *words: object, **environ: str) -> subprocess.Popen:
    """A process as a user starts it, in a session of its own."""
    launched = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    with (folder / log).open("w") as out:
        command = [sys.executable, *map(str, words)]
        options = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(command, cwd=folder, env={**kept, **environ}, **options)


def wait_for(met: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 150
    while not met():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def run_until(rank: int, world_size: int, folder: Path, saved: Path, option: str) -> str:
    """The first example, until its first checkpoint is there: then the rank is killed."""

    def kill() -> None:
        while not saved.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return run(rank, world_size, folder, "pretrain_python.py", "--steps=5", option)


def test_the_first_example_when_killed_goes_on_to_the_end_of_a_run_that_never_was(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    dead = run_ranks(run_until, 2, tmp_path, killed / "scape-99" / "last.ckpt", f"--out={killed}", expect_errors=True)
    assert "exit code -9" in str(dead)
    assert not (killed / "result.json").exists()
    said = run_ranks(run, 2, tmp_path, "pretrain_python.py", "--steps=5", f"--out={killed}", "--resume")[0]
    run_ranks(run, 2, tmp_path, "pretrain_python.py", "--steps=5", f"--out={whole}")
    resumed, never_killed = (json.loads((folder / "result.json").read_text()) for folder in (killed, whole))
    for one, other in zip(resumed, never_killed, strict=True):
        assert one.pop("seconds") > 0
        assert other.pop("seconds") > 0
        assert one == other  # losses and bytes of each validation
    scape, dense = resumed
    assert [point["step"] for point in scape["points"]] == list(range(1, 6))
    assert scape["val_loss"] < scape["points"][0]["val_loss"]
    assert scape["bytes_sent"] < 0.3 * dense["bytes_sent"]
    assert dense["bytes_sent"] == dense["bytes_dense"] == scape["bytes_dense"]
    assert re.findall(r"^\| (.*?) \| ([\d.]+) \|", said, re.MULTILINE) == [
        ("SCAPE 99%", f"{scape['val_loss']:.4f}"),
        ("AdamW under DDP", f"{dense['val_loss']:.4f}"),
    ]
    assert (killed / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("scape-99", "ddp"):
        saved = torch.load(killed / name / "last.ckpt", weights_only=True)
        assert saved["global_step"] == 5
        assert (killed / name / "version_0" / "metrics.csv").exists()


def test_the_smallest_trainer_learns(run_ranks: RunRanks, tmp_path: Path) -> None:
    said = run_ranks(run, 2, tmp_path, "minimal_trainer.py")[0]
    assert float(re.search(r"loss after 256 steps: ([\d.]+)", said)[1]) < 1.0


def test_the_fabric_loop_learns_and_saves(run_ranks: RunRanks, tmp_path: Path) -> None:
    options = ("--steps=41", "--batch=4", "--context=32", f"--save={tmp_path / 'end.ckpt'}")
    said = run_ranks(run, 2, tmp_path, "fabric_loop.py", *options)[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 1.0
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert {"model", "optimizer"} <= set(saved)


def run_within_the_group(rank: int, world_size: int, folder: Path, name: str) -> str:
    with mock.patch.object(torch.distributed, "init_process_group"):  # the ranks are there already
        return run(rank, world_size, folder, name)


def test_the_loop_of_torchrun_learns_and_saves(run_ranks: RunRanks, tmp_path: Path) -> None:
    said = run_ranks(run_within_the_group, 2, tmp_path, "torchrun_loop.py")[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] / 4
    saved = torch.load(tmp_path / "out" / "torchrun_loop.pt", weights_only=True)
    assert set(saved) == {"model", "optimizer"}


def test_a_transformers_model_trains_and_is_saved_in_its_own_format(run_ranks: RunRanks, tmp_path: Path) -> None:
    import transformers

    options = ("--steps=30", "--batch=4", "--context=32", "--lr=3e-3", f"--out={tmp_path}")
    said = run_ranks(run, 2, tmp_path, "finetune_transformers.py", *options)[0]
    assert float(re.search(r"validation loss ([\d.]+)", said)[1]) < math.log(256) - 1.0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == 256


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a machine's processes in /proc")
def test_a_job_that_loses_a_machine_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    soon = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5"
    job = [EXAMPLES / "elastic.py", f"--out={tmp_path}", "--steps=120"]
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    first, second = (
        start(tmp_path, f"{index}.log", *words, f"--rdzv-conf={soon},is_host={1 - index}", *job, **environ)
        for index in range(2)
    )
    log = tmp_path / "0.log"
    wait_for(lambda: "step 30 on 2 ranks" in log.read_text(), first, log)
    for pid in (second.pid, *children(second.pid)):  # at once, as a power cut does
        os.kill(pid, signal.SIGKILL)
    second.wait()
    assert first.wait(150) == 0, log.read_text()
    steps = [(int(step), int(ranks)) for step, ranks in re.findall(r"step (\d+) on (\d) ranks", log.read_text())]
    alone = [step for step, ranks in steps if ranks == 1]
    assert alone == list(range(alone[0], 121))
    assert alone[0] % 24 == 1  # after a checkpoint
    assert 1 < alone[0] <= max(step for step, ranks in steps if ranks == 2) + 1


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
