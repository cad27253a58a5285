"""Going on after a restart: a new process group for every start, one checkpoint for all ranks, one global batch."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from trainer_helpers import MARKS, Regression, make_trainer
from warm_python import warm_python

from lightning_scape import CheckpointError, ScapeStrategy, SparseLoCoStrategy, resume_path
from lightning_scape.comm.restarts import agree_on_name
from lightning_scape.hosts.resume import rescaled
from lightning_scape.tools import commands

RunRanks = Callable[..., list[Any]]
pytestmark = MARKS

# ------------------------------------------------------------------------------------------------ the store


def start(store: dist.Store, ranks: int, timeout: float = 20.0) -> list[str | Exception]:
    """All ranks of a start, as threads with a client each."""
    found: dict[int, str | Exception] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = agree_on_name(store, rank, ranks, timedelta(seconds=timeout))
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


def test_every_start_gets_a_name_of_its_own_in_a_store_that_outlives_it() -> None:
    store = dist.HashStore()
    names = [start(store, ranks) for ranks in (3, 3, 2, 4, 1)]
    assert all(len(set(one)) == 1 for one in names)
    assert len({one[0] for one in names}) == len(names)


def test_a_start_that_failed_half_way_leaves_nothing_that_misleads_the_next() -> None:
    """Ranks died before all had the name: greetings without an answer, answers that nobody read."""
    store = dist.HashStore()
    store.set("lightning_scape/start/hello/1", "of-a-dead-rank")
    store.set("lightning_scape/start/hello/2", "of-another")
    store.set("lightning_scape/start/name/of-another", "an-old-name")
    first, second, third = start(store, 3)
    assert first == second == third
    assert first != "an-old-name"


def test_missing_ranks_are_an_error_on_those_that_are_there() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"All 3 ranks must meet .* got 1/3 clients joined"):
        agree_on_name(store, 0, 3, timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="no answer from rank 0.*`lightning-scape torchrun`"):
        agree_on_name(store, 1, 3, timedelta(seconds=0.2))


RESTARTED = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from lightning_scape.comm.restarts import init_process_group
init_process_group("gloo", timeout=timedelta(seconds=240))
init_process_group("gloo")  # again is no error
ones = torch.ones(1)
dist.all_reduce(ones)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(dist.get_rank())
dist.barrier()
os.write(1, f"together again: {ones.item()} ".encode())  # in one piece: those of print may mix with the other rank's
"""


@pytest.mark.timeout(600)
def test_ranks_that_torchrun_restarts_meet_again(tmp_path: Path) -> None:
    """With torch's own init_process_group they read the dead ranks' addresses and wait until the timeout."""
    script = tmp_path / "job.py"
    script.write_text(RESTARTED)
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environ = {name: value for name, value in os.environ.items() if "RDZV" not in name}
    environ["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run(
        [*command, str(script)],
        env={**environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("together again: 2.0") == 2


# ------------------------------------------------------------------------------------------------ one checkpoint


def look(rank: int, world_size: int, folder: str, hidden: int | None) -> str | None:
    if rank == hidden:
        Path(folder, "elsewhere").mkdir()
    os.chdir(f"{folder}/elsewhere" if rank == hidden else folder)  # a machine with a disk of its own
    found = resume_path(".", "named.ckpt", pattern="*.ckpt")
    return None if found is None else found.name


def look_often(rank: int, world_size: int, folder: str) -> int:
    return sum(resume_path(f"{folder}/none") is None for _ in range(50))


def test_a_group_that_ends_right_after_its_last_message_does_not_hang(run_ranks: Any, tmp_path: Path) -> None:
    """Under torch 2.7 its end waited for a thread of gloo's, which waited for the interpreter's lock, for ever."""
    assert run_ranks(look_often, 2, str(tmp_path)) == [50, 50]


def save(path: Path, age: float = 0.0) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save({"a": torch.ones(3)}, path)
    os.utime(path, (time.time() - age, time.time() - age))


def test_all_ranks_get_the_newest_complete_checkpoint_and_damaged_ones_are_named(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(look, 2, str(tmp_path), None) == [None, None]
    save(tmp_path / "older.ckpt", 60)
    save(tmp_path / "old.ckpt", 30)
    save(tmp_path / "new.ckpt")
    assert run_ranks(look, 2, str(tmp_path), None) == ["new.ckpt"] * 2
    content = (tmp_path / "new.ckpt").read_bytes()
    (tmp_path / "new.ckpt").write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match="Passed over: .*new.ckpt.* is torn"):
        assert resume_path(tmp_path) == tmp_path / "old.ckpt"
    assert run_ranks(look, 2, str(tmp_path), None) == ["old.ckpt"] * 2


def test_where_no_checkpoint_loads_training_does_not_begin_anew(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A job whose checkpoints could not be read began at step 0 after each restart."""
    (tmp_path / "a.ckpt").write_bytes(b"no checkpoint")
    for error in run_ranks(look, 2, str(tmp_path), None, expect_errors=True):
        assert isinstance(error, CheckpointError)
        assert "one of them must load, got 1 and none that does: a.ckpt" in str(error)


def look_slowly(rank: int, world_size: int, folder: str) -> str:
    def check(path: Path) -> None:
        time.sleep(3.0)

    found = resume_path(folder, check=check)
    assert found is not None
    return found.name


def test_ranks_wait_for_a_long_check_longer_than_for_a_message(run_ranks: RunRanks, tmp_path: Path) -> None:
    save(tmp_path / "run" / "1.ckpt")
    assert run_ranks(regroup, 2, str(tmp_path / "run")) == ["1.ckpt"] * 2


def regroup(rank: int, world_size: int, folder: str) -> str:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    options = {"store": dist.PrefixStore("short", store), "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=1), **options)
    return look_slowly(rank, world_size, folder)


def test_files_of_one_name_that_differ_are_an_error_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    save(tmp_path / "1.ckpt")
    (tmp_path / "elsewhere").mkdir()
    torch.save({"a": torch.ones(1000)}, tmp_path / "elsewhere" / "1.ckpt")
    for error in run_ranks(look_elsewhere, 2, str(tmp_path), expect_errors=True):
        assert isinstance(error, FileNotFoundError)
        assert "sees another one of" in str(error)


def look_elsewhere(rank: int, world_size: int, folder: str) -> None:
    os.chdir(f"{folder}/elsewhere" if rank else folder)
    resume_path(".", pattern="*.ckpt")


def test_a_named_checkpoint_counts_as_one_of_them(tmp_path: Path) -> None:
    save(tmp_path / "pretrained" / "base.ckpt", 60)
    assert resume_path(tmp_path / "runs", tmp_path / "pretrained" / "base.ckpt") is not None
    save(tmp_path / "runs" / "1.ckpt", 30)
    assert resume_path(tmp_path / "runs", tmp_path / "pretrained" / "base.ckpt") == tmp_path / "runs" / "1.ckpt"


@pytest.mark.parametrize("hidden", [0, 1])
def test_ranks_that_do_not_see_the_same_files_are_an_error_on_all(
    run_ranks: RunRanks, tmp_path: Path, hidden: int
) -> None:
    """Rank 0 on another machine than before would have begun anew, without a word."""
    save(tmp_path / "1.ckpt")
    errors = run_ranks(look, 2, str(tmp_path), hidden, expect_errors=True)
    for error in errors:
        assert isinstance(error, FileNotFoundError)
        assert f"1.ckpt', which rank {1 - hidden} sees and rank {hidden} does not" in str(error)


# ------------------------------------------------------------------------------------------------ the Trainer


def fit(
    rank: int, world_size: int, folder: str, kind: str, steps: int, batches: int = 4, start: str | None = None
) -> dict[str, Any]:
    trainer = elastic_trainer(folder, kind, steps, batches)
    module = Regression()
    trainer.fit(module, ckpt_path=start)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return {
        "step": trainer.global_step,
        "ready": progress.total.ready,
        "current": progress.current.ready,
        "epoch": trainer.current_epoch,
        "after": trainer.accumulate_grad_batches,
        "loaded": str(trainer.ckpt_path),
    }


def elastic_trainer(folder: str, kind: str, steps: int, batches: int) -> pl.Trainer:
    options: dict[str, Any] = {"resume": "auto", "batches_per_step": batches}
    if kind == "sparseloco":
        strategy: ScapeStrategy = SparseLoCoStrategy(sync_every=2, **options)
    else:
        strategy = ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0, state_dict_type=kind, **options)
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    return make_trainer(strategy, max_steps=steps, max_epochs=-1, callbacks=[keep], enable_checkpointing=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["full", "sharded", "sparseloco"])
def test_a_restart_on_fewer_or_more_ranks_goes_on_with_the_same_global_batch(
    run_ranks: RunRanks, tmp_path: Path, kind: str
) -> None:
    folder = str(tmp_path)
    two = run_ranks(fit, 2, folder, kind, 2)[0]
    assert (two["step"], two["ready"], two["loaded"]) == (2, 4, "None")
    one = run_ranks(fit, 1, folder, kind, 4)[0]
    assert one["loaded"].endswith("step=2.ckpt")
    assert (one["step"], one["ready"]) == (4, 16)  # 4 steps of 4 batches, as this rank counts
    back = run_ranks(fit, 2, folder, kind, 5)
    for rank in back:
        assert rank["loaded"].endswith("step=4.ckpt")
        assert (rank["step"], rank["ready"], rank["after"]) == (5, 10, 1)


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fit, 2, str(tmp_path), "full", 3)
    newest = tmp_path / "step=3.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    for rank in run_ranks(fit, 2, str(tmp_path), "full", 3):
        assert rank["loaded"].endswith("step=2.ckpt")
        assert rank["step"] == 3


@pytest.mark.few(0)
def test_another_batch_keeps_the_place_in_the_epoch(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(fit, 2, str(tmp_path), "full", 1)
    for rank in run_ranks(fit, 2, str(tmp_path), "full", 2, 8):
        assert (rank["step"], rank["ready"]) == (2, 4)  # Lightning steps at every fourth batch of the epoch now


@pytest.mark.few(0)
def test_the_runs_own_checkpoints_come_before_the_one_it_began_from(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A start script that copies the model anew made each restart begin from it."""
    run_ranks(fit, 1, str(tmp_path / "run"), "full", 2)
    start = tmp_path / "start.ckpt"
    start.write_bytes((tmp_path / "run" / "step=1.ckpt").read_bytes())
    (again,) = run_ranks(fit, 1, str(tmp_path / "run"), "full", 3, 4, str(start))
    assert again["loaded"].endswith("step=2.ckpt")
    (first,) = run_ranks(fit, 1, str(tmp_path / "other"), "full", 2, 4, str(start))
    assert first["loaded"] == str(start)


def test_counts_of_batches_keep_their_place() -> None:
    at_end = {"ready": 6, "started": 6, "processed": 6, "completed": 5}
    assert rescaled(at_end, 2, 6) == {"ready": 18, "started": 18, "processed": 18, "completed": 17}
    assert rescaled(at_end, 2, 1) == {"ready": 3, "started": 3, "processed": 3, "completed": 2}
    assert rescaled(dict.fromkeys(at_end, 0), 2, 1) == dict.fromkeys(at_end, 0)


def saves_to(folder: str | None) -> pl.Trainer:
    callbacks = [ModelCheckpoint(folder)]
    return make_trainer(ScapeStrategy(resume="auto"), max_steps=1, callbacks=callbacks, enable_checkpointing=True)


def refuse(rank: int, world_size: int, folder: str) -> list[str]:
    said: list[str] = []

    def tried(trainer: pl.Trainer) -> None:
        with pytest.raises(ValueError, match="must|needs") as caught:
            trainer.fit(Regression())
        said.append(str(caught.value))

    tried(saves_to(None))
    tried(saves_to("memory://folder"))
    strategy = ScapeStrategy(batches_per_step=4)
    tried(make_trainer(strategy, accumulate_grad_batches=2, max_steps=1))
    strategy = ScapeStrategy(batches_per_step=4)
    tried(make_trainer(strategy, callbacks=[GradientAccumulationScheduler({0: 2})], max_steps=1))
    strategy = ScapeStrategy(batches_per_step=3)
    trainer = make_trainer(strategy, max_steps=1)
    with pytest.warns(UserWarning, match="should be a multiple of the number of ranks, got 3 for 2: .* takes 4"):
        trainer.fit(Regression())
    return said


@pytest.mark.timeout(400)
def test_what_does_not_go_together_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    """On two ranks, so that 3 does not divide; rank 0 alone warns, so only its results are looked at."""
    with pytest.raises(ValueError, match='`resume` must be "auto" or None, got True'):
        ScapeStrategy(resume=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`batches_per_step` must be None or a whole number >= 1, got 0"):
        ScapeStrategy(batches_per_step=0)
    said = run_ranks(refuse, 2, str(tmp_path), expect_errors=True, timeout=300.0)[0]
    assert isinstance(said, list), said
    no_folder, distant, twice, scheduled = said
    assert "got one without `dirpath`" in no_folder
    assert "got one at memory://folder" in distant
    assert "got accumulate_grad_batches=2. Leave that out" in twice
    assert "got a GradientAccumulationScheduler" in scheduled


def test_lightning_scape_torchrun_is_torchrun_with_a_new_store_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the store that is kept, a machine that comes later waits for an address that nobody announces again."""
    seen: list[tuple[list[str], str]] = []
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.setattr("torch.distributed.run.main", lambda given: seen.append((given, os.environ[variable])))
    for before in (None, "0"):
        monkeypatch.delenv(variable, raising=False)
        if before is not None:
            monkeypatch.setenv(variable, before)
        assert commands.main(["torchrun", "--nnodes=1:2", "train.py", "--help"]) == 0
    assert seen == [(["--nnodes=1:2", "train.py", "--help"], "1"), (["--nnodes=1:2", "train.py", "--help"], "0")]
