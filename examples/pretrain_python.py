"""Pretrain a small GPT on the Python standard library with SCAPE, and compare it with dense training.

    python examples/pretrain_python.py                          # SCAPE 99% on two CPU processes, about 5 minutes
    python examples/pretrain_python.py --strategy ddp           # the same with dense gradients: the same AdamW
    python examples/pretrain_python.py --compare                # dense AdamW, SCAPE 90% and SCAPE 99%
    torchrun --nproc-per-node 2 examples/pretrain_python.py     # launched from outside
    python examples/pretrain_python.py --accelerator gpu --devices 8 --precision bf16-mixed

Beside a run of SCAPE with the default settings stands the recorded one of dense AdamW. Each run leaves its figures
(result.json), a plot (loss.png), the training log (metrics.csv), a checkpoint (last.ckpt) and the model as LitGPT
reads it (final, for examples/evaluate_litgpt.py) in its folder under --out; --compare skips the runs that are already
there. An interrupted run leaves the log and the checkpoint after its last validation (one every 12th of the run): the
same command with --resume goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import matplotlib
import torch
import torchmetrics
from evaluate_litgpt import save_checkpoint
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from litgpt import GPT, Config
from litgpt.generate.base import generate
from python_source import VOCABULARY, PythonSource
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

import lightning_scape
from lightning_scape import AdamS, ScapeConfig, ScapeMonitor, ScapeStrategy, newest_checkpoint
from lightning_scape.tools.console import ends_quietly

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SIZES = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2, "intermediate_size": 192},  # 0.14M parameters
    "small": {"n_layer": 6, "n_embd": 192, "n_head": 6, "intermediate_size": 576},  # 3.0M parameters
}
LEARNING_RATES = {
    "tiny": {"adamw": 2e-3, "adams": 5e-4},
    "small": {"adamw": 1e-3, "adams": 2.5e-4},  # the best of two, with dense gradients, after 1,500 steps
}
"""Of dense training, with --strategy ddp as with --strategy scape: SCAPE needs none of its own."""
OPTIMIZERS = ("adamw", "adams")
SPARSITY = {"sparsity": 0.99, "dense_steps": 0, "sparsity_warmup_steps": None}
"""Defaults of the options of SCAPE."""
RUNS = (
    {"strategy": "ddp", "optimizer": "adamw"},
    {"strategy": "scape", "optimizer": "adamw", "sparsity": 0.9},
    {"strategy": "scape", "optimizer": "adamw", "sparsity": 0.99},
)
"""What --compare runs."""
PROMPT = "def "
RECORDED = Path(__file__).parent / "results" / "example" / "dense-adamw.json"
"""Dense AdamW's run of the first command, drawn beside SCAPE's."""
EXCHANGE = ("norm", "wait", "exchange", "write")
"""Phases of a SCAPE step in which a rank may wait for others; the rest is its own work."""

BYTES = ("bytes_values", "bytes_parameters", "bytes_mask", "bytes_votes", "bytes_norm", "bytes_total", "bytes_dense")
"""What is kept of a step's figures."""

MEGABYTES = "{:.3f} MB", 1e-6
MILLISECONDS = "{:.1f} ms", 1e3
ROWS: list[tuple[str, str, str, float]] = [
    ("validation loss (nats per byte)", "val_loss", "{:.4f}", 1),
    ("perplexity per byte", "val_perplexity", "{:.3f}", 1),
    ("bits per byte", "bits_per_byte", "{:.4f}", 1),
    ("learning rate", "lr", "{:g}", 1),
    ("bytes sent are", "bytes_are", "{}", 1),
    ("sent per rank and step, at the end", "bytes_total", *MEGABYTES),
    ("- gradient values", "bytes_values", *MEGABYTES),
    ("- parameters, or their changes", "bytes_parameters", *MEGABYTES),
    ("- mask", "bytes_mask", *MEGABYTES),
    ("- proposals", "bytes_votes", *MEGABYTES),
    ("- norm", "bytes_norm", *MEGABYTES),
    ("a dense all-reduce sends (computed)", "bytes_dense", *MEGABYTES),
    ("ratio", "ratio", "{:.1f}x", 1),
    ("sent per rank in the whole run", "bytes_sent", "{:.1f} MB", 1e-6),
    ("ratio over the whole run", "ratio_run", "{:.1f}x", 1),
    ("time per step", "seconds_step", *MILLISECONDS),
    ("- forward, backward and the rest", "seconds_compute", *MILLISECONDS),
    ("- selection and update", "seconds_selection", *MILLISECONDS),
    ("- norm, communication and waiting", "seconds_exchange", *MILLISECONDS),
    ("whole run", "seconds_run", "{:.1f} min", 1 / 60),
]
"""Of the table: title, key in a run's figures, how to write it, unit. DDP communicates during the backward pass, so its
step cannot be split from outside."""


class Pretraining(LightningModule):
    """A LitGPT model that learns to predict the next byte."""

    def __init__(self, model: GPT, args: argparse.Namespace) -> None:
        super().__init__()
        self.model = model
        self.args = args
        self.val_loss = MeanMetric()
        self.val_perplexity = Perplexity()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        logits, targets = self.model(batch[:, :-1]).float(), batch[:, 1:]
        self.val_loss.update(cross_entropy(logits.flatten(0, 1), targets.flatten()), weight=targets.numel())
        self.val_perplexity.update(logits, targets)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity)

    def configure_optimizers(self) -> dict[str, Any]:
        make = {"adamw": torch.optim.AdamW, "adams": AdamS}[self.args.optimizer]
        optimizer = make(self.parameters(), lr=learning_rate(self.args), betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warmup = max(1, self.args.steps // 20)
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, self.args.steps - warmup)))


class Figures(Callback):
    """Collects the loss over steps and bytes, and where the time of a step goes; checkpoints hold it all.

    Args:
        identity: of the run; a checkpoint of another one is refused.
        every_n_steps: steps from one look at the optimizer's figures to the next; a look costs time.
        dense_bytes: what a step sends under DDP, None under SCAPE, which counts for itself.
        varying_steps: so many first steps may each send another number of bytes.
        untimed_steps: so many first steps are not timed.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        every_n_steps: int,
        dense_bytes: int | None,
        varying_steps: int,
        untimed_steps: int,
    ) -> None:
        self.identity = identity
        self.every_n_steps = every_n_steps
        self.dense_bytes = dense_bytes
        self.varying_steps = varying_steps
        self.untimed_steps = untimed_steps
        self.history: dict[int, dict[str, float]] = {}
        self.seconds: dict[int, float] = {}
        self.last: dict[str, int] = {}
        self.step_seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.sent = 0
        self.counted_steps = 0
        self.run_started = time.perf_counter()
        self._step_started = 0.0

    def state_dict(self) -> dict[str, Any]:
        kept = ("identity", "history", "seconds", "last", "step_seconds", "phases", "sent", "counted_steps")
        return {"seconds_run": self.seconds_run, **{name: getattr(self, name) for name in kept}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, own = state_dict["identity"], self.identity
        if differing := sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name)):
            got = ", ".join(f"{name} {own.get(name)} for {saved.get(name)}" for name in differing)
            raise ValueError(
                f"--resume must have the settings and versions of the run that it goes on with, got {got}. Give the"
                " same options, or start anew without --resume."
            )
        self.run_started -= state_dict["seconds_run"]
        vars(self).update({name: value for name, value in state_dict.items() if name != "seconds_run"})

    @property
    def seconds_run(self) -> float:
        return time.perf_counter() - self.run_started

    def on_train_batch_start(self, *_: Any) -> None:
        self._step_started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.step_seconds.append(time.perf_counter() - self._step_started)
        if trainer.global_step <= self.varying_steps or trainer.global_step % self.every_n_steps == 0:
            self._count(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self.counted_steps:
            self._count(trainer)
        metrics = {name: trainer.callback_metrics[name].item() for name in ("val_loss", "val_perplexity")}
        self.history[trainer.global_step] = {**metrics, "bytes_sent": self.sent}
        self.seconds[trainer.global_step] = self.seconds_run

    def _count(self, trainer: Trainer) -> None:
        """Add the bytes of the steps since the last count, all of which sent as much as the last one."""
        if self.dense_bytes is None:
            stats = trainer.optimizers[0].stats
            self.last = {kind: getattr(stats, kind) for kind in BYTES}
            if trainer.global_step > self.untimed_steps:
                self.phases.append(dict(stats.seconds))
        sent = self.dense_bytes if self.dense_bytes is not None else self.last["bytes_total"]
        self.sent += sent * (trainer.global_step - self.counted_steps)
        self.counted_steps = trainer.global_step

    def summary(self) -> dict[str, Any]:
        """Bytes and seconds of one step."""
        step = statistics.median(self.step_seconds[self.untimed_steps :])
        if self.dense_bytes is not None:
            sent = self.dense_bytes
            return {"bytes_total": sent, "bytes_dense": sent, "bytes_are": "computed", "seconds_step": step}
        phases = {phase: statistics.median(each[phase] for each in self.phases) for phase in self.phases[0]}
        exchange, total = sum(phases[phase] for phase in EXCHANGE), sum(phases.values())
        return {
            **self.last,
            "bytes_are": "counted",
            "seconds_step": step,
            "seconds_compute": step - total,
            "seconds_selection": total - exchange,
            "seconds_exchange": exchange,
            "seconds_by_phase": phases,
        }


def learning_rate(args: argparse.Namespace) -> float:
    return args.lr if args.lr is not None else LEARNING_RATES[args.size][args.optimizer]


def build_gpt(name: str, context: int, shape: dict[str, int]) -> GPT:
    """A small Llama-like GPT on bytes, with fresh weights."""
    config = Config(
        name=name,
        block_size=context,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",  # SwiGLU
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        **shape,
    )
    model = GPT(config)
    return model.apply(model._init_weights)


def build_trainer(args: argparse.Namespace, parameters: int, folder: Path) -> tuple[Trainer, Figures]:
    scape = args.strategy == "scape"
    ranks = args.devices * args.nodes
    # A ring all-reduce, which is what DDP does; gloo and NCCL do not count what they send.
    width = 2 if args.precision in ("bf16-true", "16-true") else 4
    dense_bytes = None if scape else 2 * width * parameters * (ranks - 1) // ranks
    every = max(1, args.steps // 100)
    varying = args.dense_steps + scape_config(args).warmup_within(args.steps) if scape else 0
    # Neither the first tenth, in which caches warm up, nor the sparsity's warm-up; but at least the last tenth.
    tenth = args.steps // 10
    untimed = max(tenth, min(varying, args.steps - tenth - 1))
    figures = Figures(settings(args) | versions(), every, dense_bytes, varying, untimed)
    # One file, overwritten after each validation and at the end of the run.
    checkpoint = ModelCheckpoint(folder, "last", save_on_train_epoch_end=False, enable_version_counter=False)
    monitor = [ScapeMonitor(every)] if scape else []
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=ScapeStrategy(config=scape_config(args)) if scape else "ddp",
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=math.ceil(args.steps / 12),
        check_val_every_n_epoch=None,
        limit_val_batches=args.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=every,
        default_root_dir=folder,  # SLURM's signal saves here, and a later job's start looks here
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[figures, LearningRateMonitor(), TQDMProgressBar(20), *monitor, checkpoint],
        enable_model_summary=False,
    )
    return trainer, figures


def train(args: argparse.Namespace) -> None:
    """One run; every rank comes here."""
    folder = folder_of(args)
    seed_everything(args.seed)
    source = PythonSource(args.batch_size, args.context, seed=args.seed)
    model = build_gpt(f"python-{args.size}", args.context, SIZES[args.size])
    module = Pretraining(model, args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        trainer, figures = build_trainer(args, parameters, folder)
    except (ValueError, MisconfigurationException) as error:  # an option that Lightning or PythonSource refuses
        make_parser().error(str(error))
    start = find_start(folder) if args.resume else None
    trainer.validate(module, source, verbose=False)
    trainer.fit(module, source, ckpt_path=start)
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)
    trainer.validate(module, source, verbose=False)
    if not trainer.is_global_zero:
        return
    result = {
        "name": run_name(args),
        "settings": settings(args),
        "versions": versions(),
        "corpus_fingerprint": source.fingerprint,
        "model_parameters": parameters,
        "ranks": trainer.world_size,
        "lr": learning_rate(args),
        "seconds_run": figures.seconds_run,
        **figures.history[trainer.global_step],
        **figures.summary(),
        "history": [{"step": step, **figures.history[step]} for step in sorted(figures.history)],
        "seconds_history": [figures.seconds[step] for step in sorted(figures.history)],
        "sample": sample(model, args),
    }
    result["bits_per_byte"] = result["val_loss"] / math.log(2)
    if result["bytes_total"]:  # nothing is sent by a single rank
        result["ratio"] = result["bytes_dense"] / result["bytes_total"]
        result["ratio_run"] = result["bytes_dense"] * args.steps / result["bytes_sent"]
    save_checkpoint(model, folder / "final")
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    shown = [result, *recorded(result)]
    plot(shown, folder / "loss.png")
    print(f"\nA sample at temperature 0.8:\n\n{result['sample']}\n")
    print(table(shown))
    print(f"\nIn {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def recorded(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The run of dense AdamW that lies in the repository, beside one of SCAPE with the same settings and data."""
    if result["settings"]["strategy"] == "ddp" or not RECORDED.exists():
        return []
    dense = json.loads(RECORDED.read_text())
    same = all(result["settings"].get(name) == value for name, value in dense["settings"].items() if name != "strategy")
    if not same or result["corpus_fingerprint"] != dense["corpus_fingerprint"]:
        return []
    return [{**dense, "name": f"{dense['name']} (recorded, another machine)", "recorded": True}]


def find_start(folder: Path) -> Path | None:
    """The checkpoint to go on from, if there is one; the log so far, which would be overwritten, is renamed."""
    start, log = newest_checkpoint(folder, "*.ckpt"), folder / "metrics.csv"
    if rank_zero_only.rank == 0:
        print(f"goes on from {start}" if start else f"no checkpoint in {folder}: starts from the beginning", flush=True)
        if start and log.exists():
            log.rename(folder / f"metrics-{len(list(folder.glob('metrics*.csv')))}.csv")
    return start


def sample(model: GPT, args: argparse.Namespace) -> str:
    """What the model writes after `PROMPT`, as far as its context reaches."""
    model = model.cpu().eval()
    model.set_kv_cache(batch_size=1)
    prompt = torch.tensor(list(PROMPT.encode()))
    torch.manual_seed(args.seed)
    text = generate(model, prompt, max_returned_tokens=args.context, temperature=0.8)
    model.clear_kv_cache()
    return bytes(text.tolist()).decode("utf-8", errors="replace")


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, one column per run."""
    lines = [["", *(result["name"] for result in results)], ["---"] * (1 + len(results))]
    for title, key, form, unit in ROWS:
        lines.append([title, *(show(result.get(key), form, unit) for result in results)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(value: float | str | None, form: str, unit: float) -> str:
    if value is None:
        return "-"
    return form.format(value if isinstance(value, str) else value * unit)


def seconds_of(result: dict[str, Any]) -> list[float]:
    """Of each validation; where a run has not recorded them, by its steps."""
    steps = [point["step"] for point in result["history"]]
    return result.get("seconds_history") or [result["seconds_run"] * step / steps[-1] for step in steps]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Validation loss over steps, over what a rank has sent, and over seconds."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4), sharey=True, layout="constrained")
    over_steps, over_bytes, over_seconds = panels
    for result in results:
        losses = [point["val_loss"] for point in result["history"]]
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if result.get("recorded") else {"marker": "."}
        over_steps.plot([point["step"] for point in result["history"]], losses, label=result["name"], **style)
        over_bytes.plot([point["bytes_sent"] / 1e6 for point in result["history"]][1:], losses[1:], **style)
        over_seconds.plot(seconds_of(result), losses, **style)
    over_steps.set(xlabel="steps", ylabel="validation loss (nats per byte)")
    over_bytes.set(xlabel="megabytes sent per rank")
    over_seconds.set(xlabel="seconds, on one machine without a network to wait for")
    over_bytes.set_xscale("log" if all(result["bytes_total"] for result in results) else "linear")
    over_steps.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def compare(args: argparse.Namespace) -> None:
    """All runs, each in processes of its own, on the same batches in the same order."""
    results = []
    for choice in RUNS:
        sparsity = SPARSITY if choice["strategy"] == "ddp" else {}
        run_args = argparse.Namespace(**{**vars(args), **sparsity, **choice, "compare": False})
        path = folder_of(run_args) / "result.json"
        if is_done(path, run_args):
            print(f"{run_name(run_args)}: done before, see {path}")
        else:
            print(f"{run_name(run_args)}: training", flush=True)
            status = subprocess.run([sys.executable, __file__, *to_flags(run_args)], check=False).returncode
            if status:
                raise SystemExit(f"{run_name(run_args)} must end with status 0, got {status}: its output is above.")
        results.append(json.loads(path.read_text()))
    plot(results, args.out / "compare.png")
    (args.out / "compare.md").write_text(table(results) + "\n")
    print(f"\n{table(results)}\n\nIn {args.out}: compare.md, compare.png and a folder for each run")


def is_done(path: Path, args: argparse.Namespace) -> bool:
    if not path.exists():
        return False
    try:
        result = json.loads(path.read_text())
    except ValueError:  # cut off, by a full disk say
        return False
    # What this script wrote before it recorded that version has no `config` either: only dense runs can agree.
    recorded = {"lightning_scape": lightning_scape.__version__, **result["versions"]}
    had = {name: value for name, value in result["settings"].items() if name not in not_of(args.strategy)}
    return (had, recorded) == (settings(args), versions())


def to_flags(args: argparse.Namespace) -> list[str]:
    left_out = {"compare", "resume", *not_of(args.strategy)}
    values = {name: value for name, value in vars(args).items() if name not in left_out and value is not None}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    return [*flags, "--resume"] if args.resume else flags


def settings(args: argparse.Namespace) -> dict[str, Any]:
    left_out = {"out", "compare", "resume", *not_of(args.strategy)}
    kept = {name: value for name, value in vars(args).items() if name not in left_out}
    config = {"config": scape_config(args).as_dict()} if args.strategy == "scape" else {}
    return {**kept, **config, "lr": learning_rate(args)}


def not_of(strategy: str) -> set[str]:
    """Options that say nothing of a run with this strategy."""
    return set(SPARSITY) if strategy == "ddp" else set()


def scape_config(args: argparse.Namespace) -> ScapeConfig:
    return ScapeConfig(**{name: getattr(args, name) for name in SPARSITY})


def versions() -> dict[str, str]:
    modules = (torch, lightning, torchmetrics, lightning_scape)
    return {"python": platform.python_version(), **{module.__name__: str(module.__version__) for module in modules}}


def folder_of(args: argparse.Namespace) -> Path:
    return args.out / run_name(args).replace("%", "").replace(" ", "-").lower()


def run_name(args: argparse.Namespace) -> str:
    if args.strategy == "scape":
        update = " AdamS" if args.optimizer == "adams" else ""
        steps = args.sparsity_warmup_steps
        warmup = "" if steps is None else f" warm-up {steps}"
        return f"SCAPE {100 * args.sparsity:g}%{update}{warmup}"
    return f"dense {'AdamW' if args.optimizer == 'adamw' else 'AdamS'}"


def whole(least: int) -> Callable[[str], int]:
    """The type of an option that must be a whole number >= `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text!r}. Use {least} or more.")
        return int(text)

    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--compare", action="store_true", help="run dense AdamW, SCAPE 90%% and SCAPE 99%%")
    add("--resume", action="store_true", help="go on from the checkpoint of an interrupted run, if there is one")
    add("--strategy", choices=("scape", "ddp"), default="scape")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="adams is the update of SCAPE's paper")
    add("--sparsity", type=float, help="share of the entries that is not sent in a step (default: 0.99)")
    add("--dense-steps", type=whole(0), help="first steps that send everything (default: 0)")
    add(
        "--sparsity-warmup-steps",
        type=whole(0),
        help="in which the density falls (default: 4950 at 99%%)",
    )
    add("--steps", type=whole(1), default=1200)
    add("--lr", type=float, help=f"default: {LEARNING_RATES}")
    add("--size", choices=tuple(SIZES), default="small")
    add("--batch-size", type=whole(1), default=4, help="windows per rank")
    add("--context", type=whole(len(PROMPT) + 1), default=128, help="bytes per window; the sample starts with 4")
    add("--val-batches", type=whole(1), default=40, help="validation batches per rank")
    add("--devices", type=whole(1), default=2, help="ranks on this node")
    add("--nodes", type=whole(1), default=1)
    add("--accelerator", default="cpu")
    add("--precision", default="32-true")
    add("--seed", type=whole(0), default=0)
    add("--out", type=Path, default=Path("out/pretrain_python"))
    return parser


def parse_args() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    if args.compare and "LOCAL_RANK" in os.environ:
        parser.error("--compare starts the ranks of each run itself: call it with python, not with torchrun.")
    for name in ("sparsity", "strategy", "optimizer"):
        if args.compare and (value := getattr(args, name)) != parser.get_default(name):
            parser.error(f"--compare must go without --{name}, got {value}: it sets each run's own. Drop one.")
    given = ", ".join(f"--{name.replace('_', '-')}" for name in SPARSITY if getattr(args, name) is not None)
    if args.strategy == "ddp" and not args.compare and given:
        parser.error(f"--strategy ddp sends everything and must go without {given}. Drop it, or use --strategy scape.")
    if args.lr is not None and not 0 <= args.lr < math.inf:
        parser.error(f"--lr must be a number >= 0, got {args.lr}. Leave it out for {LEARNING_RATES}.")
    if args.seed >= 2**32:
        parser.error(f"--seed must be less than 2**32, got {args.seed}. Use a smaller one.")
    for name, default in SPARSITY.items():
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
    try:
        scape_config(args)
    except ValueError as error:
        parser.error(str(error))
    return args


@ends_quietly
def main() -> None:
    # The loader slices a tensor in memory, so workers would only cost; its length is exact.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*`IterableDataset` has `__len__` defined.*")
    # It holds the log of the validation before the first step.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    args = parse_args()
    if args.compare:
        compare(args)
    elif args.resume and is_done(folder_of(args) / "result.json", args):
        print(f"{run_name(args)}: done before, see {folder_of(args) / 'result.json'}")
    else:
        train(args)


if __name__ == "__main__":
    main()
