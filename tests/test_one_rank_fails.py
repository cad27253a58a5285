"""What fails on one rank fails on all of them, at once: saving, loading, setting up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from trainer_helpers import MARKS, Regression, make_trainer

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeStrategy,
    SparseLoCoStrategy,
)
from lightning_scape.checkpoint import saver
from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.together import Together
from lightning_scape.hosts import setup
from lightning_scape.hosts.checkpoint_io import ScapeCheckpointIO

pytestmark = MARKS
SOON = 20.0
"""Seconds: the timeout of a collective is six times as long."""


def strategy(method: str, **options: Any) -> ScapeStrategy:
    if method == "sparseloco":
        return SparseLoCoStrategy(sync_every=4, **options)
    return ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0, **options)


def mistake(*_: Any, **__: Any) -> Any:
    raise KeyError("one rank's mistake")


class Saves(Callback):
    """Saves in mid-fit, where one thing goes wrong on rank 1 (what cannot be pickled: on rank 0, which writes)."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what, self.message = path, what, ""

    def state_dict(self) -> dict[str, Any]:
        return mistake() if self.what == "a callback's state" and torch.distributed.get_rank() == 1 else {}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if self.what == "on_save_checkpoint" and trainer.global_rank == 1:
            mistake()
        if self.what == "what cannot be pickled":
            checkpoint["mine"] = lambda: None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step != 3:
            return
        if self.what == "a hook on the state dict" and trainer.global_rank == 1:
            pl_module.register_state_dict_post_hook(mistake)
        if self.what == "a hook on the optimizer's" and trainer.global_rank == 1:
            trainer.optimizers[0].register_state_dict_post_hook(mistake)
        if self.what == "the optimizer's state" and trainer.global_rank == 1:
            trainer.optimizers[0].state_dict = mistake
        began = time.monotonic()
        try:
            trainer.save_checkpoint(self.path)
        except Exception as error:
            self.message = str(error)
        assert time.monotonic() - began < SOON
        trainer.should_stop = True


def _save(rank: int, world_size: int, path: str, method: str, kind: str, what: str) -> str:
    callback = Saves(path, what)
    make_trainer(strategy(method, state_dict_type=kind), callbacks=[callback]).fit(Regression())
    return callback.message


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("what", "method", "kind"),
    [
        ("a callback's state", "scape", "full"),
        ("a callback's state", "sparseloco", "sharded"),
        ("on_save_checkpoint", "scape", "sharded"),
        ("on_save_checkpoint", "sparseloco", "full"),
        ("a hook on the state dict", "scape", "full"),
        ("a hook on the optimizer's", "scape", "sharded"),
        ("what cannot be pickled", "scape", "full"),
        ("what cannot be pickled", "sparseloco", "sharded"),
    ],
)
def test_what_fails_in_saving_on_one_rank_fails_on_all(
    run_ranks: Any, tmp_path: Path, what: str, method: str, kind: str
) -> None:
    messages = run_ranks(_save, 2, str(tmp_path / "a.ckpt"), method, kind, what)
    expected = "lambda" if what == "what cannot be pickled" else "one rank's mistake"
    assert all(expected in message for message in messages), messages
    assert not (tmp_path / "a.ckpt").exists()


def test_an_inner_optimizer_that_gives_no_state_fails_the_save_on_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    messages = run_ranks(_save, 2, str(tmp_path / "a.ckpt"), "sparseloco", "full", "the optimizer's state")
    assert all("one rank's mistake" in message for message in messages), messages


def _load(rank: int, world_size: int, path: str, method: str, kind: str) -> str:
    first = make_trainer(strategy(method, state_dict_type=kind))
    first.fit(Regression())
    first.save_checkpoint(path)
    if rank == 1:
        ScapeCheckpointIO.load_checkpoint = saver.SavedContent.model = mistake
    began = time.monotonic()
    try:
        make_trainer(strategy(method), max_epochs=2).fit(Regression(), ckpt_path=path)
    except KeyError as error:
        assert time.monotonic() - began < SOON
        return str(error)
    return ""


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "kind"), [("scape", "full"), ("sparseloco", "sharded")])
def test_what_one_rank_cannot_read_fails_on_all(run_ranks: Any, tmp_path: Path, method: str, kind: str) -> None:
    messages = run_ranks(_load, 2, str(tmp_path / "a.ckpt"), method, kind)
    assert all("one rank's mistake" in message for message in messages), messages


def _fabric(rank: int, world_size: int, path: str, name: str, kind: str) -> list[str]:
    kinds = {"scape": FabricScapeStrategy, "sparseloco": FabricSparseLoCoStrategy}
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=kinds[name](state_dict_type=kind))
    fabric.launch()
    model, optimizer = fabric.setup(module := nn.Linear(4, 2), torch.optim.AdamW(module.parameters()))
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "note": 1}
    fabric.save(path, state)

    class Broken:
        def state_dict(self) -> Any:
            return mistake() if rank == 1 else {}

        def load_state_dict(self, _: Any) -> None: ...

    messages = []
    began = time.monotonic()
    for attempt in (
        lambda: fabric.save(f"{path}.other", {"broken": Broken(), **state}),
        lambda: fabric.save(f"{path}.other", {**state, "lambda": lambda: None}),
        lambda: fabric.load(path if rank == 0 else f"{path}.missing", state),
    ):
        try:
            attempt()
            messages.append("")
        except Exception as error:
            messages.append(str(error))
    assert time.monotonic() - began < SOON
    return messages


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "kind"), [("scape", "full"), ("sparseloco", "sharded"), ("sparseloco", "full")])
def test_under_fabric_what_fails_on_one_rank_fails_on_all(run_ranks: Any, tmp_path: Path, name: str, kind: str) -> None:
    for saved, pickled, loaded in run_ranks(_fabric, 2, str(tmp_path / "a"), name, kind):
        assert "one rank's mistake" in saved
        assert "lambda" in pickled
        assert ("not found" in loaded) if kind == "full" else ("on rank 0 and none on rank 1" in loaded)


def _different_modules(rank: int, world_size: int) -> None:
    setup.start_equal(nn.Linear(4, 2 + rank))


def test_ranks_that_build_different_modules_are_told_so(run_ranks: Any) -> None:
    for error in run_ranks(_different_modules, 2, expect_errors=True):
        assert isinstance(error, ValueError)
        assert "(3, 4)" in str(error)
        assert "on rank 1" in str(error)


def _sees_otherwise(rank: int, world_size: int, folder: str) -> bool:
    ranks = Communicator()
    path = Path(folder) if rank == 0 else Path(folder) / "not there"
    return saver.is_directory(path, ranks)


def test_a_folder_that_one_rank_does_not_see_is_an_error_on_all(run_ranks: Any, tmp_path: Path) -> None:
    for error in run_ranks(_sees_otherwise, 2, str(tmp_path), expect_errors=True):
        assert "on rank 0 and none on rank 1" in str(error)


def _nested(rank: int, world_size: int, where: str) -> str:
    """Rank 1 fails before, in, or after a call that tells all ranks, inside another one."""
    ranks, told = Communicator(), ""

    def act() -> None:
        if where == "before" and rank == 1:
            mistake()
        ranks.raise_on_all_ranks(lambda: mistake() if where == "in" and rank == 1 else None)
        if where == "after" and rank == 1:
            mistake()

    try:
        ranks.raise_on_all_ranks(act)
    except KeyError as error:
        told = str(error)
    try:
        together = Together()
        with together.inside():
            together.agree()
            act()
    except KeyError as error:
        told += str(error)
    assert ranks.all_gather_object(rank) == [0, 1]  # nobody is a message behind
    return told


@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_an_error_is_told_once_and_no_rank_is_left_a_message_behind(run_ranks: Any, where: str) -> None:
    assert [told.count("one rank's mistake") for told in run_ranks(_nested, 2, where)] == [2, 2]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    with pytest.warns(UserWarning, match="Remove it by hand"):
        saver.Saver(asynchronous=False).after(refuse)


class BuiltApart(Regression):
    """Rank 1 builds what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        if self.global_rank == 0:
            return super().configure_optimizers()
        if self.kind == "a mistake":
            mistake()
        if self.kind == "another":
            return torch.optim.SGD(self.parameters())
        if self.kind == "stepped":
            optimizer = super().configure_optimizers()
            self.net[0].weight.grad = torch.ones_like(self.net[0].weight)
            optimizer.step()
            return optimizer
        return None


def _build_apart(rank: int, world_size: int, method: str, kind: str) -> None:
    make_trainer(strategy(method)).fit(BuiltApart(kind))


@pytest.mark.parametrize(
    ("method", "kind", "expected"),
    [
        ("scape", "a mistake", "one rank's mistake"),
        ("scape", "none", "got none on rank 1 and AdamW on rank 0"),
        ("sparseloco", "another", "got SGD on rank 1 and AdamW on rank 0"),
        ("scape", "stepped", "got one on rank 1 and none on rank 0"),
    ],
)
def test_optimizers_that_ranks_build_apart_are_an_error_on_all(
    run_ranks: Any, method: str, kind: str, expected: str
) -> None:
    for error in run_ranks(_build_apart, 2, method, kind, expect_errors=True, timeout=SOON):
        assert expected in str(error)


def _resume_apart(rank: int, world_size: int, path: str) -> None:
    make_trainer(strategy("scape")).fit(Regression(), ckpt_path=path if rank == 0 else None)


def test_a_checkpoint_that_only_some_ranks_find_is_an_error_on_all(run_ranks: Any, tmp_path: Path) -> None:
    for error in run_ranks(_resume_apart, 2, str(tmp_path / "a.ckpt"), expect_errors=True, timeout=SOON):
        assert "on rank 0 and none on rank 1" in str(error)


OPTIONS: list[tuple[str, Any, str]] = [
    ("state_dict_type", "sharded", "state_dict_type is 'sharded' on rank 1 and 'full' on rank 0"),
    ("async_save", True, "async_save is True on rank 1"),
    ("broadcast_buffers", True, "broadcast_buffers is True on rank 1"),
    ("wrap", ["Linear"], "the number of wrap is 1 on rank 1"),
    ("resume", "auto", "resume is 'auto' on rank 1"),
    ("method", "sparseloco", "method is 'sparseloco' on rank 1"),
]


def _options_apart(rank: int, world_size: int) -> list[str]:
    """Strategies whose options differ, under the Trainer and under Fabric: what each says before it trains."""
    messages = []
    for name, value, _ in OPTIONS:
        given, method = ({}, "scape") if not rank else ({}, value) if name == "method" else ({name: value}, "scape")
        with pytest.raises(ValueError, match="must be set up alike") as caught:
            make_trainer(strategy(method, **given)).fit(Regression())
        messages.append(str(caught.value))
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=FabricScapeStrategy(async_save=bool(rank)))
    with pytest.raises(ValueError, match="async_save"):
        fabric.launch()
    return messages


def test_options_by_which_ranks_choose_their_messages_must_be_the_same(run_ranks: Any) -> None:
    for messages in run_ranks(_options_apart, 2, timeout=SOON):
        for message, (_, _, words) in zip(messages, OPTIONS, strict=True):
            assert words in message
