"""What a checkpoint costs that is written while training goes on (`async_save`), or while it waits. Two ranks on CPUs.

    python examples/bench_async_save.py                      # pythia-14m, a few minutes on two idle cores
    python examples/bench_async_save.py --model pythia-14m --steps 6 --rounds 5 --out out/async_save
    sudo python examples/bench_async_save.py --link 100mbit --model small --kinds full full_async async_save --steps 60

With --link the ranks are on two hosts, network namespaces that a link of that rate joins (see two_hosts.py). "small" is
the 3M model of pretrain_python.py.

Blocks of steps with one checkpoint and without one take turns. A block ends when its checkpoint is complete. The cost
of a checkpoint is the difference of two neighbours: in CPU seconds of a rank (all threads, the one that writes too), in
seconds of the clock, in seconds for which `save` itself holds the step up, and in seconds that the block's steps lose
in all, those included. A share of the time follows for any interval. Writes a file for each kind, with the machine's
load: under load the clock says little, CPU seconds still hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import lightning as L
import torch
from litgpt import GPT, Config
from pretrain_python import SIZES, build_gpt
from two_hosts import Hosts, sent_bytes, torchrun

from lightning_scape import FabricScapeStrategy, __version__

KINDS: dict[str, dict[str, Any]] = {
    "async_save": {"state_dict_type": "sharded", "async_save": True},
    "sharded": {"state_dict_type": "sharded"},
    "full": {},
    "full_async": {"async_save": True},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-14m", help="of LitGPT's, or of pretrain_python.py's")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["async_save"])
    parser.add_argument("--link", help="rate of the link between two hosts; needs root (default: one machine)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=6, help="in a block")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--bound", type=float, default=0.02, help="share of the time that a save may cost")
    parser.add_argument("--minutes", type=float, default=5.0, help="between two saves, for the bound")
    parser.add_argument("--out", type=Path, default=Path("out/async_save"))
    return parser.parse_args()


def block(fabric: L.Fabric, state: dict[str, Any], steps: int, context: int, path: Path | None) -> dict[str, float]:
    """Some steps; before the first, a checkpoint to `path` is begun."""
    model, optimizer = state["model"], state["optimizer"]
    fabric.barrier()
    wall, cpu, held, in_steps = time.perf_counter(), time.process_time(), 0.0, 0.0
    sent = sent_bytes()[0] if on_hosts() else 0
    if path is not None:
        fabric.save(path, state)
        held = time.perf_counter() - wall
    for _ in range(steps):
        began = time.perf_counter()
        batch = torch.randint(255, (1, context + 1))
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        in_steps += time.perf_counter() - began
    training = held + in_steps
    fabric.strategy.wait_for_checkpoint()
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "held": held,
        "step": in_steps / steps,
        "training": training,
        "sent": sent_bytes()[0] - sent if on_hosts() else 0,
    }


def on_hosts() -> bool:
    return os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def measure(fabric: L.Fabric, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(fabric.global_rank)
    if arguments.model in SIZES:
        model = build_gpt(f"python-{arguments.model}", arguments.context, SIZES[arguments.model])
    else:
        model = GPT(Config.from_name(arguments.model, block_size=arguments.context))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer}
    path = arguments.out / "checkpoint"
    for warm_up in (None, path):
        block(fabric, state, 2, arguments.context, warm_up)
    without, saved = [], []
    load = [os.getloadavg()[0]]
    for number in range(arguments.rounds):
        turns = (None, path) if number % 2 else (path, None)  # whatever drifts is no gain of one
        for turn in turns:
            found = block(fabric, state, arguments.steps, arguments.context, turn)
            (without if turn is None else saved).append(found)
        load.append(os.getloadavg()[0])
    fabric.barrier()
    files = path.iterdir() if path.is_dir() else [path]
    found = {"without": without, "saved": saved, "load": load, "bytes": sum(file.stat().st_size for file in files)}
    moved = fabric.strategy.checkpoint_bytes
    return {**found, "memory_copied": own_bytes(optimizer), "moved": (moved.sent + moved.received) / (len(saved) + 1)}


def own_bytes(optimizer: Any) -> int:
    """Bytes of this rank's part of the optimizer's state."""
    chunks = optimizer.sharded_state_dict().tensors.values()
    return sum(chunk.tensor.numel() * chunk.tensor.element_size() for chunk in chunks)


def summarize(results: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    def cost(kind: str) -> float:
        """Median over rounds of the worse rank's difference."""
        rounds = zip(*(zip(r["saved"], r["without"], strict=True) for r in results), strict=True)
        return statistics.median(max(saved[kind] - plain[kind] for saved, plain in one) for one in rounds)

    per_save = {
        "cpu_seconds": cost("cpu"),
        "wall_seconds": cost("wall"),
        "held_up_seconds": statistics.median(block["held"] for r in results for block in r["saved"]),
        "lost_seconds": cost("training"),
        "interface_bytes": cost("sent"),
        "moved_bytes": results[0]["moved"],
    }
    # On a machine where only this job runs, a CPU second of a rank is a second that its core does not train in, at
    # worst: where cores are idle, the writer's part costs nothing.
    shares = {str(n): per_save["cpu_seconds"] / (60 * n) for n in (1, 2, 5, 10, 30)}
    return {
        "model": arguments.model,
        "ranks": len(results),
        "rounds": arguments.rounds,
        "steps_per_block": arguments.steps,
        "cpu_seconds_per_step": statistics.median(b["cpu"] for r in results for b in r["without"]) / arguments.steps,
        "wall_seconds_per_step": statistics.median(b["step"] for r in results for b in r["without"]),
        "checkpoint_bytes": results[0]["bytes"],
        "optimizer_bytes_per_rank": [r["memory_copied"] for r in results],
        "per_save": per_save,
        "share_of_time_by_minutes_between_saves": shares,
        "load_average": results[0]["load"],
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "lightning_scape": __version__,
        "blocks": [{kind: r[kind] for kind in ("without", "saved")} for r in results],
    }


def run_kind(kind: str, arguments: argparse.Namespace) -> None:
    strategy = FabricScapeStrategy(sparsity=0.99, sparsity_warmup_steps=0, timeout=600, **KINDS[kind])
    nodes = 2 if arguments.worker else 1
    fabric = L.Fabric(accelerator="cpu", devices=2 // nodes, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    result = measure(fabric, arguments)
    results: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(results, result)
    if not fabric.is_global_zero:
        return
    path = arguments.out / "checkpoint"
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    summary = summarize(results, arguments) | {"kind": kind, "link": arguments.link}
    (arguments.out / f"{kind}.json").write_text(json.dumps(summary, indent=1) + "\n")
    cost, load = summary["per_save"], ", ".join(f"{value:.1f}" for value in summary["load_average"])
    share = cost["cpu_seconds"] / (60 * arguments.minutes)
    print(
        f"{kind}: a checkpoint of {summary['checkpoint_bytes'] / 1e6:.0f} MB costs a rank {cost['cpu_seconds']:.2f} CPU"
        f" seconds, {cost['wall_seconds']:.2f} s by the clock, holds a step up for {cost['held_up_seconds']:.2f} s, and"
        f" takes {cost['lost_seconds']:.2f} s from training: every {arguments.minutes:g} minutes {100 * share:.2f}% of"
        f" the time (load {load}; {cost['moved_bytes'] / 1e6:.1f} MB moved between ranks)",
        flush=True,
    )
    if KINDS[kind].get("async_save") and share > arguments.bound:
        raise SystemExit(f"A save must cost at most {100 * arguments.bound:g}% of the time, got {100 * share:.2f}%.")


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.link and not arguments.worker:
        with Hosts(2, arguments.link) as hosts:
            torchrun(hosts, [*sys.argv, "--worker"], arguments.out / "bench", timeout=3600)
        print((arguments.out / "bench.host0.log").read_text())
        return
    for kind in arguments.kinds:
        run_kind(kind, arguments)


if __name__ == "__main__":
    main()
