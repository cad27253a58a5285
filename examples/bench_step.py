"""The cost of one optimizer step: seconds by phase, bytes on the wire, memory; beside torch's AdamW, foreach and fused.

    python examples/bench_step.py                 # LitGPT's pythia-14m, 2 ranks, one core each; about a minute
    python examples/bench_step.py --sparsity 0.9 --model pythia-31m --ranks 1
    python examples/bench_step.py --steps 100 --against bf16  # values in 4 bits, and in bf16, in turns

Every rank is a process pinned to a core of its own with one thread. AdamW and SCAPE take turns, step by step, so that
other work on the machine hits all of them. The roofline is the time in which the machine could copy the bytes that the
step has to touch. Prints a table, and writes JSON and a PNG.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from litgpt import GPT, Config
from torch.profiler import ProfilerActivity, profile

from lightning_scape import ScapeConfig, ScapeOptimizer, __version__
from lightning_scape.scape.communicator import KINDS
from lightning_scape.scape.cost import scape_traffic

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIRES = ["bf16", "int8", "int4", "fp32"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-14m", help="name of a LitGPT configuration")
    parser.add_argument("--ranks", type=int, default=2, help="processes, at most one per core")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.99, 0.9], help="sparsities to measure")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp32", "bf16"], help="of the parameters")
    parser.add_argument("--wire-dtype", choices=WIRES, default="int4", help="of the values")
    parser.add_argument("--against", choices=WIRES, help="a second SCAPE takes turns, with values of this dtype")
    parser.add_argument("--steps", type=int, default=15, help="timed steps, after 4 that are not")
    parser.add_argument("--out", type=Path, default=Path("out/bench_step"), help="folder for JSON and PNG")
    return parser.parse_args()


def build(model: str, dtype: str, rank: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    module = GPT(Config.from_name(model)).to(DTYPES[dtype])
    parameters = list(module.parameters())
    generator = torch.Generator().manual_seed(rank)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return module, parameters


def seconds_of(step: Any, rest: Any = None) -> tuple[float, float]:
    """Wall clock of ``step()``; CPU time of the process, all its threads, for it and ``rest()``."""
    if dist.is_initialized():
        dist.barrier()  # a rank that comes late is not the optimizer's cost
    began, used = time.perf_counter(), time.process_time()
    step()
    took = time.perf_counter() - began
    if rest is not None:
        rest()
    return took, time.process_time() - used


def copy_bandwidth(megabytes: int = 128) -> float:
    """Bytes per second that one core reads and writes when it copies memory; the best of five."""
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        began = time.process_time()  # as the steps are measured
        target.copy_(source)
        times.append(time.process_time() - began)
    return 2 * source.numel() * source.element_size() / min(times)


def peak_bytes(work: Any) -> int:
    """Most bytes alive at once of all that ``work`` allocates, from torch's own allocation events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def in_turns(
    steps: int, scape: ScapeOptimizer, dense: dict[str, torch.optim.AdamW], others: list[ScapeOptimizer]
) -> list[dict[str, float]]:
    """Seconds of ``steps`` steps of all, after 4 that are not timed; each step's together with the next one's."""
    rows: list[dict[str, float]] = []
    for step in range(steps + 4):
        row = {}
        for name, adamw in dense.items():
            row[f"{name}_wall"], row[name] = seconds_of(adamw.step)
        # With the exchange of the next mask, which runs beside the next forward pass: on one core it is not hidden. Who
        # goes first finds other things in the caches: they take turns.
        both = [(scape, "scape_wall", "own"), *((other, "against_wall", "against") for other in others)]
        for optimizer, wall, cpu in both if step % 2 else both[::-1]:
            row[wall], row[cpu] = seconds_of(optimizer.step, optimizer.drain)
        if others:
            row["wall_more"], row["more"] = row["scape_wall"] - row["against_wall"], row["own"] - row["against"]
        assert scape.stats is not None
        row["messages"] = scape.stats.message_seconds
        row |= {f"phase/{name}": value for name, value in scape.stats.seconds.items()}
        if step >= 4:
            rows.append(row)
    pairs = itertools.pairwise(rows)
    return [{name: (row[name] + after[name]) / 2 for name in row} for row, after in pairs] or rows


def measure(rank: int, args: argparse.Namespace, sparsity: float, dtype: str, store: str, results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    if args.ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=dist.FileStore(store, args.ranks))
    module, parameters = build(args.model, dtype, rank)
    size = sum(p.numel() for p in parameters)
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update="adamw", wire_dtype=args.wire_dtype)

    def two_steps() -> None:
        optimizer = ScapeOptimizer(parameters, config=config)
        optimizer.step()
        optimizer.step()
        optimizer.drain()

    scape = ScapeOptimizer(parameters, config=config)
    dense = {
        name: torch.optim.AdamW(build(args.model, dtype, rank)[1], foreach=name == "adamw", fused=name == "fused")
        for name in ("adamw", "fused")
    }
    others = []
    if args.against is not None:
        other_config = dataclasses.replace(config, wire_dtype=args.against)
        others = [ScapeOptimizer(build(args.model, dtype, rank)[1], config=other_config)]
    bandwidth, rows = copy_bandwidth(), in_turns(args.steps, scape, dense, others)
    stats = scape.stats
    assert stats is not None
    peak = peak_bytes(two_steps)  # last: what it frees leaves gaps, and AdamW's time would depend on which it fills
    if rank == 0:
        # Residual; both moments, last steps, and masters or errors of changes, of the shard.
        state = 4 * size + (12 if dtype == "fp32" and config.wire_bits is None else 16) * size / args.ranks
        whole, shard = scape_traffic(config.quota.density, proposed=config.proposed > 0)
        touched = (whole + shard / args.ranks) * size
        results.put(
            {
                "model": args.model,
                "parameters": size,
                "ranks": args.ranks,
                "sparsity": sparsity,
                "dtype": dtype,
                "wire_dtype": args.wire_dtype,
                "against": args.against,
                "milliseconds": {name: 1e3 * statistics.median(row[name] for row in rows) for name in rows[0]},
                "copy_bandwidth": bandwidth,
                "bytes_touched": touched,
                "roofline_milliseconds": 1e3 * touched / bandwidth,
                "bytes": {kind: getattr(stats, f"bytes_{kind}") for kind in KINDS},
                "bytes_per_parameter": stats.bytes_total / size * args.ranks / max(1, args.ranks - 1),
                "compression": stats.compression,
                "peak_bytes": peak,
                "peak_target": 4 * size + 14 * size / args.ranks + 0.02 * size,
                "state_bytes": state,
            }
        )
    if args.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(args: argparse.Namespace, sparsity: float, dtype: str) -> dict[str, Any]:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(measure, (args, sparsity, dtype, store, results), nprocs=args.ranks)
    return results.get()


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| parameters | sparsity | step, ms | of which messages | CPU time*, ms | AdamW(foreach), ms | AdamW(fused), ms"
        " | CPU time / foreach's | / fused's | roofline**, ms | bytes per parameter*** | sent, KB"
        " | peak memory above model and gradients, bytes per parameter | of which state | target |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ms = row["milliseconds"]
        lines.append(
            f"| {row['parameters'] / 1e6:.1f}M {row['dtype']} | {row['sparsity']} | {ms['scape_wall']:.1f}"
            f" | {ms['messages']:.1f} | {ms['own']:.1f} | {ms['adamw']:.1f} | {ms['fused']:.1f}"
            f" | {ms['own'] / ms['adamw']:.2f} | {ms['own'] / ms['fused']:.2f} | {row['roofline_milliseconds']:.1f}"
            f" | {row['bytes_per_parameter']:.4f}"
            f" | {sum(row['bytes'].values()) / 1e3:.0f} | {row['peak_bytes'] / row['parameters']:.2f}"
            f" | {row['state_bytes'] / row['parameters']:.2f} | {row['peak_target'] / row['parameters']:.2f} |"
        )
    against = [
        f"{row['sparsity']}, {row['dtype']}: a step takes {row['milliseconds']['wall_more']:+.1f} ms against"
        f" {row['against']} ({row['milliseconds']['more']:+.1f} ms of CPU time), median of differences in turns"
        for row in found
        if row["against"] is not None
    ]
    notes = (
        "\\* of a rank's process, all threads, sending and the making of the next mask included",
        "\\** the bytes that the step has to touch, at this machine's copy bandwidth"
        f" ({found[0]['copy_bandwidth'] / 1e9:.1f} GB/s on one core)",
        "\\*** per rank and step, times N/(N-1)",
        *against,
    )
    return "\n".join([*lines, "", *notes])


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.9 * len(found)), layout="constrained")
    labels = []
    for place, row in enumerate(found):
        labels += [f"SCAPE {row['sparsity']} {row['dtype']}", f"AdamW, foreach {row['dtype']}", "AdamW, fused"]
        left = 0.0
        phases = {k.removeprefix("phase/"): v for k, v in row["milliseconds"].items() if k.startswith("phase/")}
        for color, (name, value) in enumerate(phases.items()):
            axes.barh(3 * place, value, left=left, color=f"C{color}", label=name if place == 0 else None)
            left += value
        roof = row["roofline_milliseconds"]
        axes.plot([roof, roof], [3 * place - 0.4, 3 * place + 0.4], "k--", label=None if place else "roofline")
        axes.barh(3 * place + 1, row["milliseconds"]["adamw"], color="lightgray")
        axes.barh(3 * place + 2, row["milliseconds"]["fused"], color="darkgray")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per step, one core per rank")
    axes.set_title(f"{found[0]['model']}, {found[0]['ranks']} ranks")
    axes.legend(ncols=4, fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_arguments()
    found = []
    for dtype in args.dtype:
        for sparsity in args.sparsity:
            print(f"measuring sparsity {sparsity}, {dtype} parameters ...", flush=True)
            found.append(run(args, sparsity, dtype))
            print({name: round(value, 2) for name, value in found[-1]["milliseconds"].items()}, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    versions = {
        "lightning_scape": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }
    (args.out / "bench_step.json").write_text(json.dumps({"versions": versions, "results": found}, indent=2) + "\n")
    plot(found, args.out / "bench_step.png")
    print(f"\n{table(found)}\n\nwritten to {args.out}/bench_step.json and .png")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


if __name__ == "__main__":
    main()
