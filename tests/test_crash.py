"""Killed at any file operation, a disk that is full at any byte, two writers of one name: nothing complete is lost."""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import launcher
import lightning as L
import pytest
import torch
import torch.distributed as dist
from launcher import RankError
from torch import Tensor, nn
from trainer_helpers import MARKS, GivenRanks, weights

from lightning_scape import FabricScapeStrategy, FabricSparseLoCoStrategy, newest_checkpoint
from lightning_scape.checkpoint.saver import verify

pytestmark = MARKS
STEPS = 8
KINDS: dict[str, dict[str, Any]] = {
    "file": {},
    "file, beside": {"async_save": True},
    "directory": {"state_dict_type": "sharded"},
    "directory, beside": {"state_dict_type": "sharded", "async_save": True},
}


class Job:
    """A loop that saves over one name after each step, and goes on from the newest checkpoint."""

    def __init__(self, method: str, kind: str, width: int = 7) -> None:
        strategy: Any = FabricScapeStrategy(sparsity=0.8, sparsity_warmup_steps=0, **KINDS[kind])
        if method == "sparseloco":
            strategy = FabricSparseLoCoStrategy(sync_every=3, density=0.5, **KINDS[kind])
        plugins = [GivenRanks()] if dist.is_initialized() else []
        devices = dist.get_world_size() if dist.is_initialized() else 1
        self.fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins)
        self.fabric.launch()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2))
        self.model, self.optimizer = self.fabric.setup(self.net, torch.optim.AdamW(self.net.parameters(), lr=1e-2))
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, path: Path | None, until: int = STEPS) -> dict[int, Tensor]:
        """The weights after each step."""
        seen = {}
        while self.state["step"] < until:
            step = self.state["step"] = self.state["step"] + 1
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + self.fabric.global_rank))
            self.fabric.backward(self.model(inputs).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen[step] = weights(self.net)
            if path is not None:
                self.fabric.save(path, self.state)
        self.fabric.strategy.wait_for_checkpoint()
        return seen


# ------------------------------------------------------------------------------------------------ killed


def kill_at(count: int, folder: str) -> list[int]:
    """SIGKILL at the ``count``-th thing this process does to a file below ``folder``, right before it.

    Returns how many are left, to be set to 0 where it shall live: the process runs other tests, too.
    """
    left = [count]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree") and any(
            folder in str(argument) for argument in arguments
        ):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return left


def go_on(
    rank: int, world_size: int, folder: str, method: str, kind: str, kill: tuple[int, int] | None, until: int = STEPS
) -> dict[int, Tensor]:
    """From the newest checkpoint to the end; ``kill`` is the rank, or -1 for all, and its file operation."""
    job = Job(method, kind)
    found = newest_checkpoint(folder)
    left = kill_at(kill[1], folder) if kill is not None and kill[0] in (rank, -1) else [0]
    if found is not None:
        job.fabric.load(found, job.state)
    seen = job.train(Path(folder, "only.ckpt"), until)
    left[0] = 0
    return seen


KILLED = [("scape", "file"), ("scape", "directory"), ("scape", "directory, beside"), ("sparseloco", "file, beside")]


@pytest.mark.parametrize(("method", "kind"), KILLED)
def test_killed_at_file_operations_training_ends_bitwise_as_without(
    run_ranks: Any, tmp_path: Path, method: str, kind: str
) -> None:
    straight = run_ranks(go_on, 2, str(tmp_path / "straight"), method, kind, None, STEPS + 1)
    folder = tmp_path / "killed"
    folder.mkdir()
    kills = 0
    for kill in [(-1, 9), (0, 12), (-1, 5), (1, 7)]:
        ends = run_ranks(go_on, 2, str(folder), method, kind, kill, expect_errors=True, timeout=60.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            newest = newest_checkpoint(folder)
        if newest is not None:
            verify(newest)
        kills += any(isinstance(end, RankError) for end in ends)
    assert kills >= 2  # the others came to the end before
    ends = run_ranks(go_on, 2, str(folder), method, kind, None, STEPS + 1)
    for end, whole in zip(ends, straight, strict=True):
        assert end
        assert all(torch.equal(value, whole[step]) for step, value in end.items())
    assert [path.name for path in folder.iterdir()] == ["only.ckpt"]  # temporaries do not pile up


# ------------------------------------------------------------------------------------------------ a full disk


def fill_disk(rank: int, world_size: int, folder: str, kind: str) -> int:
    """Files of this process may have so many bytes and no more: a save that fails is one of all ranks."""
    job, path = Job("scape", kind, width=3000), Path(folder, "c.ckpt")
    job.train(path, until=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    failures = 0
    for limit in (0, 100, 5_000, 40_000, 90_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            job.train(path, until=job.state["step"] + 1)
        except OSError as error:
            failures += "c.ckpt" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
        verify(path)
        other = Job("scape", kind, width=3000)
        other.fabric.load(path, other.state)
        assert other.state["step"] == 1
        dist.barrier()
    job.train(path, until=job.state["step"] + 1)
    other = Job("scape", kind, width=3000)
    other.fabric.load(path, other.state)
    assert torch.equal(weights(other.net), weights(job.net))
    assert [each.name for each in Path(folder).iterdir()] == ["c.ckpt"]
    return failures


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_an_error_on_all_ranks_and_the_checkpoint_before_stays(
    run_ranks: Any, tmp_path: Path, kind: str
) -> None:
    assert run_ranks(fill_disk, 2, str(tmp_path), kind, fresh=True) == [5, 5]


# ------------------------------------------------------------------------------------------------ two writers


def write_often(pipe: Any, path: Path, kind: str, steps: range) -> None:
    """A job of one rank that saves to a name to which another job saves, too."""
    job = Job("scape", kind)
    pipe.send("ready")
    pipe.recv()
    for step in steps:
        job.state["step"] = step
        job.fabric.save(path, job.state)


@pytest.mark.parametrize("kinds", [("file", "file"), ("directory", "directory"), ("file", "directory")], ids=str)
def test_of_two_writers_of_one_name_one_leaves_a_whole_checkpoint(tmp_path: Path, kinds: tuple[str, str]) -> None:
    path, context, writers = tmp_path / "out" / "c.ckpt", launcher.start_server(), []
    for place, kind in enumerate(kinds):
        ours, theirs = context.Pipe()
        process = context.Process(target=write_often, args=(theirs, path, kind, range(100 * place, 100 * place + 8)))
        process.start()
        writers.append((process, ours))
    for _, pipe in writers:
        assert pipe.poll(90)
        assert pipe.recv() == "ready"
    for _, pipe in writers:
        pipe.send("go")
    for process, _ in writers:
        process.join()
        assert process.exitcode == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["c.ckpt"]
    verify(path)
    job = Job("scape", "file")
    job.fabric.load(path, job.state)
    assert job.state["step"] in (7, 107)


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "c.ckpt").mkdir()
    (tmp_path / "c.ckpt" / "mine.txt").write_text("mine")
    for kind in ("file", "directory"):
        with pytest.raises(OSError, match="c.ckpt"):
            Job("scape", kind).train(tmp_path / "c.ckpt", until=1)
    assert (tmp_path / "c.ckpt" / "mine.txt").read_text() == "mine"


# ------------------------------------------------------------------------------------------------ the newest


def test_the_newest_is_of_the_latest_step_and_what_is_incomplete_is_passed_over(tmp_path: Path) -> None:
    """Whatever the times of files: a copy or a restored backup has others."""
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
    for step, kind in ((1, "file"), (3, "directory"), (2, "file"), (4, "directory"), (5, "file")):
        job = Job("scape", kind)
        job.train(tmp_path / "saved", until=step)
        (tmp_path / "saved").rename(tmp_path / f"{step}.ckpt")
    os.utime(tmp_path / "1.ckpt")
    assert newest_checkpoint(tmp_path) == tmp_path / "5.ckpt"
    (tmp_path / "5.ckpt").write_bytes((tmp_path / "5.ckpt").read_bytes()[:-100])
    part = max((each for each in (tmp_path / "4.ckpt").iterdir()), key=lambda each: each.stat().st_size)
    part.write_bytes(b"short")
    (tmp_path / ".6.ckpt.0000000000000000.partial").write_bytes(b"half")
    (tmp_path / "other.ckpt").mkdir()
    torch.save({"global_step": 99}, tmp_path / "other.ckpt" / "meta.pt")  # of Lightning's strategies for FSDP
    torch.save([1, 2], tmp_path / "list.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert newest_checkpoint(tmp_path) == tmp_path / "3.ckpt"
    said = [str(each.message) for each in caught]
    assert any("5.ckpt" in text for text in said)
    assert any("4.ckpt" in text for text in said)
    job = Job("scape", "file")
    job.fabric.load(newest_checkpoint(tmp_path), job.state)
    assert job.state["step"] == 3


def test_a_folder_has_the_names_that_a_save_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None would be a run that begins anew."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Job("scape", "file").train(Path("~/runs/c.ckpt"), until=1)
    for name in ("~/runs", "runs", f"file://{tmp_path}/runs"):
        assert newest_checkpoint(name) == tmp_path / "runs" / "c.ckpt"
    with pytest.raises(ValueError, match="must be local, got 's3://runs'"):
        newest_checkpoint("s3://runs")
