"""One small training under each host, method, kind of checkpoint and number of levels: what test_matrix.py runs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from trainer_helpers import GivenRanks, make_trainer

from lightning_scape import FabricScapeStrategy, FabricSparseLoCoStrategy, ScapeStrategy, SparseLoCoStrategy

WIDTH, BATCH, ACCUMULATE, SYNC_EVERY = 8, 4, 2, 3
STEPS, EPOCH = 10, 7
"""Steps of a run; batches of an epoch, whose last step accumulates one batch only: an epoch has four steps."""
KINDS: dict[str, dict[str, Any]] = {
    "file": {},
    "file, beside": {"async_save": True},
    "directory": {"state_dict_type": "sharded"},
    "directory, beside": {"state_dict_type": "sharded", "async_save": True},
}
"""Kinds of checkpoints: ``beside`` training or at once."""


@dataclass(frozen=True)
class Row:
    """A row of the matrix. ``node`` is the ranks of a node, which hold one replica together."""

    method: str
    host: str
    kind: str
    node: int
    precision: str

    def __str__(self) -> str:
        return "-".join([self.method, self.host, self.kind.replace(", ", "-"), f"node{self.node}", self.precision])

    @property
    def ranks(self) -> int:
        return 2 * self.node

    def strategy(self, **more: Any) -> Any:
        """Sparse from the first step; of SparseLoCo a run has windows that begin and end inside epochs."""
        options: dict[str, Any] = {"timeout": 60, "local_group_size": self.node, **KINDS[self.kind], **more}
        if self.method == "scape":
            options = {"sparsity": 0.8, "sparsity_warmup_steps": 2, "check_replicas_every": 1, **options}
        else:
            options = {"sync_every": SYNC_EVERY, "density": 0.25, **options}
        if self.host == "fabric":
            options["total_steps"] = more.get("total_steps", STEPS)
        return STRATEGIES[self.method, self.host](**options)


STRATEGIES: dict[tuple[str, str], Any] = {
    ("scape", "trainer"): ScapeStrategy,
    ("scape", "fabric"): FabricScapeStrategy,
    ("sparseloco", "trainer"): SparseLoCoStrategy,
    ("sparseloco", "fabric"): FabricSparseLoCoStrategy,
}


@dataclass
class Run:
    """What a rank has seen: per step the loss and the whole weights, then the end."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    end: Tensor | None = None
    drawn: list[float] = field(default_factory=list)
    step: int = 0
    stopped: bool = False

    def finish(self, model: nn.Module, step: int) -> Run:
        """At the end: the weights, and what each generator gives next."""
        self.end, self.step = whole_weights(model), step
        self.drawn = [float(torch.rand(1)), random.random(), float(np.random.rand())]
        return self


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Net(nn.Module):
    """Blocks in a ModuleList, which nodes gather one at a time, and dropout, which draws on each rank."""

    def __init__(self) -> None:
        super().__init__()
        # Ranks start unequal: the strategy has to see to it that they are not.
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(self.dropout(inputs))


class Batches:
    """Shuffled, alike on all ranks but for their part, and able to go on in the middle of an epoch."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.data = torch.randn(EPOCH * self.ranks * BATCH, WIDTH, generator=torch.Generator().manual_seed(5))
        self.epoch = self.taken = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[Tensor]:
        while self.taken < EPOCH:
            order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
            first = (self.taken * self.ranks + self.rank) * BATCH
            self.taken += 1
            yield self.data[order[first : first + BATCH]]
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


def loss_of(model: Any, batch: Tensor, dtype: torch.dtype) -> Tensor:
    """The target's noise is of Python's and NumPy's generators."""
    noise = 0.01 * (random.random() + float(np.random.rand()))
    return (model(batch.to(dtype)).float() - batch[:, :2] * 2 - noise).square().mean()


def whole_weights(model: nn.Module) -> Tensor:
    """All parameters in one row, gathered over the node where they are sharded."""
    gathered = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.detach().double().flatten() for each in gathered])


def loss_at(weights: Tensor) -> float:
    """The loss that a network of these weights has on data of its own, without dropout."""
    net = Net().eval()
    nn.utils.vector_to_parameters(weights.float(), net.parameters())
    data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(6))
    return float((net(data) - data[:, :2] * 2).square().mean())


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class Plan:
    """What a run does: it trains to ``steps``, from a checkpoint if ``load`` names one.

    Every step is saved to ``folder``, if there is one, or with ``only_when_stopped`` the last one. ``signal_at`` is the
    rank and the batch in whose middle SIGTERM comes. ``then`` is called at the end with what saves to a path.
    """

    folder: str = ""
    load: str | None = None
    steps: int = STEPS
    signal_at: tuple[int, int] | None = None
    only_when_stopped: bool = False
    then: Callable[[Callable[[str], None]], None] | None = None


def run(row: Row, **plan: Any) -> Run:
    """Train as the row and the plan say; what this rank has seen."""
    warnings.simplefilter("ignore")
    todo = Plan(**plan)
    # After a load generators must be the saved ones: another seed shows where they are not.
    seed_all(10 * dist.get_rank() + (1000 if todo.load else 0))
    return (run_trainer if row.host == "trainer" else run_fabric)(row, todo)


def path_of(folder: str, step: int) -> str:
    return f"{folder}/step={step}.ckpt"


# ------------------------------------------------------------------------------------------------ Trainer


class Module(L.LightningModule):
    def __init__(self, seen: Run, signal_at: tuple[int, int] | None) -> None:
        super().__init__()
        self.net, self.seen, self.signal_at = Net(), seen, signal_at

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.batches.append(float(batch.sum()))
        if self.signal_at == (self.global_rank, self.trainer.fit_loop.total_batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)
        loss = loss_of(self.net, batch, next(self.net.parameters()).dtype)
        self.seen.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Look(Callback):
    """The whole weights after each step."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(pl_module.seen.weights):
            pl_module.seen.weights.append(whole_weights(pl_module))


def run_trainer(row: Row, plan: Plan) -> Run:
    seen = Run()
    module = Module(seen, plan.signal_at)
    callbacks: list[Callback] = [Look()]
    if plan.folder:
        every = 10_000 if plan.only_when_stopped else 1
        often: dict[str, Any] = {"every_n_train_steps": every, "save_top_k": -1, "save_on_exception": True}
        callbacks.append(ModelCheckpoint(plan.folder, filename="{step}", **often))
    trainer = make_trainer(
        row.strategy(),
        max_epochs=None,
        max_steps=plan.steps,
        precision=row.precision,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=5.0,
        callbacks=callbacks,
        enable_checkpointing=bool(plan.folder),
        use_distributed_sampler=False,
    )
    try:
        trainer.fit(module, Batches(), ckpt_path=plan.load)
    except SIGTERMException as ended:
        seen.stopped = ended.code is None  # a SystemExit without a code, as under DDP: 0
    if plan.then:
        plan.then(lambda path: (trainer.save_checkpoint(path), trainer.strategy.wait_for_checkpoint()))
    return seen.finish(module.net, trainer.global_step)


# ------------------------------------------------------------------------------------------------ Fabric


def run_fabric(row: Row, plan: Plan) -> Run:
    seen, strategy = Run(), row.strategy()
    fabric = L.Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        precision=row.precision,  # type: ignore[arg-type]
        plugins=[GivenRanks()],
    )
    fabric.launch()
    net = Net()
    dtype = torch.bfloat16 if row.precision == "bf16-true" else torch.float32
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    batches = Batches()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": batches, "step": 0}
    if plan.load:
        fabric.load(plan.load, state)
    with on_sigterm(strategy.request_stop):
        while state["step"] < plan.steps and not seen.stopped:
            window: list[Tensor] = []
            for batch in batches:
                window.append(batch)
                if len(window) < ACCUMULATE and batches.taken < EPOCH:
                    continue
                for place, each in enumerate(window):
                    seen.batches.append(float(each.sum()))
                    if plan.signal_at == (fabric.global_rank, len(seen.batches) - 1):
                        os.kill(os.getpid(), signal.SIGTERM)
                    with fabric.no_backward_sync(model, enabled=place < len(window) - 1):
                        loss = loss_of(model, each, dtype)
                        fabric.backward(loss / len(window))
                    seen.losses.append(float(loss))
                fabric.clip_gradients(model, optimizer, max_norm=5.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                window, state["step"] = [], state["step"] + 1
                seen.weights.append(whole_weights(net))
                if batches.taken == EPOCH:  # the place after an epoch's last batch is the begin of the next
                    batches.epoch, batches.taken = batches.epoch + 1, 0
                seen.stopped = strategy.stop_requested
                if plan.folder and (seen.stopped or not plan.only_when_stopped):
                    fabric.save(path_of(plan.folder, state["step"]), state)
                if seen.stopped or state["step"] == plan.steps or batches.taken == 0:
                    break
    strategy.wait_for_checkpoint()
    if plan.then:
        plan.then(lambda path: (fabric.save(path, state), strategy.wait_for_checkpoint()))
    return seen.finish(net, state["step"])


@contextlib.contextmanager
def on_sigterm(call: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
