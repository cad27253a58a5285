"""Pretrain a small GPT on the Python standard library: SCAPE beside dense AdamW, on the same batches.

    python examples/pretrain_python.py                  # 0.14M parameters, 480 steps, two CPU processes, a minute
    python examples/pretrain_python.py --full           # 3M parameters, 1,200 steps: 10 to 20 minutes
    python examples/pretrain_python.py --strategy scape --sparsity 0.9
    torchrun --nproc-per-node 2 examples/pretrain_python.py --full

Nothing is downloaded. It prints a table, and leaves a plot (loss.png), all figures (result.json) and a folder for each
run, with its log (metrics.csv) and the checkpoint of the last twelfth (last.ckpt). After an interruption the same
command with --resume goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, Timer, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from litgpt import GPT, Config
from matplotlib.figure import Figure
from python_source import VOCABULARY, PythonSource
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_scape import ScapeMonitor, ScapeOptimizer, ScapeStrategy, newest_checkpoint

CONTEXT, BATCH = 128, 4
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "intermediate_size": 192}
FULL = {"n_layer": 6, "n_embd": 192, "n_head": 6, "intermediate_size": 576}


class Pretraining(LightningModule):
    """A Llama-like GPT on bytes. Nothing here knows SCAPE: optimizer, learning rate and schedule are AdamW's own."""

    def __init__(self, shape: dict[str, int], lr: float, steps: int) -> None:
        super().__init__()
        config = Config(
            block_size=CONTEXT,
            vocab_size=VOCABULARY,
            padded_vocab_size=VOCABULARY,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",  # SwiGLU
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            **shape,
        )
        self.model = GPT(config)
        self.model.apply(self.model._init_weights)
        self.lr, self.steps = lr, steps

    def loss(self, batch: Tensor) -> Tensor:
        return cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate(self, step: int) -> float:
        """Rises for a twentieth of the run, then falls to a tenth by a cosine."""
        warmup = max(1, self.steps // 20)
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, self.steps - warmup)))


class History(Callback):
    """Loss and bytes of the run so far. Checkpoints hold them, so that a resumed run goes on with them."""

    def __init__(self, dense_bytes: int | None) -> None:
        self.dense_bytes = dense_bytes
        self.kept: dict[str, Any] = {"points": [], "bytes_sent": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        scape = ScapeOptimizer.of(trainer.optimizers[0])  # None: DDP, which does not count
        self.kept["bytes_sent"] += self.dense_bytes if scape is None else scape.stats.bytes_total

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        point = {"step": trainer.global_step, "val_loss": trainer.callback_metrics["val_loss"].item()}
        self.kept["points"].append({**point, "bytes_sent": self.kept["bytes_sent"]})


def train(strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run; its figures."""
    scape, ranks = strategy == "scape", args.devices * args.nodes
    folder, every = args.out / (f"scape-{100 * args.sparsity:g}" if scape else "ddp"), max(1, args.steps // 100)
    seed_everything(args.seed)
    source = PythonSource(BATCH, CONTEXT, seed=args.seed)
    module = Pretraining(FULL, 1e-3, args.steps) if args.full else Pretraining(SMALL, 2e-3, args.steps)
    # A ring all-reduce of fp32.
    dense_bytes = 8 * sum(parameter.numel() for parameter in module.parameters()) * (ranks - 1) // ranks
    history, timer = History(None if scape else dense_bytes), Timer()
    checkpoint = ModelCheckpoint(folder, "last", save_on_train_epoch_end=False, enable_version_counter=False)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=ScapeStrategy(sparsity=args.sparsity) if scape else "ddp",
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=math.ceil(args.steps / 12),
        check_val_every_n_epoch=None,
        limit_val_batches=40,
        num_sanity_val_steps=0,
        log_every_n_steps=every,
        default_root_dir=folder,
        logger=CSVLogger(folder, name=""),
        callbacks=[history, timer, TQDMProgressBar(20), checkpoint, *([ScapeMonitor(every)] if scape else [])],
        enable_model_summary=False,
    )
    trainer.fit(module, source, ckpt_path=newest_checkpoint(folder, "*.ckpt") if args.resume else None)
    if history.kept["points"][-1]["step"] < args.steps:
        trainer.validate(module, source, verbose=False)
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)
    return {
        "name": f"SCAPE {100 * args.sparsity:g}%" if scape else "AdamW under DDP",
        "seconds": timer.time_elapsed("train"),
        "bytes_dense": dense_bytes * args.steps,
        **history.kept,
        **history.kept["points"][-1],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown, a row for each run."""
    lines = ["| | validation loss | sent by a rank | of what DDP sends | run took |", "|---|---|---|---|---|"]
    for run in runs:
        share = run["bytes_sent"] / run["bytes_dense"] if run["bytes_dense"] else math.nan  # one rank sends nothing
        sent = f"{run['bytes_sent'] / 1e6:,.1f} MB | {share:.1%}"
        lines.append(f"| {run['name']} | {run['val_loss']:.4f} | {sent} | {run['seconds']:.0f} s |")
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Validation loss over steps, and over what a rank has sent."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, axis, label in zip(panels, ("step", "bytes_sent"), ("steps", "bytes sent by a rank"), strict=True):
        for run in runs:
            x, losses = ([point[key] for point in run["points"]] for key in (axis, "val_loss"))
            panel.plot(x, losses, marker=".", label=run["name"])
        panel.set(xlabel=label, ylabel="validation loss (nats per byte)")
    panels[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    # The corpus lies in memory: workers would only cost.
    warnings.filterwarnings("ignore", ".*does not have many workers.*|.*`IterableDataset` has `__len__` defined.*")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--full", action="store_true", help="3M parameters, 1,200 steps")
    add("--resume", action="store_true", help="go on from the checkpoints in --out")
    add("--strategy", nargs="+", choices=("scape", "ddp"), default=["scape", "ddp"], help="one run each")
    add("--sparsity", type=float, default=0.99, help="share of the entries that SCAPE leaves out of a step")
    add("--steps", type=int, help="default: 480, or 1200 with --full")
    add("--devices", type=int, default=2, help="ranks on this node")
    add("--nodes", type=int, default=1)
    add("--accelerator", default="cpu")
    add("--precision", default="32-true")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("out/pretrain_python"))
    args = parser.parse_args()
    args.steps = args.steps or (1200 if args.full else 480)
    runs = [train(strategy, args) for strategy in args.strategy]
    if rank_zero_only.rank:
        return
    (args.out / "result.json").write_text(json.dumps(runs, indent=2) + "\n")
    plot(runs, args.out / "loss.png")
    print(f"\n{table(runs)}\n\nPlot, figures and checkpoints: {args.out}")


if __name__ == "__main__":
    main()
