"""What a SCAPE step costs on a GPU, next to torch's fused AdamW in the same run; and whether the mask exchange hides.

    python examples/benchmarks/gpu.py                      # one GPU; four minutes on an H200
    python examples/benchmarks/gpu.py --device cpu --short # the same code in Triton's interpreter: no speed at all

First the tests of `tests/gpu` and a comparison of kernels and reference at size run; if either fails nothing is
measured. Then, for each model size and sparsity: microseconds by phase for one rank that owns everything (N = 1, real)
and for one that owns an 8th or 32nd (and clips by the sketch). There is one GPU and no network: what the other ranks
would send is read from this rank's own memory, so that phases take part in full and messages cost a copy. Writes rows,
a table and a plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

if "cpu" in sys.argv:  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import record
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm.collectives import Work
from lightning_scape.core.layout import Layout, Quota
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.state import StepStats

SIZES = {"124M": (124, 768), "345M": (345, 1024), "500M": (500, 1280), "1.8B": (1800, 2048)}
"""Millions of parameters, and the width of the layers they are cut into."""
RANKS = ("_select_kernel",)
"""What runs on the side stream alone, by which the profiler's events tell it."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES), help="numbers of parameters")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.99, 0.9])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 32], help="N; above 1 the others are simulated")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of parameters and gradients")
    parser.add_argument("--steps", type=int, default=15, help="timed steps, after 3 that are not")
    parser.add_argument("--short", action="store_true", help="a few thousand parameters: does it work here?")
    record.add_options(parser)
    args = parser.parse_args()
    args.out = record.folder(args)
    if args.short:
        args.sizes, args.steps = args.sizes[:1], 2
    return args


# ----------------------------------------------------------------------------------------------------- correctness


def check(args: argparse.Namespace) -> None:
    """Leaves the script if kernels and reference do not agree."""
    if args.device == "cuda":
        # NCCL between ranks is a matter of its own: here nothing is sent.
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "--ignore=tests/gpu/test_nccl.py"]
        if subprocess.run(command, cwd=record.ROOT, check=False).returncode != 0:
            sys.exit("tests/gpu failed: no speed is reported for results that are wrong.")
    for ranks in (1, 2):
        finals = {choice: short_training(args, choice, ranks) for choice in ("naive", "cuda")}
        for name, ours in finals["cuda"].items():
            theirs = finals["naive"][name]
            close = ours.dtype.is_floating_point and name != "residual"
            same = torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) if close else torch.equal(ours, theirs)
            if not same:
                sys.exit(f"kernels and reference disagree on the {name}: no speed is reported for wrong results.")
    print("kernels and reference agree: clocks and residuals bitwise, parameters and moments within rounding")


def short_training(args: argparse.Namespace, choice: str, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Five steps on given gradients, unclipped: what they leave."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    shapes = [(1500,), (30, 41)] if args.short else [(2_000_003,), (1024, 2048), (7,)]
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator).to(args.device)) for s in shapes]
    alone = ScapeConfig(sparsity_warmup_steps=0, update="adamw")
    # In 4 bits, a difference in the last place may become another multiple.
    optimizer = scape(parameters, ranks, wire_dtype="fp32") if ranks > 1 else ScapeOptimizer(parameters, config=alone)
    with ops.using(choice):
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(args.device)
            optimizer.step()
        optimizer.drain()
    state = optimizer.engine.state
    assert state is not None
    left = {"residual": state.residual, "clock": state.last_step, "momentum": state.exp_avg}
    return left | {f"parameter {i}": parameter.detach() for i, parameter in enumerate(parameters)}


# ------------------------------------------------------------------------------------------------------------ time


class Clock:
    """Moments on the device's compute stream; on the CPU, of the host."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, begin: Any, end: Any) -> float:
        if not self.on_gpu:
            return 1e6 * (end - begin)
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    def get_ahead(self) -> None:
        """Keeps the device busy for some 50 ms: what is queued meanwhile is timed without the host's own delay."""
        if self.on_gpu:
            torch.cuda._sleep(100_000_000)

    def is_ahead(self, begin: Any) -> bool:
        """Whether the device has still not come to ``begin``, now that all is queued."""
        return not self.on_gpu or not begin.query()

    def time(self, work: Callable[[], Any], times: int) -> float:
        """Median microseconds of ``work``, after three times that are not counted."""
        found = []
        for _ in range(times + 3):
            begin = self.mark()
            work()
            found.append(self.microseconds(begin, self.mark()))
        return statistics.median(found[3:])


def copy_bandwidth(clock: Clock, args: argparse.Namespace) -> float:
    """Bytes read and written per second by a plain copy."""
    source = torch.ones(1 << 16 if args.short else 1 << 28, device=args.device)
    target = torch.empty_like(source)
    return 2e6 * source.numel() * source.element_size() / clock.time(lambda: target.copy_(source), 20)


# ------------------------------------------------------------------------------------------ one rank of several, alone


class Alone(ScapeCommunicator):
    """Rank 0 of N without the others: their messages hold what this rank would have sent, and cost a copy."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.world_size = ranks
        self.others: torch.Tensor | None = None
        """A mask of all blocks that may stand in for any other rank's, of which the other ranks' part is used."""

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(self.world_size)  # as if all ranks had sent the same

    def all_to_all(self, values: torch.Tensor) -> Work:
        return Work(values.clone().view(self.world_size, -1, values.shape[1]))

    def all_gather(self, shard: torch.Tensor) -> Work:
        return Work(shard.repeat(self.world_size, 1))

    def gather_mask(self, make: Callable[[], torch.Tensor], full: torch.Tensor) -> Work:
        assert self.others is not None
        mine = make()
        full.copy_(self.others)
        full[: mine.shape[0]] = mine
        return Work(full, stream=self.side_stream(full.device))

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def all_gather_stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0).expand(self.world_size, *tensor.shape)


def scape(parameters: list[torch.nn.Parameter], ranks: int, **options: Any) -> ScapeOptimizer:
    config = ScapeConfig(**{"sparsity_warmup_steps": 0, "update": "adamw", **options})
    optimizer = ScapeOptimizer(parameters, config=config, communicator=Alone(ranks))
    assert isinstance(optimizer.communicator, Alone)
    optimizer.communicator.others = some_mask(optimizer.engine.layout, optimizer.config.quota, parameters[0].device)
    return optimizer


def some_mask(layout: Layout, quota: Quota, device: torch.device) -> torch.Tensor:
    """Scattered positions, one of each q-th part of a block; no pads, which select would not choose either."""
    part = quota.block_size // quota.sent
    starts = torch.arange(quota.sent, device=device) * part
    mask = torch.randint(0, part, (layout.blocks, quota.sent), device=device).add_(starts)
    for piece in layout.pieces:  # the last block of a parameter holds pads behind its entries
        at = (piece.row + piece.blocks - 1) % layout.shard_blocks  # of any shard, for ranks take turns
        mask.view(layout.world_size, layout.shard_blocks, -1)[:, at] = torch.arange(quota.sent, device=device)
    return mask.to(torch.uint8)


def shapes_of(size: str, short: bool) -> list[tuple[int, ...]]:
    """A GPT's: an embedding, then layers of 4 matrices and 2 vectors, until the number of parameters is reached."""
    total, width = (5000, 16) if short else (SIZES[size][0] * 1_000_000, SIZES[size][1])
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)]
    shapes: list[tuple[int, ...]] = [(50 if short else 50304, width)]
    left = total - shapes[0][0] * width
    for shape in itertools.cycle(layer):
        numel = torch.Size(shape).numel()
        if numel >= left:
            return [*shapes, (left,)]
        shapes.append(shape)
        left -= numel
    raise AssertionError


def bytes_needed(size: str, dtype: str) -> int:
    """Parameters, gradients, AdamW's and SCAPE's state for N = 1, and room for what a step allocates."""
    each = 4 if dtype == "fp32" else 2
    return SIZES[size][0] * 1_000_000 * (4 * each + (16 if dtype == "fp32" else 20) + 3)


# -------------------------------------------------------------------------------------------------------- measuring


@contextmanager
def marked_phases(clock: Clock, marks: dict[str, list[tuple[Any, Any]]]) -> Iterator[None]:
    """Within it, the phases of a step leave the moments of each of their parts in ``marks``."""

    @contextmanager
    def phase(self: StepStats, name: str) -> Iterator[None]:
        begin = clock.mark()
        yield
        marks.setdefault(name, []).append((begin, clock.mark()))

    with patch.object(StepStats, "phase", phase):
        yield


def measure(args: argparse.Namespace, clock: Clock, size: str) -> list[dict[str, Any]]:
    """Rows for one model size: each sparsity and N, with AdamW stepping in between on the same parameters."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    parameters = [
        torch.nn.Parameter(torch.randn(s, device=args.device, dtype=dtype)) for s in shapes_of(size, args.short)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    rows = []
    for sparsity, ranks in itertools.product(args.sparsity, args.ranks):
        adamw = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        optimizer = scape(parameters, ranks, sparsity=sparsity)
        steps: list[dict[str, float]] = []
        ahead: list[bool] = []
        for _ in range(args.steps + 3):
            clock.get_ahead()
            begin = clock.mark()
            adamw.step()
            middle = clock.mark()
            torch.nn.utils.clip_grad_norm_(parameters, 1e9)
            ready = clock.mark()
            marks: dict[str, list[tuple[Any, Any]]] = {}
            began = time.perf_counter()
            with marked_phases(clock, marks):
                if ranks > 1:  # the sketch, which any clipped run of several ranks makes
                    optimizer.clip_grad_norm(1e9)
                    marks["norm"] = [(ready, clock.mark())]
                optimizer.step()
                host = 1e6 * (time.perf_counter() - began)
                optimizer.drain()  # what would hide behind the next forward is counted here
            end = clock.mark()
            ahead.append(clock.is_ahead(begin))
            row = {"host": host}
            row |= {n: sum(clock.microseconds(*part) for part in marks[n]) for n in StepStats.PHASES if n in marks}
            row |= {"step": clock.microseconds(ready, end), "adamw": clock.microseconds(begin, middle)}
            row["adamw and clipping"] = row["adamw"] + clock.microseconds(middle, ready)
            steps.append(row)
        medians = {name: statistics.median(row[name] for row in steps[3:]) for name in steps[0]}
        settings = {"size": "short" if args.short else size, "dtype": args.dtype, "sparsity": sparsity, "ranks": ranks}
        rows.append(
            {
                "name": " ".join(str(value) for value in settings.values()),
                "seed": 0,
                "settings": {**settings, "steps": args.steps},
                "parameters": sum(parameter.numel() for parameter in parameters),
                "microseconds": {name: round(value, 1) for name, value in medians.items()},
                "host_ahead": all(ahead[3:]),
            }
        )
        print(f"{rows[-1]['name']}: {medians['step']:,.0f} us, AdamW {medians['adamw']:,.0f} us", flush=True)
        del adamw, optimizer
    return rows


# ----------------------------------------------------------------------------------------------------------- overlap


def overlap(args: argparse.Namespace) -> dict[str, Any] | None:
    """A row: the share of the side stream's time (merge, stand-in of the exchange) in which the compute stream works.

    None where there is no side stream, or no litgpt, whose model would run.
    """
    if args.device == "cpu" or importlib.util.find_spec("litgpt") is None:
        return None
    from litgpt import GPT, Config

    if args.short:
        small = {"n_layer": 1, "n_embd": 16, "n_head": 2, "intermediate_size": 32, "padded_vocab_size": 64}
        config = Config.from_name("pythia-14m", block_size=16, **small)
    else:
        config = Config.from_name("pythia-160m", block_size=1024)
    batch, length = (2, 16) if args.short else (32, 1024)
    warmup, steps = (2, 1) if args.short else (3, 4)
    model = GPT(config).to(args.device)
    optimizer = scape(list(model.parameters()), 8, sparsity=0.99)
    tokens = torch.randint(0, config.padded_vocab_size, (batch, length), device=args.device)

    def train_step() -> None:
        with torch.autocast(args.device, dtype=torch.bfloat16):
            logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), tokens.view(-1)).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(warmup):
        train_step()
    # Its own events alone: with the host's it would wait for the host, which records them.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            train_step()
        optimizer.drain()
        torch.cuda.synchronize()
    events = [
        (event.device_resource_id(), event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    busy = by_stream(events)
    side = next(stream for stream, *_, name in events if any(kernel in name for kernel in RANKS))
    compute = union([interval for stream, found in busy.items() if stream != side for interval in found])
    side_busy = union(busy[side])
    total = sum(end - begin for begin, end in side_busy)
    settings = {
        "size": "short" if args.short else "160M",
        "batch": batch,
        "context": length,
        "ranks": 8,
        "sparsity": 0.99,
    }
    figures = {"microseconds": {"side stream": total / (1e3 * steps)}, "hidden": common(side_busy, compute) / total}
    return {"name": f"overlap {settings['size']}", "seed": 0, "settings": settings, **figures}


Interval = tuple[int, int]


def by_stream(events: list[tuple[int, int, int, str]]) -> dict[int, list[Interval]]:
    busy: dict[int, list[Interval]] = {}
    for stream, begin, end, name in events:
        if not name.startswith(("scape::", "Optimizer.", "ProfilerStep")):  # ranges that span kernels, not work
            busy.setdefault(stream, []).append((begin, end))
    return busy


def union(intervals: list[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common(a: list[Interval], b: list[Interval]) -> int:
    """Length of what two lists of disjoint intervals share."""
    return sum(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


# ------------------------------------------------------------------------------------------------------------- report


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row, and a sentence on what hides."""
    shown = [name for name in StepStats.PHASES if name != "wait"]
    head = ["parameters", "dtype", "sparsity", "N", *(f"{name}, ms" for name in shown), "step, ms", "of the host, ms"]
    head += ["AdamW fused, ms", "AdamW and clipping, ms", "step / AdamW", "step / AdamW and clipping"]
    lines, timed = [], [row for row in rows if "parameters" in row]
    for row in timed:
        us = row["microseconds"]
        times = [us.get(name, 0.0) for name in (*shown, "step", "host", "adamw", "adamw and clipping")]
        ratios = [us["step"] / us[name] for name in ("adamw", "adamw and clipping")]
        what = [str(row["settings"][name]) for name in ("size", "dtype", "sparsity", "ranks")]
        lines.append([*what, *(f"{time / 1000:.2f}" for time in times), *(f"{ratio:.2f}" for ratio in ratios)])
    notes = ["N = 1 is real; for N > 1 messages are copies in device memory: nothing was sent over a network."]
    notes += [
        f"Of the mask's exchange ({row['microseconds']['side stream']:.0f} us a step, {row['settings']['size']}),"
        f" {row['hidden']:.0%} hides behind other work."
        for row in rows
        if "hidden" in row
    ]
    return "\n\n".join([record.table(head, lines, [[row] for row in timed]), " ".join(notes)])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Phases of a step, in steps of AdamW."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "parameters" in row]
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(rows) + 1.5), layout="constrained")
    for place, row in enumerate(rows):
        left = 0.0
        for color, name in enumerate(name for name in StepStats.PHASES if name != "wait"):
            share = row["microseconds"].get(name, 0.0) / row["microseconds"]["adamw"]
            axes.barh(place, share, left=left, color=f"C{color}", label=name if not place else None)
            left += share
    labels = [row["settings"] for row in rows]
    axes.set_yticks(range(len(rows)), [f"{at['size']} {at['sparsity']} N={at['ranks']}" for at in labels])
    axes.invert_yaxis()
    axes.axvline(1.0, color="gray", linestyle="--")
    axes.set_xlabel("SCAPE step, in steps of AdamW(fused=True) on the same parameters")
    axes.legend(ncols=4, fontsize="small")
    figure.savefig(path, dpi=90)


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """The table and the picture."""
    made = record.made_by("python examples/benchmarks/gpu.py", rows)
    record.write_table(out / "gpu.md", f"{table(rows)}\n\n{made}")
    plot(rows, out / "gpu.png")


def main() -> None:
    args = parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: there must be a CUDA device, got none. For a dry run: --device cpu --short.")
    origin = record.origin(args.dirty)
    check(args)
    rows, clock = record.Rows(args.out / "gpu.json"), Clock(args.device)
    with ops.using("cuda" if args.device == "cpu" else "auto"):
        origin["machine"]["device_gb_per_second"] = round(copy_bandwidth(clock, args) / 1e9, 1)
        for size in args.sizes:
            free = sys.maxsize
            if args.device == "cuda":
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info()[0]
            if not args.short and bytes_needed(size, args.dtype) > free:
                print(f"{size} is left out: it needs {bytes_needed(size, args.dtype) / 1e9:.0f} GB of device memory")
                continue
            rows.add([row | origin for row in measure(args, clock, size)])
        if hidden := overlap(args):
            rows.add([hidden | origin])
    report(list(rows), args.out)


if __name__ == "__main__":
    main()
