"""Is it really faster? Lightning jobs between hosts with rate-limited links: seconds, and bytes on the wire.

    sudo python examples/benchmarks/two_hosts.py steps           # seconds of a step: 15 minutes of two quiet cores
    sudo python examples/benchmarks/two_hosts.py runs            # whole runs, the loss too: about two hours
    sudo python examples/benchmarks/two_hosts.py steps --short   # a few steps of a tiny model: does it work here?
    sudo python examples/benchmarks/two_hosts.py steps --ranks-per-host 2 --methods compute hsdp scape-0.99 nodes-0.99
    sudo python examples/benchmarks/two_hosts.py runs --links 10mbit --methods compute scape-0.99 sparseloco-15

Hosts are network namespaces (see namespaces.py), one rank each, pinned to a core with one thread.
All methods at a link take turns, so that whatever else the machine does falls on all alike: step by step in
the same processes, or whole runs from one validation to the next, while the others wait and their clocks stand still.

A method is a name and its numbers: compute (no messages), ddp, ddp-bf16, powersgd-RANK, fsdp, hsdp,
scape-SPARSITY[-WIRE], nodes-SPARSITY (SCAPE with local_group_size="node"), sparseloco-STEPS.

"Sent" is what the interface of the host that sends most has counted, headers included. "Counted / payload" is what the
package counted of it, over what is no header (and, in runs, not sent by compute as well).

steps: random tokens, torch's fused AdamW for the dense methods, clipping at 1.0, SCAPE without a warm-up. SparseLoCo's
step is the mean over a window. runs: the 3M model of pretrain_python.py, its data and settings: 1,200 steps, twelve
validations, a checkpoint after each. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import record
from namespaces import Hosts, bits_per_second, missing, run_ranks

RANKS = str(Path(__file__).with_name("two_hosts_ranks.py"))
STEPS = ["compute", "ddp", "ddp-bf16", "powersgd-1", "fsdp", "scape-0.9", "scape-0.99", "sparseloco-30"]
RUNS = ["compute", "ddp", "ddp-bf16", "powersgd-1", "scape-0.9", "scape-0.99", "sparseloco-5", "sparseloco-15"]
VALIDATIONS = 12
MARGIN = 1.02
"""A run has come far enough when its loss is at most this times the final one of DDP, which is AdamW's."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "steps": {"model": "pythia-14m", "methods": STEPS, "links": ["10gbit", "1gbit", "100mbit"]},
    "runs": {"model": "3M", "methods": RUNS, "links": ["1gbit", "100mbit"]},
}
SHORT: dict[str, dict[str, Any]] = {
    "steps": {"model": "tiny", "links": ["1gbit"], "rounds": 1, "most": 3, "context": 128},
    "runs": {"model": "0.03M", "links": ["1gbit"], "steps": 24, "context": 32, "validated": 2},
}


def label(method: str) -> str:
    """A method's name in tables."""
    kind, _, rest = method.partition("-")
    number, _, wire = rest.partition("-")
    named = {"compute": "compute only", "ddp": "DDP fp32", "fsdp": "FSDP", "hsdp": "HSDP"}
    if method in named:
        return named[method]
    if kind in ("scape", "nodes"):
        text = f"SCAPE {float(number):.1%}".replace(".0%", "%") + (f", values in {wire}" if wire else "")
        return text if kind == "scape" else f'{text}, local_group_size="node"'
    return {
        "ddp": f"DDP, {rest} hook",
        "powersgd": f"DDP, PowerSGD of rank {number}",
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
    add("--timeout", type=float, default=3600, help="seconds for one link")
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
    except (KeyError, ValueError) as error:
        parser.error(f"--links must be rates such as 1gbit, --methods of those above, got {error}")
    if args.what == "runs" and (args.steps < 1 or args.steps % VALIDATIONS):
        parser.error(f"--steps must be a multiple of {VALIDATIONS}, the number of validations, got {args.steps}")
    args.out = record.folder(args)
    return args


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(args: argparse.Namespace, hosts: Hosts, link: str) -> dict[str, list[dict[str, Any]]]:
    """What the ranks say of each method at this link."""
    hosts.set_rate(link)
    given = {name: getattr(args, name) for name in ("what", "model", "most", "context", "steps", "seed", "validated")}
    given |= {"ranks_per_host": args.ranks_per_host, "validations": VALIDATIONS, "timeout": args.timeout}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.what == "steps":
            for index in range(args.rounds):
                launch(args, hosts, folder, {**given, "methods": args.methods, "name": str(index)})
                print(f"{link}: round {index + 1} of {args.rounds} has ended", flush=True)
            found = [json.loads((folder / f"{index}.json").read_text()) for index in range(args.rounds)]
            return {method: [rank[method] for each in found for rank in each] for method in args.methods}
        in_turns(args, hosts, folder, given)
        runs = {method: json.loads((folder / f"{method}.json").read_text()) for method in args.methods}
        return {method: [rank[method] for rank in ranks] for method, ranks in runs.items()}


def launch(args: argparse.Namespace, hosts: Hosts, folder: Path, given: dict[str, Any], port: int = 29500) -> None:
    """All ranks of one job; ends when all have."""
    logs = args.out / "logs" / f"{args.what}-{given['name']}"
    logs.parent.mkdir(parents=True, exist_ok=True)
    command = [RANKS, json.dumps({**given, "folder": str(folder)})]
    run_ranks(hosts, command, logs, args.timeout, ranks_per_host=args.ranks_per_host, port=port)


def in_turns(args: argparse.Namespace, hosts: Hosts, folder: Path, given: dict[str, Any]) -> None:
    """Runs of all methods, a part of each at a time. A rank's file says that its part has ended, ours who is next."""
    ranks = range(len(hosts) * args.ranks_per_host)
    with ThreadPoolExecutor(len(args.methods)) as pool:
        runs = [
            pool.submit(launch, args, hosts, folder, {**given, "methods": [method], "name": method}, 29500 + place)
            for place, method in enumerate(args.methods)
        ]

        def wait(method: str, part: int) -> None:
            while not all((folder / f"{method}-{part}-{rank}").exists() for rank in ranks):
                if failed := [run for run in runs if run.done() and run.exception()]:
                    hosts.kill_all()
                    failed[0].result()
                time.sleep(0.1)

        for method in args.methods:
            wait(method, 0)  # it is set up
        for part in range(1, VALIDATIONS + 1):
            for method in args.methods:
                (folder / f"{method}-{part}").touch()
                wait(method, part)
            print(f"part {part} of {VALIDATIONS} of all runs has ended", flush=True)
        for run in runs:
            run.result()


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

Cell = dict[str, dict[str, Any]]
"""Rows of one model at one link, measured together, by method."""
ORDER = ["compute", "ddp", "powersgd", "fsdp", "hsdp", "scape", "nodes", "sparseloco"]


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


def newest_of(cells: list[Cell]) -> dict[tuple[str, str], tuple[dict[str, Any], Cell]]:
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
    lines = []
    for method in sorted({method for method, _ in newest}, key=in_order):
        mine = {link: newest[method, link] for link in links if (method, link) in newest}
        row, cell = [*mine.values()][-1]  # of the slowest link
        counted = agreement(row, cell)
        counts = [f"{row['sent'] / 1e6:,.{0 if runs else 2}f}", "-" if counted is None else f"{counted:.3f}"]
        shown = [show(*mine[link], losses) if link in mine else "-" for link in links]
        lines.append([label(method), *(gaps(method, losses) if runs else []), *counts, *shown])
    head = ["seeds", "final loss above DDP's"] if runs else []
    named = [link.replace("bit", "bit/s") for link in links]
    return record.table(["method", *head, "sent by a host, MB", "counted / payload", *named], lines)


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
    ratio = f" ({row['seconds'] / cell['compute']['seconds']:.2f}x)" if "compute" in cell else ""
    if "curve" not in row:
        return f"{1e3 * row['seconds']:,.0f} ms{ratio}"
    dense = losses.get(("ddp", row["seed"]))
    if row["settings"]["method"] == "compute" or dense is None:
        return f"{row['seconds']:,.0f} s{ratio}"
    reached = seconds_to(MARGIN * dense, row["curve"])
    return f"{row['seconds']:,.0f} s{ratio}; {'never' if reached is None else f'{reached:,.0f} s'}"


NOTES = {
    "steps": "Medians. In brackets: over compute only in the same call. No warm-up of the sparsity.",
    "runs": "A whole run, in brackets over compute only in the same call; then: until DDP's final loss + 2%.",
}


def plot_steps(cells: list[Cell], path: Path) -> None:
    """Seconds of a step over those of compute only in the same call, by the link's bandwidth."""
    from matplotlib import pyplot as plt

    found: dict[str, list[tuple[float, float]]] = {}
    for (method, link), (row, cell) in newest_of(cells).items():
        if "compute" in cell:
            found.setdefault(method, []).append((bits_per_second(link), row["seconds"] / cell["compute"]["seconds"]))
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method in sorted(found, key=in_order):
        style = {"color": "black", "linestyle": "--"} if method == "compute" else {"marker": "o"}
        axis.plot(*zip(*sorted(found[method]), strict=True), label=label(method), **style)
    axis.set(xscale="log", yscale="log", xlabel="bandwidth of the link, bit/s", ylabel="a step over compute only")
    axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=90)


def plot_runs(cells: list[Cell], path: Path) -> None:
    """Validation loss over the seconds, as parts of a whole run of compute only, and over the bytes; by link."""
    from matplotlib import pyplot as plt

    newest = {
        key: (row, cell["compute"]["seconds"]) for key, (row, cell) in newest_of(cells).items() if "compute" in cell
    }
    links = sorted({link for _, link in newest}, key=bits_per_second)[::-1]
    shown = {"nrows": len(links), "ncols": 2, "figsize": (12, 4.5 * len(links))}
    figure, axes = plt.subplots(**shown, layout="constrained", squeeze=False)
    for link, (over_time, over_bytes) in zip(links, axes, strict=True):
        for method in sorted((method for method, at in newest if at == link and method != "compute"), key=in_order):
            row, alone = newest[method, link]
            style: dict[str, Any] = {"color": "black", "linestyle": "--"} if method == "ddp" else {}
            style |= {"label": label(method), "linewidth": 3 if method.startswith("scape") else 1.5}
            _, seconds, sent, losses = zip(*row["curve"], strict=True)
            over_time.plot([second / alone for second in seconds], losses, **style)
            over_bytes.plot([each / 1e6 for each in sent], losses, **style)
        lowest = min(row["curve"][-1][3] for row, _ in newest.values())
        for axis, what in ((over_time, "seconds, over a whole run of compute only"), (over_bytes, "MB sent by a host")):
            axis.set(xscale="log", xlabel=what, ylabel="validation loss (nats per byte)", title=link)
            axis.set_ylim(0.97 * lowest, 1.8 * lowest)
            axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=80)


def report(args: argparse.Namespace, rows: record.Rows) -> None:
    """A table and a picture for each model and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        at = row["settings"]
        by_setting.setdefault(f"{args.what}-{at['model']}-{at['hosts']}x{at['ranks_per_host']}", []).append(row)
    for name, found in by_setting.items():
        cells = cells_of(found)
        command = f"sudo python examples/benchmarks/two_hosts.py {args.what}"
        text = [table(cells), NOTES[args.what], record.made_by(command, found)]
        record.write_table(args.out / f"{name}.md", "\n\n".join(text))
        if any("compute" in cell for cell in cells):
            (plot_steps if args.what == "steps" else plot_runs)(cells, args.out / f"{name}.png")


def main() -> int:
    args = parse_arguments()
    rows = record.Rows(args.out / f"{args.what}.json")
    if not args.report:
        if problem := missing():
            print(f"error: two_hosts.py needs {problem}", file=sys.stderr)
            return 2
        origin = record.origin(args.dirty)
        with Hosts(args.hosts, args.links[0]) as hosts:
            for link in args.links:
                for method, ranks in measure(args, hosts, link).items():
                    names = ["model", "hosts", "ranks_per_host", "context"]
                    settings = {name: getattr(args, name) for name in names} | {"link": link, "method": method}
                    settings |= {"rounds": args.rounds} if args.what == "steps" else {"steps": args.steps}
                    name = f"{args.model} {args.hosts}x{args.ranks_per_host} {link} {method} seed{args.seed}"
                    row = {"name": name, "seed": args.seed, "settings": settings}
                    row |= row_of_steps(ranks) if args.what == "steps" else row_of_run(ranks)
                    rows.add([row | origin])
                    print(f"{link} {method}: {row['seconds']:.3f} s, {row['sent'] / 1e6:.2f} MB", flush=True)
    report(args, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
