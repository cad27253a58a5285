"""Is it really faster? Lightning jobs between hosts with rate-limited links: seconds, and bytes on the wire.

    sudo python examples/benchmarks/two_hosts.py steps           # seconds of a step: 15 minutes of two quiet cores
    sudo python examples/benchmarks/two_hosts.py runs            # whole runs, the loss too: half a day, nothing beside
    sudo python examples/benchmarks/two_hosts.py steps --short   # a few steps of a tiny model: does it work here?
    sudo python examples/benchmarks/two_hosts.py steps --ranks-per-host 2 --methods compute hsdp scape-0.99 nodes-0.99
    sudo python examples/benchmarks/two_hosts.py steps --model pythia-31m

Hosts are network namespaces (see namespaces.py), one rank each, pinned to a core with one thread. Steps of all methods
take turns in the same processes. Whole runs come one after the other, on a machine that does nothing else: compute only
is the first and, again, the last, and if these two differ by more than 3%, the table says that it must be made again.

A method is a name and its numbers: compute (no messages), ddp, ddp-bf16, zero1 (torch's ZeroRedundancyOptimizer),
powersgd-RANK (bf16), fsdp, hsdp, scape-SPARSITY[-WIRE], nodes-SPARSITY (SCAPE with local_group_size="node"),
sparseloco-STEPS; in runs also demo (of pytorch-optimizer) and diloco-STEPS (torchft's, AdamW inside), with the extra
`benchmarks`. DeMo's learning rate and that of DiLoCo's outer optimizer are the best of three: all are tried at the
first link, the best goes on. --rates demo=0.001 diloco-15=0.7 gives them in place of that.

"Sent" is what the interface of the host that sends most has counted, headers included. "Counted / payload" is what the
package counted of it, over what is no header (and, in runs, not sent by compute as well).

steps: random tokens, torch's fused AdamW for the dense methods, clipping at 1.0, SCAPE without a warm-up. SparseLoCo's
step is the mean over a window. runs: the 3M model of pretrain_python.py, its data and settings: 1,200 steps, twelve
validations, a checkpoint after each. A method whose messages alone would last longer than --timeout at a link, by what
it sent at the one before, is left out there. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import record
import torch
from namespaces import Hosts, bits_per_second, missing, run_ranks

RANKS = str(Path(__file__).with_name("two_hosts_ranks.py"))
STEPS = ["compute", "ddp", "ddp-bf16", "zero1", "powersgd-4", "fsdp", "scape-0.9", "scape-0.99", "sparseloco-30"]
RUNS = ["compute", "ddp", "ddp-bf16", "zero1", "powersgd-4", "demo", "diloco-15"]
RUNS += ["scape-0.9", "scape-0.99", "sparseloco-15"]
PACKAGES = {"demo": "pytorch_optimizer", "diloco": "torchft"}
RATES = {"demo": [3e-4, 1e-3, 3e-3], "diloco": [0.4, 0.7, 1.0]}
"""That are tried, of methods that have a learning rate of their own."""
DRIFT = 0.03
"""By which compute only may differ before and after all others."""
VALIDATIONS = 12
MARGIN = 1.02
"""A run has come far enough when its loss is at most this times the final one of DDP, which is AdamW's."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "steps": {"model": "pythia-14m", "methods": STEPS, "links": ["10gbit", "1gbit", "100mbit"]},
    "runs": {"model": "3M", "methods": RUNS, "links": ["1gbit", "100mbit", "10mbit"]},
}
SHORT: dict[str, dict[str, Any]] = {
    "steps": {"model": "tiny", "links": ["1gbit"], "rounds": 1, "most": 3, "context": 128},
    "runs": {"model": "0.03M", "links": ["1gbit"], "steps": 24, "context": 32, "validated": 2},
}


def label(method: str) -> str:
    """A method's name in tables."""
    kind, _, rest = method.partition("-")
    number, _, wire = rest.partition("-")
    named = {"compute": "compute only", "ddp": "DDP fp32", "zero1": "ZeRO-1", "fsdp": "FSDP", "hsdp": "HSDP"}
    named |= {"demo": "DeMo"}
    if method in named:
        return named[method]
    if kind in ("scape", "nodes"):
        text = f"SCAPE {float(number):.1%}".replace(".0%", "%") + (f", values in {wire}" if wire else "")
        return text if kind == "scape" else f'{text}, local_group_size="node"'
    return {
        "ddp": f"DDP, {rest} hook",
        "powersgd": f"DDP, PowerSGD of rank {number} in bf16",
        "diloco": f"DiLoCo every {number} steps",
        "sparseloco": f"SparseLoCo every {number} steps",
    }[kind]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=list(DEFAULTS), help="single steps, or whole runs")
    add("--model", help="steps: a LitGPT configuration; runs: a size of quality_runs.py")
    add("--links", nargs="+", help="rates of the links: 10gbit, 100mbit, ...")
    add("--methods", nargs="+", help="see above")
    add("--hosts", type=int, default=2, help="more than two are joined by a switch")
    add("--ranks-per-host", type=int, default=1, help="they share the host's core and link")
    add("--rounds", type=int, default=2, help="steps: times that all methods take their turn")
    add("--steps", type=int, default=1200, help="runs: of a run")
    add("--seed", type=int, default=0)
    add("--rates", nargs="+", default=[], metavar="METHOD=RATE", help="runs: learning rates, in place of trying three")
    add("--timeout", type=float, default=3600, help="seconds for a round of steps, or a run")
    add("--short", action="store_true", help="a few steps of a tiny model at one link")
    add("--report", action="store_true", help="only write tables and plots of what is there")
    record.add_options(parser)
    args = parser.parse_args()
    given = DEFAULTS[args.what] | {"most": 16, "context": 128, "validated": 40}
    if args.short:
        given |= SHORT[args.what]
        args.rounds, args.steps = given.get("rounds", args.rounds), given.get("steps", args.steps)
    for name, value in given.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    try:
        for link, method in ((link, method) for link in args.links for method in args.methods):
            bits_per_second(link), label(method)
        args.rates = {method: [float(rate)] for method, _, rate in (each.partition("=") for each in args.rates)}
    except (KeyError, ValueError) as error:
        parser.error(f"--links must be rates such as 1gbit, --methods of those above, --rates numbers, got {error}")
    kinds = {method.partition("-")[0] for method in args.methods}
    if args.what == "steps" and kinds & PACKAGES.keys():
        parser.error(
            f"--methods of steps must synchronize gradients, got {', '.join(kinds & PACKAGES.keys())}: see runs"
        )
    if lacking := [PACKAGES[kind] for kind in kinds & PACKAGES.keys() if not importlib.util.find_spec(PACKAGES[kind])]:
        parser.error(f"--methods need {', '.join(lacking)}, not installed here. Run pip install -e '.[benchmarks]'")
    if args.what == "runs" and (args.steps < 1 or args.steps % VALIDATIONS):
        parser.error(f"--steps must be a multiple of {VALIDATIONS}, the number of validations, got {args.steps}")
    args.out = record.folder(args)
    return args


# ----------------------------------------------------------------------------------------------------------- measuring

Row = dict[str, Any]


def measure(args: argparse.Namespace, hosts: Hosts, link: str, sent: dict[str, float]) -> Iterator[tuple[str, Row]]:
    """Each method's row at this link. ``sent`` is what runs have sent at the link before, and is brought up to date."""
    hosts.set_rate(link)
    if args.what == "steps":
        found = [launch(args, hosts, args.methods, str(index)) for index in range(args.rounds)]
        for method in args.methods:
            yield method, row_of_steps([rank[method] for each in found for rank in each])
        return
    first: Row = {}
    for method in args.methods:
        if (least := 8 * sent.get(method, 0) / bits_per_second(link)) > args.timeout:
            print(f"{link} {method} is left out: its messages alone would take {least:,.0f} s")
            continue
        rates = args.rates.get(method) or RATES.get(method.partition("-")[0], [None])
        tried = {rate: whole_run(args, hosts, method, rate) for rate in rates}
        best = min(tried, key=lambda rate: tried[rate]["loss"])
        row, args.rates[method] = tried[best], [best]
        if best is not None:
            row["rates"] = [[rate, tried[rate]["loss"]] for rate in [best, *(rate for rate in rates if rate != best)]]
        first, sent[method] = row if method == "compute" else first, row["sent"]
        yield method, row
    if first:
        yield "compute", first | {"again": whole_run(args, hosts, "compute", None)["seconds"]}


def whole_run(args: argparse.Namespace, hosts: Hosts, method: str, rate: float | None) -> Row:
    """Its row."""
    row = row_of_run([rank[method] for rank in launch(args, hosts, [method], method, rate)])
    print(f"{hosts.rate} {method} {rate or ''}: {row['seconds']:,.0f} s, loss {row['loss']:.4f}", flush=True)
    return row


def launch(
    args: argparse.Namespace, hosts: Hosts, methods: list[str], name: str, rate: float | None = None
) -> list[dict[str, Any]]:
    """All ranks of one job; what each says of the methods."""
    given = {name: getattr(args, name) for name in ("what", "model", "most", "context", "steps", "seed", "validated")}
    given |= {"ranks_per_host": args.ranks_per_host, "validations": VALIDATIONS, "methods": methods, "rate": rate}
    logs = args.out / "logs" / f"{args.what}-{name}"
    logs.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [RANKS, json.dumps({**given, "name": name, "folder": folder})]
        run_ranks(hosts, command, logs, args.timeout, ranks_per_host=args.ranks_per_host)
        return list(json.loads(Path(folder, f"{name}.json").read_text()))


def row_of_steps(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's steps, over all ranks and rounds."""
    seconds = sorted(second for rank in ranks for second in rank["seconds"])
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    mean = {name: statistics.mean(rank[name] for rank in ranks) for name in ("sent", "headers")}
    return {
        "seconds": statistics.median(seconds),
        "quartiles": [quartiles[0], quartiles[2]],
        "steps": len(seconds),
        **mean,
        "counted": ranks[0]["counted"],
    }


def row_of_run(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One whole run: the seconds of the slowest rank, the bytes of the one that sends most, rank 0's losses."""
    sender = max(ranks, key=lambda rank: rank["sent"])
    pairs = zip(ranks[0]["points"], sender["points"], strict=True)
    points = [[mine["step"], round(mine["seconds"], 1), each["sent"], round(mine["loss"], 5)] for mine, each in pairs]
    most = {name: max(rank[name] for rank in ranks) for name in ("seconds", "validating", "saving")}
    return {
        **most,
        **{name: sender[name] for name in ("sent", "headers", "counted")},
        "loss": ranks[0]["points"][-1]["loss"],
        "curve": points,
    }


# ---------------------------------------------------------------------------------------------------------- the report

Cell = dict[str, Row]
"""Rows of one model at one link, measured together, by method."""
ORDER = ["compute", "ddp", "zero1", "fsdp", "hsdp", "powersgd", "demo", "diloco", "scape", "nodes", "sparseloco"]


def in_order(method: str) -> tuple[Any, ...]:
    """The order of methods in tables."""
    kind, _, rest = method.partition("-")
    return ORDER.index(kind), len(rest), rest


def cells_of(rows: Iterable[dict[str, Any]]) -> list[Cell]:
    """Rows that were measured in one call at one link, with one seed; the oldest first."""
    found: dict[tuple[Any, ...], Cell] = {}
    for row in sorted(rows, key=lambda row: in_order(row["settings"]["method"])):
        at = row["settings"]
        key = row["date"], at["model"], at["hosts"], at["ranks_per_host"], -bits_per_second(at["link"]), row["seed"]
        found.setdefault(key, {})[at["method"]] = row
    return [cell for _, cell in sorted(found.items())]


def alone(cell: Cell) -> float:
    """Seconds of compute only: in runs, the mean of before and after."""
    row = cell["compute"]
    return statistics.mean([row["seconds"], row.get("again", row["seconds"])])


def drifts(cells: list[Cell]) -> list[str]:
    """A sentence for each link at which compute only took another time after the others than before, or never ran."""
    found = []
    for (method, link), (row, _) in newest_of(cells).items():
        if method == "compute" and "curve" in row:
            before, after = row["seconds"], row.get("again")
            if after is None or abs(after / before - 1) > DRIFT:
                took = "did not run" if after is None else f"took {after:,.1f} s"
                found.append(
                    f"**To be made again**: at {link}/s compute only took {before:,.1f} s before the others and {took}"
                    f" after them, which may differ by {DRIFT:.0%}."
                )
    return found


def newest_of(cells: list[Cell]) -> dict[tuple[str, str], tuple[Row, Cell]]:
    """By method and link: the newest row, and what was measured with it."""
    return {
        (row["settings"]["method"], row["settings"]["link"]): (row, cell) for cell in cells for row in cell.values()
    }


def agreement(row: dict[str, Any], cell: Cell) -> float | None:
    """The package's count over the interface's, less headers and what a run of compute only sends; None: not known."""
    nothing = {"sent": 0.0, "headers": 0.0}
    compute = cell.get("compute", nothing) if "curve" in row else nothing
    if not row["counted"] or row["headers"] is None or compute["headers"] is None:
        return None
    return float(row["counted"] / (row["sent"] - row["headers"] - (compute["sent"] - compute["headers"])))


def seconds_to(loss: float, curve: list[list[float]]) -> float | None:
    """When a run's loss is first at most ``loss``, between two validations by a line; None: never."""
    for before, after in zip([None, *curve], curve, strict=False):
        if after[3] <= loss:
            if before is None:
                return after[1]
            share = (before[3] - loss) / (before[3] - after[3])
            return before[1] + share * (after[1] - before[1])
    return None


def table(cells: list[Cell]) -> str:
    """A line a method; for each link its seconds in the newest call, over those of compute only in the same call."""
    links = sorted({row["settings"]["link"] for cell in cells for row in cell.values()}, key=bits_per_second)[::-1]
    newest = newest_of(cells)
    losses = {(method, row["seed"]): row.get("loss") for cell in cells for method, row in cell.items()}
    runs = any(losses.values())
    lines, made_of = [], []
    for method in sorted({method for method, _ in newest}, key=in_order):
        mine = {link: newest[method, link] for link in links if (method, link) in newest}
        row, cell = [*mine.values()][-1]  # of the slowest link
        counted = agreement(row, cell)
        counts = [f"{row['sent'] / 1e6:,.{0 if runs else 2}f}", "-" if counted is None else f"{counted:.3f}"]
        shown = [show(*mine[link], losses) if link in mine else "-" for link in links]
        lines.append([label(method), *(gaps(method, losses) if runs else []), *counts, *shown])
        made_of.append([row for row, _ in mine.values()])
    head = ["seeds", "final loss above DDP's"] if runs else []
    named = [link.replace("bit", "bit/s") for link in links]
    return record.table(["method", *head, "sent by a host, MB", "counted / payload", *named], lines, made_of)


def gaps(method: str, losses: dict[tuple[str, int], float | None]) -> list[str]:
    """Seeds, and how far the loss is above DDP's: the mean over them, with its standard error."""
    seeds = [seed for name, seed in losses if name == method and losses.get(("ddp", seed))]
    found = [100 * (losses[method, seed] / losses["ddp", seed] - 1) for seed in seeds]  # type: ignore[operator]
    if method in ("compute", "ddp") or not found:
        return [str(len(seeds)) if seeds else "-", "-"]
    error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.1f}" if len(found) > 1 else ""
    return [str(len(found)), f"{statistics.mean(found):+.1f}%{error}"]


def show(row: dict[str, Any], cell: Cell, losses: dict[tuple[str, int], float | None]) -> str:
    """A row's seconds: of a step, or of a run and until it has come far enough."""
    ratio = f" ({row['seconds'] / alone(cell):.2f}x)" if "compute" in cell else ""
    if "curve" not in row:
        return f"{1e3 * row['seconds']:,.0f} ms{ratio}"
    dense = losses.get(("ddp", row["seed"]))
    if row["settings"]["method"] == "compute" or dense is None:
        return f"{row['seconds']:,.0f} s{ratio}"
    reached = seconds_to(MARGIN * dense, row["curve"])
    return f"{row['seconds']:,.0f} s{ratio}; {'never' if reached is None else f'{reached:,.0f} s'}"


PLANNED = {"ddp": "DDP fp32", "ddp-bf16": "DDP bf16", "scape-0.9": "SCAPE 90%", "scape-0.99": "SCAPE 99%"}
PLANNED |= {f"sparseloco-{steps}": "SparseLoCo, H=30" for steps in (15, 30)}
"""What `plan` calls them; an exchange every 15 steps takes as long as one every 30, to its precision."""
NOTES = {
    "steps": "Medians. In brackets: over compute only in the same call. No warm-up of the sparsity.",
    "runs": "A whole run, in brackets over compute only in the same call; then: until DDP's final loss + 2%.",
}


def planned(cells: list[Cell]) -> list[str]:
    """Of each newest cell with one rank a host: what `lightning-scape plan` names for it, and what was the fastest.

    Both are the first, from DDP on, that takes at most a tenth longer than the shortest.
    """
    from lightning_scape.tools import plan

    found = {}
    for cell in cells:
        names = {name: row["seconds"] for method, row in cell.items() if (name := PLANNED.get(method))}
        at = next(iter(cell.values()))["settings"]
        numels = numels_of(at["model"], at["context"], runs="steps" in at)
        if "compute" not in cell or len(names) < 2 or at["ranks_per_host"] > 1 or not numels:
            continue
        steps = at.get("steps", 1)
        rows = plan.plan(numels, at["hosts"], bits_per_second(at["link"]) / 8, alone(cell) / steps, steps)
        rows = [row if "steps" in at else row._replace(run_seconds=row.step_seconds) for row in rows]
        rows = [row for row in rows if row.method in names]
        measured = [row._replace(run_seconds=names[row.method]) for row in rows]
        named, fastest = plan.advised(rows).method, plan.advised(measured).method
        was = "which was the fastest" if named == fastest else f"but {fastest} was the fastest"
        found[at["link"]] = f"At {at['link']}/s `plan` names {named}, {was}."
    return list(found.values())


def numels_of(model: str, context: int, *, runs: bool) -> list[int]:
    """Entries of each parameter of a cell's model; none where it has no name that `plan` knows."""
    from quality_tasks import build_gpt

    from lightning_scape.tools import plan

    if not runs:
        return [] if model == "tiny" else plan.numels_of(model)
    with torch.device("meta"):
        return [parameter.numel() for parameter in build_gpt(model, context).parameters()]


def tried(cells: list[Cell]) -> list[str]:
    """The loss at every learning rate that a method was tried at."""
    found = {}
    for row in (row for cell in cells for row in cell.values() if len(row.get("rates", [])) > 1):
        losses = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(row["rates"]))
        name = label(row["settings"]["method"])
        found[name] = f"{name}, by {'outer ' if name.startswith('DiLoCo') else ''}learning rate: {losses}."
    return list(found.values())


def plot_steps(cells: list[Cell], path: Path) -> None:
    """Seconds of a step over those of compute only in the same call, by the link's bandwidth."""
    from matplotlib import pyplot as plt

    found: dict[str, list[tuple[float, float]]] = {}
    for (method, link), (row, cell) in newest_of(cells).items():
        if "compute" in cell:
            found.setdefault(method, []).append((bits_per_second(link), row["seconds"] / alone(cell)))
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method in sorted(found, key=in_order):
        style = {"color": "black", "linestyle": "--"} if method == "compute" else {"marker": "o"}
        axis.plot(*zip(*sorted(found[method]), strict=True), label=label(method), **style)
    axis.set(xscale="log", yscale="log", xlabel="bandwidth of the link, bit/s", ylabel="a step over compute only")
    axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=90)


def plot_runs(cells: list[Cell], path: Path) -> None:
    """Validation loss over the seconds and over the bytes, by link; the line is what counts as far enough."""
    from matplotlib import pyplot as plt

    newest = {key: row for key, (row, _) in newest_of(cells).items()}
    links = sorted({link for method, link in newest if method == "compute"}, key=bits_per_second)[::-1]
    shown = {"nrows": len(links), "ncols": 2, "figsize": (12, 4.5 * len(links))}
    figure, axes = plt.subplots(**shown, layout="constrained", squeeze=False)
    colors = plt.get_cmap("tab20").colors
    color = dict(zip(sorted({method for method, _ in newest}, key=in_order), colors, strict=False))
    for link, (over_time, over_bytes) in zip(links, axes, strict=True):
        for method in sorted((method for method, at in newest if at == link and method != "compute"), key=in_order):
            row = newest[method, link]
            style = {"color": "black", "linestyle": "--"} if method == "ddp" else {"color": color[method]}
            style |= {"label": label(method), "linewidth": 3 if method.startswith("scape") else 1.5}
            _, seconds, sent, losses = zip(*row["curve"], strict=True)
            over_time.plot(seconds, losses, **style)
            over_bytes.plot([each / 1e6 for each in sent], losses, **style)
        lowest = min(row["curve"][-1][3] for row in newest.values())
        for axis, what in ((over_time, "seconds"), (over_bytes, "MB sent by a host")):
            if ("ddp", link) in newest:
                axis.axhline(MARGIN * newest["ddp", link]["loss"], color="grey", linewidth=0.5)
            axis.set(xscale="log", xlabel=what, ylabel="validation loss (nats per byte)", title=link)
            axis.set_ylim(0.97 * lowest, 1.8 * lowest)
            axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=80)


def report(what: str, rows: Iterable[Row], out: Path) -> list[str]:
    """A table and a picture for each model and number of ranks; what is wrong with them."""
    import matplotlib

    matplotlib.use("Agg")
    by_setting: dict[str, list[Row]] = {}
    for row in rows:
        at = row["settings"]
        by_setting.setdefault(f"{what}-{at['model']}-{at['hosts']}x{at['ranks_per_host']}", []).append(row)
    wrong = []
    for name, found in by_setting.items():
        cells = cells_of(found)
        drifted = drifts(cells)
        wrong += drifted
        notes = " ".join([NOTES[what], *tried(cells), *planned(cells), *drifted])
        command = f"sudo python examples/benchmarks/two_hosts.py {what}"
        record.write_table(out / f"{name}.md", "\n\n".join([table(cells), notes, record.made_by(command, found)]))
        if any("compute" in cell for cell in cells):
            (plot_steps if what == "steps" else plot_runs)(cells, out / f"{name}.png")
    return wrong


def main() -> int:
    args = parse_arguments()
    rows = record.Rows(args.out / f"{args.what}.json")
    if not args.report:
        if problem := missing():
            print(f"error: two_hosts.py needs {problem}", file=sys.stderr)
            return 2
        origin, sent = record.origin(args.dirty), {}
        with Hosts(args.hosts, args.links[0]) as hosts:
            for link in args.links:
                for method, row in measure(args, hosts, link, sent):
                    names = ["model", "hosts", "ranks_per_host", "context"]
                    settings = {name: getattr(args, name) for name in names} | {"link": link, "method": method}
                    settings |= {"rounds": args.rounds} if args.what == "steps" else {"steps": args.steps}
                    name = f"{args.model} {args.hosts}x{args.ranks_per_host} {link} {method} seed{args.seed}"
                    rows.add([{"name": name, "seed": args.seed, "settings": settings} | row | origin])
                    print(f"{link} {method}: {row['seconds']:.3f} s, {row['sent'] / 1e6:.2f} MB", flush=True)
    wrong = report(args.what, rows, args.out)
    return 1 if wrong and not args.short else 0


if __name__ == "__main__":
    sys.exit(main())
