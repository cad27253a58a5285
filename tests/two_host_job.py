"""A job of a few steps for tests/test_two_hosts.py: what a user's script with a Trainer looks like to a launcher."""

from __future__ import annotations

import sys
from datetime import timedelta

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_scape import ScapeOptimizer, ScapeStrategy


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(40, 30)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(nodes: int, timeout: float) -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=ScapeStrategy(sparsity=0.9, timeout=timedelta(seconds=timeout), sparsity_warmup_steps=0),
        accelerator="cpu",
        devices=1,
        num_nodes=nodes,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 40)), batch_size=4))
    weights = module.net.weight.detach().double()
    sent = ScapeOptimizer.of(trainer.optimizers[0]).stats.bytes_total
    print(f"rank {trainer.global_rank} of {trainer.world_size} steps {trainer.global_step} sent {sent}", flush=True)
    print(f"digest {weights.sum().item():.12e} {weights.square().sum().item():.12e}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
