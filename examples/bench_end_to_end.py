"""The whole run, not a step: validation loss over wall clock and over bytes, between two hosts with a slow link.

    sudo python examples/bench_end_to_end.py                    # 1 Gbit/s and 100 Mbit/s: about two hours of two cores
    sudo python examples/bench_end_to_end.py --short            # a few steps of a tiny model: does it work here?
    sudo python examples/bench_end_to_end.py --links 10mbit --methods scape-0.99 sparseloco-15 sparseloco-30

Each run is the one of pretrain_python.py: its 3M model, its data, 1,200 steps of AdamW with clipping and a schedule,
twelve validations, a checkpoint after each, by Lightning's Trainer. Hosts are network namespaces (see two_hosts.py),
one rank each, pinned to a core with one thread, launched by torchrun. Both hosts see the same folder, as on a cluster:
SCAPE and SparseLoCo, whose checkpoints come from both, write them there, each host its own part, beside training
(state_dict_type="auto", async_save=True). The clock runs from the first step to the end of the fit, everything
included. "Sent" is what the interface of the host that sends most has counted (tx_bytes), headers included; "counted"
is what the package counted of the same, and "counted / payload" is over what is neither header nor sent by the run of
compute only (its launcher and its losses), too.

All runs of a link go on in turns, from one validation to the next; the others are stopped (SIGSTOP), and their clocks
stand still. So what else the machine does falls on all alike. Each takes 0.8 GB of memory a host. Runs are stored one
by one: what is done is not run again. Needs Linux, root and iproute2. Writes a table, JSON and plots to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from turns import WAIT_SECONDS, stop_all_but_one
from two_hosts import ROOT, Hosts, bits_per_second, machine, missing, torchrun

METHODS = {
    "compute": "compute only",
    "ddp": "DDP fp32",
    "ddp-bf16": "DDP, bf16 hook",
    "powersgd-1": "DDP, PowerSGD rank 1",
    "powersgd-4": "DDP, PowerSGD rank 4",
    "scape-0.9": "SCAPE 90%",
    "scape-0.99": "SCAPE 99%",
    "sparseloco-5": "SparseLoCo, every 5 steps",
    "sparseloco-15": "SparseLoCo, every 15 steps",
    "sparseloco-30": "SparseLoCo, every 30 steps",
}
EXTRA = {"scape-0.99-bf16": "SCAPE 99%, values in bf16", "scape-0.9-bf16": "SCAPE 90%, values in bf16"}
"""Not run unless they are asked for."""
NAMES = METHODS | EXTRA
VALIDATIONS = 12
MARGIN = 1.02
"""A run has come far enough when its loss is at most this times the final one of DDP fp32, which is AdamW's."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--links", nargs="+", default=["1gbit", "100mbit"], help="rates of the links")
    add("--methods", nargs="+", choices=(*NAMES, "plan"), default=list(METHODS), help="default: all without bf16")
    add("--steps", type=int, default=1200)
    add("--size", default="small", help="of the model, as pretrain_python.py names it")
    add("--context", type=int, default=128, help="bytes of a window")
    add("--val-batches", type=int, default=40, help="validation batches of a rank")
    add("--seed", type=int, default=0)
    add("--short", action="store_true", help="24 steps of the tiny model, three methods")
    add("--timeout", type=float, default=3600, help="seconds for one run")
    add("--out", type=Path, default=Path("out/bench_end_to_end"))
    add("--worker", type=Path, help=argparse.SUPPRESS)
    add("--turns", nargs="+", help=argparse.SUPPRESS)
    parser.set_defaults(validations=VALIDATIONS, batch=4)  # windows of a rank's step, as in pretrain_python.py
    args = parser.parse_args()
    if "plan" in args.methods and args.worker is None:
        parser.error("--methods must name runs, got plan, which goes before those of each link anyway")
    for link in args.links:
        try:
            bits_per_second(link)
        except ValueError as error:
            parser.error(str(error))
    if args.steps < VALIDATIONS:
        parser.error(f"--steps must be at least {VALIDATIONS}, one for each validation, got {args.steps}")
    if args.short:
        args.links, args.methods = ["1gbit"], ["compute", "ddp", "scape-0.99"]
        args.size, args.steps, args.context, args.val_batches = "tiny", 24, 32, 2
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("steps", "size", "context", "val_batches", "seed")}


# ----------------------------------------------------------------------------------------------- the parent: all runs


def run_all(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of each link's runs, of both ranks; those on disk as they are."""
    cells = args.out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {link: {} for link in args.links}
    began = time.monotonic()
    todo = [(link, method) for link in args.links for method in ("plan", *args.methods)]
    with Hosts(2, args.links[0]) as hosts:
        for number, (link, method) in enumerate(todo, 1):
            path = cells / f"{link}-{method}.json"
            if not done(path, args):
                hosts.set_rate(link)
                together = [name for name in args.methods if not done(cells / f"{link}-{name}.json", args)]
                together = ["plan"] if method == "plan" else together
                for name, ranks in launch(hosts, args, link, together).items():
                    cell = {"settings": settings(args), "link": link, "method": name, "turns": together, "ranks": ranks}
                    (cells / f"{link}-{name}.json").write_text(json.dumps(cell) + "\n")
            found[link][method] = json.loads(path.read_text())["ranks"]
            if method != "plan":
                row = merged(found[link][method])
                shown = f"{row['seconds']:.0f} s, loss {row['loss']:.4f}, {row['sent'] / 1e6:.0f} MB"
                print(f"[{number}/{len(todo)}, {time.monotonic() - began:.0f} s] {link} {method}: {shown}", flush=True)
    return found


def done(path: Path, args: argparse.Namespace) -> bool:
    return path.exists() and json.loads(path.read_text())["settings"] == settings(args)


def launch(hosts: Hosts, args: argparse.Namespace, link: str, methods: list[str]) -> dict[str, Any]:
    """Figures of runs that go on in turns; if one fails, all end."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(methods)) as pool:

        def run_one(place: int) -> Any:
            method, path = methods[place], Path(folder) / f"{methods[place]}.json"
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings(args).items()]
            limit = args.timeout * len(methods)
            command = [__file__, *flags, f"--links={link}", f"--timeout={limit}", f"--worker={path}"]
            command += ["--methods", method, "--turns", *methods]
            try:
                torchrun(hosts, command, args.out / f"{link}-{method}", limit, port=29500 + place)
            except RuntimeError as error:
                raise RuntimeError(f"{method} at {link}: {error}") from None
            return json.loads(path.read_text())[method]

        runs = [pool.submit(run_one, place) for place in range(len(methods))]
        while wait(runs, WAIT_SECONDS, FIRST_EXCEPTION).not_done:
            if failed := [each for each in runs if each.done() and each.exception()]:
                hosts.kill_all()
                failed[0].result()
            stop_all_but_one(Path(folder), methods, len(hosts))
        return dict(zip(methods, (each.result() for each in runs), strict=True))


# ------------------------------------------------------------------------------------------------------ the report


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of both ranks: the seconds of the slower, the bytes of the one that sends more, rank 0's losses."""
    sender = max(ranks, key=lambda rank: rank["sent"])
    points = [{**mine, "sent": each["sent"]} for mine, each in zip(ranks[0]["points"], sender["points"], strict=True)]
    most = {name: max(rank[name] for rank in ranks) for name in ("seconds", "validating", "saving")}
    most |= {name: sender[name] for name in ("sent", "headers", "counted") if name in sender}
    return {**most, "loss": points[-1]["loss"], "points": points, "sent_by_rank": [rank["sent"] for rank in ranks]}


def seconds_to(loss: float, points: list[dict[str, float]]) -> float | None:
    """When a run's loss is first at most ``loss``, between two validations by a line; None: never."""
    for before, after in zip([None, *points], points, strict=False):
        if after["loss"] <= loss:
            if before is None:
                return after["seconds"]
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def payload(row: dict[str, Any], compute: dict[str, Any] | None) -> float | None:
    """Bytes of a method's own messages, by the interface; None where they were not told apart."""
    if compute is None or "headers" not in row or "headers" not in compute:
        return None
    return row["sent"] - row["headers"] - (compute["sent"] - compute["headers"])


def summarize(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    links = {}
    for link, runs in found.items():
        rows = {method: merged(runs[method]) for method in args.methods}
        dense = rows.get("ddp")
        for row in rows.values():
            row["reached"] = seconds_to(MARGIN * dense["loss"], row["points"]) if dense else None
            row["payload"] = payload(row, rows.get("compute"))
        links[link] = {"methods": rows, "plan": runs["plan"]}
    results = {"settings": settings(args), "machine": machine(), "links": links}
    if "compute" in args.methods:
        sys.path.insert(0, str(ROOT))
        from predicted_steps import compare_runs, median_error

        compared = compare_runs(results, VALIDATIONS, sharded=True, beside=True)
        for each in compared:
            links[each.link]["methods"][each.method]["predicted"] = each.predicted
        results["planner"] = {"median_error": median_error(compared), "runs": len(compared)}
        if len(args.methods) > 1:
            compared = compare_runs(results, VALIDATIONS, as_fast_as_alone=True, sharded=True, beside=True)
            results["planner"] |= {"median_error_at_its_speed": median_error(compared)}
    return results


def table(results: dict[str, Any]) -> str:
    lines = [
        "| link | method | final loss | above AdamW | seconds to AdamW + 2% | DDP's / it | seconds in all | over"
        " compute | predicted, s | checkpoints, s | sent, MB | counted / sent | counted / payload |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for link, cell in results["links"].items():
        rows = cell["methods"]
        dense, compute = rows.get("ddp"), rows.get("compute")
        for method, row in rows.items():
            unsynchronized = method == "compute"
            reached = None if unsynchronized else row["reached"]
            gain = dense["reached"] / reached if dense and dense["reached"] and reached else None
            above = None if unsynchronized or not dense else row["loss"] / dense["loss"] - 1
            cells = [
                link,
                NAMES[method],
                "-" if unsynchronized else f"{row['loss']:.4f}",
                "-" if above is None else f"{above:+.1%}",
                "-" if reached is None else f"{reached:.0f}",
                "-" if gain is None else f"{gain:.2f}",
                f"{row['seconds']:.0f}",
                f"{row['seconds'] / compute['seconds']:.2f}" if compute else "-",
                f"{row['predicted']:.0f}" if "predicted" in row else "-",
                f"{row['saving']:.1f}",
                f"{row['sent'] / 1e6:.1f}",
                f"{row['counted'] / row['sent']:.3f}" if row["counted"] else "-",
                f"{row['counted'] / row['payload']:.3f}" if row["counted"] and row["payload"] else "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    if planner := results.get("planner"):
        error = (
            f"Median error of `lightning-scape plan --steps`: {planner['median_error']:.1%} of {planner['runs']} runs."
        )
        if "median_error_at_its_speed" in planner:
            error += (
                f" With the machine's speed in the run of compute only: {planner['median_error_at_its_speed']:.1%}."
            )
        lines += ["", error]
    return "\n".join(lines)


def plot(results: dict[str, Any], key: str, label: str, unit: float, path: Path) -> None:
    """Validation loss over ``key``, one picture for each link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    links = results["links"]
    figure, axes = plt.subplots(1, len(links), figsize=(6 * len(links), 4.5), layout="constrained", squeeze=False)
    for axis, (link, cell) in zip(axes[0], links.items(), strict=True):
        for index, method in enumerate(NAMES):
            if method == "compute" or method not in cell["methods"]:
                continue
            points = cell["methods"][method]["points"]
            style = {"color": "black", "linestyle": "--"} if method == "ddp" else {"color": f"C{index % 10}"}
            line = axis.plot([p[key] * unit for p in points], [p["loss"] for p in points], label=NAMES[method], **style)
            line[0].set_linewidth(3 if method.startswith("scape") else 1.5)
        last = [p["loss"] for row in cell["methods"].values() for p in row["points"][len(row["points"]) // 2 :]]
        first = statistics.median(row["points"][0]["loss"] for row in cell["methods"].values())
        axis.set(xscale="log", xlabel=label, ylabel="validation loss (nats per byte)", title=f"two hosts, {link}/s")
        axis.set_ylim(min(last) - 0.02 * (first - min(last)), first)
        axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    args = parse_arguments()
    if args.worker:  # the parent needs neither torch nor Lightning
        from end_to_end_ranks import work

        work(args)
        return 0
    problem = missing()
    if problem:
        print(f"error: bench_end_to_end.py needs {problem}", file=sys.stderr)
        return 2
    results = summarize(args, run_all(args))
    (args.out / "end_to_end.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "end_to_end.md").write_text(table(results) + "\n")
    plot(results, "seconds", "seconds of the run", 1.0, args.out / "loss_over_seconds.png")
    plot(results, "sent", "megabytes sent by a host", 1e-6, args.out / "loss_over_bytes.png")
    print(f"\n{table(results)}\n\nIn {args.out}: end_to_end.json, .md and two plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
