"""``lightning-scape COMMAND``: what is done outside of training.

Each command's function imports what it works with: help, and the word on a mistyped option, come at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from lightning_scape.__about__ import __version__


def _plan(
    ranks: PositiveInt,
    bandwidth: str,
    compute: PositiveFloat,
    steps: PositiveInt = 10_000,
    parameters: PositiveFloat | None = None,
    model: str | None = None,
) -> int:
    """Say what DDP, SCAPE and SparseLoCo would send, take and need, and which to use.

    Args:
        ranks: Processes that train together, at least 2.
        bandwidth: What one rank can send, such as 10gbit or 500mbit. Ranks that share a network card share it.
        compute: Seconds of a step on one rank alone: forward, backward and optimizer.
        steps: Steps of the run.
        parameters: Of the model, such as 160e6.
        model: Instead of their number, the name of a LitGPT model, such as pythia-160m.
    """
    from lightning_scape.tools import plan as planning

    if ranks < 2:
        raise ValueError(f"`--ranks` must be at least 2, got {ranks}: one rank sends nothing. Give those of the job.")
    if (parameters is None) == (model is None):
        got = "neither" if model is None else "both"
        raise ValueError(f"One of `--parameters` and `--model` must be given, got {got}. Add --parameters 160e6.")
    numels = [int(parameters)] if parameters is not None else planning.numels_of(str(model))
    rate = planning.bytes_per_second(bandwidth)
    print(planning.report(planning.plan(numels, ranks, rate, compute, steps)))
    return 0


def _doctor(timeout: PositiveFloat = 30.0) -> int:
    """Say what does not work on this machine and, under torchrun, between all ranks.

    To look at the network run on every node: torchrun --nnodes N --node_rank I --master_addr HOST --nproc_per_node K
    -m lightning_scape doctor

    Args:
        timeout: Seconds to wait for other ranks.
    """
    from lightning_scape.tools.doctor import run

    return run(timeout)


def _report(path: Path) -> int:
    """Draw a run's loss, bytes and waiting as one PNG, and print a table, from what ScapeMonitor logged to a CSV file.

    Args:
        path: A metrics.csv, or a folder; of a folder the newest that ScapeMonitor logged to.
    """
    from lightning_scape.tools.report import report as write

    print(write(path))
    return 0


def _verify(paths: list[Path]) -> int:
    """Read checkpoints as loading does, and say whether they load.

    Args:
        paths: Checkpoints, files or directories.
    """
    from lightning_scape.checkpoint.saver import verify as read

    damaged = 0
    for path in paths:
        try:
            read(path)
        except (ValueError, OSError) as error:
            print(f"lightning-scape: {error}", file=sys.stderr)
            damaged += 1
        else:
            print(f"{path}: complete and undamaged, and it loads")
    return 1 if damaged else 0


def _consolidate(checkpoint: Path, file: Path, force: bool = False) -> int:
    """Make one file of a checkpoint that is a directory. Its optimizer state is one that torch's AdamW loads, too.

    Args:
        checkpoint: A directory.
        file: Where the one file goes.
        force: Replace the file if it exists, when the new one is whole.
    """
    from lightning_scape.checkpoint import files, saver

    if file.is_dir() or (file.exists() and not force):
        raise ValueError(f"FILE must be a free name, got {str(file)!r}. Name a new one, or --force to replace a file.")
    files.save_file(saver.consolidate(checkpoint), file)
    print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


COMMANDS = {each.__name__[1:]: each for each in (_plan, _doctor, _report, _verify, _consolidate)}
"""By name. The functions are private, for jsonargparse looks for public ones in the whole package, and imports it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 1 with the reason on stderr. 2 ends a wrong command line."""
    parser = ArgumentParser(
        prog="lightning-scape", description="What is done outside of training.", version=__version__
    )
    commands = parser.add_subcommands()
    for name, command in COMMANDS.items():
        said = str(command.__doc__).partition("\n\n    Args:")[0]
        one = ArgumentParser(description=said)
        apart: set[str | int] = {"paths", "force"}  # which are not one value each
        one.add_function_arguments(command, as_group=False, as_positional=command is not _plan, skip=apart)
        if command is _verify:
            one.add_argument("paths", nargs="+", type=Path, help="Checkpoints, files or directories.")
        if command is _consolidate:
            one.add_argument("--force", action="store_true", help="Replace the file if it exists.")
        commands.add_subcommand(name, one, help=said.partition("\n")[0])  # type: ignore[no-untyped-call]
    given = parser.parse_args(arguments)
    options: Namespace = given[given.subcommand]
    try:
        return COMMANDS[given.subcommand](**options.as_dict())
    except (ValueError, OSError) as error:
        print(f"lightning-scape: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
