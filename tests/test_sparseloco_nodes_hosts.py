"""The SparseLoCo strategies with ``local_group_size`` above 1: FSDP2 inside the node, SparseLoCo between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_two_level_fabric import Model, train, wholes
from test_two_level_trainer import Blocks
from torch import Tensor
from trainer_helpers import MARKS, GivenRanks, make_trainer
from two_level_helpers import whole

from lightning_scape import FabricSparseLoCoStrategy, SparseLoCo, SparseLoCoStrategy
from lightning_scape.core.method import find

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*does not have many workers")]
OPTIONS: dict[str, Any] = {"sync_every": 3, "density": 1 / 4, "local_group_size": 2}


def weights(module: Any) -> Tensor:
    return torch.cat([whole(parameter).flatten() for parameter in module.parameters()])


def _resume(rank: int, world_size: int, folder: str, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Through the Trainer; goes on in a new one from the end of the first epoch, which is inside a window."""
    saved = ModelCheckpoint(folder, "at-{epoch}", every_n_epochs=1, save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.5}
    straight, resumed = Blocks(), Blocks(lr=9.0)
    kinds = {"collected": {"async_save": True}, "sharded": {"state_dict_type": "sharded"}}
    strategy = SparseLoCoStrategy(**OPTIONS, **kinds[kind])
    fitted = make_trainer(strategy, callbacks=[saved], enable_checkpointing=True, **options)
    fitted.fit(straight)
    loco = find(fitted.optimizers[0]).loco
    assert (loco.communicator.world_size, loco.node.world_size) == (2, 2)
    assert (loco.progress.steps, loco.progress.exchanges) == (8, 3)  # at its end a fit ends the window
    again = SparseLoCoStrategy(**OPTIONS, **kinds[kind])
    make_trainer(again, **options).fit(resumed, ckpt_path=f"{folder}/at-epoch=0.ckpt")
    return weights(straight), weights(resumed), torch.cat([p.detach().flatten() for p in Blocks().parameters()])


@pytest.mark.parametrize("kind", ["collected", "sharded"])
def test_a_resumed_fit_on_nodes_ends_as_an_uninterrupted_one(run_ranks: Any, tmp_path: Path, kind: str) -> None:
    ends = run_ranks(_resume, 4, str(tmp_path), kind)
    for straight, resumed, untrained in ends:
        assert torch.equal(straight, resumed)
        assert torch.equal(straight, ends[0][0])
        assert straight.shape == untrained.shape
    if kind != "sharded":  # whole tensors, which a model without the strategy takes
        plain = Blocks()
        plain.load_state_dict(torch.load(tmp_path / "at-epoch=0.ckpt", weights_only=True)["state_dict"])


def _fabric(rank: int, world_size: int, folder: str) -> tuple[Tensor, Tensor, float]:
    found = []
    for resumed in (False, True):
        strategy = FabricSparseLoCoStrategy(**OPTIONS, total_steps=5)
        fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=[GivenRanks()])
        fabric.launch()
        torch.manual_seed(rank)
        net = Model()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
        assert SparseLoCo.of(getattr(optimizer, "optimizer", optimizer)) is not None
        state = {"model": model, "optimizer": optimizer}
        if resumed:
            fabric.load(f"{folder}/saved", state)
        else:
            train(fabric, model, optimizer, range(2))
            fabric.save(f"{folder}/saved", state)
        norm = train(fabric, model, optimizer, range(2, 5))
        found.append(wholes(model))
    return found[0], found[1], norm


def test_fabric_on_nodes_saves_inside_a_window_and_goes_on_bit_for_bit(run_ranks: Any, tmp_path: Path) -> None:
    ends = run_ranks(_fabric, 4, str(tmp_path))
    for straight, resumed, norm in ends:
        assert torch.equal(straight, resumed)
        assert torch.equal(straight, ends[0][0])  # `total_steps` has ended the window
        assert norm > 0
    assert ends[0][2] == ends[1][2] != ends[2][2]  # a node clips its own gradient
