"""Is it really faster? Lightning jobs on two hosts with rate-limited links: steps per second, bytes on the wire.

    sudo python examples/bench_two_hosts.py                     # everything, about 20 minutes on two quiet cores
    sudo python examples/bench_two_hosts.py --short             # a few steps of one model, one link: does it work here?
    sudo python examples/bench_two_hosts.py --hosts 4 --models pythia-14m --links 1gbit
    sudo python examples/bench_two_hosts.py --ranks-per-host 2 --models pythia-14m --links 1gbit

Hosts are network namespaces (see two_hosts.py), one rank each, pinned to a core with one thread, launched by torchrun.
With --ranks-per-host 2 the ranks of a host share its core and its link; they talk to each other by its loopback, which
is not limited. Then HSDP (dense between hosts), flat SCAPE and SCAPE with local_group_size are compared. Methods that
end in -shm use shared memory in place of the loopback for what fully_shard sends inside a host (see host_memory.py).
In each round every method trains for some steps, one after the other in the same processes, on the same model; rounds
repeat the order, so that whatever else the machine does hits all alike. A round that is done is not measured again.

Dense methods use torch's fused AdamW, its fastest. All clip the gradient norm at 1.0. "Sent" is what the host's
interface counted (tx_bytes); "expected" is what the package counted for SCAPE, and computed for the others. Both must
agree within 5% and the headers of the packets, or the row says so and the exit status is 1.

Needs Linux, root and iproute2. Writes a table, JSON and a plot to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from two_hosts import ROOT, Hosts, bits_per_second, machine, missing, torchrun

METHODS = {
    "compute": "compute only",
    "ddp": "DDP fp32",
    "ddp-bf16": "DDP, bf16 hook",
    "powersgd": "DDP, PowerSGD rank 1",
    "fsdp": "FSDP",
    "scape-0": "ScapeStrategy 0 (dense AdamS)",
    "scape-0.9": "SCAPE 0.9, values in bf16",
    "scape-0.99": "SCAPE 0.99, values in bf16",
    "scape-0.9-int4": "SCAPE 0.9, values in 4 bits",
    "scape-0.99-int4": "SCAPE 0.99, values in 4 bits",
    "scape-0.99-int8": "SCAPE 0.99, values in 8 bits",
    "hsdp": "HSDP (fully_shard on a mesh of hosts and ranks)",
    "hsdp-shm": "HSDP, shared memory inside a host",
    "nodes-0.99": "SCAPE 0.99, local_group_size 2",
    "nodes-0.99-shm": "SCAPE 0.99, local_group_size 2, shared memory inside a host",
    "sparseloco-30": "SparseLoCo, H = 30",
}
"""A window of SparseLoCo is timed as a whole: its step is the mean over the window."""
OF_NODES = ("compute", "hsdp", "hsdp-shm", "scape-0.99", "nodes-0.99", "nodes-0.99-shm")
"""Methods for hosts of several ranks, by default."""
NEED_NODES = {method for method in METHODS if method.startswith(("hsdp", "nodes"))}
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 26)}
"""Of glibc, which else gives tensors above 32 MB back to the kernel, and takes them anew, page by page, each step."""
PAPER = 3.26
"""Speed-up per step of the paper: Llama-1.8B, 32 GPUs, SCAPE over dense AdamS."""
TOLERANCE = 0.05
TARGETS = (
    # model, link, what, "at most" or "at least"
    ("scape-0.99 sends fewer bytes than ddp", 75, None, None),
    ("scape-0.99 step over compute only", 1.10, "pythia-14m", "1gbit"),
    ("ddp step over scape-0.99's", 2.0, "pythia-14m", "1gbit"),
    ("scape-0.99 step over compute only", 1.15, "pythia-14m", "100mbit"),
    ("ddp step over scape-0.99's", 10.0, "pythia-14m", "100mbit"),
    ("scape-0.9 step over compute only", 1.40, "pythia-14m", "1gbit"),
    ("hsdp step over nodes-0.99's", 2.0, None, "1gbit"),
    ("hsdp step over nodes-0.99-shm's", 2.0, None, "1gbit"),
    ("hsdp-shm step over nodes-0.99-shm's", 2.0, None, "1gbit"),
    ("scape-0.99 step over nodes-0.99's", 1.0, None, "1gbit"),
    ("scape-0.99 step over nodes-0.99-shm's", 1.0, None, "1gbit"),
    ("nodes-0.99 sends fewer bytes than scape-0.99", 2 / 1.05, None, None),
    ("sparseloco-30 step over compute only", 1.15, "pythia-14m", "10mbit"),
    ("ddp step over sparseloco-30's", 50.0, "pythia-14m", "10mbit"),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=["pythia-14m", "pythia-31m"], help="LitGPT configurations, real vocabulary")
    add("--links", nargs="+", default=["10gbit", "1gbit", "100mbit"], help="rates of the links")
    add("--methods", nargs="+", choices=METHODS, help="default: all that the number of ranks allows")
    add("--hosts", type=int, default=2, help="more than two are joined by a switch")
    add("--ranks-per-host", type=int, default=1, help="they share the host's core and link")
    add("--one-unit", action="store_true", help="fully_shard on the whole model, not on each block, for HSDP and SCAPE")
    add("--keep-memory", action="store_true", help="glibc keeps freed memory (else large tensors cost page faults)")
    add("--rounds", type=int, default=2)
    add("--batch-size", type=int, default=2, help="sequences of a rank's step")
    add("--context", type=int, default=128, help="tokens of a sequence")
    add("--max-steps", type=int, default=16, help="timed steps of a method in a round, at most; at least two")
    add("--seconds", type=float, default=5.0, help="that the timed steps may take; slow links get fewer steps")
    add("--short", action="store_true", help="pythia-14m cut down to 2 layers and 512 words, 1gbit, one round")
    add("--timeout", type=float, default=900, help="seconds for one round of one model on one link")
    add("--out", type=Path, default=Path("out/bench_two_hosts"))
    add("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.methods is None:
        flat = [method for method in METHODS if method not in NEED_NODES and "int" not in method]
        args.methods = flat if args.ranks_per_host == 1 else [*OF_NODES]
    if args.ranks_per_host == 1 and (given := NEED_NODES & set(args.methods)):
        parser.error(f"{', '.join(sorted(given))} need --ranks-per-host 2 or more, got 1")
    if args.short:
        args.models, args.links, args.rounds, args.max_steps = ["tiny"], ["1gbit"], 1, 3
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ["methods", "hosts", "batch_size", "context", "max_steps", "seconds"]
    names += ["ranks_per_host"] if args.ranks_per_host > 1 else []
    names += [name for name in ("one_unit", "keep_memory") if getattr(args, name)]
    return {name: getattr(args, name) for name in names}


# ----------------------------------------------------------------------------------------- the parent: rounds of cells


def launch(hosts: Hosts, args: argparse.Namespace, model: str, link: str, path: Path) -> None:
    """One torchrun per host; ends when all have."""
    flags = [f"--models={model}", f"--links={link}", f"--worker={path}", "--methods", *args.methods]
    given = ("batch-size", "context", "max-steps", "seconds", "ranks-per-host")
    flags += [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in given]
    flags += ["--one-unit"] if args.one_unit else []
    environ = KEEPING if args.keep_memory else {}
    try:
        torchrun(hosts, [__file__, *flags], path, args.timeout, ranks_per_host=args.ranks_per_host, env=environ)
    except RuntimeError as error:
        raise RuntimeError(f"{model} at {link}: {error}") from None


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds, those on disk as they are."""
    cells = args.out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    todo = [(r, model, link) for r in range(args.rounds) for model in args.models for link in args.links]
    found = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        hosts = None
        for number, (index, model, link) in enumerate(todo, 1):
            each = f"-{args.ranks_per_host}each" if args.ranks_per_host > 1 else ""
            path = cells / f"{model}-{link}-{args.hosts}hosts{each}-round{index}.json"
            if not path.exists() or (cell := json.loads(path.read_text())).get("settings") != settings(args):
                hosts = hosts or stack.enter_context(Hosts(args.hosts, link))
                hosts.set_rate(link)
                raw = path.with_suffix(".raw")
                raw.unlink(missing_ok=True)
                launch(hosts, args, model, link, raw)
                cell = {"settings": settings(args), "model": model, "link": link, "round": index}
                cell |= json.loads(raw.read_text())
                path.write_text(json.dumps(cell))
                raw.unlink()
            found.append(cell)
            steps = {m: statistics.median(f["seconds"]) for m, f in cell["ranks"][0]["methods"].items()}
            shown = ", ".join(f"{m} {s:.3f}" for m, s in steps.items())
            print(f"[{number}/{len(todo)}, {time.monotonic() - began:.0f} s] {model} {link}: {shown}", flush=True)
    return found


def summarize(args: argparse.Namespace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    cells = []
    for model in args.models:
        for link in args.links:
            same = [r for r in rounds if (r["model"], r["link"]) == (model, link)]
            ranks = [rank for r in same for rank in r["ranks"]]
            methods = {method: merge([rank["methods"][method] for rank in ranks]) for method in args.methods}
            measured = median_of([rank["measured"] for rank in ranks])
            cells.append({"model": model, "link": link, "methods": methods, "measured": measured})
    return {
        "settings": {**settings(args), "rounds": args.rounds},
        "machine": machine(),
        "models": {
            r["model"]: {"parameters": sum(w[0] for w in r["weights"]), "weights": r["weights"]} for r in rounds
        },
        "cells": cells,
    }


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's figures over all ranks and rounds."""
    seconds = sorted(s for part in parts for s in part["seconds"])
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    sent, headers = (statistics.mean(part[name] for part in parts) for name in ("sent", "headers"))
    known = [part["expected"] for part in parts if part["expected"] is not None]
    expected = statistics.mean(known) if known else None
    payload = sent - headers
    # Where nothing is expected, what torchrun and the barriers of the measurement send must be all there is.
    agree = None if expected is None else abs(payload - expected) <= TOLERANCE * expected + 4096
    merged = {
        "seconds": statistics.median(seconds),
        "steps_per_second": 1 / statistics.median(seconds),
        "quartiles": [quartiles[0], quartiles[2]],
        "steps": len(seconds),
        "sent": sent,
        "headers": headers,
        "expected": expected,
        "counted": parts[0]["counted"],
        "agree": agree,
    }
    if parts[0]["phases"]:
        merged["phases"] = median_of([part["phases"] for part in parts])
    return merged


def median_of(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: median_of([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], list):
        return [median_of(list(column)) for column in zip(*parts, strict=True)]
    return statistics.median(parts)


# ------------------------------------------------------------------------------------------------------ the report


def table(results: dict[str, Any]) -> str:
    lines = [
        "| model | link | method | step (quartiles), ms | steps/s | over compute | DDP / it | sent, MB | expected, MB"
        " | agree* |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in results["cells"]:
        methods = cell["methods"]
        floor, dense = (methods.get(name, {}).get("seconds", float("nan")) for name in ("compute", "ddp"))
        for name, row in methods.items():
            low, high = (1e3 * q for q in row["quartiles"])
            agree = {None: "unknown", True: "yes", False: "**NO**"}[row["agree"]]
            expected = "-" if row["expected"] is None else f"{row['expected'] / 1e6:.3f}"
            lines.append(
                f"| {cell['model']} | {cell['link']} | {METHODS[name]}"
                f" | {1e3 * row['seconds']:.0f} ({low:.0f}-{high:.0f})"
                f" | {row['steps_per_second']:.2f} | {row['seconds'] / floor:.2f} | {dense / row['seconds']:.2f}"
                f" | {row['sent'] / 1e6:.3f} | {expected} | {agree} |"
            )
    return "\n".join(
        [
            *lines,
            "",
            "\\* sent per host and step by the interface, less the headers of its packets, is within 5% (and 4 KB) of"
            " what the package counted (SCAPE) or of what is computed (dense methods).",
        ]
    )


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at beforehand, and what came out; the cells that were measured."""
    found = []
    for what, aim, model, link in TARGETS:
        for cell in results["cells"]:
            if (model or cell["model"], link or cell["link"]) != (cell["model"], cell["link"]):
                continue
            m = cell["methods"]
            first, last = what.split()[0], what.split()[-1].removesuffix("'s")
            if "sends fewer" in what:
                names, key, least = (last, first), "sent", True
            elif last == "only":
                names, key, least = (first, "compute"), "seconds", False
            else:
                names, key, least = (first, last), "seconds", True
            if all(name in m for name in names):
                value = m[names[0]][key] / m[names[1]][key]
                met = value >= aim if least else value <= aim
                found.append({"model": cell["model"], "link": cell["link"], "what": what, "met": met,
                              "aim": ("at least " if least else "at most ") + str(aim), "value": value})  # fmt: skip
    return found


def paper_case(results: dict[str, Any]) -> list[dict[str, Any]]:
    """For each model, the bandwidth, between two links, at which SCAPE 0.99 beats DDP by the paper's factor."""
    found = []
    for model in results["models"]:
        cells = sorted((c for c in results["cells"] if c["model"] == model), key=lambda c: bits_per_second(c["link"]))
        points = []
        for cell in cells:
            m = cell["methods"]
            if {"ddp", "scape-0.99", "compute"} <= set(m):
                ddp = m["ddp"]["seconds"]
                gain, cost = ddp / m["scape-0.99"]["seconds"], ddp / m["compute"]["seconds"]
                points.append([math.log(x) for x in (bits_per_second(cell["link"]), gain, cost)])
        for slow, fast in zip(points, points[1:], strict=False):
            if fast[1] < math.log(PAPER) <= slow[1]:
                part = (slow[1] - math.log(PAPER)) / (slow[1] - fast[1])
                rate, _, cost = (math.exp(a + part * (b - a)) for a, b in zip(slow, fast, strict=True))
                found.append({"model": model, "bits_per_second": rate, "ddp_over_compute": cost})
    return found


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(results["models"])
    figure, axes = plt.subplots(1, len(models), figsize=(6 * len(models), 4.5), layout="constrained", squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        cells = sorted((c for c in results["cells"] if c["model"] == model), key=lambda c: bits_per_second(c["link"]))
        rates = [bits_per_second(cell["link"]) for cell in cells]
        for name, label in METHODS.items():
            if name == "ddp" or any(name not in cell["methods"] for cell in cells):
                continue
            gains = [cell["methods"]["ddp"]["seconds"] / cell["methods"][name]["seconds"] for cell in cells]
            style = {"color": "black", "linestyle": "--"} if name == "compute" else {"marker": "o"}
            axis.plot(rates, gains, label="compute-only ceiling" if name == "compute" else label, **style)
        axis.axhline(PAPER, color="gray", linestyle=":", label=f"{PAPER}x, the paper's figure")
        axis.axhline(1, color="lightgray", zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="bandwidth of the link, bit/s", ylabel="speed-up over DDP fp32")
        axis.set_title(
            f"{model}, {results['models'][model]['parameters'] / 1e6:.1f}M, {results['settings']['hosts']} hosts"
        )
        axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)


def main() -> int:
    args = parse_arguments()
    if args.worker:  # the parent needs neither torch nor Lightning
        from two_hosts_ranks import work

        work(args)
        return 0
    problem = missing()
    if problem:
        print(f"error: bench_two_hosts.py needs {problem}", file=sys.stderr)
        return 2
    results = summarize(args, measure(args))
    results["targets"] = targets(results)
    results["paper_case"] = paper_case(results)
    sys.path.insert(0, str(ROOT))
    from predicted_steps import compare_with_measured, median_error

    compared = compare_with_measured(results) if args.ranks_per_host == 1 else []
    if compared:
        results["planner"] = {"median_error": median_error(compared), "steps": len(compared)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "two_hosts.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [table(results), "", "| target | model | link | aim | measured | met |", "|---|---|---|---|---|---|"]
    for t in results["targets"]:
        met = "yes" if t["met"] else "**NO**"
        lines.append(f"| {t['what']} | {t['model']} | {t['link']} | {t['aim']} | {t['value']:.2f} | {met} |")
    for case in results["paper_case"]:
        lines += [
            "",
            f"{case['model']}: SCAPE 0.99 is {PAPER}x as fast as DDP, the paper's figure, at"
            f" {case['bits_per_second'] * 1e-6:.0f} Mbit/s and below (interpolated), where DDP's step takes"
            f" {case['ddp_over_compute']:.2f}x compute only.",
        ]
    if compared:
        lines += shown_predictions(results, compared)
    (args.out / "two_hosts.md").write_text("\n".join(lines) + "\n")
    if {"ddp"} <= set(args.methods):
        plot(results, args.out / "two_hosts.png")
    print("\n".join(["", *lines, "", f"written to {args.out}/two_hosts.json, .md and .png"]))
    disagree = [m for cell in results["cells"] for m, row in cell["methods"].items() if row["agree"] is False]
    return 1 if disagree else 0


def shown_predictions(results: dict[str, Any], compared: list[Any]) -> list[str]:
    lines = ["", "| model | link | method | measured, ms | predicted by `lightning-scape plan`, ms | error |"]
    lines += ["|---|---|---|---|---|---|"]
    for c in compared:
        lines.append(
            f"| {c.model} | {c.link} | {METHODS[c.method]} | {1e3 * c.measured:.0f} | {1e3 * c.predicted:.0f}"
            f" | {c.error:.0%} |"
        )
    return [
        *lines,
        "",
        f"Median error of the prediction: {results['planner']['median_error']:.1%} of {len(compared)} steps.",
    ]


if __name__ == "__main__":
    sys.exit(main())
