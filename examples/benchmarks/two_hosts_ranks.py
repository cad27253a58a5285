"""What two_hosts.py starts on each host: the Trainer's jobs, and what they report. Its argument is JSON."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from litgpt import GPT, Config
from namespaces import sent_bytes
from quality_runs import Run
from quality_tasks import build_gpt
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_scape import ScapeOptimizer, ScapeStrategy, SparseLoCo, SparseLoCoStrategy

SECONDS = 5.0
"""That the timed steps of a method may take; slow links get fewer steps."""


def main() -> None:
    """Every method in turn; rank 0 leaves the figures of all ranks in the folder."""
    args = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    measure = {"steps": time_steps, "runs": train}[args.what]
    with contextlib.redirect_stdout(sys.stderr):
        found = {method: measure(method, args) for method in args.methods}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        Path(args.folder, f"{args.name}.json").write_text(json.dumps(everyone))
    dist.barrier()
    # FSDP keeps its groups alive, and a thread of gloo that lets go of a message's tensors while the interpreter ends
    # aborts the process. The result is on disk: nothing is left to be tidied up.
    sys.stderr.flush()
    os._exit(0)


# ------------------------------------------------------------------------------------------------------------- methods


class Unsynchronized(DDPStrategy):
    """Every rank for itself: what a run takes without its messages. A broadcast's or a barrier's word still travels."""

    def configure_ddp(self) -> None:
        pass


class Hooked(DDPStrategy):
    """DDP with a hook of torch's. Lightning registers hooks on CUDA only; gloo can do it, too.

    Args:
        hook: ``"bf16"``, or ``"powersgd"`` (arXiv 1905.13727) with values in bf16.
        rank: width of PowerSGD's matrices.
    """

    def __init__(self, hook: str, rank: int = 0) -> None:
        # One bucket: with several, gloo calls PowerSGD's callbacks in another order on each rank, and aborts.
        super().__init__(**({"bucket_cap_mb": 4096} if hook == "powersgd" else {}))
        self._hook, self._rank = hook, rank

    def _register_ddp_hooks(self) -> None:
        state, hook = None, default_hooks.bf16_compress_hook
        if self._hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=self._rank, start_powerSGD_iter=2)
            hook = default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        # DDP knows torch's own hook by name and refuses it without CUDA.
        self.model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))


def strategy_of(method: str, scape: dict[str, Any], **both: Any) -> Any:
    """By its name in two_hosts.py; with more options of SCAPE, and of both our strategies."""
    kind, _, rest = method.partition("-")
    number, _, wire = rest.partition("-")
    if kind in ("fsdp", "hsdp"):
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    if kind in ("scape", "nodes"):
        options = scape | both | ({"wire_dtype": wire} if wire else {})
        options |= {"local_group_size": "node", "reshard_after_forward": False} if kind == "nodes" else {}
        return ScapeStrategy(sparsity=float(number), **options)
    if kind == "sparseloco":
        return SparseLoCoStrategy(sync_every=int(number), **both)
    if kind == "powersgd":
        return Hooked("powersgd", int(number))
    if method == "ddp-bf16":
        return Hooked("bf16")
    return DDPStrategy() if method in ("ddp", "zero1") else Unsynchronized()


def optimizer_of(method: str, module: nn.Module, rate: float | None, **settings: Any) -> torch.optim.Optimizer:
    """AdamW, or what takes its place; ``rate`` is the learning rate of DeMo (arXiv 2411.19870)."""
    if method == "zero1":
        return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **settings)
    if method == "demo":
        from pytorch_optimizer import DeMo

        decay = settings["weight_decay"]
        return DeMo(module.parameters(), lr=rate, compression_top_k=8, compression_chunk=64, weight_decay=decay)
    return torch.optim.AdamW(module.parameters(), **settings)


class Outer(pl.Callback):
    """torchft's DiLoCo (arXiv 2311.08105): each rank is a replica of its own, and its AdamW the inner optimizer.

    Args:
        sync_every: steps from one exchange to the next.
        rate: of the outer optimizer.
    """

    def __init__(self, sync_every: int, rate: float) -> None:
        self.sync_every, self.rate = sync_every, rate

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        rank, size, host = dist.get_rank(), dist.get_world_size(), own_address()
        found = [""]
        if rank == 0:
            self.server = LighthouseServer(bind=f"{host}:0", min_replicas=size, join_timeout_ms=10_000)
            found = [f"http://{host}:{self.server.address().rpartition(':')[2]}"]  # it would name the machine
        dist.broadcast_object_list(found)
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(minutes=5)),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=size,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self.store.port,
            lighthouse_addr=found[0],
            replica_id=f"r{rank}",
            hostname=host,
            init_sync=False,
            timeout=timedelta(minutes=5),
        )
        outer = torch.optim.SGD(module.parameters(), self.rate, momentum=0.9, nesterov=True)
        options = {"sync_every": self.sync_every, "backup_device": torch.device("cpu"), "pin_memory": False}
        self.open = contextlib.ExitStack()
        self.open.enter_context(DiLoCo(self.manager, [module], trainer.optimizers[0], outer, **options))

    def on_train_end(self, *_: Any) -> None:
        self.open.close()
        dist.barrier()  # who leaves first must not take the meeting place along
        self.manager.shutdown(wait=False)


def own_address() -> str:
    """This host's, on the way to the first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return str(way.getsockname()[0])


def window_of(method: str) -> int:
    """Steps from one exchange to the next; 0 for methods that exchange in every step."""
    kind, _, number = method.partition("-")
    return int(number) if kind in ("sparseloco", "diloco") else 0


def trainer_of(args: SimpleNamespace, strategy: Any, callbacks: list[pl.Callback], **more: Any) -> pl.Trainer:
    """A Trainer with clipping, and nothing that a measurement does not need."""
    return pl.Trainer(
        accelerator="cpu",
        devices=args.ranks_per_host,
        num_nodes=dist.get_world_size() // args.ranks_per_host,
        strategy=strategy,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


# --------------------------------------------------------------------------------------------------------------- steps


def time_steps(method: str, args: SimpleNamespace) -> dict[str, Any]:
    """Seconds and bytes of a method's steps, on random tokens."""
    module, watch = RandomTokens(method, args), Watch(method, args)
    vocabulary = module.gpt.config.padded_vocab_size
    # One step more than is timed: SparseLoCo exchanges what is left at the last step of a run.
    samples = 2 * dist.get_world_size() * (max(args.most, window_of(method)) + watch.warmup + 1)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    tokens = torch.randint(0, vocabulary, (samples, args.context + 1), generator=generator)
    strategy = strategy_of(method, {"sparsity_warmup_steps": 0})
    trainer = trainer_of(args, strategy, [watch], max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=2))
    assert watch.figures, f"{method} ended before its steps were timed"
    return watch.figures


class RandomTokens(pl.LightningModule):
    """A GPT that learns random tokens; "tiny" is LitGPT's smallest Pythia, cut down."""

    def __init__(self, method: str, args: SimpleNamespace) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "intermediate_size": 128, "padded_vocab_size": 512}
        small |= {"vocab_size": 512, "n_query_groups": 2, "head_size": 32}
        tiny = args.model == "tiny"
        self.gpt = GPT(Config.from_name("pythia-14m" if tiny else args.model, **(small if tiny else {})))
        self.method, self.args = method, args

    def configure_model(self) -> None:
        if self.method in ("fsdp", "hsdp"):
            mesh = self.device_mesh["data_parallel"]
            if self.method == "hsdp":
                grid = (dist.get_world_size() // self.args.ranks_per_host, self.args.ranks_per_host)
                mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
            # Models this small need no memory back between forward and backward; "nodes" does the same.
            kept = {"reshard_after_forward": False} if self.method == "hsdp" else {}
            for block in self.gpt.transformer.h:
                fully_shard(block, mesh=mesh, **kept)
            fully_shard(self.gpt, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        return cross_entropy(self.gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        return optimizer_of(self.method, self, None, **settings)


class Watch(pl.Callback):
    """Times steps and counts bytes, from the end of the warm-up to as many steps as there is time for."""

    def __init__(self, method: str, args: SimpleNamespace) -> None:
        self.method, self.args, self.window = method, args, window_of(method)
        self.warmup = 3 if method.startswith("powersgd") else 2  # DDP lays out its buckets anew after the first step
        self.seconds: list[float] = []
        self.timed = 0
        self.figures: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.warmup:
            # All take rank 0's word for how many steps there is time for.
            steps = torch.tensor([SECONDS / self.seconds[-1]])
            dist.broadcast(steps, 0)
            self.timed = self.window or int(max(2, min(self.args.most, float(steps))))
            self.seconds.clear()
            self.before = quiet(trainer)
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if not self.timed or len(self.seconds) < self.timed:
            return
        sent, headers = ((b - a) / self.timed for a, b in zip(self.before, quiet(trainer), strict=True))
        stats = getattr(method_of(trainer.optimizers[0]), "stats", None)
        self.figures = {
            "seconds": [statistics.mean(self.seconds)] if self.window else self.seconds,
            "sent": sent,
            "headers": headers,
            "counted": stats and self.crossing(stats.bytes_total) / (self.window or 1),
        }
        trainer.should_stop = True

    def crossing(self, counted: int) -> float:
        """What a host sends to others, of the bytes that each of its ranks counted: gloo sends by pairs."""
        here, peers = self.args.ranks_per_host, dist.get_world_size() - 1
        abroad = 1.0 if self.method.startswith("nodes") else (peers + 1 - here) / peers
        return counted * here * abroad


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


# ---------------------------------------------------------------------------------------------------------- whole runs


def train(method: str, args: SimpleNamespace) -> dict[str, Any]:
    """One run of Lightning's Trainer, with what its validations saw."""
    from python_source import PythonSource  # on the path since quality_tasks was imported

    pl.seed_everything(args.seed)
    source = PythonSource(4, args.context, seed=args.seed)
    run = Run(method="adamw", size=args.model, context=args.context, steps=args.steps, lr=1e-3, warmup=0.05)
    module, clock = Bytes(run, method, args.rate), Clock()
    outer = [Outer(window_of(method), args.rate)] if method.startswith("diloco") else []
    saved = ModelCheckpoint(Path(args.folder, f"saved-{args.name}"), "last", save_on_train_epoch_end=False)
    trainer = trainer_of(
        args,
        strategy_of(method, {}, state_dict_type="sharded", async_save=True),
        [*outer, clock, saved],
        max_steps=args.steps,
        val_check_interval=args.steps // args.validations,
        check_val_every_n_epoch=None,
        limit_val_batches=args.validated,
        num_sanity_val_steps=0,
    )
    source.trainer = trainer
    trainer.fit(module, source)
    end = clock.now()
    counted = [each.communicator.traffic.total for each in map(method_of, trainer.optimizers) if each is not None]
    figures = {"points": clock.points, **end, "validating": clock.validating, "saving": clock.saving}
    return {**figures, "counted": sum(counted) if counted else None}


def method_of(optimizer: Any) -> Any:
    """What counts a method's bytes; None for a dense one."""
    return SparseLoCo.of(optimizer) or ScapeOptimizer.of(optimizer)


class Bytes(pl.LightningModule):
    """The small GPT of quality.py, its optimizer and its schedule."""

    def __init__(self, run: Run, method: str, rate: float | None) -> None:
        super().__init__()
        self.run, self.method, self.rate = run, method, rate
        self.gpt = build_gpt(run.size, run.context)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """In nats per byte."""
        return cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        settings = {"lr": self.run.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        optimizer = optimizer_of(self.method, self, self.rate, **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.run.at(step) / self.run.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clock(pl.Callback):
    """Loss, seconds and bytes at every validation."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self.validating = self.saving = 0.0
        self.since: float | None = None

    def now(self) -> dict[str, float]:
        """What this run has taken so far."""
        return {name: value - self.start[name] for name, value in counters().items()}

    def on_train_start(self, *_: Any) -> None:
        dist.barrier()
        self.start = counters()

    def on_validation_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loss = trainer.callback_metrics["val_loss"].item()
        self.points.append({"step": trainer.global_step, "loss": loss, **self.now()})
        self.since = time.perf_counter()
        self.validating += self.since - self.began

    def on_train_batch_start(self, *_: Any) -> None:
        if self.since is not None:  # the first batch after a validation, and after the checkpoint that follows it
            self.saving += time.perf_counter() - self.since
            self.since = None


def counters() -> dict[str, float]:
    """Of this host."""
    sent, headers = sent_bytes()
    return {"seconds": time.perf_counter(), "sent": sent, "headers": headers}


if __name__ == "__main__":
    main()
