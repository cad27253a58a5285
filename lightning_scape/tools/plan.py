"""``lightning-scape plan``: predicts what a step will take and whether SCAPE pays; under torchrun it measures."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_scape.comm.collectives import is_distributed
from lightning_scape.comm.worker import end_safely
from lightning_scape.core.method import named, names
from lightning_scape.core.words import show_bandwidth, show_bytes, show_seconds, show_times
from lightning_scape.planning.conclusions import (
    SPARSEST,
    WORTH,
    Gain,
    best_dense,
    break_even_bandwidth,
    gain_of,
    least_bandwidth,
    which_method,
)
from lightning_scape.planning.cost_model import (
    Job,
    Link,
    Machine,
    Prediction,
    Weight,
    predict,
    predict_local,
    scaling,
)
from lightning_scape.planning.measure import CPU, measure_compute, measure_link, measure_machine
from lightning_scape.planning.run import Run, advice_on_run, message_load, predict_run
from lightning_scape.planning.two_level import predict_nodes
from lightning_scape.tools.arguments import import_matplotlib, launched, of_launcher


def run(args: Namespace) -> int:
    """The command, with its arguments read; returns its exit status."""
    try:
        weights = model_weights(args.model)
        machine, link, step_compute, assumed = _inputs(args)
        if of_launcher(os.environ, "RANK", 0):
            return 0  # every rank measured; one reports
        job = Job(
            weights=weights,
            ranks=args.nodes * args.gpus_per_node,
            ranks_per_node=_ranks_per_node(args.nodes * args.gpus_per_node, args.gpus_per_node),
            step_compute=step_compute,
            parameter_bytes=_parameter_bytes(args),
            clip=not args.no_clipping,
        )
        inside = Link(bandwidth=args.node_bandwidth * 1e9, latency=5e-6) if job.ranks_per_node > 1 else None
        predictions = _predict(job, link, machine, args.sparsity, inside)
        if inside is not None:
            assumed.append(f"a rank reaches the others of its node at {args.node_bandwidth:g} GB/s")
    except ValueError as error:
        print(f"lightning-scape plan: error: {error}", file=sys.stderr)
        return 2
    memory = args.memory * 1e9
    print(report(args.model, job, link, machine, predictions, assumed, memory=memory, inside=inside, length=_run(args)))
    if args.plot is not None:
        plot(args.plot, args.model, job, link, machine, args.sparsity)
        print(f"\nplotted to {args.plot}")
    return 0


def _run(args: Namespace) -> Run | None:
    """The run that was asked for."""
    if args.steps is None:
        return None
    return Run(
        steps=args.steps,
        validation=args.validation,
        checkpoints=args.checkpoints,
        sharded=args.state_dict_type == "sharded",
        beside=args.async_save,
    )


def _predict(
    job: Job, link: Link, machine: Machine, sparsities: Sequence[float], inside: Link | None
) -> list[Prediction]:
    """Of all methods; those that shard inside a node too, where nodes have several ranks."""
    flat = predict(job, link, machine, sparsities)
    return flat if inside is None else flat + predict_nodes(job, link, machine, inside, sparsities)


def _ranks_per_node(ranks: int, on_each: int) -> int:
    """Ranks that share one node's link. On one machine each rank has its own link, the one that was measured."""
    return on_each if on_each < ranks else 1


# ---------------------------------------------------------------------------------------------------- the model


def build_model(name: str) -> nn.Module:
    """A LitGPT model.

    Raises:
        ValueError: LitGPT is not installed, or knows no such configuration.
    """
    try:
        from litgpt import GPT, Config
        from litgpt.config import configs
    except ImportError as error:
        raise ValueError("`--model` needs LitGPT. Install it: pip install 'lightning-scape[litgpt]'.") from error
    # An organization before the name, and the case of its letters, do not matter.
    known, short = {config["name"].lower(): config["name"] for config in configs}, name.rpartition("/")[2].lower()
    try:
        config = Config.from_name(known.get(short, name))
    except ValueError as error:
        near = [known[each] for each in difflib.get_close_matches(short, known, n=3, cutoff=0.5)]
        remedy = f"Did you mean {' or '.join(near)}?" if near else "Such as pythia-160m."
        raise ValueError(f"`--model` must name a LitGPT configuration, got {name!r}. {remedy}") from error
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


def _inputs(args: Namespace) -> tuple[Machine, Link, float, list[str]]:
    """What is measured where it was asked for and assumed elsewhere, with a line on each."""
    link, step_compute = None, args.step_compute
    if args.measure:
        machine, link, measured, where = _measure(args)
        what = "compute and optimizers" if step_compute is None else "optimizers"
        step_compute = measured if step_compute is None else step_compute
        assumed = [f"{what} measured on {where}, in {args.precision}"]
    else:
        machine = Machine.of_memory(args.memory_bandwidth * 1e9, _parameter_bytes(args))
        assumed = [f"optimizers take what their memory traffic takes at {args.memory_bandwidth:g} GB/s"]
    if link is None or args.bandwidth is not None:
        known = link or Link(bandwidth=args.bandwidth, latency=args.latency)
        link = replace(known, bandwidth=args.bandwidth * TCP_SHARE)
        assumed.append(f"{1 - TCP_SHARE:.0%} of the link's bandwidth goes to protocol headers")
    if args.nodes == 1:
        assumed.append("every rank counts as a node: the link was measured between the ranks of one machine")
    if link.copy_seconds == 0:
        assumed.append(f"a hop takes {show_seconds(link.latency)}; moving bytes costs the processor nothing")
    return machine, link, step_compute, assumed


def _parameter_bytes(args: Namespace) -> int:
    return 2 if args.precision == "bf16-true" else 4


def _measure(args: Namespace) -> tuple[Machine, Link | None, float, str]:
    """Optimizers, the link between the ranks (None: one rank), forward and backward, and on what: CUDA if it is there.

    Raises:
        ValueError: the model is not known, or takes no sequences of ``--context`` tokens.
    """
    device, where = CPU, "this machine's CPU"
    if torch.cuda.is_available():
        device = torch.device("cuda", of_launcher(os.environ, "LOCAL_RANK", 0))
        torch.cuda.set_device(device)
        where = torch.cuda.get_device_name(device)
    model = build_model(args.model).to(device, torch.bfloat16 if args.precision == "bf16-true" else torch.float32)
    longest = int(model.config.block_size)  # type: ignore[union-attr,arg-type]
    if args.context > longest:
        raise ValueError(f"`--context` must be at most {longest} for {args.model}, got {args.context}. Shorten it.")
    with _process_group(device):
        link = None
        if is_distributed():
            local = of_launcher(os.environ, "LOCAL_WORLD_SIZE", 1)
            link = measure_link(device=device, ranks_per_node=_ranks_per_node(launched(), local))
        try:
            step_compute = measure_compute(model, args.batch_size, args.context, precision=args.precision)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise ValueError(
                f"A step must fit into memory, got `--batch-size {args.batch_size} --context {args.context}`:"
                f" {str(error).splitlines()[0].rstrip('.')}. Lower one of them."
            ) from error
        machine = measure_machine(list(model.parameters()), args.sparsity)
    return machine, link, step_compute, where


@contextlib.contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """Joins the ranks that torchrun has launched, if any and unless they are."""
    if launched() == 1 or is_distributed():
        yield
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    end_safely(torch.distributed.group.WORLD)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------------------------------- reporting


def report(
    model: str,
    job: Job,
    link: Link,
    machine: Machine,
    predictions: Sequence[Prediction],
    assumed: Sequence[str],
    *,
    memory: float = math.inf,
    inside: Link | None = None,
    length: Run | None = None,
) -> str:
    """Tables in Markdown, the advice first.

    Args:
        model: its name.
        job: what is trained, on how many ranks.
        link: between nodes.
        machine: what the optimizers cost.
        predictions: of all methods that exchange in every step.
        assumed: what was taken for granted.
        memory: bytes of a rank's device.
        inside: the link between a node's ranks, where it has several.
        length: of the run; None: the advice is on a step late in a long one.
    """
    local = predict_local(job, link, machine)
    lines = [
        f"{model}: {job.parameters / 1e6:.1f}M parameters on {job.ranks} ranks ({job.ranks_per_node} per node),"
        f" {show_bandwidth(link.bandwidth)}, forward and backward {show_seconds(job.step_compute)}",
        "",
    ]
    if length is None:
        lines += [which_method(predictions, local, memory), "", _loads(predictions, job, link), ""]
        lines += [_of_a_long_run(predictions, job, link, memory), ""]
    else:
        lines += run_tables(predictions, local, job, link, machine, length, memory)
        lines += ["", "A step after all warm-up:", ""]
    lines += _step_table(predictions, job, link, machine, memory, inside)
    if length is None:
        lines += _alternatives(predictions, job, link, machine, Run(steps=LONG), memory)
    for title in dict.fromkeys(p.title for p in local):
        head = [title, "step, on average", "over compute only", "sent per rank and step", "memory per rank*"]
        of_title = [p for p in local if p.title == title]
        rows = [[f"H = {p.window}", *_figures(p, predictions[0].seconds), _needed(p, memory)] for p in of_title]
        lines += ["", *_table(head, rows)]
    return "\n".join(
        [*lines, *_ranks_table(predictions, job, link, machine, inside), *_remarks(predictions, assumed, memory)]
    )


LONG = 10_000
"""Steps of the run of which a plan tells where none is given."""


def run_tables(
    predictions: Sequence[Prediction],
    local: Sequence[Prediction],
    job: Job,
    link: Link,
    machine: Machine,
    length: Run,
    memory: float,
) -> list[str]:
    """What a whole run takes by each method, the advice on it first."""
    runs, apart = ([predict_run(p, job, link, length) for p in given] for given in (predictions, local))
    alone, dense = runs[0].seconds, _first_dense([run.whole for run in runs])
    of_card = ", by network card" if job.ranks_per_node > 1 else ""
    head = [
        "method",
        "the run takes",
        "over compute only",
        "sent by a rank",
        f"{dense.method}'s / it{of_card}",
        "of that checkpoints",
    ]
    head += ["steps that send more", "sent per step: on average", "at the end", "time of messages / compute"]
    rows = [
        [
            run.late.method,
            *_figures(run.whole, alone),
            show_times(dense.on_card / run.whole.on_card) if run.whole.on_card else "-",
            show_bytes(run.of_checkpoints),
            f"{run.beginning:,}" if run.late.window == 1 else "-",
            show_bytes(run.bytes_sent / run.steps),
            show_bytes(run.late.bytes_sent),
            show_times(message_load(run.whole.on_card / run.steps, job, link), 2),
        ]
        for run in (*runs, *apart)
    ]
    saved = f", {length.checkpoints} checkpoints" if length.checkpoints else ""
    return [
        *advice_on_run(predictions, local, job, link, length, memory),
        "",
        _loads(predictions, job, link),
        "",
        f"The whole run, {length.steps:,} steps{saved}:",
        "",
        *_table(head, rows),
        *_alternatives(predictions, job, link, machine, length, memory),
    ]


def _first_dense(predictions: Iterable[Prediction]) -> Prediction:
    """DDP: what a user has now."""
    return next(p for p in predictions if not p.title and p.bytes_sent)


def _loads(predictions: Sequence[Prediction], job: Job, link: Link) -> str:
    """What decides: how long the messages of dense training take beside a step's computation."""
    dense = _first_dense(predictions)
    load = show_times(message_load(dense.on_card, job, link), 2)
    return (
        f"{dense.method}'s messages take {load} times as long as a step's forward and backward"
        f" ({show_bytes(dense.on_card)} at {show_bandwidth(link.bandwidth)}, {show_seconds(job.step_compute)}); with a"
        " larger model too, and half as long with twice the batch."
    )


def _of_a_long_run(predictions: Sequence[Prediction], job: Job, link: Link, memory: float) -> str:
    """One line on the whole of a run, where no length was given."""
    chosen = [best_dense(predictions, memory), *(p for p in predictions if 0 < (p.sparsity or 0) <= SPARSEST)]
    said = []
    for run in (predict_run(p, job, link, Run(steps=LONG)) for p in chosen):
        begun = f" (the first {run.beginning:,} steps send more)" if run.beginning else ""
        said.append(
            f"{show_seconds(run.seconds)} and {show_bytes(run.bytes_sent)} from a rank with {run.late.method}{begun}"
        )
    return f"A run of {LONG:,} steps takes {'; '.join(said)}. `--steps` tells of yours."


def _alternatives(
    predictions: Sequence[Prediction], job: Job, link: Link, machine: Machine, length: Run, memory: float
) -> list[str]:
    """A line on options by which a run is shorter by 5% or more."""
    costs, said = {method.title: method.step_cost for method in map(named, names())}, []
    for late in predictions:
        cost = costs.get(late.title)
        given = predict_run(late, job, link, length)
        for other in cost.alternatives(job, link, machine, late) if cost else ():
            run = predict_run(other, job, link, length)
            if 1.05 * run.seconds <= given.seconds and other.memory <= memory:
                figures = f"{show_seconds(run.seconds)} and {show_bytes(run.bytes_sent)}"
                said.append(f"{late.method} with {other.option} takes {figures} for {length.steps:,} steps")
    return ["", f"Sooner: {'; '.join(said)}."] if said else []


def _step_table(
    predictions: Sequence[Prediction], job: Job, link: Link, machine: Machine, memory: float, inside: Link | None
) -> list[str]:
    shared = inside is not None
    head = ["method", "step", "over compute only", "sent per rank and step", *["sent per network card"] * shared]
    rows = [
        [
            p.method,
            *_figures(p, predictions[0].seconds),
            *[show_bytes(p.on_card)] * shared,
            _needed(p, memory),
            *(_turning_points(job, link, machine, p, memory, inside) if p.sparsity is not None else ("-", "-")),
        ]
        for p in predictions
    ]
    return _table([*head, "memory per rank*", "as fast as dense below", "pays below"], rows)


def _ranks_table(
    predictions: Sequence[Prediction], job: Job, link: Link, machine: Machine, inside: Link | None
) -> list[str]:
    sparsities = [p.sparsity for p in predictions if p.sparsity is not None and p.group_size == 1]
    rows = []
    for ranks, row in scaling(job, link, machine, sparsities).items():
        row += predict_nodes(replace(job, ranks=ranks), link, machine, inside, sparsities) if inside else []
        rows.append([str(ranks), *(show_seconds(p.seconds) for p in row)])
    table = _table(["ranks", *(p.method for p in predictions)], rows)
    return ["", "The same work per rank on more ranks:", "", *table]


def _remarks(predictions: Sequence[Prediction], assumed: Sequence[str], memory: float) -> list[str]:
    fits = "" if memory == math.inf else f" that fit into {show_bytes(memory)} (all, if none does)"
    flat = [f"{title}'s ranks {FLAT}" for title in dict.fromkeys(p.title for p in predictions) if title]
    return [
        "",
        "Compute only: no messages, and the whole of AdamW on every rank; what shards the optimizer may take less.",
        "",
        "\\* parameters, gradients, optimizer and buffers; activations come on top. The last columns: the bandwidth",
        f"below which it is as fast as the best of the dense methods{fits}, and {WORTH}x as fast.",
        "",
        "Assumed: " + "; ".join([*assumed, *ASSUMPTIONS, *flat]) + ".",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _figures(p: Prediction, alone: float) -> tuple[str, str, str]:
    """Of every table: the step, over compute only, and what is sent."""
    return show_seconds(p.seconds), f"{p.seconds / alone:,.2f}x", show_bytes(p.bytes_sent)


def _needed(p: Prediction, memory: float) -> str:
    return show_bytes(p.memory) + (", too much" if p.memory > memory else "")


TCP_SHARE = 0.95
ASSUMPTIONS = (
    "equally fast ranks",
    "backward is two thirds of the compute",
    "rings for all-reduce, all-gather and reduce-scatter, each node's link used once a pass",
    "an all-to-all crosses a node's link with the bytes of all its ranks",
)
FLAT = "form one flat group, unless the line names a local_group_size"


def _turning_points(
    job: Job, link: Link, machine: Machine, p: Prediction, memory: float, inside: Link | None
) -> list[str]:
    def there(other: Link) -> list[Prediction]:
        return _predict(job, other, machine, [p.sparsity or 0.0], inside)

    gains = [gain_of(p.method, there, link, speedup=speedup, memory=memory) for speedup in (1.0, WORTH)]
    return [show_turning_point(gain, link.bandwidth) for gain in gains]


def show_turning_point(gain: Gain, bandwidth: float) -> str:
    """The bandwidth below which there is a gain, or ``"above"`` that from which on there is one."""
    below, above = break_even_bandwidth(gain, bandwidth), least_bandwidth(gain, bandwidth)
    return show_bandwidth(below) if above is None else f"above {show_bandwidth(above)}"


def plot(path: Path, model: str, job: Job, link: Link, machine: Machine, sparsities: Sequence[float]) -> None:
    """Step time over the link's bandwidth, and over the number of ranks.

    Raises:
        ValueError: matplotlib is not installed.
    """
    import_matplotlib("`--plot`")
    import matplotlib.pyplot as plt

    figure, (over_bandwidth, over_ranks) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    bits = [10 ** (7 + 0.05 * i) for i in range(101)]
    rows = [predict(job, replace(link, bandwidth=b / 8), machine, sparsities) for b in bits]
    over = scaling(job, link, machine, sparsities)
    styles: dict[bool, dict[str, Any]] = {True: {"linewidth": 2}, False: {"linestyle": "--"}}
    for index, first in enumerate(rows[0]):
        style = styles[bool(first.title)]
        over_bandwidth.plot(bits, [row[index].seconds for row in rows], label=first.method, **style)
        over_ranks.plot([*over], [row[index].seconds for row in over.values()], marker=".", **style)
    over_bandwidth.axvline(link.bandwidth * 8, color="lightgray", zorder=0)
    over_bandwidth.set(xscale="log", yscale="log", xlabel="bandwidth, bit/s", ylabel="seconds per step")
    over_ranks.set(xscale="log", yscale="log", xlabel="ranks, the same work each")
    over_bandwidth.legend(fontsize="small")
    figure.suptitle(f"{model}, predicted; left: {job.ranks} ranks, right: {show_bandwidth(link.bandwidth)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
