"""A tour: train on two processes, look at the run, stop, go on with three, and plan for real machines.

    python examples/tour.py            # one to two minutes on two CPU cores; needs pip install -e '.[examples]'

It reads like a notebook: editors that know `# %%` cells (VS Code, PyCharm, Spyder, Jupyter with jupytext) run it cell
by cell. All that it writes goes to out/tour.
"""

# %% 1. Is all well here?
#
# `lightning-scape doctor` says what is installed, what would not work on this machine, and what would be slow. On a
# cluster, run it under torchrun: it then measures the links between the nodes, too. Here we call the same function that
# the command calls.

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import lightning as L
import matplotlib
import torch
from torch import Tensor, nn

from lightning_scape import PythonSource, ScapeMonitor, ScapeStrategy, newest_checkpoint
from lightning_scape.reporting import History
from lightning_scape.tools import commands

SHORT = "--short" in sys.argv  # for tests: the same tour with fewer steps
STEPS = 40 if SHORT else 400
OUT = Path("out/tour")

torch.manual_seed(0)
torch.set_num_threads(1)  # processes share the cores, and are forked: a thread pool would not survive that
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*`IterableDataset` has `__len__` defined.*")
warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # the report lies in it

commands.main(["doctor"])


# %% 2. A model, as for any other strategy
#
# A small network that predicts the next byte of Python's standard library. Nothing in it knows of SCAPE:
# `configure_optimizers` returns torch's AdamW with the settings that you would use anyway.


class NextByte(L.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def loss(self, batch: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(batch[:, :-1]))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data(ranks: int) -> PythonSource:
    # The same 12 windows in every step, however many ranks share them.
    return PythonSource(batch_size=12 // ranks, context_length=48, max_bytes=2_000_000)


# %% 3. Train on two processes
#
# The strategy is the only thing that changes. `start_method="fork"` works in scripts and in notebooks alike; on a
# cluster you would leave it out. `ScapeMonitor(report=...)` keeps the figures of the run, and leaves a page with plots.
#
# We stop in the middle, as a job whose time is over would: `StopAfter` asks the Trainer to end after half of the steps.
# A checkpoint is there, because `ModelCheckpoint` has saved one just before.


class StopAfter(L.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def make_trainer(ranks: int, stop_after: int) -> L.Trainer:
    saver = L.pytorch.callbacks.ModelCheckpoint(OUT, every_n_train_steps=STEPS // 4, save_top_k=-1)
    return L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=STEPS // 4, start_method="fork"),
        max_steps=STEPS,
        gradient_clip_val=1.0,
        val_check_interval=STEPS // 4,
        limit_val_batches=4,
        callbacks=[
            ScapeMonitor(every_n_steps=max(1, STEPS // 40), report=OUT / "report"),
            saver,
            StopAfter(stop_after),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


make_trainer(ranks=2, stop_after=STEPS // 2).fit(NextByte(), data(ranks=2))


# %% 4. Look at the run
#
# Open out/tour/report/report.html in a browser: loss, density, bytes by kind, time by phase, churn, skipped steps. It
# is one file, and needs no server. The figures behind it are in figures.jsonl beside it; here are some of them.


def tell(history: History) -> None:
    for run in history.line():
        for point in (run.points[0], run.points[-1]):
            figures = point["metrics"]
            print(
                f"{run.about['ranks']} ranks, step {point['step']}: loss {point['loss']:.3f},"
                f" density {figures['scape/density']:.3f}, sent {figures['scape/bytes_total'] / 1e3:.1f} KB"
                f" ({figures['scape/compression']:.1f}x less than dense)"
            )


print("\nThe run so far:")
tell(History.read(OUT / "report"))


# %% 5. Go on, on another number of ranks
#
# The checkpoint holds what every rank has computed and not yet sent. Here three ranks take up what two have left: each
# gets the mean of it, so that nothing is lost, and a warning says what did not carry over. The report goes on, too: its
# curves continue, and a dotted line shows where.

start = newest_checkpoint(OUT, "*.ckpt")
print(f"\nGoing on from {start}")
make_trainer(ranks=3, stop_after=STEPS).fit(NextByte(), data(ranks=3), ckpt_path=start)
print("\nThe whole run:")
history = History.read(OUT / "report")
tell(history)


# %% 6. A picture of your own
#
# `figures.jsonl` is one line of JSON for each point, so any tool can draw it. This one shows the loss over what a rank
# has sent, which is what counts on a slow link.

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of where it draws

points = [point for run in history.line() for point in run.points]
sent, total = [], 0.0
for before, point in zip([{"step": 0}, *points], points, strict=False):
    total += (point["step"] - before["step"]) * point["metrics"]["scape/bytes_total"] / 1e6
    sent.append(total)
figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.plot(sent, [point["loss"] for point in points], ".-")
axes.set(xlabel="sent per rank (MB)", ylabel="training loss (nats per byte)")
figure.savefig(OUT / "loss_over_bytes.png", dpi=120)
print(f"\nDrawn: {OUT / 'loss_over_bytes.png'}")


# %% 7. Would it pay on your machines?
#
# `lightning-scape plan` predicts a step's time on machines that you do not have yet. Say what you know: the model, the
# nodes, their link, and how long forward and backward take on one of them.

print("\nA plan for eight nodes on 1 Gbit/s:\n")
commands.main(
    ["plan", "--model", "pythia-160m", "--nodes", "8", "--bandwidth", "1gbit", "--step-compute", "0.8s"]
    + ["--sparsity", "0.9", "0.99"]
)
