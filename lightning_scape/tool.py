"""``lightning-scape <command>``: the package's own commands, each imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def _plan(arguments: list[str]) -> int:
    from lightning_scape.plan import main

    return main(arguments)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "plan": (_plan, "predict step time, bytes and memory, and say whether SCAPE pays"),
}
"""By name: what runs it, and one line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        return COMMANDS[name][0](rest)
    lines = [f"  {known:<12} {summary}" for known, (_, summary) in COMMANDS.items()]
    print("\n".join(["usage: lightning-scape COMMAND [options]", "", *lines, "", "COMMAND --help says more."]))
    if name in ("-h", "--help"):
        return 0
    print(f"\nerror: COMMAND must be one of {', '.join(COMMANDS)}, got {name!r}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
