"""``lightning-scape plan``: predicts, before anything is launched, what a step will take and whether SCAPE pays.

lightning-scape plan --model pythia-160m --nodes 8 --gpus-per-node 1 --bandwidth 10gbit --step-compute 0.8s
lightning-scape plan --model pythia-14m --nodes 2 --bandwidth 1gbit --measure     # computes and optimizers, here
torchrun ... -m lightning_scape.plan --model pythia-14m --measure                 # the link too, on all nodes
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scape import ops, planner
from lightning_scape.clipping import SKETCH_WIDTHS
from lightning_scape.collectives import Communicator, is_distributed
from lightning_scape.config import ScapeConfig
from lightning_scape.optimizer import ScapeOptimizer
from lightning_scape.planner import Job, Link, Machine, Prediction, Weight

_SHARDED = ("update", "select")
"""Phases of a step that work on the rank's own shard; the others see all parameters."""
_NOT_OWN = ("norm", "wait")
"""Phases that wait for others; the norm is measured apart."""
BYTES_PER_SECOND = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parse(arguments)
    try:
        weights = model_weights(args.model)
        machine, link, step_compute, assumed = _inputs(args)
        if int(os.environ.get("RANK", "0")):
            return 0  # every rank measured; one reports
        job = Job(
            weights=weights,
            ranks=args.nodes * args.gpus_per_node,
            ranks_per_node=args.gpus_per_node,
            step_compute=step_compute,
            parameter_bytes=2 if args.precision == "bf16-true" else 4,
            clip=not args.no_clipping,
        )
        predictions = planner.predict(job, link, machine, args.sparsity)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(args.model, job, link, machine, predictions, assumed))
    if args.plot is not None:
        plot(args.plot, args.model, job, link, machine, args.sparsity)
        print(f"\nplotted to {args.plot}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-scape plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="name of a LitGPT configuration, such as pythia-160m")
    add("--nodes", type=int, default=None, help="machines; under torchrun, all of them")
    add("--gpus-per-node", type=int, default=1, help="ranks of each machine")
    add("--bandwidth", type=bandwidth, default=None, help="of each node's link: 10gbit, 100mbit (bits per second)")
    add("--latency", type=seconds, default=50e-6, help="of one hop, software included (default: 50us)")
    add("--step-compute", type=seconds, default=None, help="forward and backward of a rank's step: 0.8s, 350ms")
    add("--measure", action="store_true", help="measure compute and optimizers here and, under torchrun, the link")
    add("--batch-size", type=int, default=2, help="with --measure: sequences of a rank's step")
    add("--context", type=int, default=128, help="with --measure: tokens of a sequence")
    add("--memory-bandwidth", type=float, default=1500, help="without --measure: of the device, GB/s (default: 1500)")
    add("--precision", choices=("32-true", "bf16-mixed", "bf16-true"), default="32-true", help="of the training")
    add("--no-clipping", action="store_true", help="the gradient norm is not clipped")
    add("--sparsity", type=float, nargs="+", default=[0.0, 0.9, 0.99, 0.999], help="which to predict")
    add("--plot", type=Path, default=None, help="write step time over bandwidth and over ranks to this PNG")
    args = parser.parse_args(arguments)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if args.nodes is None:
        if launched == 1:
            parser.error("--nodes must be given without torchrun. Say on how many machines you want to train.")
        args.nodes = launched // args.gpus_per_node
    if not args.measure and args.step_compute is None:
        parser.error("--step-compute must be given, or --measure. Time the forward and backward pass of one rank.")
    if args.bandwidth is None and not (args.measure and launched > 1):
        parser.error("--bandwidth must be given, or --measure under torchrun, which measures it.")
    return args


def bandwidth(text: str) -> float:
    """Bytes per second: ``"10gbit"`` is 1.25e9."""
    found = re.fullmatch(r"([0-9.]+)\s*(kbit|mbit|gbit)(/s|ps)?", text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"a bandwidth must be a number with kbit, mbit or gbit, got {text!r}: 10gbit")
    return float(found[1]) * BYTES_PER_SECOND[found[2]]


def seconds(text: str) -> float:
    """``"350ms"`` is 0.35."""
    found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us)?", text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"a time must be a number with s, ms or us, got {text!r}: 0.8s")
    return float(found[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found[2] or "s"]


# ---------------------------------------------------------------------------------------------------- the model


def build_model(name: str) -> nn.Module:
    """A LitGPT model.

    Raises:
        ValueError: LitGPT is not installed, or knows no such configuration.
    """
    try:
        from litgpt import GPT, Config
    except ImportError as error:
        raise ValueError("`--model` needs LitGPT. Install it: pip install 'lightning-scape[litgpt]'.") from error
    try:
        config = Config.from_name(name)
    except ValueError as error:
        raise ValueError(f"`--model` must name a LitGPT configuration, got {name!r}. Such as pythia-160m.") from error
    model: nn.Module = GPT(config)
    return model


def model_weights(name: str) -> tuple[Weight, ...]:
    """Shapes of a LitGPT model, in the order of the forward pass; nothing is allocated."""
    with torch.device("meta"):
        return weights_of(build_model(name))


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """Likewise, of a LitGPT model that exists. The head is registered first and used last."""
    found = []
    for name, parameter in model.named_parameters():
        block = re.search(r"\.h\.(\d+)\.", f".{name}")
        is_head, is_embedding = name.startswith("lm_head"), ".wte." in f".{name}"
        place = (1 if block else 2) if not is_embedding else 0
        weight = Weight(parameter.numel(), int(block[1]) if block else None, not is_embedding and parameter.dim() > 1)
        found.append((3 if is_head else place, weight))
    return tuple(weight for _, weight in sorted(found, key=lambda entry: entry[0]))


# ---------------------------------------------------------------------------------------------------- measuring


def measure_compute(model: nn.Module, batch_size: int, context: int, repeats: int = 5) -> float:
    """Median seconds of forward and backward; leaves gradients behind. The slowest rank's, where there are several."""
    vocabulary = int(model.config.padded_vocab_size)  # type: ignore[union-attr,arg-type]
    tokens = torch.randint(0, vocabulary, (batch_size, context + 1))
    times = []
    for _ in range(repeats + 1):
        model.zero_grad()
        began = time.perf_counter()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def measure_machine(parameters: Sequence[Tensor], sparsities: Sequence[float], repeats: int = 4) -> Machine:
    """What the optimizers cost here, per parameter; parameters must have gradients, and are changed.

    SCAPE's phases are timed in a group of this rank alone: messages are the link's, not the machine's.
    """
    count = sum(parameter.numel() for parameter in parameters)
    clip = _median_seconds(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9), repeats)
    dense = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    adamw = _median_seconds(dense.step, repeats)
    del dense
    grads = [parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None]
    signs = torch.ones(1 << 17, device=parameters[0].device)
    norm = _median_seconds(lambda: ops.sketch(grads, signs, SKETCH_WIDTHS), repeats)
    found: dict[float, tuple[float, float]] = {}
    for sparsity in sparsities:
        config = ScapeConfig(sparsity=sparsity)
        optimizer = ScapeOptimizer(parameters, lr=1e-6, config=config, communicator=Communicator.alone())
        rows = []
        for step in range(repeats + 2):  # the first makes its mask twice, and touches new memory
            optimizer.step()
            if step >= 2 and optimizer.stats is not None:
                rows.append(dict(optimizer.stats.seconds))
        optimizer.drain()
        state = optimizer._run.state
        votes = 0.0  # which one rank alone does not cast
        if config.votes and state is not None:
            votes = _median_seconds(functools.partial(ops.vote, state.residual, config.votes), repeats)
        phases = {name: median(row[name] for row in rows) for name in rows[0] if name not in _NOT_OWN}
        shard = sum(value for name, value in phases.items() if name in _SHARDED)
        whole = sum(phases.values()) - shard + norm
        # For the rank's own shard no votes are cast.
        found[config.quota.density] = ((whole + votes) / count, (shard - votes) / count)
    return Machine(adamw=adamw / count, clip=clip / count, scape=found)


def measure_link(megabytes: float = 4.0, repeats: int = 5) -> Link:
    """What messages between the ranks of the default process group cost, from the point of view of the program."""
    communicator = Communicator(None, None)
    ranks = communicator.world_size
    if ranks == 1:
        raise ValueError("`measure_link` needs several ranks, got one. Launch with torchrun on all nodes.")
    small, large = torch.zeros(1), torch.zeros(round(megabytes * 2.5e5) // ranks * ranks, 1)
    hop = _median_seconds(lambda: communicator.all_reduce_sum(small), 4 * repeats) / (2 * (ranks - 1))
    sent = large.numel() * large.element_size() * (ranks - 1) / ranks
    elapsed, copying = _cost(lambda: communicator.exchange(large).wait(), repeats)
    elapsed_reduce, reducing = _cost(lambda: communicator.all_reduce_sum(large), repeats)
    bandwidth = 2 * sent / max(elapsed_reduce - 2 * hop, 1e-9)
    return Link(
        bandwidth=bandwidth,
        latency=hop,
        exchange_share=min(1.0, sent / max(elapsed - hop, 1e-9) / bandwidth),
        copy_seconds=copying / sent,
        reduce_seconds=reducing / (2 * sent),
    )


def _cost(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds, and seconds of the processor in all threads, of a message."""
    work()
    elapsed, busy = [], []
    for _ in range(repeats):
        began, began_busy = time.perf_counter(), time.process_time()
        work()
        elapsed.append(time.perf_counter() - began)
        busy.append(time.process_time() - began_busy)
    return median(elapsed), median(busy)


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _inputs(args: argparse.Namespace) -> tuple[Machine, Link, float, list[str]]:
    """What is measured where it was asked for and assumed elsewhere, with a line on each."""
    assumed = []
    machine = Machine.of_memory(args.memory_bandwidth * 1e9)
    link = None
    step_compute = args.step_compute
    if args.measure:
        model = build_model(args.model)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            torch.distributed.init_process_group("gloo")
            link = measure_link()
        parameters = list(model.parameters())
        measured = measure_compute(model, args.batch_size, args.context)
        step_compute = args.step_compute or measured
        machine = measure_machine(parameters, args.sparsity)
        if is_distributed():
            torch.distributed.destroy_process_group()
    else:
        assumed.append(f"optimizers take what their memory traffic takes at {args.memory_bandwidth:g} GB/s")
    if link is None or args.bandwidth is not None:
        known = link or Link(bandwidth=args.bandwidth, latency=args.latency)
        link = replace(known, bandwidth=args.bandwidth * TCP_SHARE)
        assumed.append(f"{1 - TCP_SHARE:.0%} of the link's bandwidth goes to protocol headers")
    if link.copy_seconds == 0:
        assumed.append(f"a hop takes {planner.show_seconds(link.latency)}; moving bytes costs the processor nothing")
    return machine, link, step_compute, assumed


# --------------------------------------------------------------------------------------------------- reporting


def report(
    model: str, job: Job, link: Link, machine: Machine, predictions: Sequence[Prediction], assumed: Sequence[str]
) -> str:
    """Tables in Markdown, the advice first."""
    floor = predictions[0].seconds
    lines = [
        f"{model}: {job.parameters / 1e6:.1f}M parameters on {job.ranks} ranks ({job.ranks_per_node} per node),"
        f" {link.bandwidth * 8e-9:.3g} Gbit/s, forward and backward {planner.show_seconds(job.step_compute)}",
        "",
        planner.advice(predictions),
        "",
        "| method | step | over compute | sent per rank and step | memory per rank*"
        " | as fast as dense at | pays below |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in predictions:
        even, pays = "-", "-"
        if p.sparsity is not None:
            even, pays = (
                show_bandwidth(planner.break_even_bandwidth(job, link, machine, p.sparsity, speedup=speedup))
                for speedup in (1.0, planner.WORTH)
            )
        lines.append(
            f"| {p.method} | {planner.show_seconds(p.seconds)} | {p.seconds / floor:.2f}x | {show_bytes(p.bytes_sent)}"
            f" | {show_bytes(p.memory)} | {even} | {pays} |"
        )
    sparsities = [p.sparsity for p in predictions if p.sparsity is not None]
    lines += ["", "The same work per rank on more ranks:", ""]
    scaling = planner.scaling(job, link, machine, sparsities)
    methods = [p.method for p in predictions]
    lines += [f"| ranks | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for ranks, row in scaling.items():
        lines.append(f"| {ranks} | {' | '.join(planner.show_seconds(p.seconds) for p in row)} |")
    lines += [
        "",
        "\\* parameters, gradients, optimizer and buffers; activations come on top. The last columns: the bandwidth at",
        f"which it is as fast as the best of the dense methods, and that below which it is {planner.WORTH}x as fast.",
        "",
        "Assumed: " + "; ".join([*assumed, *ASSUMPTIONS]) + ".",
    ]
    return "\n".join(lines)


TCP_SHARE = 0.95
ASSUMPTIONS = (
    "equally fast ranks",
    "backward is two thirds of the compute",
    "rings for all-reduce, all-gather and reduce-scatter, each node's link used once a pass",
    "an all-to-all crosses a node's link with the bytes of all its ranks",
    "SCAPE's ranks form one flat group",
)


def show_bytes(size: float) -> str:
    """``1_234_567`` is ``"1.23 MB"``."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def show_bandwidth(value: float | None) -> str:
    """Bytes per second as bits: ``1.25e9`` is ``"10 Gbit/s"``."""
    if value is None:
        return "never"
    if math.isinf(value):
        return "always"
    bits = value * 8
    if bits >= 1e12:
        return f"{bits * 1e-12:.3g} Tbit/s"
    return f"{bits * 1e-9:.3g} Gbit/s" if bits >= 1e9 else f"{bits * 1e-6:.3g} Mbit/s"


def plot(path: Path, model: str, job: Job, link: Link, machine: Machine, sparsities: Sequence[float]) -> None:
    """Step time over the link's bandwidth, and over the number of ranks.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("`--plot` needs matplotlib. Install it: pip install 'lightning-scape[plots]'.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (over_bandwidth, over_ranks) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    bits = [10 ** (7 + 0.05 * i) for i in range(101)]
    rows = [planner.predict(job, replace(link, bandwidth=b / 8), machine, sparsities) for b in bits]
    scaling = planner.scaling(job, link, machine, sparsities)
    styles: dict[bool, dict[str, Any]] = {True: {"linewidth": 2}, False: {"linestyle": "--"}}
    for index, first in enumerate(rows[0]):
        style = styles[first.is_scape]
        over_bandwidth.plot(bits, [row[index].seconds for row in rows], label=first.method, **style)
        over_ranks.plot([*scaling], [row[index].seconds for row in scaling.values()], **style)
    over_bandwidth.axvline(link.bandwidth * 8, color="lightgray", zorder=0)
    over_bandwidth.set(xscale="log", yscale="log", xlabel="bandwidth, bit/s", ylabel="seconds per step")
    over_ranks.set(xscale="log", yscale="log", xlabel="ranks, the same work each")
    over_bandwidth.legend(fontsize="small")
    figure.suptitle(f"{model}, predicted; left: {job.ranks} ranks, right: {link.bandwidth * 8e-9:.3g} Gbit/s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
