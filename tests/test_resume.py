"""Stop, resume, go on: everything is bitwise what it would have been. Both hosts, both formats, every precision."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_sharded import assert_equal
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_helpers import GivenRanks, scape_optimizers

from lightning_scape import FabricScapeStrategy, ScapeConfig, ScapeOptimizer, ScapeStrategy
from lightning_scape.checkpoint.saver import consolidate
from lightning_scape.hosts import setup

RunRanks = Callable[..., list[Any]]
WIDTH, STEPS, EPOCH, ACCUMULATE = 9, 11, 7, 2
CONFIG = ScapeConfig(sparsity=0.9, block_size=10, dense_steps=2, sparsity_warmup_steps=3, check_replicas_every=1)
UPDATES = {"32-true": "adamw", "bf16-true": "adamw", "bf16-mixed": "adams"}
"""What each precision is tested with; AdamW is what the hosts are given."""
BAD_STEP = 7
"""Its gradient is NaN on rank 1: the step is skipped."""
STOPS = {
    1: "inside dense_steps, in the middle of an epoch",
    2: "before the first mask",
    4: "inside the sparsity warm-up, at the end of an epoch",
    6: "after the warm-up, right after a mask was made",
    8: "after the skipped step, at the end of an epoch",
    9: "between two masks",
}


class Loader:
    """Shuffled, alike on all ranks but for their part, and able to go on in the middle of an epoch."""

    def __init__(self, rank: int, world_size: int, draws: bool = False) -> None:
        self.rank, self.world_size = rank, world_size
        self.draws = draws
        self.data = torch.randn(EPOCH * world_size * 4, WIDTH, generator=torch.Generator().manual_seed(5))
        self.epoch = self.taken = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[Tensor]:
        if self.draws:  # as torch's DataLoader does, for the seeds of its workers
            torch.rand(1)
        while self.taken < EPOCH:
            order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
            first = (self.taken * self.world_size + self.rank) * 4
            self.taken += 1
            yield self.data[order[first : first + 4]]
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class Model(nn.Module):
    """With a parameter that is in use at times: in some steps on one rank, in some on none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Dropout(0.3), nn.Linear(33, 2))
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, batch: Tensor, gained: bool) -> Tensor:
        out = self.layers(batch)
        return out * self.gain if gained else out


def build_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Model()


def loss_of(model: nn.Module, batch: Tensor, spoil: bool) -> Tensor:
    noise = random.random() + float(np.random.rand())
    batch = batch.to(next(model.parameters()).dtype)
    loss = (model(batch, noise > 1.2) - batch[:, :2].sin() * noise).square().mean()
    return loss * float("nan") if spoil else loss


def everything(optimizer: ScapeOptimizer) -> dict[str, Any]:
    """All that training depends on, on this rank."""
    own = optimizer.sharded_state_dict()
    held = {key: chunk.tensor.clone() for key, chunk in own.tensors.items()}
    params = {f"parameter {i}": p.detach().clone() for i, p in enumerate(optimizer.engine.parameters.tensors)}
    lrs = [group["lr"] for group in optimizer.param_groups]
    common = {key: value for key, value in own.common.items() if key != "names"}
    return {**held, **params, "lr": lrs, "common": common, "torch": torch.rand(3), "python": random.random()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, f"{name} differs: {value} and {other[name]}"


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# ------------------------------------------------------------------------------------------------ Trainer


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()
        self.batches: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.batches.append(float(batch.sum()))
        bad = self.global_step == BAD_STEP - 1 and self.global_rank == 1
        return loss_of(self.model, batch, bad and self.trainer.strategy.world_size > 1)

    def validation_step(self, batch: Tensor) -> None:
        self.model(batch.to(self.model.gain.dtype), True)  # draws nothing: see Generators

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(rank: int, world_size: int, precision: Any, options: dict[str, Any], **more: Any) -> tuple[Module, L.Trainer]:
    seed_all(100 * rank + (7 if "ckpt_path" in more else 1))
    module, path = Module(), more.pop("ckpt_path", None)
    loaders = more.pop("loaders", [Loader(rank, world_size, draws=True)])
    usual = {"limit_val_batches": 2, "num_sanity_val_steps": 0}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ScapeStrategy(config=replace(CONFIG, update=UPDATES[precision]), **options),
        plugins=[GivenRanks()],
        max_steps=STEPS,
        precision=precision,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**usual, **more},
    )
    trainer.fit(module, *loaders, ckpt_path=path)
    return module, trainer


def trainer_stops_and_goes(rank: int, world_size: int, folder: str, precision: Any, options: dict[str, Any]) -> int:
    warnings.simplefilter("ignore")
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    straight, trainer = fit(rank, world_size, precision, options, callbacks=[keep])
    (optimizer,) = scape_optimizers(trainer.optimizers)
    expected = everything(optimizer)
    assert optimizer.engine.clipping.skipped_total == 1
    assert sum(expected["common"]["missed"].values()) in range(1, STEPS - 1)
    for step in STOPS:
        path = f"{folder}/step={step}.ckpt"
        assert Path(path).is_dir() == (options.get("state_dict_type") == "sharded")
        resumed, trainer = fit(rank, world_size, precision, options, enable_checkpointing=False, ckpt_path=path)
        (optimizer,) = scape_optimizers(trainer.optimizers)
        assert_same(expected, everything(optimizer))
        assert resumed.batches == straight.batches[-len(resumed.batches) :]
    return len(STOPS)


ENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "saved by steps, a validation follows": ({"every_n_train_steps": 1}, {}),
    "saved by steps, validations inside the epoch": ({"every_n_train_steps": 1}, {"val_check_interval": 3}),
    "saved by steps, none is validated": ({"every_n_train_steps": 1}, {"limit_val_batches": 0}),
    "saved after the validation of every second epoch": ({}, {"check_val_every_n_epoch": 2}),
}
"""How the last step of an epoch was saved, and the Trainer's options."""


def epochs_end_and_go(rank: int, world_size: int, folder: str, case: str) -> list[str]:
    """torch's loaders draw when they are set up, which a resumed fit does in another order and more often."""
    warnings.simplefilter("ignore")
    saved, validated = ENDS[case]
    data = torch.randn(EPOCH * world_size * 4, WIDTH, generator=torch.Generator().manual_seed(5))

    def run(**more: Any) -> dict[str, Any]:
        loaders = [DataLoader(data, batch_size=4, shuffle=True), DataLoader(data[:16], batch_size=4)]
        _, trainer = fit(rank, world_size, "32-true", {}, loaders=loaders, **validated, **more)
        (optimizer,) = scape_optimizers(trainer.optimizers)
        return everything(optimizer)

    expected = run(callbacks=[ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **saved)])
    ends = [path for path in (f"{folder}/step=4.ckpt", f"{folder}/step=8.ckpt") if Path(path).exists()]
    for path in ends:
        assert_same(expected, run(enable_checkpointing=False, ckpt_path=path))
    return ends


# ------------------------------------------------------------------------------------------------ Fabric


def fabric_stops_and_goes(rank: int, world_size: int, folder: str, precision: Any, options: dict[str, Any]) -> int:
    warnings.simplefilter("ignore")
    config = replace(CONFIG, update=UPDATES[precision])
    strategy = FabricScapeStrategy(config=config, cluster_environment=GivenRanks(), **options)
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
    fabric.launch()

    def run(path: str | None) -> tuple[dict[str, Any], list[float]]:
        seed_all(100 * rank + (7 if path else 1))
        model, batches = build_model(), []
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        loader = Loader(rank, world_size)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "step": 0}
        if path:
            fabric.load(path, state)
        while state["step"] < STEPS:
            window = []
            for batch in loader:
                window.append(batch)
                if len(window) < ACCUMULATE and loader.taken < EPOCH:
                    continue
                batches.append(float(window[0].sum()))
                for each in window:
                    bad = state["step"] == BAD_STEP - 1 and rank == 1
                    fabric.backward(loss_of(model, each, bad) / len(window))
                fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                window, state["step"] = [], state["step"] + 1
                if not path and state["step"] in STOPS:
                    fabric.save(f"{folder}/{state['step']}.ckpt", state)
                if state["step"] == STEPS:
                    break
        return everything(setup.stepped(optimizer)), batches

    expected, order = run(None)
    assert sum(expected["common"]["missed"].values()) in range(1, STEPS - 1)
    fabric.strategy.wait_for_checkpoint()
    for step in STOPS:
        found, batches = run(f"{folder}/{step}.ckpt")
        assert_same(expected, found)
        assert batches == order[step:]
    return len(STOPS)


FORMATS = {
    "full": {},
    "collected": {"async_save": True},
    "sharded": {"state_dict_type": "sharded"},
    "asynchronous": {"state_dict_type": "sharded", "async_save": True},
}


def resumed() -> Iterator[Any]:
    """All hosts, formats and precisions with each other; in a quick run each of them with each host, and two
    precisions with each format."""
    precisions = ("32-true", "bf16-true", "bf16-mixed")
    for host in (trainer_stops_and_goes, fabric_stops_and_goes):
        for place, kind in enumerate(FORMATS):
            for turn, precision in enumerate(precisions):
                quick = (place + turn + (host is fabric_stops_and_goes)) % len(precisions) == 0
                yield pytest.param(host, kind, precision, marks=() if quick else pytest.mark.slow)


@pytest.mark.few(1)
@pytest.mark.parametrize(("host", "kind", "precision"), [*resumed()])
def test_resume_at_any_step_is_bitwise_never_having_stopped(
    run_ranks: RunRanks, tmp_path: Path, host: Any, kind: str, precision: str
) -> None:
    folder = tmp_path / "checkpoints"
    assert run_ranks(host, 2, str(folder), precision, FORMATS[kind]) == [len(STOPS)] * 2


@pytest.mark.few(2)
@pytest.mark.parametrize("case", ENDS)
def test_a_fit_resumed_at_an_epochs_end_draws_as_one_that_never_stopped(
    run_ranks: RunRanks, tmp_path: Path, case: str
) -> None:
    """Dropout drew other numbers after a save by steps in the last batch of an epoch."""
    assert run_ranks(epochs_end_and_go, 2, str(tmp_path), case)[0]


# ------------------------------------------------------------------------------------------------ the hosts' own ways


def mixed_formats(rank: int, world_size: int, folder: str) -> list[str]:
    """Either kind of checkpoint is loaded whatever is saved; callbacks keep, link and remove directories."""
    warnings.simplefilter("ignore")
    sharded = {"state_dict_type": "sharded", "async_save": True}
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=1, save_last="link")
    straight, trainer = fit(rank, world_size, "32-true", sharded, callbacks=[keep])
    (optimizer,) = scape_optimizers(trainer.optimizers)
    expected, names = everything(optimizer), sorted(path.name for path in Path(folder).iterdir())
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    trainer.strategy.wait_for_checkpoint()
    # The end is loaded for validation alone, too.
    trainer.validate(straight, Loader(rank, world_size), ckpt_path=f"{folder}/end.ckpt", verbose=False)
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    trainer.validate(straight, Loader(rank, world_size), ckpt_path=f"{folder}/weights.ckpt", verbose=False)
    for options in ({}, sharded):
        _, trainer = fit(rank, world_size, "32-true", options, callbacks=[keep], ckpt_path="last")
        (optimizer,) = scape_optimizers(trainer.optimizers)
        assert_same(expected, everything(optimizer))
    plain = {"enable_checkpointing": False}
    _, trainer = fit(rank, world_size, "32-true", {}, ckpt_path=f"{folder}/end.ckpt", **plain)
    trainer.save_checkpoint(f"{folder}/full.ckpt")
    _, trainer = fit(rank, world_size, "32-true", sharded, ckpt_path=f"{folder}/full.ckpt", **plain)
    (optimizer,) = scape_optimizers(trainer.optimizers)
    own = everything(optimizer)
    for name in ("lr", "common"):
        assert own[name] == expected[name]
    assert all(torch.equal(own[name], expected[name]) for name in own if "parameter" in name or "state." in name)
    if rank == 0:
        whole = consolidate(Path(folder) / "end.ckpt")
        full = torch.load(f"{folder}/full.ckpt", weights_only=True)
        assert whole.keys() == full.keys()
        assert_equal(whole["optimizer_states"], full["optimizer_states"])
        assert_equal(whole["state_dict"], full["state_dict"])
    return names


def test_callbacks_formats_and_the_converter_work_together(run_ranks: RunRanks, tmp_path: Path) -> None:
    names = run_ranks(mixed_formats, 2, str(tmp_path / "checkpoints"))[0]
    assert names == ["last.ckpt", "step=9.ckpt"]


def save_buffers(rank: int, world_size: int, folder: str) -> list[float]:
    strategy = FabricScapeStrategy(
        sparsity=0.9, state_dict_type="sharded", cluster_environment=GivenRanks(), sparsity_warmup_steps=0
    )
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(6)))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    model(torch.randn(8, 3) + 5 * rank)
    mine = [float(layer.running_mean.sum()) for layer in model.module]
    fabric.save(f"{folder}/c", {"model": model, "optimizer": optimizer})
    fabric.load(f"{folder}/c", {"model": model, "optimizer": optimizer})
    assert [float(layer.running_mean.sum()) for layer in model.module] == mine or rank
    return [float(layer.running_mean.sum()) for layer in model.module]


def test_a_directory_holds_the_buffers_of_rank_zero(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(save_buffers, 2, str(tmp_path))
    assert first == second
