"""What the commands are given: read, checked and explained (``--help``) before anything heavy is imported."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from lightning_scape.checkpoint.paths import local_path

BYTES_PER_SECOND = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"
_PLAN = """Predicts, before anything is launched, what a step will take and whether SCAPE pays.

lightning-scape plan --model pythia-160m --nodes 8 --gpus-per-node 1 --bandwidth 10gbit --step-compute 0.8s
lightning-scape plan --model pythia-14m --nodes 2 --bandwidth 1gbit --measure     # computes and optimizers, here
torchrun ... -m lightning_scape plan --model pythia-14m --measure                 # the link too, on all nodes
"""
_DOCTOR = """Says what does not work here, what is slow, and what to do about it.

lightning-scape doctor                                          # this host alone
torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr HOST -m lightning_scape doctor    # on every node

lightning-scape doctor FOLDER       # why is my run slow, and what do I switch on: by its ScapeMonitor(report=FOLDER)
lightning-scape doctor --watch      # the same for any job that trains now, plain DDP too: by the network's counters

Under torchrun every rank runs it, and rank 0 reports: whether the ranks reach each other, and how fast. One process
for each node is enough. The exit status is 0 where everything works (what is slow is said), else 1, on every rank.
"""


class Parser(argparse.ArgumentParser):
    """Of one command. What is wrong is said first, and where help is, in place of all options."""

    def __init__(self, command: str, description: str) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"lightning-scape {command}", description=description, formatter_class=form)

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists all options.\n")


def parse_with_methods(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments of a command that knows any method: modules that register one of the user's are imported."""
    meaning = "a module that registers a method of yours; it is executed"
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=meaning)
    given = parser.parse_args(arguments)
    for module in given.modules:
        try:
            import_module(module)
        except ImportError as error:
            parser.error(f"--import must name a module that Python finds, got {module!r}: {error}. Set PYTHONPATH.")
    return given


def _number(
    error: str, holds: Callable[[float], bool], units: Mapping[str, float] | None = None
) -> Callable[[str], float]:
    """Reads a number that obeys a rule; with units, one with a unit behind it."""

    def read(text: str) -> float:
        if units is None:
            with contextlib.suppress(ValueError):
                if holds(value := float(text) + 0.0):  # -0 is 0
                    return value
        else:
            found = re.fullmatch(rf"({_NUMBER})\s*({'|'.join(units)})", text.strip().lower())
            if found and holds(value := float(found[1]) * units[found[2]]):
                return value
        raise argparse.ArgumentTypeError(error.format(text=text))

    return read


bandwidth = _number(
    "a bandwidth must be a number > 0 with kbit, mbit or gbit, got {text!r}. Write 10gbit.",
    lambda value: 0 < value < math.inf,
    {f"{unit}{end}": size for unit, size in BYTES_PER_SECOND.items() for end in ("", "/s", "ps")},
)
"""Bytes per second: ``"10gbit"`` is 1.25e9."""
seconds = _number(
    "a time must be a number >= 0 with s, ms or us, got {text!r}. Write 0.8s.",
    lambda value: value < math.inf,
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0},
)
"""``"350ms"`` is 0.35."""
positive = _number(
    "it must be a finite number > 0, got {text!r}. Give it in GB, without unit.", lambda value: 0 < value < math.inf
)
sparsity = _number(
    "a sparsity must be a number in [0, 1), got {text!r}. Write 0.99 to send 1% of the entries.",
    lambda value: 0 <= value < 1,
)
waiting_time = _number(
    "it must be a number of seconds from 1 to 3600, got {text!r}. Try 60.", lambda value: 1 <= value <= 3600
)


def _count(least: int, none: str = "") -> Callable[[str], int]:
    read = _number(
        f"it must be a whole number >= {least} and <= 10**12, got {{text!r}}. Give one of this range{none}.",
        lambda value: least <= value <= 1e12 and value.is_integer(),
    )
    return lambda text: int(read(text))


count = _count(1)
"""A whole number from 1."""
count_or_none = _count(0, "; 0 for none")
"""A whole number from 0."""


def local(text: str) -> Path:
    """A path as the strategies read it: ``~`` is the user's home."""
    path = local_path(text)
    if path is None:
        raise argparse.ArgumentTypeError(
            f"it must be a path of a file system, got {text!r}. Copy from or to a store yourself."
        )
    return path


def plan_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Of ``lightning-scape plan``; ends the process with status 2 where one is wrong."""
    parser = Parser("plan", _PLAN)
    add = parser.add_argument
    add("--model", required=True, help="name of a LitGPT configuration, such as pythia-160m")
    add("--nodes", type=count, default=None, help="machines, at least 2; under torchrun, all of them")
    add("--gpus-per-node", type=count, default=None, help="ranks of each machine (default: 1, or torchrun's)")
    add("--bandwidth", type=bandwidth, default=None, help="of each node's link: 10gbit, 100mbit (bits per second)")
    add("--latency", type=seconds, help="of one hop, software included (default: 50us)")
    add("--step-compute", type=compute_seconds, default=None, help="forward and backward of a rank's step: 0.8s, 350ms")
    add("--measure", action="store_true", help="measure compute and optimizers here and, under torchrun, the link")
    add("--batch-size", type=count, help="with --measure: sequences of a rank's step (default: 2)")
    add("--context", type=count, help="with --measure: tokens of a sequence (default: 128)")
    add("--memory-bandwidth", type=positive, help="without --measure: of the device, GB/s (default: 1500)")
    add("--memory", type=positive, default=80.0, help="of a rank's device, GB; advice is what fits (default: 80)")
    add("--node-bandwidth", type=positive, help="between the ranks of a node, GB/s (default: 200)")
    add("--precision", choices=PRECISIONS, default="32-true", help="of the training, and of what is measured")
    add("--no-clipping", action="store_true", help="the gradient norm is not clipped")
    add("--sparsity", type=sparsity, nargs="+", default=[0.0, 0.9, 0.99, 0.999], help="which to predict")
    add("--steps", type=count, default=None, help="of the optimizer in the whole run, which is then predicted")
    add("--checkpoints", type=count_or_none, help="with --steps: how many are saved (default: 0)")
    add("--state-dict-type", choices=("full", "sharded"), help="with --checkpoints: their kind (default: full)")
    add(
        "--async-save",
        action="store_true",
        default=None,
        help="with --checkpoints: they are collected and written beside training",
    )
    add("--validation", type=seconds, help="with --steps: time of all validations together: 90s")
    add("--plot", type=Path, default=None, help="draw step time over bandwidth and over ranks into this file (.png)")
    args = parse_with_methods(parser, arguments)
    try:
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check(args: argparse.Namespace) -> None:
    """What no option can check alone; fills in the numbers of nodes and of their ranks."""
    ranks = launched()
    if args.nodes is None:
        if ranks == 1:
            raise ValueError("--nodes must be given without torchrun. Say on how many machines you want to train.")
        args.gpus_per_node = args.gpus_per_node or of_launcher(os.environ, "LOCAL_WORLD_SIZE", 1)
        if ranks % args.gpus_per_node:
            raise ValueError(
                f"--gpus-per-node must divide the number of ranks that were launched, {ranks}, got"
                f" {args.gpus_per_node}. Leave it out: torchrun knows it."
            )
        args.nodes = ranks // args.gpus_per_node
    args.gpus_per_node = args.gpus_per_node or 1
    if not args.measure and args.step_compute is None:
        raise ValueError("--step-compute must be given, or --measure. Time the forward and backward pass of one rank.")
    measures_link = args.measure and ranks > 1
    if args.bandwidth is None and not measures_link:
        raise ValueError("--bandwidth must be given, or --measure under torchrun, which measures it.")
    if args.nodes * args.gpus_per_node == 1:
        raise ValueError("--nodes times --gpus-per-node must be at least 2 ranks, got 1. One alone sends nothing.")
    if args.nodes == 1 and (args.bandwidth is not None or not measures_link):
        raise ValueError(
            "--nodes must be at least 2, got 1: a plan is about the link between machines. On one machine stay with DDP"
            " or FSDP over its own interconnect, or launch --measure with torchrun there, without --bandwidth."
        )
    _check_effects(args)
    if args.plot is not None and not of_launcher(os.environ, "RANK", 0):
        check_plot(args.plot)


def _check_effects(args: argparse.Namespace) -> None:
    """Raises ``ValueError`` for an option that the others leave without effect; fills in those that are not given."""
    measured = args.measure, "with --measure"
    of_a_run, saved = (args.steps is not None, "with --steps"), (bool(args.checkpoints), "with --checkpoints")
    for name, default, (counts, how) in (
        ("latency", 50e-6, (not (args.measure and launched() > 1), "without --measure under torchrun, which tells it")),
        ("node_bandwidth", 200.0, (args.gpus_per_node > 1, "with several --gpus-per-node")),
        ("batch_size", 2, measured),
        ("context", 128, measured),
        ("memory_bandwidth", 1500.0, (not args.measure, "without --measure, which measures it")),
        ("checkpoints", 0, of_a_run),
        ("state_dict_type", "full", saved),
        ("async_save", False, saved),
        ("validation", 0.0, of_a_run),
    ):
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif not counts:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} must come {how}, got it where it has no effect. Add or drop one of the two.")


def launched() -> int:
    """Ranks that torchrun has launched."""
    return of_launcher(os.environ, "WORLD_SIZE", 1)


def of_launcher(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """A number that torchrun sets.

    Args:
        environ: environment variables.
        name: of the number's.
        otherwise: the number where it is not set, or empty.

    Raises:
        ValueError: it is no number.
    """
    given = environ.get(name) or ("" if otherwise is None else str(otherwise))
    if not given.isdecimal():
        raise ValueError(f"{name} must be a whole number >= 0, got {given!r}. Launch all ranks with torchrun.")
    return int(given)


def compute_seconds(text: str) -> float:
    """Likewise, but not 0."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"a time of compute must be > 0, got {text!r}. Time one rank's step alone.")
    return value


def check_plot(path: Path) -> None:
    """Finds out, before anything is measured, whether a plot can be written there; makes its folder.

    Raises:
        ValueError: it cannot.
    """
    import_matplotlib("`--plot`")
    from matplotlib.backend_bases import FigureCanvasBase

    suffixes = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.is_dir() or path.suffix[1:].lower() not in suffixes:
        what = "a directory" if path.is_dir() else f"the suffix {path.suffix!r}"
        raise ValueError(
            f"--plot must name a file that ends in one of .{', .'.join(suffixes)}, got {str(path)!r}, {what}. Write"
            " plan.png."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):  # permissions say too little: the folder may be read-only
            pass
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        raise ValueError(
            f"--plot must name a file that can be written, got {str(path)!r}: {error}. Choose another folder."
        ) from error


def import_matplotlib(used_for: str) -> None:
    """Without a screen. Raises ``ValueError`` where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"{used_for} needs matplotlib. Install it: pip install 'lightning-scape[plots]'.") from error
    matplotlib.use("Agg")


def doctor_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Of ``lightning-scape doctor``; likewise."""
    parser = Parser("doctor", _DOCTOR)
    parser.add_argument(
        "folder", nargs="?", type=local, help="of a run's report: says where the time of its steps goes"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=waiting_time,
        const=20.0,
        metavar="SECONDS",
        help="watch the network of this host while a job trains (default: 20), and say whether it waits for it",
    )
    parser.add_argument(
        "--timeout", type=waiting_time, help="seconds for which ranks wait for each other (default: 60)"
    )
    args = parser.parse_args(arguments)
    given = [name for name in ("folder", "watch", "timeout") if getattr(args, name) is not None]
    if len(given) > 1:
        names = " and ".join("FOLDER" if name == "folder" else f"--{name}" for name in given)
        parser.error(f"it must be asked one thing at a time, got {names}. Drop all but one: each alone has an effect.")
    args.timeout = args.timeout or 60.0
    return args
