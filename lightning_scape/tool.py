"""``lightning-scape``: what is done to checkpoints and plans outside of training. One subcommand per task."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_scape import files, saving
from lightning_scape.__about__ import __version__


def _add_consolidate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the sharded checkpoint")
    parser.add_argument("file", type=Path, help="where the one file goes; an existing one is replaced when it is whole")
    parser.add_argument(
        "--optimizer",
        choices=("scape", "adamw"),
        default="scape",
        help="whose state the file holds: SCAPE's (default; AdamS takes it too), or AdamW's, with what carries over",
    )


def _consolidate(arguments: argparse.Namespace) -> None:
    files.save_file(saving.consolidate(arguments.directory, arguments.optimizer), arguments.file)
    print(f"{arguments.file}: {arguments.file.stat().st_size:,} bytes")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, nargs="+", help="checkpoints, files or directories")


def _verify(arguments: argparse.Namespace) -> None:
    for path in arguments.path:
        files.verify(path)
        print(f"{path}: complete and undamaged")


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]] = {
    "consolidate": ("make one file of a sharded checkpoint", _add_consolidate, _consolidate),
    "verify": ("compare checkpoints with their checksums", _add_verify, _verify),
}
"""By name: what it does, its arguments, and itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; 0 if it succeeded, 1 with the reason on stderr if not."""
    parser = argparse.ArgumentParser(prog="lightning-scape", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (purpose, add_arguments, run) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        add_arguments(command)
        command.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"lightning-scape: {error}", file=sys.stderr)
        return 1
    return 0
