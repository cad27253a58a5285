"""A job that goes on when a machine is lost, and takes it in again when it comes back.

On every machine, and again on one that comes back (by systemd, Kubernetes, ...):

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 10 \
        --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id NAME examples/elastic.py --out /shared/folder

The ranks that are left start anew from the newest checkpoint that is complete, and a step keeps its global batch: each
of them takes more batches. (Without the variable a machine that comes late cannot join, under torch 2.13.)
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from python_source import VOCABULARY, PythonSource
from torch import Tensor, nn

from lightning_scape import ScapeStrategy, newest_checkpoint

BATCHES = 12
"""Of a step, on all ranks together; 1, 2, 3 and 4 ranks share them equally."""
SAVE_EVERY = 24
"""Steps; a multiple of BATCHES, so that a checkpoint lies between two steps for any of these numbers of ranks."""


class NextByte(L.LightningModule):
    """Guesses a byte from the eight before it."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU())
        self.net = hidden.append(nn.Linear(64, VOCABULARY))

    def training_step(self, batch: Tensor) -> Tensor:
        windows = batch.unfold(1, 9, 1).flatten(0, 1)
        return nn.functional.cross_entropy(self.net(windows[:, :8]), windows[:, 8])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Progress(Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.told = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step > self.told:  # else batches are accumulated
            self.told = trainer.global_step
            loss = outputs["loss"].item() * trainer.accumulate_grad_batches
            print(f"step {trainer.global_step} on {trainer.world_size} ranks: loss {loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/elastic"), help="folder of checkpoints, for all machines")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # both may change with every start
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    trainer = L.Trainer(
        strategy=ScapeStrategy(sparsity=0.9, timeout=120),  # so many seconds until a silent machine counts as lost
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        accumulate_grad_batches=BATCHES // (devices * nodes),
        max_steps=args.steps,
        logger=False,
        callbacks=[ModelCheckpoint(args.out, every_n_train_steps=SAVE_EVERY), Progress()],
        enable_progress_bar=False,
    )
    L.seed_everything(0)
    trainer.fit(NextByte(), PythonSource(2, 64), ckpt_path=newest_checkpoint(args.out))


if __name__ == "__main__":
    main()
