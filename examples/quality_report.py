"""Tables and plots of what `bench_quality.py` has measured."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from quality_runs import BETAS, USUAL_WIRE, Run, Setting, results, run_of

from lightning_scape import ScapeConfig
from lightning_scape.scape.mask import SparsitySchedule

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Row:
    """One method in one setting, at its best learning rate."""

    setting: Setting
    label: str
    lr: float
    tried: int
    seeds: list[int]
    losses: list[float]
    """By seed."""
    accuracies: list[float]
    """By seed."""
    bytes: float
    """Sent by one rank per step and parameter."""
    updates: float
    """Per entry, on average."""

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)

    @property
    def loss(self) -> str:
        """Mean and, of several seeds, standard deviation."""
        return f"{self.mean:.4f}" + (f" ± {statistics.stdev(self.losses):.4f}" if len(self.losses) > 1 else "")

    @property
    def right(self) -> str:
        """The same of the accuracy."""
        spread = f" ± {100 * statistics.stdev(self.accuracies):.2f}" if len(self.accuracies) > 1 else ""
        return f"{self.accuracy:.2%}{spread}" if self.setting.task != "python" else f"{self.accuracy:.1%}"

    def is_of(self, run: Run) -> bool:
        """Whether the run is one of its."""
        return (self.setting, self.label, self.lr) == (run.setting, run.label, run.lr)

    def above(self, base: Row) -> str:
        """How far it is above another row, by the seeds of both; with the (unpaired) standard error, if several."""
        mine, theirs = self.shared_with(base)
        if not mine:
            return "-"
        gap = f"{statistics.mean(mine) / statistics.mean(theirs) - 1:+.1%}"
        if self is base or len(mine) == 1:
            return gap
        error = math.hypot(*(statistics.stdev(losses) for losses in (mine, theirs))) / math.sqrt(len(mine))
        return f"{gap} ± {100 * error / statistics.mean(theirs):.1f}"

    def shared_with(self, base: Row) -> tuple[list[float], list[float]]:
        """The losses of both on the seeds that both have."""
        shared = [seed for seed in self.seeds if seed in base.seeds]
        return tuple([row.losses[row.seeds.index(seed)] for seed in shared] for row in (self, base))


def mean_losses(by_lr: dict[Any, list[dict[str, Any]]]) -> dict[Any, float]:
    """Mean loss at each learning rate over the seeds that all of them have; if there are none, over those it has."""
    if not by_lr:
        return {}
    seeds = {lr: {run_of(result).seed for result in here} for lr, here in by_lr.items()}
    shared = set.intersection(*seeds.values())
    return {
        lr: statistics.mean(r["loss"] for r in here if run_of(r).seed in (shared or seeds[lr]))
        for lr, here in by_lr.items()
    }


def rows_of(found: list[dict[str, Any]]) -> list[Row]:
    """Each method in each setting, with all its seeds at the best learning rate.

    That is the one with the lowest of the `mean_losses`, of those that ran on the most seeds: one run proves little.
    """
    tried: dict[Any, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in found:
        run = run_of(result)
        tried[run.setting, run.label][run.lr].append(result)
    rows = []
    for (setting, label), by_lr in tried.items():
        most = max(len(here) for here in by_lr.values())
        means = mean_losses({lr: here for lr, here in by_lr.items() if len(here) == most})
        lr = min(means, key=means.__getitem__)
        best = by_lr[lr]
        run = run_of(best[0])
        rows.append(
            Row(
                setting,
                label,
                lr,
                len(by_lr),
                [run_of(r).seed for r in best],
                [r["loss"] for r in best],
                [r["accuracy"] for r in best],
                best[0]["bytes"] / run.steps / best[0]["parameters"],
                updates_of(run),
            )
        )
    return rows


def updates_of(run: Run) -> float:
    if run.method != "scape":
        return run.steps
    known = {f.name for f in dataclasses.fields(ScapeConfig)}
    config = ScapeConfig(**{key: value for key, value in run.options if key in known})
    return SparsitySchedule.of(config, run.steps).updates(run.steps)


def report(out: Path) -> str:
    """Tables, one for each setting, and the plots."""
    found = results(out)
    if not found:
        raise SystemExit(f"error: no results in {out / 'runs'}. Run a suite first.")
    rows = rows_of(found)
    text = [*drop_in_tables(found), "## All runs, each method at its best learning rate", ""]
    for setting in sorted({row.setting for row in rows}, key=str):
        here = sorted((row for row in rows if row.setting == setting), key=lambda row: row.mean)
        base = base_of(here)
        text += [f"### {setting.title}", "", *table(here, base), ""]
    plot_losses(found, out)
    plot_gaps(rows, out)
    plot_rates(found, out)
    plot_sweep(found, out)
    tables = "\n".join(text)
    (out / "quality.md").write_text(tables)
    (out / "quality.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return tables


def base_of(rows: list[Row]) -> Row | None:
    """What the others are compared with: dense AdamS where it has run, else dense AdamW."""
    by_label = {row.label: row for row in rows}
    return by_label.get("dense AdamS") or by_label.get("dense AdamW")


def table(rows: list[Row], base: Row | None) -> list[str]:
    """One line for each row."""
    digits = rows[0].setting.task != "python"
    loss, right = ("test loss, nats", "named right") if digits else ("validation loss, nats", "next byte right")
    against = base.label if base is not None else "the base"
    lines = [
        f"| method | best lr (of) | {loss} | seeds | against {against}, shared seeds (± standard error) | {right} |"
        " bytes a step and parameter | updates per entry |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gap = row.above(base) if base is not None else "-"
        lines.append(
            f"| {row.label} | {row.lr:g} ({row.tried}) | {row.loss} | {len(row.losses)} | {gap} | {row.right} |"
            f" {row.bytes:.3g} | {row.updates:,.0f} |"
        )
    return lines


# ------------------------------------------------------------------------------------------------ drop-in


def takes_adamws_place(run: Run) -> bool:
    """Whether it is SCAPE with the defaults that a user of AdamW gets; only the sparsity is chosen."""
    return run.method == "scape" and run.label.startswith("SCAPE") and "," not in run.label


def drop_in_tables(found: list[dict[str, Any]]) -> list[str]:
    """AdamW at its best learning rate, and SCAPE at that very rate, in every setting in which both have run."""
    by_setting: dict[Setting, list[dict[str, Any]]] = defaultdict(list)
    for result in found:
        run = run_of(result)
        if run.method == "adamw" or takes_adamws_place(run):
            by_setting[run.setting].append(result)
    text = ["## Drop-in: AdamW's settings unchanged", ""]
    for setting, here in sorted(by_setting.items(), key=lambda item: in_order(item[0])):
        dense = [result for result in here if run_of(result).method == "adamw"]
        if not dense or len(dense) == len(here):
            continue
        (base,) = rows_of(dense)
        same = [result for result in here if run_of(result).lr == base.lr and takes_adamws_place(run_of(result))]
        text += [f"### {setting.title}, learning rate {base.lr:g}", "", *table([base, *by_updates(same)], base), ""]
        text += [*rates_of_adamw(dense, base), ""]
        text += sweep_table(losses_by_rate(here))
    return text if len(text) > 2 else []


def by_updates(found: list[dict[str, Any]]) -> list[Row]:
    """The densest first."""
    return sorted(rows_of(found), key=lambda row: -row.updates)


def in_order(setting: Setting) -> tuple[Any, ...]:
    """The language model before the digits, small before large, short before long."""
    size = float(setting.size[:-1]) if setting.size else 0.0
    return setting.task != "python", setting.task, size, setting.steps, setting.betas, setting


def rates_of_adamw(dense: list[dict[str, Any]], base: Row) -> list[str]:
    """AdamW at all its learning rates on one seed: whether the one taken is the best."""
    seed = min(base.seeds)
    losses = {run_of(result).lr: result["loss"] for result in dense if run_of(result).seed == seed}
    tried = [
        f"**{lr:g}**: {loss:.4f}" if lr == base.lr else f"{lr:g}: {loss:.4f}" for lr, loss in sorted(losses.items())
    ]
    return [f"Dense AdamW on seed {seed}, by learning rate: {', '.join(tried)}."]


def dense_first(item: tuple[str, Any]) -> tuple[bool, str]:
    """The order of methods in a table of rates."""
    return item[0].startswith("SCAPE"), item[0]


def losses_by_rate(here: list[dict[str, Any]]) -> dict[str, dict[float, float]]:
    """Mean losses of dense AdamW and of SCAPE at AdamW's rates, where a method ran at several; on the seeds of all."""
    tried: dict[str, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in here:
        run = run_of(result)
        if run.method == "adamw" or takes_adamws_place(run):
            tried[run.label][run.lr].append(result)
    rates = tried.get("dense AdamW", {})
    several = {label: by_lr for label, by_lr in sorted(tried.items(), key=dense_first) if len(by_lr) > 1}
    means = mean_losses({(label, lr): by_lr[lr] for label, by_lr in several.items() for lr in by_lr if lr in rates})
    return {label: {lr: means[label, lr] for lr in sorted(by_lr) if lr in rates} for label, by_lr in several.items()}


def sweep_table(losses: dict[str, dict[float, float]]) -> list[str]:
    """Loss and gap at each learning rate; nothing if SCAPE ran at one alone."""
    labels = list(losses)
    if len(labels) < 2 or "dense AdamW" not in losses:
        return []
    dense = losses["dense AdamW"]
    lines = [f"| learning rate | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for lr in sorted(set.union(*(set(losses[label]) for label in labels if label != "dense AdamW"))):
        cells = []
        for label in labels:
            gap = (
                f" ({losses[label][lr] / dense[lr] - 1:+.1%})" if label != "dense AdamW" and lr in losses[label] else ""
            )
            cells.append(f"{losses[label][lr]:.4f}{gap}" if lr in losses[label] else "-")
        lines.append(f"| {lr:g} | {' | '.join(cells)} |")
    return [*lines, ""]


def plot_sweep(found: list[dict[str, Any]], out: Path) -> None:
    """Loss over the learning rate where AdamW and SCAPE ran at most rates; what is within 3% of AdamW is shaded."""
    by_setting: dict[Setting, list[dict[str, Any]]] = defaultdict(list)
    for result in found:
        by_setting[run_of(result).setting].append(result)
    swept = {setting: losses_by_rate(here) for setting, here in by_setting.items()}
    swept = {setting: losses for setting, losses in swept.items() if "dense AdamW" in losses and len(losses) > 1}
    if not swept:
        return
    # Most runs of the sparse methods, and of such settings the longest.
    setting = max(swept, key=lambda setting: (sum(map(len, swept[setting].values())), setting.steps))
    losses = swept[setting]
    dense = losses["dense AdamW"]
    best = min(dense, key=dense.__getitem__)
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for label, by_lr in losses.items():
        axis.plot([lr / best for lr in by_lr], list(by_lr.values()), marker="o", label=label)
    rates = [lr / best for lr in dense]
    within = [1.03 * loss for loss in dense.values()]
    axis.fill_between(rates, list(dense.values()), within, color="grey", alpha=0.2, label="AdamW to AdamW + 3%")
    axis.set_xscale("log", base=2)
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.set(xlabel=f"learning rate / AdamW's best ({best:g})", ylabel="validation loss (nats)")
    axis.set_title(setting.title, fontsize="medium")
    axis.legend(fontsize="small")
    save(figure, out / "drop_in.png")


# ---------------------------------------------------------------------------------------------- all runs


def plot_losses(found: list[dict[str, Any]], out: Path) -> None:
    """Loss over steps and bytes, and how far it is above AdamW's; of the two largest models of several methods."""
    plain = [result for result in found if is_plain(run_of(result)) and "catch_up" not in dict(run_of(result).options)]
    plain = [result for result in plain if run_of(result).task == "python"]
    lines: dict[Setting, list[Row]] = defaultdict(list)
    for row in rows_of(plain):
        lines[row.setting].append(row)

    def worth(setting: Setting) -> tuple[float, ...]:
        methods = {row.label.split(",")[0] for row in lines[setting]}
        return len(methods) > 1, len(methods), setting.steps, setting.betas == BETAS

    by_size = {size: max((s for s in lines if s.size == size), key=worth) for size in {s.size for s in lines}}
    several = [setting for setting in by_size.values() if worth(setting)[0]]
    drawn = sorted(several, key=lambda setting: -float(setting.size[:-1]))[:2]
    if not drawn:
        return
    figure, axes = plt.subplots(len(drawn), 3, figsize=(15, 4 * len(drawn)), squeeze=False)
    for setting, three in zip(drawn, axes, strict=True):
        plot_setting(plain, lines[setting], three)
        three[1].set_title(setting.title, fontsize="medium")
    save(figure, out / "loss.png")


def plot_setting(found: list[dict[str, Any]], rows: list[Row], axes: Iterable[Any]) -> None:
    """One setting's three plots."""
    over_steps, over_bytes, above = axes
    over_bytes.sharey(over_steps)
    dense: dict[int, list[dict[str, float]]] = {}
    for row in sorted(rows, key=lambda row: row.label != "dense AdamW"):
        history = {run_of(r).seed: r["history"] for r in found if row.is_of(run_of(r))}
        dense = history if row.label == "dense AdamW" else dense
        look = {"label": f"{row.label}, lr {row.lr:g}, seeds: {len(history)}", "color": f"C{len(over_steps.lines)}"}
        first = next(iter(history.values()))
        steps, losses = [h["step"] for h in first], mean_over(history.values())
        over_steps.plot(steps, losses, **look)
        over_bytes.plot([h["bytes"] for h in first], losses, **look)
        if shared := dense.keys() & history.keys():
            mine, theirs = (mean_over(each[seed] for seed in shared) for each in (history, dense))
            above.plot(steps, [100 * (loss / base - 1) for loss, base in zip(mine, theirs, strict=True)], **look)
    over_steps.set(xlabel="step", ylabel="validation loss (nats per byte)")
    over_bytes.set(xlabel="bytes sent by a rank", xscale="log")
    above.set(xlabel="step", ylabel="loss above AdamW, %")
    over_steps.legend(fontsize="small")


def mean_over(histories: Iterable[list[dict[str, float]]]) -> list[float]:
    """The loss over several seeds, evaluation by evaluation."""
    return [statistics.mean(h["loss"] for h in at) for at in zip(*histories, strict=True)]


GAP_STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("", {}),
    "AdamS's update, no warm-up": ("AdamS", {"markerfacecolor": "white"}),
    "AdamS's update, no warm-up, catch_up=summed": ("AdamS, summed", {"markerfacecolor": "white", "linestyle": "--"}),
}


def plot_gaps(rows: list[Row], out: Path) -> None:
    """How far SCAPE is behind dense AdamS, over updates per entry, where AdamS has run.

    Filled marks stand for the update of AdamW with the default warm-up. Hollow ones stand for the update of AdamS
    without a warm-up. Dashed lines stand for `catch_up="summed"`.
    """
    bases = {row.setting: row for row in rows if row.label == "dense AdamS"}
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        name, _, rest = row.label.partition(", ")
        if row.setting in bases and name.startswith("SCAPE") and rest in GAP_STYLES:
            mine, theirs = row.shared_with(bases[row.setting])
            if mine:
                gap = 100 * (statistics.mean(mine) / statistics.mean(theirs) - 1)
                where = f"{row.setting.size}, {row.setting.ranks} x {row.setting.batch}"
                points[name, rest, where].append((row.updates, gap))
    if not points:
        return
    labels = sorted({name for name, _, _ in points})
    places = sorted({where for _, _, where in points})
    figure, axis = plt.subplots(figsize=(10, 5))
    for (name, rest, where), pairs in sorted(points.items()):
        short, look = GAP_STYLES[rest]
        style = {"color": f"C{places.index(where)}", "marker": "soD^v"[labels.index(name) % 5], **look}
        label = ", ".join(filter(None, (name, where, short)))
        axis.plot(*zip(*sorted(pairs), strict=True), label=label, **style)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set(xlabel="updates per entry", ylabel="loss above dense AdamS, %", xscale="log")
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small")
    save(figure, out / "gap.png")


def plot_rates(found: list[dict[str, Any]], out: Path) -> None:
    """Loss over the learning rate, in the setting in which most rates were tried, if several were."""
    tried: dict[Any, dict[str, dict[float, list[dict[str, Any]]]]]
    tried = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for result in found:
        run = run_of(result)
        if is_plain(run) and run.task == "python":
            tried[run.setting][run.label][run.lr].append(result)
    if not tried:
        return
    several = {
        setting: {label: rates for label, rates in sorted(methods.items()) if len(rates) > 1}
        for setting, methods in tried.items()
    }
    setting, methods = max(several.items(), key=lambda item: (sum(map(len, item[1].values())), item[0].steps))
    if not methods:
        return
    figure, axis = plt.subplots(figsize=(11, 4))
    for label, rates in methods.items():
        axis.plot(*zip(*sorted(mean_losses(rates).items()), strict=True), marker="o", label=label)
    axis.set(xlabel="learning rate", ylabel="validation loss (nats per byte)", xscale="log")
    figure.suptitle(f"{setting.title}; on the seeds that all rates share", fontsize="medium")
    axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small")
    save(figure, out / "rates.png")


def is_plain(run: Run) -> bool:
    """Whether nothing but the sparsity, its warm-up, the update and the way of catching up is chosen."""
    options = dict(run.options)
    wire = options.pop("wire_dtype", None)
    usual = wire in (None, USUAL_WIRE[options.get("update", "adamw")])
    return usual and options.keys() <= {"sparsity", "sparsity_warmup_steps", "update", "catch_up"}


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
