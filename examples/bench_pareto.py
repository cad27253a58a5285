"""Which method at how many bytes? Loss against bytes per token, of SCAPE, SparseLoCo and six others, on one plot.

    python examples/bench_pareto.py --short               # about a minute: every method, a few steps each
    python examples/bench_pareto.py --suite rates         # 0.03M parameters, 3,000 steps, each method at three rates
    python examples/bench_pareto.py --suite front         # those near the front at 0.2M, at the rate found, two seeds
    python examples/bench_pareto.py --suite ablations     # of SparseLoCo at H = 15
    python examples/bench_pareto.py --suite aim           # 0.2M, 10,000 steps: AdamW, DiLoCo, SparseLoCo at H = 15
    python examples/bench_pareto.py --report              # the table and the plot of what is there

Bytes are counted in three ways. "Over the run" is what a step of the whole run of a large model sends on average,
SCAPE's warm-up included, without the message of fixed size that measures SCAPE's gradient norm (24 KB on 4 ranks: here
nine tenths of a step's bytes, of a billion parameters' nothing). SCAPE's are summed from its schedule, with the widths
of the wire as they are now; those in 4 bits too where the run was in bf16, which ends at the same loss. "Per token" is
all that a rank sent in the run of the small model, over its tokens. "Late" is what a step of the second half sends. The
fronts are drawn by the first, and by the last.

Ranks are simulated in one process. A run that was stopped goes on from its last snapshot, bit for bit; a finished one
is not run again. Each leaves <out>/runs/<name>.json; the report writes <out>/pareto.md, pareto.json, whole_runs.json
and two plots.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_quality import execute_all
from quality_runs import BETAS, Run, Setting, results, run_of, scape, sweep

from lightning_scape import ScapeConfig
from lightning_scape.scape.cost import message_bytes, scape_bytes
from lightning_scape.scape.mask import SparsitySchedule

OUT = Path(__file__).parent / "results" / "pareto"
BYTES = (
    "Bytes are those that a rank sends: per step and parameter in the second half of the run, without the message of"
    " fixed size that measures SCAPE's gradient norm; and per token that it trains on, in the whole run, everything"
    " included. The front goes by the first."
)
NEAR, USEFUL = 1.02, 1.1
"""A method is near the front if its loss is at most so many times the front's at its bytes, and AdamW's."""


def peer(method: str, **options: Any) -> dict[str, Any]:
    """Arguments of a run of one of peers.METHODS."""
    return {"method": method, "options": tuple(sorted(options.items()))}


ADAMW: dict[str, Any] = {"method": "adamw"}
SCAPE = [
    scape(sparsity, sparsity_warmup_steps=1000, wire_dtype="bf16") for sparsity in (0.9, 0.99, 0.999)
]  # the default outlasts 3,000
AT_ONCE = [scape(sparsity, sparsity_warmup_steps=0, wire_dtype="bf16") for sparsity in (0.9, 0.99)]
SPARSELOCO = [
    peer("sparseloco", sync_every=every, reduction=reduction)
    for reduction in ("gathered", "sharded")
    for every in (1, 5, 15, 30, 100)
]
LOCAL = [peer(method, sync_every=every) for method in ("diloco", "averaging") for every in (15, 30, 100)]
COMPRESSED = [peer("topk", density=density) for density in (0.01, 0.001)]
COMPRESSED += [peer("powersgd", rank=rank) for rank in (1, 4)]
BY_SIGN = [*(peer("demo", top=top) for top in (8, 32)), peer("signsgd")]
AT_15 = {"sync_every": 15}
GATHERED_15 = {**AT_15, "reduction": "gathered"}
SHARDED_15 = {**AT_15, "reduction": "sharded"}
ABLATIONS = [
    *(
        peer("sparseloco", **GATHERED_15, **change)
        for change in (
            *({"bits": bits} for bits in (4, 8, None)),
            *({"density": density} for density in (1 / 16, 1 / 32, 1 / 128, 1 / 256)),
            *({"error_decay": decay} for decay in (0.9, 0.99, 1.0)),
            *({"outer_lr": rate} for rate in (0.5, 0.7, 1.5)),
            {"block_size": 4096},
            *({"overlap_steps": steps} for steps in (1, 5, 14)),
        )
    ),
    *(
        peer("sparseloco", **SHARDED_15, **change)
        for change in (
            {"return_density": 1 / 32},
            *({"error_decay": decay} for decay in (0.99, 1.0)),
            *({"outer_lr": rate} for rate in (2.0, 3.0)),
            {"density": 1.0},
            {"density": 1.0, "outer_lr": 2.0},
            {"density": 1.0, "bits": None, "error_decay": 1.0},
        )
    ),
]
AVERAGES = [peer("sparseloco", **GATHERED_15, **change) for change in ({}, {"average": "all"}, {"average": "senders"})]
TWICE = {**GATHERED_15, "average": "all", "outer_lr": 2.0}
FARTHER = [
    *(peer("sparseloco", **GATHERED_15, average="all", outer_lr=rate) for rate in (1.5, 2.0, 3.0, 4.0)),
    *(peer("sparseloco", **GATHERED_15, average="senders", outer_lr=rate) for rate in (0.7, 1.5)),
]
RATES, SIGN_RATES = [4e-3, 8e-3, 1.6e-2], [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
SMALL: dict[str, Any] = {"size": "0.03M", "steps": 3000}
LONG: dict[str, Any] = {"size": "0.2M", "steps": 10_000}
TINY: dict[str, Any] = {"size": "0.03M", "ranks": 2, "batch": 2, "context": 32, "steps": 4}
SHORT = sweep([ADAMW, *SCAPE, *SPARSELOCO[:2], *LOCAL[::3], *COMPRESSED[::2], *BY_SIGN[1:]], [2e-3], **TINY)
SUITES: dict[str, list[Run]] = {
    "rates": [
        *sweep([ADAMW, *SCAPE, *SPARSELOCO, *LOCAL, *COMPRESSED, *AT_ONCE], RATES, **SMALL),
        *sweep(BY_SIGN, SIGN_RATES, **SMALL),
        *sweep([ADAMW, SCAPE[0]], [3.2e-2], **SMALL),  # their best is 1.6e-2
    ],
    "ablations": [
        *sweep([peer("sparseloco", **GATHERED_15), *ABLATIONS], [1.6e-2], **SMALL),
        *sweep([*AVERAGES[1:], *FARTHER], [1.6e-2], **SMALL),
        *sweep(AVERAGES[1:], [8e-3, 3.2e-2], **SMALL),
        *(run for ranks in (2, 8) for run in sweep([ADAMW, *AVERAGES], [1.6e-2], ranks=ranks, **SMALL)),
    ],
    "aim": [
        *sweep([ADAMW, peer("sparseloco", **GATHERED_15)], [4e-3], (0, 1), **LONG),
        *sweep([peer("diloco", **AT_15)], [2e-3], (0, 1), **LONG),
        *sweep([peer("sparseloco", **GATHERED_15)], [2e-3], **LONG),
        *sweep([peer("diloco", **AT_15)], [4e-3], **LONG),
        *sweep([ADAMW], [2e-3, 8e-3], **LONG),
        *sweep([peer("sparseloco", **TWICE)], [4e-3, 8e-3], **LONG),
        *sweep([peer("sparseloco", **TWICE, density=1 / 32)], [4e-3], **LONG),
        *sweep([peer("sparseloco", **GATHERED_15, density=1 / 16), peer("averaging", **AT_15)], [4e-3], **LONG),
        *sweep([peer("sparseloco", sync_every=5, reduction="gathered")], [4e-3], **LONG),
    ],
}


class Point(NamedTuple):
    """A method at its best learning rate."""

    label: str
    setting: Setting
    bytes_per_token: float
    """That a rank sends for each token that it trains on, in the whole run."""
    bytes_per_parameter: float
    """That a rank sends in a step late in the run, but for messages of fixed size, over the model's parameters."""
    loss: float
    """Mean over seeds."""
    lr: float
    rates: int
    """Learning rates that were tried."""
    seeds: int
    run: Run

    @property
    def varied(self) -> bool:
        """Whether it is SparseLoCo with an option changed that is no part of the comparison of methods."""
        return self.run.method == "sparseloco" and not {name for name, _ in self.run.options} <= {*AT_15, "reduction"}


def points_of(found: list[dict[str, Any]]) -> list[Point]:
    """Each method of each setting at the rate of the lowest loss, of those that ran on the most seeds."""
    tried: dict[Any, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in found:
        run = run_of(result)
        tried[run.setting, run.label][run.lr].append(result)
    points = []
    for (setting, label), by_lr in tried.items():
        most = max(map(len, by_lr.values()))
        loss = {lr: statistics.mean(r["loss"] for r in here) for lr, here in by_lr.items() if len(here) == most}
        lr = min(loss, key=loss.__getitem__)
        result = by_lr[lr][0]
        per_token = result["bytes"] / (result["tokens"] / setting.ranks)
        late = late_bytes(result) / result["parameters"]
        points.append(Point(label, setting, per_token, late, loss[lr], lr, len(by_lr), most, run_of(result)))
    return sorted(points, key=lambda point: -point.bytes_per_parameter)


def late_bytes(result: dict[str, Any]) -> float:
    """Bytes that a rank sends in a step of the second half of a run, without the message that measures the norm."""
    earlier = [{"step": 0, "bytes": 0}, *(at for at in result["history"] if at["step"] <= result["step"] // 2)]
    steps, sent = (result[name] - earlier[-1][name] for name in ("step", "bytes"))
    run = run_of(result)
    return sent / steps - (fixed_bytes(run.ranks) if run.method == "scape" else 0)


def fixed_bytes(ranks: int) -> int:
    """Of the messages by which SCAPE measures the norm of the averaged gradient, of a model of any size."""
    found: int = scape_bytes((1,), ranks, ScapeConfig(sparsity=0.9), clip=True)["norm"]
    return found


def front_of(points: list[Point]) -> list[Point]:
    """Those that no other beats: as few bytes with a loss as low."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes_per_parameter, point.loss)):
        if not front or point.loss < front[-1].loss:
            front.append(point)
    return front


def above_front(point: Point, front: list[Point]) -> float:
    """Loss over the lowest that is had for at most the bytes of the point."""
    return point.loss / min(other.loss for other in front if other.bytes_per_parameter <= point.bytes_per_parameter)


def mean_bytes(config: ScapeConfig, ranks: int, steps: int) -> float:
    """Bytes per parameter that a rank sends in a step of SCAPE on average over a run, the norm's message left out."""
    quota, blocks, total = config.quota, 1000 * ranks, 0
    for sent, count in SparsitySchedule.of(config, steps).sent_by_step(steps).items():
        total += count * sum(message_bytes(config, blocks, ranks, None, sent).values())
    return total / steps / (blocks * quota.block_size)


LENGTHS = (3000, 10_000, 100_000)
"""Steps of the runs whose bytes are told, whatever the length of the run that was made."""


def whole_runs(points: list[Point], steps: int) -> list[dict[str, Any]]:
    """The methods of one setting by what they send over a run of so many steps, those that send the most first.

    Args:
        points: SCAPE's stand there with their own wire and, if that is bf16, in 4 bits as well.
        steps: of the runs that were made; by what those send the front is drawn.
    """
    rows = []
    for point in points:
        sent = [("", dict.fromkeys((steps, *LENGTHS), point.bytes_per_parameter))]
        if point.run.method == "scape":
            options = dict(point.run.options)
            wires = dict.fromkeys([options["wire_dtype"], "int4"])
            configs = [ScapeConfig(**{**options, "wire_dtype": wire}) for wire in wires]
            sent = [
                (
                    f", {config.wire_dtype}",
                    {length: mean_bytes(config, point.run.ranks, length) for length in (steps, *LENGTHS)},
                )
                for config in configs
            ]
        label = point.label.removesuffix(f", wire_dtype={dict(point.run.options).get('wire_dtype')}")
        rows += [
            {
                "label": f"{label}{wire}",
                "method": point.run.method,
                "setting": point.setting.title,
                "steps": steps,
                "bytes_per_step": sizes[steps],
                "bytes_by_length": {length: sizes[length] for length in LENGTHS},
                "loss": point.loss,
                "seeds": point.seeds,
                "computed": index > 0,
            }
            for index, (wire, sizes) in enumerate(sent)
        ]
    best = math.inf
    for row in sorted(rows, key=lambda row: (row["bytes_per_step"], row["loss"])):
        row["on_front"] = row["loss"] < best
        best = min(best, row["loss"])
    return sorted(rows, key=lambda row: -row["bytes_per_step"])


def all_whole_runs(out: Path) -> list[dict[str, Any]]:
    """Of every setting in which methods are compared; at 10,000 steps with SCAPE's runs of bench_quality.py."""
    found = results(out)
    longest = {(run.size, run.steps) for run in map(run_of, found) if run.steps >= LONG["steps"]}
    for result in results(OUT.parent / "quality") if longest else []:
        run = run_of(result)
        default = {"sparsity", "update", "wire_dtype"} == {name for name, _ in run.options}
        of_setting = (run.size, run.steps) in longest and run.ranks == 4 and run.betas == BETAS and run.task == "python"
        if run.method == "scape" and of_setting and default and dict(run.options)["update"] == "adamw":
            found.append(result)
    by_setting: dict[Setting, list[Point]] = defaultdict(list)
    for point in points_of(found):
        if not point.varied:
            by_setting[point.setting].append(point)
    compared = {setting: points for setting, points in by_setting.items() if len(points) > 3}
    return [row for setting, points in compared.items() for row in whole_runs(points, setting.steps)]


def near_front(out: Path) -> list[Run]:
    """What is worth 0.2M parameters, from the results at 0.03M: two seeds at half the rate found."""
    points = [
        point
        for point in points_of(results(out))
        if (point.setting.size, point.setting.ranks, point.setting.steps, point.varied) == ("0.03M", 4, 3000, False)
    ]
    front = front_of(points)
    dense = next(point for point in points if point.run.method == "adamw")
    chosen = [dense, *(p for p in points if above_front(p, front) <= NEAR and p.loss <= USEFUL * dense.loss)]
    runs = []
    for seed in (0, 1):
        for point in dict.fromkeys(chosen):
            settings = {"method": point.run.method, "options": point.run.options}
            runs += sweep([settings], [point.lr / 2], [seed], size="0.2M", steps=3000)  # AdamW's best rate halves, too
    return runs


# ------------------------------------------------------------------------------------------------ the report


def report(out: Path) -> str:
    """Writes the page, the figures and the plot; returns the page."""
    by_setting: dict[Setting, list[Point]] = defaultdict(list)
    for point in points_of(results(out)):
        by_setting[point.setting].append(point)
    lines = ["# Loss against bytes", "", BYTES]
    figures = []
    for setting, points in by_setting.items():
        front = front_of([point for point in points if not point.varied])
        lines += ["", f"## {setting.title}", "", *table(points, front)]
        for point in points:
            marks = {"on_front": point in front, "varied": point.varied}
            figures.append({**point._asdict(), "setting": setting.title, "run": point.run.name, **marks})
    page = "\n".join(lines) + "\n"
    (out / "pareto.md").write_text(page)
    (out / "pareto.json").write_text(json.dumps(figures, indent=1) + "\n")
    plot(by_setting, out / "pareto.png")
    runs = all_whole_runs(out)
    (out / "whole_runs.json").write_text(json.dumps(runs, indent=1) + "\n")
    if runs:
        plot_whole_runs(runs, out / "whole_runs.png")
    return page


def table(points: list[Point], front: list[Point]) -> list[str]:
    """Markdown; the front is in bold. What varies an option of SparseLoCo stands below the methods."""
    dense = next((point for point in points if point.run.method == "adamw"), None)
    head = "| method | bytes per parameter and step | per token, in the run | loss | against AdamW | above the front |"
    lines = [f"{head} rate (tried) | seeds |", "|---|---|---|---|---|---|---|---|"]
    for point in sorted(points, key=lambda point: point.varied):
        name = f"**{point.label}**" if point in front else point.label
        gap = "-" if dense is None else f"{point.loss / dense.loss - 1:+.1%}"
        above = "-" if point.varied else f"{above_front(point, front) - 1:.1%}"
        lines.append(
            f"| {name} | {point.bytes_per_parameter:.3g} | {point.bytes_per_token:,.3g} | {point.loss:.4f} | {gap}"
            f" | {above} | {point.lr:g} ({point.rates}) | {point.seeds} |"
        )
    return lines


def plot(by_setting: dict[Setting, list[Point]], path: Path) -> None:
    """One panel for each setting in which methods are compared: the methods, and the front."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    compared = {setting: [point for point in points if not point.varied] for setting, points in by_setting.items()}
    drawn = {setting: points for setting, points in compared.items() if len(points) > 2}
    methods = dict.fromkeys(point.run.method for points in drawn.values() for point in points)
    colors = {method: f"C{number}" for number, method in enumerate(methods)}
    figure, panels = plt.subplots(len(drawn), 1, figsize=(10, 6 * len(drawn)), squeeze=False)
    for panel, (setting, points) in zip(panels[:, 0], drawn.items(), strict=True):
        for method in dict.fromkeys(point.run.method for point in points):
            own = [point for point in points if point.run.method == method]
            at = [p.bytes_per_parameter for p in own], [p.loss for p in own]
            panel.plot(*at, "o", color=colors[method], label=method)
        front = front_of(points)
        panel.step([p.bytes_per_parameter for p in front], [p.loss for p in front], "k:", where="post", label="front")
        for point in front:
            name = point.label.removeprefix("sparseloco, ").replace("reduction=", "").replace("sync_every=", "every ")
            at_point = {"xytext": (5, 5), "textcoords": "offset points"}
            panel.annotate(name, (point.bytes_per_parameter, point.loss), fontsize=8, rotation=20, **at_point)
        x_label = "bytes that a rank sends per step and parameter, after any warm-up"
        panel.set(xscale="log", title=setting.title, xlabel=x_label, ylabel="validation loss, nats")
        panel.margins(x=0.1, y=0.12)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_whole_runs(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel for each setting: loss over the bytes of the whole run, and the front."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = list(dict.fromkeys(row["setting"] for row in rows))
    colors = {method: f"C{number}" for number, method in enumerate(dict.fromkeys(row["method"] for row in rows))}
    figure, panels = plt.subplots(len(settings), 1, figsize=(10, 5 * len(settings)), squeeze=False)
    for panel, setting in zip(panels[:, 0], settings, strict=True):
        here = [row for row in rows if row["setting"] == setting]
        best = min(row["loss"] for row in here)
        for method in dict.fromkeys(row["method"] for row in here):
            own = [row for row in here if row["method"] == method and row["loss"] <= USEFUL * best]
            at = [row["bytes_per_step"] for row in own], [row["loss"] for row in own]
            panel.plot(*at, "o", color=colors[method], label=method)
        front = sorted((row for row in here if row["on_front"]), key=lambda row: row["bytes_per_step"])
        at = [row["bytes_per_step"] for row in front], [row["loss"] for row in front]
        panel.step(*at, "k:", where="post", label="front")
        for row in front:
            if row["loss"] <= USEFUL * best:
                name = (
                    row["label"].removeprefix("sparseloco, ").replace("reduction=", "").replace("sync_every=", "every ")
                )
                place = {"xytext": (5, 5), "textcoords": "offset points"}
                panel.annotate(name, (row["bytes_per_step"], row["loss"]), fontsize=8, rotation=20, **place)
        x_label = "bytes that a rank sends per step and parameter, mean over the whole run"
        panel.set(
            xscale="log", title=setting, xlabel=x_label, ylabel="validation loss, nats", ylim=(None, USEFUL * best)
        )
        panel.margins(x=0.1)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", choices=[*SUITES, "front"], default=["rates", "front"], help="which runs")
    parser.add_argument("--short", action="store_true", help="every method, a few steps each")
    parser.add_argument("--report", action="store_true", help="only write the table and the plot of what is there")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one run and one core each; 0: all in this one")
    parser.add_argument("--list", action="store_true", help="only name the runs")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for results (default: {OUT.name})")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for suite in ["short"] if args.short else args.suite:
        # The front is known only after the suites before it have run.
        runs = SHORT if suite == "short" else near_front(args.out) if suite == "front" else SUITES[suite]
        if args.list:
            print("\n".join(run.name for run in runs))
        elif not args.report:
            execute_all(runs, args.out, 0 if args.short else args.jobs, keep=False, device="cpu")
    if not args.list:
        print(report(args.out))


if __name__ == "__main__":
    main()
