"""A job under SLURM that is stopped and goes on: for tests/test_requeue.py and tests/test_slurm.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_scape import ScapeStrategy, SparseLoCoStrategy, newest_checkpoint


class Module(LightningModule):
    """Signals itself in the middle of one batch; each batch takes `pause` seconds at least."""

    def __init__(self, batch_of_signal: int | None, pause: float = 0.0) -> None:
        super().__init__()
        self.pause = pause
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
        self.batch_of_signal = batch_of_signal

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx + 1 == self.batch_of_signal:
            time.sleep(float(os.environ.get("LATE", "0")) * self.trainer.global_rank)
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.batch_of_signal == -1 and batch_idx == 11:  # of this start no rank lives on
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause)
        # Of each step its own, whatever the loader gives: Lightning starts most loaders anew within an epoch.
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + self.trainer.global_rank)
        features = torch.randn(4, 16, generator=generator)
        return (self.layers(features) - features.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Count(Callback):
    """Of batches, in checkpoints. A start that is given -1 for its steps takes five more than it finds."""

    batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first = trainer.global_step
        if trainer.max_steps == -1:
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 5

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches += 1
        if trainer.global_step == self.first + 1:  # a signal before that finds a rank that has to import and compile
            print(f"begins at step {self.first}", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def main(folder: Path, method: str, steps: int, signals: list[int | None], options: dict[str, Any]) -> None:
    rank, ranks, nodes = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "NNODES"))
    accumulate, pause = options.pop("accumulate", 1), options.pop("pause", 0.0)
    every = options.pop("save_every", 5)
    newest = newest_checkpoint(folder / "saved") if options.pop("newest", False) else None
    count = Count()
    if method == "scape":
        strategy = ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0, timeout=60, **options)
    else:
        strategy = SparseLoCoStrategy(sync_every=3, density=0.5, timeout=60, **options)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            count,
            ModelCheckpoint(folder / "saved", every_n_train_steps=every, save_top_k=-1, save_on_exception=True),
        ],
    )
    module = Module(signals[rank] if signals else None, pause)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(400, 1)), batch_size=4), ckpt_path=newest)
    values = [parameter.detach().flatten().tolist() for parameter in module.parameters()]
    (folder / f"ended-{rank}.json").write_text(
        json.dumps({"step": trainer.global_step, "batches": count.batches, "values": values})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5]))
