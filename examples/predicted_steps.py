"""Predicted steps beside those that bench_two_hosts.py measured; no script of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_scape.planning.cost_model import Job, Link, Machine, Prediction, Weight, compute_only, ddp, fsdp
from lightning_scape.scape import plan as scape
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.sparseloco import cost as sparseloco
from lightning_scape.sparseloco.config import SparseLoCoConfig


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


PREDICTORS: dict[str, Callable[[Job, Link, Machine], Prediction]] = {
    "compute": lambda job, link, machine: compute_only(job, machine),
    "ddp": ddp,
    "ddp-bf16": lambda job, link, machine: ddp(job, link, machine, wire_bytes=2),
    "fsdp": lambda job, link, machine: fsdp(job, link, machine, reduce_passes=2),
    "scape-0": lambda job, link, machine: scape.predict(job, link, machine, ScapeConfig(sparsity=0.0)),
    "scape-0.9": lambda job, link, machine: scape.predict(job, link, machine, ScapeConfig(sparsity=0.9)),
    "scape-0.99": lambda job, link, machine: scape.predict(job, link, machine, ScapeConfig(sparsity=0.99)),
    "scape-0.9-int4": lambda job, link, machine: scape.predict(
        job, link, machine, ScapeConfig(sparsity=0.9, wire_dtype="int4")
    ),
    "sparseloco-30": lambda job, link, machine: sparseloco.predict(job, link, machine, SparseLoCoConfig(sync_every=30)),
}
"""By the methods' names in the results of bench_two_hosts.py; PowerSGD is not predicted."""


def compare_with_measured(results: Mapping[str, Any]) -> list[Comparison]:
    """Every step that bench_two_hosts.py measured, beside its prediction.

    Predicted from what ``lightning-scape plan --measure`` finds in the same processes (compute, optimizers, link),
    never from the steps themselves.

    Args:
        results: its JSON.
    """
    found = []
    for cell in results["cells"]:
        job = Job(
            weights=tuple(Weight(*weight) for weight in results["models"][cell["model"]]["weights"]),
            ranks=results["settings"]["hosts"],
            step_compute=cell["measured"]["step_compute"],
        )
        machine = Machine(
            adamw=cell["measured"]["adamw"],
            clip=cell["measured"]["clip"],
            own={"scape": {float(density): (a, b) for density, (a, b) in cell["measured"]["scape"].items()}},
        )
        link = Link(**cell["measured"]["link"])
        for method, predictor in PREDICTORS.items():
            if method in cell["methods"]:
                measured = cell["methods"][method]["seconds"]
                found.append(
                    Comparison(cell["model"], cell["link"], method, measured, predictor(job, link, machine).seconds)
                )
    return found


def median_error(comparisons: Iterable[Comparison]) -> float:
    """Of the relative errors."""
    return median(comparison.error for comparison in comparisons)
