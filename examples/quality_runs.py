"""What `bench_quality.py` trains: the settings of a run, the suites, and the results that runs leave behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = {
    "0.03M": {"n_layer": 1, "n_embd": 32, "n_head": 2, "intermediate_size": 96},
    "0.2M": {"n_layer": 2, "n_embd": 72, "n_head": 2, "intermediate_size": 216},
    "1M": {"n_layer": 4, "n_embd": 128, "n_head": 4, "intermediate_size": 384},
    "3M": {"n_layer": 6, "n_embd": 192, "n_head": 6, "intermediate_size": 576},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides the result of a run."""

    method: str
    """adamw, adams or scape."""
    size: str = "0.2M"
    ranks: int = 4
    batch: int = 8
    """Windows per rank and step."""
    context: int = 64
    steps: int = 3000
    lr: float = 2e-3
    seed: int = 0
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly; a cosine to a tenth follows."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of ScapeConfig, and of ABLATIONS."""

    @property
    def name(self) -> str:
        """Also the name of its file."""
        parts = [self.method, self.size, f"N{self.ranks}x{self.batch}x{self.context}", f"{self.steps}"]
        parts += [f"lr{self.lr:g}", f"seed{self.seed}"]
        parts += [f"{key}-{value}" for key, value in self.options]
        return "_".join(parts)

    @property
    def label(self) -> str:
        """What tells methods apart in a table."""
        options = dict(self.options)
        sparsity = f" {options.pop('sparsity', 0.99):.1%}".replace(".0%", "%") if self.method == "scape" else ""
        name = {"adamw": "dense AdamW", "adams": "dense AdamS", "scape": "SCAPE"}[self.method]
        return name + sparsity + "".join(f", {key}={value}" for key, value in options.items())

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.ranks * self.batch * self.context

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))


def scape(sparsity: float = 0.99, **options: Any) -> dict[str, Any]:
    """Arguments of a SCAPE run; what stands in Run's fields goes there, the rest into its options."""
    own = {f.name for f in dataclasses.fields(Run)}
    settings = {key: options.pop(key) for key in list(options) if key in own}
    return {"method": "scape", "options": (("sparsity", sparsity), *sorted(options.items())), **settings}


def sweep(
    settings: Iterable[dict[str, Any]], lrs: Iterable[float], seeds: Iterable[int] = (0,), **more: Any
) -> list[Run]:
    """One run for every combination."""
    found = itertools.product(settings, lrs, seeds)
    return [Run(**{**setting, **more, "lr": lr, "seed": seed}) for setting, lr, seed in found]


DENSE = [{"method": "adamw"}, {"method": "adams"}]
SPARSE = [scape(0.9), scape(0.99), scape(0.999)]
VARIED: list[dict[str, Any]] = [
    {"mask_votes": 0},
    {"mask_votes": 1},
    {"mask_votes": 4},
    {"vote_bits": 4},
    {"vote_bits": 2},
    {"second_moment": "reconstructed"},
    {"second_moment": "reconstructed", "mask_votes": 0},
    {"catch_up": "summed"},
    {"plain_update": True},
    {"mask_delay": 0},
    {"mask_delay": 2},
    {"mask_interval": 4},
    {"mask_interval": 16},
    {"block_size": 100},
    {"block_size": 1000},
    {"wire_dtype": "fp32"},
    {"dense_steps": 300},
    {"sparsity_warmup_steps": 600},
    {"clip_norm": "local"},
    {"mask_statistic": "first_moment", "mask_votes": 0},
    {"dense_vectors": True},
    {"second_moment_ema": 0.1},
]
"""What is changed, one at a time, in the default configuration at 99%."""
SHORT = [
    *sweep(DENSE + SPARSE, [2e-3], size="0.03M", ranks=2, batch=2, context=32, steps=4),
    *sweep((scape(**options) for options in VARIED), [2e-3], size="0.03M", ranks=2, batch=2, context=32, steps=4),
]
HALF_AND_90: list[dict[str, Any]] = [{"sparsity": 0.5, "block_size": 200}, {"sparsity": 0.9}]
WARMUPS = [(0, 0), (0, 250), (0, 500), (0, 1000), (200, 800), (500, 500)]
WITH_WARMUP = scape(sparsity_warmup_steps=1000)


def tuned(size: str, of_adamw: float, of_others: float) -> list[Run]:
    """10,000 steps at the best rates, half and twice of them, on one seed; then at the best on two more."""
    others = [DENSE[1], *SPARSE[:2], WITH_WARMUP]
    runs = []
    for settings, best in ((DENSE[:1], of_adamw), (others, of_others)):
        runs += sweep(settings, [best / 2, best, 2 * best], size=size, steps=10_000)
        runs += sweep(settings, [best], (1, 2), size=size, steps=10_000)
    return runs


SUITES: dict[str, list[Run]] = {
    "ablations": [
        *sweep(DENSE, [2e-3, 4e-3, 8e-3], size="0.03M"),
        *sweep(SPARSE, [2e-3, 4e-3, 8e-3], size="0.03M"),
        *sweep((scape(**options) for options in VARIED), [4e-3], size="0.03M"),
    ],
    "seeds": sweep([DENSE[1], scape(), *(scape(**options) for options in VARIED[:7])], [4e-3], (0, 1, 2), size="0.03M"),
    "catch_up": sweep(
        [DENSE[1], *(scape(**rate, **way) for rate in HALF_AND_90 for way in ({}, {"catch_up": "summed"}))],
        [4e-3],
        range(4),
        size="0.03M",
        steps=1500,
    ),
    "start": [
        *sweep(DENSE, [2e-3, 4e-3, 8e-3], size="0.03M", steps=1000),
        *sweep(
            (scape(dense_steps=dense, sparsity_warmup_steps=warm) for dense, warm in WARMUPS),
            [2e-3, 4e-3],
            size="0.03M",
            steps=1000,
        ),
    ],
    "ranks": [
        *sweep([DENSE[1], scape()], [4e-3], size="0.03M", ranks=2),
        *sweep([DENSE[1], scape()], [4e-3], size="0.03M", ranks=8),
        *sweep([DENSE[1], scape()], [4e-3], size="0.03M", ranks=8, batch=4),
    ],
    "long": tuned("0.03M", 8e-3, 4e-3),
    "sizes": [
        *sweep([DENSE[1], *SPARSE[:2]], [2e-3], size="1M", batch=4, steps=10_000),
        *sweep([DENSE[1], *SPARSE[:2]], [2e-3], size="3M", batch=2, steps=10_000),
    ],
    "headline": [
        *tuned("0.2M", 4e-3, 1e-3),
        *sweep(DENSE + SPARSE, [5e-4, 1e-3, 2e-3], size="1M", steps=12_000),
        *sweep(DENSE + SPARSE, [5e-4, 1e-3, 2e-3], size="3M", batch=8, context=128, steps=12_000),
    ],
}
"""Roughly in the order in which they tell something; the last takes days on one core."""


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*.json"))]


def run_of(result: dict[str, Any]) -> Run:
    options = tuple((key, value) for key, value in result["run"]["options"])
    return Run(**{**result["run"], "options": options})
