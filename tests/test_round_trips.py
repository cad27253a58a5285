"""A state goes in as it came out, on every rank: also where it was collected on one."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from test_sparseloco import SPARSE, flat, gradient, model
from torch import Tensor, nn
from trainer_helpers import BATCHES, MARKS, GivenRanks, Regression, make_trainer, weights

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCo,
    SparseLoCoStrategy,
)

pytestmark = MARKS


def _fabric(rank: int, world_size: int, method: str) -> list[Tensor]:
    ends = []
    for trips in (False, True):
        plan: Any = (
            FabricScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0)
            if method == "scape"
            else FabricSparseLoCoStrategy(sync_every=4, density=0.25, overlap_steps=2 if method == "overlap" else 0)
        )
        fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=plan, plugins=[GivenRanks()])
        fabric.launch()
        torch.manual_seed(0)
        net = nn.Linear(20, 15)
        net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
        for step in range(10):
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + rank))
            optimizer.zero_grad()
            fabric.backward(net(x).square().mean())
            optimizer.step()
            if trips and step in (4, 6):  # the first while an exchange is under way
                optimizer.load_state_dict(optimizer.state_dict())
        ends.append(weights(net))
    return ends


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["scape", "sparseloco", "overlap"])
def test_fabrics_own_round_trip_loses_no_ranks_moments(run_ranks: Any, method: str) -> None:
    """Rank 0 had the whole state, and the others an empty one: they lost theirs, without a word."""
    for straight, tripped in run_ranks(_fabric, 2, method):
        assert torch.equal(straight, tripped)


def _collected(rank: int, world_size: int, method: str) -> list[Tensor]:
    """Plain process groups: the state is on rank 1 alone, and others hand in nothing."""
    ends = []
    for trips in (False, True):
        net = model()
        dense = torch.optim.AdamW(net.parameters(), 1e-2)
        config = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0)
        optimizer = ScapeOptimizer.from_optimizer(dense, config) if method == "scape" else dense
        loco: Any = optimizer if method == "scape" else SparseLoCo(dense, **SPARSE)
        for step in range(7):
            gradient(net, rank, step)
            optimizer.step()
            if trips and step == 4:
                loco.consolidate_state_dict(to=1)
                loco.load_state_dict(loco.state_dict() if rank == 1 else None)
        ends.append(flat(net))
    return ends


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_a_state_collected_on_one_rank_goes_back_to_all(run_ranks: Any, method: str) -> None:
    for straight, tripped in run_ranks(_collected, 2, method):
        assert torch.equal(straight, tripped)


class Fresh(Regression):
    clear = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.clear:
            checkpoint["optimizer_states"] = []
            checkpoint["lr_schedulers"] = []

    def on_train_start(self) -> None:
        self.begun = weights(self)


def _emptied(rank: int, world_size: int, folder: str, method: str, kind: str) -> Any:
    def strategy() -> Any:
        if method == "scape":
            return ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0, state_dict_type=kind)  # type: ignore[arg-type]
        return SparseLoCoStrategy(sync_every=4, density=0.25, state_dict_type=kind)  # type: ignore[arg-type]

    trained, again = Fresh(), Fresh()
    trainer = make_trainer(strategy())
    trainer.fit(trained)
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    again.clear = True
    trainer = make_trainer(strategy(), max_epochs=2)
    trainer.fit(again, ckpt_path=f"{folder}/saved.ckpt")
    assert torch.equal(again.begun, weights(trained))
    taken = [int(state["step"]) for state in trainer.optimizers[0].state.values() if "step" in state]
    return trainer.global_step, taken, weights(again)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "kind"), [("scape", "full"), ("scape", "sharded"), ("sparseloco", "full"), ("sparseloco", "sharded")]
)
def test_emptied_optimizer_states_keep_the_weights_and_begin_the_optimizer_anew(
    run_ranks: Any, tmp_path: Any, method: str, kind: str
) -> None:
    first, second = run_ranks(_emptied, 2, str(tmp_path), method, kind)
    assert torch.equal(first[2], second[2])
    assert first[0] == second[0] == 2 * BATCHES
    assert set(first[1]) <= {BATCHES}  # not those of the first fit


class Unfreezes(Regression):
    """Sets optimizers up again in the middle of a window, with a layer more."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (0, 0):
            self.net[0].requires_grad_(False)
            self.trainer.strategy.setup_optimizers(self.trainer)
        if (self.current_epoch, batch_idx) == (1, 1):
            self.before = self.net[0].weight.detach().clone()
            self.net[0].requires_grad_(True)
            self.trainer.strategy.setup_optimizers(self.trainer)


def _unfreezes(rank: int, world_size: int, method: str) -> tuple[Tensor, bool]:
    overlap = 2 if method == "overlap" else 0
    strategy: Any = SparseLoCoStrategy(sync_every=4, density=0.25, overlap_steps=overlap)
    if method == "scape":
        strategy = ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0)
    module = Unfreezes()
    make_trainer(strategy, max_epochs=3).fit(module)
    return weights(module), bool((module.before != module.net[0].weight).any())


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["scape", "sparseloco", "overlap"])
def test_optimizers_may_be_set_up_again_in_mid_training(run_ranks: Any, method: str) -> None:
    first, second = run_ranks(_unfreezes, 2, method)
    assert torch.equal(first[0], second[0])
    assert first[1]
