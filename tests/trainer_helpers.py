"""What tests under Lightning's Trainer share: ranks that exist already, models, trainers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_scape import AdamS, ScapeStrategy

MARKS = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter"),  # it looks at sys.argv, which is pytest's
    pytest.mark.filterwarnings("ignore:No seed found"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning:torch"),  # SequentialLR's own
]
"""Of every module that uses a Trainer: what Lightning says, and is meant."""
WIDTH, BATCH, BATCHES = 7, 4, 6
"""Features; samples per rank and batch; batches per rank and epoch, if there are two ranks."""


def use_all(rank: int, world_size: int, uses: list[Callable[[int, str, str], None]], method: str, folder: str) -> int:
    """For ``run_ranks``: some functions one after the other, each in a folder of its own; how many they were."""
    for use in uses:
        place = Path(folder, use.__name__)
        place.mkdir(exist_ok=True)
        use(rank, method, str(place))
        dist.barrier()
    return len(uses)


class GivenRanks(ClusterEnvironment):
    """The processes and their process group are there already: `run_ranks` made them, without any port."""

    creates_processes_externally = True
    main_address, main_port = "localhost", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    local_rank = global_rank

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


class Regression(pl.LightningModule):
    """Two layers, and every option that some test needs; `rank` makes what may differ between ranks differ."""

    def __init__(
        self,
        optimizer: str = "AdamW",
        lr: float = 1e-2,
        scheduler: str | None = None,
        batch_norm: bool = False,
        fail_at: int | None = None,
        inf_at: int | None = None,
    ) -> None:
        super().__init__()
        # Ranks start unequal: somebody has to see to it that they are not.
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        norm = [nn.BatchNorm1d(5)] if batch_norm else []
        self.net = nn.Sequential(nn.Linear(WIDTH, 5), *norm, nn.Tanh(), nn.Linear(5, 3))
        self.optimizer, self.lr, self.scheduler = optimizer, lr, scheduler
        self.fail_at, self.inf_at = fail_at, inf_at
        self.steps_seen = 0
        self.lrs: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.fail_at == batch_idx:
            raise KeyError("the model's own mistake")
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("constant", 1.0)
        self.log("loss", loss.detach())
        for group in self.trainer.optimizers[0].param_groups[:1]:
            self.lrs.append((group["lr"], tuple(group.get("betas", ()))))
        if self.inf_at == batch_idx and self.global_rank == 1:
            loss = loss * float("inf")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters(), self.lr)
        if self.scheduler is None:
            return optimizer
        scheduler, interval = SCHEDULERS[self.scheduler]
        config = {"scheduler": scheduler(optimizer), "interval": interval, "monitor": "constant"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def train_dataloader(self) -> DataLoader:
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class TwoOptimizers(Regression):
    """Manual optimization: each layer has an optimizer of its own, toggled as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net[0].parameters(), 1e-2), AdamS(self.net[2].parameters(), 1e-2)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()


class Recorder(DummyLogger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith(("scape", "sparseloco")) for name in metrics):
            self.records.append((step, dict(metrics)))


def loader(batch: int = BATCH, samples: int = 2 * BATCH * BATCHES) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3] * 2 + 1), batch_size=batch)


def make_trainer(strategy: Any = None, **options: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    options = quiet | {"max_epochs": 1, "limit_val_batches": 0, "plugins": []} | options
    options["plugins"] = [*options["plugins"], *([GivenRanks()] if dist.is_initialized() else [])]
    options.setdefault("devices", dist.get_world_size() if dist.is_initialized() else 1)
    # Sparse from the first step: by default so short a run would be warm-up to its end.
    strategy = ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0) if strategy is None else strategy
    return pl.Trainer(strategy=strategy, accelerator="cpu", **options)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in module.parameters()])


def gathered(tensor: Tensor) -> Tensor:
    """A row for each rank."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return torch.stack(everyone)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "AdamS": lambda params, lr: AdamS(params, lr, weight_decay=0.1),
    "fused": lambda params, lr: torch.optim.AdamW(params, lr, fused=True),
    "SGD": torch.optim.SGD,
    "LBFGS": torch.optim.LBFGS,
}


def _sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 3)], [3])


def _chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Any] = {
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step), "step"),
    "one-cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12), "step"),
    "sequential": (_sequential, "step"),
    "chained": (_chained, "step"),
    "plateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0), "epoch"),
}
