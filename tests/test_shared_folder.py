"""Whether nodes see the same folder, tried; what `state_dict_type="auto"` makes of it; what is said of slow saves."""

from __future__ import annotations

import builtins
import io
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_helpers import MARKS, GivenRanks, Regression, make_trainer, weights

from lightning_scape import FabricScapeStrategy, ScapeStrategy
from lightning_scape.checkpoint.dcp import Moved
from lightning_scape.comm.collectives import Communicator
from lightning_scape.hosts import saving
from lightning_scape.hosts.saving import Saving, is_shared

RunRanks = Callable[..., list[Any]]
pytestmark = MARKS


def try_folders(rank: int, world_size: int, folder: str) -> list[bool]:
    ranks, place = Communicator(), Path(folder)
    saving.SECONDS, saving.VISIBLE_SECONDS = 30.0, 0.3
    found = [is_shared(place / "new", ranks), is_shared(place / "a_file" / "below", ranks)]
    assert not rank or found == [True, False]

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    def strange(*_: Any, **__: Any) -> Any:
        return io.BytesIO(b"a stranger's")

    def hanging(*_: Any, **__: Any) -> Any:
        time.sleep(1.5)
        raise OSError

    read, write = saving.open_regular, builtins.open
    for fault in (missing, strange, hanging):
        saving.open_regular = fault if rank == 1 else read
        saving.SECONDS = 0.5 if fault is hanging and rank == 1 else 30.0
        found.append(is_shared(place, ranks))
    saving.open_regular, saving.SECONDS = read, 30.0

    def read_only(path: Any, mode: str = "r", **options: Any) -> Any:
        if "x" in mode and rank == 1:
            raise PermissionError
        return write(path, mode, **options)

    builtins.open = read_only  # type: ignore[assignment]
    found.append(is_shared(place, ranks))
    builtins.open = write
    return [*found, is_shared(place, ranks)]


def test_a_folder_is_shared_where_every_rank_reads_and_writes_in_it_and_nothing_is_left(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a_file").write_text("no folder")
    (folder / "scape-trial").write_text("a stranger's")
    found = run_ranks(try_folders, 2, str(folder))
    assert found == [[True, False, False, False, False, False, True]] * 2
    assert sorted(path.name for path in folder.rglob("*")) == ["a_file", "new", "scape-trial"]


class GivenNodes(GivenRanks):
    """Each rank is on a node of its own."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return dist.get_rank()


NODES = {"devices": 1, "num_nodes": 2}


def save_by_trainer(folder: str, kind: Any = "auto", every: int | None = None) -> tuple[bool, Any]:
    path, module = Path(folder) / "last.ckpt", Regression()
    strategy = ScapeStrategy(0.9, sparsity_warmup_steps=0, state_dict_type=kind, cluster_environment=GivenNodes())
    keep = ModelCheckpoint(folder, "last", every_n_train_steps=every, enable_version_counter=False)
    trainer = L.Trainer(
        **NODES,  # type: ignore[arg-type]
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module)
    assert path.exists()
    first, second = Communicator().all_gather_object(strategy.checkpoint_bytes)
    # An object that was sent may be pickled a little longer; rank 0 knows how long torch makes them.
    assert 0.98 * second.sent <= first.received < 3 * second.sent
    assert 0.98 * second.received <= first.sent <= 3 * second.received
    plans = path.is_dir()
    assert (first.sent > 0, first.received > 0) == (plans, True)
    return path.is_dir(), weights(module)


def save_by_fabric(folder: str, kind: Any = "auto", times: int = 1, **options: Any) -> bool:
    strategy = FabricScapeStrategy(0.9, sparsity_warmup_steps=0, state_dict_type=kind)
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, plugins=[GivenNodes()], **NODES)  # type: ignore[arg-type]
    fabric.launch()
    model = torch.nn.Linear(3, 3)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    path = Path(folder) / "saved"
    for _ in range(times):
        fabric.save(path, {"model": model, "optimizer": optimizer}, **options)
    fabric.barrier()
    fabric.load(path, {"model": model, "optimizer": optimizer})
    return path.is_dir()


def chooses(rank: int, world_size: int, folder: str) -> list[bool]:
    found, ended = save_by_trainer(f"{folder}/0")
    loaded = Regression()
    make_trainer(max_epochs=1).fit(loaded, ckpt_path=f"{folder}/0/last.ckpt")  # nothing is left to train
    assert torch.equal(weights(loaded), ended)
    kinds = [found, save_by_fabric(f"{folder}/1"), save_by_fabric(f"{folder}/2", filter={"model": lambda *_: True})]
    saving.is_shared = lambda *_: False
    return [*kinds, save_by_trainer(f"{folder}/3")[0], save_by_fabric(f"{folder}/4")]


def test_auto_saves_directories_where_several_nodes_share_the_folder(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(chooses, 2, str(tmp_path)) == [[True, True, False, False, False]] * 2


def test_auto_saves_files_on_one_node(tmp_path: Path) -> None:
    own = Saving("auto")
    own.settle([tmp_path], nodes=1)
    assert not own.sharded
    own.settle([None], nodes=2)
    assert not own.sharded
    own.settle([tmp_path], nodes=2)
    assert own.sharded
    assert list(tmp_path.iterdir()) == []


def waits(rank: int, world_size: int, folder: str) -> list[list[str]]:
    saving.ENOUGH_SECONDS = saving.LONG_SHARE = 0.0
    found = []
    for save in (
        lambda: save_by_trainer(f"{folder}/trainer", "full", every=1),
        lambda: save_by_fabric(f"{folder}/fabric", "full", times=4),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save()
        found.append([str(each.message) for each in caught if "ranks waited" in str(each.message)])
    return found


def test_nodes_that_wait_for_files_are_told_once_of_both_ways_out(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(waits, 2, str(tmp_path))
    assert second == [[], []]
    for (text,), host in zip(first, ("trainer", "fabric"), strict=True):
        assert "`async_save=True`" in text
        assert f"which all see '{tmp_path}/{host}'" in text


class Clock:
    """In the place of `time.perf_counter`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("collecting", "said"), [(0.2, False), (0.6, True)])
def test_where_training_waits_for_checkpoints_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, collecting: float, said: bool
) -> None:
    clock, own, moved = Clock(), Saving("full"), Moved()
    monkeypatch.setattr(saving.time, "perf_counter", clock)
    told = []
    for trained in (0.0, 4.0, 7.0, 10.0):  # the first save counts for nothing, ten seconds of training are enough
        clock.now += trained
        with own.collecting():
            clock.now += collecting if trained else 9.0
        moved.received += 36_000_000
        told.append(own.advice(tmp_path, moved))
    assert [bool(text) for text in told] == [False, False, said, False]
    if said:
        assert str(told[2]).startswith("In 11.00 s of training ranks waited 1.20 s for 72 MB of checkpoints to come to")
        assert "`async_save=True`" in str(told[2])
        assert (
            f'`state_dict_type="sharded"` writes them where the ranks are, which all see {str(tmp_path)!r}' in told[2]
        )
