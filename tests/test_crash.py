"""Ranks that die or hang, at random moments and in the middle of saves; disks that fail on one rank."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from launcher import RankError
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from optimizer_helpers import parameters, set_gradients, values
from test_checkpoint import build, everything, train
from test_sharded import load, numbered
from trainer_helpers import GivenRanks, Regression, make_trainer

from lightning_scape import (
    FabricScapeStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    newest_checkpoint,
)
from lightning_scape.checkpoint.atomic_files import load_file, save_file
from lightning_scape.checkpoint.inspection import verify
from lightning_scape.checkpoint.saver import Content, Saver
from lightning_scape.comm.collectives import Communicator, new_group_like, timeout_of
from lightning_scape.comm.lost_ranks import explained_loss
from lightning_scape.sparseloco import SparseLoCo

RunRanks = Callable[..., list[Any]]
CONFIG = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
STEPS = 14

# ------------------------------------------------------------------------------------------------ dead and hung ranks


def lose_a_rank(rank: int, world_size: int, at: int, slower: float) -> None:
    params, optimizer = build(CONFIG, torch.float32)
    for step in range(6):
        if rank == 1 and step == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == at:
            time.sleep(slower)
        train(params, optimizer, rank, range(step, step + 1))


def rank_1_is_named(errors: list[Any]) -> None:
    """By both others. Who notices first may still see the other wait; who notices last knows which it is."""
    found = [re.search(r"Ranks? ([\d, ]+) ha(s|ve) not reported within", str(errors[rank])) for rank in (0, 2)]
    named = [each[1].split(", ") for each in found if each]
    assert len(named) == 2, errors
    assert all("1" in each for each in named)
    assert ["1"] in named


@pytest.mark.few(1)
@pytest.mark.parametrize(("at", "slower"), [(0, 0.0), (3, 2.0)])
def test_a_killed_rank_makes_the_others_stop_and_say_why(run_ranks: RunRanks, at: int, slower: float) -> None:
    began = time.monotonic()
    errors = run_ranks(lose_a_rank, 3, at, slower, expect_errors=True, timeout=60.0)
    assert time.monotonic() - began < 30
    assert isinstance(errors[1], RankError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, RuntimeError)
        assert "another rank has died, hangs, or raised an error" in str(error)
        assert "restart all ranks from the newest checkpoint" in str(error)
    rank_1_is_named(errors)


def fail_again(rank: int, world_size: int) -> list[str]:
    said: list[str] = []
    for turn in range(2):
        dist.barrier()  # all have seen all reports, which a new group takes back
        new_group_like()
        dist.barrier()
        if turn and rank:
            break
        with pytest.raises(RuntimeError) as caught, explained_loss():
            raise RuntimeError("Connection reset by peer")
        said.append(str(caught.value))
    dist.barrier()
    return said


def test_what_was_reported_before_is_not_taken_for_a_later_report(run_ranks: RunRanks) -> None:
    """The store may outlive a process group, and with torchrun a process: all ranks then seemed to be there."""
    first, second = run_ranks(fail_again, 3, timeout=60.0)[0]
    assert "All ranks have reported this" in first
    assert "Ranks 1, 2 have not reported within 1.5 s: one of them or more is lost" in second


def lose_a_rank_between_exchanges(rank: int, world_size: int, overlap: int) -> None:
    with pytest.raises(RuntimeError, match="All ranks have reported this"), explained_loss():
        raise RuntimeError("Connection reset by peer")  # as before a restart, in the same store
    dist.barrier()  # all have seen all reports, which a new group takes back
    params = parameters()
    loco = SparseLoCo(torch.optim.SGD(params, 0.1), sync_every=2, overlap_steps=overlap)
    for step in range(6):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        set_gradients(params, rank, step)
        loco.optimizer.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [0, 1])
def test_sparseloco_names_the_rank_that_is_lost_after_a_restart_in_the_same_store(
    run_ranks: RunRanks, overlap: int
) -> None:
    """Without overlap it makes no group of its own, and took reports of before the restart for new ones."""
    errors = run_ranks(lose_a_rank_between_exchanges, 3, overlap, expect_errors=True, timeout=60.0)
    assert isinstance(errors[1], RankError)
    rank_1_is_named(errors)


def wait_for_masks(rank: int, world_size: int) -> float:
    optimizer = ScapeOptimizer(parameters(), config=CONFIG, process_group=dist.new_group(timeout=timedelta(seconds=7)))
    timeout = timeout_of(optimizer.communicator.mask_group)
    assert timeout is not None
    return timeout.total_seconds()


def test_masks_are_waited_for_as_long_as_all_else(run_ranks: RunRanks) -> None:
    assert run_ranks(wait_for_masks, 2) == [7.0, 7.0]


def hang_a_rank(rank: int, world_size: int) -> float:
    group = dist.new_group(timeout=timedelta(seconds=3))  # for two ranks on a busy machine, too
    params = parameters()
    optimizer = ScapeOptimizer(params, config=CONFIG, process_group=group)
    set_gradients(params, rank, 0)
    optimizer.step()
    if rank == 1:
        time.sleep(7)
        return 0.0
    began = time.monotonic()
    set_gradients(params, rank, 1)
    with pytest.raises(RuntimeError, match=r"another rank has died, hangs.* Rank 1 has not reported"):
        optimizer.step()
    return time.monotonic() - began


@pytest.mark.few(0)
def test_a_hung_rank_is_waited_for_until_the_timeout(run_ranks: RunRanks) -> None:
    assert 2.5 < run_ranks(hang_a_rank, 2, timeout=60.0)[0] < 9


# ------------------------------------------------------------------------------------------------ killed at any moment


def kill_at(count: int, folder: str) -> None:
    """SIGKILL at the ``count``-th thing this process does to a file below ``folder``, right before it."""
    left = [count]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree") and any(
            folder in str(argument) for argument in arguments
        ):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def digest(params: list[Any], optimizer: ScapeOptimizer) -> str:
    total = hashlib.blake2b(digest_size=8)
    for tensor in everything(params, optimizer):
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def train_and_save(
    rank: int, world_size: int, folder: str, kind: str, expected: list[list[str]], kill: tuple[int, str, float] | None
) -> list[str]:
    """From the newest checkpoint to the end, saving over one name at every step; ``kill`` is whom, how and when."""
    ranks, path = Communicator(), Path(folder) / "only.ckpt"
    params, optimizer = build(CONFIG, torch.float32)
    background = kind in ("asynchronous", "collected")
    group = Communicator(dist.new_group()) if background else ranks
    dist.barrier()  # who dies while groups are being made is waited for until the timeout
    if kill is not None and kill[0] in (rank, -1):
        if kill[1] == "events":
            kill_at(int(kill[2]), folder)
        else:
            threading.Timer(kill[2], os.kill, (os.getpid(), signal.SIGKILL)).start()
    (newest, *_) = ranks.all_gather_object(newest_checkpoint(folder) if rank == 0 else None)
    begin = 0
    if newest is not None:
        if kind in ("full", "collected"):
            content = load_file(newest)
            optimizer.load_state_dict(content["optimizer"])
            begin, model = content["step"], content["model"]
        else:
            saved = load(newest, optimizer)
            begin, model = saved.rest["step"], saved.model("model").values()
        for parameter, value in zip(params, model, strict=True):
            parameter.data.copy_(value)
    if expected and begin:
        assert digest(params, optimizer) == expected[rank][begin - 1], f"not as it was after step {begin}"
    digests, saver = [], Saver(asynchronous=background)
    for step in range(begin, STEPS):
        train(params, optimizer, rank, range(step, step + 1))
        digests.append(digest(params, optimizer))
        file = {"step": step + 1, "model": values(params), "optimizer": None}
        if kind == "collected":
            file["optimizer"] = optimizer.sharded_state_dict()
            saver.save_file(path, file, lambda whole: save_file(whole, path), group)
        elif kind == "full":
            optimizer.consolidate_state_dict()
            if rank == 0:
                save_file({**file, "optimizer": optimizer.state_dict()}, path)
            dist.barrier()
        else:
            shards = {"optimizer": optimizer.sharded_state_dict()}
            saver.save(path, Content({"model": numbered(params)}, shards, {"step": step + 1}), group)
    saver.finish(raising=True)
    return digests


def survive(run_ranks: RunRanks, folder: Path, kind: str, rounds: int, seed: int) -> None:
    straight = run_ranks(train_and_save, 2, str(folder / "straight"), kind, [], None)
    target, rng, kills = folder / "killed", random.Random(seed), 0
    target.mkdir()
    while kills < rounds:
        how = rng.choice(["events", "events", "seconds"])
        # Early rounds have nothing to load: what they do to files is saving.
        when = rng.randint(1, 60) if how == "events" else rng.uniform(0.0, 0.5)
        whom = rng.choice([0, 1, -1])
        ends = run_ranks(
            train_and_save, 2, str(target), kind, straight, (whom, how, when), expect_errors=True, timeout=60.0
        )
        died = [end for end in ends if isinstance(end, RankError)]
        for end in ends:
            lost = isinstance(end, RuntimeError) and "another rank has died" in str(end)
            assert isinstance(end, (list, RankError)) or lost or "Connection" in str(end), end
        kills += bool(died)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            newest = newest_checkpoint(target)
        if newest is not None:
            verify(newest)
        if not died:  # it came to the end first: begin anew
            for path in sorted(target.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    ends = run_ranks(train_and_save, 2, str(target), kind, straight, None)
    for end, whole in zip(ends, straight, strict=True):
        assert end == whole[len(whole) - len(end) :]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "sharded", "asynchronous", "collected"])
def test_killed_at_random_moments_training_ends_bitwise_as_without(
    run_ranks: RunRanks, tmp_path: Path, kind: str
) -> None:
    survive(run_ranks, tmp_path, kind, rounds=3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["full", "sharded", "asynchronous", "collected"])
def test_killed_forty_times_training_ends_bitwise_as_without(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    survive(run_ranks, tmp_path, kind, rounds=40, seed=2)


# ------------------------------------------------------------------------------------------------ failing disks


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "collected": {"async_save": True},
    "sharded": {"state_dict_type": "sharded"},
}


def trainer_cannot_write(rank: int, world_size: int, folder: str, kind: str) -> str:
    trainer = make_trainer(ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0, **KINDS[kind]), max_steps=3)
    trainer.fit(Regression())
    trainer.save_checkpoint(f"{folder}/good.ckpt")
    with pytest.raises(OSError, match="could not be written.*untouched") as caught:
        trainer.save_checkpoint(f"{folder}/a_file/bad.ckpt")
    dist.barrier()  # the ranks are still together
    verify(f"{folder}/good.ckpt")
    return str(caught.value)


def fabric_cannot_write(rank: int, world_size: int, folder: str, kind: str) -> str:
    strategy = FabricScapeStrategy(
        sparsity=0.9, cluster_environment=GivenRanks(), sparsity_warmup_steps=0, **KINDS[kind]
    )
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = torch.nn.Linear(3, 3)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(OSError, match="could not be written.*untouched") as caught:
        fabric.save(f"{folder}/a_file/bad.ckpt", {"model": model, "optimizer": optimizer})
    dist.barrier()
    return str(caught.value)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [trainer_cannot_write, fabric_cannot_write])
def test_a_folder_that_cannot_be_written_is_told_on_every_rank(
    run_ranks: RunRanks, tmp_path: Path, host: Any, kind: str
) -> None:
    (tmp_path / "a_file").write_text("no folder")
    texts = run_ranks(host, 2, str(tmp_path), kind)
    assert all("a_file" in text for text in texts)
    assert (tmp_path / "a_file").read_text() == "no folder"


def fill_disk_in_background(rank: int, world_size: int, folder: str) -> tuple[bool, bool]:
    params, optimizer = build(CONFIG, torch.float32)
    train(params, optimizer, rank, range(2))
    saver, ranks, path = Saver(asynchronous=True), Communicator(dist.new_group()), Path(folder) / "new.ckpt"
    old = Path(folder) / "old.ckpt"

    def save() -> None:
        saver.save(path, Content({"model": numbered(params)}, {"optimizer": optimizer.sharded_state_dict()}), ranks)

    # A removal waits for the checkpoint that makes the old one dispensable, and is left out if that fails.
    old.mkdir(exist_ok=True)
    if rank == 1:
        import lightning_scape.checkpoint.atomic_files as files

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        files.describe_files, kept = fail, files.describe_files
    save()
    saver.after(old.rmdir if rank == 0 else lambda: None)
    with pytest.raises(OSError, match=r"new.ckpt' could not be written: No space left") as caught:
        saver.wait()
    assert caught.value.errno == errno.ENOSPC
    dist.barrier()
    stayed = old.exists() and not path.exists()
    if rank == 1:
        files.describe_files = kept
    save()
    saver.after(old.rmdir if rank == 0 else lambda: None)
    saver.finish(raising=True)
    dist.barrier()
    return stayed, path.exists() and not old.exists()


def test_a_background_write_that_fails_is_told_on_every_rank_and_removes_nothing(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(fill_disk_in_background, 2, str(tmp_path)) == [(True, True)] * 2


def test_options_on_saving_must_go_together() -> None:
    for make in (ScapeStrategy, FabricScapeStrategy):
        with pytest.raises(ValueError, match=r"`checkpoint_io` must write at once .*, got AsyncCheckpointIO"):
            make(async_save=True, checkpoint_io=AsyncCheckpointIO())
        with pytest.raises(ValueError, match='must be "full" .* or "sharded" .*, got \'both\''):
            make(state_dict_type="both")
        with pytest.raises(ValueError, match="`checkpoint_io` must be None"):
            make(state_dict_type="sharded", checkpoint_io=L.fabric.plugins.TorchCheckpointIO())
