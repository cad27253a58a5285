"""What `quality.py` trains: the settings of a run, and the suites."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

SIZES = {
    "0.03M": {"n_layer": 1, "n_embd": 32, "n_head": 2, "intermediate_size": 96},
    "0.2M": {"n_layer": 2, "n_embd": 72, "n_head": 2, "intermediate_size": 216},
    "1M": {"n_layer": 4, "n_embd": 128, "n_head": 4, "intermediate_size": 384},
    "3M": {"n_layer": 6, "n_embd": 192, "n_head": 6, "intermediate_size": 576},
    "10M": {"n_layer": 8, "n_embd": 320, "n_head": 5, "intermediate_size": 960},
    "30M": {"n_layer": 10, "n_embd": 512, "n_head": 8, "intermediate_size": 1536},
    "85M": {"n_layer": 12, "n_embd": 768, "n_head": 12, "intermediate_size": 2048},
}
"""85M has the shape of GPT-2 small, whose other 39M parameters are an embedding of words."""
BETAS = (0.9, 0.95)
DENSE = {"adamw": "AdamW", "adams": "AdamS", "muon": "Muon beside AdamW"}
TORCH_BETAS = (0.9, 0.999)
"""torch's default."""


class Setting(NamedTuple):
    """What methods that are compared have in common."""

    task: str
    size: str
    steps: int
    betas: tuple[float, float]
    precision: str
    windows: int
    """Of a step, over all ranks."""
    context: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides the result of a run."""

    method: str
    """adamw, adams, muon, scape or sparseloco; one-page is SCAPE as scape_simple.py has it, with a compiled model."""
    task: str = "python"
    """python (a GPT of ``size`` predicts the next of ``context`` bytes), domains (each rank reads another of four kinds
    of text) or domains-even (the same, dealt out evenly), experts (domains, in each block one MLP for each kind),
    digits-conv or digits-gru (images)."""
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
    """Of ScapeConfig, or of SparseLoCo, whose optimizer is ``inner``, AdamW if nothing is said."""

    @property
    def of_text(self) -> bool:
        """Whether a GPT reads bytes."""
        return not self.task.startswith("digits")

    @property
    def name(self) -> str:
        """Also the name of its row."""
        windows = (
            f"{self.size}_N{self.ranks}x{self.batch}x{self.context}" if self.of_text else f"N{self.ranks}x{self.batch}"
        )
        parts = [self.method, *([self.task] if self.task != "python" else []), windows, f"{self.steps}"]
        parts += [f"lr{self.lr:g}", f"seed{self.seed}"]
        parts += [f"betas-{self.betas[0]:g}-{self.betas[1]:g}"] if self.betas != BETAS else []
        parts += [self.precision] if self.precision != "fp32" else []
        parts += [f"{key}-{value}" for key, value in self.options]
        return "_".join(parts)

    @property
    def drawn(self) -> bool:
        """Whether a picture shows its loss over the steps."""
        return self.size in ("10M", "30M", "85M")

    @property
    def label(self) -> str:
        """What tells methods apart in a table: the defaults go without saying."""
        options = dict(self.options)
        if self.method in DENSE:
            return DENSE[self.method]
        if self.method == "one-page":
            return f"SCAPE {options['sparsity']:.1%}, on one page".replace(".0%", "%")
        if self.method == "sparseloco":
            inner = DENSE[options.pop("inner", "adamw")]
            return ", ".join([f"{inner}, SparseLoCo every {options.pop('sync_every')} steps", *shown(options)])
        parts = [f"SCAPE {options.pop('sparsity'):.1%}".replace(".0%", "%")]
        if options.pop("update") == "adams":
            parts.append("AdamS's update")
        warmup = options.pop("sparsity_warmup_steps", None)
        if warmup is not None:
            parts.append(f"warm-up {warmup:,}" if warmup else "no warm-up")
        if options["wire_dtype"] == "int4":
            options.pop("wire_dtype")
        return ", ".join([*parts, *shown(options)])

    @property
    def setting(self) -> Setting:
        """What it shares with the runs it is compared with: one batch may be dealt out to any number of ranks."""
        size, context = (self.size, self.context) if self.of_text else ("", 1)
        windows = self.ranks * self.batch
        return Setting(self.task, size, self.steps, self.betas, self.precision, windows, context)

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))


def shown(options: dict[str, Any]) -> list[str]:
    """Options for a label."""
    return [f"{key}={value}" for key, value in options.items()]


def run_of(row: dict[str, Any]) -> Run:
    """The run of a row of results."""
    given = row["settings"]
    options = tuple((key, value) for key, value in given["options"])
    return Run(**{**given, "seed": row["seed"], "betas": tuple(given["betas"]), "options": options})


# --------------------------------------------------------------------------------------------------- making suites


def scape(sparsity: float = 0.99, **options: Any) -> dict[str, Any]:
    """Arguments of a SCAPE run: AdamW's update, values in 4 bits, the default warm-up, if nothing else is said."""
    options = {"update": "adamw", "wire_dtype": "int4", **options}
    return {"method": "scape", "options": (("sparsity", sparsity), *sorted(options.items()))}


def paper(sparsity: float = 0.99, **options: Any) -> dict[str, Any]:
    """The same with the update of AdamS, and without a warm-up."""
    return scape(sparsity, **{"update": "adams", "sparsity_warmup_steps": 0, **options})


def one_page(sparsity: float) -> dict[str, Any]:
    """Arguments of a run of the one-page version, with its defaults: a tenth of the package's time a step."""
    return {"method": "one-page", "options": (("sparsity", sparsity),)}


def sparseloco(sync_every: int, **options: Any) -> dict[str, Any]:
    """Arguments of a run of SparseLoCo."""
    return {"method": "sparseloco", "options": (("sync_every", sync_every), *sorted(options.items()))}


def sweep(
    settings: Iterable[dict[str, Any]], lrs: Iterable[float], seeds: Iterable[int] = (0,), **more: Any
) -> list[Run]:
    """One run for every combination."""
    found = itertools.product(settings, lrs, seeds)
    return [Run(**{**setting, **more, "lr": lr, "seed": seed}) for setting, lr, seed in found]


def drop_in(lr: float, others: Iterable[float] = (), seeds: Iterable[int] = (0,), **more: Any) -> list[Run]:
    """AdamW and SCAPE at one learning rate, seed by seed; on the first seed AdamW at other rates, to know its best."""
    first, *rest = seeds
    methods = [ADAMW, scape(0.9), scape(0.99)]
    runs = [*sweep(methods, [lr], [first], **more), *sweep([ADAMW], others, [first], **more)]
    return runs + [run for seed in rest for run in sweep(methods, [lr], [seed], **more)]


def on_one_page(
    lr: float, seeds: Iterable[int], settings: list[dict[str, Any]], sparsities: Iterable[float] = (0.9, 0.99, 0.98)
) -> list[Run]:
    """AdamW and the one-page version in all settings, seed by seed."""
    methods = [ADAMW, *map(one_page, sparsities)]
    return [run for seed in seeds for each in settings for run in sweep(methods, [lr], [seed], **each)]


# -------------------------------------------------------------------------------------------------------- the suites

ADAMW: dict[str, Any] = {"method": "adamw"}
ADAMS: dict[str, Any] = {"method": "adams"}
MUON: dict[str, Any] = {"method": "muon"}
TINY: dict[str, Any] = {"size": "0.03M", "ranks": 2, "batch": 2, "context": 32, "steps": 4}
DIGITS: dict[str, Any] = {"steps": 1500, "betas": TORCH_BETAS}
LARGE: dict[str, Any] = {"batch": 4, "context": 128, "precision": "bf16-mixed"}
"""Where a step takes seconds."""
EXAMPLE: dict[str, Any] = {"size": "3M", "ranks": 2, "batch": 4, "context": 128, "steps": 1200, "warmup": 0.05}
"""As pretrain_python.py trains."""
LONG: dict[str, Any] = {"size": "0.03M", "steps": 10_000}
AT_02M: dict[str, Any] = {"size": "0.2M", "steps": 10_000, "betas": TORCH_BETAS}
SHORT = [
    *sweep([ADAMW, ADAMS, paper(0.9), paper(0.99), paper(0.999)], [2e-3], **TINY),
    *sweep([scape(0.9), scape(0.99), scape(0.999)], [2e-3], **TINY),
    *sweep([ADAMW, scape(0.9), scape(sparsity_warmup_steps=0)], [2e-3, 4e-3], betas=TORCH_BETAS, **TINY),
    *(
        run
        for task in ("digits-conv", "digits-gru")
        for run in sweep([ADAMW, scape(0.9)], [1e-3], (0, 1), task=task, ranks=2, steps=4, betas=TORCH_BETAS)
    ),
    *sweep([paper(wire_dtype="fp32"), paper(clip_norm="local")], [2e-3], **TINY),
    *sweep([paper(sparsity_warmup_steps=600), sparseloco(2)], [2e-3], **TINY),
    *sweep([MUON, sparseloco(2, inner="muon")], [2e-3], **TINY),
]
"""Every method, a few steps each: whether all works, and whether a change moves a loss."""
FOUR_DOMAINS = [{"task": task, "steps": 10_000} for task in ("domains", "domains-even")]
OF_MANY_RANKS = [
    {"size": "0.03M", "betas": TORCH_BETAS, "ranks": ranks, "batch": batch}
    for ranks, batch in ((2, 16), (4, 8), (8, 4), (16, 2), (32, 1), (16, 4), (32, 4))
]
SUITES: dict[str, list[Run]] = {
    "10000_steps": [
        *on_one_page(8e-3, range(5), [{**LONG, "betas": betas} for betas in (TORCH_BETAS, BETAS)], (0.9, 0.99)),
        *(run for betas in (TORCH_BETAS, BETAS) for run in sweep([ADAMW], [4e-3, 16e-3], betas=betas, **LONG)),
    ],
    "0.2M": [
        *on_one_page(4e-3, range(3), [AT_02M], (0.9, 0.99)),
        *sweep([ADAMW], [2e-3, 8e-3], **AT_02M),
        *sweep([MUON, sparseloco(15, inner="muon"), sparseloco(15)], [4e-3], **AT_02M),
    ],
    "3M": drop_in(1e-3, seeds=range(3), **EXAMPLE),
    "10M": drop_in(5e-4, size="10M", steps=4000, **LARGE),
    "largest": [
        *drop_in(5e-4, seeds=(0, 1), size="30M", steps=4000, **LARGE),
        *drop_in(5e-4, size="85M", steps=4000, **LARGE),
    ],
    "many_ranks": on_one_page(8e-3, range(2), OF_MANY_RANKS, (0.99, 0.9, 0.98, 0.95, 0.995)),
    "domains": [
        *on_one_page(8e-3, range(5), [{**each, "size": "0.03M", "betas": TORCH_BETAS} for each in FOUR_DOMAINS]),
        *on_one_page(8e-3, range(5), [{**each, "size": "0.03M"} for each in FOUR_DOMAINS]),
        *on_one_page(4e-3, range(3), [{**each, "size": "0.2M", "betas": TORCH_BETAS} for each in FOUR_DOMAINS]),
    ],
    "domains_1M": on_one_page(2e-3, (0,), [{**each, "size": "1M", "batch": 4} for each in FOUR_DOMAINS], (0.9, 0.99)),
    "experts": on_one_page(8e-3, range(3), [{"task": "experts", "betas": TORCH_BETAS, **LONG}], (0.9, 0.99)),
    "digits": [
        *drop_in(16e-3, [8e-3, 32e-3], range(10), task="digits-conv", **DIGITS),
        *drop_in(16e-3, [8e-3, 32e-3], range(10), task="digits-gru", **DIGITS),
    ],
}
"""By name. A suite of small models takes hours of one core, 10M a night in the background; the largest want a GPU."""
