"""Thousands of steps, and is all still well? Memory over time, replicas compared, checkpoints written and gone on from.

    python examples/soak.py                        # 5,000 steps on 2 ranks, a few minutes
    python examples/soak.py --steps 300 --save-every 100

Accumulation lengths are drawn at random for each step, a sharded checkpoint is written in the background every
`--save-every` steps, and every second one is loaded at once, as a restart would. Ranks are compared bit for bit every
50 steps. Writes `soak.json` and `soak.png`; fails if memory grows by more than `--bound` MB after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import lightning as L
import torch
from litgpt import GPT, Config

from lightning_scape import FabricScapeStrategy, PythonSource, __version__


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--bound", type=float, default=8.0, help="MB by which a rank's memory may grow after 1/5")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder for JSON, PNG and checkpoints")
    return parser.parse_args()


def resident_megabytes() -> float:
    """Memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def train(fabric: L.Fabric, arguments: argparse.Namespace) -> dict[str, Any]:
    source = PythonSource(batch_size=2, context_length=32, max_bytes=1_000_000)
    source.setup("fit")
    torch.manual_seed(0)
    config = Config(
        block_size=32, vocab_size=256, padded_vocab_size=256, n_layer=2, n_head=2, n_embd=32, intermediate_size=64
    )
    model = GPT(config)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = source.train_dataloader()
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    lengths = random.Random(0)  # the same on all ranks
    curve: list[dict[str, float]] = []
    began = time.perf_counter()
    loss, batches, resumed = 0.0, iter(loader), 0
    while state["step"] < arguments.steps:
        window = lengths.randint(1, 4)
        for micro in range(window):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            with fabric.no_backward_sync(model, enabled=micro < window - 1):
                logits = model(batch[:, :-1])
                part = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
                fabric.backward(part / window)
            loss = part.item() if not loss else 0.99 * loss + 0.01 * part.item()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
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
                batches, resumed = iter(loader), resumed + 1
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


def main() -> None:
    arguments = parse_arguments()
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
