"""``lightning-scape plan``: what each method sends, takes and needs, before a job is launched; and which to use.

**Bytes** are the package's own count: a real step sends so many. **Seconds** follow from two numbers: ``C``, what a
step takes on one rank alone, and ``t``, the step's bytes over the link's bandwidth.

=========== ====================== ==============================================================================
DDP         ``max(C, C / 3 + t)``  gradients travel during the backward pass, two thirds of the step
SCAPE       ``C + t``              its messages are waited for
SparseLoCo  ``C + t / H``          one exchange after ``H`` steps
=========== ====================== ==============================================================================

The method's own work, latency and slower ranks are left out; ``examples/benchmarks/two_hosts.py`` compares with what it
measures. Where the CPU that computes also sends (gloo), DDP's messages do not hide, and a step took up to 1.5 times as
long. Count ``C + t`` there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from lightning_scape.core.words import show_bytes, show_seconds, show_times
from lightning_scape.scape.communicator import run_bytes, scape_bytes
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.state import state_bytes
from lightning_scape.sparseloco.config import SparseLoCoConfig

NEAR = 1.1
"""The first method whose run takes at most so many times the shortest is advised: the earlier, the nearer to DDP."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Row(NamedTuple):
    """What a method sends, takes and needs."""

    method: str
    step_bytes: float
    """That a rank sends in a step: late in a run (SCAPE), on average (SparseLoCo)."""
    run_bytes: float
    """In the whole run, warm-up included."""
    step_seconds: float
    run_seconds: float
    memory: float
    """Bytes of a rank for fp32 parameters, their gradients, the method and AdamW; activations come on top."""


def plan(numels: Sequence[int], ranks: int, bandwidth: float, compute: float, steps: int) -> list[Row]:
    """All methods with their default options, the one nearest to DDP first.

    Args:
        numels: entries of each parameter tensor, all fp32.
        ranks: N.
        bandwidth: bytes per second that a rank sends.
        compute: C, seconds of a step on one rank alone: forward, backward and optimizer.
        steps: of the run.
    """
    parameters = sum(numels)

    def ddp(method: str, width: int) -> Row:
        sent = 2 * (ranks - 1) * width * parameters // ranks
        seconds = ddp_seconds(compute, sent / bandwidth)
        memory = parameters * 20  # parameters, gradients, two moments, buckets
        return Row(method, sent, steps * sent, seconds, steps * seconds, memory)

    def exchanging(method: str, step_bytes: float, run_bytes: float, state: float) -> Row:
        step, run = compute + step_bytes / bandwidth, steps * compute + run_bytes / bandwidth
        return Row(method, step_bytes, run_bytes, step, run, parameters * (8 + state))

    rows = [ddp("DDP fp32", 4), ddp("DDP bf16", 2)]
    for sparsity in (0.9, 0.99):
        config = ScapeConfig(sparsity=sparsity)
        late, whole = sum(scape_bytes(numels, ranks, config).values()), run_bytes(numels, ranks, config, steps)
        rows.append(exchanging(f"SCAPE {sparsity:.0%}", late, whole, state_bytes(config, ranks)))
    loco = SparseLoCoConfig()
    one, every = loco.exchange_bytes(numels, ranks), loco.sync_every
    state = 16  # AdamW's moments; starting point and error feedback
    return [*rows, exchanging(f"SparseLoCo, H={every}", one / every, one * -(-steps // every), state)]


def ddp_seconds(compute: float, messages: float) -> float:
    """A step of DDP, whose messages travel during the backward pass."""
    return max(compute, compute / 3 + messages)


def advised(rows: Sequence[Row]) -> Row:
    """The first whose run is within 10% of the shortest."""
    shortest = min(row.run_seconds for row in rows)
    return next(row for row in rows if row.run_seconds <= NEAR * shortest)


def report(rows: Sequence[Row]) -> str:
    """The table, in Markdown, and the advice in one sentence."""
    lines = [
        "| method | a step sends | the run sends | a step takes | the run takes | memory of a rank |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        sent, taken = (map(show_bytes, row[1:3]), map(show_seconds, row[3:5]))
        lines.append(f"| {' | '.join([row.method, *sent, *taken, show_bytes(row.memory)])} |")
    return "\n".join([*lines, "", _advice(rows)])


def _advice(rows: Sequence[Row]) -> str:
    choice, dense = advised(rows), rows[0]
    if choice is dense:
        return f"Use {dense.method}: no other method's run is more than 10% shorter."
    differ = " Its ranks differ between exchanges, which costs some loss." if choice is rows[-1] else ""
    return (
        f"Use {choice.method}: the run takes {show_seconds(choice.run_seconds)} instead of"
        f" {show_seconds(dense.run_seconds)} with {dense.method}, and sends"
        f" {show_times(dense.run_bytes / choice.run_bytes)} times fewer bytes.{differ}"
    )


def bytes_per_second(text: str) -> float:
    """``"10gbit"`` is ``1.25e9``.

    Raises:
        ValueError: it is not a number and a unit.
    """
    found = re.fullmatch(r"(\d+\.?\d*)([kmg]bit)", text.lower())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"`--bandwidth` must be a number and kbit, mbit or gbit, got {text!r}. Write 10gbit.")
    return float(found[1]) * UNITS[found[2]] / 8


def numels_of(model: str) -> list[int]:
    """Entries of each parameter of a LitGPT model; nothing is allocated.

    Raises:
        ValueError: LitGPT is not installed, or knows no such model.
    """
    import torch

    try:
        from litgpt import GPT, Config
    except ImportError as error:
        raise ValueError("`--model` needs LitGPT. Install lightning-scape[litgpt], or give --parameters.") from error
    try:
        config = Config.from_name(model)
    except ValueError as error:
        raise ValueError(f"`--model` must name a LitGPT configuration, got {model!r}. Try pythia-160m.") from error
    with torch.device("meta"):
        return [parameter.numel() for parameter in GPT(config).parameters()]
