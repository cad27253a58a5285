"""Tiny runs whose checkpoints older versions wrote: what writes them, and what goes on from them (tests/data).

All that they draw comes from the CPU's generator, by step and rank, and options whose defaults have changed are given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from lightning_scape import ScapeConfig, ScapeOptimizer, SparseLoCo
from lightning_scape.checkpoint.saver import Content, SavedContent, Saver
from lightning_scape.comm.collectives import Communicator

SAVED_AFTER, LAST = 7, 12
"""Steps before the checkpoint, and in all: SparseLoCo's windows have three, so it is written inside of one."""
SHAPES = ((5, 30), (70,), (1, 4))
"""Rows that do not divide by two, and one row."""
SCAPE: dict[str, Any] = {"sparsity": 0.9, "sparsity_warmup_steps": 0, "wire_dtype": "bf16", "block_size": 64}
LOCO: dict[str, Any] = {"sync_every": 3, "density": 1 / 8, "bits": 2, "block_size": 32, "average": "all"}
LOCO["reduction"] = "sharded"
Run = tuple["Model", torch.optim.Optimizer, Any]


class Model(nn.Module):
    """Some parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.held = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)


def _mesh(model: Model, nodes: int) -> Any:
    """The group of the ranks with the same rows, where ``nodes`` nodes of several ranks share a replica each."""
    if not nodes:
        return None
    mesh = init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    return mesh["replicate"].get_group() if nodes > 1 else None


def scape(nodes: int, dtype: torch.dtype = torch.float32, **options: Any) -> Run:
    """Two groups of parameters."""
    model = Model(dtype)
    group = _mesh(model, nodes)
    given = list(model.held)
    groups = [{"params": given[:1], "lr": 3e-2}, {"params": given[1:], "weight_decay": 0.0}]
    optimizer = ScapeOptimizer(groups, lr=1e-2, config=ScapeConfig(**{**SCAPE, **options}), process_group=group)
    return model, optimizer, optimizer


def loco(nodes: int, **options: Any) -> Run:
    """Around AdamW."""
    model = Model()
    group = _mesh(model, nodes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, SparseLoCo(optimizer, **{**LOCO, **options}, process_group=group)


KINDS: dict[str, tuple[int, Callable[..., Run], dict[str, Any]]] = {
    "adamw": (0, scape, {"update": "adamw"}),
    "adams": (0, scape, {"update": "adams", "second_moment": "measured"}),
    "adamw-bf16": (0, scape, {"update": "adamw", "dtype": torch.bfloat16}),
    "adamw-int4": (0, scape, {"update": "adamw", "wire_dtype": "int4"}),
    "adamw-2-nodes": (2, scape, {"update": "adamw"}),
    "sparseloco": (0, loco, {}),
    "sparseloco-overlap": (0, loco, {"overlap_steps": 2}),
    "sparseloco-2-nodes": (2, loco, {}),
}
"""By name: nodes (0: flat ranks), what builds the run, and its options."""
WRITERS = {name: 4 if nodes else 2 for name, (nodes, _, _) in KINDS.items()}
"""Ranks that write each."""
READERS = [(name, ranks, 0) for name in KINDS for ranks in (1, 2, 3)]
READERS += [(name, 4, 2) for name, (nodes, _, _) in KINDS.items() if nodes] + [("adamw", 2, 1), ("adamw", 4, 2)]
"""Kind, ranks and nodes of each run that goes on. A node alone and flat ranks take what nodes have written, too."""


def build(kind: str, nodes: int) -> Run:
    """A fresh run."""
    _, make, options = KINDS[kind]
    return make(nodes, **options)


def descend(run: Run, nodes: int, first: int, stop: int) -> None:
    """Steps of a run; each rank (each node) has its own gradients."""
    model, optimizer, _ = run
    rank, size = dist.get_rank(), dist.get_world_size() // (nodes or dist.get_world_size())
    for step in range(first, stop):
        generator = torch.Generator().manual_seed(1000 * step + rank // size)
        for number, (parameter, shape) in enumerate(zip(model.held, SHAPES, strict=True)):
            grad = torch.randn(shape, generator=generator).to(parameter.dtype)
            if hasattr(parameter, "device_mesh"):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
            skipped = number == 1 and step % 3 == 1 and isinstance(optimizer, ScapeOptimizer)
            parameter.grad = None if skipped else grad
        optimizer.step()


def whole(model: Model) -> list[Tensor]:
    """Copies of the whole parameters. Collective over a node."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.held]


def write(rank: int, world_size: int, kind: str, folder: str) -> None:
    """Trains a run and saves it as a file and as a directory."""
    nodes = KINDS[kind][0]
    run = build(kind, nodes)
    descend(run, nodes, 0, SAVED_AFTER)
    model, _, ours = run
    ours.consolidate_state_dict()
    saved = {"model": whole(model)}
    if rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save({**saved, "optimizer": ours.state_dict()}, Path(folder) / "full.pt")
    content = Content({}, {"optimizer": ours.sharded_state_dict()}, {"model": saved["model"]})
    Saver(asynchronous=False).save(Path(folder) / "sharded", content, Communicator())


def go_on(rank: int, world_size: int, kind: str, nodes: int, folder: str, form: str) -> list[Tensor]:
    """Loads one of the two forms into a fresh run, and gives its parameters after some further steps."""
    run = build(kind, nodes)
    model, _, ours = run
    saved: Any
    if form == "full":
        loaded = torch.load(Path(folder) / "full.pt", weights_only=True)
        weights, saved = loaded["model"], loaded["optimizer"]
    else:
        directory = SavedContent(Path(folder) / "sharded", Communicator())
        weights, saved = directory.rest["model"], directory.optimizers["optimizer"]
    with torch.no_grad():
        for parameter, weight in zip(model.held, weights, strict=True):
            if hasattr(parameter, "device_mesh"):
                weight = distribute_tensor(weight, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours.load_state_dict(saved)
    # Of packed wires, they took an owner's own values whole, and no change came back in more bits than values had.
    with (
        patch.object(ScapeConfig, "own_dtype", ScapeConfig.values_dtype, create=True),
        patch.object(ScapeConfig, "change_bits", lambda config, sent: config.wire_bits, create=True),
    ):
        descend(run, nodes, SAVED_AFTER, LAST)
    if hasattr(ours, "sync"):
        ours.sync()
    return whole(model)


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, folder: Path) -> list[Any]:
    """As the tests' own launcher, which older versions do not have."""
    torch.multiprocessing.start_processes(
        _rank, (function, ranks, arguments, str(folder)), nprocs=ranks, start_method="fork"
    )
    return [torch.load(folder / f"of-{rank}.pt") for rank in range(ranks)]


def _rank(rank: int, function: Callable[..., Any], ranks: int, arguments: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save(function(rank, ranks, *arguments), f"{folder}/of-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def fit(stop: int, resume: Path | None = None, saved: Path | None = None) -> list[Tensor]:
    """The parameters after so many steps of Lightning's Trainer, on one rank; ``saved``: where its checkpoint goes."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_scape import ScapeStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.Linear(5, 30)
            with torch.no_grad():
                for parameter in self.held.parameters():
                    drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
                    parameter.copy_(drawn)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return (self.held(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    generator = torch.Generator().manual_seed(3)
    rows = TensorDataset(torch.randn(48, 5, generator=generator), torch.randn(48, 30, generator=generator))
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ScapeStrategy(**SCAPE, update="adamw"),
        max_steps=stop,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=4), ckpt_path=resume)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return [parameter.detach().clone() for parameter in module.parameters()]
