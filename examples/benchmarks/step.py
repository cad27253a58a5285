"""The cost of one optimizer step: seconds by phase, bytes on the wire, memory; beside torch's AdamW, foreach and fused.

    python examples/benchmarks/step.py                 # LitGPT's pythia-14m, 2 ranks, one core each: about a minute
    python examples/benchmarks/step.py --sparsity 0.9 --model pythia-31m --ranks 1
    python examples/benchmarks/step.py --steps 100 --against fp32  # values in 4 bits, and in fp32, in turns

Every rank is a process pinned to a core of its own with one thread. AdamW and SCAPE take turns, step by step, so that
other work on the machine hits all of them. Writes rows, a table and a plot.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from litgpt import GPT, Config
from torch.profiler import ProfilerActivity, profile

from lightning_scape import ScapeConfig, ScapeOptimizer
from lightning_scape.scape.state import StepStats

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIRES = ["int4", "fp32"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pythia-14m", help="name of a LitGPT configuration")
    parser.add_argument("--ranks", type=int, default=2, help="processes, at most one per core")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.99, 0.9], help="sparsities to measure")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp32", "bf16"], help="of the parameters")
    parser.add_argument("--wire-dtype", choices=WIRES, default="int4", help="of the values")
    parser.add_argument("--against", choices=WIRES, help="a second SCAPE takes turns, with values of this dtype")
    parser.add_argument("--steps", type=int, default=15, help="timed steps, after 4 that are not")
    parser.add_argument(
        "--short", action="store_true", help="one rank, a few steps of a tiny model: does it work here?"
    )
    record.add_options(parser)
    args = parser.parse_args()
    if args.short:
        args.model, args.ranks, args.steps, args.sparsity, args.dtype = "tiny", 1, 3, [0.9], ["fp32"]
    args.out = record.folder(args)
    return args


def build(model: str, dtype: str, rank: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A model, and its parameters with gradients of this rank."""
    torch.manual_seed(0)
    small = {"n_layer": 1, "n_embd": 32, "intermediate_size": 64, "padded_vocab_size": 256}
    tiny = model == "tiny"
    module = GPT(Config.from_name("pythia-14m" if tiny else model, **(small if tiny else {}))).to(DTYPES[dtype])
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
    rows = in_turns(args.steps, scape, dense, others)
    stats = scape.stats
    assert stats is not None
    peak = peak_bytes(two_steps)  # last: what it frees leaves gaps, and AdamW's time would depend on which it fills
    if rank == 0:
        names = ["model", "ranks", "wire_dtype", "against", "steps"]
        settings = {name: getattr(args, name) for name in names} | {"sparsity": sparsity, "dtype": dtype}
        results.put(
            {
                "name": " ".join(str(value) for value in settings.values()),
                "seed": 0,
                "settings": settings,
                "parameters": size,
                "milliseconds": {name: 1e3 * statistics.median(row[name] for row in rows) for name in rows[0]},
                "bytes": {kind: stats.bytes_sent[kind] for kind in StepStats.KINDS},
                "peak_bytes": peak,
            }
        )
    if args.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(args: argparse.Namespace, sparsity: float, dtype: str) -> dict[str, Any]:
    results = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = args, sparsity, dtype, str(Path(folder) / "store"), results
        mp.start_processes(measure, given, nprocs=args.ranks, start_method="fork")
    return results.get()


def table(found: list[dict[str, Any]]) -> str:
    """A line a row."""
    head = ["parameters", "ranks", "dtype", "sparsity", "wire", "a step, ms", "of it messages", "processor time*, ms"]
    head += ["AdamW(foreach), ms", "AdamW(fused), ms", "over foreach", "over fused"]
    head += [
        "sent by a rank, KB",
        "peak memory**, bytes per parameter",
        "more than --against, ms",
        "a core copies, GB/s",
    ]
    lines = []
    for row in found:
        ms, given, size = row["milliseconds"], row["settings"], row["parameters"]
        more = f"{ms['wall_more']:+.1f} ({given['against']})" if given["against"] else "-"
        lines.append(
            [
                f"{size / 1e6:.1f}M",
                *(str(given[name]) for name in ("ranks", "dtype", "sparsity", "wire_dtype")),
                *(f"{ms[name]:.1f}" for name in ("scape_wall", "messages", "own", "adamw", "fused")),
                *(f"{ms['own'] / ms[name]:.2f}" for name in ("adamw", "fused")),
                f"{sum(row['bytes'].values()) / 1e3:,.0f}",
                f"{row['peak_bytes'] / size:.1f}",
                more,
                str(row["machine"]["memory_gb_per_second"] or "-"),
            ]
        )
    notes = (
        "\\* Of a rank's process, all threads, with sending and the making of the next mask, which run beside the next"
        " forward pass in training. \\** Above the model and its gradients. Medians; all optimizers in turns."
    )
    return f"{record.table(head, lines, [[row] for row in found])}\n\n{notes}"


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Phases of a step, beside AdamW's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.9 * len(found)), layout="constrained")
    labels = []
    for place, row in enumerate(found):
        given = row["settings"]
        labels += [
            f"SCAPE {given['sparsity']} {given['dtype']} {given['wire_dtype']}",
            "AdamW, foreach",
            "AdamW, fused",
        ]
        left = 0.0
        phases = {k.removeprefix("phase/"): v for k, v in row["milliseconds"].items() if k.startswith("phase/")}
        for color, (name, value) in enumerate(phases.items()):
            axes.barh(3 * place, value, left=left, color=f"C{color}", label=name if place == 0 else None)
            left += value
        axes.barh(3 * place + 1, row["milliseconds"]["adamw"], color="lightgray")
        axes.barh(3 * place + 2, row["milliseconds"]["fused"], color="darkgray")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step, one core per rank")
    axes.legend(ncols=4, fontsize="small")
    figure.savefig(path, dpi=90)


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """The table and the picture."""
    made = record.made_by("python examples/benchmarks/step.py", rows)
    record.write_table(out / "step.md", f"{table(rows)}\n\n{made}")
    plot(rows, out / "step.png")


def main() -> None:
    args = parse_arguments()
    origin = record.origin(args.dirty)
    rows = record.Rows(args.out / "step.json")
    for dtype, sparsity in itertools.product(args.dtype, args.sparsity):
        print(f"measuring sparsity {sparsity}, {dtype} parameters ...", flush=True)
        row = run(args, sparsity, dtype)
        rows.add([row | origin])
        print({name: round(value, 2) for name, value in row["milliseconds"].items()}, flush=True)
    report(list(rows), args.out)


if __name__ == "__main__":
    main()
