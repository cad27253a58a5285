"""A job that loses a machine and goes on; when the machine comes back, it is taken in. Docs: docs/elastic.md.

    python examples/elastic.py                     # two agents of torchrun on this machine; one is killed, and returns
    sudo python examples/elastic.py --two-hosts    # two hosts made of network namespaces; one is cut off, and returns

What runs on every machine, and all that a user's own script needs, is `train` below, started by

    lightning-scape torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint HOST:29400 --rdzv-id NAME examples/elastic.py --out out/elastic

Without that the script plays the machines itself: it starts that command twice, takes one away when 100 steps are
done, waits for 100 steps without it, starts it again, and ends the job 100 steps after it was taken in. It writes
`elastic.json` and `elastic.png` (one loss curve over all of it), and fails if more steps were lost than lie between two
checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from python_source import PythonSource
from torch import Tensor, nn

from lightning_scape import ScapeStrategy, __version__

BATCHES_PER_STEP = 4
"""On all ranks together: the global batch, however many ranks there are."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/elastic"), help="folder for checkpoints and results")
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--phase", type=int, default=100, help="steps with both machines, then one, then both again")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds that a step takes at least")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that ranks wait for each other")
    parser.add_argument("--alone", action="store_true", help="end without the machine that was lost")
    parser.add_argument("--two-hosts", action="store_true", help="machines are network namespaces (root)")
    return parser.parse_args()


# --------------------------------------------------------------------------------------- what runs on every machine


class NextByte(L.LightningModule):
    """Guesses a byte from the eight before it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 256))

    def training_step(self, batch: Tensor) -> Tensor:
        windows = batch.unfold(1, 9, 1).flatten(0, 1)
        loss = nn.functional.cross_entropy(self.net(windows[:, :8]), windows[:, 8])
        self.log("loss", loss, on_step=True, on_epoch=False)
        self.log("steps", float(self.trainer.global_step))  # by which the newest checkpoints are kept
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Curve(Callback):
    """Notes each optimizer step, and ends the job where `end_at` says. Only this demonstration needs it."""

    def __init__(self, out: Path, pace: float) -> None:
        self.out, self.pace = out, pace
        self.began = self.due = time.time()
        self.losses: list[float] = []
        self.step = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        if trainer.global_step == self.step:  # batches are accumulated
            return
        self.step = trainer.global_step
        loss, self.losses = sum(self.losses) / len(self.losses), []
        if trainer.is_global_zero:
            line = {
                "step": trainer.global_step,
                "loss": loss,
                "ranks": trainer.world_size,
                "batches": trainer.world_size * trainer.accumulate_grad_batches,
                "start": self.began,
                "time": time.time(),
                "skipped": trainer.optimizers[0].stats.skipped_total,
            }
            with open(self.out / "curve.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        # Written tens of steps before, so that all ranks stop at the same one.
        with contextlib.suppress(FileNotFoundError, ValueError):
            trainer.should_stop = trainer.global_step >= int((self.out / "end_at").read_text())
        self.due = max(time.time(), self.due + self.pace)
        time.sleep(self.due - time.time() if self.due > time.time() else 0.0)


def train(arguments: argparse.Namespace) -> None:
    strategy = ScapeStrategy(
        sparsity=0.9,
        sparsity_warmup_steps=50,
        timeout=arguments.timeout,
        state_dict_type="sharded",
        async_save=True,
        resume="auto",
        batches_per_step=BATCHES_PER_STEP,
    )
    keep = ModelCheckpoint(
        arguments.out / "checkpoints",
        every_n_train_steps=arguments.save_every,
        save_top_k=2,
        monitor="steps",
        mode="max",
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # torchrun's, as the number of machines
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=-1,
        max_epochs=-1,
        logger=False,
        callbacks=[keep, Curve(arguments.out, arguments.pace)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(0)
    trainer.fit(NextByte(), PythonSource(batch_size=2, context_length=64))


# ------------------------------------------------------------------------------------- the demonstration: two machines


class Machine:
    """One agent of torchrun and the ranks that it starts."""

    def __init__(self, name: str, start: Callable[..., subprocess.Popen], options: list[str], out: Path) -> None:
        self._start, self._options, self._out, self.name = start, options, out, name
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "lightning_scape", "torchrun", *self._options]
        with open(self._out / f"{self.name}.log", "a") as log:
            self._process = self._start(command, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """Agent and ranks at once, as a power cut does."""
        if self._process is not None:
            for pid in (self._process.pid, *descendants(self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None


def descendants(pid: int) -> list[int]:
    """Process ids of all that a process has started (Linux)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


@contextlib.contextmanager
def machines(arguments: argparse.Namespace) -> Iterator[tuple[Machine, Machine, Callable[[str], None]]]:
    """Two machines, and how the link of the second is set `up` or `down`."""
    script = [str(Path(__file__).resolve()), f"--out={arguments.out}", f"--pace={arguments.pace}"]
    script += [f"--timeout={arguments.timeout}", f"--save-every={arguments.save_every}"]
    with contextlib.ExitStack() as stack:
        if arguments.two_hosts:
            sys.path.append(str(Path(__file__).parent / "benchmarks"))
            from namespaces import Hosts

            hosts = stack.enter_context(Hosts(2, rate="1gbit"))
            addresses = [host.address for host in hosts]
            starts: list[Callable[..., subprocess.Popen]] = [host.start for host in hosts]
            set_link = hosts[1].set_link
        else:
            addresses = ["127.0.0.1", "127.0.0.1"]
            local = {"env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, "start_new_session": True}
            starts = [lambda command, **options: subprocess.Popen(command, **local, **options)] * 2

            def set_link(state: str) -> None:
                """One machine has no link to itself."""

        found = []
        port = free_port()
        for number, (start, address) in enumerate(zip(starts, addresses, strict=True)):
            options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
            options += [f"--rdzv-endpoint={addresses[0]}:{port}", "--rdzv-id=elastic", f"--local-addr={address}"]
            # How soon a silent machine counts as lost, and how long a restart waits for more machines.
            conf = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5"
            options += [f"--rdzv-conf={conf},is_host={1 - number}"]
            found.append(Machine("ab"[number], start, [*options, *script], arguments.out))
            stack.callback(found[-1].kill)
        yield found[0], found[1], set_link


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def read_curve(out: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        lines = (out / "curve.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def wait_for(what: str, there: Callable[[], bool], alive: Machine, out: Path, seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        if not alive.running or time.monotonic() > deadline:
            log = (out / f"{alive.name}.log").read_text()[-4000:]
            raise SystemExit(f"The job must reach {what} within {seconds:.0f} s, got:\n{log}")
        time.sleep(0.2)


def demonstrate(arguments: argparse.Namespace) -> dict[str, Any]:
    out, phase = arguments.out, arguments.phase
    marks: dict[str, float] = {}

    def steps_since(mark: str, ranks: int) -> int:
        found = [point["step"] for point in read_curve(out) if point["start"] > marks[mark] and point["ranks"] == ranks]
        return max(found) - min(found) if found else 0

    with machines(arguments) as (first, second, set_link):
        marks["begin"] = time.time()
        first.start()
        second.start()
        wait_for("its first phase", lambda: steps_since("begin", 2) >= phase, first, out)
        marks["lost"] = time.time()
        set_link("down")
        if not arguments.two_hosts:
            second.kill()
        wait_for("steps without the lost machine", lambda: steps_since("lost", 1) >= phase, first, out)
        left = [first]
        if not arguments.alone:
            if arguments.two_hosts:
                second.kill()  # what has not noticed yet that it is cut off: the machine is started anew
            set_link("up")
            marks["back"] = time.time()
            second.start()
            wait_for("steps with the machine that came back", lambda: steps_since("back", 2) >= phase, first, out)
            left.append(second)
        (out / "end_at").write_text(str(read_curve(out)[-1]["step"] + 50))
        for machine in left:
            if machine.wait(120):
                raise SystemExit((out / f"{machine.name}.log").read_text()[-4000:])
    return summarize(read_curve(out), marks, arguments)


def summarize(curve: list[dict[str, Any]], marks: dict[str, float], arguments: argparse.Namespace) -> dict[str, Any]:
    """The numbers of the demonstration, from the curve that rank 0 of each start has written."""
    starts = sorted({point["start"] for point in curve})
    parts = [[point for point in curve if point["start"] == start] for start in starts]
    restarts = [
        {
            "ranks": after[0]["ranks"],
            "batches_per_step": after[0]["batches"],
            "last_step_before": before[-1]["step"],
            "first_step_after": after[0]["step"],
            "steps_lost": before[-1]["step"] - after[0]["step"] + 1,
            "seconds_without_steps": after[0]["time"] - before[-1]["time"],
            "loss_before": sum(point["loss"] for point in before[-20:]) / len(before[-20:]),
            "loss_after": sum(point["loss"] for point in after[:20]) / len(after[:20]),
        }
        for before, after in zip(parts, parts[1:], strict=False)
    ]
    return {
        "two_hosts": arguments.two_hosts,
        "save_every": arguments.save_every,
        "timeout": arguments.timeout,
        "marks": {name: at - marks["begin"] for name, at in marks.items()},
        "ranks": [part[0]["ranks"] for part in parts],
        "restarts": restarts,
        "last_step": curve[-1]["step"],
        "first_loss": sum(point["loss"] for point in curve[:20]) / 20,
        "last_loss": sum(point["loss"] for point in curve[-20:]) / 20,
        "skipped": curve[-1]["skipped"],
        "torch": torch.__version__,
        "lightning_scape": __version__,
        "curve": [{key: point[key] for key in ("step", "loss", "ranks")} for point in curve],
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    parts: list[list[dict[str, Any]]] = []
    for point in result["curve"]:
        if not parts or point["ranks"] != parts[-1][-1]["ranks"] or point["step"] <= parts[-1][-1]["step"]:
            parts.append([])
        parts[-1].append(point)
    for part in parts:
        mean = [sum(p["loss"] for p in part[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(part))]
        label = f"{part[0]['ranks']} rank{'s' if part[0]['ranks'] > 1 else ''}, from step {part[0]['step']}"
        axes.plot([point["step"] for point in part], mean, label=label)
    axes.set(
        xlabel="optimizer step", ylabel="loss, nats per byte (mean over 10)", title="A machine is lost, and returns"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    arguments = parse_arguments()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train(arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if (arguments.out / "curve.jsonl").exists():
        raise SystemExit(f"--out must be a new folder, got {arguments.out}, which holds another run. Name another one.")
    result = demonstrate(arguments)
    (arguments.out / "elastic.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, arguments.out / "elastic.png")
    for restart in result["restarts"]:
        print(
            f"{restart['ranks']} ranks from step {restart['first_step_after']}: {restart['steps_lost']} steps lost,"
            f" {restart['seconds_without_steps']:.0f} s without a step, loss {restart['loss_before']:.3f} before and"
            f" {restart['loss_after']:.3f} after"
        )
    lost = max(restart["steps_lost"] for restart in result["restarts"])
    # What was being written in the background when the machine was lost is not complete: the one before it holds.
    if lost > 2 * arguments.save_every:
        raise SystemExit(f"At most {2 * arguments.save_every} steps may be lost, got {lost}.")


if __name__ == "__main__":
    main()
