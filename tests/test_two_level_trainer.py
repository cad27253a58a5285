"""ScapeStrategy with ``local_group_size`` above 1: FSDP2 inside the node, SCAPE between nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from trainer_helpers import MARKS, WIDTH, Regression, loader, make_trainer, ours
from two_level_helpers import whole

from lightning_scape import ScapeStrategy

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Blocks(Regression):
    """Two blocks in a list; the options make what a user may do."""

    def __init__(self, kind: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind
        if kind != "meta":
            self.net = self.make()

    def make(self) -> nn.Module:
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tail = nn.Linear(WIDTH, 3)
        self.extra = nn.Linear(WIDTH, 3)
        if self.kind == "tied":
            self.extra.weight = self.tail.weight
            self.blocks[1].up.weight = self.blocks[0].up.weight
        if self.kind == "frozen":
            self.blocks[0].requires_grad_(False)
            self.tail.bias.requires_grad_(False)
        return nn.Identity()

    def configure_model(self) -> None:
        if self.kind == "meta" and not hasattr(self, "blocks"):
            with self.trainer.init_module(empty_init=True):
                self.net = self.make()
        if self.kind == "by the user":
            for block in self.blocks:
                fully_shard(block, mesh=self.trainer.strategy.device_mesh["shard"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        hidden = inputs
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.kind == "checkpointing" else block(hidden)
        loss = nn.functional.mse_loss(self.tail(hidden) + self.extra(hidden), targets)
        self.log("constant", 1.0)
        return loss * float("inf") if self.inf_at == batch_idx and self.global_rank == 3 else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        hidden = self.blocks[1](self.blocks[0](batch[0]))
        self.log("val_loss", nn.functional.mse_loss(self.tail(hidden), batch[1]), sync_dist=True)

    test_step = validation_step

    def train_dataloader(self) -> DataLoader:
        return loader(samples=4 * 4 * 4)

    val_dataloader = test_dataloader = train_dataloader


def strategy(size: Any, sparsity: float = 0.0, **options: Any) -> ScapeStrategy:
    warmup = {"sparsity_warmup_steps": 0} if sparsity else {}
    return ScapeStrategy(sparsity, local_group_size=size, wire_dtype="fp32", clip_norm="local", **warmup, **options)


def wholes(module: nn.Module) -> Tensor:
    return torch.cat([whole(parameter).double().flatten() for parameter in module.parameters()])


def _fit(rank: int, world_size: int, size: Any, model: dict[str, Any], how: dict[str, Any]) -> tuple[Tensor, int]:
    how = dict(how)
    chosen = strategy(size, how.pop("sparsity", 0.0), **how.pop("options", {}))
    module = Blocks(**model)
    module.automatic_optimization = True
    trainer = make_trainer(chosen, max_epochs=2, **how)
    trainer.fit(module)
    assert (type(module).__name__ != "Blocks") == (size != 1)
    return wholes(module), ours(trainer).engine.clipping.skipped_total


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "32-true": ({}, {}),
    "fewer gathers": ({}, {"options": {"reshard_after_forward": False}}),
    "checkpointing": ({"kind": "checkpointing"}, {}),
    "tied": ({"kind": "tied"}, {}),
    "frozen": ({"kind": "frozen"}, {}),
    "by the user": ({"kind": "by the user"}, {}),
    "accumulation": ({}, {"accumulate_grad_batches": 2}),
    "scheduler": ({"scheduler": "sequential"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_at_density_1_it_trains_as_flat_ranks_do(run_ranks: Any, case: str) -> None:
    model, how = CASES[case]
    if model.get("kind") == "by the user":
        flat = run_ranks(_fit, 4, 1, {}, how)
    else:
        flat = run_ranks(_fit, 4, 1, model, {**how, "options": {}})
    nodes = run_ranks(_fit, 4, 2, model, how)
    for (mine, _), (theirs, _) in zip(nodes, flat, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)  # sums over ranks in another order
        assert torch.equal(mine, nodes[0][0])
