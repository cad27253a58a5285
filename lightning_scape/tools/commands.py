"""``lightning-scape <command>``: what is done outside of training.

Each command reads its arguments first, and only then imports what it works with: help, and the word on a mistyped
option, come at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_scape.__about__ import __version__
from lightning_scape.tools.arguments import (
    Parser,
    doctor_arguments,
    import_matplotlib,
    local,
    parse_with_methods,
    plan_arguments,
)
from lightning_scape.tools.console import ends_quietly

MOST_ODD = 20
"""Lines of a report's figures that cannot be read and are named."""
TORCHRUN = """usage: lightning-scape torchrun [options of torchrun] script.py [arguments of the script]

torchrun, with which machines may be lost and come back. It takes torchrun's options, for example:

  --nnodes N or MIN:MAX      machines, or the least and the most of them
  --nproc-per-node N         processes on each
  --node-rank I              which machine this is, where their number is fixed
  --master-addr HOST         the first machine, where their number is fixed
  --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME
                             where machines meet, if their number may change
  --max-restarts N           how often all may start again after a failure
  --no-python, --module      the script is a program of any kind, or a module

`torchrun --help` lists all of them."""
"""Its help."""


def _plan(arguments: list[str]) -> int:
    given = plan_arguments(arguments)
    from lightning_scape.tools.plan import run

    return run(given)


def _consolidate(arguments: list[str]) -> int:
    parser = _parser("consolidate")
    parser.add_argument("checkpoint", type=local, help="a sharded checkpoint's directory, or a file to convert")
    parser.add_argument("file", type=local, help="where the one file goes")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists, when the new one is whole")
    parser.add_argument(
        "--optimizer",
        choices=("kept", "scape", "adamw"),
        default="kept",
        help="whose state the file holds: the method's as it was saved (kept, the default; scape is its older name;"
        " AdamS takes SCAPE's), or AdamW's, with what carries over",
    )
    given = parse_with_methods(parser, arguments)
    from lightning_scape.checkpoint import atomic_files as files
    from lightning_scape.checkpoint import saver as saving
    from lightning_scape.checkpoint.inspection import checkpoint_in

    source = checkpoint_in(given.checkpoint)
    files.check_there(source)
    _check_free(source, given.file, given.force)
    with warnings.catch_warnings(record=True) as said:
        whole = saving.consolidate(source, given.optimizer)
    for each in said:  # without the place in our code
        print(f"lightning-scape: {each.message}", file=sys.stderr)
    files.save_file(whole, given.file)
    print(f"{given.file}: {given.file.stat().st_size:,} bytes")
    return 0


def _check_free(source: Path, target: Path, force: bool) -> None:
    """Raises ``ValueError`` if something would be lost that is at ``target``."""
    from lightning_scape.checkpoint.temporaries import MANIFEST

    problem = None
    if target.is_dir():
        problem = "a directory. Name a new file."
    elif (target.parent / MANIFEST).exists():
        problem = "inside a checkpoint, which must stay as it was written. Name a new file elsewhere."
    elif target.exists() and target.samefile(source):
        problem = "the checkpoint itself, whose state would be lost. Name a new file."
    elif target.exists() and not force:
        problem = "which exists. Name a new file, or add --force to replace it."
    if problem is not None:
        raise ValueError(f"FILE must be a free name or another file, got {str(target)!r}, {problem}")


def _verify(arguments: list[str]) -> int:
    parser = _parser("verify")
    parser.add_argument("path", type=local, nargs="+", help="checkpoints, files or directories")
    given = parse_with_methods(parser, arguments)
    from lightning_scape.checkpoint.inspection import verify

    damaged = 0
    for path in given.path:
        try:
            verify(path)
        except (ValueError, OSError) as error:
            print(f"lightning-scape: {error}", file=sys.stderr)
            damaged += 1
        else:
            print(f"{path}: complete and undamaged, and it loads")
    return 1 if damaged else 0


def _torchrun(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):  # torchrun's own takes seconds
        print(TORCHRUN)
        return 0 if arguments else 2
    # By default torch 2.13 keeps one store for all restarts, whose address only the agents of the first start learn:
    # none that comes later can join (DynamicRendezvousHandler.next_rendezvous).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed.run import main as torchrun

    sys.argv[0] = "lightning-scape torchrun"  # what its help and its errors name
    torchrun(arguments)
    return 0


def _doctor(arguments: list[str]) -> int:
    given = doctor_arguments(arguments)
    from lightning_scape.tools.doctor import run

    return run(given)


def _report(arguments: list[str]) -> int:
    parser = _parser("report")
    parser.add_argument("folder", type=local, help="what was given as `ScapeMonitor(report=...)`")
    given = parser.parse_args(arguments)
    import_matplotlib("`lightning-scape report`")
    from lightning_scape.reporting import History, write_page

    print(write_page(given.folder))
    for odd in History.read(given.folder).passed_over[:MOST_ODD]:
        print(f"lightning-scape: passed over: {odd}", file=sys.stderr)
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "plan": (_plan, "predict step time, bytes and memory, and say whether SCAPE pays"),
    "doctor": (_doctor, "say what does not work here, what is slow, and what to do about it"),
    "report": (_report, "write a run's page again from its figures, after a crash for example"),
    "consolidate": (_consolidate, "make one file of a checkpoint, as it was saved or for plain AdamW"),
    "torchrun": (_torchrun, "torchrun, with which machines may be lost and come back; takes torchrun's options"),
    "verify": (_verify, "read checkpoints as loading does, and say whether they load"),
}
"""By name: what runs it, and one line of help."""


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    0; 1 with the reason on stderr; 2 for a wrong command line; 130 after Ctrl-C.
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "--version":
        print(__version__)
        return 0
    if name in COMMANDS:
        try:
            return COMMANDS[name][0](rest)
        except BrokenPipeError:
            raise  # whoever reads the output has gone
        except KeyboardInterrupt:
            return 130
        except (ValueError, OSError) as error:
            print(f"lightning-scape: {error}", file=sys.stderr)
            return 1
    lines = [f"  {known:<12} {summary}" for known, (_, summary) in COMMANDS.items()]
    print("\n".join(["usage: lightning-scape COMMAND [options]", "", *lines, "", "COMMAND --help says more."]))
    if name in ("-h", "--help"):
        return 0
    print(f"\nerror: COMMAND must be one of {', '.join(COMMANDS)}, got {name!r}.", file=sys.stderr)
    return 2


def _parser(command: str) -> Parser:
    return Parser(command, COMMANDS[command][1])


if __name__ == "__main__":
    sys.exit(main())
