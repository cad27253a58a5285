"""What bench_two_hosts.py runs on each host: the Trainer's jobs, and what they report; no script of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import predicted_steps
import torch
import torch.distributed as dist
from dense_strategies import BY_NAME, PowerSGD
from host_memory import share_host_memory
from lightning.pytorch.strategies import ModelParallelStrategy
from litgpt import GPT, Config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from two_hosts import bits_per_second, sent_bytes

from lightning_scape import ScapeStrategy, SparseLoCo, SparseLoCoStrategy


def work(args: argparse.Namespace) -> None:
    """What torchrun starts on each host: every method in turn; rank 0 leaves the figures in ``args.worker``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    model_name = args.models[0]
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):
        model = build(model_name)
        measured = predicted_steps.measure(model, args.batch_size, args.context, bits_per_second(args.links[0]), True)
        weights = measured.pop("weights")
        del model
        found = {method: run_method(method, model_name, args) for method in args.methods}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, measured))
    if dist.get_rank() == 0:
        result = {"weights": weights, "ranks": [{"methods": f, "measured": m} for f, m in everyone]}
        args.worker.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # FSDP keeps its groups alive all the same, and a thread of gloo that lets go of a message's tensors while the
    # interpreter ends aborts the process (2 of 26 runs). The result is on disk: nothing is left to be tidied up.
    sys.stderr.flush()
    os._exit(0)


def build(name: str) -> GPT:
    """LitGPT's model of this name; "tiny" is its smallest Pythia, cut down."""
    if name == "tiny":
        small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "intermediate_size": 128, "padded_vocab_size": 512}
        return GPT(Config.from_name("pythia-14m", vocab_size=512, n_query_groups=2, head_size=32, **small))
    return GPT(Config.from_name(name))


def run_method(method: str, model_name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One job of the Lightning Trainer."""
    module = Pretraining(model_name, method, args)
    watch = Watch(method, args, [parameter.numel() for parameter in module.parameters()])
    generator = torch.Generator().manual_seed(dist.get_rank())
    vocabulary = module.gpt.config.padded_vocab_size
    # One step more than is timed: SparseLoCo exchanges what is left at the last step of a run.
    steps = max(args.max_steps, window_of(method)) + watch.warmup + 1
    samples = args.batch_size * dist.get_world_size() * steps
    tokens = torch.randint(0, vocabulary, (samples, args.context + 1), generator=generator)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.ranks_per_host,
        num_nodes=dist.get_world_size() // args.ranks_per_host,
        strategy=strategy_of(method, args),
        max_epochs=1,
        callbacks=[watch],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=args.batch_size))
    assert watch.figures, f"{method} ended before its steps were timed"
    return watch.figures


def window_of(method: str) -> int:
    """Steps from one exchange of SparseLoCo to the next; 0 for other methods."""
    kind, _, window = method.partition("-")
    return int(window) if kind == "sparseloco" else 0


def strategy_of(method: str, args: argparse.Namespace) -> Any:
    """By its name in bench_two_hosts.py."""
    kind, _, option = method.partition("-")
    if method in BY_NAME:
        return BY_NAME[method]()
    if kind == "powersgd":
        return PowerSGD(rank=1)
    if kind in ("fsdp", "hsdp"):
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    if kind == "sparseloco":
        return SparseLoCoStrategy(sync_every=window_of(method))
    sparsity, _, more = option.partition("-")
    options: dict[str, Any] = {"wire_dtype": more or "bf16"}
    if kind == "nodes":
        options = {"local_group_size": "node", "reshard_after_forward": False}
        options |= {"wrap": ["GPT"]} if args.one_unit else {}
    return ScapeStrategy(sparsity=float(sparsity), sparsity_warmup_steps=0, **options)


class Pretraining(pl.LightningModule):
    """A GPT that learns random tokens.

    Args:
        model_name: see :func:`build`.
        method: decides how it is sharded.
        args: of bench_two_hosts.py.
    """

    def __init__(self, model_name: str, method: str, args: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = build(model_name)
        self.method, self.args = method, args

    def configure_model(self) -> None:
        kind, args = self.method.partition("-")[0], self.args
        if kind in ("fsdp", "hsdp"):
            mesh = self.device_mesh["data_parallel"]
            if kind == "hsdp":
                grid = (dist.get_world_size() // args.ranks_per_host, args.ranks_per_host)
                mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
            # Models this small need no memory back between forward and backward; nodes-0.99 does the same.
            kept = {"reshard_after_forward": False} if kind == "hsdp" else {}
            for block in () if args.one_unit else self.gpt.transformer.h:
                fully_shard(block, mesh=mesh, **kept)
            fully_shard(self.gpt, mesh=mesh)

    def on_fit_start(self) -> None:
        if self.method.endswith("-shm"):
            share_host_memory(self)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        return cross_entropy(self.gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


class Watch(pl.Callback):
    """Times steps and counts bytes, from the end of the warm-up to as many steps as there is time for.

    Args:
        method: that is timed.
        args: of bench_two_hosts.py.
        numels: of the parameters, before they are sharded.
    """

    def __init__(self, method: str, args: argparse.Namespace, numels: list[int]) -> None:
        self.method, self.args, self.numels, self.window = method, args, numels, window_of(method)
        self.warmup = 3 if method == "powersgd" else 2  # DDP lays out its buckets anew after the first step
        self.seconds: list[float] = []
        self.timed = 0
        self.figures: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.warmup:
            # All take rank 0's word for how many steps there is time for.
            steps = torch.tensor([self.args.seconds / self.seconds[-1]])
            dist.broadcast(steps, 0)
            self.timed = self.window or int(max(2, min(self.args.max_steps, float(steps))))
            self.seconds.clear()
            self.before = quiet(trainer)
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if not self.timed or len(self.seconds) < self.timed:
            return
        after, each = quiet(trainer), self.args.ranks_per_host
        sent, headers = ((b - a) / self.timed for a, b in zip(self.before, after, strict=True))
        loco = SparseLoCo.of(trainer.optimizers[0])
        stats = getattr(loco or trainer.optimizers[0], "stats", None)
        if stats is None:
            expected = expected_bytes(self.method, trainer, self.numels, each)
        else:
            expected = crossing(self.method, stats.bytes_total, each) / (self.window or 1)
        self.figures = {
            "seconds": [statistics.mean(self.seconds)] if self.window else self.seconds,
            "sent": sent,
            "headers": headers,
            "expected": expected,
            "counted": stats is not None,
            "phases": dict(stats.seconds) if stats is not None else None,
        }
        trainer.should_stop = True


def quiet(trainer: pl.Trainer) -> tuple[int, int]:
    """The interface's count when nothing is under way on either side."""
    for optimizer in trainer.optimizers:
        if hasattr(optimizer, "drain"):
            optimizer.drain()
    dist.barrier()
    time.sleep(0.05)  # the last acknowledgements
    count = sent_bytes()
    dist.barrier()
    return count


def crossing(method: str, counted: int, ranks_per_host: int) -> float:
    """What a host sends to others in a step, of the bytes that each of its ranks counted: gloo sends by pairs."""
    if ranks_per_host == 1:
        return counted
    peers = dist.get_world_size() - 1
    abroad = 1.0 if method.startswith("nodes") else (peers + 1 - ranks_per_host) / peers
    return counted * ranks_per_host * abroad


def expected_bytes(method: str, trainer: Any, numels: list[int], ranks_per_host: int) -> float | None:
    """What a host sends in a step of a dense method; None where it is not known (PowerSGD's depends on buckets)."""
    size, ranks = sum(numels), trainer.world_size
    share = (ranks - 1) / ranks
    if method.startswith("hsdp"):  # each of the host's ranks reduces its shard of the gradient with the other hosts
        hosts = ranks // ranks_per_host
        return 2 * (hosts - 1) / hosts * 4 * size
    if ranks_per_host > 1 and method != "compute":
        return None
    if method in ("ddp", "ddp-bf16"):
        # Rank 0 also sends its buffers (the rotary angles) ahead of each forward pass.
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in trainer.lightning_module.buffers())
        return share * (2 * size * (4 if method == "ddp" else 2) + buffers)
    if method == "fsdp":
        # Blocks are gathered in forward and in backward, the root (embedding and head) once. gloo has no
        # reduce-scatter of its own: torch makes an all-reduce of it, and each rank keeps its part.
        inside = sum(p.numel() for p in trainer.lightning_module.gpt.transformer.h.parameters())
        return share * 4 * (2 * inside + (size - inside) + 2 * size)
    return 0.0 if method == "compute" else None
