"""Predicted steps and runs beside those that bench_two_hosts.py and bench_end_to_end.py measured; no script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lightning_scape.planning import measure as measuring
from lightning_scape.planning.cost_model import Job, Link, Machine, Prediction, Weight, compute_only, ddp, fsdp
from lightning_scape.planning.run import Run, predict_run
from lightning_scape.scape import plan as scape
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.sparseloco import cost as sparseloco
from lightning_scape.sparseloco.config import SparseLoCoConfig
from lightning_scape.tools import plan


@dataclass(frozen=True)
class Comparison:
    """A measured step and what was predicted for it."""

    model: str
    link: str
    method: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, of the measured time."""
        return abs(self.predicted - self.measured) / self.measured


def predicted(method: str, job: Job, link: Link, machine: Machine, wire: str | None = None) -> Prediction | None:
    """A step of a method by its name in the results; None: it is not predicted (PowerSGD).

    Args:
        method: such as ``"scape-0.9-int4"``.
        job: what was trained, on how many ranks.
        link: between them.
        machine: what the optimizers cost.
        wire: of SCAPE, where the name gives none; None: the default.
    """
    kind, _, option = method.partition("-")
    if kind == "scape":
        sparsity, _, named = option.partition("-")
        wires = {"wire_dtype": named or wire} if named or wire else {}
        return scape.predict(job, link, machine, ScapeConfig(sparsity=float(sparsity), **wires))
    if kind == "sparseloco":
        return sparseloco.predict(job, link, machine, SparseLoCoConfig(sync_every=int(option)))
    dense: dict[str, Callable[[], Prediction]] = {
        "compute": lambda: compute_only(job, machine),
        "ddp": lambda: ddp(job, link, machine),
        "ddp-bf16": lambda: ddp(job, link, machine, wire_bytes=2),
        "fsdp": lambda: fsdp(job, link, machine, reduce_passes=2),
    }
    return dense[method]() if method in dense else None


def measure(
    model: torch.nn.Module, batch_size: int, context: int, rate: float, fused: bool | None = None
) -> dict[str, Any]:
    """What ``lightning-scape plan --measure`` would find here, for :func:`inputs`. Collective.

    Args:
        model: what is trained.
        batch_size: sequences of a rank's step.
        context: tokens of a sequence.
        rate: of the link, bits a second.
        fused: torch's option of AdamW, as :func:`measuring.measure_machine` takes it.
    """
    link = measuring.measure_link(megabytes=min(4.0, rate / 8e6 / 10))
    step_compute = measuring.measure_compute(model, batch_size, context)
    machine = measuring.measure_machine(list(model.parameters()), sparsities=(0.0, 0.9, 0.99), repeats=3, fused=fused)
    return {
        "step_compute": step_compute,
        "link": vars(link),
        "adamw": machine.adamw,
        "clip": machine.clip,
        "scape": dict(machine.own["scape"]),
        "weights": [[w.numel, w.block, w.multiplied] for w in plan.weights_of(model)],
    }


def inputs(measured: Mapping[str, Any], weights: Iterable[Sequence[Any]], ranks: int) -> tuple[Job, Link, Machine]:
    """What ``lightning-scape plan --measure`` would predict from.

    Args:
        measured: ``step_compute``, ``link``, ``adamw``, ``clip`` and ``scape``.
        weights: entries, block and whether they are multiplied.
        ranks: of the run.
    """
    own = {"scape": {float(density): (a, b) for density, (a, b) in measured["scape"].items()}}
    job = Job(weights=tuple(Weight(*weight) for weight in weights), ranks=ranks, step_compute=measured["step_compute"])
    machine = Machine(adamw=measured["adamw"], clip=measured["clip"], own=own)
    return job, Link(**measured["link"]), machine


def compare_with_measured(results: Mapping[str, Any]) -> list[Comparison]:
    """Every step that bench_two_hosts.py measured, beside its prediction.

    Predicted from what ``lightning-scape plan --measure`` finds in the same processes (compute, optimizers, link),
    never from the steps themselves.

    Args:
        results: its JSON.
    """
    found, settings = [], results["settings"]
    for cell in results["cells"]:
        given = inputs(cell["measured"], results["models"][cell["model"]]["weights"], settings["hosts"])
        for method, row in cell["methods"].items():
            late = predicted(method, *given, wire=settings.get("wire_dtype", "bf16"))  # the default of that time
            if late is not None:
                found.append(Comparison(cell["model"], cell["link"], method, row["seconds"], late.seconds))
    return found


def compare_runs(
    results: Mapping[str, Any], checkpoints: int = 12, *, as_fast_as_alone: bool = False, **saved: bool
) -> list[Comparison]:
    """Every whole run that bench_end_to_end.py measured, beside its prediction by ``planning.run.predict_run``.

    A validation, and what writing a checkpoint takes apart from its messages, are those of compute only.

    Args:
        results: its JSON.
        checkpoints: of a run.
        as_fast_as_alone: whether the machine's speed is taken from the run of compute only, which is then not compared,
            and not from what was measured before all runs: a machine that others share has another one an hour later.
        **saved: ``sharded`` or ``beside``, as :class:`~lightning_scape.planning.run.Run` takes them.
    """
    found = []
    for link, cell in results["links"].items():
        slower = max(cell["plan"], key=lambda rank: rank["step_compute"])
        alone, steps = cell["methods"]["compute"], results["settings"]["steps"]
        taken = {"validation": alone["validating"], "saving": alone["saving"] / checkpoints}
        run = Run(steps=steps, checkpoints=checkpoints, **taken, **saved)
        given = inputs(slower, slower["weights"], len(cell["plan"]))
        if as_fast_as_alone:
            spent = alone["seconds"] - alone["validating"] - alone["saving"]  # in steps
            scaled = at_speed(slower, spent / (steps * compute_only(given[0], given[2]).seconds))
            given = inputs(scaled, slower["weights"], len(cell["plan"]))
        for method, row in cell["methods"].items():
            late = predicted(method, *given)
            if late is not None and not (as_fast_as_alone and method == "compute"):
                seconds = predict_run(late, given[0], given[1], run).seconds
                found.append(Comparison(results["settings"]["size"], link, method, row["seconds"], seconds))
    return found


def at_speed(measured: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """What :func:`measure` finds where all that a core does takes ``factor`` times as long; the link stays."""
    own = {density: [factor * part for part in parts] for density, parts in measured["scape"].items()}
    return {**measured, "scape": own, **{name: factor * measured[name] for name in ("step_compute", "adamw", "clip")}}


def median_error(comparisons: Iterable[Comparison]) -> float:
    """Of the relative errors."""
    return median(comparison.error for comparison in comparisons)
