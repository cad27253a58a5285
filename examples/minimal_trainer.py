"""SCAPE under Lightning's Trainer: one argument.

python examples/minimal_trainer.py      # two CPU processes, half a minute, nothing to download
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_scape import ScapeMonitor, ScapeStrategy


class Addition(LightningModule):
    """Learns to add 16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        numbers, sums = batch
        loss = nn.functional.mse_loss(self.net(numbers), sums)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    numbers = torch.randn(16_384, 16, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ScapeStrategy(sparsity=0.99),  # was: "ddp"
        callbacks=[ScapeMonitor()],  # what each step sends and waits for
        max_epochs=1,
        gradient_clip_val=1.0,
        default_root_dir="out/minimal_trainer",
    )
    trainer.fit(Addition(), DataLoader(TensorDataset(numbers, numbers.sum(1, keepdim=True)), batch_size=32))
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.3f}; it was about 16")
