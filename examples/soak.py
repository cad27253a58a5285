"""Thousands of steps, and is all still well? Memory over time, replicas compared, checkpoints written and gone on from.

    python examples/soak.py                        # 5,000 steps on 2 ranks, a few minutes
    python examples/soak.py --steps 300 --save-every 100
    python examples/soak.py --kill-every 500 --steps 20000 --save-every 100

Accumulation lengths are drawn at random for each step, a sharded checkpoint is written in the background every
`--save-every` steps, and every second one is loaded at once, as a restart would. Ranks are compared bit for bit every
50 steps. Writes `soak.json` and `soak.png`; fails if memory grows by more than `--bound` MB after the warm-up.

With `--kill-every` a rank is killed (SIGKILL) at random, so many steps apart on average, at any moment of a step or of
a background write. The job starts again at once from the newest complete checkpoint, on 2 and 3 ranks in turn, with the
same global batch. Writes `kills.json` and `kills.png`; fails if a step is missing or was skipped, if the loss jumps at
restarts, or if memory grows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import lightning as L
import torch
from litgpt import GPT, Config

from lightning_scape import FabricScapeStrategy, PythonSource, __version__, resume_path

BATCHES_PER_STEP = 6
"""Of all ranks, with `--kill-every`: 3 on each of 2, 2 on each of 3."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--bound", type=float, default=8.0, help="MB by which a rank's memory may grow after 1/5")
    parser.add_argument("--kill-every", type=float, default=0.0, help="steps between kills, on average; 0: none")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="with --kill-every: end earlier, after so many; 0: no"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is killed and when")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder for JSON, PNG and checkpoints")
    return parser.parse_args()


def resident_megabytes() -> float:
    """Memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def set_up(fabric: L.Fabric, layers: int = 2) -> dict[str, Any]:
    source = PythonSource(batch_size=2, context_length=32, max_bytes=1_000_000)
    source.setup("fit")
    torch.manual_seed(0)
    config = Config(
        block_size=32, vocab_size=256, padded_vocab_size=256, n_layer=layers, n_head=2, n_embd=32, intermediate_size=64
    )
    model = GPT(config)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return {"model": model, "optimizer": optimizer, "loader": source.train_dataloader(), "step": 0}


def take_step(fabric: L.Fabric, state: dict[str, Any], batches: Iterator[torch.Tensor], window: int) -> float:
    """One optimizer step over `window` batches; the mean loss of this rank's."""
    model, optimizer = state["model"], state["optimizer"]
    total = 0.0
    for micro in range(window):
        batch = next(batches)
        with fabric.no_backward_sync(model, enabled=micro < window - 1):
            logits = model(batch[:, :-1])
            part = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            fabric.backward(part / window)
        total += part.item() / window
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    return total


def endless(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def train(fabric: L.Fabric, arguments: argparse.Namespace) -> dict[str, Any]:
    state = set_up(fabric)
    model, optimizer, loader = state["model"], state["optimizer"], state["loader"]
    lengths = random.Random(0)  # the same on all ranks
    curve: list[dict[str, float]] = []
    began = time.perf_counter()
    loss, batches, resumed = 0.0, endless(loader), 0
    while state["step"] < arguments.steps:
        part = take_step(fabric, state, batches, lengths.randint(1, 4))
        loss = part if not loss else 0.98 * loss + 0.02 * part
        if state["step"] == arguments.steps:
            stats = optimizer.stats
        if state["step"] % max(1, arguments.steps // 100) == 0:
            curve.append({"step": state["step"], "megabytes": resident_megabytes(), "loss": loss})
        if state["step"] % arguments.save_every == 0:
            path = arguments.out / "checkpoints" / f"{state['step'] % (2 * arguments.save_every)}.ckpt"
            fabric.save(path, state)
            if state["step"] % (2 * arguments.save_every) == 0:
                before = {name: value.clone() for name, value in model.state_dict().items()}
                fabric.load(path, state)  # waits for the write
                batches, resumed = endless(loader), resumed + 1
                for name, value in model.state_dict().items():
                    if not torch.equal(before[name], value):
                        raise RuntimeError(f"{name} is not what was saved")
    fabric.strategy.wait_for_checkpoint()
    settled = [point["megabytes"] for point in curve if point["step"] > arguments.steps / 5]
    third = max(1, len(settled) // 3)
    growth = sum(settled[-third:]) / third - sum(settled[:third]) / third
    return {
        "steps": state["step"],
        "ranks": fabric.world_size,
        "precision": arguments.precision,
        "parameters": sum(p.numel() for p in model.parameters()),
        "checkpoints": arguments.steps // arguments.save_every,
        "resumed": resumed,
        "skipped": stats.skipped_total,
        "residual_norm": float(stats.residual_norm),
        "seconds": time.perf_counter() - began,
        "growth_megabytes": growth,
        "bound_megabytes": arguments.bound,
        "torch": torch.__version__,
        "lightning_scape": __version__,
        "curve": curve,
    }


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, loss) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    for rank, result in enumerate(results):
        steps = [point["step"] for point in result["curve"]]
        memory.plot(steps, [point["megabytes"] for point in result["curve"]], label=f"rank {rank}")
        loss.plot(steps, [point["loss"] for point in result["curve"]], label=f"rank {rank}")
    top = max(point["megabytes"] for result in results for point in result["curve"])
    memory.set(ylabel="resident memory, MB", ylim=(0, 1.2 * top), title="Memory and loss over a long run")
    loss.set(ylabel="loss, nats per byte (mean over 100)", xlabel="optimizer step")
    memory.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------------- kills


class Kill(NamedTuple):
    step: int
    rank: int
    delay: float
    """Seconds after the step's begin."""


def train_until_killed(fabric: L.Fabric, arguments: argparse.Namespace, start: int, kill: Kill | None) -> None:
    """One start of the job: from the newest complete checkpoint to its end, or to the kill."""
    state = set_up(fabric, layers=1)
    folder = arguments.out / "checkpoints"
    newest = resume_path(folder)
    if newest is not None:
        fabric.load(newest, state)
    batches, window = endless(state["loader"]), BATCHES_PER_STEP // fabric.world_size
    with open(arguments.out / f"start-{start}-rank-{fabric.global_rank}.jsonl", "w", buffering=1) as log:
        while state["step"] < arguments.steps:
            if kill is not None and (state["step"] + 1, fabric.global_rank) == kill[:2]:
                threading.Timer(kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            loss = take_step(fabric, state, batches, window)
            skipped = state["optimizer"].stats.skipped_total
            line = {"step": state["step"], "loss": loss, "megabytes": resident_megabytes(), "skipped": skipped}
            log.write(json.dumps(line) + "\n")
            if state["step"] % arguments.save_every == 0:
                number = state["step"] // arguments.save_every % 3  # the newest, the one before, and one being written
                fabric.save(folder / f"{number}.ckpt", state)
                if fabric.broadcast(arguments.deadline is not None and time.time() > arguments.deadline):
                    break
    fabric.strategy.wait_for_checkpoint()


def survive(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the job again and again until it has come to its end; what each start has done."""
    random_numbers = random.Random(arguments.seed)
    arguments.deadline = time.time() + 60 * arguments.minutes if arguments.minutes else None
    starts: list[dict[str, Any]] = []
    done = 0
    for number, ranks in enumerate(itertools.cycle((2, 3))):
        apart = 1 + round(random_numbers.expovariate(1 / arguments.kill_every))
        kill = Kill(done + apart, random_numbers.randrange(ranks), random_numbers.uniform(0.0, 0.05))
        strategy = FabricScapeStrategy(
            sparsity=0.99,
            check_replicas_every=50,
            state_dict_type="sharded",
            async_save=True,
            start_method="fork",
            timeout=120,
        )
        fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision=arguments.precision)
        began = time.perf_counter()
        ended = True
        try:
            fabric.launch(train_until_killed, arguments, number, kill if kill.step <= arguments.steps else None)
        except torch.multiprocessing.ProcessExitedException as error:
            if error.signal_name != "SIGKILL":
                raise
            ended = False
        lives = [read_log(arguments.out / f"start-{number}-rank-{rank}.jsonl") for rank in range(ranks)]
        starts.append({"ranks": ranks, "seconds": time.perf_counter() - began, "lives": lives})
        done = max([done, *(line["step"] for life in lives for line in life)])
        if ended:
            return starts
    raise AssertionError("unreachable: the numbers of ranks repeat for ever")


def read_log(path: Path) -> list[dict[str, float]]:
    """What a rank has written; a rank that was killed before its first step has not."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def judge(starts: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps, losses and memory over all starts."""
    begun = [start for start in starts if start["lives"][0]]
    spans = [(start["lives"][0][0]["step"], start["lives"][0][-1]["step"]) for start in begun]
    reached, missing, lost, differences = 0, [], [], []
    loss_at: dict[int, float] = {}
    for (first, last), start in zip(spans, begun, strict=True):
        if first > reached + 1:
            missing.append([reached + 1, first - 1])
        if reached:
            lost.append(reached - first + 1)
        reached = max(reached, last)
        means = [
            {"step": lines[0]["step"], "loss": statistics.fmean(line["loss"] for line in lines)}
            for lines in zip(*start["lives"], strict=False)
        ]
        differences += redone(loss_at, means)
        loss_at |= {int(line["step"]): line["loss"] for line in means}
    memory = [max(life[-1]["megabytes"] for life in start["lives"] if life) for start in begun]
    grown = [
        life[-1]["megabytes"] - life[len(life) // 5]["megabytes"]
        for start in begun
        for life in start["lives"]
        if len(life) >= 250
    ]
    smooth, curve = None, []
    for step in sorted(loss_at):
        smooth = loss_at[step] if smooth is None else 0.98 * smooth + 0.02 * loss_at[step]
        if step % max(1, arguments.steps // 400) == 0:
            curve.append([step, round(smooth, 4)])
    return {
        "steps": reached,
        "steps_asked_for": arguments.steps,
        "steps_taken": sum(last - first + 1 for first, last in spans),
        "kills": len(starts) - 1,
        "ranks": [start["ranks"] for start in starts],
        "save_every": arguments.save_every,
        "kill_every": arguments.kill_every,
        "seconds": sum(start["seconds"] for start in starts),
        "spans": spans,
        "missing": missing,
        "lost_at_most": max(lost, default=0),
        "lost_on_average": statistics.fmean(lost or [0]),
        "skipped": max(line["skipped"] for start in begun for life in start["lives"] for line in life),
        "steps_taken_again": len(differences),
        "loss_difference_of_steps_taken_again": {
            "mean": statistics.fmean(differences or [0.0]),
            "standard_error": statistics.stdev(differences) / len(differences) ** 0.5 if differences[1:] else 0.0,
        },
        "megabytes_at_end_of_start": [round(value, 1) for value in memory],
        "growth_megabytes_within_starts": {
            "mean": statistics.fmean(grown or [0]),
            "most": max(grown, default=0.0),
            "lives": len(grown),
        },
        "bound_megabytes": arguments.bound,
        "torch": torch.__version__,
        "lightning_scape": __version__,
        "curve": curve,
    }


def redone(before: dict[int, float], life: list[dict[str, float]]) -> list[float]:
    """By how much the loss differs where a step was taken again after a restart, in nats: its batches are the same."""
    return [line["loss"] - before[int(line["step"])] for line in life if line["step"] in before]


def plot_kills(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, memory) = pyplot.subplots(2, 1, figsize=(7, 6))
    loss.plot(*zip(*result["curve"], strict=True), linewidth=1)
    for _, last in result["spans"][:-1]:
        loss.axvline(last, color="grey", linewidth=0.4)
    title = f"{result['steps']:,} steps, {result['kills']} kills (grey), 2 and 3 ranks in turn"
    loss.set(ylabel="loss, nats per byte (mean over 50)", xlabel="optimizer step", title=title)
    memory.plot(result["megabytes_at_end_of_start"], marker=".")
    top = 1.2 * max(result["megabytes_at_end_of_start"])
    memory.set(ylabel="resident memory, MB", xlabel="start of the job", ylim=(0, top))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def soak_with_kills(arguments: argparse.Namespace) -> None:
    if arguments.out.exists() and any(arguments.out.iterdir()):
        raise SystemExit(f"--out must be a new or empty folder, got {arguments.out}. Name another one.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = judge(survive(arguments), arguments)
    (arguments.out / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    plot_kills(result, arguments.out / "kills.png")
    for path in arguments.out.glob("start-*.jsonl"):
        path.unlink()
    shutil.rmtree(arguments.out / "checkpoints")
    growth = result["growth_megabytes_within_starts"]
    print(
        f"{result['steps']} steps, {result['kills']} kills, {result['steps_taken']} steps taken, at most"
        f" {result['lost_at_most']} lost at a kill, {result['skipped']} skipped, {result['seconds']:.0f} s, memory"
        f" grown by {growth['mean']:.1f} MB in a start, loss {result['curve'][-1][1]:.3f}"
    )
    problems = []
    if result["missing"] or result["skipped"]:
        problems.append(f"steps are missing ({result['missing']}) or skipped ({result['skipped']})")
    if result["lost_at_most"] > 2 * arguments.save_every:
        problems.append(f"{result['lost_at_most']} steps were lost, more than lie between three checkpoints")
    if growth["mean"] > arguments.bound:
        problems.append(f"memory grows by {growth['mean']:.1f} MB in a start")
    if abs(jump := result["loss_difference_of_steps_taken_again"]["mean"]) > 0.05:
        problems.append(f"the loss jumps by {jump:.3f} nats at restarts")
    if problems:
        raise SystemExit("; ".join(problems))


def main() -> None:
    arguments = parse_arguments()
    if arguments.kill_every:
        soak_with_kills(arguments)
    else:
        soak(arguments)


def soak(arguments: argparse.Namespace) -> None:
    strategy = FabricScapeStrategy(sparsity=0.99, check_replicas_every=50, state_dict_type="sharded", async_save=True)
    fabric = L.Fabric(accelerator="cpu", devices=arguments.devices, strategy=strategy, precision=arguments.precision)
    fabric.launch()
    result = train(fabric, arguments)
    results: list[Any] = [None] * fabric.world_size
    if fabric.world_size > 1:
        torch.distributed.all_gather_object(results, result)
    else:
        results = [result]
    if fabric.is_global_zero:
        (arguments.out / "soak.json").write_text(json.dumps(results, indent=1) + "\n")
        plot(results, arguments.out / "soak.png")
        shutil.rmtree(arguments.out / "checkpoints")
        for rank, one in enumerate(results):
            print(
                f"rank {rank}: {one['steps']} steps in {one['seconds']:.0f} s, loss {one['curve'][-1]['loss']:.3f},"
                f" {one['checkpoints']} checkpoints, {one['resumed']} of them gone on from, memory"
                f" {one['curve'][-1]['megabytes']:.0f} MB, grown by {one['growth_megabytes']:.1f} MB"
            )
    fabric.barrier()
    grown = max(one["growth_megabytes"] for one in results)
    if grown > arguments.bound:
        raise SystemExit(f"Memory must grow by at most {arguments.bound} MB after the warm-up, got {grown:.1f} MB.")


if __name__ == "__main__":
    main()
