"""``lightning-scape plan``: predicts what a step will take and whether SCAPE pays; under torchrun it measures."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_scape.comm.collectives import is_distributed
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
from lightning_scape.tools.arguments import launched, of_launcher


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
        if inside is not None:
            assumed.append(f"a rank reaches the others of its node at {args.node_bandwidth:g} GB/s")
        plan = Plan(
            model=args.model,
            job=job,
            link=link,
            machine=machine,
            sparsities=args.sparsity,
            assumed=assumed,
            memory=args.memory * 1e9,
            inside=inside,
            length=_run(args),
        )
        print(plan.report())
    except ValueError as error:
        print(f"lightning-scape plan: error: {error}", file=sys.stderr)
        return 2
    if args.plot is not None:
        plan.plot(args.plot)
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
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------------------------------- reporting

LONG = 10_000
"""Steps of the run of which a plan tells where none is given."""
TCP_SHARE = 0.95
ASSUMPTIONS = (
    "equally fast ranks",
    "backward is two thirds of the compute",
    "rings for all-reduce, all-gather and reduce-scatter, each node's link used once a pass",
    "an all-to-all crosses a node's link with the bytes of all its ranks",
)
FLAT = "form one flat group, unless the line names a local_group_size"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is predicted, and how it is told: tables in Markdown, the advice first."""

    model: str
    """Its name."""
    job: Job
    link: Link
    """Between nodes."""
    machine: Machine
    sparsities: Sequence[float]
    """Which to predict."""
    assumed: Sequence[str] = ()
    """What was taken for granted."""
    memory: float = math.inf
    """Bytes of a rank's device."""
    inside: Link | None = None
    """Between a node's ranks, where it has several."""
    length: Run | None = None
    """None: the advice is on a step late in a long run."""

    def predict(self, link: Link, sparsities: Sequence[float]) -> list[Prediction]:
        """Of all methods that exchange in every step; those that shard inside a node, too, where it has ranks."""
        flat = predict(self.job, link, self.machine, sparsities)
        return flat + self._on_nodes(self.job, link, sparsities)

    def _on_nodes(self, job: Job, link: Link, sparsities: Sequence[float]) -> list[Prediction]:
        return [] if self.inside is None else predict_nodes(job, link, self.machine, self.inside, sparsities)

    @cached_property
    def predictions(self) -> list[Prediction]:
        """Over the link."""
        return self.predict(self.link, self.sparsities)

    @cached_property
    def local(self) -> list[Prediction]:
        """Of methods that exchange after several steps."""
        return predict_local(self.job, self.link, self.machine)

    @property
    def _alone(self) -> float:
        """Seconds of compute only."""
        return self.predictions[0].seconds

    @property
    def dense(self) -> Prediction:
        """DDP: what a user has now."""
        return next(p for p in self.predictions if not p.title and p.bytes_sent)

    def report(self) -> str:
        """All of it."""
        job = self.job
        lines = [
            f"{self.model}: {job.parameters / 1e6:.1f}M parameters on {job.ranks} ranks ({job.ranks_per_node} per"
            f" node), {show_bandwidth(self.link.bandwidth)}, forward and backward {show_seconds(job.step_compute)}",
            "",
        ]
        if self.length is None:
            lines += [which_method(self.predictions, self.local, self.memory), "", self._loads(), ""]
            lines += [self._of_a_long_run(), ""]
        else:
            lines += [*self._run_tables(self.length), "", "A step after all warm-up:", ""]
        lines += self._step_table()
        if self.length is None:
            lines += self._alternatives(Run(steps=LONG))
        for title in dict.fromkeys(p.title for p in self.local):
            head = [title, "step, on average", "over compute only", "sent per rank and step", "memory per rank*"]
            of_title = [p for p in self.local if p.title == title]
            rows = [[f"H = {p.window}", *_figures(p, self._alone), self._needed(p)] for p in of_title]
            lines += ["", *_table(head, rows)]
        return "\n".join([*lines, *self._ranks_table(), *self._remarks()])

    def _run_tables(self, length: Run) -> list[str]:
        """What a whole run takes by each method, the advice on it first."""
        runs = [predict_run(p, self.job, self.link, length) for p in (*self.predictions, *self.local)]
        alone, dense = runs[0].seconds, runs[self.predictions.index(self.dense)].whole
        of_card = ", by network card" if self.job.ranks_per_node > 1 else ""
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
                show_times(message_load(run.whole.on_card / run.steps, self.job, self.link), 2),
            ]
            for run in runs
        ]
        saved = f", {length.checkpoints} checkpoints" if length.checkpoints else ""
        return [
            *advice_on_run(self.predictions, self.local, self.job, self.link, length, self.memory),
            "",
            self._loads(),
            "",
            f"The whole run, {length.steps:,} steps{saved}:",
            "",
            *_table(head, rows),
            *self._alternatives(length),
        ]

    def _loads(self) -> str:
        """What decides: how long the messages of dense training take beside a step's computation."""
        dense = self.dense
        load = show_times(message_load(dense.on_card, self.job, self.link), 2)
        return (
            f"{dense.method}'s messages take {load} times as long as a step's forward and backward"
            f" ({show_bytes(dense.on_card)} at {show_bandwidth(self.link.bandwidth)},"
            f" {show_seconds(self.job.step_compute)}); with a larger model too, and half as long with twice the batch."
        )

    def _of_a_long_run(self) -> str:
        """One line on the whole of a run, where no length was given."""
        sparse = (p for p in self.predictions if 0 < (p.sparsity or 0) <= SPARSEST)
        said = []
        for late in (best_dense(self.predictions, self.memory), *sparse):
            run = predict_run(late, self.job, self.link, Run(steps=LONG))
            begun = f" (the first {run.beginning:,} steps send more)" if run.beginning else ""
            figures = f"{show_seconds(run.seconds)} and {show_bytes(run.bytes_sent)}"
            said.append(f"{figures} from a rank with {run.late.method}{begun}")
        return f"A run of {LONG:,} steps takes {'; '.join(said)}. `--steps` tells of yours."

    def _alternatives(self, length: Run) -> list[str]:
        """A line on options by which a run is shorter by 5% or more."""
        costs, said = {method.title: method.step_cost for method in map(named, names())}, []
        for late in self.predictions:
            cost = costs.get(late.title)
            given = predict_run(late, self.job, self.link, length)
            for other in cost.alternatives(self.job, self.link, self.machine, late) if cost else ():
                run = predict_run(other, self.job, self.link, length)
                if 1.05 * run.seconds <= given.seconds and other.memory <= self.memory:
                    figures = f"{show_seconds(run.seconds)} and {show_bytes(run.bytes_sent)}"
                    said.append(f"{late.method} with {other.option} takes {figures} for {length.steps:,} steps")
        return ["", f"Sooner: {'; '.join(said)}."] if said else []

    def _step_table(self) -> list[str]:
        shared = self.inside is not None
        head = ["method", "step", "over compute only", "sent per rank and step", *["sent per network card"] * shared]
        rows = [
            [
                p.method,
                *_figures(p, self._alone),
                *[show_bytes(p.on_card)] * shared,
                self._needed(p),
                *(self._turning_points(p) if p.sparsity is not None else ("-", "-")),
            ]
            for p in self.predictions
        ]
        return _table([*head, "memory per rank*", "as fast as dense below", "pays below"], rows)

    def _turning_points(self, p: Prediction) -> list[str]:
        def there(link: Link) -> list[Prediction]:
            return self.predict(link, [p.sparsity or 0.0])

        gains = [gain_of(p.method, there, self.link, speedup=speedup, memory=self.memory) for speedup in (1.0, WORTH)]
        return [show_turning_point(gain, self.link.bandwidth) for gain in gains]

    def _ranks_table(self) -> list[str]:
        rows = []
        for ranks, row in scaling(self.job, self.link, self.machine, self.sparsities).items():
            row += self._on_nodes(replace(self.job, ranks=ranks), self.link, self.sparsities)
            rows.append([str(ranks), *(show_seconds(p.seconds) for p in row)])
        table = _table(["ranks", *(p.method for p in self.predictions)], rows)
        return ["", "The same work per rank on more ranks:", "", *table]

    def _remarks(self) -> list[str]:
        fits = "" if self.memory == math.inf else f" that fit into {show_bytes(self.memory)} (all, if none does)"
        flat = [f"{title}'s ranks {FLAT}" for title in dict.fromkeys(p.title for p in self.predictions) if title]
        return [
            "",
            "Compute only: no messages, and the whole of AdamW on every rank; what shards the optimizer may take less.",
            "",
            "\\* parameters, gradients, optimizer and buffers; activations come on top. The last columns: the"
            " bandwidth",
            f"below which it is as fast as the best of the dense methods{fits}, and {WORTH}x as fast.",
            "",
            "Assumed: " + "; ".join([*self.assumed, *ASSUMPTIONS, *flat]) + ".",
        ]

    def _needed(self, p: Prediction) -> str:
        return show_bytes(p.memory) + (", too much" if p.memory > self.memory else "")

    def plot(self, path: Path) -> None:
        """Step time over the link's bandwidth, and over the number of ranks, into a file that can be written."""
        import matplotlib.pyplot as plt

        given = self.machine, self.sparsities
        figure, (over_bandwidth, over_ranks) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        bits = [10 ** (7 + 0.05 * i) for i in range(101)]
        rows = [predict(self.job, replace(self.link, bandwidth=b / 8), *given) for b in bits]
        over = scaling(self.job, self.link, *given)
        styles: dict[bool, dict[str, Any]] = {True: {"linewidth": 2}, False: {"linestyle": "--"}}
        for index, first in enumerate(rows[0]):
            style = styles[bool(first.title)]
            over_bandwidth.plot(bits, [row[index].seconds for row in rows], label=first.method, **style)
            over_ranks.plot([*over], [row[index].seconds for row in over.values()], marker=".", **style)
        over_bandwidth.axvline(self.link.bandwidth * 8, color="lightgray", zorder=0)
        over_bandwidth.set(xscale="log", yscale="log", xlabel="bandwidth, bit/s", ylabel="seconds per step")
        over_ranks.set(xscale="log", yscale="log", xlabel="ranks, the same work each")
        over_bandwidth.legend(fontsize="small")
        ranks, bandwidth = self.job.ranks, show_bandwidth(self.link.bandwidth)
        figure.suptitle(f"{self.model}, predicted; left: {ranks} ranks, right: {bandwidth}")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _figures(p: Prediction, alone: float) -> tuple[str, str, str]:
    """Of every table: the step, over compute only, and what is sent."""
    return show_seconds(p.seconds), f"{p.seconds / alone:,.2f}x", show_bytes(p.bytes_sent)


def show_turning_point(gain: Gain, bandwidth: float) -> str:
    """The bandwidth below which there is a gain, or ``"above"`` that from which on there is one."""
    below, above = break_even_bandwidth(gain, bandwidth), least_bandwidth(gain, bandwidth)
    return show_bandwidth(below) if above is None else f"above {show_bandwidth(above)}"
