"""What `bench_quality.py` trains: the settings of a run, the suites, and the results that runs leave behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SIZES = {
    "0.03M": {"n_layer": 1, "n_embd": 32, "n_head": 2, "intermediate_size": 96},
    "0.2M": {"n_layer": 2, "n_embd": 72, "n_head": 2, "intermediate_size": 216},
    "1M": {"n_layer": 4, "n_embd": 128, "n_head": 4, "intermediate_size": 384},
    "3M": {"n_layer": 6, "n_embd": 192, "n_head": 6, "intermediate_size": 576},
    "10M": {"n_layer": 8, "n_embd": 320, "n_head": 5, "intermediate_size": 960},
    "30M": {"n_layer": 10, "n_embd": 512, "n_head": 8, "intermediate_size": 1536},
}
BETAS = (0.9, 0.95)
TORCH_BETAS = (0.9, 0.999)
"""torch's default."""

USUAL_WIRE = {"adamw": "int4", "adams": "bf16"}
"""By the update: today's default, and that of the time when the update of AdamS was measured."""


class Setting(NamedTuple):
    """What methods that are compared have in common."""

    size: str
    ranks: int
    batch: int
    context: int
    steps: int
    task: str
    betas: tuple[float, float]
    precision: str

    @property
    def title(self) -> str:
        """In words."""
        what = f"{self.size} parameters" if self.task == "python" else f"{self.task}, about 30,000 parameters"
        windows = f"{self.batch} x {self.context} bytes" if self.task == "python" else f"{self.batch} images"
        betas = "" if self.betas == BETAS else f", betas {self.betas}"
        precision = "" if self.precision == "fp32" else f", {self.precision}"
        return f"{what}, {self.ranks} ranks of {windows}, {self.steps:,} steps{betas}{precision}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides the result of a run."""

    method: str
    """adamw, adams, scape, or one of peers.METHODS."""
    task: str = "python"
    """python (a GPT of ``size`` predicts the next of ``context`` bytes), digits-conv or digits-gru (images)."""
    size: str = "0.2M"
    ranks: int = 4
    batch: int = 8
    """Windows, or images, per rank and step."""
    context: int = 64
    steps: int = 3000
    lr: float = 2e-3
    betas: tuple[float, float] = BETAS
    precision: str = "fp32"
    """fp32; or bf16-mixed: the model is compiled and computes in bf16, parameters and gradients are fp32."""
    seed: int = 0
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly; a cosine to a tenth follows."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of ScapeConfig, and of ABLATIONS; of other methods, their own arguments."""

    @property
    def name(self) -> str:
        """Also the name of its file."""
        if self.task == "python":
            parts = [self.method, self.size, f"N{self.ranks}x{self.batch}x{self.context}", f"{self.steps}"]
        else:
            parts = [self.method, self.task, f"N{self.ranks}x{self.batch}", f"{self.steps}"]
        parts += [f"lr{self.lr:g}", f"seed{self.seed}"]
        parts += [f"betas-{self.betas[0]:g}-{self.betas[1]:g}"] if self.betas != BETAS else []
        parts += [self.precision] if self.precision != "fp32" else []
        parts += [f"{key}-{value}" for key, value in self.options]
        return "_".join(parts)

    @property
    def label(self) -> str:
        """What tells methods apart in a table: today's defaults go without saying."""
        options = dict(self.options)
        if self.method != "scape":
            name = {"adamw": "dense AdamW", "adams": "dense AdamS"}.get(self.method, self.method)
            return ", ".join(
                [
                    name,
                    *(
                        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
                        for key, value in options.items()
                    ),
                ]
            )
        parts = [f"SCAPE {options.pop('sparsity', 0.99):.1%}".replace(".0%", "%")]
        update = options.pop("update", "adamw")
        if update == "adams":
            parts.append("AdamS's update")
        if options.get("wire_dtype") == USUAL_WIRE[update]:
            options.pop("wire_dtype")
        warmup = options.pop("sparsity_warmup_steps", None)
        if warmup is not None:
            parts.append(f"warm-up {warmup:,}" if warmup else "no warm-up")
        return ", ".join([*parts, *(f"{key}={value}" for key, value in options.items())])

    @property
    def setting(self) -> Setting:
        """What it shares with the runs it is compared with."""
        size, context = (self.size, self.context) if self.task == "python" else ("", 1)
        return Setting(size, self.ranks, self.batch, context, self.steps, self.task, self.betas, self.precision)

    @property
    def tokens(self) -> int:
        """Bytes, or images, of a step, over all ranks."""
        return self.ranks * self.batch * self.setting.context

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))


def scape(sparsity: float = 0.99, **options: Any) -> dict[str, Any]:
    """Arguments of a SCAPE run; what stands in Run's fields goes there, the rest into its options.

    The update is AdamW's, values have 4 bits, and the warm-up of the sparsity is the default, if nothing else is said.
    """
    own = {f.name for f in dataclasses.fields(Run)}
    settings = {key: options.pop(key) for key in list(options) if key in own}
    options = {"update": "adamw", "wire_dtype": USUAL_WIRE["adamw"], **options}
    return {"method": "scape", "options": (("sparsity", sparsity), *sorted(options.items())), **settings}


def paper(sparsity: float = 0.99, **options: Any) -> dict[str, Any]:
    """The same with the update of AdamS, without a warm-up, and with values in bf16, as the paper has it."""
    wire = USUAL_WIRE["adams"]
    return scape(sparsity, **{"update": "adams", "sparsity_warmup_steps": 0, "wire_dtype": wire, **options})


def sweep(
    settings: Iterable[dict[str, Any]], lrs: Iterable[float], seeds: Iterable[int] = (0,), **more: Any
) -> list[Run]:
    """One run for every combination."""
    found = itertools.product(settings, lrs, seeds)
    return [Run(**{**setting, **more, "lr": lr, "seed": seed}) for setting, lr, seed in found]


DENSE = [{"method": "adamw"}, {"method": "adams"}]
SPARSE = [paper(0.9), paper(0.99), paper(0.999)]
VARIED: list[dict[str, Any]] = [
    {"mask_votes": 0},
    {"mask_votes": 1},
    {"mask_votes": 4},
    {"vote_bits": 4},
    {"vote_bits": 2},
    {"second_moment": "reconstructed"},
    {"second_moment": "reconstructed", "mask_votes": 0},
    {"plain_update": True},
    {"mask_delay": 0},
    {"mask_delay": 2},
    {"block_size": 100},
    {"block_size": 1000},
    {"wire_dtype": "fp32"},
    {"wire_dtype": "int4"},
    {"dense_steps": 300},
    {"sparsity_warmup_steps": 600},
    {"clip_norm": "local"},
    {"mask_statistic": "first_moment", "mask_votes": 0},
    {"dense_vectors": True},
    {"second_moment_ema": 0.1},
]
"""What is changed, one at a time, in the default configuration at 99%."""
WIRES: list[dict[str, Any]] = [{}, {"wire_dtype": "bf16"}, {"wire_dtype": "fp32"}]
"""4 bits, the default, and what they are compared with."""
EXACT: list[dict[str, Any]] = [{"exact": "values"}, {"exact": "changes"}, {"exact": 50}, {"exact": 200}]
"""What of 4 bits is sent in fp32 instead: see bench_quality.py."""
TINY: dict[str, Any] = {"size": "0.03M", "ranks": 2, "batch": 2, "context": 32, "steps": 4}
SHORT = [
    *sweep([*DENSE, *SPARSE, scape(0.9), scape(0.99), scape(0.999)], [2e-3], **TINY),
    *sweep([DENSE[0], scape(0.9), scape(sparsity_warmup_steps=0)], [2e-3, 4e-3], betas=TORCH_BETAS, **TINY),
    *(
        run
        for task in ("digits-conv", "digits-gru")
        for run in sweep([DENSE[0], scape(0.9)], [1e-3], (0, 1), task=task, ranks=2, steps=4, betas=TORCH_BETAS)
    ),
    *sweep((paper(**options) for options in VARIED), [2e-3], **TINY),
    *sweep((scape(**options) for options in EXACT), [2e-3], **TINY),
]
HALF_AND_90: list[dict[str, Any]] = [{"sparsity": 0.5, "block_size": 200}, {"sparsity": 0.9}]
WARMUPS = [(0, 0), (0, 250), (0, 500), (0, 1000), (200, 800), (500, 500)]
WITH_WARMUP = paper(sparsity_warmup_steps=1000)


def tuned(size: str, of_adamw: float, of_others: float) -> list[Run]:
    """10,000 steps at the best rates, half and twice of them, on one seed; then at the best on two more."""
    others = [DENSE[1], *SPARSE[:2], WITH_WARMUP]
    runs = []
    for settings, best in ((DENSE[:1], of_adamw), (others, of_others)):
        runs += sweep(settings, [best / 2, best, 2 * best], size=size, steps=10_000)
        runs += sweep(settings, [best], (1, 2), size=size, steps=10_000)
    return runs


def drop_in(
    lr: float,
    others: Iterable[float] = (),
    seeds: Iterable[int] = (0,),
    sparsities: Iterable[float] = (0.9, 0.99),
    **more: Any,
) -> list[Run]:
    """AdamW and SCAPE at one learning rate, seed by seed; on the first seed AdamW at other rates, to know its best."""
    first, *rest = seeds
    methods = [DENSE[0], *map(scape, sparsities)]
    runs = [*sweep(methods, [lr], [first], **more), *sweep(DENSE[:1], others, [first], **more)]
    return runs + [run for seed in rest for run in sweep(methods, [lr], [seed], **more)]


def in_turns(*lists: list[Run]) -> list[Run]:
    """One run of each, then the next of each."""
    return [run for runs in itertools.zip_longest(*lists) for run in runs if run is not None]


BOTH_BETAS = [BETAS, TORCH_BETAS]
LARGE: dict[str, Any] = {"batch": 4, "context": 128, "precision": "bf16-mixed"}
"""Where a step takes seconds."""
EXAMPLE: dict[str, Any] = {"size": "3M", "ranks": 2, "batch": 4, "context": 128, "steps": 1200, "warmup": 0.05}
"""As pretrain_python.py trains."""
DIGITS: dict[str, Any] = {"steps": 1500, "betas": TORCH_BETAS}
DROP_IN: dict[str, list[Run]] = {
    "drop_in_short": in_turns(
        drop_in(16e-3, [8e-3, 32e-3], (0, 1, 2), size="0.03M", steps=1000),
        drop_in(8e-3, [4e-3, 16e-3], range(10), size="0.03M", steps=1000, betas=TORCH_BETAS),
    ),
    "drop_in_digits": in_turns(
        drop_in(16e-3, [8e-3, 32e-3], range(10), task="digits-conv", **DIGITS),
        drop_in(16e-3, [8e-3, 32e-3], range(10), task="digits-gru", **DIGITS),
    ),
    "drop_in_long": [
        *in_turns(
            *(drop_in(8e-3, [4e-3, 16e-3], (0, 1, 2), size="0.03M", steps=10_000, betas=betas) for betas in BOTH_BETAS)
        ),
        *drop_in(8e-3, [], range(3, 6), [0.9], size="0.03M", steps=10_000, betas=TORCH_BETAS),
        *(
            run
            for betas in BOTH_BETAS
            for run in sweep([scape(0.999)], [8e-3], size="0.03M", steps=10_000, betas=betas)
        ),
    ],
    "drop_in_sweep": [
        run
        for lr in (8e-3, 16e-3, 4e-3, 32e-3, 2e-3)
        for run in sweep([DENSE[0], scape(0.9), scape(0.99)], [lr], size="0.03M", betas=TORCH_BETAS)
    ],
    "drop_in_0.2M": [
        *drop_in(4e-3, [2e-3, 8e-3], (0, 1), size="0.2M", steps=10_000),
        *drop_in(4e-3, [2e-3, 8e-3], range(5), size="0.2M", steps=10_000, betas=TORCH_BETAS),
        *sweep([DENSE[0], scape(0.9)], [4e-3], range(5, 10), size="0.2M", steps=10_000, betas=TORCH_BETAS),
    ],
    "drop_in_1M": drop_in(2e-3, [4e-3], sparsities=[0.99], size="1M", batch=4, steps=6000),
    "drop_in_10M_rates": sweep(DENSE[:1], [1e-3, 5e-4, 2.5e-4], size="10M", steps=600, **LARGE),
    "drop_in_10M": drop_in(5e-4, seeds=(0, 1, 2), size="10M", steps=4000, **LARGE),
    "drop_in_30M_rates": sweep(DENSE[:1], [1e-3, 5e-4, 2.5e-4], size="30M", steps=600, **LARGE),
    "drop_in_30M": drop_in(5e-4, seeds=(0, 1), size="30M", steps=4000, **LARGE),
}
"""SCAPE with AdamW's settings, unchanged."""


def in_bf16(run: Run) -> Run:
    """The same run with values in bf16, to be paired with it."""
    options = {**dict(run.options), "wire_dtype": "bf16"}
    return dataclasses.replace(run, options=tuple(options.items()))


SUITES: dict[str, list[Run]] = {
    **DROP_IN,
    "drop_in": [run for runs in DROP_IN.values() for run in runs],
    "ablations": [
        *sweep(DENSE, [2e-3, 4e-3, 8e-3], size="0.03M"),
        *sweep(SPARSE, [2e-3, 4e-3, 8e-3], size="0.03M"),
        *sweep((paper(**options) for options in VARIED), [4e-3], size="0.03M"),
    ],
    "seeds": sweep([DENSE[1], paper(), *(paper(**options) for options in VARIED[:7])], [4e-3], (0, 1, 2), size="0.03M"),
    "waits": sweep(
        [DENSE[1], *(paper(**rate) for rate in HALF_AND_90)],
        [4e-3],
        range(4),
        size="0.03M",
        steps=1500,
    ),
    "start": [
        *sweep(DENSE, [2e-3, 4e-3, 8e-3], size="0.03M", steps=1000),
        *sweep(
            (paper(dense_steps=dense, sparsity_warmup_steps=warm) for dense, warm in WARMUPS),
            [2e-3, 4e-3],
            size="0.03M",
            steps=1000,
        ),
    ],
    "wires": [
        *(in_bf16(run) for runs in DROP_IN.values() for run in runs if run.method == "scape"),
        *(
            each
            for run in sweep([scape(0.9)], [8e-3], range(6, 9), size="0.03M", steps=10_000, betas=TORCH_BETAS)
            for each in (run, in_bf16(run))
        ),
        *sweep(
            [
                scape(sparsity, wire_dtype=wire, sparsity_warmup_steps=1000)
                for sparsity in (0.99, 0.9)
                for wire in ("int8", "int4", "fp32", "bf16")
            ],
            [16e-3],
            size="0.03M",
            steps=1000,
        ),
    ],
    "wires_3M": [
        *sweep([scape(), scape(wire_dtype="bf16")], [1e-3], range(20), **EXAMPLE),
        *sweep(
            [DENSE[0], scape(wire_dtype="int8"), scape(wire_dtype="fp32"), *(scape(**options) for options in EXACT)],
            [1e-3],
            range(4),
            **EXAMPLE,
        ),
        *sweep([scape(0.9, **options) for options in WIRES], [1e-3], range(20), **EXAMPLE),
    ],
    "ranks": [
        *sweep([DENSE[1], paper()], [4e-3], size="0.03M", ranks=2),
        *sweep([DENSE[1], paper()], [4e-3], size="0.03M", ranks=8),
        *sweep([DENSE[1], paper()], [4e-3], size="0.03M", ranks=8, batch=4),
    ],
    "many_ranks": [
        *sweep(DENSE[:1], [8e-3], (0, 1), size="0.03M", betas=TORCH_BETAS),
        *(
            run
            for ranks in (4, 32, 16, 8, 2)
            for run in sweep(
                [scape(0.9), scape(0.99)],
                [8e-3],
                (0, 1),
                size="0.03M",
                betas=TORCH_BETAS,
                ranks=ranks,
                batch=32 // ranks,
            )
        ),
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
    betas = tuple(result["run"].get("betas", BETAS))
    return Run(**{**result["run"], "options": options, "betas": betas})
