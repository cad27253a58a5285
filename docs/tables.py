"""Writes the tables of README.md and docs/ that are made of measured data, from the data in examples/results.

    python docs/tables.py            # after new results: rewrites every block between the two markers
    python docs/tables.py --check    # changes nothing; ends with 1 if a block is not what the data say

A block stands between ``<!-- table: NAME -->`` and ``<!-- /table -->``; NAME is one of TABLES below.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from lightning_scape.planning.cost_model import Job, Machine, Weight, predict
from lightning_scape.planning.cost_model import Link as Wire
from lightning_scape.planning.run import Run, predict_run

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))
import python_questions as asked  # noqa: E402
from bench_end_to_end import MARGIN, seconds_to  # noqa: E402
from quality_runs import run_of  # noqa: E402

RESULTS = "examples/results"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
DENSE, SPARSE = "dense AdamW", ("SCAPE 90%", "SCAPE 99%")
BETAS = {"(0.9, 0.95)": [0.9, 0.95], "(0.9, 0.999)": [0.9, 0.999]}
Link = Callable[[str], str]


@cache
def load(name: str) -> Any:
    return json.loads((ROOT / RESULTS / name).read_text())


def table(head: Iterable[str], *rows: Iterable[str]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:]])


def source(link: Link, data: str, command: str) -> str:
    """The line under a table that names the data file and the command that makes it."""
    return f"\nData: [{data}]({link(f'{RESULTS}/{data}')}); command: `{command}`."


# ----------------------------------------------------------------------------------------------------------- training


TODAY = "quality/today/quality.json"
"""Made with today's second moment. Runs with that of 0.3.0, and with the update of AdamS, lie in quality/."""


def trained(link: Link, suites: str) -> str:
    """The source of today's runs: the script's own folder holds earlier ones, some of the same names."""
    return source(link, TODAY, f"python examples/bench_quality.py --suite {suites} --out {RESULTS}/quality/today")


def quality(
    label: str,
    betas: list[float],
    steps: int,
    task: str = "python",
    size: str = "0.03M",
    windows: tuple[int, int] = (8, 64),
    precision: str = "fp32",
    ranks: int = 4,
) -> dict[str, Any] | None:
    """One method of the drop-in suite: AdamW at its best learning rate, SCAPE at that very rate."""
    size, batch = (size, [ranks, *windows]) if task == "python" else ("", [4, 8, 1])
    wanted = [size, *batch, steps, task, betas]
    found = [r for r in load(TODAY) if [*r["setting"], "fp32"][:8] == [*wanted, precision]]  # older ones do not say it
    return max((row for row in found if row["label"] == label), key=lambda row: len(row["seeds"]), default=None)


def value(row: dict[str, Any], key: str = "losses", scale: float = 1, digits: int = 4, unit: str = "") -> str:
    numbers = [scale * number for number in row[key]]
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.{digits}f}{unit}{spread}"


def paired(row: dict[str, Any], base: dict[str, Any], key: str = "losses") -> tuple[list[float], list[float]]:
    """The losses of both, or another figure, on the seeds of both."""
    shared = [seed for seed in row["seeds"] if seed in base["seeds"]]
    mine, theirs = ([r[key][r["seeds"].index(seed)] for seed in shared] for r in (row, base))
    return mine, theirs


def gap(row: dict[str, Any], base: dict[str, Any]) -> str:
    """How far the loss is above the base's, on the seeds of both, with the standard error if there are several."""
    mine, theirs = paired(row, base)
    text = f"**{statistics.mean(mine) / statistics.mean(theirs) - 1:+.1%}**"
    if len(mine) > 1:
        error = math.hypot(statistics.stdev(mine), statistics.stdev(theirs)) / math.sqrt(len(mine))
        text += f" ± {100 * error / statistics.mean(theirs):.1f}"
    return text


def averaged(gaps: list[float], unit: str = "%") -> str:
    """The mean of differences, times 100, with its standard error."""
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"**{100 * statistics.mean(gaps):+.1f}{unit}** ± {100 * error:.1f}"


def drop_in(steps: int, link: Link) -> str:
    rows = []
    for label in (DENSE, *SPARSE):
        row = [label]
        for betas in BETAS.values():
            found, base = quality(label, betas, steps), quality(DENSE, betas, steps)
            assert found is not None
            assert base is not None
            row += [f"{found['lr']:g}", str(len(found["seeds"]))]
            row.append(value(found) + ("" if label == DENSE else f" ({gap(found, base)})"))
        rows.append(row)
    head = [f"{steps:,} steps"]
    for name in BETAS:
        head += ["lr", "seeds", f"betas {name}"]
    text = table(head, *rows)
    return text + "\n" + trained(link, "drop_in_short drop_in_long")


LARGE = ("30M", "10M")


def largest(link: Link) -> str:
    """The largest models: AdamW at its best rate, SCAPE at that very rate."""
    rows = []
    for size in LARGE:
        base = large(size, DENSE)
        for label in (DENSE, *SPARSE):
            row = large(size, label)
            sent, against = f"{row['bytes']:.2g}", ""
            if label != DENSE:
                sent, against = f"{sent} (**{base['bytes'] / row['bytes']:.0f}x** less)", gap(row, base)
            seeds = str(len(row["seeds"]))
            rows.append([size, label, seeds, value(row), against, value(row, "accuracies", 100, 1, "%"), sent])
    head = ["parameters", "4,000 steps", "seeds", "validation loss", "against AdamW", "next byte right"]
    suites = " ".join(f"drop_in_{size}_rates drop_in_{size}" for size in LARGE)
    text = table([*head, "bytes sent by a rank, per step and parameter"], *rows)
    return text + "\n" + trained(link, suites)


def large(size: str, label: str) -> dict[str, Any]:
    """One method of those suites."""
    betas = BETAS["(0.9, 0.95)"]
    row = quality(label, betas, 4000, size=size, windows=(4, 128), precision="bf16-mixed")
    assert row is not None
    return row


def answers(label: str, what: str = "answers") -> dict[str, list[int]]:
    """Right (1) or wrong (0), for each kind of question and, of several kinds, for all."""
    name = {DENSE: "adamw", "SCAPE 90%": "scape-90", "SCAPE 99%": "scape-99"}[label]
    found = load(f"quality/today/{what}/{name}.json")["answers"]
    return asked.with_all(found) if len(found) > 1 else found


def questions(what: str, title: str, command: str, link: Link) -> str:
    """Questions to three models, each paired with AdamW's answers."""
    base, rows = answers(DENSE, what), []
    for label in (DENSE, *SPARSE):
        given = answers(label, what)
        shares = [f"{share:.1%} ± {100 * error:.1f}" for share, error in map(asked.accuracy, given.values())]
        against = asked.paired([*base.values()][-1], [*given.values()][-1])
        compared = [f"**{100 * against.difference:+.1f}** ± {100 * against.error:.1f}", f"{against.p:.2f}"]
        rows.append([label, *shares, *(["", ""] if label == DENSE else compared)])
    head = [title, *base, "against AdamW, in points", "McNemar's p"]
    return table(head, *rows) + "\n" + source(link, f"quality/today/{what}", command)


ASK = "python examples/evaluate_litgpt.py FOLDER --questions out/questions --answers out/answers.json"
LABELS = "python examples/finetune_labels.py FOLDER --steps 150 --rates 3e-4 --answers out/labels.json"


def many_ranks(link: Link) -> str:
    """One global batch of 32 windows, dealt out to 2 to 32 ranks: AdamW is the same for all."""
    betas = BETAS["(0.9, 0.999)"]
    base = quality(DENSE, betas, 3000)
    assert base is not None
    rows = [["any", DENSE, str(len(base["seeds"])), value(base), ""]]
    for ranks, label in itertools.product((2, 4, 8, 16, 32), SPARSE):
        row = quality(label, betas, 3000, windows=(32 // ranks, 64), ranks=ranks)
        assert row is not None
        rows.append([str(ranks), label, str(len(row["seeds"])), value(row), gap(row, base)])
    head = ["ranks", "0.03M parameters, 3,000 steps", "seeds", "validation loss", "against AdamW"]
    return table(head, *rows) + "\n" + trained(link, "many_ranks")


LONG = (("0.03M", 10_000, (8, 64)), ("0.2M", 10_000, (8, 64)), ("1M", 6000, (4, 64)))
"""Sizes, the steps of their longest runs, and a rank's windows."""


def wires(link: Link) -> str:
    """Values in 4 bits beside bf16, paired by seed, with today's second moment."""
    rows = []
    short = ("0.03M", 1000, (8, 64))
    for (size, steps, windows), (name, betas), label in itertools.product((short, *LONG), BETAS.items(), SPARSE):
        named = (label, f"{label}, wire_dtype=bf16")
        packed, plain = (quality(each, betas, steps, size=size, windows=windows) for each in named)
        if packed is not None and plain is not None:
            rows.append([size, f"{steps:,}", name, label, *wire_cells(*paired(packed, plain))])
    found = example_losses()
    for label in SPARSE:
        mine, theirs = found[label + BOTH_CHANGES], found[f"{label}, wire_dtype=bf16"]
        seeds = sorted(mine.keys() & theirs.keys())
        cells = wire_cells([mine[seed] for seed in seeds], [theirs[seed] for seed in seeds])
        rows.append(["3M, two ranks", "1,200", "(0.9, 0.95)", label, *cells])
    head = ["parameters", "steps", "betas", "", "seeds", '`"bf16"`', '`"int4"`', "difference, by seed"]
    return table(head, *rows) + "\n" + trained(link, "drop_in_short drop_in_long drop_in_0.2M drop_in_1M wires")


def wire_cells(packed: list[float], plain: list[float]) -> list[str]:
    """Seeds, the mean of either, and the mean difference with its standard error."""
    gaps = [loss / other - 1 for loss, other in zip(packed, plain, strict=True)]
    difference = averaged(gaps) if len(gaps) > 1 else f"{gaps[0]:+.1%}"
    return [str(len(gaps)), value({"losses": plain}), value({"losses": packed}), difference]


BOTH_CHANGES = ", own values in bf16, changes in 8 bits at first"


def example_losses() -> dict[str, dict[int, float]]:
    """Final losses of the first command's model over simulated ranks, by label and seed."""
    losses: dict[str, dict[int, float]] = {}
    folders = (("runs", ""), ("own_bf16", BOTH_CHANGES.rpartition(",")[0]), ("changes_8", BOTH_CHANGES))
    for folder, now in folders:
        for path in sorted((ROOT / RESULTS / "quality/example" / folder).glob("*.json")):
            result = load(f"quality/example/{folder}/{path.name}")
            losses.setdefault(run_of(result).label + now, {})[result["run"]["seed"]] = result["loss"]
    return losses


def wires_digits(link: Link) -> str:
    """The same of the digits, by the share that is named right."""
    rows = []
    for (task, network), label in itertools.product(DIGITS.items(), SPARSE):
        named = (label, f"{label}, wire_dtype=bf16")
        packed, plain = (quality(each, [0.9, 0.999], 1500, task) for each in named)
        assert packed is not None
        assert plain is not None
        mine, theirs = paired(packed, plain, "accuracies")
        gaps = [share - other for share, other in zip(mine, theirs, strict=True)]
        shares = (value({"accuracies": each}, "accuracies", 100, 1, "%") for each in (theirs, mine))
        rows.append([network, label, str(len(gaps)), *shares, averaged(gaps, unit="")])
    head = ["digits named right", "", "seeds", '`"bf16"`', '`"int4"`', "difference in points, by seed"]
    return table(head, *rows) + "\n" + trained(link, "drop_in_digits wires")


def sizes(link: Link) -> str:
    """Larger models, each beside AdamW at the same rate."""
    rows = []
    for size, steps, windows in LONG:
        for name, betas in BETAS.items():
            found = [quality(label, betas, steps, size=size, windows=windows) for label in (DENSE, *SPARSE)]
            base, *sparse = found
            if base is not None and any(sparse):
                cells = ["-" if r is None else f"{value(r)} ({gap(r, base)})" for r in sparse]
                seeds = ", ".join("-" if r is None else str(len(r["seeds"])) for r in found)
                rows.append([size, f"{steps:,}", name, f"{base['lr']:g}", seeds, value(base), *cells])
    head = ["parameters", "steps", "betas", "lr", "seeds", DENSE, *SPARSE]
    return table(head, *rows) + "\n" + trained(link, "drop_in_long drop_in_0.2M drop_in_1M")


def rates(link: Link) -> str:
    """Seed 0 after 3,000 steps, torch's betas, over the learning rate."""
    losses: dict[tuple[str, float], float] = {}
    for path in (ROOT / RESULTS / "quality/today/runs").glob("*_0.03M_N4x8x64_3000_*_seed0_betas-0.9-0.999*.json"):
        result = json.loads(path.read_text())
        losses[run_of(result).label, result["run"]["lr"]] = result["loss"]
    rows = []
    for lr in sorted({lr for _, lr in losses}):
        base, *here = (losses[label, lr] for label in (DENSE, *SPARSE))
        rows.append([f"{lr:g}", f"{base:.4f}", *(f"{loss:.4f} ({loss / base - 1:+.1%})" for loss in here)])
    return table(["learning rate", DENSE, *SPARSE], *rows) + "\n" + trained(link, "drop_in_sweep")


DIGITS = {"digits-conv": "convolutional", "digits-gru": "recurrent"}


def digits(link: Link) -> str:
    rows = []
    for label in (DENSE, *SPARSE):
        found = [quality(label, [0.9, 0.999], 1500, task) for task in DIGITS]
        rows.append([label, *(value(row, "accuracies", 100, 2, "%") for row in found if row is not None)])
    return table(["share of digits named right", *DIGITS.values()], *rows) + "\n" + trained(link, "drop_in_digits")


# -------------------------------------------------------------------------------------------------------------- speed


def cell(name: str, model: str, link: str) -> dict[str, Any]:
    cells = load(name)["cells"]
    (found,) = (c for c in cells if (c["model"], c["link"]) == (model, link))
    return dict(found["methods"])


def first(link: Link) -> str:
    """The README's rows."""
    betas = BETAS["(0.9, 0.999)"]
    found = [quality(label, betas, 10_000) for label in (DENSE, *SPARSE)]
    small_ones = [row for row in found if row is not None]
    large_ones = {size: [large(size, label) for label in (DENSE, *SPARSE)] for size in LARGE}
    right = [f"{asked.accuracy(answers(label)['all'])[0]:.1%}" for label in (DENSE, *SPARSE)]
    name = "two_hosts/adamw/two_hosts.json"
    rows = [
        *(losses(f"{size} parameters, 4,000 steps", ones) for size, ones in large_ones.items()),
        ["questions on Python answered right by the 10M models of one seed (chance: 25%)", *right],
        losses("0.03M parameters, 10,000 steps", small_ones),
    ]
    methods = cell("two_hosts/aims/two_hosts.json", "pythia-14m", "1gbit")
    full = cell(name, "pythia-14m", "1gbit")["ddp"]["sent"] / 1e6
    sent = [methods[f"{method}-int4"]["sent"] / 1e6 for method in ("scape-0.9", "scape-0.99")]
    fewer = [f"{size:.2f} MB (**{full / size:.0f}x** less)" for size in sent]
    rows.append(["sent per rank and step, after the warm-up, 14M parameters", f"{full:.1f} MB", *fewer])
    rows.append(whole_run_row(load(name)["models"]["pythia-14m"]["weights"]))
    for rate, runs in load(END_TO_END)["links"].items():
        time, loss = ({method: row[key] for method, row in runs["methods"].items()} for key in ("seconds", "loss"))
        faster = [
            f"{time[m]:,.0f} s (**{time['ddp'] / time[m]:.1f}x**; loss {loss[m] / loss['ddp'] - 1:+.1%})"
            for m in ("scape-0.9", "scape-0.99")
        ]
        label = f"a whole run of 3M parameters and 1,200 steps, {LINKS[rate]} (compute only: {time['compute']:.0f} s)"
        rows.append([label, f"{time['ddp']:,.0f} s", *faster])
    seeds = ", ".join(
        f"{' to '.join(dict.fromkeys(str(pick(len(row['seeds']) for row in ones)) for pick in (min, max)))} ({size})"
        for size, ones in (*large_ones.items(), ("0.03M", small_ones))
    )
    return "\n".join(
        [
            table(["", "AdamW under DDP", *SPARSE], *rows),
            f"\nLoss: nats per byte, 4 ranks; seeds: {seeds};",
            f"AdamW's best rate, unchanged for SCAPE; [all runs]({link('docs/quality.md')}). The rest is between two",
            f"CPU hosts with a rate-limited link; [how it was measured]({link('docs/performance.md')}).",
        ]
    )


def losses(what: str, rows: list[dict[str, Any]]) -> list[str]:
    """Means over seeds, AdamW's first."""
    dense, *means = [f"{statistics.mean(row['losses']):.4f}" for row in rows]
    above = [gap(row, rows[0]).split(" ±")[0] for row in rows[1:]]
    return [f"validation loss, {what}", dense, *(f"{mean} ({over})" for mean, over in zip(means, above, strict=True))]


def whole_run_row(weights: list[list[Any]]) -> list[str]:
    """What a rank of two sends in a run with the defaults: computed, exactly as the package counts it."""
    job = Job(weights=tuple(Weight(*weight) for weight in weights), ranks=2, step_compute=1.0)
    fast, free = Wire(bandwidth=1e12), Machine.of_memory(1e12)
    late = [p for p in predict(job, fast, free, (0.9, 0.99)) if p.method in ("DDP", "SCAPE 0.9", "SCAPE 0.99")]
    dense, *sparse = (predict_run(p, job, fast, Run(steps=10_000)).bytes_sent for p in late)
    fewer = [f"{size / 1e9:.1f} GB (**{dense / size:.0f}x** less)" for size in sparse]
    return ["the same in 10,000 steps, warm-up included (computed)", f"{dense / 1e9:.0f} GB", *fewer]


METHODS = {"compute": "compute only", "ddp": "DDP fp32", "ddp-bf16": "DDP bf16 hook", "powersgd": "DDP PowerSGD"}
METHODS |= {"fsdp": "FSDP", "scape-0": "dense AdamS", "scape-0.9": "SCAPE 0.9", "scape-0.99": "SCAPE 0.99"}
METHODS |= {"hsdp-shm": "HSDP, shared memory", "nodes-0.99-shm": "SCAPE 0.99, `local_group_size`, shared memory"}
METHODS |= {"scape-0.9-int4": "SCAPE 0.9, int4", "scape-0.99-int4": "SCAPE 0.99, int4"}
METHODS |= {"powersgd-1": "DDP PowerSGD, rank 1", "powersgd-4": "DDP PowerSGD, rank 4"}
METHODS |= {f"sparseloco-{steps}": f"SparseLoCo, every {steps} steps" for steps in (5, 15)}
METHODS |= {"hsdp": "HSDP", "nodes-0.99": "SCAPE 0.99, `local_group_size`", "sparseloco-30": "SparseLoCo"}
SMALL = "0.03M parameters, 4 ranks of 8 x 64 bytes, 3,000 steps"
LARGER, LONGER = (f"0.2M parameters, 4 ranks of 8 x 64 bytes, {steps} steps" for steps in ("3,000", "10,000"))
LINKS = {"10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s", "10mbit": "10 Mbit/s"}


def two_hosts(folder: str, options: str, link: Link, who: str = "rank") -> str:
    """Of one run, all its models and links; what was sent, at the second link (of one, the first)."""
    name = f"{folder}/two_hosts.json"
    cells = load(name)["cells"]
    rows = []
    for found in cells:
        milliseconds = [f"{1e3 * method['seconds']:,.0f}" for method in found["methods"].values()]
        rows.append([found["model"], LINKS[found["link"]], *milliseconds])
    methods = cells[min(1, len(cells) - 1)]["methods"]
    rows.append(["pythia-14m", f"sent per {who} and step", *(f"{m['sent'] / 1e6:.2f} MB" for m in methods.values())])
    text = table(["model", "link", *(METHODS[method] for method in methods)], *rows)
    return text + "\n" + source(link, name, f"sudo python examples/bench_two_hosts.py{options}")


END_TO_END = "end_to_end/end_to_end.json"
"""The run of examples/pretrain_python.py between two hosts, whole."""
AGAIN = "end_to_end/today/end_to_end.json"
"""SCAPE again, with today's wire, on another machine; runs that wait are stopped."""
SLOWEST = "end_to_end/slow/end_to_end.json"
"""What ends at 10 Mbit/s in reasonable time."""
WHOLE = {**METHODS, "sparseloco-30": "SparseLoCo, every 30 steps"}


def above(row: dict[str, Any], dense: dict[str, Any]) -> str:
    """A run's final loss, and how far it is above AdamW's."""
    return f"{row['loss']:.4f} ({row['loss'] / dense['loss'] - 1:+.1%})"


def end_to_end(link: Link, name: str = END_TO_END) -> str:
    """All runs: what they take and send in all, and when they come to AdamW's final loss plus 2%.

    A link without a run of DDP has AdamW's loss from another: a link changes no loss.
    """
    rows, links = [], load(name)["links"]
    for rate, found in links.items():
        methods = found["methods"]
        beside, compute = methods.get("ddp"), methods.get("compute")
        dense = beside or load(END_TO_END)["links"]["100mbit"]["methods"]["ddp"]
        for method, row in methods.items():
            alone = method == "compute"
            reached = None if alone else seconds_to(MARGIN * dense["loss"], row["points"])
            sooner = "never" if reached is None else f"{reached:,.0f} s"
            if beside and reached is not None:
                sooner += f" ({beside['reached'] / reached:.1f}x)"
            taken = f"{row['seconds']:,.0f} s"
            if compute:
                taken += f" ({row['seconds'] / compute['seconds']:.2f}x)"
            loss = ["-", "-"] if alone else [above(row, dense), sooner]
            rows.append([LINKS[rate], WHOLE[method], *loss, taken, f"{row['sent'] / 1e6:,.0f} MB"])
    head = ["link", "method", "final loss (above AdamW)", "AdamW's final loss + 2% after (DDP's time over it)"]
    text = table([*head, "the whole run (over compute only)", "sent by a host"], *rows)
    command = f"sudo python examples/bench_end_to_end.py --links {' '.join(links)}"
    if name != END_TO_END:  # else all that the script runs by itself
        command += f" --methods {' '.join(next(iter(links.values()))['methods'])}"
    return text + "\n" + source(link, name, command)


SEEDS = {0: (END_TO_END, "1gbit"), **{n: (f"end_to_end/seed{n}/end_to_end.json", "10gbit") for n in (1, 2)}}
"""Runs of the first command's model: the link changes nothing of a loss."""


def end_to_end_seeds(link: Link) -> str:
    """Final losses of the first command's model, by seed."""
    found = {seed: load(name)["links"][rate]["methods"] for seed, (name, rate) in SEEDS.items()}
    rows = [["AdamW (DDP fp32)", *(f"{runs['ddp']['loss']:.4f}" for runs in found.values()), ""]]
    for method in ("scape-0.9", "scape-0.99"):
        above = [runs[method]["loss"] / runs["ddp"]["loss"] - 1 for runs in found.values()]
        losses = [f"{runs[method]['loss']:.4f} ({each:+.1%})" for runs, each in zip(found.values(), above, strict=True)]
        rows.append([METHODS[method], *losses, averaged(above)])
    head = ["", *(f"seed {seed}" for seed in found), "mean of the differences"]
    command = "sudo python examples/bench_end_to_end.py --links 10gbit --methods ddp scape-0.9 scape-0.99 --seed 1"
    return table(head, *rows) + "\n" + source(link, SEEDS[1][0], command)


WIRES_3M = (("compiled", "bf16", "1gbit"), ("wires1", "wires1", "10gbit"), ("seed2", "wires2", "10gbit"))
"""Folders of the first command's model at 99%, by seed: values in 4 bits, in bf16."""


def wires_3m(link: Link) -> str:
    """Final losses of the first command's model by wire, and seed."""

    def losses(method: str, folders: Iterable[tuple[str, str]]) -> list[float]:
        runs = [load(f"end_to_end/{folder}/end_to_end.json")["links"][rate]["methods"] for folder, rate in folders]
        return [run[method]["loss"] for run in runs]

    packed = losses("scape-0.99", [(name, rate) for name, _, rate in WIRES_3M])
    plain = losses("scape-0.99-bf16", [(name, rate) for _, name, rate in WIRES_3M])
    gaps = [a / b - 1 for a, b in zip(packed, plain, strict=True)]
    rows = [[f"`{name}`", *(f"{each:.4f}" for each in row), ""] for name, row in (("bf16", plain), ("int4", packed))]
    rows.append(["difference", *(f"{gap:+.1%}" for gap in gaps), averaged(gaps)])
    command = "sudo python examples/bench_end_to_end.py --links 10gbit --methods scape-0.99 scape-0.99-bf16 --seed 1"
    text = table(["3M, SCAPE 99%", *(f"seed {seed}" for seed in range(3)), "mean"], *rows)
    return text + "\n" + source(link, "end_to_end/wires1/end_to_end.json", command)


def wires_3m_parts(link: Link) -> str:
    """The same model over simulated ranks: by what is packed, beside bf16 and AdamW, seed by seed."""
    losses = example_losses()
    rows = []
    for label in (DENSE, *sorted(losses.keys() - {DENSE})):
        mine, sparsity = losses[label], "90%" if "90%" in label else "99%"
        plain = losses[f"SCAPE {sparsity}, wire_dtype=bf16"]
        both = (
            [mine[seed] / other[seed] - 1 for seed in mine.keys() & other.keys()] for other in (plain, losses[DENSE])
        )
        gaps = (averaged(each) if len(each) > 1 and any(each) else "" for each in both)
        rows.append([label, str(len(mine)), f"{statistics.mean(mine.values()):.4f}", *gaps])
    text = table(
        ["3M, two ranks, 1,200 steps", "seeds", "loss", "against bf16, by seed", "against AdamW, by seed"], *rows
    )
    command = "python examples/bench_quality.py --suite wires_3M --device cuda"
    return text + "\n" + source(link, "quality/example", command)


def few(links: str, methods: str, rounds: int | None = None) -> str:
    """Options of a run of some methods; without ``rounds``, as many as the script takes by itself."""
    return f" --models pythia-14m --links {links} --methods {methods}{f' --rounds {rounds}' if rounds else ''}"


SLOW = few("10mbit", "compute ddp sparseloco-30")
ADAMW = few("10gbit 1gbit 100mbit", "compute ddp ddp-bf16 powersgd fsdp scape-0.9 scape-0.99 sparseloco-30", 4)
AIMS = few("1gbit 100mbit", "compute powersgd scape-0.9 scape-0.9-int4 scape-0.99 scape-0.99-int4", 5)
NODES = " --ranks-per-host 2 --models pythia-14m"


def compared(setting: str, suite: str, link: Link, *, varied: bool = False) -> str:
    """The methods of a setting, those on the front in bold; or with SparseLoCo's ``varied`` options, none in bold."""
    points = [point for point in pareto_points(setting) if varied or not point["varied"]]
    several, rows = any(point["seeds"] > 1 for point in points), []
    for point in points:
        name = f"**{point['label']}**" if point["on_front"] and not varied else point["label"]
        loss = [f"{point['loss']:.4f}", above_dense(point, points)]
        rate = f"{point['lr']:g} ({point['rates']})"
        rows.append([name, f"{point['bytes_per_parameter']:.2g}", *loss, rate, *([str(point["seeds"])] * several)])
    head = ["method", "bytes per parameter and step", "loss", "against dense AdamW", "best rate (tried)"]
    head += ["seeds"] * several
    return (
        table(head, *rows)
        + "\n"
        + source(link, "pareto/pareto.json", f"python examples/bench_pareto.py --suite {suite}")
    )


def whole_runs(setting: str, suite: str, link: Link) -> str:
    """By the bytes of the whole run, those on the front in bold; what ends 6% above AdamW or more is left out."""
    runs = [run for run in load("pareto/whole_runs.json") if run["setting"] == setting]
    dense, rows = next(run for run in runs if run["label"] == DENSE), []
    for run in runs:
        if run["loss"] < 1.06 * dense["loss"]:
            name = f"**{run['label']}**" if run["on_front"] else run["label"]
            sent = [f"{run['bytes_per_step']:.2g}", *(f"{run['bytes_by_length'][n]:.2g}" for n in LENGTHS)]
            loss = f"{run['loss']:.4f}{' (of bf16)' if run['computed'] else ''}"
            rows.append([name, *sent, loss, f"{run['loss'] / dense['loss'] - 1:+.1%}", str(run["seeds"])])
    head = ["method", "bytes per parameter and step, mean of this run", *(f"of {int(n):,} steps" for n in LENGTHS)]
    text = table([*head, "loss", "against dense AdamW", "seeds"], *rows)
    return text + "\n" + source(link, "pareto/whole_runs.json", f"python examples/bench_pareto.py --suite {suite}")


LENGTHS = ("10000", "100000")


def pareto_points(setting: str) -> list[dict[str, Any]]:
    """Methods of a setting, those that send the most first."""
    return [point for point in load("pareto/pareto.json") if point["setting"] == setting]


def above_dense(point: dict[str, Any], points: list[dict[str, Any]]) -> str:
    """The loss against dense AdamW's in the same setting."""
    dense = next(each for each in points if each["label"] == DENSE)
    return f"{point['loss'] / dense['loss'] - 1:+.1%}"


def ablations(link: Link) -> str:
    """SparseLoCo every 15 steps with one option changed."""
    points = pareto_points(SMALL)
    rows = []
    for reduction in ("gathered", "sharded"):
        common = {f"reduction={reduction}", "sync_every=15"}
        of_these = [point for point in points if common <= set(point["label"].split(", "))]
        (base,) = (point for point in of_these if not point["varied"])
        for point in sorted(of_these, key=lambda point: (point["varied"], point["loss"])):
            changed = ", ".join(part for part in point["label"].split(", ")[1:] if part not in common)
            against = f"{point['loss'] / base['loss'] - 1:+.1%}" if changed else "-"
            sends = f"{point['bytes_per_parameter']:.2g}"
            tried = f"{point['lr']:g} ({point['rates']})"
            rows.append([reduction, changed or "the default", sends, f"{point['loss']:.4f}", against, tried])
    head = ["reduction", "changed", "bytes per parameter and step", "loss", "against the default", "best rate (tried)"]
    command = "python examples/bench_pareto.py --suite ablations"
    return table(head, *rows) + "\n" + source(link, "pareto/pareto.json", command)


def step_cost(link: Link) -> str:
    rows = []
    for found in load("bench_step.json")["results"]:
        ms = found["milliseconds"]
        row = [found["dtype"], f"{found['sparsity']:.0%}", f"{ms['scape_wall']:.0f} ms", f"{ms['messages']:.0f} ms"]
        row += [f"{ms['own']:.0f} ms", f"{ms['adamw']:.0f} ms", f"{ms['own'] / ms['adamw']:.2f}"]
        row += [f"{ms['fused']:.0f} ms", f"{ms['own'] / ms['fused']:.1f}", f"{found['roofline_milliseconds']:.0f} ms"]
        row += [f"{found['bytes_per_parameter']:.3f}", f"{found['peak_bytes'] / found['parameters']:.1f}"]
        rows.append(row)
    head = ["parameters", "sparsity", "a step", "of it messages", "processor time", "`AdamW(foreach=True)`", "ratio"]
    head += ["`AdamW(fused=True)`", "ratio", "roofline", "bytes sent per parameter", "peak memory per parameter"]
    command = f"python examples/bench_step.py --steps 40 --wire-dtype {found['wire_dtype']}"
    return table(head, *rows) + "\n" + source(link, "bench_step.json", command)


def step_wires(link: Link) -> str:
    """What values in 4 bits cost in time against those in bf16."""
    rows = []
    for found in load("step_wires/bench_step.json")["results"]:
        ms = found["milliseconds"]
        times = [f"{ms[name]:.0f} ms" for name in ("scape_wall", "against_wall")]
        rows.append([f"{found['sparsity']:.0%}", *times, f"{ms['wall_more']:+.1f} ms", f"{ms['more']:+.1f} ms"])
    head = ["a step of pythia-14m", "4 bits", "bf16", "4 bits take more, in turns", "of it processor time"]
    command = "python examples/bench_step.py --steps 100 --against bf16 --dtype fp32"
    return table(head, *rows) + "\n" + source(link, "step_wires/bench_step.json", command)


def gpu(link: Link) -> str:
    found, rows = load("gpu/bench_gpu.json"), []
    for row in found["rows"]:
        us = row["microseconds"]
        phases = [f"{us.get(name, 0) / 1000:.1f}" for name in ("norm", "sweep", "exchange", "update", "write")]
        rows.append([row["size"], f"{row['sparsity']:.0%}", str(row["ranks"]), *phases, f"{us['step'] / 1000:.1f}"])
        rows[-1] += [f"{us['adamw'] / 1000:.1f}", f"{us['adamw and clipping'] / 1000:.1f}"]
        rows[-1] += [f"{row['step / adamw']:.2f}", f"{row['step / adamw and clipping']:.2f}"]
    head = ["parameters", "sparsity", "N", "norm, ms", "sweep", "exchange", "update", "write", "**step**"]
    head += ["AdamW", "clipped", "step / AdamW", "step / clipped"]
    command = "python examples/bench_gpu.py --sizes 500M 1.8B"
    return table(head, *rows) + "\n" + source(link, "gpu/bench_gpu.json", command)


TABLES: dict[str, Callable[[Link], str]] = {
    "first": first,
    "drop-in-1000": lambda link: drop_in(1000, link),
    "drop-in-10000": lambda link: drop_in(10_000, link),
    "wires": wires,
    "wires-digits": wires_digits,
    "largest": largest,
    "downstream": lambda link: questions("answers", "10M parameters, 4,000 steps", ASK, link),
    "downstream-small": lambda link: questions("answers-3M", "3M parameters, 1,200 steps", ASK, link),
    "finetuning": lambda link: questions("labels", "10M parameters, finetuned", LABELS, link),
    "many-ranks": many_ranks,
    "sizes": sizes,
    "rates": rates,
    "digits": digits,
    "step-cost": step_cost,
    "step-wires": step_wires,
    "gpu": gpu,
    "pareto": lambda link: compared(SMALL, "rates", link),
    "pareto-run": lambda link: whole_runs(SMALL, "rates", link),
    "pareto-run-larger": lambda link: whole_runs(LARGER, "front", link),
    "pareto-run-longer": lambda link: whole_runs(LONGER, "aim", link),
    "pareto-front": lambda link: compared(LARGER, "front", link),
    "pareto-aim": lambda link: compared(LONGER, "aim", link, varied=True),
    "pareto-ablations": ablations,
    "two-hosts": lambda link: two_hosts("two_hosts/adamw", ADAMW, link),
    "two-hosts-aims": lambda link: two_hosts("two_hosts/aims", AIMS, link),
    "end-to-end": end_to_end,
    "end-to-end-again": lambda link: end_to_end(link, AGAIN),
    "end-to-end-slow": lambda link: end_to_end(link, SLOWEST),
    "end-to-end-seeds": end_to_end_seeds,
    "wires-3m": wires_3m,
    "wires-3m-parts": wires_3m_parts,
    "two-hosts-slow": lambda link: two_hosts("two_hosts/slow", SLOW, link),
    "two-hosts-nodes": lambda link: two_hosts("two_hosts/nodes", f"{NODES} --links 1gbit --rounds 2", link, "host"),
    "two-hosts-nodes-slow": lambda link: two_hosts(
        "two_hosts/nodes_100mbit", f"{NODES} --links 100mbit --rounds 1", link, "host"
    ),
    "two-hosts-adams": lambda link: two_hosts("two_hosts", "", link),
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def updated(path: Path) -> str:
    """The page with every block as the data say it."""

    def link(target: str) -> str:
        return os.path.relpath(ROOT / target, path.parent)

    def render(match: re.Match[str]) -> str:
        return f"{match[1]}{TABLES[match[2]](link)}\n{match[3]}"

    return BLOCK.sub(render, path.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a table is out of date")
    check = parser.parse_args().check
    stale = [path for path in pages() if updated(path) != path.read_text(encoding="utf-8")]
    for path in stale:
        if not check:
            path.write_text(updated(path), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'out of date, run python docs/tables.py' if check else 'rewritten'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
